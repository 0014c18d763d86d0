use k3_experts::ExpertId;
use k3_experts::policy::{GlobalLru, LayerLru, Policy, Retention, Verdict, spread};
use k3_experts::simulate::{Tally, optimum, replay, replay_batches};
use k3_experts::trace::{Generator, Geometry};

use crate::{sequence, visit};

const EMPTY: Verdict = Verdict::Admitted { evicted: None };

fn evicts(layer: usize, id: ExpertId) -> Verdict {
    Verdict::Admitted { evicted: Some((layer, id)) }
}

const SMALL: Geometry = Geometry { layers: 5, experts: 24, per_token: 4 };

fn policies(slots: usize, geometry: Geometry) -> Vec<Box<dyn Policy>> {
    let Geometry { layers, experts, per_token } = geometry;
    vec![
        Box::new(GlobalLru::new(slots)),
        Box::new(LayerLru::new(slots, layers)),
        Box::new(Retention::new(slots, layers, experts, per_token)),
    ]
}

#[test]
fn a_global_lru_below_the_working_set_hits_nothing() {
    // Every token the same: the best case there is.
    let mut same = k3_experts::trace::Trace::new(SMALL, SMALL.per_token);
    let token: Vec<ExpertId> =
        (0..SMALL.layers).flat_map(|l| (0..4).map(move |i| (l + i) as ExpertId)).collect();
    (0..20).for_each(|_| same.push(&token));
    let ws = SMALL.working_set();
    assert_eq!(replay(&same, &mut GlobalLru::new(ws - 1), 0).hits, 0);
    assert_eq!(replay(&same, &mut GlobalLru::new(ws), 0).hits, 19 * ws as u64);
    // Slots per layer keep what they can hold.
    assert_eq!(replay(&same, &mut LayerLru::new(ws / 2, SMALL.layers), 0).hits, 19 * ws as u64 / 2);
}

#[test]
fn a_layer_lru_admits_by_rank_and_spares_the_current_set() {
    let mut lru = LayerLru::new(3, 1);
    assert_eq!(visit(&mut lru, 0, &[1, 2]), [EMPTY, EMPTY]);
    assert_eq!(visit(&mut lru, 0, &[2, 3]), [Verdict::Hit, EMPTY]);
    // 1 is the oldest; then only members remain.
    assert_eq!(visit(&mut lru, 0, &[4, 3, 5]), [evicts(0, 1), Verdict::Hit, evicts(0, 2)]);
    assert_eq!(
        visit(&mut lru, 0, &[6, 7, 8, 9]),
        [evicts(0, 5), evicts(0, 3), evicts(0, 4), Verdict::Bypassed]
    );
}

#[test]
fn retention_bypasses_what_scores_lower() {
    let mut policy = Retention::new(2, 1, 16, 2);
    assert_eq!(visit(&mut policy, 0, &[1, 2]), [EMPTY, EMPTY]);
    for _ in 0..50 {
        assert_eq!(visit(&mut policy, 0, &[1, 2]), [Verdict::Hit, Verdict::Hit]);
    }
    // What came fifty times outscores what came once: both stay.
    let verdicts = visit(&mut policy, 0, &[3, 4]);
    assert_eq!(verdicts[1], Verdict::Bypassed);
    assert_eq!(visit(&mut policy, 0, &[1, 2])[0], Verdict::Hit);
}

#[test]
fn retention_learns_a_period() {
    // A B C A B C ... with room for two of three: recency alone hits nothing.
    let check = |period: ExpertId, slots: usize| {
        let ids: Vec<ExpertId> = (0..900).map(|t| t % period).collect();
        let trace = sequence(40, &ids);
        assert_eq!(replay(&trace, &mut LayerLru::new(slots, 1), 300).hits, 0);
        let rate = replay(&trace, &mut Retention::new(slots, 1, 40, 1), 300).hit_rate();
        let best = optimum(&trace, slots, 300).hit_rate();
        assert!(rate > best - 0.03, "{rate:.3}, and the optimum {best:.3}: {slots} slots, {period} experts");
    };
    check(3, 1);
    check(3, 2);
    check(5, 2);
    check(5, 3);
    check(5, 4);
    check(8, 5);
}

/// A batch is one visit: what several tokens use is asked for once, in the order of the best rank.
#[test]
fn tokens_at_once() {
    let mut trace = k3_experts::trace::Trace::new(Geometry { layers: 1, experts: 9, per_token: 2 }, 3);
    [[5, 1, 8], [1, 7, 8], [7, 2, 8], [5, 3, 8], [0, 1, 2]].iter().for_each(|token| trace.push(token));
    // 1 5 7, then 5 7 2 3; the last token is left over.
    let tally = replay_batches(&trace, &mut LayerLru::new(3, 1), 0, 2);
    assert_eq!((tally.requested, tally.hits, tally.admitted), (7, 2, 4));
    let tally = replay_batches(&trace, &mut LayerLru::new(3, 1), 2, 2);
    assert_eq!((tally.requested, tally.hits, tally.admitted), (4, 2, 1));
    assert_eq!(replay_batches(&trace, &mut LayerLru::new(3, 1), 0, 6), Tally::default());
}

#[test]
fn a_forgotten_expert_leaves_its_slot() {
    for mut policy in policies(2, Geometry { layers: 1, experts: 16, per_token: 2 }) {
        assert_eq!(visit(&mut *policy, 0, &[1, 2]), [EMPTY, EMPTY]);
        policy.forget(0, 1);
        assert_eq!(visit(&mut *policy, 0, &[2, 3]), [Verdict::Hit, EMPTY], "{policy:?}");
    }
}

/// Keeps its own account of what must be resident, and compares.
#[test]
fn verdicts_are_consistent_for_any_number_of_slots() {
    let trace = Generator::new(SMALL, 3).generate(60);
    for slots in [0, 1, 3, 4, 5, 17, 20, 60, 120, 500] {
        for mut policy in policies(slots, SMALL) {
            let mut resident = std::collections::HashSet::new();
            for token in 0..trace.len() {
                for layer in 0..SMALL.layers {
                    let experts = trace.routed(token, layer);
                    let verdicts = visit(&mut *policy, layer, experts);
                    for (&id, verdict) in experts.iter().zip(verdicts) {
                        assert_eq!(
                            verdict == Verdict::Hit,
                            resident.contains(&(layer, id)),
                            "{slots} {policy:?}"
                        );
                        if let Verdict::Admitted { evicted } = verdict {
                            if let Some(key) = evicted {
                                assert!(resident.remove(&key), "evicted what was not there");
                                let member = key.0 == layer && experts.contains(&key.1);
                                assert!(!member || format!("{policy:?}").starts_with("GlobalLru"));
                            }
                            resident.insert((layer, id));
                        }
                        assert!(resident.len() <= slots);
                    }
                }
            }
        }
    }
}

#[test]
fn slots_are_spread_without_rest() {
    let check =
        |slots, layers, expected: &[usize]| assert_eq!(spread(slots, layers).collect::<Vec<_>>(), expected);
    check(0, 3, &[0, 0, 0]);
    check(6, 3, &[2, 2, 2]);
    check(4, 3, &[1, 1, 2]);
    check(1, 2, &[0, 1]);
}

/// The most hits of any sequence of decisions: after each use keep any set of at most `slots` that is within what was
/// kept and what was used.
fn most_hits(ids: &[ExpertId], slots: usize, kept: u32) -> u64 {
    let Some((&id, rest)) = ids.split_first() else { return 0 };
    let hit = u64::from(kept >> id & 1 == 1);
    let at_hand = kept | 1 << id;
    let mut best = 0;
    let mut subset = at_hand;
    loop {
        if subset.count_ones() as usize <= slots {
            best = best.max(most_hits(rest, slots, subset));
        }
        if subset == 0 {
            return hit + best;
        }
        subset = (subset - 1) & at_hand;
    }
}

#[test]
fn the_optimum_is_what_exhaustive_search_finds() {
    let mut state = 1_u64;
    let mut random = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for case in 0..60 {
        let ids: Vec<ExpertId> = (0..8).map(|_| random(4) as ExpertId).collect();
        for slots in 0..4 {
            let found = optimum(&sequence(4, &ids), slots, 0).hits;
            assert_eq!(found, most_hits(&ids, slots, 0), "case {case}: {ids:?} with {slots} slots");
        }
    }
}

#[test]
fn no_policy_beats_the_optimum() {
    let trace = Generator::new(SMALL, 11).generate(100);
    for slots in [1, 5, 10, 20, 40, 80] {
        let best = optimum(&trace, slots, 10);
        for mut policy in policies(slots, SMALL) {
            assert!(replay(&trace, &mut *policy, 10).hits <= best.hits, "{policy:?}");
        }
    }
}
