//! The released geometry, with fewer layers and tokens: layers are alike, so the hit rates are nearly those of the table
//! in `docs/expert-store.md` 3.

use k3_experts::ExpertId;
use k3_experts::plan::HIT_RATES;
use k3_experts::policy::{GlobalLru, LayerLru, Policy, Retention};
use k3_experts::simulate::{replay, replay_batches};
use k3_experts::trace::{Generator, Geometry, RELEASED, Statistics, Trace};

const GEOMETRY: Geometry = Geometry { layers: 6, ..RELEASED };
const WARM: usize = 250;

fn trace(period: Option<usize>) -> Trace {
    let mut generator = Generator::new(GEOMETRY, 1);
    generator.ranks = 128;
    generator.period = period;
    generator.generate(600)
}

fn rate(trace: &Trace, working_sets: f64, policy: impl Fn(usize) -> Box<dyn Policy>) -> f64 {
    let slots = (working_sets * GEOMETRY.working_set() as f64).round() as usize;
    replay(trace, &mut *policy(slots), WARM).hit_rate()
}

fn ours(slots: usize) -> Box<dyn Policy> {
    Box::new(Retention::new(slots, GEOMETRY.layers, GEOMETRY.experts, GEOMETRY.per_token))
}

fn layer_lru(slots: usize) -> Box<dyn Policy> {
    Box::new(LayerLru::new(slots, GEOMETRY.layers))
}

#[test]
fn varied_text() {
    let trace = trace(None);
    let floors = [
        (0.25, 0.12),
        (0.5, 0.21),
        (1.0, 0.345),
        (1.5, 0.42),
        (2.0, 0.475),
        (4.0, 0.585),
        (5.33, 0.635),
        (8.0, 0.715),
    ];
    for (working_sets, floor) in floors {
        let found = rate(&trace, working_sets, ours);
        assert!(found > floor, "{found:.4} at {working_sets} working sets");
    }
    assert_eq!(rate(&trace, 0.5, |slots| Box::new(GlobalLru::new(slots))), 0.0);
}

/// The table that plans are made from is the simulator's.
#[test]
fn planned_hit_rates() {
    let trace = trace(None);
    for (working_sets, planned) in HIT_RATES {
        if (0.25..=8.0).contains(&working_sets) {
            let found = rate(&trace, working_sets, ours);
            assert!((found - planned).abs() < 0.025, "{found:.4}, planned {planned}, at {working_sets}");
        }
    }
}

#[test]
fn repetitive_text() {
    let trace = trace(Some(4));
    for working_sets in [0.5, 1.0, 2.0, 4.0, 8.0] {
        let (ours, lru) = (rate(&trace, working_sets, ours), rate(&trace, working_sets, layer_lru));
        assert!(ours > lru + 0.04, "{ours:.4} against {lru:.4} at {working_sets} working sets");
    }
}

/// `docs/expert-store.md` 1.
#[test]
fn the_generator_meets_what_was_measured() {
    let trace = trace(None);
    let statistics = Statistics::new(&trace);
    let check = |what: &str, found: f64, low: f64, high: f64| {
        assert!((low..=high).contains(&found), "{what}: {found:.3}, expected {low} to {high}");
    };
    for (lag, low, high) in
        [(1, 0.33, 0.37), (2, 0.22, 0.25), (3, 0.16, 0.20), (4, 0.12, 0.16), (8, 0.08, 0.11)]
    {
        check(&format!("reuse at lag {lag}"), statistics.reuse(lag), low, high);
    }
    for (rank, low, high) in
        [(0, 0.63, 0.70), (1, 0.52, 0.58), (3, 0.41, 0.48), (7, 0.30, 0.35), (15, 0.18, 0.24)]
    {
        check(&format!("reuse of rank {rank}"), statistics.reuse_of_rank(1, rank), low, high);
    }
    check("distinct experts of 2 tokens", statistics.distinct(2), 25.5, 27.5);
    check("distinct experts of 12 tokens", statistics.distinct(12), 97.0, 111.0);
    check("dedup of 32 tokens", statistics.dedup(32), 2.4, 2.8);
    check("dedup of 64 tokens", statistics.dedup(64), 3.2, 3.6);
    check("effective experts of 64 tokens", statistics.effective(64), 185.0, 210.0);
}

/// Routing for which the policy's constants were not chosen: other geometries, batches, and scores that drift slowly, so
/// that the last token is all there is to go by. Recency alone may not be clearly better on any of it.
#[test]
fn other_routing() {
    let small = Geometry { layers: 8, experts: 16, per_token: 4 };
    let middle = Geometry { layers: 6, experts: 128, per_token: 8 };
    let generated = |geometry: Geometry, period, ranks| {
        Generator { ranks, period, ..Generator::new(geometry, 5) }.generate(800)
    };
    let check = |what: &str, trace: &Trace, batch: usize| {
        let Geometry { layers, experts, per_token } = trace.geometry();
        for working_sets in [0.5, 1.0, 1.5, 2.0, 3.0] {
            let slots = (working_sets * trace.geometry().working_set() as f64) as usize;
            let rate = |policy: &mut dyn Policy| replay_batches(trace, policy, 400, batch).hit_rate();
            let ours = rate(&mut Retention::new(slots, layers, experts, per_token));
            let lru = rate(&mut LayerLru::new(slots, layers));
            assert!(ours > lru - 0.005, "{ours:.4} against {lru:.4}: {what}, {working_sets} working sets");
        }
    };
    check("16 experts", &generated(small, None, 16), 1);
    check("16 experts, what nearly came unknown", &generated(small, None, 4), 1);
    check("16 experts, repetitive", &generated(small, Some(4), 16), 1);
    check("128 experts", &generated(middle, None, 64), 1);
    check("128 experts, a batch", &generated(middle, Some(4), 64), 4);
    check("slow, 16 experts", &drifting(small, 16), 1);
    check("slow, 128 experts", &drifting(middle, 64), 1);
    check("slow, what nearly came unknown", &drifting(middle, 8), 1);
}

/// Each score loses a twentieth of itself with each token, and nothing else tells what comes.
fn drifting(geometry: Geometry, ranks: usize) -> Trace {
    let mut state = 9_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 24) - 0.5
    };
    let mut scores = vec![0.0; geometry.layers * geometry.experts];
    let mut trace = Trace::new(geometry, ranks);
    for _ in 0..800 {
        scores.iter_mut().for_each(|score| *score = 0.95 * *score + uniform());
        let ranked = scores.chunks(geometry.experts).flat_map(|scores| {
            let mut ids: Vec<ExpertId> = (0..geometry.experts as ExpertId).collect();
            ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
            ids.truncate(ranks);
            ids
        });
        trace.push(&ranked.collect::<Vec<_>>());
    }
    trace
}
