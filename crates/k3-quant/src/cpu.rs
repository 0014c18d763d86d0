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
mod loops;
mod plain;

use std::ops::Range;
use std::sync::OnceLock;

use crate::{INT4_GROUP, Matrix, Row, WeightFormat};

#[cfg(target_arch = "x86_64")]
use loops::{Avx2, Avx512};
use loops::{Loops, Portable};
#[doc(hidden)]
pub use plain::kernel_code_value;
use plain::{dot_bf16, fp8_value, scale_value, widen};
pub use plain::{dot_f32, square_sum};

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
            WeightFormat::F32 | WeightFormat::Bf16 | WeightFormat::Int8 => Self::Natural,
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Int4 => Self::EvenOdd,
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

#[inline(always)]
fn matmul_rows_body<L: Loops>(w: &Matrix, rows: Range<usize>, x: &Activations, out: &mut [f32]) {
    let n = x.n;
    if n == 0 {
        return;
    }
    if n == 1 {
        // One row of activations: each weight is used once, so nothing is gained by decoding it to memory first.
        let x = x.row(0);
        for (r, out) in rows.zip(out) {
            let row = w.row(r);
            let sum = match row {
                Row::F32(row) => L::dot_f32(row, &x[..row.len()]),
                Row::Bf16(row) => dot_bf16(row, x),
                Row::Mxfp4 { packed, scale } => L::dot_mxfp4(packed, scale, x),
                Row::Nvfp4 { packed, scale, .. } => L::dot_nvfp4(packed, scale, x),
                Row::Int8 { codes, .. } => L::dot_int8(codes, x),
                Row::Int4 { packed, scale } => L::dot_int4(packed, scale, x),
            };
            *out = row_scaled(row, sum);
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
        for (k, out) in out.chunks_exact_mut(n).enumerate() {
            let row = w.row(first + k);
            out.iter_mut().for_each(|y| *y = row_scaled(row, *y));
        }
    }
}

/// A finished sum times what the whole row has in common.
#[inline(always)]
fn row_scaled(row: Row<'_>, sum: f32) -> f32 {
    match row {
        Row::Nvfp4 { global, .. } => global.apply(sum),
        Row::Int8 { scale, .. } => sum * scale,
        Row::F32(_) | Row::Bf16(_) | Row::Mxfp4 { .. } | Row::Int4 { .. } => sum,
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
                *s = [fp8_value(e[0]), e.get(1).map_or(0.0, |e| fp8_value(*e))];
            }
        }
        Row::Int8 { codes, .. } => values.iter_mut().zip(codes).for_each(|(v, c)| *v = f32::from(*c)),
        Row::Int4 { packed, scale } => {
            L::decode_ints(packed, values);
            for (i, s) in scales.iter_mut().enumerate() {
                *s = [scale.get(i / (INT4_GROUP / STEP)); 2];
            }
        }
    }
}
