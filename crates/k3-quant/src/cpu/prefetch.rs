//! Asking for weights before they are needed. Addresses may lie outside of any allocation.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use crate::{Matrix, MatrixData};

/// Bytes of a row up to which rows that are taken together are asked for in the order of memory. Longer ones are asked for
/// side by side: that is what was measured to be faster.
pub(super) const SHORT_ROW: usize = 2048;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the lines of `bytes` bytes at an address.
#[inline(always)]
pub(super) fn fetch(at: *const u8, bytes: usize) {
    for line in 0..bytes / LINE {
        // SAFETY: a hint, which reads nothing that the program could see; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line * LINE).cast()) };
    }
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
