//! The lossless cast of block scales, E8M0 of 32 columns to E4M3 of 16 (`docs/nvfp4.md` 2 to 4).
//!
//! Elements are not touched. All functions take whole matrices as flat sequences of blocks: rows are whole blocks, so
//! that a block's position is its number, and its row is the number divided by the blocks of a row.

use k3_quant::E4M3;

use crate::expert_survey::MAX_FACTOR;

/// Bytes of packed codes that one MXFP4 scale covers.
const PACKED_BLOCK: usize = k3_quant::MX_BLOCK / 2;
/// Magnitude bits of two E2M1 codes.
const MAGNITUDES: u128 = u128::from_ne_bytes([0x77; PACKED_BLOCK]);
/// The E8M0 code that is no number.
const NAN: usize = 255;
/// The smallest `m` whose `2^m` is a normal f32.
const MIN_GLOBAL: i32 = -126;
/// The E4M3 code of 1.0, for zero blocks whose own exponent does not fit.
const ONE: u8 = 0x38;
/// A mark in tables: no E4M3 code that is written.
const NONE: u8 = 0xff;

/// How often each block exponent occurs, by whether the block is live (has a code that is not zero).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Census {
    /// Live blocks by E8M0 byte.
    pub live: [u64; 256],
    /// Blocks whose 32 codes are all zero, by E8M0 byte.
    pub zero: [u64; 256],
}

impl Default for Census {
    fn default() -> Self {
        Self { live: [0; 256], zero: [0; 256] }
    }
}

impl Census {
    /// Counts the blocks of a matrix: `packed` codes, one E8M0 byte of `scales` for every 16 bytes. `live` gets 1 for
    /// each live block, 0 for each other one.
    ///
    /// # Panics
    /// If the lengths do not belong together.
    pub(super) fn of(packed: &[u8], scales: &[u8], live: &mut [u8]) -> Self {
        let (blocks, rest) = packed.as_chunks::<PACKED_BLOCK>();
        assert!(rest.is_empty() && blocks.len() == scales.len() && scales.len() == live.len());
        // Two of each, taken in turn: runs of one exponent would wait for their own count otherwise.
        let mut counts = [[0u64; 512]; 2];
        for (i, ((block, &e), live)) in blocks.iter().zip(scales).zip(live).enumerate() {
            *live = u8::from(u128::from_ne_bytes(*block) & MAGNITUDES != 0);
            counts[i & 1][usize::from(*live) << 8 | usize::from(e)] += 1;
        }
        let sum = |at: usize| counts[0][at] + counts[1][at];
        Self { live: std::array::from_fn(|e| sum(256 + e)), zero: std::array::from_fn(sum) }
    }

    /// Adds the blocks of another matrix.
    pub(super) fn add(&mut self, other: &Self) {
        for (to, from) in self.live.iter_mut().zip(&other.live).chain(self.zero.iter_mut().zip(&other.zero)) {
            *to += from;
        }
    }

    /// Smallest and largest exponent of live blocks, as powers of two; `None` if no block is live.
    pub(super) fn range(&self) -> Option<(i32, i32)> {
        let numbers = &self.live[..NAN];
        let min = numbers.iter().position(|&n| n > 0)?;
        let max = numbers.iter().rposition(|&n| n > 0)?;
        Some((min as i32 - 127, max as i32 - 127))
    }

    /// Live blocks.
    pub(super) fn live_blocks(&self) -> u64 {
        self.live.iter().sum()
    }

    /// Blocks whose scale is NaN, live or not.
    pub(super) fn nan_blocks(&self) -> u64 {
        self.live[NAN] + self.zero[NAN]
    }

    /// Blocks of zeros.
    pub(super) fn zero_blocks(&self) -> u64 {
        self.zero.iter().sum()
    }
}

/// `m` of the scale `2^m` of the matrices that `census` covers: the largest live block gets the E4M3 scale 2^8
/// (`docs/nvfp4.md` 3), or a smaller one where `2^(kmax - 8)` would not be a normal f32. 0 without live blocks.
pub(super) fn global_exponent(census: &Census) -> i32 {
    census.range().map_or(0, |(_, kmax)| (kmax - 8).max(MIN_GLOBAL))
}

/// Why block scales cannot be cast without loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    /// The E8M0 byte is 255.
    Nan,
    /// The exponent of a live block is too far below the largest one.
    OutOfWindow,
    /// The scale of the matrix would be so large that readers take it for one in the inverse sense.
    GlobalScale,
}

/// The first block of a matrix that cannot be cast, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FirstMisfit {
    /// Why.
    pub why: Misfit,
    /// Number of the first such block in the matrix.
    pub block: usize,
    /// Its E8M0 byte.
    pub e: u8,
    /// Blocks that cannot be cast, other than those whose scale is NaN.
    pub count: u64,
    /// Blocks whose scale is NaN.
    pub nan: u64,
}

/// The first block of a matrix whose scale is NaN, if there is one.
pub(super) fn first_nan(census: &Census, scales: &[u8]) -> Option<FirstMisfit> {
    let block = scales.iter().position(|&e| usize::from(e) == NAN)?;
    Some(FirstMisfit { why: Misfit::Nan, block, e: 255, count: 0, nan: census.nan_blocks() })
}

/// The cast of all exponents for one `m`.
pub(super) struct Cast {
    m: i32,
    /// By live, then E8M0 byte.
    table: [[u8; 256]; 2],
}

impl Cast {
    /// The cast with the global scale `2^m`.
    ///
    /// # Panics
    /// If `2^m` or its reciprocal is no normal f32; [`global_exponent`] gives none such.
    pub(super) fn new(m: i32) -> Self {
        assert!((MIN_GLOBAL..=-MIN_GLOBAL).contains(&m), "global exponent {m}");
        let code = |e: usize| E4M3::from_power_of_two(e as i32 - 127 - m).map(|code| code.0);
        let zero = std::array::from_fn(|e| if e == NAN { NONE } else { code(e).unwrap_or(ONE) });
        let live = std::array::from_fn(|e| if e == NAN { NONE } else { code(e).unwrap_or(NONE) });
        Self { m, table: [zero, live] }
    }

    /// The first block that this cast would change, if there is one.
    ///
    /// # Panics
    /// If the lengths do not belong together.
    pub(super) fn misfit(&self, census: &Census, scales: &[u8], live: &[u8]) -> Option<FirstMisfit> {
        assert_eq!(scales.len(), live.len());
        let bad = |live: usize, e: usize| self.table[live][e] == NONE;
        // Blocks of zeros fit unless they are NaN.
        let count = (0..NAN).map(|e| census.live[e] * u64::from(bad(1, e))).sum();
        let nan = census.nan_blocks();
        if count + nan == 0 {
            return None;
        }
        let mut blocks = scales.iter().zip(live);
        let block = blocks.position(|(&e, &live)| bad(usize::from(live), usize::from(e)))?;
        let e = scales[block];
        let why = if usize::from(e) == NAN { Misfit::Nan } else { Misfit::OutOfWindow };
        Some(FirstMisfit { why, block, e, count, nan })
    }

    /// The largest live block of a matrix, if the global scale is so large that our own reader takes it for one in
    /// the inverse sense.
    ///
    /// # Panics
    /// If the lengths do not belong together.
    pub(super) fn too_large(&self, census: &Census, scales: &[u8], live: &[u8]) -> Option<FirstMisfit> {
        assert_eq!(scales.len(), live.len());
        if self.global().0 <= MAX_FACTOR {
            return None;
        }
        let e = (census.range()?.1 + 127) as u8;
        let block = scales.iter().zip(live).position(|(&scale, &live)| live == 1 && scale == e)?;
        Some(FirstMisfit { why: Misfit::GlobalScale, block, e, count: census.live[usize::from(e)], nan: 0 })
    }

    /// Zero blocks whose exponent does not fit and is replaced by 1.0.
    pub(super) fn replaced(&self, census: &Census) -> u64 {
        (0..NAN).filter(|&e| self.table[1][e] == NONE).map(|e| census.zero[e]).sum()
    }

    /// Writes the E4M3 scales of a matrix without misfits: two for each block.
    ///
    /// # Panics
    /// If the lengths do not belong together.
    pub(super) fn write(&self, scales: &[u8], live: &[u8], out: &mut [u8]) {
        let (pairs, rest) = out.as_chunks_mut::<2>();
        assert!(rest.is_empty() && pairs.len() == scales.len() && scales.len() == live.len());
        for ((pair, &e), &live) in pairs.iter_mut().zip(scales).zip(live) {
            *pair = [self.table[usize::from(live & 1)][usize::from(e)]; 2];
        }
    }

    /// The scale of the matrix, as a factor and as a divisor; both exact.
    pub(super) fn global(&self) -> (f32, f32) {
        let power = |m: i32| f32::from_bits(((m + 127) as u32) << 23);
        (power(self.m), power(-self.m))
    }
}

#[cfg(test)]
mod tests;
