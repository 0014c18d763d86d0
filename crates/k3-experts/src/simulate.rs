//! Routing traces through policies, without I/O.

use std::collections::BTreeSet;

use crate::ExpertId;
use crate::policy::{Policy, Verdict, Visit};
use crate::trace::{Geometry, Trace};

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
    replay_batches(trace, policy, warm_tokens, 1)
}

/// The same with `batch` tokens at once, as of so many sequences whose tokens the trace holds in turn. An expert that
/// several of them use is asked for once. What is left of the trace, less than a batch, is not replayed.
///
/// # Panics
/// If `batch` is 0.
pub fn replay_batches(trace: &Trace, policy: &mut dyn Policy, warm_tokens: usize, batch: usize) -> Tally {
    let Geometry { layers, per_token, .. } = trace.geometry();
    let mut tally = Tally::default();
    let (mut verdicts, mut experts, mut choices) = (Vec::new(), Vec::new(), Vec::new());
    for first in (0..(trace.len() + 1).saturating_sub(batch)).step_by(batch) {
        for layer in 0..layers {
            choices.clear();
            (first..first + batch).for_each(|token| choices.extend_from_slice(trace.ranked(token, layer)));
            // The most wanted first: by the best rank, then by number.
            experts.clear();
            for rank in 0..per_token {
                let before = experts.len();
                for id in choices.iter().skip(rank).step_by(trace.ranks()) {
                    if !experts.contains(id) {
                        experts.push(*id);
                    }
                }
                experts[before..].sort_unstable();
            }
            let visit =
                Visit { layer, experts: &experts, choices: &choices, ranks: trace.ranks(), per_token };
            policy.visit(visit, &mut verdicts);
            if first < warm_tokens {
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
const NEVER: usize = usize::MAX;

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
            let last = std::mem::replace(&mut seen[key(layer, id)], visit);
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
