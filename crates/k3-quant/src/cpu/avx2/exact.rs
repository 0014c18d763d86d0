//! Products in [`crate::cpu::Mode::Exact`].

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::plain::fp8_value;
use super::{DIRECT, GROUP, LANES, Pair, load, store, table, tree_sum};
use crate::cpu::STEP;
use crate::cpu::activations::{Blocked, Lanes, Unit};
use crate::cpu::prefetch::{SHORT_ROW, fetch, fetch_scales, rows_ahead};
use crate::cpu::product::{FOLDED, Kernel, rescale_exact};
use crate::cpu::tables;
use crate::{E2M1, E4M3, E8M0, Matrix, MatrixData, Scales, WeightFormat};

/// Exact products. Named only where AVX2 and FMA have been found.
pub(in crate::cpu) struct Exact;

impl Kernel for Exact {
    type X = Lanes;
    type W = Lanes;
    const DIRECT: usize = DIRECT;
    const MANY: usize = 64;

    fn direct(w: &Matrix, rows: Range<usize>, x: &Blocked<Lanes>, out: &mut [f32]) -> bool {
        // SAFETY: this type is named only where AVX2 and FMA have been found.
        unsafe {
            // The lookups of nibbles need registers of their own.
            let nibbles =
                matches!(w.format(), WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Int4);
            match x.n {
                1 if nibbles => direct::<2, 1>(w, rows, x, out),
                1 => direct::<4, 1>(w, rows, x, out),
                2 if nibbles => direct::<1, 2>(w, rows, x, out),
                2 => direct::<2, 2>(w, rows, x, out),
                3 if nibbles => direct::<1, 3>(w, rows, x, out),
                3 => direct::<2, 3>(w, rows, x, out),
                _ => direct::<1, 4>(w, rows, x, out),
            }
        }
        true
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Lanes]) {
        // SAFETY: as above.
        unsafe { decode(w, row, block, out) }
    }
    fn multiply(_: WeightFormat, width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
        // SAFETY: as above.
        unsafe { multiply(width, w, x, lanes) }
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_exact(w, rows, out);
    }
}

/// Steps after which lines of weights are asked for.
const FETCH: usize = 4;

/// The weights of a step: those of the first 16 activations, those of the second.
type Step = [Pair; 2];

/// The part of a step that a row has at its end, and zeros.
#[repr(C, align(64))]
struct Padded([u8; 4 * STEP]);

/// The values of 16 codes, which bf16 holds exactly: the low bytes and the high ones.
#[derive(Clone, Copy)]
struct Halves {
    low: [u8; 16],
    high: [u8; 16],
}

impl Halves {
    const fn of(values: [f32; 16]) -> Self {
        let (mut low, mut high) = ([0; 16], [0; 16]);
        let mut code = 0;
        while code < 16 {
            let [a, b, c, d] = values[code].to_le_bytes();
            assert!(a == 0 && b == 0, "no bf16");
            (low[code], high[code]) = (c, d);
            code += 1;
        }
        Self { low, high }
    }
}

const E2M1_HALVES: Halves = Halves::of(E2M1::VALUES);
/// [`E2M1_HALVES`] times each block scale of MXFP4, less [`FOLDED`].
static MXFP4_HALVES: [Halves; 256] = {
    let mut all = [E2M1_HALVES; 256];
    let mut byte = 0;
    while byte < 256 {
        all[byte] = Halves::of(tables::e2m1(E8M0(byte as u8).to_f32() / FOLDED));
        byte += 1;
    }
    all
};
static INT4_HALVES: Halves = Halves::of(tables::INT4);

/// Runs `$body` with three functions of a matrix format, for `$count` rows from `$first` on: `$step(m, i)`, the
/// weights of step `i` of the `m`th of these rows, which the row must have as a whole; `$last(m)`, those of the step at its
/// end that it has in part; `$fetch(m, i)`, which asks for as many weights as [`FETCH`] steps have, of the rows that begin
/// `$ahead` further on: called for all `m` and every [`FETCH`]th `i`, it has asked for all.
macro_rules! with_steps {
    ($w:ident, $first:expr, $count:expr, $ahead:expr, |$step:ident, $last:ident, $fetch:ident| $body:expr) => {{
        let (first, count, cols) = ($first, $count, $w.cols());
        let whole = cols / STEP;
        // Rows of `$bytes` in which a step has `$width`; `$load(address, whether the row has the whole step, m, i)`.
        macro_rules! rows_of {
            ($bytes:expr, $stride:expr, $width:expr, $load:expr) => {{
                let (stride, width) = ($stride, $width);
                let bytes = &$bytes[first * stride..(first + count) * stride];
                let start = bytes.as_ptr();
                let load = $load;
                let $step = |m: usize, i: usize| {
                    debug_assert!(m < count && i < whole);
                    load(start.wrapping_add(m * stride + i * width), true, m, i)
                };
                let $last = |m: usize| {
                    let rest = &bytes[m * stride + whole * width..(m + 1) * stride];
                    let mut padded = Padded([0; 4 * STEP]);
                    padded.0[..rest.len()].copy_from_slice(rest);
                    load(padded.0.as_ptr(), false, m, whole)
                };
                let place = |m: usize, i: usize| {
                    if stride <= SHORT_ROW { (i * count + m * FETCH) * width } else { m * stride + i * width }
                };
                let $fetch = |m: usize, i: usize| {
                    fetch(start.wrapping_add($ahead * stride + place(m, i)), FETCH * width);
                };
                $body
            }};
        }
        match $w.data() {
            MatrixData::F32(bytes) => {
                rows_of!(bytes, cols * 4, STEP * 4, |at: *const u8, _, _, _| {
                    // SAFETY: a step has 128 bytes.
                    unsafe { floats(at) }
                })
            }
            MatrixData::Bf16(bytes) => {
                rows_of!(bytes, cols * 2, STEP * 2, |at: *const u8, _, _, _| {
                    // SAFETY: a step has 64 bytes.
                    unsafe { pairs(at) }
                })
            }
            MatrixData::Int8 { codes, .. } => {
                rows_of!(codes, cols, STEP, |at: *const u8, _, _, _| {
                    // SAFETY: a step has 32 bytes.
                    unsafe { integers(at) }
                })
            }
            MatrixData::Mxfp4 { packed, scale } => {
                let scale: &[E8M0] = bytemuck::cast_slice(&scale[first * whole..(first + count) * whole]);
                rows_of!(packed, cols / 2, LANES, |at: *const u8, _, m, i| {
                    // SAFETY: each row has `whole` blocks of a step each.
                    let E8M0(scale) = unsafe { *scale.get_unchecked(m * whole + i) };
                    // SAFETY: a step has 16 bytes.
                    unsafe { look_up(registers(&MXFP4_HALVES[usize::from(scale)]), at) }
                })
            }
            MatrixData::Nvfp4 { packed, scale, .. } => {
                let blocks = cols / 16;
                let scale: &[E4M3] = bytemuck::cast_slice(&scale[first * blocks..(first + count) * blocks]);
                let tables = registers(&E2M1_HALVES);
                rows_of!(packed, cols / 2, LANES, |at: *const u8, whole: bool, m, i| {
                    let value = |b: usize| {
                        // SAFETY: the row has this block.
                        fp8_value(unsafe { *scale.get_unchecked(m * blocks + b) })
                    };
                    // Half a step has one block.
                    let scales = [value(2 * i), if whole { value(2 * i + 1) } else { 0.0 }];
                    // SAFETY: a step has 16 bytes.
                    scaled(unsafe { look_up(tables, at) }, scales)
                })
            }
            MatrixData::Int4 { packed, scale } => {
                let groups = whole / 2;
                let tables = registers(&INT4_HALVES);
                macro_rules! with_scales {
                    ($type:ty, $bytes:ident, $widen:expr) => {{
                        let scale = &$bytes[first * groups * size_of::<$type>()..];
                        let scale: &[$type] =
                            bytemuck::cast_slice(&scale[..count * groups * size_of::<$type>()]);
                        let widen = $widen;
                        rows_of!(packed, cols / 2, LANES, |at: *const u8, _, m, i| {
                            // SAFETY: each row has `whole / 2` groups of two steps each.
                            let scale: f32 = widen(unsafe { *scale.get_unchecked(m * groups + i / 2) });
                            // SAFETY: a step has 16 bytes.
                            scaled(unsafe { look_up(tables, at) }, [scale / FOLDED; 2])
                        })
                    }};
                }
                match scale {
                    Scales::Bf16(bytes) => {
                        with_scales!(u16, bytes, |s: u16| f32::from_bits(u32::from(s) << 16))
                    }
                    Scales::F32(bytes) => with_scales!(f32, bytes, |s: f32| s),
                }
            }
        }
    }};
}

/// A step of f32.
///
/// # Safety
/// 128 bytes are there to be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn floats(at: *const u8) -> Step {
    let eight = |i: usize| {
        // SAFETY: the caller's; the load asks for no alignment.
        unsafe { _mm256_loadu_ps(at.wrapping_add(32 * i).cast()) }
    };
    [[eight(0), eight(1)], [eight(2), eight(3)]]
}

/// A step of bf16: even columns, odd columns.
///
/// # Safety
/// 64 bytes are there to be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn pairs(at: *const u8) -> Step {
    let half = |i: usize| {
        // SAFETY: the caller's; the load asks for no alignment.
        split_pairs(unsafe { _mm256_loadu_si256(at.wrapping_add(32 * i).cast()) })
    };
    let ([even0, odd0], [even1, odd1]) = (half(0), half(1));
    [[even0, even1], [odd0, odd1]]
}

/// The low and the high bf16 of each pair.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn split_pairs(pairs: __m256i) -> Pair {
    let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(i32::MIN >> 15));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
}

/// A step of INT8.
///
/// # Safety
/// 32 bytes are there to be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn integers(at: *const u8) -> Step {
    let eight = |i: usize| {
        // SAFETY: the caller's; the load asks for no alignment.
        let codes = unsafe { _mm_loadl_epi64(at.wrapping_add(8 * i).cast()) };
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
    };
    [[eight(0), eight(1)], [eight(2), eight(3)]]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn registers(halves: &Halves) -> [__m256i; 2] {
    [table(&halves.low), table(&halves.high)]
}

/// A step of nibbles: even columns, odd columns.
///
/// # Safety
/// 16 bytes are there to be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn look_up(tables: [__m256i; 2], at: *const u8) -> Step {
    // SAFETY: the caller's; the load asks for no alignment.
    let bytes = unsafe { _mm_loadu_si128(at.cast()) };
    // Bytes 0..4 and 8..12 in the lower 128 bits, so that the halves below are those of lanes.
    let words = _mm256_cvtepu8_epi16(_mm_shuffle_epi32::<0b11_01_10_00>(bytes));
    let codes = _mm256_or_si256(words, _mm256_slli_epi16::<4>(words));
    let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    let (low, high) = (_mm256_shuffle_epi8(tables[0], codes), _mm256_shuffle_epi8(tables[1], codes));
    let [even0, odd0] = split_pairs(_mm256_unpacklo_epi8(low, high));
    let [even1, odd1] = split_pairs(_mm256_unpackhi_epi8(low, high));
    [[even0, even1], [odd0, odd1]]
}

/// A step times the first scale in lanes 0..8, and the second in the others.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scaled(step: Step, scales: [f32; 2]) -> Step {
    let scales = [_mm256_set1_ps(scales[0]), _mm256_set1_ps(scales[1])];
    step.map(|[first, second]| [_mm256_mul_ps(first, scales[0]), _mm256_mul_ps(second, scales[1])])
}

/// Weights are used where they are decoded. The rows of [`GROUP`] meet the same block of activations, `T` rows at a time:
/// their chains of sums overlap, and share loads of activations.
#[target_feature(enable = "avx2,fma")]
fn direct<const T: usize, const N: usize>(
    w: &Matrix,
    rows: Range<usize>,
    x: &Blocked<Lanes>,
    out: &mut [f32],
) {
    debug_assert!(rows.len().is_multiple_of(GROUP));
    let ahead = rows_ahead(w, GROUP);
    for (first, out) in rows.step_by(GROUP).zip(out.chunks_exact_mut(GROUP * N)) {
        fetch_scales(w, first + ahead, GROUP);
        with_steps!(w, first, GROUP, ahead, |step, last, fetch| {
            direct_rows::<GROUP, T, N>(w.cols(), x, step, last, fetch, out);
        });
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn direct_rows<const M: usize, const T: usize, const N: usize>(
    cols: usize,
    x: &Blocked<Lanes>,
    step: impl Fn(usize, usize) -> Step,
    last: impl Fn(usize) -> Step,
    fetch: impl Fn(usize, usize),
    out: &mut [f32],
) {
    const BLOCK: usize = Lanes::BLOCK / 2;
    let whole = cols / STEP;
    let mut totals = [[Lanes::ZERO; N]; M];
    for block in 0..x.blocks() {
        let width = x.width(block);
        let x = x.block(block, 0, N);
        let (first, count) = (block * BLOCK, BLOCK.min(whole - block * BLOCK));
        for top in (0..M).step_by(T) {
            let mut sums = [[[_mm256_setzero_ps(); 2]; N]; T];
            let add = |sums: &mut [[Pair; N]; T], m: usize, i: usize, w: Step| {
                for k in 0..N {
                    // SAFETY: `x` has `N` rows of `width` units, two for each step.
                    let [x0, x1] = unsafe {
                        [
                            load(x.get_unchecked(k * width + 2 * i)),
                            load(x.get_unchecked(k * width + 2 * i + 1)),
                        ]
                    };
                    for half in 0..2 {
                        sums[m][k][half] = _mm256_fmadd_ps(w[0][half], x0[half], sums[m][k][half]);
                        sums[m][k][half] = _mm256_fmadd_ps(w[1][half], x1[half], sums[m][k][half]);
                    }
                }
            };
            let mut i = 0;
            while i + FETCH <= count {
                for m in 0..T {
                    fetch(top + m, first + i);
                }
                for i in i..i + FETCH {
                    for m in 0..T {
                        add(&mut sums, m, i, step(top + m, first + i));
                    }
                }
                i += FETCH;
            }
            while i < count {
                for m in 0..T {
                    add(&mut sums, m, i, step(top + m, first + i));
                }
                i += 1;
            }
            if 2 * count < width {
                for m in 0..T {
                    add(&mut sums, m, count, last(top + m));
                }
            }
            for (totals, sums) in totals[top..].iter_mut().zip(sums) {
                for (total, sum) in totals.iter_mut().zip(sums) {
                    let old = load(total);
                    store(total, [_mm256_add_ps(old[0], sum[0]), _mm256_add_ps(old[1], sum[1])]);
                }
            }
        }
    }
    for (out, total) in out.iter_mut().zip(totals.as_flattened()) {
        *out = tree_sum(load(total));
    }
}

/// [`super::plain::decode`]
#[target_feature(enable = "avx2,fma")]
fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Lanes]) {
    let first = block * Lanes::BLOCK / 2;
    let whole = w.cols() / STEP - first;
    with_steps!(w, row, 1, 0, |step, last, fetch| {
        for (i, out) in out.chunks_exact_mut(2).enumerate() {
            if i % FETCH == 0 {
                // The next block of this row.
                fetch(0, first + i + Lanes::BLOCK / 2);
            }
            let [even, odd] = if i < whole { step(0, first + i) } else { last(0) };
            store(&mut out[0], even);
            store(&mut out[1], odd);
        }
    });
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
