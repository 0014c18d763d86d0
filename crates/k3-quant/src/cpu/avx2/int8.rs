//! Products in [`crate::cpu::Mode::Int8`].

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::plain::{self, Codes, RAISED_E2M1, lowered_e8m0, rescale_ints};
use super::{DIRECT, GROUP, Pair, load, store, table, tree_sum, two_scales};
use crate::cpu::activations::{Blocked, Ints, Lanes, Unit};
use crate::cpu::prefetch::{LINE, SHORT_ROW, fetch, fetch_scales, rows_ahead};
use crate::cpu::product::Kernel;
use crate::{E8M0, Matrix, MatrixData, Row, Scales, WeightFormat};

/// Integer products. Named only where AVX2 and FMA have been found.
pub(in crate::cpu) struct Int8;

impl Kernel for Int8 {
    type X = Ints;
    type W = Codes;
    const DIRECT: usize = DIRECT;
    // One row whose scales are out of the ordinary makes all of them slow.
    const MANY: usize = 8;

    fn direct(w: &Matrix, rows: Range<usize>, x: &Blocked<Ints>, out: &mut [f32]) -> bool {
        // SAFETY: this type is named only where AVX2 and FMA have been found.
        unsafe {
            if !fast_scales(w, rows.clone()) {
                return false;
            }
            match x.n {
                1 => direct::<4, 1>(w, rows, x, out),
                2 => direct::<1, 2>(w, rows, x, out),
                3 => direct::<1, 3>(w, rows, x, out),
                _ => direct::<1, 4>(w, rows, x, out),
            }
        }
        true
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Codes]) {
        // SAFETY: as above.
        unsafe { decode(w.row(row), block, out) }
    }
    fn multiply(format: WeightFormat, width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
        // SAFETY: as above.
        unsafe {
            match format {
                WeightFormat::Int8 => multiply::<false>(width, w, x, lanes),
                _ => multiply::<true>(width, w, x, lanes),
            }
        }
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_ints(w, rows, out);
    }
}

/// Whether [`e4m3_lanes`] can read the scales of some rows: not NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn fast_scales(w: &Matrix, rows: Range<usize>) -> bool {
    let MatrixData::Nvfp4 { scale, .. } = w.data() else { return true };
    let blocks = w.cols() / 16;
    let scale = &scale[rows.start * blocks..rows.end * blocks];
    // The largest of all, so that the loop has no branches.
    scale.iter().fold(0, |max: u8, s| max.max(s & 0x7f)) < 0x7f
}

/// The weights that meet half of the lanes of one [`Ints`].
#[derive(Clone, Copy)]
struct Operand {
    first: __m256i,
    second: __m256i,
    scale: __m256,
}

/// Bytes of a row that are one [`Operand`].
const HALF: usize = LINE / 2;

/// The part of a block that a row has at its end, and zeros.
#[repr(C, align(64))]
struct Padded([u8; LINE]);

/// Runs `$body` with three functions of a matrix format, for `$count` rows from `$first` on: `$half(m, i)`, the
/// [`Operand`] of half block `i` of the `m`th of these rows, which must be in one of the `$whole` whole blocks; `$last(m, h)`,
/// that of half `h` of the block at its end that it has in part; `$fetch(m, i)`, which asks for as many weights as a block
/// has, of the rows that begin `$ahead` further on: called for all `m` and blocks `i`, it has asked for all. `$narrow` is
/// as in [`dot`].
macro_rules! with_halves {
    ($w:ident, $first:expr, $count:expr, $ahead:expr, |$narrow:ident, $whole:ident, $half:ident, $last:ident, $fetch:ident| $body:expr) => {{
        let (first, count, cols) = ($first, $count, $w.cols());
        // `$scales` bytes of `$scale` belong to a row, `$each` to half a block: `$widen(address of these)`.
        macro_rules! rows_of {
            ($narrowed:literal, $bytes:expr, $stride:expr, $split:expr, $scale:expr, $scales:expr, $each:expr, $rest:expr, $widen:expr) => {{
                const $narrow: bool = $narrowed;
                let stride: usize = $stride;
                let $whole = stride / LINE;
                let bytes = &$bytes[first * stride..(first + count) * stride];
                let (scales, each): (usize, usize) = ($scales, $each);
                let scale = &$scale[first * scales..(first + count) * scales];
                let (split, widen) = ($split, $widen);
                let $half = |m: usize, i: usize| {
                    debug_assert!(m < count && i < 2 * $whole);
                    let at = bytes.as_ptr().wrapping_add(m * stride + i * HALF);
                    let scale = scale.as_ptr().wrapping_add(m * scales + i * each);
                    // SAFETY: the row has these 32 bytes, and their scales; the load asks for no alignment.
                    unsafe { split(_mm256_loadu_si256(at.cast()), widen(scale)) }
                };
                let $last = |m: usize, h: usize| {
                    let (mut padded, mut padded_scale) = (Padded([0; LINE]), [$rest; 8]);
                    let rest = &bytes[m * stride + $whole * LINE..(m + 1) * stride];
                    padded.0[..rest.len()].copy_from_slice(rest);
                    let rest = &scale[m * scales + 2 * $whole * each..(m + 1) * scales];
                    padded_scale[..rest.len()].copy_from_slice(rest);
                    // SAFETY: each half has 32 bytes, and at most 4 of scales; the load asks for no alignment.
                    unsafe {
                        split(
                            _mm256_loadu_si256(padded.0.as_ptr().add(h * HALF).cast()),
                            widen(padded_scale.as_ptr().add(h * each)),
                        )
                    }
                };
                let place = |m: usize, i: usize| {
                    if stride <= SHORT_ROW { (i * count + m) * LINE } else { m * stride + i * LINE }
                };
                let start = bytes.as_ptr();
                let $fetch =
                    |m: usize, i: usize| fetch(start.wrapping_add($ahead * stride + place(m, i)), LINE);
                $body
            }};
        }
        match $w.data() {
            MatrixData::Mxfp4 { packed, scale } => {
                let table = table(&RAISED_E2M1);
                rows_of!(
                    true,
                    packed,
                    cols / 2,
                    |bytes, scale| look_up(table, bytes, scale),
                    scale,
                    cols / 32,
                    2,
                    127_u8,
                    |at: *const u8| {
                        // SAFETY: half a block has two scales.
                        let [a, b] = unsafe { at.cast::<[E8M0; 2]>().read() };
                        two_scales(lowered_e8m0(a), lowered_e8m0(b))
                    }
                )
            }
            MatrixData::Nvfp4 { packed, scale, .. } => {
                let table = table(&RAISED_E2M1);
                rows_of!(
                    true,
                    packed,
                    cols / 2,
                    |bytes, scale| look_up(table, bytes, scale),
                    scale,
                    cols / 16,
                    4,
                    0_u8,
                    |at: *const u8| {
                        // SAFETY: half a block has four scales.
                        e4m3_lanes(unsafe { at.cast::<[u8; 4]>().read() })
                    }
                )
            }
            MatrixData::Int4 { packed, scale } => match scale {
                Scales::Bf16(scale) => rows_of!(
                    true,
                    packed,
                    cols / 2,
                    split,
                    scale,
                    cols / 32,
                    2,
                    0_u8,
                    |at: *const u8| {
                        // SAFETY: half a block has one scale.
                        let bits = u16::from_le_bytes(unsafe { at.cast::<[u8; 2]>().read() });
                        _mm256_set1_ps(f32::from_bits(u32::from(bits) << 16))
                    }
                ),
                Scales::F32(scale) => rows_of!(
                    true,
                    packed,
                    cols / 2,
                    split,
                    scale,
                    cols / 16,
                    4,
                    0_u8,
                    |at: *const u8| {
                        // SAFETY: half a block has one scale.
                        _mm256_set1_ps(f32::from_le_bytes(unsafe { at.cast::<[u8; 4]>().read() }))
                    }
                ),
            },
            MatrixData::Int8 { codes, .. } => rows_of!(
                false,
                codes,
                cols,
                |bytes, scale| Operand { first: bytes, second: bytes, scale },
                codes,
                0,
                0,
                0_u8,
                |_| _mm256_set1_ps(1.0)
            ),
            // Activations for these are never integers.
            MatrixData::F32(_) | MatrixData::Bf16(_) => {}
        }
    }};
}

/// The nibbles of 32 bytes: even columns, odd columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn split(bytes: __m256i, scale: __m256) -> Operand {
    let low = _mm256_set1_epi8(15);
    Operand {
        first: _mm256_and_si256(bytes, low),
        second: _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low),
        scale,
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn look_up(table: __m256i, bytes: __m256i, scale: __m256) -> Operand {
    let Operand { first, second, .. } = split(bytes, scale);
    Operand { first: _mm256_shuffle_epi8(table, first), second: _mm256_shuffle_epi8(table, second), scale }
}

/// Four scales of NVFP4, lowered, in two lanes each. Their bits mean the same in f32 but for a power of two, which the
/// lowering is a part of.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn e4m3_lanes(scales: [u8; 4]) -> __m256 {
    /// From the bias of E4M3 to that of f32, and divided by 256.
    const REBIAS: f32 = f32::from_bits((127 + 120 - 8) << 23);
    // Each byte is the upper one of an element.
    let spread = _mm256_setr_epi8(
        -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 1, //
        -1, -1, -1, 2, -1, -1, -1, 2, -1, -1, -1, 3, -1, -1, -1, 3,
    );
    let bits = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(scales)), spread);
    // The sign stays where it is; its copies would be in the upper bits of the exponent.
    let bits = _mm256_and_si256(_mm256_srai_epi32::<4>(bits), _mm256_set1_epi32(i32::MIN | 0x07f0_0000));
    _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(REBIAS))
}

/// Weights are used where they are decoded. The rows of [`GROUP`] meet the same block of activations, `T` rows at a time:
/// their chains of sums overlap, and share loads of activations.
#[target_feature(enable = "avx2,fma")]
fn direct<const T: usize, const N: usize>(
    w: &Matrix,
    rows: Range<usize>,
    x: &Blocked<Ints>,
    out: &mut [f32],
) {
    debug_assert!(rows.len().is_multiple_of(GROUP));
    let ahead = rows_ahead(w, GROUP);
    for (first, out) in rows.step_by(GROUP).zip(out.chunks_exact_mut(GROUP * N)) {
        fetch_scales(w, first + ahead, GROUP);
        with_halves!(w, first, GROUP, ahead, |NARROW, whole, half, last, fetch| {
            direct_rows::<GROUP, T, N, NARROW>(whole, x, half, last, fetch, out);
        });
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn direct_rows<const M: usize, const T: usize, const N: usize, const NARROW: bool>(
    whole: usize,
    x: &Blocked<Ints>,
    half: impl Fn(usize, usize) -> Operand,
    last: impl Fn(usize, usize) -> Operand,
    fetch: impl Fn(usize, usize),
    out: &mut [f32],
) {
    let mut totals = [[Lanes::ZERO; N]; M];
    for b in 0..x.blocks() {
        let width = x.width(b);
        let x = x.block(b, 0, N);
        let first = b * Ints::BLOCK;
        let count = width.min(whole - first);
        for top in (0..M).step_by(T) {
            let mut sums = [[[_mm256_setzero_ps(); 2]; N]; T];
            for m in 0..T {
                for k in 0..N {
                    sums[m][k] = load(&totals[top + m][k]);
                }
            }
            let add = |sums: &mut [[Pair; N]; T], m: usize, i: usize, h: usize, w: Operand| {
                for k in 0..N {
                    // SAFETY: `x` has `N` rows of `width` units.
                    let x = unsafe { x.get_unchecked(k * width + i) };
                    sums[m][k][h] = link::<NARROW>(&w, x, h, sums[m][k][h]);
                }
            };
            for i in 0..count {
                for m in 0..T {
                    fetch(top + m, first + i);
                }
                for h in 0..2 {
                    for m in 0..T {
                        add(&mut sums, m, i, h, half(top + m, 2 * (first + i) + h));
                    }
                }
            }
            if count < width {
                for h in 0..2 {
                    for m in 0..T {
                        add(&mut sums, m, count, h, last(top + m, h));
                    }
                }
            }
            for m in 0..T {
                for k in 0..N {
                    store(&mut totals[top + m][k], sums[m][k]);
                }
            }
        }
    }
    for (out, total) in out.iter_mut().zip(totals.as_flattened()) {
        *out = tree_sum(load(total));
    }
}

/// One link of eight chains.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn link<const NARROW: bool>(w: &Operand, x: &Ints, half: usize, sum: __m256) -> __m256 {
    // SAFETY: 8 floats are there to be read in each half of the scales, aligned to 32 bytes.
    let scale = unsafe { _mm256_load_ps(x.scale.as_ptr().add(8 * half)) };
    let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot::<NARROW>(w, x, half)), w.scale);
    _mm256_fmadd_ps(scaled, scale, sum)
}

/// The exact sums of eight lanes. `NARROW`: codes are raised and below 25, so that four products of them with activations of
/// at most 127 fit 16 bits, as they are added up first. Otherwise they are signed.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot<const NARROW: bool>(w: &Operand, x: &Ints, half: usize) -> __m256i {
    // SAFETY: each half has 32 bytes to be read, and eight starts; all are aligned to 32 bytes.
    let (first, second, start) = unsafe {
        (
            _mm256_load_si256(x.first.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(x.second.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(x.start.as_ptr().add(8 * half).cast()),
        )
    };
    let ones = _mm256_set1_epi16(1);
    if NARROW {
        let (first, second) = (_mm256_maddubs_epi16(w.first, first), _mm256_maddubs_epi16(w.second, second));
        _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(first, second), ones), start)
    } else {
        // Two products of raised codes would not fit 16 bits. Of magnitudes up to 128 and activations up to 127 they do.
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.first), _mm256_sign_epi8(first, w.first));
        _mm256_madd_epi16(pairs, ones)
    }
}

/// [`plain::decode_ints`]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn decode(row: Row<'_>, block: usize, out: &mut [Codes]) {
    plain::decode_ints(row, block, out, |codes, bytes, out| {
        let (table, none) = (table(codes), _mm256_setzero_ps());
        for half in [0, 32] {
            // SAFETY: each half has 32 bytes to be read and twice as many to be written, those aligned to 32 bytes.
            unsafe {
                let codes = look_up(table, _mm256_loadu_si256(bytes.as_ptr().add(half).cast()), none);
                _mm256_store_si256(out.first.as_mut_ptr().add(half).cast(), codes.first);
                _mm256_store_si256(out.second.as_mut_ptr().add(half).cast(), codes.second);
            }
        }
    });
}

/// [`plain::multiply_ints`]
#[target_feature(enable = "avx2,fma")]
fn multiply<const NARROW: bool>(width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks_exact(width).zip(lanes.chunks_exact_mut(n)) {
        for (x, lanes) in x.chunks_exact(width).zip(lanes) {
            let mut sums = load(lanes);
            for (w, x) in w.iter().zip(x) {
                for half in 0..2 {
                    sums[half] = link::<NARROW>(&operand::<NARROW>(w, half), x, half, sums[half]);
                }
            }
            store(lanes, sums);
        }
    }
}

/// Half of the lanes of decoded weights.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn operand<const NARROW: bool>(w: &Codes, half: usize) -> Operand {
    // SAFETY: each half has 32 bytes to be read, and eight scales; all are aligned to 32 bytes.
    let (first, second, scale) = unsafe {
        (
            _mm256_load_si256(w.first.as_ptr().add(32 * half).cast()),
            _mm256_load_si256(w.second.as_ptr().add(32 * half).cast()),
            _mm256_load_ps(w.scale.as_ptr().add(8 * half)),
        )
    };
    let lower = if NARROW { 0 } else { i8::MIN };
    Operand { first: _mm256_xor_si256(first, _mm256_set1_epi8(lower)), second, scale }
}
