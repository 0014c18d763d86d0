//! The exact search for a block's scale.
//!
//! The candidates are numbers in ascending order. Sixteen consecutive ones are tried at a time, each in a lane of its own,
//! first around the scale that puts the largest element at the end of the range, then below and above it, as long as a
//! bound leaves room for a lower error:
//!
//! * below, the largest element alone is clipped by `|x| - largest code * scale`, more the lower the scale;
//! * above, elements under half of the smallest code become zero, ever more of them the higher the scale.
//!
//! Differences of a bf16 and a code times a scale are exact in f32, and so are their squares; only the sum is rounded.
//! Candidates whose f32 sums are too close to call are compared in f64.

#![allow(clippy::inline_always, reason = "the bodies must be compiled inside each target-feature wrapper")]

use half::bf16;

use super::{ROUND, RoundingError, power_of_two, widen};
use crate::cpu::InstructionSet;
use crate::{E2M1, E4M3, INT4_GROUP, NV_BLOCK, int4_value};

/// Candidates that are tried together.
const LANES: usize = 16;
/// More than the relative error of an f32 sum of squares over a block, 64 * 2^-24.
const SLACK: f32 = 1.0 + 1e-5;

/// What the search needs to know of a format. Values are those of a block, scaled by a power of two.
trait Grid {
    /// Candidates, in ascending order of their scales.
    fn candidates(&self) -> std::ops::RangeInclusive<i32>;
    /// The scale of a candidate.
    fn scale(&self, candidate: i32) -> f32;
    /// Where to look first.
    fn start(&self, positive: f32, negative: f32) -> i32;
    /// The nearest code to `y`, as a value.
    fn nearest(y: f32) -> f32;
    /// The largest and the lowest code.
    const RANGE: [f32; 2];
    /// Half of the smallest code above zero: what is below it becomes zero.
    const TO_ZERO: f32;
}

/// Magnitudes under E4M3 scales; a candidate is the byte.
struct Nvfp4;

impl Grid for Nvfp4 {
    const RANGE: [f32; 2] = [6.0, 0.0];
    const TO_ZERO: f32 = 0.25;

    #[inline(always)]
    fn candidates(&self) -> std::ops::RangeInclusive<i32> {
        1..=0x7e
    }
    #[inline(always)]
    fn scale(&self, candidate: i32) -> f32 {
        static VALUES: [f32; 128] = {
            let mut values = [0.0; 128];
            let mut byte = 0;
            while byte < 127 {
                values[byte] = E4M3(byte as u8).to_f32();
                byte += 1;
            }
            values
        };
        VALUES[(candidate & 0x7f) as usize]
    }
    #[inline(always)]
    fn start(&self, positive: f32, _: f32) -> i32 {
        let full = positive / Self::RANGE[0];
        // The byte of the largest scale that is not above it; subnormals have a fixed step.
        let byte = if full < 1.0 / 64.0 {
            (full * 512.0) as i32
        } else {
            (full.to_bits() >> 20) as i32 - (120 << 3)
        };
        byte - 3
    }
    #[inline(always)]
    fn nearest(y: f32) -> f32 {
        // A multiple of 0.5, 1 or 2, ties to even.
        let y = if y < 6.0 { y } else { 6.0 };
        let step = if y < 2.0 { 0.5 * ROUND } else { ROUND };
        let step = if y < 4.0 { step } else { 2.0 * ROUND };
        (y + step) - step
    }
}

/// Numbers under bf16 scales; a candidate has the bits of the scale for values that were divided by `2^exponent`.
struct Int4 {
    exponent: i32,
}

/// What the exponent of a bf16 is multiplied by in its bits.
const BF16_EXPONENT: i32 = 1 << 7;

impl Int4 {
    fn stored(&self, candidate: i32) -> bf16 {
        bf16::from_bits((candidate + self.exponent * BF16_EXPONENT) as u16)
    }
}

impl Grid for Int4 {
    const RANGE: [f32; 2] = [7.0, -8.0];
    const TO_ZERO: f32 = 0.5;

    #[inline(always)]
    fn candidates(&self) -> std::ops::RangeInclusive<i32> {
        let of = |b: bf16| i32::from(b.to_bits()) - self.exponent * BF16_EXPONENT;
        of(bf16::MIN_POSITIVE)..=of(bf16::MAX)
    }
    #[inline(always)]
    fn scale(&self, candidate: i32) -> f32 {
        f32::from_bits((candidate as u32) << 16)
    }
    #[inline(always)]
    fn start(&self, positive: f32, negative: f32) -> i32 {
        let full = (positive / Self::RANGE[0]).max(negative / -Self::RANGE[1]);
        (full.to_bits() >> 16) as i32 - 12
    }
    #[inline(always)]
    fn nearest(y: f32) -> f32 {
        let y = if y < Self::RANGE[0] { y } else { Self::RANGE[0] };
        let y = if y > Self::RANGE[1] { y } else { Self::RANGE[1] };
        (y + ROUND) - ROUND
    }
}

/// Squared errors under the scales of [`LANES`] candidates.
#[inline(always)]
fn errors<G: Grid, const N: usize>(grid: &G, first: i32, x: &[f32; N]) -> [f32; LANES] {
    let last = *grid.candidates().end();
    let s: [f32; LANES] = std::array::from_fn(|j| grid.scale((first + j as i32).min(last)));
    let inverse = s.map(|s| 1.0 / s);
    let mut sums = [0.0; LANES];
    for &x in x {
        for j in 0..LANES {
            // The product is off by 2^-23 at most, and no quotient is that near to a tie but on it, where both
            // neighbours are equally far.
            let d = x - G::nearest(x * inverse[j]) * s[j];
            sums[j] += d * d;
        }
    }
    sums
}

/// The candidate of least squared error, the lowest of equals. `x` is not all zero.
#[inline(always)]
fn best<G: Grid, const N: usize>(grid: &G, x: &[f32; N]) -> i32 {
    let (mut positive, mut negative) = (0.0, 0.0);
    for &x in x {
        positive = if x > positive { x } else { positive };
        negative = if -x > negative { -x } else { negative };
    }
    let (first, last) = grid.candidates().into_inner();
    let clipped = |candidate: i32| {
        let s = grid.scale(candidate);
        let over = (positive - G::RANGE[0] * s).max(negative + G::RANGE[1] * s).max(0.0);
        over * over
    };
    let lost = |candidate: i32| {
        let limit = G::TO_ZERO * grid.scale(candidate);
        x.iter().fold(0.0, |sum, &x| sum + if x.abs() < limit { x * x } else { 0.0 })
    };
    let start = grid.start(positive, negative).clamp(first, last);
    let mut tried = Tried { close: [(0, 0.0); LANES], len: 0, least: f32::INFINITY };
    let (mut low, mut high) = (start, start + LANES as i32);
    tried.window(grid, x, low, high.min(last + 1));
    while low > first && clipped(low - 1) <= tried.least * SLACK {
        let begin = (low - LANES as i32).max(first);
        tried.window(grid, x, begin, low);
        low = begin;
    }
    // Where all elements are lost the error grows no more.
    let all_lost = positive.max(negative) / G::TO_ZERO;
    while high <= last && grid.scale(high) <= all_lost && lost(high) < tried.least * SLACK {
        tried.window(grid, x, high, (high + LANES as i32).min(last + 1));
        high += LANES as i32;
    }
    tried.best(grid, x)
}

/// Candidates that may be the best so far.
struct Tried {
    close: [(i32, f32); LANES],
    len: usize,
    least: f32,
}

impl Tried {
    /// Tries candidates `begin..end`, at most [`LANES`].
    #[inline(always)]
    fn window<G: Grid, const N: usize>(&mut self, grid: &G, x: &[f32; N], begin: i32, end: i32) {
        let sums = errors(grid, begin, x);
        for (candidate, &sum) in (begin..end).zip(&sums) {
            self.add(grid, x, candidate, sum);
        }
    }

    #[inline(always)]
    fn add<G: Grid, const N: usize>(&mut self, grid: &G, x: &[f32; N], candidate: i32, sum: f32) {
        if sum > self.least * SLACK {
            return;
        }
        if sum * SLACK < self.least {
            self.len = 0;
        }
        if self.len == self.close.len() {
            // Rare: as many that are as good. The exact comparison keeps one.
            let best = self.best(grid, x);
            self.close[0] = (best, self.least);
            self.len = 1;
        }
        self.close[self.len] = (candidate, sum);
        self.len += 1;
        self.least = if sum < self.least { sum } else { self.least };
    }

    #[inline(always)]
    fn best<G: Grid, const N: usize>(&self, grid: &G, x: &[f32; N]) -> i32 {
        if self.len == 1 {
            return self.close[0].0;
        }
        exact_best(grid, x, &self.close[..self.len])
    }
}

#[inline(never)]
fn exact_best<G: Grid, const N: usize>(grid: &G, x: &[f32; N], close: &[(i32, f32)]) -> i32 {
    let error = |candidate: i32| {
        let s = grid.scale(candidate);
        let difference = |x: f32| f64::from(x) - f64::from(G::nearest(x / s)) * f64::from(s);
        x.iter().map(|&x| difference(x).powi(2)).sum::<f64>()
    };
    let by_error = close.iter().map(|&(candidate, _)| (error(candidate), candidate));
    let lower = |a: (f64, i32), b: (f64, i32)| if (b.0, b.1) < (a.0, a.1) { b } else { a };
    by_error.reduce(lower).map_or(*grid.candidates().start(), |(_, candidate)| candidate)
}

/// E4M3 of 1, for blocks whose codes are all zero (`docs/nvfp4.md` 4).
const ONE: u8 = 0x38;

#[inline(always)]
fn encode_nvfp4(
    values: &[bf16; NV_BLOCK],
    exponent: i32,
    packed: &mut [u8; NV_BLOCK / 2],
    error: &mut RoundingError,
) -> u8 {
    let (factor, inverse) = (power_of_two(exponent), power_of_two(-exponent));
    let x: [f32; NV_BLOCK] = std::array::from_fn(|c| widen(values[c]).abs() * inverse);
    let live = x.iter().any(|&x| x > 0.0);
    let byte = if live { best(&Nvfp4, &x) as u8 } else { ONE };
    let s = E4M3(byte).to_f32();
    // Halfway between neighbours, ties to even codes; each bound is exact.
    let codes: [u8; NV_BLOCK] = std::array::from_fn(|c| {
        let x = x[c];
        u8::from(x > 0.25 * s)
            + u8::from(x >= 0.75 * s)
            + u8::from(x > 1.25 * s)
            + u8::from(x >= 1.75 * s)
            + u8::from(x > 2.5 * s)
            + u8::from(x >= 3.5 * s)
            + u8::from(x > 5.0 * s)
    });
    for (b, packed) in packed.iter_mut().enumerate() {
        let nibble = |c: usize| codes[c] | ((values[c].to_bits() >> 12) as u8 & 8);
        *packed = nibble(2 * b) | nibble(2 * b + 1) << 4;
    }
    error.add_values((0..NV_BLOCK / 8).map(|i| {
        let at = |j: usize| 8 * i + j;
        (
            std::array::from_fn(|j| widen(values[at(j)]).abs()),
            std::array::from_fn(|j| E2M1::VALUES[usize::from(codes[at(j)])] * s * factor),
        )
    }));
    if codes == [0; NV_BLOCK] { ONE } else { byte }
}

#[inline(always)]
fn encode_int4(
    values: &[bf16; INT4_GROUP],
    packed: &mut [u8; INT4_GROUP / 2],
    error: &mut RoundingError,
) -> bf16 {
    let largest = values.iter().fold(0, |max: u16, v| max.max(v.to_bits() & 0x7fff));
    let mut stored = bf16::ONE;
    if largest > 0 {
        // Scaled to a largest magnitude near 1, where no square is lost; in two steps, since 2^133 is no f32.
        let exponent = i32::from(largest >> 7) - 127;
        let half = exponent / 2;
        let (a, b) = (power_of_two(-half), power_of_two(half - exponent));
        let x: [f32; INT4_GROUP] = std::array::from_fn(|c| widen(values[c]) * a * b);
        let grid = Int4 { exponent };
        stored = grid.stored(best(&grid, &x));
    }
    let s = widen(stored);
    // A quotient of two bf16 is never rounded onto a tie.
    let nibbles: [u8; INT4_GROUP] =
        std::array::from_fn(|c| (Int4::nearest(widen(values[c]) / s) as i32 + 8) as u8);
    for (b, packed) in packed.iter_mut().enumerate() {
        *packed = nibbles[2 * b] | nibbles[2 * b + 1] << 4;
    }
    error.add_values((0..INT4_GROUP / 8).map(|i| {
        let at = |j: usize| 8 * i + j;
        (
            std::array::from_fn(|j| widen(values[at(j)])),
            std::array::from_fn(|j| int4_value(nibbles[at(j)]) * s),
        )
    }));
    stored
}

type Nvfp4Block = fn(&[bf16; NV_BLOCK], i32, &mut [u8; NV_BLOCK / 2], &mut RoundingError) -> u8;
type Int4Group = fn(&[bf16; INT4_GROUP], &mut [u8; INT4_GROUP / 2], &mut RoundingError) -> bf16;

macro_rules! compiled {
    ($nvfp4:ident, $int4:ident, $attribute:meta) => {
        #[cfg(target_arch = "x86_64")]
        #[$attribute]
        fn $nvfp4(v: &[bf16; NV_BLOCK], m: i32, p: &mut [u8; NV_BLOCK / 2], e: &mut RoundingError) -> u8 {
            encode_nvfp4(v, m, p, e)
        }
        #[cfg(target_arch = "x86_64")]
        #[$attribute]
        fn $int4(v: &[bf16; INT4_GROUP], p: &mut [u8; INT4_GROUP / 2], e: &mut RoundingError) -> bf16 {
            encode_int4(v, p, e)
        }
    };
}

compiled!(nvfp4_avx2, int4_avx2, target_feature(enable = "avx2"));
compiled!(nvfp4_avx512, int4_avx512, target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl"));

/// Encodes a block: values, exponent of the factor, packed codes, rounding error; gives the scale. For an instruction
/// set that this machine has.
pub(super) fn nvfp4_block(set: InstructionSet) -> Nvfp4Block {
    match set {
        InstructionSet::Portable => |v, m, p, e| encode_nvfp4(v, m, p, e),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set` is an `Encoder`'s, which takes no set that this machine does not have; it names these features.
        InstructionSet::Avx2 => |v, m, p, e| unsafe { nvfp4_avx2(v, m, p, e) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        InstructionSet::Avx512 => |v, m, p, e| unsafe { nvfp4_avx512(v, m, p, e) },
    }
}

/// Encodes a group: values, packed codes, rounding error; gives the scale. For an instruction set that this machine has.
pub(super) fn int4_group(set: InstructionSet) -> Int4Group {
    match set {
        InstructionSet::Portable => |v, p, e| encode_int4(v, p, e),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set` is an `Encoder`'s, which takes no set that this machine does not have; it names these features.
        InstructionSet::Avx2 => |v, p, e| unsafe { int4_avx2(v, p, e) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        InstructionSet::Avx512 => |v, p, e| unsafe { int4_avx512(v, p, e) },
    }
}
