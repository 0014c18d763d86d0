//! The fast host kernels: `Y = X W^T` in f32 for every weight format.
//!
//! Each output element is one dot product of a fixed reduction shape: 32 columns at a time into two rows of 16
//! partial sums, and a fixed tree over those at the end. Products and sums are separate f32 operations (no fused
//! multiply-add), so the bits do not depend on the number of rows in the batch, on how rows are split over
//! threads, or on the instruction set that the compiler used. The wider the registers, the faster; nothing else.
//!
//! Block formats multiply codes and activations first, pair by pair, and apply the block's scale to the sum of a pair:
//! for MXFP4 the scale is a power of two, so this rounds as the unscaled sum does, short of overflow and underflow.

#![allow(clippy::inline_always, reason = "the bodies must be compiled inside each target-feature wrapper")]

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use crate::{E2M1, E8M0, Matrix, Row, WeightFormat};

/// Width of one row of partial sums.
const LANES: usize = 16;
/// Columns handled per step, for every format.
const STEP: usize = 2 * LANES;
/// Weight rows that are decoded together when a batch has several rows: they stay in the second-level cache
/// while each activation row is read once.
const ROW_BLOCK: usize = 8;

/// Activations `[n, cols]` in the order in which the kernels of one weight format read them.
#[derive(Debug)]
pub struct Activations {
    n: usize,
    cols: usize,
    /// Row length in `data`: `cols` rounded up to [`STEP`].
    stride: usize,
    layout: Layout,
    data: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Column order.
    Natural,
    /// Within 32 columns the 16 even ones, then the 16 odd ones, as packed nibbles come.
    EvenOdd,
}

impl Layout {
    fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::F32 | WeightFormat::Bf16 => Self::Natural,
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Self::EvenOdd,
        }
    }
}

impl Activations {
    /// Prepares `n` rows of `cols` for products with matrices of `format`.
    ///
    /// # Panics
    /// If `x` does not hold `n * cols` values.
    pub fn new(format: WeightFormat, n: usize, cols: usize, x: &[f32]) -> Self {
        assert_eq!(x.len(), n * cols);
        let layout = Layout::of(format);
        let stride = cols.next_multiple_of(STEP);
        let mut data = vec![0.0; n * stride];
        if cols > 0 {
            for (out, x) in data.chunks_exact_mut(stride).zip(x.chunks_exact(cols)) {
                match layout {
                    Layout::Natural => out[..cols].copy_from_slice(x),
                    Layout::EvenOdd => {
                        for (out, x) in out.chunks_exact_mut(STEP).zip(x.chunks(STEP)) {
                            for (c, &x) in x.iter().enumerate() {
                                out[c % 2 * LANES + c / 2] = x;
                            }
                        }
                    }
                }
            }
        }
        Self { n, cols, stride, layout, data }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.n
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.stride..(i + 1) * self.stride]
    }
}

/// Rows `rows` of `W X^T`: `out` is `[rows.len(), n]`, so that threads can take disjoint ranges of weight rows.
///
/// # Panics
/// If the activations were prepared for another width or kind of format, or `out` has the wrong length.
pub fn matmul_rows(w: &Matrix, rows: Range<usize>, x: &Activations, out: &mut [f32]) {
    matmul_rows_with(InstructionSet::widest(), w, rows, x, out);
}

/// The same as [`matmul_rows`] with the loops of one instruction set. The bits do not depend on it.
///
/// # Panics
/// As [`matmul_rows`], and if this machine does not have the instruction set.
pub fn matmul_rows_with(
    set: InstructionSet,
    w: &Matrix,
    rows: Range<usize>,
    x: &Activations,
    out: &mut [f32],
) {
    assert_eq!(
        (x.cols, x.layout),
        (w.cols(), Layout::of(w.format())),
        "activations prepared for another matrix"
    );
    assert!(rows.start <= rows.end && rows.end <= w.rows());
    assert_eq!(out.len(), rows.len() * x.n);
    assert!(set <= InstructionSet::widest(), "this machine has no {set:?}");
    match set {
        InstructionSet::Portable => matmul_rows_body::<Portable>(w, rows, x, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: AVX2 has been found, or something wider, which implies it.
        InstructionSet::Avx2 => unsafe { matmul_rows_avx2(w, rows, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: AVX-512 F, BW, DQ and VL have been found.
        InstructionSet::Avx512 => unsafe { matmul_rows_avx512(w, rows, x, out) },
    }
}

/// An instruction set that the kernels are compiled for, narrow ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// The target's baseline.
    Portable,
    /// 256-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// The widest of this machine, found once.
    pub fn widest() -> Self {
        static FOUND: OnceLock<InstructionSet> = OnceLock::new();
        *FOUND.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                let avx2 = is_x86_feature_detected!("avx2");
                if avx2
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    return Self::Avx512;
                }
                if avx2 {
                    return Self::Avx2;
                }
            }
            Self::Portable
        })
    }

    /// All that this machine has.
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let all = [Self::Portable, Self::Avx2, Self::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [Self::Portable];
        all.into_iter().filter(|set| *set <= Self::widest()).collect()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn matmul_rows_avx2(w: &Matrix, rows: Range<usize>, x: &Activations, out: &mut [f32]) {
    matmul_rows_body::<Avx2>(w, rows, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn matmul_rows_avx512(w: &Matrix, rows: Range<usize>, x: &Activations, out: &mut [f32]) {
    matmul_rows_body::<Avx512>(w, rows, x, out);
}

/// The inner loops of one instruction set. All give the same bits.
trait Loops {
    fn dot_f32(w: &[f32], x: &[f32]) -> f32;
    fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32;
    fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32;
    fn decode_codes(packed: &[u8], values: &mut [f32]);
}

/// The plain loops, compiled for an instruction set. Each is a function of its own: inlined into the large one around
/// them, compilers do not turn them into vector code.
macro_rules! compiled_loops {
    ($module:ident $(, $attribute:meta)?) => {
        mod $module {
            use crate::E8M0;

            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
                super::dot_f32(w, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
                super::dot_blocks(codes, scales, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
                super::dot_mxfp4(packed, scale, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn decode_codes(packed: &[u8], values: &mut [f32]) {
                super::decode_codes(packed, values);
            }
        }
    };
}

compiled_loops!(portable);
#[cfg(target_arch = "x86_64")]
compiled_loops!(avx2, target_feature(enable = "avx2"));

struct Portable;

impl Loops for Portable {
    fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
        portable::dot_f32(w, x)
    }
    fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
        portable::dot_blocks(codes, scales, x)
    }
    fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
        portable::dot_mxfp4(packed, scale, x)
    }
    fn decode_codes(packed: &[u8], values: &mut [f32]) {
        portable::decode_codes(packed, values);
    }
}

/// Loops that need an instruction set. Only the function of that set above names the type, so whoever calls has it.
#[cfg(target_arch = "x86_64")]
macro_rules! loops_of {
    ($type:ident, $module:ident) => {
        struct $type;

        impl Loops for $type {
            #[inline(always)]
            fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
                // SAFETY: called under the function that is compiled for this instruction set, where it was found.
                unsafe { $module::dot_f32(w, x) }
            }
            #[inline(always)]
            fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_blocks(codes, scales, x) }
            }
            #[inline(always)]
            fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_mxfp4(packed, scale, x) }
            }
            #[inline(always)]
            fn decode_codes(packed: &[u8], values: &mut [f32]) {
                // SAFETY: as above.
                unsafe { $module::decode_codes(packed, values) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
loops_of!(Avx2, avx2);
#[cfg(target_arch = "x86_64")]
loops_of!(Avx512, avx512);

#[inline(always)]
fn matmul_rows_body<L: Loops>(w: &Matrix, rows: Range<usize>, x: &Activations, out: &mut [f32]) {
    let n = x.n;
    if n == 0 {
        return;
    }
    if n == 1 && matches!(w.format(), WeightFormat::Bf16 | WeightFormat::Mxfp4) {
        // One row of activations: each weight is used once, so nothing is gained by decoding it to memory first.
        for (r, out) in rows.zip(out) {
            *out = match w.row(r) {
                Row::Bf16(row) => dot_bf16(row, x.row(0)),
                Row::Mxfp4 { packed, scale } => L::dot_mxfp4(packed, scale, x.row(0)),
                _ => unreachable!("of the two formats just asked for"),
            };
        }
        return;
    }
    let block = if n == 1 { 1 } else { ROW_BLOCK };
    let mut values = vec![0.0; block * x.stride];
    let mut scales = vec![[0.0; 2]; block * (x.stride / STEP)];
    let steps = x.stride / STEP;
    for (first, out) in rows.step_by(block).zip(out.chunks_mut(block * n)) {
        let count = out.len() / n;
        for k in 0..count {
            let (values, scales) =
                (&mut values[k * x.stride..(k + 1) * x.stride], &mut scales[k * steps..(k + 1) * steps]);
            decode::<L>(w.row(first + k), values, scales);
        }
        for i in 0..n {
            let x_row = x.row(i);
            for k in 0..count {
                let values = &values[k * x.stride..(k + 1) * x.stride];
                out[k * n + i] = match x.layout {
                    Layout::Natural => L::dot_f32(values, x_row),
                    Layout::EvenOdd => L::dot_blocks(values, &scales[k * steps..(k + 1) * steps], x_row),
                };
            }
        }
        if let Row::Nvfp4 { global, .. } = w.row(first) {
            out.iter_mut().for_each(|y| *y = global.apply(*y));
        }
    }
}

/// A weight row in the layout of its activations. Block formats leave codes in `values`, and in `scales` two block
/// scales per 32 columns: the one of lanes 0..8 (columns 0..16) and the one of lanes 8..16.
#[inline(always)]
fn decode<L: Loops>(row: Row<'_>, values: &mut [f32], scales: &mut [[f32; 2]]) {
    match row {
        Row::F32(w) => values[..w.len()].copy_from_slice(w),
        Row::Bf16(w) => values.iter_mut().zip(w).for_each(|(v, w)| *v = widen(*w)),
        Row::Mxfp4 { packed, scale } => {
            L::decode_codes(packed, values);
            scales.iter_mut().zip(scale).for_each(|(s, e)| *s = [scale_value(*e); 2]);
        }
        Row::Nvfp4 { packed, scale, .. } => {
            L::decode_codes(packed, values);
            for (s, e) in scales.iter_mut().zip(scale.chunks(2)) {
                // A last half step has no second block; its codes are zero.
                *s = [e[0].to_f32(), e.get(1).map_or(0.0, |e| e.to_f32())];
            }
        }
    }
}

#[inline(always)]
fn decode_codes(packed: &[u8], values: &mut [f32]) {
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

/// NVFP4 rows may end in half a step; its other half stays zero.
#[inline(always)]
fn decode_half_step(packed: &[u8], values: Option<&mut [f32; STEP]>) {
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
fn widen(w: bf16) -> f32 {
    f32::from_bits(u32::from(w.to_bits()) << 16)
}

#[inline(always)]
fn dot_bf16(w: &[bf16], x: &[f32]) -> f32 {
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
fn add_rest(low: &mut [f32; LANES], high: &mut [f32; LANES], w: &[f32], x: &[f32]) {
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
fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
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
fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
    let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
    let (bytes, _) = packed.as_chunks::<LANES>();
    let (x, _) = x.as_chunks::<STEP>();
    let (byte_pairs, byte_last) = bytes.as_chunks::<2>();
    let (x_pairs, x_last) = x.as_chunks::<2>();
    let (scale_pairs, scale_last) = scale.as_chunks::<2>();
    for ((bytes, x), s) in byte_pairs.iter().zip(x_pairs).zip(scale_pairs) {
        add_mxfp4(&mut even, &bytes[0], s[0], &x[0]);
        add_mxfp4(&mut odd, &bytes[1], s[1], &x[1]);
    }
    if let ([bytes], [x], [s]) = (byte_last, x_last, scale_last) {
        add_mxfp4(&mut even, bytes, *s, x);
    }
    tree_sum(even, odd)
}

#[inline(always)]
fn add_mxfp4(sum: &mut [f32; LANES], bytes: &[u8; LANES], scale: E8M0, x: &[f32; STEP]) {
    let mut codes = [0.0; STEP];
    for j in 0..LANES {
        codes[j] = code_value(bytes[j]);
        codes[LANES + j] = code_value(bytes[j] >> 4);
    }
    add_step(sum, &codes, [scale_value(scale); 2], x);
}

/// [`E8M0::to_f32`] from a table.
#[inline(always)]
fn scale_value(scale: E8M0) -> f32 {
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
fn tree_sum(mut low: [f32; LANES], high: [f32; LANES]) -> f32 {
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
