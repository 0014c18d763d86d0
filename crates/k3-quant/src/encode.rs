//! bf16 rows to the formats of dense weights (`docs/dense-formats.md` 3).
//!
//! Rows are encoded independently, so a matrix can be taken in blocks of rows of any size, on any number of threads,
//! with the same bytes as result. All rules are exact and ties are decided, so that the bytes do not depend on the
//! instruction set either:
//!
//! * NVFP4: the matrix has one power of two as its factor; each block of 16 columns gets, of all 126 positive E4M3
//!   scales, the one with the least squared error, the lowest of equals.
//! * INT4: each group of 64 columns gets, of all positive normal bf16, the scale with the least squared error, the
//!   lowest of equals.
//! * INT8: each row gets the lowest normal bf16 scale that reaches its largest magnitude with code 127.
//!
//! Elements go to the nearest code, ties to the even one.

mod error;
mod int8;
mod search;

use half::bf16;

pub use error::RoundingError;

use crate::cpu::InstructionSet;
use crate::{INT4_GROUP, NV_BLOCK, ScaleFactor, WeightFormat};

/// The largest magnitude of NVFP4 without its factor: code 7 under the largest scale.
const NVFP4_LARGEST: f64 = 6.0 * 448.0;
/// Exponents of the factor for which it and its reciprocal are normal (`docs/nvfp4.md` 3).
const EXPONENTS: std::ops::RangeInclusive<i32> = -126..=126;

/// No weight of a model is near this, and below it no code times its scale overflows.
const LIMIT: bf16 = bf16::from_bits((127 + 120) << 7);

/// A value that is not a weight.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("row {row}, column {column} (from 0) is {value}, and only numbers below 2^120 can be quantized")]
pub struct OutOfRange {
    /// 0-based row of the first such value.
    pub row: usize,
    /// Its 0-based column.
    pub column: usize,
    /// The value.
    pub value: f32,
}

/// The largest magnitude among rows `first_row..` of a matrix of `cols` columns.
///
/// # Errors
/// [`OutOfRange`] for an infinity, NaN, or a number from 2^120 on.
pub fn largest_magnitude(first_row: usize, cols: usize, values: &[bf16]) -> Result<f32, OutOfRange> {
    // Magnitudes of bf16 are in the order of their bits, and what is not finite is beyond all that is.
    let magnitude = |v: &bf16| v.to_bits() & 0x7fff;
    let bits = values.iter().fold(0, |max: u16, v| max.max(magnitude(v)));
    if bits < LIMIT.to_bits() {
        return Ok(bf16::from_bits(bits).to_f32());
    }
    let at = values.iter().position(|v| magnitude(v) >= LIMIT.to_bits()).unwrap_or_default();
    Err(OutOfRange { row: first_row + at / cols, column: at % cols, value: values[at].to_f32() })
}

/// Encodes rows of one matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoder {
    kind: Kind,
    set: InstructionSet,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// The exponent of the factor.
    Nvfp4(i32),
    Int8,
    Int4,
}

impl Encoder {
    /// To NVFP4; `largest` is the largest magnitude of the whole matrix. The factor is the lowest power of two under
    /// which nothing is out of range: code, scale and factor then multiply without rounding, and factor and divisor say
    /// the same.
    pub fn nvfp4(largest: f32) -> Self {
        let fits = |m: &i32| NVFP4_LARGEST * 2f64.powi(*m) >= f64::from(largest);
        let exponent = if largest == 0.0 { 0 } else { EXPONENTS.clone().find(fits).unwrap_or(126) };
        Self { kind: Kind::Nvfp4(exponent), set: InstructionSet::widest() }
    }

    /// To INT8 with a scale per row.
    pub fn int8() -> Self {
        Self { kind: Kind::Int8, set: InstructionSet::widest() }
    }

    /// To INT4 with a scale per 64 columns.
    pub fn int4() -> Self {
        Self { kind: Kind::Int4, set: InstructionSet::widest() }
    }

    /// The same with the loops of one instruction set. The result does not depend on it.
    ///
    /// # Panics
    /// If this machine does not have it.
    #[must_use]
    pub fn with_instruction_set(mut self, set: InstructionSet) -> Self {
        assert!(set <= InstructionSet::widest(), "this machine has no {set:?}");
        self.set = set;
        self
    }

    /// The format of the result.
    pub fn format(&self) -> WeightFormat {
        match self.kind {
            Kind::Nvfp4(_) => WeightFormat::Nvfp4,
            Kind::Int8 => WeightFormat::Int8,
            Kind::Int4 => WeightFormat::Int4,
        }
    }

    /// The factor of an NVFP4 matrix, a power of two.
    pub fn factor(&self) -> Option<ScaleFactor> {
        match self.kind {
            Kind::Nvfp4(exponent) => Some(ScaleFactor(power_of_two(exponent))),
            Kind::Int8 | Kind::Int4 => None,
        }
    }

    /// Bytes of codes in a row of `cols` columns.
    pub fn code_bytes(&self, cols: usize) -> usize {
        match self.kind {
            Kind::Nvfp4(_) | Kind::Int4 => cols / 2,
            Kind::Int8 => cols,
        }
    }

    /// Bytes of scales in a row of `cols` columns: E4M3 for NVFP4, little-endian bf16 for the integers.
    pub fn scale_bytes(&self, cols: usize) -> usize {
        match self.kind {
            Kind::Nvfp4(_) => cols / NV_BLOCK,
            Kind::Int8 => 2,
            Kind::Int4 => 2 * (cols / INT4_GROUP),
        }
    }

    /// Encodes rows `first_row..` of the matrix, `values [rows, cols]`, into `codes` and `scales`, in the layout of
    /// [`crate::MatrixData`]. Says what the rounding cost.
    ///
    /// # Errors
    /// [`OutOfRange`] for an infinity, NaN, or a number from 2^120 on; the output is then meaningless.
    ///
    /// # Panics
    /// If the lengths do not fit, or `cols` is no multiple of [`WeightFormat::column_block`].
    pub fn encode(
        &self,
        first_row: usize,
        cols: usize,
        values: &[bf16],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<RoundingError, OutOfRange> {
        assert!(cols > 0 && cols.is_multiple_of(self.format().column_block()), "{cols} columns");
        let rows = values.len() / cols;
        assert_eq!(
            (values.len(), codes.len(), scales.len()),
            (rows * cols, rows * self.code_bytes(cols), rows * self.scale_bytes(cols))
        );
        largest_magnitude(first_row, cols, values)?;
        let mut error = RoundingError::default();
        match self.kind {
            Kind::Nvfp4(exponent) => {
                let encode = search::nvfp4_block(self.set);
                let (blocks, _) = values.as_chunks::<NV_BLOCK>();
                let (codes, _) = codes.as_chunks_mut::<{ NV_BLOCK / 2 }>();
                for ((values, codes), scale) in blocks.iter().zip(codes).zip(scales) {
                    *scale = encode(values, exponent, codes, &mut error);
                }
            }
            Kind::Int8 => {
                let encode = int8::row(self.set);
                let (scales, _) = scales.as_chunks_mut::<2>();
                let codes = codes.chunks_exact_mut(cols);
                for ((values, codes), scale) in values.chunks_exact(cols).zip(codes).zip(scales) {
                    *scale = encode(values, codes, &mut error).to_le_bytes();
                }
            }
            Kind::Int4 => {
                let encode = search::int4_group(self.set);
                let (groups, _) = values.as_chunks::<INT4_GROUP>();
                let (codes, _) = codes.as_chunks_mut::<{ INT4_GROUP / 2 }>();
                let (scales, _) = scales.as_chunks_mut::<2>();
                for ((values, codes), scale) in groups.iter().zip(codes).zip(scales) {
                    *scale = encode(values, codes, &mut error).to_le_bytes();
                }
            }
        }
        Ok(error)
    }
}

/// `2^exponent` for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The value of a bf16; finite, so there is nothing to quiet.
#[inline]
fn widen(v: bf16) -> f32 {
    f32::from_bits(u32::from(v.to_bits()) << 16)
}

/// Added and taken off again, it rounds what is below `2^22` to integers, ties to even, in any instruction set.
const ROUND: f32 = 12_582_912.0;
