//! The released geometry, with fewer layers and tokens: layers are alike, so the hit rates are nearly those of the table
//! in `docs/expert-store.md` 3.

use k3_experts::plan::HIT_RATES;
use k3_experts::policy::{GlobalLru, LayerLru, Policy, Retention};
use k3_experts::simulate::replay;
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
