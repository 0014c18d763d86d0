//! A read of an expert that is under way.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;

use super::drives::Urgency;
use super::place::Place;
use super::pool::Filled;
use super::reader::SlotReadError;
use crate::{ExpertError, ExpertId};

/// An expert of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// 0-based decoder layer.
    pub(super) layer: usize,
    pub(super) id: ExpertId,
}

impl Key {
    pub(super) fn unreadable(
        self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ExpertError {
        ExpertError::Read { layer: self.layer, expert: self.id, source: source.into() }
    }
}

/// What a waiter gets.
pub(super) type Delivery = (Key, Result<Arc<Filled>, SlotReadError>);

/// Someone who asked for the expert.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) id: ExpertId,
    pub(super) sender: Sender<Delivery>,
    /// Nobody listens any more.
    pub(super) abandoned: Arc<AtomicBool>,
}

/// A read of an expert: who waits for it, and which pieces have come.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) place: Place,
    /// Whether it is read to stay, and not for its waiters alone.
    keep: bool,
    /// Pieces wanted.
    pieces: AtomicUsize,
    /// The least bytes of one.
    least: usize,
    pub(super) urgency: Urgency,
    /// A thread has begun to read it.
    has_begun: AtomicBool,
    waiters: Mutex<Vec<Waiter>>,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Of the slot, in order. `None`: being read.
    chunks: Vec<Option<BytesMut>>,
    missing: usize,
    error: Option<SlotReadError>,
}

/// What became of a ticket's buffer.
pub(super) enum Ended {
    /// Other pieces are still being read.
    NotYet,
    /// All pieces have come, or one did not; the buffer is whole again.
    Now(BytesMut, Option<SlotReadError>),
}

impl Ticket {
    /// `pieces` are at least `least` bytes each.
    pub(super) fn new(
        key: Key,
        place: Place,
        keep: bool,
        (pieces, least): (usize, usize),
        urgency: Urgency,
    ) -> Self {
        let (pieces, waiters, progress) = (AtomicUsize::new(pieces), Mutex::default(), Mutex::default());
        Self {
            key,
            place,
            keep,
            pieces,
            least,
            urgency,
            has_begun: AtomicBool::new(false),
            waiters,
            progress,
        }
    }

    /// A thread begins to read a piece of it. Called under the lock of the queue that the piece was in.
    pub(super) fn begin(&self) {
        self.has_begun.store(true, Relaxed);
    }

    /// Whether any piece of it has been read or is being read.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.load(Relaxed)
    }

    /// Into how many pieces it is cut when it is issued.
    pub(super) fn set_pieces(&self, pieces: usize) {
        self.pieces.store(pieces, Relaxed);
    }

    pub(super) fn join(&self, waiter: Waiter) {
        self.waiters().push(waiter);
    }

    fn waiters(&self) -> MutexGuard<'_, Vec<Waiter>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anyone still has a use for it.
    pub(super) fn is_wanted(&self) -> bool {
        self.keep || self.waiters().iter().any(|waiter| !waiter.abandoned.load(Relaxed))
    }

    /// Tells all who wait.
    pub(super) fn complete(&self, result: &Result<Arc<Filled>, SlotReadError>) {
        for waiter in self.waiters().drain(..) {
            // One that is gone does not mind.
            let _ = waiter.sender.send((Key { id: waiter.id, ..self.key }, result.clone()));
        }
    }

    /// Cuts a buffer into what is read at once. Returns number, chunk, segment and offset in the segment of each.
    pub(super) fn cut(&self, mut buffer: BytesMut, align: usize) -> Vec<(usize, BytesMut, usize, usize)> {
        let bytes = self.place.bytes();
        let wanted = bytes.div_ceil(self.pieces.load(Relaxed).max(1));
        let piece = wanted.max(self.least.min(bytes)).max(1).next_multiple_of(align);
        let mut jobs = Vec::new();
        let mut progress = self.progress();
        for (index, segment) in self.place.segments.iter().enumerate() {
            for begin in (0..segment.needed).step_by(piece) {
                let end = (begin + piece).min(segment.len);
                jobs.push((progress.chunks.len(), buffer.split_to(end - begin), index, begin));
                progress.chunks.push(None);
                if end == segment.len {
                    break;
                }
            }
            // Padding that no piece covers.
            let covered = segment.needed.div_ceil(piece) * piece;
            if covered < segment.len {
                progress.chunks.push(Some(buffer.split_to(segment.len - covered)));
            }
        }
        progress.missing = jobs.len();
        progress.chunks.push(Some(buffer));
        jobs
    }

    /// A chunk is back.
    pub(super) fn put(&self, number: usize, chunk: BytesMut, result: Result<(), SlotReadError>) -> Ended {
        let mut progress = self.progress();
        progress.chunks[number] = Some(chunk);
        progress.missing -= 1;
        if let Err(error) = result {
            progress.error = Some(error);
        }
        if progress.missing > 0 {
            return Ended::NotYet;
        }
        // Neighbours of one allocation: nothing is copied.
        let whole = std::mem::take(&mut progress.chunks).into_iter().flatten().reduce(|mut whole, chunk| {
            whole.unsplit(chunk);
            whole
        });
        Ended::Now(whole.unwrap_or_default(), progress.error.take())
    }
}
