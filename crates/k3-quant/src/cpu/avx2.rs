//! The loops in 256-bit registers. Bit for bit what [`super::plain`] computes.

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::activations::{Blocked, Ints, Lanes};
use super::plain::{self, Codes, scaled_ints};
use super::product::{Kernel, scaled_exact};
use super::{LANES, STEP};
use crate::{E2M1, Matrix, Row, WeightFormat};

/// Products in [`super::Mode::Exact`]. Named only where AVX2 and FMA have been found.
pub(super) struct Exact;

impl Kernel for Exact {
    type X = Lanes;
    type W = Lanes;
    const DIRECT: usize = 0;

    fn direct(_: &Matrix, _: Range<usize>, _: &Blocked<Lanes>, _: &mut [f32]) -> bool {
        false
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Lanes]) {
        // SAFETY: this type is named only where AVX2 and FMA have been found.
        unsafe { decode(w.row(row), block, out) }
    }
    fn multiply(_: WeightFormat, width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
        // SAFETY: as above.
        unsafe { multiply(width, w, x, lanes) }
    }
    fn scaled(row: Row<'_>, sum: f32) -> f32 {
        scaled_exact(row, sum)
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn decode(row: Row<'_>, block: usize, out: &mut [Lanes]) {
    plain::decode(row, block, out, |w, out| widen_pairs(w, out), |bytes, s, out| scale_codes(bytes, s, out));
}

/// [`plain::widen_pairs`]
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_pairs(w: &[bf16; STEP], out: &mut [Lanes; 2]) {
    let half = |i: usize| {
        // SAFETY: each half has 32 bytes to be read; the load asks for no alignment.
        let pairs = unsafe { _mm256_loadu_si256(w.as_ptr().add(LANES * i).cast()) };
        let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(i32::MIN >> 15));
        (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd))
    };
    let ((even0, odd0), (even1, odd1)) = (half(0), half(1));
    store(&mut out[0], [even0, even1]);
    store(&mut out[1], [odd0, odd1]);
}

/// [`plain::scale_codes`]. The eight magnitudes are one register, so decoding is one permutation, which looks at the low
/// three bits of an index only, and the sign.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scale_codes(bytes: &[u8; LANES], scales: [f32; 2], out: &mut [Lanes; 2]) {
    // SAFETY: the first half of the table is there to be read; the load asks for no alignment.
    let table = unsafe { _mm256_loadu_ps(E2M1::VALUES.as_ptr()) };
    let sign = _mm256_set1_epi32(i32::MIN);
    let scaled = |codes: __m256i, scale: __m256| {
        let negative = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), sign);
        let value = _mm256_or_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(negative));
        _mm256_mul_ps(value, scale)
    };
    let half = |i: usize| {
        // SAFETY: each half has 8 bytes to be read; the load asks for no alignment.
        let codes = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(bytes.as_ptr().add(8 * i).cast()) });
        let scale = _mm256_set1_ps(scales[i]);
        (scaled(codes, scale), scaled(_mm256_srli_epi32::<4>(codes), scale))
    };
    let ((even0, odd0), (even1, odd1)) = (half(0), half(1));
    store(&mut out[0], [even0, even1]);
    store(&mut out[1], [odd0, odd1]);
}

/// Tiles of two weight rows and three rows of activations, which fill the registers.
#[target_feature(enable = "avx2,fma")]
fn multiply(width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    let pairs = w.chunks(2 * width).zip(lanes.chunks_mut(2 * n));
    for (w, lanes) in pairs {
        for (i, x) in x.chunks(3 * width).enumerate() {
            let lanes = &mut lanes[3 * i..];
            match (w.len() / width, x.len() / width) {
                (2, 3) => tile::<2, 3>(width, n, w, x, lanes),
                (2, 2) => tile::<2, 2>(width, n, w, x, lanes),
                (2, _) => tile::<2, 1>(width, n, w, x, lanes),
                (_, 3) => tile::<1, 3>(width, n, w, x, lanes),
                (_, 2) => tile::<1, 2>(width, n, w, x, lanes),
                _ => tile::<1, 1>(width, n, w, x, lanes),
            }
        }
    }
}

/// `M` weight rows and `N` rows of activations; `n` is the distance of weight rows in `lanes`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tile<const M: usize, const N: usize>(
    width: usize,
    n: usize,
    w: &[Lanes],
    x: &[Lanes],
    lanes: &mut [Lanes],
) {
    let (w, x) = (&w[..M * width], &x[..N * width]);
    let mut sums = [[[_mm256_setzero_ps(); 2]; N]; M];
    for i in 0..width {
        let mut xs = [[_mm256_setzero_ps(); 2]; N];
        for k in 0..N {
            // SAFETY: `i < width`, and `x` has `N` rows of `width`.
            xs[k] = load(unsafe { x.get_unchecked(k * width + i) });
        }
        for m in 0..M {
            // SAFETY: `i < width`, and `w` has `M` rows of `width`.
            let w = load(unsafe { w.get_unchecked(m * width + i) });
            for k in 0..N {
                for half in 0..2 {
                    sums[m][k][half] = _mm256_fmadd_ps(w[half], xs[k][half], sums[m][k][half]);
                }
            }
        }
    }
    for m in 0..M {
        for k in 0..N {
            let lanes = &mut lanes[m * n + k];
            let old = load(lanes);
            store(lanes, [_mm256_add_ps(old[0], sums[m][k][0]), _mm256_add_ps(old[1], sums[m][k][1])]);
        }
    }
}

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

/// Products in [`super::Mode::Int8`]. Named only where AVX2 and FMA have been found.
pub(super) struct Int8;

impl Kernel for Int8 {
    type X = Ints;
    type W = Codes;
    const DIRECT: usize = 0;

    fn direct(_: &Matrix, _: Range<usize>, _: &Blocked<Ints>, _: &mut [f32]) -> bool {
        false
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Codes]) {
        // SAFETY: this type is named only where AVX2 and FMA have been found.
        unsafe { decode_ints(w.row(row), block, out) }
    }
    fn multiply(format: WeightFormat, width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
        // SAFETY: as above.
        unsafe {
            match format {
                WeightFormat::Int8 => multiply_ints::<false>(width, w, x, lanes),
                _ => multiply_ints::<true>(width, w, x, lanes),
            }
        }
    }
    fn scaled(row: Row<'_>, sum: f32) -> f32 {
        scaled_ints(row, sum)
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn decode_ints(row: Row<'_>, block: usize, out: &mut [Codes]) {
    plain::decode_ints(row, block, out, |table, bytes, out| {
        // SAFETY: 16 bytes are there to be read; the load asks for no alignment.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        let low = _mm256_set1_epi8(15);
        for half in [0, 32] {
            // SAFETY: each half has 32 bytes to be read and twice as many to be written, those aligned to 32 bytes.
            unsafe {
                let packed = _mm256_loadu_si256(bytes.as_ptr().add(half).cast());
                let even = _mm256_and_si256(packed, low);
                let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low);
                _mm256_store_si256(out.first.as_mut_ptr().add(half).cast(), _mm256_shuffle_epi8(table, even));
                _mm256_store_si256(out.second.as_mut_ptr().add(half).cast(), _mm256_shuffle_epi8(table, odd));
            }
        }
    });
}

/// `NARROW`: codes are below 25, so that four products of them fit 16 bits, as they are added up first.
#[target_feature(enable = "avx2,fma")]
fn multiply_ints<const NARROW: bool>(width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks_exact(width).zip(lanes.chunks_exact_mut(n)) {
        for (x, lanes) in x.chunks_exact(width).zip(lanes) {
            let mut sums = load(lanes);
            for (w, x) in w.iter().zip(x) {
                for half in 0..2 {
                    let ints = dot::<NARROW>(w, x, half);
                    // SAFETY: 8 floats are there to be read in each half of the scales.
                    let (w_scale, x_scale) = unsafe {
                        (
                            _mm256_load_ps(w.scale.as_ptr().add(8 * half)),
                            _mm256_load_ps(x.scale.as_ptr().add(8 * half)),
                        )
                    };
                    let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(ints), w_scale);
                    sums[half] = _mm256_fmadd_ps(scaled, x_scale, sums[half]);
                }
            }
            store(lanes, sums);
        }
    }
}

/// The exact sums of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot<const NARROW: bool>(w: &Codes, x: &Ints, half: usize) -> __m256i {
    // SAFETY: each half has 32 bytes to be read, and eight starts; all are aligned to 32 bytes.
    let (w_first, w_second, x_first, x_second, start) = unsafe {
        (
            _mm256_load_si256(w.first.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(w.second.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(x.first.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(x.second.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(x.start.as_ptr().add(8 * half).cast()),
        )
    };
    let ones = _mm256_set1_epi16(1);
    if NARROW {
        let first = _mm256_maddubs_epi16(w_first, x_first);
        let second = _mm256_maddubs_epi16(w_second, x_second);
        let sum = _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
        _mm256_add_epi32(sum, start)
    } else {
        // Two products of raised codes would not fit 16 bits. Of magnitudes up to 128 and activations up to 127 they do.
        let w = _mm256_xor_si256(w_first, _mm256_set1_epi8(i8::MIN));
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x_first, w));
        _mm256_madd_epi16(pairs, ones)
    }
}
