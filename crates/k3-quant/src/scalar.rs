//! The scalar formats of the block formats, and NVFP4's per-matrix scale.

use bytemuck::{Pod, TransparentWrapper, Zeroable};

/// Columns that share one [`E8M0`] scale in MXFP4.
pub const MX_BLOCK: usize = 32;
/// Columns that share one [`E4M3`] scale in NVFP4.
pub const NV_BLOCK: usize = 16;
/// Columns that share one scale in INT4.
pub const INT4_GROUP: usize = 64;

/// The value of a nibble of an INT4 matrix, without its scale: compressed-tensors adds 8 when it packs. Only the low
/// four bits of the byte count.
#[inline]
pub const fn int4_value(nibble: u8) -> f32 {
    (nibble & 0x0f) as f32 - 8.0
}

/// A 4-bit float: sign, two exponent bits, one mantissa bit. Only the low nibble of the byte counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct E2M1(pub u8);

impl E2M1 {
    /// Values by code. Bit 3 is the sign, and code 8 is `-0.0`.
    pub const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

    /// The code of an even column: the low nibble of its packed byte.
    #[inline]
    pub const fn even(packed: u8) -> Self {
        Self(packed & 0x0f)
    }

    /// The code of an odd column: the high nibble of its packed byte.
    #[inline]
    pub const fn odd(packed: u8) -> Self {
        Self(packed >> 4)
    }

    /// The exact value.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        Self::VALUES[(self.0 & 0x0f) as usize]
    }

    /// True for `+0` and `-0`.
    #[inline]
    pub const fn is_zero(self) -> bool {
        matches!(self.0 & 0x0f, 0 | 8)
    }
}

/// An OCP block scale: a biased power of two, `2^(byte - 127)`. Byte 255 is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable, TransparentWrapper)]
#[repr(transparent)]
pub struct E8M0(pub u8);

impl E8M0 {
    /// The one code that is not a number.
    pub const NAN: Self = Self(255);

    /// The exact value. Byte 0 is `2^-127`, a subnormal in f32 and not zero; byte 255 is NaN so that a damaged
    /// scale is seen.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        match self.0 {
            0 => f32::from_bits(0x0040_0000),
            255 => f32::NAN,
            e => f32::from_bits((e as u32) << 23),
        }
    }

    /// The power of two, or `None` for NaN.
    #[inline]
    pub const fn exponent(self) -> Option<i32> {
        match self.0 {
            255 => None,
            e => Some(e as i32 - 127),
        }
    }
}

/// An 8-bit float "e4m3fn": sign, four exponent bits (bias 7), three mantissa bits, no infinity, largest 448.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable, TransparentWrapper)]
#[repr(transparent)]
pub struct E4M3(pub u8);

impl E4M3 {
    /// The exact value. Exponent field 0 is subnormal (step `2^-9`); `0x7f` and `0xff` are NaN.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let sign = ((self.0 & 0x80) as u32) << 24;
        let (exponent, mantissa) = ((self.0 >> 3) & 0x0f, self.0 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => return f32::NAN,
            (0, m) => m as f32 * (1.0 / 512.0),
            (e, m) => f32::from_bits(((e as u32 + 120) << 23) | ((m as u32) << 20)),
        };
        f32::from_bits(magnitude.to_bits() | sign)
    }

    /// The code of `2^exponent`, or `None` outside `-9..=8`, the 18 powers of two that E4M3 holds exactly
    /// (`docs/nvfp4.md` 2).
    #[inline]
    pub const fn from_power_of_two(exponent: i32) -> Option<Self> {
        match exponent {
            -6..=8 => Some(Self(((exponent + 7) as u8) << 3)),
            -9..=-7 => Some(Self(1 << (exponent + 9))),
            _ => None,
        }
    }
}

/// NVFP4's per-matrix scale as ModelOpt stores it (`weight_scale_2`): a value to multiply by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleFactor(pub f32);

/// NVFP4's per-matrix scale as compressed-tensors stores it (`weight_global_scale`): a value to divide by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleDivisor(pub f32);

/// The per-matrix scale of an NVFP4 matrix, in the sense of whoever wrote it. For powers of two (every matrix
/// that was repacked from MXFP4) the two senses are exactly interchangeable; for others each is applied as stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GlobalScale {
    /// Multiply.
    Factor(ScaleFactor),
    /// Divide.
    Divisor(ScaleDivisor),
}

impl GlobalScale {
    /// `x` scaled, in f32.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Factor(ScaleFactor(g)) => x * g,
            Self::Divisor(ScaleDivisor(g)) => x / g,
        }
    }

    /// `x` scaled, in f64.
    #[inline]
    pub fn apply_f64(self, x: f64) -> f64 {
        match self {
            Self::Factor(ScaleFactor(g)) => x * f64::from(g),
            Self::Divisor(ScaleDivisor(g)) => x / f64::from(g),
        }
    }

    /// The number as stored.
    pub fn stored(self) -> f32 {
        match self {
            Self::Factor(ScaleFactor(g)) | Self::Divisor(ScaleDivisor(g)) => g,
        }
    }
}
