//! Slots that are filled with what earlier runs used, while nothing else is to be read.

use std::collections::VecDeque;
use std::sync::Arc;

use super::drives::Urgency;
use super::ticket::{Key, Ticket};
use super::{Entry, Shared, SlabStore};
use crate::usage::Usage;

/// Bytes of a piece, the longest that a demand waits for behind a read that nobody asked for.
const PIECE: usize = 4 << 20;
/// Experts on their way for each drive.
const EXPERTS: usize = 2;

/// What is still to be read.
#[derive(Default)]
pub(super) struct Warming {
    keys: VecDeque<Key>,
    on_their_way: usize,
}

impl SlabStore {
    /// Begins to fill free slots with what was used most, in idle time: a read that somebody waits for always goes
    /// first, and nothing leaves memory for it. Also tells the policy what to expect. Call it when the weights outside
    /// the experts have been read, from the same drives.
    ///
    /// # Panics
    /// If `usage` is of another model.
    pub fn warm(&self, usage: &Usage) {
        let shared = &*self.shared;
        let layers = shared.state().usage.layers();
        assert_eq!(layers, usage.layers(), "uses of one model");
        {
            let mut state = shared.state();
            for row in 0..usage.layers() {
                state.policy.remember(row, usage.layer(row), usage.tokens());
            }
            let keys = usage.ranked().into_iter().map(|(row, id)| Key { layer: shared.layer(row), id });
            state.warming.keys = keys.take(state.policy.slots()).collect();
        }
        shared.warm_more();
    }

    /// What this store has been asked for.
    pub fn usage(&self) -> Usage {
        self.shared.state().usage.clone()
    }
}

impl Shared {
    /// Issues the next reads that nobody asked for, if there are any and buffers for them.
    pub(super) fn warm_more(&self) {
        let mut state = self.state();
        let state = &mut *state;
        while state.warming.on_their_way < EXPERTS * self.drives.len() {
            let Some(key) = state.warming.keys.pop_front() else { return };
            if state.slots.contains_key(&key) || state.guesses.contains_key(&key) {
                continue;
            }
            let Ok(place) = self.places.of(&self.checkpoint, key) else { continue };
            let row = self.row(key.layer);
            if !state.policy.admit_free(row, key.id) {
                continue;
            }
            let bytes = place.bytes();
            let pieces = (bytes.div_ceil(PIECE), 1);
            let ticket = Arc::new(Ticket::new(key, place, true, pieces, Urgency::Warm));
            if !self.pool.request_if_free(&ticket) {
                // All buffers are in use by those who wait for something.
                state.policy.forget(row, key.id);
                state.warming.keys.push_front(key);
                return;
            }
            state.warming.on_their_way += 1;
            state.counters.bytes_warmed += bytes as u64;
            state.slots.insert(key, Entry::OnItsWay(ticket));
        }
    }
}

impl Warming {
    /// A read that nobody asked for has ended.
    pub(super) fn ended(&mut self) {
        self.on_their_way -= 1;
    }
}
