//! The inner loops in 512-bit registers, where compilers do not find them by themselves. Bit for bit what the portable
//! loops of [`super`] compute: the same lanes, products and sums apart, the same tree at the end.

use std::arch::x86_64::{
    __m512, _mm_loadu_si128, _mm512_add_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_srli_epi32, _mm512_storeu_ps,
};

use super::plain::{add_int8_rest, add_rest, decode_half_step, fp8_value, scale_value, tree_sum, whole_step};
use super::{LANES, STEP};
use crate::{E2M1, E4M3, E8M0, ScaleRow, int4_value};

/// The values of the 16 nibbles of INT4.
static INTS: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut nibble = 0;
    while nibble < 16 {
        values[nibble] = int4_value(nibble as u8);
        nibble += 1;
    }
    values
};

/// Lanes 8..16, which have the second scale of a step.
const UPPER_HALF: u16 = 0xff00;

#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; LANES]) -> __m512 {
    // SAFETY: 16 floats are there to be read; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: __m512) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: 16 floats are there to be written; the store asks for no alignment.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
    out
}

/// The two rows of lanes of a step.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_step(x: &[f32; STEP]) -> (__m512, __m512) {
    let (lanes, _) = x.as_chunks::<LANES>();
    (load(&lanes[0]), load(&lanes[1]))
}

/// [`super::plain::dot_f32`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
    let (mut low, mut high) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x.as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        let ((w0, w1), (x0, x1)) = (load_step(w), load_step(x));
        low = _mm512_add_ps(low, _mm512_mul_ps(w0, x0));
        high = _mm512_add_ps(high, _mm512_mul_ps(w1, x1));
    }
    let (mut low, mut high) = (store(low), store(high));
    add_rest(&mut low, &mut high, rest, x_rest);
    tree_sum(low, high)
}

/// [`super::plain::dot_blocks`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
    let (mut even, mut odd) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (codes, _) = codes.as_chunks::<STEP>();
    let (x, _) = x.as_chunks::<STEP>();
    let (code_pairs, code_last) = codes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scales.as_chunks::<2>();
    for ((c, x), s) in code_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        even = add_step(even, &c[0], s[0], &x[0]);
        odd = add_step(odd, &c[1], s[1], &x[1]);
    }
    if let ([c], [x], [s]) = (code_last, x_last, scale_last) {
        even = add_step(even, c, *s, x);
    }
    tree_sum(store(even), store(odd))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_step(sum: __m512, c: &[f32; STEP], [s0, s1]: [f32; 2], x: &[f32; STEP]) -> __m512 {
    let ((c0, c1), (x0, x1)) = (load_step(c), load_step(x));
    let scale = two_scales(s0, s1);
    let pair = _mm512_add_ps(_mm512_mul_ps(c0, x0), _mm512_mul_ps(c1, x1));
    _mm512_add_ps(sum, _mm512_mul_ps(scale, pair))
}

/// [`super::plain::dot_int8`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_int8(w: &[i8], x: &[f32]) -> f32 {
    let (mut low, mut high) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x[..w.len()].as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        let (x0, x1) = load_step(x);
        let (w, _) = w.as_chunks::<LANES>();
        low = _mm512_add_ps(low, _mm512_mul_ps(ints(&w[0]), x0));
        high = _mm512_add_ps(high, _mm512_mul_ps(ints(&w[1]), x1));
    }
    let (mut low, mut high) = (store(low), store(high));
    add_int8_rest(&mut low, &mut high, rest, x_rest);
    tree_sum(low, high)
}

/// 16 bytes, widened.
#[inline]
#[target_feature(enable = "avx512f")]
fn ints(w: &[i8; LANES]) -> __m512 {
    // SAFETY: 16 bytes are there to be read; the load asks for no alignment.
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(w.as_ptr().cast()) }))
}

/// [`super::plain::dot_mxfp4`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
    let table = load(&E2M1::VALUES);
    let (mut even, mut odd) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    let (byte_pairs, byte_last) = bytes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scale.as_chunks::<2>();
    for ((bytes, x), s) in byte_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        even = add_packed(even, table, &bytes[0], _mm512_set1_ps(scale_value(s[0])), &x[0]);
        odd = add_packed(odd, table, &bytes[1], _mm512_set1_ps(scale_value(s[1])), &x[1]);
    }
    if let ([bytes], [x], [s]) = (byte_last, x_last, scale_last) {
        even = add_packed(even, table, bytes, _mm512_set1_ps(scale_value(*s)), x);
    }
    tree_sum(store(even), store(odd))
}

/// [`super::plain::dot_nvfp4`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32 {
    let table = load(&E2M1::VALUES);
    let (mut even, mut odd) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (bytes, half) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    let (byte_pairs, byte_last) = bytes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scale.as_chunks::<4>();
    for ((bytes, x), s) in byte_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        even = add_packed(even, table, &bytes[0], two_scales(fp8_value(s[0]), fp8_value(s[1])), &x[0]);
        odd = add_packed(odd, table, &bytes[1], two_scales(fp8_value(s[2]), fp8_value(s[3])), &x[1]);
    }
    // What is left: a step, half a step, or a step and a half, of which the half is the second of its pair.
    match (byte_last, x_last, scale_last) {
        ([bytes], [x], [a, b]) => {
            even = add_packed(even, table, bytes, two_scales(fp8_value(*a), fp8_value(*b)), x);
        }
        ([], [x], [a]) => {
            even = add_packed(even, table, &whole_step(half), two_scales(fp8_value(*a), 0.0), x);
        }
        ([bytes], [], [a, b, c]) => {
            if let Some([x0, x1]) = x_pairs.last() {
                even = add_packed(even, table, bytes, two_scales(fp8_value(*a), fp8_value(*b)), x0);
                odd = add_packed(odd, table, &whole_step(half), two_scales(fp8_value(*c), 0.0), x1);
            }
        }
        _ => {}
    }
    tree_sum(store(even), store(odd))
}

/// [`super::plain::dot_int4`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32 {
    let table = load(&INTS);
    let (mut even, mut odd) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    for (i, (bytes, x)) in bytes.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0).enumerate() {
        let s = _mm512_set1_ps(scale.get(i));
        even = add_packed(even, table, &bytes[0], s, &x[0]);
        odd = add_packed(odd, table, &bytes[1], s, &x[1]);
    }
    tree_sum(store(even), store(odd))
}

/// The first scale in lanes 0..8, the second in 8..16.
#[inline]
#[target_feature(enable = "avx512f")]
fn two_scales(first: f32, second: f32) -> __m512 {
    _mm512_mask_blend_ps(UPPER_HALF, _mm512_set1_ps(first), _mm512_set1_ps(second))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_packed(sum: __m512, table: __m512, bytes: &[u8; LANES], scale: __m512, x: &[f32; STEP]) -> __m512 {
    let ((c0, c1), (x0, x1)) = (codes(table, bytes), load_step(x));
    let pair = _mm512_add_ps(_mm512_mul_ps(c0, x0), _mm512_mul_ps(c1, x1));
    _mm512_add_ps(sum, _mm512_mul_ps(scale, pair))
}

/// The values of 16 packed bytes: even columns, odd columns. The 16 values of a code are one register, so decoding is
/// one permutation, which looks at the low four bits of an index only.
#[inline]
#[target_feature(enable = "avx512f")]
fn codes(table: __m512, bytes: &[u8; LANES]) -> (__m512, __m512) {
    // SAFETY: 16 bytes are there to be read; the load asks for no alignment.
    let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
    (_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table))
}

/// [`super::plain::decode_codes`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn decode_codes(packed: &[u8], values: &mut [f32]) {
    let whole = decode_steps(load(&E2M1::VALUES), packed, values);
    let (steps, _) = values.as_chunks_mut::<STEP>();
    decode_half_step(&packed[whole * LANES..], steps.get_mut(whole));
}

/// [`super::plain::decode_ints`]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn decode_ints(packed: &[u8], values: &mut [f32]) {
    decode_steps(load(&INTS), packed, values);
}

/// Decodes whole steps; their number.
#[inline]
#[target_feature(enable = "avx512f")]
fn decode_steps(table: __m512, packed: &[u8], values: &mut [f32]) -> usize {
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (steps, _) = values.as_chunks_mut::<STEP>();
    for (values, bytes) in steps.iter_mut().zip(bytes) {
        let (even, odd) = codes(table, bytes);
        let (lanes, _) = values.as_chunks_mut::<LANES>();
        lanes[0] = store(even);
        lanes[1] = store(odd);
    }
    bytes.len()
}
