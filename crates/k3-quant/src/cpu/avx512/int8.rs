//! Products in [`crate::cpu::Mode::Int8`].

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::plain::{self, Codes, E8M0_LOWERED, RAISED_E2M1, padded, rescale_ints};
use super::{DIRECT, load, load_array, store, sum, tree_sum, two_scales};
use crate::cpu::activations::{Blocked, Ints, Lanes, Unit};
use crate::cpu::prefetch::{LINE, SHORT_ROW, fetch, fetch_scales, rows_ahead};
use crate::cpu::product::Kernel;
use crate::{Matrix, MatrixData, Scales, WeightFormat};

/// Integer products. Named only where the features of [`crate::cpu::InstructionSet::Avx512`] have been found.
pub(in crate::cpu) struct Int8;

impl Kernel for Int8 {
    type X = Ints;
    type W = Codes;
    const DIRECT: usize = DIRECT;
    // One row whose scales are out of the ordinary makes all of them slow.
    const MANY: usize = 8;

    fn direct(w: &Matrix, rows: Range<usize>, x: &Blocked<Ints>, out: &mut [f32]) -> bool {
        // SAFETY: this type is named only where the features have been found.
        unsafe {
            if !fast_scales(w, rows.clone()) {
                return false;
            }
            match x.n {
                1 => direct::<4, 1>(w, rows, x, out),
                2 => direct::<4, 2>(w, rows, x, out),
                3 => direct::<4, 3>(w, rows, x, out),
                _ => direct::<4, 4>(w, rows, x, out),
            }
        }
        true
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Codes]) {
        // SAFETY: as above.
        unsafe {
            if fast_scales(w, row..row + 1) {
                decode(w, row, block, out);
            } else {
                plain::decode_ints(w.row(row), block, out, plain::look_up);
            }
        }
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
    fn sum(lanes: &[Lanes], out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { sum(lanes, out) }
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_ints(w, rows, out);
    }
}

/// The smallest E8M0 scale that is a normal f32 when it is lowered.
const LOWEST: u8 = E8M0_LOWERED + 1;

/// Whether the block scales of some rows can be turned into floats by moving their bits: not NaN, and for MXFP4 not so
/// low that they become subnormal.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn fast_scales(w: &Matrix, rows: Range<usize>) -> bool {
    match w.data() {
        MatrixData::Mxfp4 { scale, .. } => {
            let blocks = w.cols() / 32;
            let scale = &scale[rows.start * blocks..rows.end * blocks];
            // The largest of all, so that the loop has no branches.
            scale.iter().fold(0, |max: u8, s| max.max(s.wrapping_sub(LOWEST))) < 255 - LOWEST
        }
        MatrixData::Nvfp4 { scale, .. } => {
            let blocks = w.cols() / 16;
            let scale = &scale[rows.start * blocks..rows.end * blocks];
            scale.iter().fold(0, |max: u8, s| max.max(s & 0x7f)) < 0x7f
        }
        _ => true,
    }
}

/// The weights that meet one [`Ints`].
#[derive(Clone, Copy)]
struct Operand {
    first: __m512i,
    second: __m512i,
    scale: __m512,
}

/// Runs `$body` with three functions of a matrix format, for `$count` rows from `$first` on: `$block(m, i)`, the
/// [`Operand`] of block `i` of the `m`th of these rows, which must be one of the `$whole` whole ones; `$last(m)`, that of the
/// block at its end that it has in part; `$fetch(m, i)`, which asks for as many weights as a block has, of the rows that begin
/// `$ahead` further on: called for all `m` and `i`, it has asked for all. `$pair` is whether operands have a second part.
macro_rules! with_blocks {
    ($w:ident, $first:expr, $count:expr, $ahead:expr, |$pair:ident, $whole:ident, $block:ident, $last:ident, $fetch:ident| $body:expr) => {{
        let (first, count, cols) = ($first, $count, $w.cols());
        macro_rules! rows_of {
            ($paired:literal, $bytes:expr, $stride:expr, $operand:expr, $scale:expr, $last_scale:expr) => {{
                const $pair: bool = $paired;
                let stride: usize = $stride;
                let ($whole, rest) = (stride / LINE, stride % LINE);
                let start = $bytes[first * stride..(first + count) * stride].as_ptr();
                let (operand, scale, last_scale) = ($operand, $scale, $last_scale);
                let $block = |m: usize, i: usize| {
                    debug_assert!(m < count && i < $whole);
                    let at = start.wrapping_add(m * stride + i * LINE);
                    // SAFETY: the row has this block of 64 bytes; the load asks for no alignment.
                    operand(unsafe { _mm512_loadu_si512(at.cast()) }, scale(m, i))
                };
                let $last = |m: usize| {
                    debug_assert!(m < count);
                    let at = start.wrapping_add(m * stride + $whole * LINE);
                    // SAFETY: the row has this many bytes more; others are not read.
                    let bytes = unsafe { _mm512_maskz_loadu_epi8((1 << rest) - 1, at.cast()) };
                    operand(bytes, last_scale(m, $whole))
                };
                let place = |m: usize, i: usize| {
                    if stride <= SHORT_ROW { (i * count + m) * LINE } else { m * stride + i * LINE }
                };
                let $fetch =
                    |m: usize, i: usize| fetch(start.wrapping_add($ahead * stride + place(m, i)), LINE);
                $body
            }};
        }
        match $w.data() {
            MatrixData::Mxfp4 { packed, scale } => {
                let blocks = cols / 32;
                let scale = &scale[first * blocks..(first + count) * blocks];
                let table = table(&RAISED_E2M1);
                rows_of!(
                    true,
                    packed,
                    cols / 2,
                    |bytes, scale| look_up(table, bytes, scale),
                    |m: usize, i: usize| {
                        // SAFETY: a whole block has four scales.
                        e8m0_lanes(unsafe { scale.as_ptr().add(m * blocks + 4 * i).cast::<[u8; 4]>().read() })
                    },
                    |m: usize, i: usize| e8m0_lanes(padded(
                        &scale[m * blocks + 4 * i..(m + 1) * blocks],
                        127
                    ))
                )
            }
            MatrixData::Nvfp4 { packed, scale, .. } => {
                let blocks = cols / 16;
                let scale = &scale[first * blocks..(first + count) * blocks];
                let table = table(&RAISED_E2M1);
                rows_of!(
                    true,
                    packed,
                    cols / 2,
                    |bytes, scale| look_up(table, bytes, scale),
                    |m: usize, i: usize| {
                        // SAFETY: a whole block has eight scales.
                        e4m3_lanes(unsafe { scale.as_ptr().add(m * blocks + 8 * i).cast::<[u8; 8]>().read() })
                    },
                    |m: usize, i: usize| e4m3_lanes(padded(&scale[m * blocks + 8 * i..(m + 1) * blocks], 0))
                )
            }
            MatrixData::Int4 { packed, scale } => {
                let groups = cols / 64;
                macro_rules! with_scales {
                    ($type:ty, $bytes:ident, $widen:expr) => {{
                        let scale = &$bytes[first * groups * size_of::<$type>()..];
                        let scale: &[$type] =
                            bytemuck::cast_slice(&scale[..count * groups * size_of::<$type>()]);
                        let widen = $widen;
                        rows_of!(
                            true,
                            packed,
                            cols / 2,
                            split,
                            |m: usize, i: usize| {
                                // SAFETY: a whole block has two scales.
                                let [a, b] = unsafe {
                                    scale.as_ptr().add(m * groups + 2 * i).cast::<[$type; 2]>().read()
                                };
                                two_scales(widen(a), widen(b))
                            },
                            |m: usize, i: usize| two_scales(widen(scale[m * groups + 2 * i]), 0.0)
                        )
                    }};
                }
                match scale {
                    Scales::Bf16(bytes) => {
                        with_scales!(u16, bytes, |s: u16| f32::from_bits(u32::from(s) << 16))
                    }
                    Scales::F32(bytes) => with_scales!(f32, bytes, |s: f32| s),
                }
            }
            MatrixData::Int8 { codes, .. } => rows_of!(
                false,
                codes,
                cols,
                |bytes, scale| Operand {
                    first: _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN)),
                    second: _mm512_setzero_si512(),
                    scale,
                },
                |_, _| _mm512_set1_ps(1.0),
                |_, _| _mm512_set1_ps(1.0)
            ),
            // Activations for these are never integers.
            MatrixData::F32(_) | MatrixData::Bf16(_) => {}
        }
    }};
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn table(entries: &[u8; 16]) -> __m512i {
    // SAFETY: 16 bytes are there to be read; the load asks for no alignment.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(entries.as_ptr().cast()) })
}

/// The nibbles of 64 bytes: even columns, odd columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn split(bytes: __m512i, scale: __m512) -> Operand {
    let low = _mm512_set1_epi8(15);
    Operand {
        first: _mm512_and_si512(bytes, low),
        second: _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
        scale,
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn look_up(table: __m512i, bytes: __m512i, scale: __m512) -> Operand {
    let Operand { first, second, .. } = split(bytes, scale);
    Operand { first: _mm512_shuffle_epi8(table, first), second: _mm512_shuffle_epi8(table, second), scale }
}

/// Four scales of MXFP4, lowered, in four lanes each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn e8m0_lanes(scales: [u8; 4]) -> __m512 {
    let spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    let bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(i32::from_le_bytes(scales)), spread);
    let exponents = _mm512_cvtepu8_epi32(_mm_sub_epi8(bytes, _mm_set1_epi8(E8M0_LOWERED as i8)));
    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponents))
}

/// Eight scales of NVFP4, lowered, in two lanes each: their bits as those of IEEE half precision, which has one bit more of
/// exponent and seven more of mantissa.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn e4m3_lanes(scales: [u8; 8]) -> __m512 {
    let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(scales));
    let words = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
    // The sign has been spread over the upper byte; its second copy would be the new bit of the exponent.
    let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(!0x4000));
    _mm512_cvtph_ps(halves)
}

/// Weights are used where they are decoded, `M` rows at a time, of which `rows` has a multiple: their chains of sums
/// overlap, and share loads of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn direct<const M: usize, const N: usize>(
    w: &Matrix,
    rows: Range<usize>,
    x: &Blocked<Ints>,
    out: &mut [f32],
) {
    debug_assert!(rows.len().is_multiple_of(M));
    let ahead = rows_ahead(w, M);
    for (first, out) in rows.step_by(M).zip(out.chunks_exact_mut(M * N)) {
        fetch_scales(w, first + ahead, M);
        with_blocks!(w, first, M, ahead, |PAIR, whole, block, last, fetch| {
            direct_rows::<M, N, PAIR>(whole, x, block, last, fetch, out);
        });
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn direct_rows<const M: usize, const N: usize, const PAIR: bool>(
    whole: usize,
    x: &Blocked<Ints>,
    operand: impl Fn(usize, usize) -> Operand,
    last: impl Fn(usize) -> Operand,
    fetch: impl Fn(usize, usize),
    out: &mut [f32],
) {
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    for b in 0..x.blocks() {
        let width = x.width(b);
        let x = x.block(b, 0, N);
        let first = b * Ints::BLOCK;
        let count = width.min(whole - first);
        let add = |sums: &mut [[__m512; N]; M], m: usize, i: usize, w: Operand| {
            for k in 0..N {
                // SAFETY: `x` has `N` rows of `width` units.
                sums[m][k] = link::<PAIR>(&w, unsafe { x.get_unchecked(k * width + i) }, sums[m][k]);
            }
        };
        for i in 0..count {
            for m in 0..M {
                fetch(m, first + i);
            }
            for m in 0..M {
                add(&mut sums, m, i, operand(m, first + i));
            }
        }
        if count < width {
            for m in 0..M {
                add(&mut sums, m, count, last(m));
            }
        }
    }
    for m in 0..M {
        for k in 0..N {
            out[m * N + k] = tree_sum(sums[m][k]);
        }
    }
}

/// One link of 16 chains.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn link<const PAIR: bool>(w: &Operand, x: &Ints, sum: __m512) -> __m512 {
    // SAFETY: each part of `x` has 64 bytes, aligned as `x` is.
    let (first, second, start) = unsafe {
        (
            _mm512_load_si512(x.first.as_ptr().cast()),
            _mm512_load_si512(x.second.as_ptr().cast()),
            _mm512_load_si512(x.start.as_ptr().cast()),
        )
    };
    let mut ints = _mm512_dpbusd_epi32(start, w.first, first);
    if PAIR {
        ints = _mm512_dpbusd_epi32(ints, w.second, second);
    }
    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(ints), w.scale);
    _mm512_fmadd_ps(scaled, load_array(&x.scale), sum)
}

/// [`plain::decode_ints`] of rows with [`fast_scales`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Codes]) {
    let first = block * Codes::BLOCK;
    with_blocks!(w, row, 1, 0, |_PAIR, whole, operand, last, fetch| {
        for (i, out) in out.iter_mut().enumerate() {
            // The next block of this row.
            fetch(0, first + i + Codes::BLOCK);
            let operand = if first + i < whole { operand(0, first + i) } else { last(0) };
            // SAFETY: each part of `out` has 64 bytes, aligned as `out` is.
            unsafe {
                _mm512_store_si512(out.first.as_mut_ptr().cast(), operand.first);
                _mm512_store_si512(out.second.as_mut_ptr().cast(), operand.second);
                _mm512_store_ps(out.scale.as_mut_ptr(), operand.scale);
            }
        }
    });
}

/// Rows and columns of a tile of sums.
const TILE: usize = 4;

/// [`plain::multiply_ints`] in tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn multiply<const PAIR: bool>(width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks(TILE * width).zip(lanes.chunks_mut(TILE * n)) {
        for (i, x) in x.chunks(TILE * width).enumerate() {
            let lanes = &mut lanes[TILE * i..];
            match x.len() / width {
                4 => tiles::<4, PAIR>(width, n, w, x, lanes),
                3 => tiles::<3, PAIR>(width, n, w, x, lanes),
                2 => tiles::<2, PAIR>(width, n, w, x, lanes),
                _ => tiles::<1, PAIR>(width, n, w, x, lanes),
            }
        }
    }
}

/// One tile, or the rows of what is left one by one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tiles<const N: usize, const PAIR: bool>(
    width: usize,
    n: usize,
    w: &[Codes],
    x: &[Ints],
    lanes: &mut [Lanes],
) {
    if w.len() == TILE * width {
        tile::<TILE, N, PAIR>(width, n, w, x, lanes);
    } else {
        for (m, w) in w.chunks_exact(width).enumerate() {
            tile::<1, N, PAIR>(width, n, w, x, &mut lanes[m * n..]);
        }
    }
}

/// `M` weight rows and `N` rows of activations; `n` is the distance of weight rows in `lanes`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tile<const M: usize, const N: usize, const PAIR: bool>(
    width: usize,
    n: usize,
    w: &[Codes],
    x: &[Ints],
    lanes: &mut [Lanes],
) {
    let (w, x) = (&w[..M * width], &x[..N * width]);
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    for m in 0..M {
        for k in 0..N {
            sums[m][k] = load(&lanes[m * n + k]);
        }
    }
    for i in 0..width {
        for m in 0..M {
            // SAFETY: `i < width`, and `w` has `M` rows of `width`. Each part of it has 64 bytes, aligned as it is.
            let operand = unsafe {
                let w = w.get_unchecked(m * width + i);
                Operand {
                    first: _mm512_load_si512(w.first.as_ptr().cast()),
                    second: _mm512_load_si512(w.second.as_ptr().cast()),
                    scale: _mm512_load_ps(w.scale.as_ptr()),
                }
            };
            for k in 0..N {
                // SAFETY: `i < width`, and `x` has `N` rows of `width`.
                sums[m][k] = link::<PAIR>(&operand, unsafe { x.get_unchecked(k * width + i) }, sums[m][k]);
            }
        }
    }
    for m in 0..M {
        for k in 0..N {
            store(&mut lanes[m * n + k], sums[m][k]);
        }
    }
}
