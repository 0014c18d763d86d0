//! The loops that define the results, written so that compilers turn them into vector code.

use std::ops::Range;

use half::bf16;

use super::activations::{Blocked, Ints, Lanes, Unit};
use super::product::{FOLDED, Kernel, rescale_exact, scale_rows};
use super::{LANES, STEP};
use crate::{E2M1, E4M3, E8M0, INT4_GROUP, Matrix, MatrixData, Row, WeightFormat, int4_value};

/// Products in [`super::Mode::Exact`].
pub(super) struct Exact;

impl Kernel for Exact {
    type X = Lanes;
    type W = Lanes;
    const DIRECT: usize = 0;
    const MANY: usize = 0;

    fn direct(_: &Matrix, _: Range<usize>, _: &Blocked<Lanes>, _: &mut [f32]) -> bool {
        false
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Lanes]) {
        decode(w.row(row), block, out);
    }
    fn multiply(_: WeightFormat, width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
        multiply(width, w, x, lanes);
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_exact(w, rows, out);
    }
}

/// The weights of block `block` of a row, as exact as f32 can hold them, in the order of their activations. They lack what
/// [`rescale_exact`] multiplies sums by.
#[inline(always)]
fn decode(row: Row<'_>, block: usize, out: &mut [Lanes]) {
    let first = block * Lanes::BLOCK / 2;
    match row {
        Row::F32(w) => natural(&w[first * STEP..], out, |w| w),
        Row::Int8 { codes, .. } => natural(&codes[first * STEP..], out, f32::from),
        Row::Bf16(w) => {
            for (out, w) in out.as_chunks_mut().0.iter_mut().zip(w[first * STEP..].chunks(STEP)) {
                widen_pairs(&padded(w, bf16::ZERO), out);
            }
        }
        Row::Mxfp4 { packed, scale } => {
            let scale = &scale[first..];
            nibbles(&packed[first * LANES..], out, scale_codes, |i| [folded_scale(scale[i]); 2]);
        }
        Row::Nvfp4 { packed, scale, .. } => {
            let scale = &scale[2 * first..];
            // A last half step has no second block; its codes are zero.
            nibbles(&packed[first * LANES..], out, scale_codes, |i| {
                [fp8_value(scale[2 * i]), scale.get(2 * i + 1).map_or(0.0, |s| fp8_value(*s))]
            });
        }
        Row::Int4 { packed, scale } => {
            let group = |i| (first + i) / (INT4_GROUP / STEP);
            nibbles(&packed[first * LANES..], out, scale_ints, |i| [scale.get(group(i)) / FOLDED; 2]);
        }
    }
}

#[inline(always)]
fn natural<T: Copy + Default>(w: &[T], out: &mut [Lanes], value: impl Fn(T) -> f32) {
    for (out, w) in out.chunks_exact_mut(2).zip(w.chunks(STEP)) {
        let w: [T; STEP] = padded(w, T::default());
        for j in 0..LANES {
            out[0].0[j] = value(w[j]);
            out[1].0[j] = value(w[LANES + j]);
        }
    }
}

/// Steps of packed codes.
#[inline(always)]
fn nibbles(
    packed: &[u8],
    out: &mut [Lanes],
    codes: impl Fn(&[u8; LANES], [f32; 2], &mut [Lanes; 2]),
    scales: impl Fn(usize) -> [f32; 2],
) {
    for (i, (out, bytes)) in out.as_chunks_mut().0.iter_mut().zip(packed.chunks(LANES)).enumerate() {
        codes(&padded(bytes, 0), scales(i), out);
    }
}

/// A step of bf16: even columns, odd columns.
fn widen_pairs(w: &[bf16; STEP], out: &mut [Lanes; 2]) {
    for j in 0..LANES {
        out[0].0[j] = widen(w[2 * j]);
        out[1].0[j] = widen(w[2 * j + 1]);
    }
}

/// A step of E2M1: even columns, odd columns. Lanes 0..8 have the first scale, the others the second.
fn scale_codes(bytes: &[u8; LANES], scales: [f32; 2], out: &mut [Lanes; 2]) {
    for j in 0..LANES {
        out[0].0[j] = code_value(bytes[j]) * scales[j / (LANES / 2)];
        out[1].0[j] = code_value(bytes[j] >> 4) * scales[j / (LANES / 2)];
    }
}

/// [`scale_codes`] of INT4.
#[inline(always)]
fn scale_ints(bytes: &[u8; LANES], scales: [f32; 2], out: &mut [Lanes; 2]) {
    for j in 0..LANES {
        out[0].0[j] = int4_value(bytes[j]) * scales[0];
        out[1].0[j] = int4_value(bytes[j] >> 4) * scales[0];
    }
}

/// The last elements of a row, and `rest`.
#[inline(always)]
pub(super) fn padded<T: Copy, const N: usize>(w: &[T], rest: T) -> [T; N] {
    if let Ok(whole) = w.try_into() {
        return whole;
    }
    let mut out = [rest; N];
    out[..w.len()].copy_from_slice(w);
    out
}

/// [`Kernel::multiply`] of exact products: within a block 16 chains of fused multiply-adds in the order of columns, which
/// begin at zero; the chains of a block are added to those of the blocks before.
#[inline(always)]
fn multiply(width: usize, w: &[Lanes], x: &[Lanes], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks_exact(width).zip(lanes.chunks_exact_mut(n)) {
        for (x, lanes) in x.chunks_exact(width).zip(lanes) {
            let mut sums = [0.0; LANES];
            for (w, x) in w.iter().zip(x) {
                for j in 0..LANES {
                    sums[j] = w.0[j].mul_add(x.0[j], sums[j]);
                }
            }
            for j in 0..LANES {
                lanes.0[j] += sums[j];
            }
        }
    }
}

/// [`E2M1::to_f32`] of a low nibble without a table, so that compilers turn it into vector code. Exponent and mantissa
/// bits move to their place in an f32, rebiased; the two codes below 1 (0 and 0.5) are no normal numbers in E2M1 and
/// come from an integer.
#[inline(always)]
fn code_value(byte: u8) -> f32 {
    /// What E2M1's exponent field lacks to f32's.
    const REBIAS: u32 = 126 << 23;
    let code = u32::from(byte);
    let magnitude = code & 7;
    let small = magnitude as f32 * 0.5;
    let bits = if magnitude < 2 { small.to_bits() } else { (magnitude << 22) + REBIAS };
    f32::from_bits(bits | ((code & 8) << 28))
}

/// The value of a code by the arithmetic that the kernels use, for tests against [`E2M1::VALUES`].
#[doc(hidden)]
pub fn kernel_code_value(code: E2M1) -> f32 {
    code_value(code.0)
}

/// The value of a bf16. Unlike `bf16::to_f32` it does not quiet NaNs, and so compiles to a shift.
#[inline(always)]
pub(super) fn widen(w: bf16) -> f32 {
    f32::from_bits(u32::from(w.to_bits()) << 16)
}

/// A table of a scale's values, each divided by a power of two.
macro_rules! scale_table {
    ($type:ident, $divisor:expr) => {{
        static VALUES: [f32; 256] = {
            let mut values = [0.0; 256];
            let mut byte = 0;
            while byte < 256 {
                values[byte] = $type(byte as u8).to_f32() / $divisor;
                byte += 1;
            }
            values
        };
        &VALUES
    }};
}

/// A block scale of MXFP4, less [`FOLDED`].
#[inline(always)]
fn folded_scale(scale: E8M0) -> f32 {
    scale_table!(E8M0, FOLDED)[usize::from(scale.0)]
}

/// [`E4M3::to_f32`]
#[inline(always)]
pub(super) fn fp8_value(scale: E4M3) -> f32 {
    scale_table!(E4M3, 1.0)[usize::from(scale.0)]
}

/// A block scale of MXFP4, less `2^`[`E8M0_LOWERED`].
#[inline(always)]
pub(super) fn lowered_e8m0(scale: E8M0) -> f32 {
    scale_table!(E8M0, E8M0_FOLDED)[usize::from(scale.0)]
}

/// Products in [`super::Mode::Int8`].
pub(super) struct Int8;

/// The weights of one block of columns as integers.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Codes {
    /// Raised so that none is negative. They meet [`Ints::first`].
    pub(super) first: [u8; 64],
    /// They meet [`Ints::second`].
    pub(super) second: [u8; 64],
    /// The block scale of each lane.
    pub(super) scale: [f32; LANES],
}

impl Unit for Codes {
    const BLOCK: usize = Ints::BLOCK;
    const ZERO: Self = Self { first: [0; 64], second: [0; 64], scale: [0.0; LANES] };
}

impl Kernel for Int8 {
    type X = Ints;
    type W = Codes;
    const DIRECT: usize = 0;
    const MANY: usize = 0;

    fn direct(_: &Matrix, _: Range<usize>, _: &Blocked<Ints>, _: &mut [f32]) -> bool {
        false
    }
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Codes]) {
        decode_ints(w.row(row), block, out, look_up);
    }
    fn multiply(_: WeightFormat, width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
        multiply_ints(width, w, x, lanes);
    }
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
        rescale_ints(w, rows, out);
    }
}

/// Powers of two that block scales of MXFP4 are lowered by in integer products. A lane's integer sum is below that, so
/// that no product of the two overflows.
pub(super) const E8M0_LOWERED: u8 = 15;
const E8M0_FOLDED: f32 = (1_u32 << E8M0_LOWERED) as f32;
/// What block scales of NVFP4 are divided by in integer products: that is how IEEE half precision reads their bits.
const E4M3_FOLDED: f32 = 256.0;
/// E2M1 codes are doubled to be integers, and raised by 12.
pub(super) const RAISED_E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// [`Kernel::rescale`] of integer products.
pub(super) fn rescale_ints(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
    match w.data() {
        MatrixData::Mxfp4 { .. } => out.iter_mut().for_each(|y| *y *= E8M0_FOLDED / 2.0),
        MatrixData::Nvfp4 { global, .. } => {
            out.iter_mut().for_each(|y| *y = global.apply(*y * (E4M3_FOLDED / 2.0)));
        }
        MatrixData::Int8 { scale, .. } => scale_rows(scale, rows, out),
        // The first two are never asked for: they have no integers.
        MatrixData::F32(_) | MatrixData::Bf16(_) | MatrixData::Int4 { .. } => {}
    }
}

/// The nibbles of INT4 are what they are raised to.
const RAISED_INT4: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The weights of block `block` of a row as integers, and their scales. `look_up` fills the codes of packed bytes from a
/// table.
#[inline(always)]
pub(super) fn decode_ints(
    row: Row<'_>,
    block: usize,
    out: &mut [Codes],
    look_up: impl Fn(&[u8; 16], &[u8; 64], &mut Codes),
) {
    let first = block * Codes::BLOCK;
    match row {
        Row::F32(_) | Row::Bf16(_) => {}
        Row::Int8 { codes, .. } => {
            for (out, codes) in out.iter_mut().zip(codes[first * 64..].chunks(64)) {
                let codes: [i8; 64] = padded(codes, 0);
                for j in 0..64 {
                    out.first[j] = codes[j] as u8 ^ 0x80;
                }
                (out.second, out.scale) = ([0; 64], [1.0; LANES]);
            }
        }
        Row::Mxfp4 { packed, scale } => {
            block_scales::<4>(first, out, |i| scale.get(i).map_or(0.0, |s| lowered_e8m0(*s)));
            packed_codes(packed, first, out, |bytes, out| look_up(&RAISED_E2M1, bytes, out));
        }
        Row::Nvfp4 { packed, scale, .. } => {
            let scales = scale_table!(E4M3, E4M3_FOLDED);
            let value = |s: &E4M3| scales[usize::from(s.0)];
            block_scales::<8>(first, out, |i| scale.get(i).map_or(0.0, value));
            packed_codes(packed, first, out, |bytes, out| look_up(&RAISED_E2M1, bytes, out));
        }
        Row::Int4 { packed, scale } => {
            let groups = packed.len() / 32;
            block_scales::<2>(first, out, |i| if i < groups { scale.get(i) } else { 0.0 });
            packed_codes(packed, first, out, |bytes, out| look_up(&RAISED_INT4, bytes, out));
        }
    }
}

/// `G` scales a block.
#[inline(always)]
fn block_scales<const G: usize>(first: usize, out: &mut [Codes], scale: impl Fn(usize) -> f32) {
    for (i, out) in out.iter_mut().enumerate() {
        for (g, lanes) in out.scale.chunks_exact_mut(LANES / G).enumerate() {
            lanes.fill(scale((first + i) * G + g));
        }
    }
}

/// Blocks of packed codes. What is beyond the end of a row meets zeros.
#[inline(always)]
fn packed_codes(packed: &[u8], first: usize, out: &mut [Codes], look_up: impl Fn(&[u8; 64], &mut Codes)) {
    for (out, bytes) in out.iter_mut().zip(packed[first * 64..].chunks(64)) {
        match bytes.try_into() {
            Ok(bytes) => look_up(bytes, out),
            Err(_) => look_up(&padded(bytes, 0), out),
        }
    }
}

/// Both nibbles of each byte.
pub(super) fn look_up(table: &[u8; 16], bytes: &[u8; 64], out: &mut Codes) {
    for j in 0..64 {
        out.first[j] = table[usize::from(bytes[j] & 15)];
        out.second[j] = table[usize::from(bytes[j] >> 4)];
    }
}

/// [`Kernel::multiply`] of integer products: 16 chains of fused multiply-adds in the order of blocks. A link is an exact
/// integer sum times a block scale, which is exact in the formats of 4-bit floats, times the activations' scale.
#[inline(always)]
fn multiply_ints(width: usize, w: &[Codes], x: &[Ints], lanes: &mut [Lanes]) {
    let n = x.len() / width;
    for (w, lanes) in w.chunks_exact(width).zip(lanes.chunks_exact_mut(n)) {
        for (x, lanes) in x.chunks_exact(width).zip(lanes) {
            for (w, x) in w.iter().zip(x) {
                for j in 0..LANES {
                    let mut sum = x.start[j];
                    for c in 4 * j..4 * j + 4 {
                        sum += i32::from(w.first[c]) * i32::from(x.first[c]);
                        sum += i32::from(w.second[c]) * i32::from(x.second[c]);
                    }
                    lanes.0[j] = (sum as f32 * w.scale[j]).mul_add(x.scale[j], lanes.0[j]);
                }
            }
        }
    }
}
