//! Keys of the Lightning Indexer in 8 bits, with which most of them are told apart from the best without their f32 scores.
//!
//! `docs/arithmetic.md` 7.1 scores every key that a token sees, and 7.2 keeps the best few. [`KeyCodes`] hold each key
//! as integers, `k^ = scale c` with `c` in -127..=127, beside bounds of `|k - k^|` and of `|k|`; [`QueryCodes`] the same of
//! the heads of one token. Dots of integers are exact and cost a quarter of those in f32 or less, and with them comes an interval in which
//! the f32 score lies, as [`crate::cpu::vector::Vectors::index_scores`] computes it. A key whose interval ends below
//! scores that are known is not among the best.
//!
//! # The interval
//!
//! relu neither stretches nor reverses: `relu(a) - relu(b) = c (a - b)` for some `c` in 0..=1. With `m_h = w_h q_h` and
//! `m^_h = w_h q^_h` the error of a score is therefore
//!
//! ```text
//! sum_h w_h (relu(q_h . k) - relu(q^_h . k^)) = (k - k^) . sum_h c_h m_h + k^ . sum_h c'_h (m_h - m^_h)
//! ```
//!
//! and is at most `|k - k^| P + |k^| R`, where `P` bounds the length of `sum_h c_h m_h` for all `c`: its square is
//! `sum_ij c_i c_j m_i . m_j`, at most the sum of those `m_i . m_j` that are positive. `R` is the same of `m - m^`. Where
//! heads point to different sides or have weights of both signs, this is a fraction of what adding up the heads' bounds
//! would give. Roundings of both computations, relative to `|k| sum_h |m_h|`, and what may be lost to underflow are added.
//! Everything is worked out in f64 and rounded up.

mod kernels;
mod query;

pub use query::QueryCodes;

/// Keys whose codes lie side by side.
pub const KEY_BLOCK: usize = 32;
/// Columns of a key that lie together: a lane of an integer dot.
const GROUP: usize = 4;
/// The code that stands for 0: they are stored without a sign.
const ZERO: u8 = 128;
/// The largest code.
const LARGEST: f32 = 127.0;
/// Wider keys might have dots that f32 cannot hold exactly.
const MAX_DIM: usize = 1024;
/// More heads might add up to more than the bounds of roundings allow for.
const MAX_HEADS: usize = 4096;
/// Longer keys, or factors of theirs that are larger, might overflow on the way.
const MAX_NORM: f32 = 1e27;

/// The keys of a sequence, quantized.
#[derive(Clone, Debug)]
pub struct KeyCodes {
    dim: usize,
    /// `[blocks, groups, KEY_BLOCK, GROUP]`, zeros behind the last key.
    codes: Vec<u8>,
    /// Of each key; 0 where all codes are.
    scales: Vec<f32>,
    /// At least `|k - k^|`.
    errors: Vec<f32>,
    /// At least `|k|` and `|k^|`.
    norms: Vec<f32>,
    /// The largest of `norms`; infinite if a key is not finite.
    largest: f32,
}

impl KeyCodes {
    /// None, of `dim` each.
    pub fn new(dim: usize) -> Self {
        Self {
            dim,
            codes: Vec::new(),
            scales: Vec::new(),
            errors: Vec::new(),
            norms: Vec::new(),
            largest: 0.0,
        }
    }

    /// Keys so far.
    pub fn len(&self) -> usize {
        self.scales.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.scales.is_empty()
    }

    /// Bytes of a key of `dim`, when blocks are full.
    pub const fn bytes_per_key(dim: usize) -> usize {
        GROUP * dim.div_ceil(GROUP) + 3 * size_of::<f32>()
    }

    /// Appends a key.
    ///
    /// # Panics
    /// If it has another width.
    pub fn push(&mut self, key: &[f32]) {
        assert_eq!(key.len(), self.dim);
        let (block, lane) = (self.len() / KEY_BLOCK, self.len() % KEY_BLOCK);
        let block_bytes = self.dim.div_ceil(GROUP) * KEY_BLOCK * GROUP;
        if lane == 0 {
            self.codes.resize((block + 1) * block_bytes, ZERO);
        }
        let quantized = Quantized::new(key);
        let block = &mut self.codes[block * block_bytes..];
        for (group, codes) in quantized.codes.chunks(GROUP).enumerate() {
            let at = (group * KEY_BLOCK + lane) * GROUP;
            for (place, code) in block[at..].iter_mut().zip(codes) {
                *place = code.cast_unsigned().wrapping_add(ZERO);
            }
        }
        let norm = up(quantized.norm.max(quantized.rounded_norm));
        self.scales.push(quantized.scale);
        self.errors.push(up(quantized.error));
        self.norms.push(norm);
        self.largest = if quantized.norm.is_finite() { self.largest.max(norm) } else { f32::INFINITY };
    }
}

/// A vector as integers times a scale.
struct Quantized {
    codes: Vec<i8>,
    scale: f32,
    /// `|x - x^|`, `|x|` and `|x^|` in f64; not finite where `x` is not.
    error: f64,
    norm: f64,
    rounded_norm: f64,
}

impl Quantized {
    fn new(x: &[f32]) -> Self {
        /// Added to a small number, it moves its rounded value to the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let scale = x.iter().fold(0.0_f32, |max, x| max.max(x.abs())) / LARGEST;
        let norm = norm(x.iter().map(|&x| f64::from(x)));
        // A scale that is subnormal, or was lost to underflow, is a poor one; what is not finite is not looked at any more.
        if !(scale >= f32::MIN_POSITIVE && norm.is_finite()) {
            return Self { codes: vec![0; x.len()], scale: 0.0, error: norm, norm, rounded_norm: 0.0 };
        }
        let shifted = |x: f32| x / scale + ROUND;
        let rounded = |x: f32| f64::from(scale) * f64::from(shifted(x) - ROUND);
        Self {
            codes: x.iter().map(|&x| shifted(x).to_bits().wrapping_sub(ROUND.to_bits()) as i8).collect(),
            scale,
            error: self::norm(x.iter().map(|&x| f64::from(x) - rounded(x))),
            norm,
            rounded_norm: self::norm(x.iter().map(|&x| rounded(x))),
        }
    }
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// An f32 that is not below a positive `x`, also if `x` is off by some roundings of f64.
fn up(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { ((x * (1.0 + 1e-9)) as f32).next_up().max(f32::MIN_POSITIVE) }
}
