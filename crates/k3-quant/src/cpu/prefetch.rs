//! Asking for weights before they are needed. Addresses may lie outside of any allocation.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use crate::{Matrix, MatrixData};

/// Bytes of a row up to which rows that are taken together are asked for in the order of memory. Longer ones are asked for
/// side by side: that is what was measured to be faster.
pub(super) const SHORT_ROW: usize = 2048;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the lines of `bytes` bytes at an address, into the second-level cache. On their way to the first each of them
/// would hold one of the few buffers for lines that it misses, for as long as the memory takes: that would bind before the
/// memory does.
#[inline(always)]
pub(super) fn fetch(at: *const u8, bytes: usize) {
    for line in 0..bytes / LINE {
        // SAFETY: a hint, which reads nothing that the program could see; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line * LINE).cast()) };
    }
}

/// Weights are asked for at least this many bytes before they are needed: what comes from memory to a core while one line
/// is on its way, several times over.
const AHEAD: usize = 1 << 14;

/// How many rows ahead of `count` rows that are taken together others are asked for: a multiple of `count`.
#[inline(always)]
pub(super) fn rows_ahead(w: &Matrix, count: usize) -> usize {
    let row = w.size_bytes() / w.rows().max(1);
    AHEAD.div_ceil(row.max(1)).next_multiple_of(count)
}

/// Asks for the scales of `rows` rows from `first` on, of a matrix that has them in blocks: too few at a time for the
/// memory to see their order.
#[inline(always)]
pub(super) fn fetch_scales(w: &Matrix, first: usize, rows: usize) {
    let (scale, bytes) = match w.data() {
        MatrixData::Mxfp4 { scale, .. } => (scale, w.cols() / 32),
        MatrixData::Nvfp4 { scale, .. } => (scale, w.cols() / 16),
        MatrixData::Int4 { scale, .. } => (scale.bytes(), w.cols() / 64 * scale.width()),
        _ => return,
    };
    fetch(scale.as_ptr().wrapping_add(first * bytes), rows * bytes + LINE);
}
