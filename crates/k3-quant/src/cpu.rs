//! The fast host kernels: `Y = X W^T` in f32 for every weight format.
//!
//! # Bits
//!
//! An element of `Y` depends on its row of weights and its row of activations, and on nothing else: not on the other rows
//! of a batch, on how rows are split over threads, or on the instruction set. Each [`Mode`] has one order of operations,
//! which [`Activations`] carry:
//!
//! * [`Mode::Exact`]: weights become f32 exactly (one rounding for INT4 with f32 scales), without the factor that a row or
//!   matrix has in common. Sixteen chains of fused multiply-adds run over 512 columns from zero, a column's chain given by
//!   its place; the chains of one such block are added to those of the blocks before, lane by lane, and a tree adds up the
//!   sixteen at the end. Short chains keep the error of a sum of 7168 products at that of one of some hundred.
//! * [`Mode::Int8`]: exact integer dots of 8 columns (4 of INT8) in each of sixteen lanes, times the block's scale, and one
//!   chain of fused multiply-adds a lane with the scales of the activations; the same tree.
//!
//! A fused multiply-add is rounded once by definition, so hardware and software agree on it. Without the hardware (x86-64
//! before Haswell) it is a slow call.
//!
//! # Speed
//!
//! Few rows of activations: weights go from their stored form to registers, several rows at a time so that their chains
//! overlap, and lines of rows further on are asked for. Many: 512 columns of 32 weight rows are decoded to the
//! second-level cache, and tiles of sums that fill the registers are taken from there. Both follow the same chains.

#![allow(clippy::inline_always, reason = "the bodies must be compiled inside each target-feature wrapper")]

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod index;
mod plain;
#[cfg(target_arch = "x86_64")]
mod prefetch;
pub mod probe;
mod product;
#[cfg(target_arch = "x86_64")]
mod tables;
mod tree;
pub mod vector;

use std::ops::Range;
use std::sync::OnceLock;

use crate::Matrix;

use activations::Values;
pub use activations::{ACTIVATION_GROUP, Activations, Mode, UnknownMode};
#[doc(hidden)]
pub use plain::kernel_code_value;
use product::product;

/// Partial sums of a dot product.
const LANES: usize = 16;
/// Columns that are decoded together.
const STEP: usize = 2 * LANES;

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
    assert!(
        x.cols() == w.cols() && x.serve(w.format()),
        "activations [{}, {}] were prepared for another matrix than {w:?}",
        x.rows(),
        x.cols()
    );
    assert!(rows.start <= rows.end && rows.end <= w.rows());
    assert_eq!(out.len(), rows.len() * x.rows());
    assert!(set <= InstructionSet::widest(), "this machine has no {set:?}");
    match (&x.values, set) {
        (Values::Exact(_, x), InstructionSet::Portable) => product::<plain::Exact>(w, rows, x, out),
        (Values::Int8(_, x), InstructionSet::Portable) => product::<plain::Int8>(w, rows, x, out),
        #[cfg(target_arch = "x86_64")]
        (Values::Exact(_, x), InstructionSet::Avx2) => product::<avx2::Exact>(w, rows, x, out),
        #[cfg(target_arch = "x86_64")]
        (Values::Int8(_, x), InstructionSet::Avx2) => product::<avx2::Int8>(w, rows, x, out),
        #[cfg(target_arch = "x86_64")]
        (Values::Exact(_, x), InstructionSet::Avx512) => product::<avx512::Exact>(w, rows, x, out),
        #[cfg(target_arch = "x86_64")]
        (Values::Int8(_, x), InstructionSet::Avx512) => product::<avx512::Int8>(w, rows, x, out),
    }
}

/// An instruction set that the kernels are compiled for, narrow ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum InstructionSet {
    /// The target's baseline.
    Portable,
    /// 256-bit registers: AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit registers: AVX-512 F, BW, DQ, VL and VNNI. A machine with AVX-512 but without VNNI (Skylake) takes
    /// [`Self::Avx2`].
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
                let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
                if avx2
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
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
