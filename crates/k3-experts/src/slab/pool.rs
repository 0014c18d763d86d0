//! Buffers under the budget, and the reads that wait for one.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};

use super::drives::Drives;
use super::reader::SlotReadError;
use super::ticket::Ticket;

/// An expert's bytes in a buffer that goes back to its pool when nobody reads it any more.
pub(super) struct Filled {
    buffer: BytesMut,
    pool: Arc<Pool>,
}

impl Filled {
    pub(super) fn new(buffer: BytesMut, pool: Arc<Pool>) -> Self {
        Self { buffer, pool }
    }

    /// Parts of the buffer, each of which keeps it.
    pub(super) fn parts(self: &Arc<Self>, ranges: [Range<usize>; 6]) -> [Bytes; 6] {
        struct Lease(Arc<Filled>);
        impl AsRef<[u8]> for Lease {
            fn as_ref(&self) -> &[u8] {
                &self.0.buffer
            }
        }
        let whole = Bytes::from_owner(Lease(self.clone()));
        ranges.map(|range| whole.slice(range))
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

impl std::fmt::Debug for Filled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filled").field("bytes", &self.buffer.len()).finish_non_exhaustive()
    }
}

/// The buffers.
pub(super) struct Pool {
    limit: usize,
    slot_bytes: usize,
    align: usize,
    drives: Arc<Drives>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    free: Vec<BytesMut>,
    allocated: usize,
    /// Reads without a buffer, oldest first.
    parked: VecDeque<Arc<Ticket>>,
    /// Guesses without a buffer. They get one when no read waits for it.
    wishes: VecDeque<Arc<Ticket>>,
    guesses: u64,
    bytes_guessed: u64,
    /// Reads with one.
    reading: usize,
    over_budget: u64,
}

impl Pool {
    pub(super) fn new(limit: usize, slot_bytes: usize, align: usize, drives: Arc<Drives>) -> Self {
        Self { limit, slot_bytes, align: align.max(1), drives, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn allocated(&self) -> usize {
        self.inner().allocated
    }

    pub(super) fn over_budget(&self) -> u64 {
        self.inner().over_budget
    }

    /// Starts a read as soon as there is a buffer for it.
    pub(super) fn request(&self, ticket: Arc<Ticket>) {
        let mut inner = self.inner();
        let buffer = if inner.parked.is_empty() { self.take(&mut inner) } else { None };
        match buffer {
            Some(buffer) => {
                inner.reading += 1;
                drop(inner);
                self.drives.issue(&ticket, buffer);
            }
            None => inner.parked.push_back(ticket),
        }
    }

    /// Starts a read that nobody asked for, if there is a buffer to spare.
    pub(super) fn request_if_free(&self, ticket: &Arc<Ticket>) -> bool {
        let mut inner = self.inner();
        if !(inner.parked.is_empty() && inner.wishes.is_empty()) {
            return false;
        }
        let Some(buffer) = self.take(&mut inner) else { return false };
        inner.reading += 1;
        drop(inner);
        self.drives.issue(ticket, buffer);
        true
    }

    /// Starts a guess as soon as there is a buffer that no read waits for.
    pub(super) fn wish(&self, ticket: &Arc<Ticket>) {
        let mut inner = self.inner();
        let is_first = inner.parked.is_empty() && inner.wishes.is_empty();
        let buffer = if is_first { self.take(&mut inner) } else { None };
        match buffer {
            Some(buffer) => self.start_guess(&mut inner, ticket, buffer),
            None => inner.wishes.push_back(ticket.clone()),
        }
    }

    /// Takes a guess back that was not started. Returns whether it was there.
    pub(super) fn take_back(&self, ticket: &Arc<Ticket>) -> bool {
        let mut inner = self.inner();
        let before = inner.wishes.len();
        inner.wishes.retain(|wish| !Arc::ptr_eq(wish, ticket));
        inner.wishes.len() < before
    }

    fn start_guess(&self, inner: &mut Inner, ticket: &Arc<Ticket>, buffer: BytesMut) {
        inner.reading += 1;
        inner.guesses += 1;
        inner.bytes_guessed += ticket.place.bytes() as u64;
        // Under the lock: a demand that finds the guess here no more finds it in the queues, where it hurries it.
        self.drives.issue(ticket, buffer);
    }

    /// Of a guess that was started, so many bytes will not be read; `is_all` if none will.
    pub(super) fn unguess(&self, bytes: u64, is_all: bool) {
        let mut inner = self.inner();
        inner.guesses -= u64::from(is_all);
        inner.bytes_guessed -= bytes;
    }

    /// Guesses that were started, and their bytes.
    pub(super) fn guessed(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.guesses, inner.bytes_guessed)
    }

    /// A read has ended.
    pub(super) fn ended(&self) {
        self.inner().reading -= 1;
    }

    /// Whether nothing is being read.
    pub(super) fn is_idle(&self) -> bool {
        self.inner().reading == 0
    }

    /// Whether reads wait for a buffer.
    pub(super) fn has_parked(&self) -> bool {
        !self.inner().parked.is_empty()
    }

    /// Called by somebody who waits. If nothing is being read because the callers keep all buffers, one more is made:
    /// a wait without end would be worse. Returns the read that there is no memory for, which the caller has to end.
    #[must_use]
    pub(super) fn relieve(&self) -> Option<(Arc<Ticket>, SlotReadError)> {
        let mut inner = self.inner();
        if inner.reading > 0 {
            return None;
        }
        let ticket = next_wanted(&mut inner.parked)?;
        let mut buffer = self.take(&mut inner);
        if buffer.is_none() {
            buffer = self.allocate(&mut inner);
            inner.over_budget += u64::from(buffer.is_some());
        }
        let Some(buffer) = buffer else {
            return Some((ticket, SlotReadError::NoMemory { bytes: self.slot_bytes }));
        };
        inner.reading += 1;
        drop(inner);
        self.drives.issue(&ticket, buffer);
        None
    }

    /// A buffer that is free, or a new one under the limit.
    fn take(&self, inner: &mut Inner) -> Option<BytesMut> {
        if let Some(buffer) = inner.free.pop() {
            return Some(buffer);
        }
        if inner.allocated < self.limit { self.allocate(inner) } else { None }
    }

    fn allocate(&self, inner: &mut Inner) -> Option<BytesMut> {
        let buffer = aligned(self.slot_bytes, self.align)?;
        inner.allocated += 1;
        Some(buffer)
    }

    /// Takes a buffer back, for the read that has waited longest or for later.
    fn give(&self, buffer: BytesMut) {
        let mut inner = self.inner();
        let waits = next_wanted(&mut inner.parked);
        // One beyond the limit goes on as long as reads wait: they would need another.
        if waits.is_none() && inner.allocated > self.limit {
            inner.allocated -= 1;
            return;
        }
        match waits {
            Some(ticket) => {
                inner.reading += 1;
                drop(inner);
                self.drives.issue(&ticket, buffer);
            }
            None => match inner.wishes.pop_front() {
                Some(wish) => self.start_guess(&mut inner, &wish, buffer),
                None => inner.free.push(buffer),
            },
        }
    }
}

/// Memory that begins at a multiple of `align`, if there is any.
pub(super) fn aligned(len: usize, align: usize) -> Option<BytesMut> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len + align - 1).ok()?;
    bytes.resize(len + align - 1, 0_u8);
    let lead = bytes.as_ptr().align_offset(align);
    let mut buffer = BytesMut::from(Bytes::from(bytes));
    let _ = buffer.split_to(lead);
    buffer.truncate(len);
    Some(buffer)
}

/// The oldest read that somebody still has a use for.
fn next_wanted(parked: &mut VecDeque<Arc<Ticket>>) -> Option<Arc<Ticket>> {
    std::iter::from_fn(|| parked.pop_front()).find(|ticket| ticket.is_wanted())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;
    use std::sync::mpsc::{Sender, channel};

    use super::super::drives::Urgency;
    use super::super::place::{Place, Segment};
    use super::super::reader::Reader;
    use super::super::ticket::{Delivery, Key, Waiter};
    use super::*;
    use crate::ExpertId;

    #[derive(Debug)]
    struct Nothing;

    impl Reader for Nothing {
        fn read_at(&self, _: usize, _: &mut [u8], _: u64) -> io::Result<usize> {
            Ok(0)
        }
        fn path(&self, _: usize) -> PathBuf {
            PathBuf::new()
        }
    }

    /// A read of one byte that somebody waits for.
    fn wanted(id: ExpertId, sender: Sender<Delivery>) -> Arc<Ticket> {
        let segment = Segment { shard: 0, offset: 0, len: 1, needed: 1 };
        let place = Place { segments: vec![segment], parts: std::array::from_fn(|_| 0..0) };
        let ticket = Arc::new(Ticket::new(Key { layer: 1, id }, place, true, (1, 1), Urgency::Demand));
        ticket.join(Waiter { id, sender, abandoned: Arc::default() });
        ticket
    }

    /// To free it and make another for the next read would be work for nothing, and there would be no fewer of them.
    #[test]
    fn a_buffer_beyond_the_budget_goes_to_the_read_that_waits() {
        let drives = Arc::new(Drives::new(Arc::new(Nothing), vec![0], &[], 1));
        let pool = Pool::new(1, 1, 1, drives);
        let (sender, _receiver) = channel();
        let tickets = [2, 3, 4].map(|id| wanted(id, sender.clone()));
        tickets.iter().for_each(|ticket| pool.request(ticket.clone()));
        // The caller keeps the only buffer, and gets one more.
        pool.ended();
        assert!(pool.relieve().is_none());
        assert_eq!((pool.allocated(), pool.over_budget(), pool.has_parked()), (2, 1, true));
        pool.ended();
        pool.give(BytesMut::zeroed(1));
        assert_eq!((pool.allocated(), pool.over_budget(), pool.has_parked()), (2, 1, false));
        // Nobody waits for the next.
        pool.ended();
        pool.give(BytesMut::zeroed(1));
        assert_eq!((pool.allocated(), pool.is_idle()), (1, true));
    }

    /// Only who holds the store can take its expert out of the tables: the next to ask for it would wait for ever.
    #[test]
    fn a_read_without_memory_is_given_back_to_be_ended() {
        let drives = Arc::new(Drives::new(Arc::new(Nothing), vec![0], &[], 1));
        let pool = Pool::new(1, isize::MAX as usize, 1, drives);
        let (sender, receiver) = channel();
        let ticket = wanted(2, sender);
        pool.request(ticket.clone());
        let (found, error) = pool.relieve().unwrap();
        assert!(Arc::ptr_eq(&found, &ticket) && matches!(error, SlotReadError::NoMemory { .. }), "{error}");
        receiver.try_recv().unwrap_err();
        assert_eq!((pool.allocated(), pool.over_budget()), (0, 0));
        assert!(pool.relieve().is_none() && pool.is_idle());
    }
}
