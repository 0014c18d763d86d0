//! Routing traces through policies, without I/O.

use std::collections::BTreeSet;

use crate::ExpertId;
use crate::policy::{Policy, Verdict, Visit};
use crate::trace::Trace;

/// What a replay found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Experts asked for.
    pub requested: u64,
    /// Of those, found in a slot.
    pub hits: u64,
    /// Of the others, given a slot.
    pub admitted: u64,
}

impl Tally {
    /// Hits of all requests.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.requested as f64
    }
}

/// Replays `trace` token by token. The first `warm_tokens` fill the slots and are not counted.
pub fn replay(trace: &Trace, policy: &mut dyn Policy, warm_tokens: usize) -> Tally {
    let geometry = trace.geometry();
    let mut tally = Tally::default();
    let mut verdicts = Vec::new();
    for token in 0..trace.len() {
        for layer in 0..geometry.layers {
            let experts = trace.routed(token, layer);
            let (choices, ranks, per_token) = (trace.ranked(token, layer), trace.ranks(), geometry.per_token);
            policy.visit(Visit { layer, experts, choices, ranks, per_token }, &mut verdicts);
            if token < warm_tokens {
                continue;
            }
            tally.requested += verdicts.len() as u64;
            tally.hits += verdicts.iter().filter(|v| **v == Verdict::Hit).count() as u64;
            tally.admitted +=
                verdicts.iter().filter(|v| matches!(v, Verdict::Admitted { .. })).count() as u64;
        }
    }
    tally
}

/// A time that no trace reaches.
const NEVER: u32 = u32::MAX;

/// What no policy can exceed: Belady's optimum over all layers together, knowing the future, with bypass. It keeps
/// the `slots` experts that are used again soonest.
pub fn optimum(trace: &Trace, slots: usize, warm_tokens: usize) -> Tally {
    let geometry = trace.geometry();
    let keys = geometry.layers * geometry.experts;
    let key = |layer: usize, id: ExpertId| layer * geometry.experts + id as usize;
    // The next use of each pick, by walking backwards. Time counts visits.
    let mut next_use = vec![NEVER; trace.len() * geometry.working_set()];
    let mut seen = vec![NEVER; keys];
    for visit in (0..trace.len() * geometry.layers).rev() {
        let (token, layer) = (visit / geometry.layers, visit % geometry.layers);
        for (rank, &id) in trace.routed(token, layer).iter().enumerate() {
            let last = std::mem::replace(&mut seen[key(layer, id)], visit as u32);
            next_use[visit * geometry.per_token + rank] = last;
        }
    }

    let mut tally = Tally::default();
    let mut resident = vec![None; keys];
    let mut by_next_use = BTreeSet::new();
    for visit in 0..trace.len() * geometry.layers {
        let (token, layer) = (visit / geometry.layers, visit % geometry.layers);
        for (rank, &id) in trace.routed(token, layer).iter().enumerate() {
            let key = key(layer, id);
            let hit = resident[key].take().inspect(|&due| {
                by_next_use.remove(&(due, key));
            });
            let mut admitted = false;
            let due = next_use[visit * geometry.per_token + rank];
            if due != NEVER {
                admitted = hit.is_none();
                resident[key] = Some(due);
                by_next_use.insert((due, key));
                if by_next_use.len() > slots
                    && let Some((_, last)) = by_next_use.pop_last()
                {
                    resident[last] = None;
                    admitted &= last != key;
                }
            }
            if token >= warm_tokens {
                tally.requested += 1;
                tally.hits += u64::from(hit.is_some());
                tally.admitted += u64::from(admitted);
            }
        }
    }
    tally
}
