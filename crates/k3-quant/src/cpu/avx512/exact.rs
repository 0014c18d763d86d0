//! Products in [`crate::cpu::Mode::Exact`].

#![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::{DIRECT, LANES, four_sums, load, load_array, store, sum};
use crate::cpu::STEP;
use crate::cpu::activations::{Blocked, Lanes, Unit};
use crate::cpu::prefetch::{LINE, SHORT_ROW, fetch, fetch_scales, rows_ahead};
use crate::cpu::product::{FOLDED, Kernel, rescale_exact};
use crate::cpu::tables;
use crate::{E4M3, E8M0, Matrix, MatrixData, Scales, WeightFormat};

/// Exact products. Named only where the features of [`crate::cpu::InstructionSet::Avx512`] have been found.
pub(in crate::cpu) struct Exact;

impl Kernel for Exact {
    type X = Lanes;
    type W = Lanes;
    const DIRECT: usize = DIRECT;
    const MANY: usize = 64;

    fn direct(w: &Matrix, rows: Range<usize>, x: &Blocked<Lanes>, out: &mut [f32]) -> bool {
        // SAFETY: this type is named only where the features have been found.
        unsafe {
            match x.n {
                // The row of activations leaves the first-level cache while weights pass through it: eight rows of
                // weights, which have registers enough here, bring it back half as often as four.
                1 if matches!(w.data(), MatrixData::Bf16(_)) => direct::<8, 1>(w, rows, x, out),
                1 => direct::<4, 1>(w, rows, x, out),
                2 => direct::<4, 2>(w, rows, x, out),
                3 => direct::<4, 3>(w, rows, x, out),
                _ => direct::<4, 4>(w, rows, x, out),
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
    fn sum(lanes: &[Lanes], out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { sum(lanes, out) }
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_exact(w, rows, out);
    }
}

/// Steps after which lines of weights are asked for.
const FETCH: usize = 4;

/// The values of the 16 codes of a format of 4 bits: a register.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Table([f32; LANES]);

static INTS: Table = Table(tables::INT4);

/// A table of E2M1 for each value of a block scale. A matrix has few of them, which stay in the first-level cache; to load
/// one takes nothing from the multipliers, which would bind before the memory does.
macro_rules! scaled_tables {
    ($scale:ident, $divisor:expr) => {{
        static TABLES: [Table; 256] = {
            let mut tables = [Table([0.0; LANES]); 256];
            let mut byte = 0;
            while byte < 256 {
                tables[byte] = Table(tables::e2m1($scale(byte as u8).to_f32() / $divisor));
                byte += 1;
            }
            tables
        };
        &TABLES
    }};
}

/// Runs `$body` with three functions of a matrix format, for `$count` rows from `$first` on: `$step(m, i)`, the
/// registers of step `i` of the `m`th of these rows, which the row must have as a whole; `$last(m)`, those of the step at its
/// end that it has in part; `$fetch(m, i)`, which asks for as many weights as [`FETCH`] steps have, of the rows that begin
/// `$ahead` further on: called for all `m` and every [`FETCH`]th `i`, it has asked for all.
macro_rules! with_steps {
    ($w:ident, $first:expr, $count:expr, $ahead:expr, |$step:ident, $last:ident, $fetch:ident| $body:expr) => {{
        let (first, count, cols) = ($first, $count, $w.cols());
        let (whole, rest) = (cols / STEP, cols % STEP);
        // Rows of `$bytes` in which a step has `$width`; `$load(address, mask of columns)`.
        macro_rules! rows_of {
            ($bytes:expr, $stride:expr, $width:expr, $load:expr) => {{
                let (stride, width) = ($stride, $width);
                let start = $bytes[first * stride..(first + count) * stride].as_ptr();
                let load = $load;
                let $step = |m: usize, i: usize| {
                    debug_assert!(m < count && i < whole);
                    load(start.wrapping_add(m * stride + i * width), u32::MAX, m, i)
                };
                let $last = |m: usize| {
                    debug_assert!(m < count);
                    load(start.wrapping_add(m * stride + whole * width), (1 << rest) - 1, m, whole)
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
                rows_of!(bytes, cols * 4, STEP * 4, |at: *const u8, mask: u32, _, _| {
                    let [low, high] = [at, at.wrapping_add(LINE)];
                    // SAFETY: the row has the columns of the mask from this address on; others are not read.
                    unsafe {
                        [
                            _mm512_maskz_loadu_ps(mask as u16, low.cast()),
                            _mm512_maskz_loadu_ps((mask >> LANES) as u16, high.cast()),
                        ]
                    }
                })
            }
            MatrixData::Bf16(bytes) => {
                rows_of!(bytes, cols * 2, STEP * 2, |at: *const u8, mask: u32, _, _| {
                    // SAFETY: the row has the columns of the mask from this address on; others are not read.
                    let pairs = unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) };
                    let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(i32::MIN >> 15));
                    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
                })
            }
            MatrixData::Int8 { codes, .. } => {
                rows_of!(codes, cols, STEP, |at: *const u8, mask: u32, _, _| {
                    // SAFETY: the row has the columns of the mask from this address on; others are not read.
                    let codes = unsafe { _mm256_maskz_loadu_epi8(mask, at.cast()) };
                    let float = |codes| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
                    [float(_mm256_castsi256_si128(codes)), float(_mm256_extracti128_si256::<1>(codes))]
                })
            }
            MatrixData::Mxfp4 { packed, scale } => {
                let scale: &[E8M0] = bytemuck::cast_slice(&scale[first * whole..(first + count) * whole]);
                let tables = scaled_tables!(E8M0, FOLDED);
                rows_of!(packed, cols / 2, LANES, |at: *const u8, _, m, i| {
                    // SAFETY: each row has `whole` blocks of a step each.
                    let E8M0(scale) = unsafe { *scale.get_unchecked(m * whole + i) };
                    let table = load_array(&tables[usize::from(scale)].0);
                    // SAFETY: a step has 16 bytes; the load asks for no alignment.
                    look_up(table, unsafe { _mm_loadu_si128(at.cast()) })
                })
            }
            MatrixData::Nvfp4 { packed, scale, .. } => {
                let blocks = cols / 16;
                let scale: &[E4M3] = bytemuck::cast_slice(&scale[first * blocks..(first + count) * blocks]);
                let tables = scaled_tables!(E4M3, 1.0);
                rows_of!(packed, cols / 2, LANES, |at: *const u8, mask: u32, m, i| {
                    let table = |b: usize| {
                        // SAFETY: callers ask for blocks that the row has.
                        let E4M3(scale) = unsafe { *scale.get_unchecked(m * blocks + b) };
                        load_array(&tables[usize::from(scale)].0)
                    };
                    // SAFETY: a step has 16 bytes, the last one of a row perhaps 8; others are not read.
                    unsafe {
                        if mask == u32::MAX {
                            look_up_two([table(2 * i), table(2 * i + 1)], _mm_loadu_si128(at.cast()))
                        } else {
                            // What is not there has code zero.
                            look_up(table(2 * i), _mm_loadl_epi64(at.cast()))
                        }
                    }
                })
            }
            MatrixData::Int4 { packed, scale } => {
                let groups = whole / 2;
                let table = load_array(&INTS.0);
                macro_rules! with_scales {
                    ($type:ty, $bytes:ident, $widen:expr) => {{
                        let scale = &$bytes[first * groups * size_of::<$type>()..];
                        let scale: &[$type] =
                            bytemuck::cast_slice(&scale[..count * groups * size_of::<$type>()]);
                        let widen = $widen;
                        rows_of!(packed, cols / 2, LANES, |at: *const u8, _, m, i| {
                            // SAFETY: each row has `whole / 2` groups of two steps each.
                            let scale: f32 = widen(unsafe { *scale.get_unchecked(m * groups + i / 2) });
                            // SAFETY: a step has 16 bytes; the load asks for no alignment.
                            let bytes = unsafe { _mm_loadu_si128(at.cast()) };
                            look_up(_mm512_mul_ps(table, _mm512_set1_ps(scale / FOLDED)), bytes)
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

/// The entries of 16 packed bytes: even columns, odd columns. A table of 16 entries is one register, so this is one
/// permutation, which looks at the low four bits of an index only.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn look_up(table: __m512, bytes: __m128i) -> [__m512; 2] {
    let bytes = _mm512_cvtepu8_epi32(bytes);
    [_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table)]
}

/// [`look_up`] with a table for lanes 0..8 and one for lanes 8..16: the fifth bit of an index says which.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn look_up_two(tables: [__m512; 2], bytes: __m128i) -> [__m512; 2] {
    let (nibble, second) = (_mm512_set1_epi32(15), _mm512_maskz_set1_epi32(0xff00, 16));
    let bytes = _mm512_cvtepu8_epi32(bytes);
    // `bytes & nibble | second`
    let even = _mm512_ternarylogic_epi32::<0b1110_1010>(bytes, nibble, second);
    let odd = _mm512_or_si512(_mm512_srli_epi32::<4>(bytes), second);
    [_mm512_permutex2var_ps(tables[0], even, tables[1]), _mm512_permutex2var_ps(tables[0], odd, tables[1])]
}

/// Weights are used where they are decoded, `M` rows at a time, of which `rows` has a multiple: their chains of sums
/// overlap, and share loads of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn direct<const M: usize, const N: usize>(
    w: &Matrix,
    rows: Range<usize>,
    x: &Blocked<Lanes>,
    out: &mut [f32],
) {
    debug_assert!(rows.len().is_multiple_of(M));
    let ahead = rows_ahead(w, M);
    for (first, out) in rows.step_by(M).zip(out.chunks_exact_mut(M * N)) {
        fetch_scales(w, first + ahead, M);
        with_steps!(w, first, M, ahead, |step, last, fetch| {
            direct_rows::<M, N>(w.cols(), x, step, last, fetch, out);
        });
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn direct_rows<const M: usize, const N: usize>(
    cols: usize,
    x: &Blocked<Lanes>,
    step: impl Fn(usize, usize) -> [__m512; 2],
    last: impl Fn(usize) -> [__m512; 2],
    fetch: impl Fn(usize, usize),
    out: &mut [f32],
) {
    const BLOCK: usize = Lanes::BLOCK / 2;
    let whole = cols / STEP;
    let mut totals = [[_mm512_setzero_ps(); N]; M];
    for block in 0..x.blocks() {
        let width = x.width(block);
        let x = x.block(block, 0, N);
        let (first, count) = (block * BLOCK, BLOCK.min(whole - block * BLOCK));
        let mut sums = [[_mm512_setzero_ps(); N]; M];
        let add = |sums: &mut [[__m512; N]; M], m: usize, i: usize, w: [__m512; 2]| {
            for k in 0..N {
                // SAFETY: `x` has `N` rows of `width` units, two for each step.
                let (x0, x1) =
                    unsafe { (x.get_unchecked(k * width + 2 * i), x.get_unchecked(k * width + 2 * i + 1)) };
                sums[m][k] = _mm512_fmadd_ps(w[0], load(x0), sums[m][k]);
                sums[m][k] = _mm512_fmadd_ps(w[1], load(x1), sums[m][k]);
            }
        };
        let mut i = 0;
        while i + FETCH <= count {
            for m in 0..M {
                fetch(m, first + i);
            }
            for i in i..i + FETCH {
                for m in 0..M {
                    add(&mut sums, m, i, step(m, first + i));
                }
            }
            i += FETCH;
        }
        while i < count {
            for m in 0..M {
                add(&mut sums, m, i, step(m, first + i));
            }
            i += 1;
        }
        if 2 * count < width {
            for m in 0..M {
                add(&mut sums, m, count, last(m));
            }
        }
        for m in 0..M {
            for k in 0..N {
                totals[m][k] = _mm512_add_ps(totals[m][k], sums[m][k]);
            }
        }
    }
    const { assert!(M.is_multiple_of(4)) }
    for m in (0..M).step_by(4) {
        for k in 0..N {
            let sums = four_sums([totals[m][k], totals[m + 1][k], totals[m + 2][k], totals[m + 3][k]]);
            for (i, sum) in sums.into_iter().enumerate() {
                out[(m + i) * N + k] = sum;
            }
        }
    }
}

/// [`super::plain::decode`]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
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

/// Rows of a tile of sums, which with a row of weights and of activations fills the registers.
const TILE: usize = 4;
/// Columns of a tile.
const TILE_N: usize = 6;

/// [`super::plain::multiply`] in tiles. The weights of two tiles and the activations of one stay in the first-level cache.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn multiply(width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks(2 * TILE * width).zip(lanes.chunks_mut(2 * TILE * n)) {
        for (i, x) in x.chunks(TILE_N * width).enumerate() {
            for (w, lanes) in w.chunks(TILE * width).zip(lanes.chunks_mut(TILE * n)) {
                let lanes = &mut lanes[TILE_N * i..];
                match x.len() / width {
                    6 => tiles::<6>(width, n, w, x, lanes),
                    5 => tiles::<5>(width, n, w, x, lanes),
                    4 => tiles::<4>(width, n, w, x, lanes),
                    3 => tiles::<3>(width, n, w, x, lanes),
                    2 => tiles::<2>(width, n, w, x, lanes),
                    _ => tiles::<1>(width, n, w, x, lanes),
                }
            }
        }
    }
}

/// One tile, or the rows of what is left one by one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tiles<const N: usize>(width: usize, n: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
    if w.len() == TILE * width {
        tile::<TILE, N>(width, n, w, x, lanes);
    } else {
        for (m, w) in w.chunks_exact(width).enumerate() {
            tile::<1, N>(width, n, w, x, &mut lanes[m * n..]);
        }
    }
}

/// `M` weight rows and `N` rows of activations; `n` is the distance of weight rows in `lanes`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tile<const M: usize, const N: usize>(
    width: usize,
    n: usize,
    w: &[Lanes],
    x: &[Lanes],
    lanes: &mut [Lanes],
) {
    let (w, x) = (&w[..M * width], &x[..N * width]);
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    for i in 0..width {
        let mut ws = [_mm512_setzero_ps(); M];
        for m in 0..M {
            // SAFETY: `i < width`, and `w` has `M` rows of `width`.
            ws[m] = load(unsafe { w.get_unchecked(m * width + i) });
        }
        for k in 0..N {
            // SAFETY: `i < width`, and `x` has `N` rows of `width`.
            let x = load(unsafe { x.get_unchecked(k * width + i) });
            for m in 0..M {
                sums[m][k] = _mm512_fmadd_ps(ws[m], x, sums[m][k]);
            }
        }
    }
    for m in 0..M {
        for k in 0..N {
            let lanes = &mut lanes[m * n + k];
            store(lanes, _mm512_add_ps(load(lanes), sums[m][k]));
        }
    }
}
