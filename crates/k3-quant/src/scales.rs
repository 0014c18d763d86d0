//! Scales of the integer formats: ordinary floats, in the type they are stored in.

use std::fmt;

use bytes::Bytes;
use half::bf16;

use crate::matrix::aligned;

/// The scales of an integer matrix, row-major, to multiply by. compressed-tensors stores them in the type that the
/// weights had before (`docs/dense-formats.md` 2).
#[derive(Clone)]
pub enum Scales {
    /// Little-endian bf16.
    Bf16(Bytes),
    /// Little-endian f32.
    F32(Bytes),
}

impl fmt::Debug for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16(b) => write!(f, "Bf16[{}]", b.len() / 2),
            Self::F32(b) => write!(f, "F32[{}]", b.len() / 4),
        }
    }
}

impl Scales {
    /// Bytes of one scale.
    pub fn width(&self) -> usize {
        match self {
            Self::Bf16(_) => 2,
            Self::F32(_) => 4,
        }
    }

    /// Little-endian bytes.
    pub fn bytes(&self) -> &Bytes {
        match self {
            Self::Bf16(b) | Self::F32(b) => b,
        }
    }

    /// The same bytes where slices of their type may start.
    pub(crate) fn aligned(self) -> Self {
        match self {
            Self::Bf16(b) => Self::Bf16(aligned::<bf16>(b)),
            Self::F32(b) => Self::F32(aligned::<f32>(b)),
        }
    }

    /// The `per_row` scales of row `r`.
    #[inline]
    pub(crate) fn row(&self, r: usize, per_row: usize) -> ScaleRow<'_> {
        let bytes = &self.bytes()[r * per_row * self.width()..(r + 1) * per_row * self.width()];
        match self {
            Self::Bf16(_) => ScaleRow::Bf16(bytemuck::cast_slice(bytes)),
            Self::F32(_) => ScaleRow::F32(bytemuck::cast_slice(bytes)),
        }
    }
}

/// The scales of one row.
#[derive(Clone, Copy, Debug)]
pub enum ScaleRow<'a> {
    /// Widened when used, exactly.
    Bf16(&'a [bf16]),
    /// As used.
    F32(&'a [f32]),
}

impl ScaleRow<'_> {
    /// Scale `i` of the row.
    ///
    /// # Panics
    /// If the row has no such scale.
    #[inline]
    pub fn get(self, i: usize) -> f32 {
        match self {
            // As in the kernels: NaNs are not quieted, and so this compiles to a shift.
            Self::Bf16(s) => f32::from_bits(u32::from(s[i].to_bits()) << 16),
            Self::F32(s) => s[i],
        }
    }
}
