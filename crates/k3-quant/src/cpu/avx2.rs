//! The loops in 256-bit registers. Bit for bit what [`super::plain`] computes.

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

mod exact;
mod int8;

use std::arch::x86_64::*;

use super::activations::Lanes;
use super::vector::{Avx2, Lanes as _};
use super::{LANES, plain};

pub(super) use exact::Exact;
pub(super) use int8::Int8;

/// Rows of activations up to which weights go from their stored form to registers.
const DIRECT: usize = 4;
/// Weight rows that are taken together then: a block of activations stays in the first-level cache for them, and for the
/// tiles of rows that leave room for decoded weights in 16 registers.
const GROUP: usize = 4;

/// One value for each of 16 lanes.
type Pair = [__m256; 2];

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(lanes: &Lanes) -> [__m256; 2] {
    // SAFETY: 16 floats are there to be read, aligned to 64 bytes.
    unsafe { [_mm256_load_ps(lanes.0.as_ptr()), _mm256_load_ps(lanes.0.as_ptr().add(LANES / 2))] }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store(lanes: &mut Lanes, values: [__m256; 2]) {
    let at = lanes.0.as_mut_ptr();
    // SAFETY: 16 floats are there to be written, aligned to 64 bytes.
    unsafe {
        _mm256_store_ps(at, values[0]);
        _mm256_store_ps(at.add(LANES / 2), values[1]);
    }
}

/// The sum of 16 lanes: halves are added until one is left.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tree_sum(lanes: Pair) -> f32 {
    Avx2::sum(lanes)
}

/// A table of 16 bytes in both halves of a register, as byte shuffles want it.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn table(entries: &[u8; 16]) -> __m256i {
    // SAFETY: 16 bytes are there to be read; the load asks for no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(entries.as_ptr().cast()) })
}

/// The first scale in lanes 0..4, the second in 4..8.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn two_scales(first: f32, second: f32) -> __m256 {
    _mm256_blend_ps::<0xf0>(_mm256_set1_ps(first), _mm256_set1_ps(second))
}
