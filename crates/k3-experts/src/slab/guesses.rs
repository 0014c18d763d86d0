//! Reads on a guess: issued, taken back, and dropped when their layer has passed.

use std::sync::Arc;

use super::drives::{Drives, Job, Urgency};
use super::pool::Filled;
use super::ticket::{Key, Ticket};
use super::{Entry, Shared, SlabOptions, State};
use crate::ExpertId;

impl Shared {
    /// Issues guesses at what `layer` will ask for, the most likely first, as far as there may be more.
    pub(super) fn guess(&self, layer: usize, experts: &[ExpertId], options: &SlabOptions) {
        let mut state = self.state();
        let state = &mut *state;
        for &id in experts {
            let Ok(key) = self.key(layer, id) else { continue };
            if state.guesses.len() >= options.guesses {
                break;
            }
            if state.slots.contains_key(&key) || state.guesses.contains_key(&key) {
                continue;
            }
            let Ok(place) = self.places.of(&self.checkpoint, key) else { continue };
            let Some(left) = state.guess_bytes.checked_sub(place.bytes() as u64) else { break };
            state.guess_bytes = left;
            let pieces = (options.reads_in_flight, options.piece_bytes);
            let ticket = Arc::new(Ticket::new(key, place, true, pieces, Urgency::Guess));
            self.pool.wish(&ticket);
            state.guesses.insert(key, Entry::OnItsWay(ticket));
        }
    }

    /// Takes back a guess of which nothing has been read. Of another, what is still queued becomes a demand.
    pub(super) fn take_back(&self, ticket: &Arc<Ticket>) -> bool {
        match self.withdraw(ticket) {
            Ok(()) => true,
            Err(rest) => {
                self.drives.demand(rest);
                false
            }
        }
    }

    /// Ends a guess of which nothing has been read. Of another it takes what is still queued out of the queues, and gives
    /// it to the caller.
    fn withdraw(&self, ticket: &Arc<Ticket>) -> Result<(), Vec<Job>> {
        if self.pool.take_back(ticket) {
            return Ok(());
        }
        let taken = self.drives.take(ticket);
        // One that has come entirely has begun too.
        if ticket.has_begun() {
            return Err(taken);
        }
        let unread = self.give_up(taken);
        debug_assert!(unread > 0, "a guess that is not queued has begun");
        self.pool.unguess(ticket.place.bytes() as u64, true);
        Ok(())
    }

    /// Ends a read that nobody wants any more, as far as it has not begun. Returns the bytes that will not be read.
    pub(super) fn give_up(&self, taken: Vec<Job>) -> u64 {
        let (bytes, buffer) = Drives::give_up(taken);
        if let Some(buffer) = buffer {
            drop(Filled::new(buffer, self.pool.clone()));
            self.pool.ended();
        }
        bytes as u64
    }

    /// Drops guesses that nobody asked for.
    pub(super) fn expire(&self, state: &mut State, is_over: impl Fn(&Key, &Entry) -> bool) {
        let State { guesses, lookahead, counters, guess_bytes, .. } = state;
        guesses.retain(|key, entry| {
            if !is_over(key, entry) {
                return true;
            }
            let bytes = self.places.of(&self.checkpoint, *key).map_or(0, |place| place.bytes() as u64);
            let unread = match entry {
                Entry::Here(_) => 0,
                Entry::OnItsWay(ticket) => match self.withdraw(ticket) {
                    Ok(()) => bytes,
                    Err(rest) => {
                        let unread = self.give_up(rest);
                        self.pool.unguess(unread, false);
                        unread
                    }
                },
            };
            // What was not read has cost nothing.
            *guess_bytes = guess_bytes.saturating_add(unread);
            counters.bytes_wasted += bytes - unread;
            if unread < bytes {
                lookahead.judged(false);
            }
            false
        });
    }

    /// Drops the guesses that have come, for their buffers. Returns whether there were any.
    pub(super) fn give_up_guesses(&self) -> bool {
        let mut state = self.state();
        let before = state.guesses.len();
        self.expire(&mut state, |_, entry| matches!(entry, Entry::Here(_)));
        state.guesses.len() < before
    }
}
