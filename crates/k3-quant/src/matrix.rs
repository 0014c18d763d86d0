//! A weight matrix in any supported format, over shared bytes.

use std::fmt;

use bytes::Bytes;
use half::bf16;

use crate::{E2M1, E4M3, E8M0, GlobalScale, INT4_GROUP, MX_BLOCK, NV_BLOCK, ScaleRow, Scales, int4_value};

/// How the elements of a [`Matrix`] are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// E2M1 with one E8M0 scale per 32 columns.
    Mxfp4,
    /// E2M1 with one E4M3 scale per 16 columns and one f32 per matrix.
    Nvfp4,
    /// 8-bit integers with one scale per row.
    Int8,
    /// 4-bit integers with one scale per 64 columns.
    Int4,
}

impl WeightFormat {
    /// Columns that share a scale, of which a row has a whole number; 1 for formats without such a limit.
    pub fn column_block(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 | Self::Int8 => 1,
            Self::Mxfp4 => MX_BLOCK,
            Self::Nvfp4 => NV_BLOCK,
            Self::Int4 => INT4_GROUP,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4 => "NVFP4",
            Self::Int8 => "INT8",
            Self::Int4 => "INT4",
        })
    }
}

/// Why bytes do not make a matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// The buffer's length does not follow from the shape.
    #[error("{part} of a {format} matrix [{rows}, {cols}] must have {expected} bytes, found {found}")]
    Length {
        /// Which buffer.
        part: &'static str,
        /// The format asked for.
        format: WeightFormat,
        /// Output width.
        rows: usize,
        /// Input width.
        cols: usize,
        /// Bytes that the shape asks for.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The number of columns is not a multiple of the block.
    #[error("a {format} matrix needs columns in multiples of {block}, found {cols}")]
    Columns {
        /// The format asked for.
        format: WeightFormat,
        /// Columns that share a scale.
        block: usize,
        /// Columns given.
        cols: usize,
    },
}

/// The bytes behind a [`Matrix`], all row-major. Clones share the bytes.
#[derive(Clone)]
#[non_exhaustive]
pub enum MatrixData {
    /// `rows * cols` little-endian f32, aligned to 4.
    F32(Bytes),
    /// `rows * cols` little-endian bf16, aligned to 2.
    Bf16(Bytes),
    /// Low nibble = even column.
    Mxfp4 {
        /// `[rows, cols / 2]`
        packed: Bytes,
        /// `[rows, cols / 32]` E8M0
        scale: Bytes,
    },
    /// Low nibble = even column.
    Nvfp4 {
        /// `[rows, cols / 2]`
        packed: Bytes,
        /// `[rows, cols / 16]` E4M3
        scale: Bytes,
        /// One per matrix.
        global: GlobalScale,
    },
    /// Two's complement.
    Int8 {
        /// `[rows, cols]`
        codes: Bytes,
        /// `[rows]`
        scale: Scales,
    },
    /// Low nibble = even column; a nibble stands for its value less 8.
    Int4 {
        /// `[rows, cols / 2]`
        packed: Bytes,
        /// `[rows, cols / 64]`
        scale: Scales,
    },
}

/// A weight matrix `W [rows, cols]` = `[out, in]`, row-major, as in `y = W x`.
#[derive(Clone)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: MatrixData,
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}, {}]", self.format(), self.rows, self.cols)
    }
}

impl Matrix {
    /// A bf16 matrix. Bytes that are not aligned to 2 are copied once.
    pub fn bf16(rows: usize, cols: usize, bytes: Bytes) -> Result<Self, MatrixError> {
        check(
            "the data",
            WeightFormat::Bf16,
            rows,
            cols,
            rows.checked_mul(cols).and_then(|n| n.checked_mul(2)),
            &bytes,
        )?;
        Ok(Self { rows, cols, data: MatrixData::Bf16(aligned::<bf16>(bytes)) })
    }

    /// An f32 matrix. Bytes that are not aligned to 4 are copied once.
    pub fn f32(rows: usize, cols: usize, bytes: Bytes) -> Result<Self, MatrixError> {
        check(
            "the data",
            WeightFormat::F32,
            rows,
            cols,
            rows.checked_mul(cols).and_then(|n| n.checked_mul(4)),
            &bytes,
        )?;
        Ok(Self { rows, cols, data: MatrixData::F32(aligned::<f32>(bytes)) })
    }

    /// An MXFP4 matrix from its two tensors.
    pub fn mxfp4(rows: usize, cols: usize, packed: Bytes, scale: Bytes) -> Result<Self, MatrixError> {
        check_blocks(WeightFormat::Mxfp4, 1, rows, cols, &packed, &scale)?;
        Ok(Self { rows, cols, data: MatrixData::Mxfp4 { packed, scale } })
    }

    /// An NVFP4 matrix from its two tensors and its per-matrix scale.
    pub fn nvfp4(
        rows: usize,
        cols: usize,
        packed: Bytes,
        scale: Bytes,
        global: GlobalScale,
    ) -> Result<Self, MatrixError> {
        check_blocks(WeightFormat::Nvfp4, 1, rows, cols, &packed, &scale)?;
        Ok(Self { rows, cols, data: MatrixData::Nvfp4 { packed, scale, global } })
    }

    /// An INT8 matrix from its two tensors.
    pub fn int8(rows: usize, cols: usize, codes: Bytes, scale: Scales) -> Result<Self, MatrixError> {
        let format = WeightFormat::Int8;
        check("the codes", format, rows, cols, rows.checked_mul(cols), &codes)?;
        check("the scale tensor", format, rows, cols, rows.checked_mul(scale.width()), scale.bytes())?;
        Ok(Self { rows, cols, data: MatrixData::Int8 { codes, scale: scale.aligned() } })
    }

    /// An INT4 matrix from its two tensors.
    pub fn int4(rows: usize, cols: usize, packed: Bytes, scale: Scales) -> Result<Self, MatrixError> {
        let width = scale.width();
        check_blocks(WeightFormat::Int4, width, rows, cols, &packed, scale.bytes())?;
        Ok(Self { rows, cols, data: MatrixData::Int4 { packed, scale: scale.aligned() } })
    }

    /// Output width.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input width.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How the elements are stored.
    pub fn format(&self) -> WeightFormat {
        match self.data {
            MatrixData::F32(_) => WeightFormat::F32,
            MatrixData::Bf16(_) => WeightFormat::Bf16,
            MatrixData::Mxfp4 { .. } => WeightFormat::Mxfp4,
            MatrixData::Nvfp4 { .. } => WeightFormat::Nvfp4,
            MatrixData::Int8 { .. } => WeightFormat::Int8,
            MatrixData::Int4 { .. } => WeightFormat::Int4,
        }
    }

    /// The stored bytes.
    pub fn data(&self) -> &MatrixData {
        &self.data
    }

    /// Bytes that one product with this matrix reads.
    pub fn size_bytes(&self) -> usize {
        match &self.data {
            MatrixData::F32(b) | MatrixData::Bf16(b) => b.len(),
            MatrixData::Mxfp4 { packed, scale } => packed.len() + scale.len(),
            MatrixData::Nvfp4 { packed, scale, .. } => packed.len() + scale.len() + 4,
            MatrixData::Int8 { codes, scale } => codes.len() + scale.bytes().len(),
            MatrixData::Int4 { packed, scale } => packed.len() + scale.bytes().len(),
        }
    }

    /// Row `r`, borrowed in its stored form.
    ///
    /// # Panics
    /// If `r >= rows`.
    #[inline]
    pub fn row(&self, r: usize) -> Row<'_> {
        assert!(r < self.rows, "row {r} of a matrix of {} rows", self.rows);
        match &self.data {
            MatrixData::F32(b) => Row::F32(bytemuck::cast_slice(slice(b, r, self.cols * 4))),
            MatrixData::Bf16(b) => Row::Bf16(bytemuck::cast_slice(slice(b, r, self.cols * 2))),
            MatrixData::Mxfp4 { packed, scale } => Row::Mxfp4 {
                packed: slice(packed, r, self.cols / 2),
                scale: bytemuck::cast_slice(slice(scale, r, self.cols / MX_BLOCK)),
            },
            MatrixData::Nvfp4 { packed, scale, global } => Row::Nvfp4 {
                packed: slice(packed, r, self.cols / 2),
                scale: bytemuck::cast_slice(slice(scale, r, self.cols / NV_BLOCK)),
                global: *global,
            },
            MatrixData::Int8 { codes, scale } => Row::Int8 {
                codes: bytemuck::cast_slice(slice(codes, r, self.cols)),
                scale: scale.row(r, 1).get(0),
            },
            MatrixData::Int4 { packed, scale } => Row::Int4 {
                packed: slice(packed, r, self.cols / 2),
                scale: scale.row(r, self.cols / INT4_GROUP),
            },
        }
    }
}

/// One row of a [`Matrix`] in its stored form.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Row<'a> {
    /// `[cols]`
    F32(&'a [f32]),
    /// `[cols]`
    Bf16(&'a [bf16]),
    /// `[cols / 2]`, `[cols / 32]`
    Mxfp4 {
        /// Two codes a byte, the low nibble is the even column.
        packed: &'a [u8],
        /// One scale per 32 columns.
        scale: &'a [E8M0],
    },
    /// `[cols / 2]`, `[cols / 16]`
    Nvfp4 {
        /// Two codes a byte, the low nibble is the even column.
        packed: &'a [u8],
        /// One scale per 16 columns.
        scale: &'a [E4M3],
        /// One per matrix.
        global: GlobalScale,
    },
    /// `[cols]`
    Int8 {
        /// One a column.
        codes: &'a [i8],
        /// One per row.
        scale: f32,
    },
    /// `[cols / 2]`, `[cols / 64]`
    Int4 {
        /// Two nibbles a byte, the low one is the even column.
        packed: &'a [u8],
        /// One scale per 64 columns.
        scale: ScaleRow<'a>,
    },
}

impl Row<'_> {
    /// The row's values, exactly (a product of an NVFP4 scale that is no power of two is rounded once, to f64).
    ///
    /// # Panics
    /// If `out` is not as long as the row.
    pub fn decode_f64(&self, out: &mut [f64]) {
        match *self {
            Row::F32(w) => {
                assert_eq!(out.len(), w.len());
                out.iter_mut().zip(w).for_each(|(o, &w)| *o = f64::from(w));
            }
            Row::Bf16(w) => {
                assert_eq!(out.len(), w.len());
                out.iter_mut().zip(w).for_each(|(o, w)| *o = w.to_f64());
            }
            Row::Mxfp4 { packed, scale } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    *o = f64::from(code(packed, c).to_f32()) * f64::from(scale[c / MX_BLOCK].to_f32());
                }
            }
            Row::Nvfp4 { packed, scale, global } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    let v = f64::from(code(packed, c).to_f32()) * f64::from(scale[c / NV_BLOCK].to_f32());
                    *o = global.apply_f64(v);
                }
            }
            Row::Int8 { codes, scale } => {
                assert_eq!(out.len(), codes.len());
                out.iter_mut().zip(codes).for_each(|(o, &c)| *o = f64::from(c) * f64::from(scale));
            }
            Row::Int4 { packed, scale } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    *o = f64::from(int4_code(packed, c)) * f64::from(scale.get(c / INT4_GROUP));
                }
            }
        }
    }

    /// The row's values in f32: exact for every format, but for an NVFP4 matrix whose global scale is no power
    /// of two and an integer matrix with f32 scales, where the last product is rounded once.
    ///
    /// # Panics
    /// If `out` is not as long as the row.
    pub fn decode_f32(&self, out: &mut [f32]) {
        match *self {
            Row::F32(w) => out.copy_from_slice(w),
            Row::Bf16(w) => {
                assert_eq!(out.len(), w.len());
                out.iter_mut().zip(w).for_each(|(o, w)| *o = w.to_f32());
            }
            Row::Mxfp4 { packed, scale } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    *o = code(packed, c).to_f32() * scale[c / MX_BLOCK].to_f32();
                }
            }
            Row::Nvfp4 { packed, scale, global } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    *o = global.apply(code(packed, c).to_f32() * scale[c / NV_BLOCK].to_f32());
                }
            }
            Row::Int8 { codes, scale } => {
                assert_eq!(out.len(), codes.len());
                out.iter_mut().zip(codes).for_each(|(o, &c)| *o = f32::from(c) * scale);
            }
            Row::Int4 { packed, scale } => {
                assert_eq!(out.len(), packed.len() * 2);
                for (c, o) in out.iter_mut().enumerate() {
                    *o = int4_code(packed, c) * scale.get(c / INT4_GROUP);
                }
            }
        }
    }
}

/// The code of column `c` in a packed row.
#[inline]
fn code(packed: &[u8], c: usize) -> E2M1 {
    if c.is_multiple_of(2) { E2M1::even(packed[c / 2]) } else { E2M1::odd(packed[c / 2]) }
}

/// The value of column `c` in a packed row of integers, without its scale.
#[inline]
fn int4_code(packed: &[u8], c: usize) -> f32 {
    int4_value(if c.is_multiple_of(2) { packed[c / 2] } else { packed[c / 2] >> 4 })
}

#[inline]
fn slice(bytes: &Bytes, r: usize, width: usize) -> &[u8] {
    &bytes[r * width..(r + 1) * width]
}

fn check(
    part: &'static str,
    format: WeightFormat,
    rows: usize,
    cols: usize,
    expected: Option<usize>,
    bytes: &Bytes,
) -> Result<(), MatrixError> {
    let expected = expected.unwrap_or(usize::MAX);
    if bytes.len() == expected {
        Ok(())
    } else {
        Err(MatrixError::Length { part, format, rows, cols, expected, found: bytes.len() })
    }
}

fn check_blocks(
    format: WeightFormat,
    scale_width: usize,
    rows: usize,
    cols: usize,
    packed: &Bytes,
    scale: &Bytes,
) -> Result<(), MatrixError> {
    let block = format.column_block();
    if cols == 0 || !cols.is_multiple_of(block) {
        return Err(MatrixError::Columns { format, block, cols });
    }
    check("the packed tensor", format, rows, cols, rows.checked_mul(cols / 2), packed)?;
    check("the scale tensor", format, rows, cols, rows.checked_mul(cols / block * scale_width), scale)
}

/// The same bytes at an address that a `&[T]` may start at.
pub(crate) fn aligned<T: bytemuck::Pod + Send + Sync>(bytes: Bytes) -> Bytes {
    if bytemuck::try_cast_slice::<u8, T>(&bytes).is_ok() {
        return bytes;
    }
    struct Owner<T>(Vec<T>);
    impl<T: bytemuck::Pod> AsRef<[u8]> for Owner<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    let mut copy = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    bytemuck::cast_slice_mut(&mut copy).copy_from_slice(&bytes);
    Bytes::from_owner(Owner(copy))
}
