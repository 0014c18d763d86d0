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
            Some(buffer) => self.start_guess(inner, ticket, buffer),
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

    fn start_guess(&self, mut inner: MutexGuard<'_, Inner>, ticket: &Arc<Ticket>, buffer: BytesMut) {
        inner.reading += 1;
        inner.guesses += 1;
        inner.bytes_guessed += ticket.place.bytes() as u64;
        drop(inner);
        self.drives.issue(ticket, buffer);
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

    /// Called by somebody who waits. If nothing is being read because the callers keep all buffers, one more is made:
    /// a wait without end would be worse.
    pub(super) fn relieve(&self) {
        let mut inner = self.inner();
        if inner.reading > 0 {
            return;
        }
        let Some(ticket) = next_wanted(&mut inner.parked) else { return };
        let mut buffer = self.take(&mut inner);
        if buffer.is_none() {
            inner.over_budget += 1;
            buffer = self.allocate(&mut inner);
        }
        let Some(buffer) = buffer else {
            drop(inner);
            ticket.complete(&Err(SlotReadError::NoMemory { bytes: self.slot_bytes }));
            return;
        };
        inner.reading += 1;
        drop(inner);
        self.drives.issue(&ticket, buffer);
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
        if inner.allocated > self.limit {
            inner.allocated -= 1;
            return;
        }
        match next_wanted(&mut inner.parked) {
            Some(ticket) => {
                inner.reading += 1;
                drop(inner);
                self.drives.issue(&ticket, buffer);
            }
            None => match inner.wishes.pop_front() {
                Some(wish) => self.start_guess(inner, &wish, buffer),
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
