//! The inner loops, written so that compilers turn them into vector code.

use half::bf16;

use super::{LANES, STEP};
use crate::{E2M1, E4M3, E8M0, ScaleRow, int4_value};

#[inline(always)]
pub(super) fn decode_codes(packed: &[u8], values: &mut [f32]) {
    let (bytes, rest) = packed.as_chunks::<LANES>();
    let (steps, last) = values.as_chunks_mut::<STEP>();
    debug_assert!(last.is_empty());
    for (values, bytes) in steps.iter_mut().zip(bytes) {
        for j in 0..LANES {
            values[j] = code_value(bytes[j]);
            values[LANES + j] = code_value(bytes[j] >> 4);
        }
    }
    decode_half_step(rest, steps.get_mut(bytes.len()));
}

/// INT4 rows are whole steps.
#[inline(always)]
pub(super) fn decode_ints(packed: &[u8], values: &mut [f32]) {
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (steps, _) = values.as_chunks_mut::<STEP>();
    for (values, bytes) in steps.iter_mut().zip(bytes) {
        for j in 0..LANES {
            values[j] = int4_value(bytes[j]);
            values[LANES + j] = int4_value(bytes[j] >> 4);
        }
    }
}

/// NVFP4 rows may end in half a step; its other half stays zero.
#[inline(always)]
pub(super) fn decode_half_step(packed: &[u8], values: Option<&mut [f32; STEP]>) {
    if let Some(values) = values {
        for (j, &byte) in packed.iter().enumerate() {
            values[j] = code_value(byte);
            values[LANES + j] = code_value(byte >> 4);
        }
    }
}

/// [`E2M1::to_f32`] of a low nibble without a table, so that compilers turn it into vector code. Exponent and mantissa
/// bits move to their place in an f32, rebiased; the two codes below 1 (0 and 0.5) are no normal numbers in E2M1 and
/// come from an integer. No step passes through an f32 subnormal: a host thread that flushes those to zero gets the same
/// values.
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

/// The value of a bf16. Unlike `bf16::to_f32` it does not quiet NaNs, and so compiles to a shift.
#[inline(always)]
pub(super) fn widen(w: bf16) -> f32 {
    f32::from_bits(u32::from(w.to_bits()) << 16)
}

#[inline(always)]
pub(super) fn dot_bf16(w: &[bf16], x: &[f32]) -> f32 {
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x[..w.len()].as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        for j in 0..LANES {
            low[j] += widen(w[j]) * x[j];
            high[j] += widen(w[LANES + j]) * x[LANES + j];
        }
    }
    for (j, (w, x)) in rest.iter().zip(x_rest).enumerate() {
        let lane = if j < LANES { &mut low[j] } else { &mut high[j - LANES] };
        *lane += widen(*w) * x;
    }
    tree_sum(low, high)
}

/// [`dot_f32`] of an INT8 row that is widened on the way, without its scale.
#[inline(always)]
pub(super) fn dot_int8(w: &[i8], x: &[f32]) -> f32 {
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x[..w.len()].as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        for j in 0..LANES {
            low[j] += f32::from(w[j]) * x[j];
            high[j] += f32::from(w[LANES + j]) * x[LANES + j];
        }
    }
    add_int8_rest(&mut low, &mut high, rest, x_rest);
    tree_sum(low, high)
}

/// The columns after the last whole step.
#[inline(always)]
pub(super) fn add_int8_rest(low: &mut [f32; LANES], high: &mut [f32; LANES], w: &[i8], x: &[f32]) {
    for (j, (w, x)) in w.iter().zip(x).enumerate() {
        let lane = if j < LANES { &mut low[j] } else { &mut high[j - LANES] };
        *lane += f32::from(*w) * x;
    }
}

/// A dot product in the fixed reduction shape of this module; also for products of activations.
#[inline(always)]
pub fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
    debug_assert_eq!(w.len(), x.len());
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x.as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        for j in 0..LANES {
            low[j] += w[j] * x[j];
            high[j] += w[LANES + j] * x[LANES + j];
        }
    }
    add_rest(&mut low, &mut high, rest, x_rest);
    tree_sum(low, high)
}

/// The columns after the last whole step.
#[inline(always)]
pub(super) fn add_rest(low: &mut [f32; LANES], high: &mut [f32; LANES], w: &[f32], x: &[f32]) {
    for (j, (w, x)) in w.iter().zip(x).enumerate() {
        let lane = if j < LANES { &mut low[j] } else { &mut high[j - LANES] };
        *lane += w * x;
    }
}

/// The sum of squares in f64, where no f32 overflows, in the fixed reduction shape of this module.
pub fn square_sum(x: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let (steps, rest) = x.as_chunks::<LANES>();
    for x in steps {
        for j in 0..LANES {
            sums[j] += f64::from(x[j]) * f64::from(x[j]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x) * f64::from(*x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            sums[j] += sums[j + width];
        }
        width /= 2;
    }
    sums[0]
}

#[inline(always)]
pub(super) fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
    let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
    let (codes, _) = codes.as_chunks::<STEP>();
    let (x, _) = x.as_chunks::<STEP>();
    let (code_pairs, code_last) = codes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scales.as_chunks::<2>();
    for ((c, x), s) in code_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        add_step(&mut even, &c[0], s[0], &x[0]);
        add_step(&mut odd, &c[1], s[1], &x[1]);
    }
    if let ([c], [x], [s]) = (code_last, x_last, scale_last) {
        add_step(&mut even, c, *s, x);
    }
    tree_sum(even, odd)
}

/// [`dot_blocks`] of an MXFP4 row that is decoded on the way.
#[inline(always)]
pub(super) fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
    let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    let (byte_pairs, byte_last) = bytes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scale.as_chunks::<2>();
    for ((bytes, x), s) in byte_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        add_packed(&mut even, &bytes[0], code_value, [scale_value(s[0]); 2], &x[0]);
        add_packed(&mut odd, &bytes[1], code_value, [scale_value(s[1]); 2], &x[1]);
    }
    if let ([bytes], [x], [s]) = (byte_last, x_last, scale_last) {
        add_packed(&mut even, bytes, code_value, [scale_value(*s); 2], x);
    }
    tree_sum(even, odd)
}

/// [`dot_blocks`] of an NVFP4 row that is decoded on the way, without its global scale.
#[inline(always)]
pub(super) fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32 {
    let mut sums = [[0.0; LANES]; 2];
    let (bytes, half) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    let (scales, last) = scale.as_chunks::<2>();
    for (i, ((bytes, x), s)) in bytes.iter().zip(x).zip(scales).enumerate() {
        add_packed(&mut sums[i % 2], bytes, code_value, [fp8_value(s[0]), fp8_value(s[1])], x);
    }
    if let ([s], Some(x)) = (last, x.get(bytes.len())) {
        add_packed(&mut sums[bytes.len() % 2], &whole_step(half), code_value, [fp8_value(*s), 0.0], x);
    }
    let [even, odd] = sums;
    tree_sum(even, odd)
}

/// [`dot_blocks`] of an INT4 row that is decoded on the way. A group is two steps.
#[inline(always)]
pub(super) fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32 {
    let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    for (i, (bytes, x)) in bytes.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0).enumerate() {
        let s = [scale.get(i); 2];
        add_packed(&mut even, &bytes[0], int4_value, s, &x[0]);
        add_packed(&mut odd, &bytes[1], int4_value, s, &x[1]);
    }
    tree_sum(even, odd)
}

/// The bytes of half a step, and zeros.
#[inline(always)]
pub(super) fn whole_step(half: &[u8]) -> [u8; LANES] {
    let mut bytes = [0; LANES];
    bytes[..half.len()].copy_from_slice(half);
    bytes
}

#[inline(always)]
fn add_packed(
    sum: &mut [f32; LANES],
    bytes: &[u8; LANES],
    value: impl Fn(u8) -> f32,
    scale: [f32; 2],
    x: &[f32; STEP],
) {
    let mut codes = [0.0; STEP];
    for j in 0..LANES {
        codes[j] = value(bytes[j]);
        codes[LANES + j] = value(bytes[j] >> 4);
    }
    add_step(sum, &codes, scale, x);
}

/// [`E8M0::to_f32`] from a table.
#[inline(always)]
pub(super) fn scale_value(scale: E8M0) -> f32 {
    static VALUES: [f32; 256] = {
        let mut values = [0.0; 256];
        let mut byte = 0;
        while byte < 256 {
            values[byte] = E8M0(byte as u8).to_f32();
            byte += 1;
        }
        values
    };
    VALUES[usize::from(scale.0)]
}

/// [`E4M3::to_f32`] from a table.
#[inline(always)]
pub(super) fn fp8_value(scale: E4M3) -> f32 {
    static VALUES: [f32; 256] = {
        let mut values = [0.0; 256];
        let mut byte = 0;
        while byte < 256 {
            values[byte] = E4M3(byte as u8).to_f32();
            byte += 1;
        }
        values
    };
    VALUES[usize::from(scale.0)]
}

/// One step of a block format: lanes 0..8 have the first scale, lanes 8..16 the second.
#[inline(always)]
fn add_step(sum: &mut [f32; LANES], c: &[f32; STEP], scale: [f32; 2], x: &[f32; STEP]) {
    for (half, s) in scale.into_iter().enumerate() {
        for j in half * LANES / 2..(half + 1) * LANES / 2 {
            sum[j] += s * (c[j] * x[j] + c[LANES + j] * x[LANES + j]);
        }
    }
}

#[inline(always)]
pub(super) fn tree_sum(mut low: [f32; LANES], high: [f32; LANES]) -> f32 {
    for j in 0..LANES {
        low[j] += high[j];
    }
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            low[j] += low[j + width];
        }
        width /= 2;
    }
    low[0]
}

/// The value of a code by the arithmetic that the kernels use, for tests against [`E2M1::VALUES`].
#[doc(hidden)]
pub fn kernel_code_value(code: E2M1) -> f32 {
    code_value(code.0)
}
