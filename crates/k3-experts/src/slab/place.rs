//! Where an expert is read from, and where its parts come to lie in a slot.

use std::ops::Range;

use k3_format::{Checkpoint, ExpertLocation};

use super::ticket::Key;
use crate::ExpertError;

/// Reads are whole multiples of this, except at the end of a file: some systems slow down several times
/// for direct reads that are not.
const GRANULE: usize = 64 << 10;

/// A run of a shard, widened to what the reader can read. Those of an expert follow each other in the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) shard: usize,
    /// In the file.
    pub(super) offset: u64,
    pub(super) len: usize,
    /// Of `len`, the bytes that must come. The rest is padding, which may lie beyond the end of the file.
    pub(super) needed: usize,
}

/// What to read for an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) segments: Vec<Segment>,
    /// Its six parts in the slot.
    pub(super) parts: [Range<usize>; 6],
}

impl Place {
    /// Bytes that are read.
    pub(super) fn bytes(&self) -> usize {
        self.segments.iter().map(|s| s.len).sum()
    }
}

/// Bytes of a slot that holds any expert of `checkpoint`, for a reader that asks for this alignment.
pub fn slot_bytes(checkpoint: &Checkpoint, alignment: usize) -> u64 {
    Places::new(checkpoint, alignment).slot_bytes() as u64
}

/// Finds experts.
pub(super) struct Places {
    align: usize,
    granule: usize,
    slot_bytes: usize,
}

impl Places {
    pub(super) fn new(checkpoint: &Checkpoint, alignment: usize) -> Self {
        let align = alignment.max(1);
        let granule = if align == 1 { 1 } else { GRANULE.next_multiple_of(align) };
        let widened = |len: usize| (len + align - 1).next_multiple_of(granule);
        let layout = checkpoint.experts().layout();
        let scattered = || layout.parts.iter().map(|part| widened(part.len())).sum();
        let slot_bytes =
            if checkpoint.experts().scattered() == 0 { widened(layout.len) } else { scattered() };
        Self { align, granule, slot_bytes: slot_bytes.max(widened(layout.len)) }
    }

    /// Bytes of a slot that holds any expert.
    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// What to read for an expert.
    pub(super) fn of(&self, checkpoint: &Checkpoint, key: Key) -> Result<Place, ExpertError> {
        let layout = checkpoint.experts().layout();
        let location = checkpoint.experts().location(key.layer, key.id);
        let mut parts = layout.parts.clone();
        let mut segments = Vec::new();
        match location.map_err(|source| key.unreadable(source))? {
            ExpertLocation::Run { shard, begin } => {
                let (segment, lead) = self.segment(checkpoint, shard, begin, layout.len);
                parts.iter_mut().for_each(|part| *part = part.start + lead..part.end + lead);
                segments.push(segment);
            }
            ExpertLocation::Scattered(places) => {
                let mut at = 0;
                for (part, place) in parts.iter_mut().zip(places) {
                    let shard = place.shard as usize;
                    let (segment, lead) = self.segment(checkpoint, shard, place.begin, part.len());
                    *part = at + lead..at + lead + part.len();
                    at += segment.len;
                    segments.push(segment);
                }
            }
        }
        Ok(Place { segments, parts })
    }

    pub(super) fn ranges(&self, checkpoint: &Checkpoint, key: Key) -> Result<[Range<usize>; 6], ExpertError> {
        Ok(self.of(checkpoint, key)?.parts)
    }

    /// A segment, and how far into it the wanted bytes begin.
    fn segment(&self, checkpoint: &Checkpoint, shard: usize, begin: u64, len: usize) -> (Segment, usize) {
        let offset = begin - begin % self.align as u64;
        let lead = (begin - offset) as usize;
        let needed = lead + len;
        let left = checkpoint.shards().files()[shard].len - offset;
        let left = usize::try_from(left).unwrap_or(usize::MAX - self.align).next_multiple_of(self.align);
        let len = needed.next_multiple_of(self.granule).min(left);
        (Segment { shard, offset, len, needed }, lead)
    }
}
