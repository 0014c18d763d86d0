//! The loops in 512-bit registers. Bit for bit what [`super::plain`] computes.

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

mod exact;
mod int8;

use std::arch::x86_64::*;

use super::activations::Lanes;
use super::vector::{Avx512, Lanes as _};
use super::{LANES, plain};

pub(super) use exact::Exact;
pub(super) use int8::Int8;

/// Rows of activations up to which weights go from their stored form to registers.
const DIRECT: usize = 4;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load(lanes: &Lanes) -> __m512 {
    load_array(&lanes.0)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_array(values: &[f32; LANES]) -> __m512 {
    // SAFETY: 16 floats are there to be read; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn store(lanes: &mut Lanes, values: __m512) {
    // SAFETY: 16 floats are there to be written, aligned to 64 bytes.
    unsafe { _mm512_store_ps(lanes.0.as_mut_ptr(), values) };
}

/// The first scale in lanes 0..8, the second in 8..16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn two_scales(first: f32, second: f32) -> __m512 {
    _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first), _mm512_set1_ps(second))
}

/// The sum of 16 lanes: halves are added until one is left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tree_sum(v: __m512) -> f32 {
    Avx512::sum(v)
}

/// [`tree_sum`] of 4 rows of lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn four_sums([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
    let (ab, cd) = (halves(a, b), halves(c, d));
    // Four lanes of each row, in the order of rows.
    let v = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    );
    let v = _mm512_add_ps(v, _mm512_permute_ps::<0b01_00_11_10>(v));
    let v = _mm512_add_ps(v, _mm512_permute_ps::<0b10_11_00_01>(v));
    // The first element of each 128 bits.
    let sums = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v));
    let mut out = [0.0; 4];
    // SAFETY: four floats are there to be written; the store asks for no alignment.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

/// Of two rows the lanes 0..8, each added to the one 8 further: those of `a`, those of `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn halves(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
}

/// [`tree_sum`] of 16 rows of lanes at a time: a tree of 15 additions, in which each level holds twice as many rows in a
/// register.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sum(lanes: &[Lanes], out: &mut [f32]) {
    let (rows, rest) = lanes.as_chunks::<LANES>();
    let (sums, rest_sums) = out.as_chunks_mut::<LANES>();
    // After the last level row `i` is element `i / 4` of the 128 bits `i % 4`.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (rows, sums) in rows.iter().zip(sums) {
        let eight = |i: usize| halves(load(&rows[i]), load(&rows[i + 1]));
        let four = |i: usize| {
            let (a, b) = (eight(i), eight(i + 2));
            let (low, high) =
                (_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
            _mm512_add_ps(low, high)
        };
        let two = |i: usize| {
            let (a, b) = (four(i), four(i + 4));
            let (low, high) =
                (_mm512_shuffle_ps::<0b01_00_01_00>(a, b), _mm512_shuffle_ps::<0b11_10_11_10>(a, b));
            _mm512_add_ps(low, high)
        };
        let (a, b) = (two(0), two(8));
        let (low, high) =
            (_mm512_shuffle_ps::<0b10_00_10_00>(a, b), _mm512_shuffle_ps::<0b11_01_11_01>(a, b));
        let all = _mm512_permutexvar_ps(order, _mm512_add_ps(low, high));
        // SAFETY: 16 floats are there to be written; the store asks for no alignment.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), all) };
    }
    rest_sums.iter_mut().zip(rest).for_each(|(sum, lanes)| *sum = tree_sum(load(lanes)));
}
