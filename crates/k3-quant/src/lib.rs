//! Number formats of Kimi K3 checkpoints, and the host kernels on them.
//!
//! * [`E2M1`], [`E8M0`], [`E4M3`]: the scalar formats, each a type of its own. A block scale of one format can
//!   not be handed to a decoder of the other, although both are one byte wide and carry the same tensor name.
//! * [`GlobalScale`]: NVFP4's per-matrix scale. The two conventions in the field are inverse to each other
//!   (a factor, a divisor); which one a number is, is part of its type.
//! * [`Matrix`]: a weight matrix `[rows, cols]` in any of the supported formats, over shared bytes (a mapping,
//!   a slot of the expert store, or memory of its own).
//! * [`mod@reference`]: the plain loops that everything else is tested against.
//! * [`cpu`]: the fast host kernels. One reduction shape per format, the same bits at any batch size, thread
//!   count and instruction set.
//! * [`encode`]: bf16 rows to NVFP4, INT8 and INT4.
//!
//! ```
//! use k3_quant::cpu::{Activations, matmul_rows};
//! use k3_quant::{Bytes, Matrix, bf16};
//!
//! let weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|w| bf16::from_f32(w).to_le_bytes());
//! let w = Matrix::bf16(2, 3, Bytes::from(weights.concat()))?; // [out, in]
//!
//! // Two rows of activations, in the order in which kernels of this format read them.
//! let x = Activations::new(w.format(), 2, w.cols(), &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
//! // Rows of weights are taken by range: threads share a product by taking some each.
//! let mut y = [0.0; 4];
//! matmul_rows(&w, 0..w.rows(), &x, &mut y);
//! assert_eq!(y, [1.0, 6.0, 4.0, 15.0]); // [rows of W, rows of X]
//! # Ok::<(), k3_quant::MatrixError>(())
//! ```
//!
//! A format is an enum's variant and not a trait's implementation: there are few, they come with the checkpoint and not with
//! the type of a program, and the compiler names every place that a new one has to be thought of (`CONTRIBUTING.md`).
//!
//! This crate knows no file, no tensor name, no thread and no model. Formats: `docs/checkpoint.md` 6, `docs/nvfp4.md`,
//! `docs/dense-formats.md`. Start reading at [`Matrix`], then the head of [`cpu`].

#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian and are read in place; big-endian targets are not supported");

pub mod cpu;
pub mod encode;
mod matrix;
pub mod reference;
mod scalar;
mod scales;

pub use matrix::{Matrix, MatrixData, MatrixError, Row, WeightFormat};
pub use scalar::{
    E2M1, E4M3, E8M0, GlobalScale, INT4_GROUP, MX_BLOCK, NV_BLOCK, ScaleDivisor, ScaleFactor, int4_value,
};
pub use scales::{ScaleRow, Scales};

pub use bytes::Bytes;
pub use half::bf16;
