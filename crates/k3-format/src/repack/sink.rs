//! Between the thread that makes the bytes of a shard and the one that writes them: a few buffers that go round.

use std::sync::mpsc::{Receiver, SyncSender};

use crate::read::Buffer;

use super::error::RepackError;

/// What the writing thread gets.
pub(super) enum Piece {
    /// The next `len` bytes.
    Bytes { buffer: Buffer, len: usize },
    /// The shard is whole.
    End,
}

/// Takes the bytes of a shard in order. What is written goes round in a fixed number of buffers, so that making the
/// next bytes and writing the last ones overlap in bounded memory.
pub(super) struct Sink {
    full: SyncSender<Piece>,
    empty: Receiver<Buffer>,
    current: Option<(Buffer, usize)>,
    capacity: usize,
    discard: bool,
}

impl Sink {
    /// A sink whose buffers, all of `capacity` bytes, come from `empty`.
    pub(super) fn new(full: SyncSender<Piece>, empty: Receiver<Buffer>, capacity: usize) -> Self {
        Self { full, empty, current: None, capacity, discard: false }
    }

    /// The most bytes that [`Sink::fill`] can lend.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whatever comes now is not written, and the shard will not be finished.
    pub(super) fn discard(&mut self) {
        self.discard = true;
    }

    /// Lends the next `len` bytes of the shard, at most [`Sink::capacity`], to be filled by `f`. Their old content is
    /// arbitrary.
    pub(super) fn fill<T>(
        &mut self,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> Result<T, RepackError>,
    ) -> Result<T, RepackError> {
        assert!(len <= self.capacity, "{len} bytes of a buffer of {}", self.capacity);
        if self.current.as_ref().is_some_and(|(_, filled)| self.capacity - filled < len) {
            self.send()?;
        }
        if self.current.is_none() {
            self.current = Some((self.empty.recv().map_err(|_| RepackError::WriterEnded)?, 0));
        }
        let Some((buffer, filled)) = &mut self.current else { return Err(RepackError::WriterEnded) };
        let result = f(&mut buffer.as_mut()[*filled..*filled + len])?;
        if !self.discard {
            *filled += len;
        }
        Ok(result)
    }

    /// Appends bytes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), RepackError> {
        for piece in bytes.chunks(self.capacity) {
            self.fill(piece.len(), |out| {
                out.copy_from_slice(piece);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// All bytes were given. Nothing is finished if some were discarded.
    pub(super) fn finish(mut self) -> Result<(), RepackError> {
        if self.discard {
            return Ok(());
        }
        self.send()?;
        self.full.send(Piece::End).map_err(|_| RepackError::WriterEnded)
    }

    fn send(&mut self) -> Result<(), RepackError> {
        let Some((buffer, len)) = self.current.take() else { return Ok(()) };
        self.full.send(Piece::Bytes { buffer, len }).map_err(|_| RepackError::WriterEnded)
    }
}
