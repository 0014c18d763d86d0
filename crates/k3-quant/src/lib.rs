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
//! This crate knows no file, no tensor name and no model. Formats: `docs/checkpoint.md` 6, `docs/nvfp4.md`, `docs/dense-formats.md`.

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
