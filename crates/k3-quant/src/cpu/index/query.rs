//! The heads of one token, and the bounds that belong to them.

use super::{GROUP, KEY_BLOCK, KeyCodes, MAX_DIM, MAX_HEADS, MAX_NORM, Quantized, kernels, up};
use crate::cpu::vector::{DOT_BLOCK, Vectors};

/// Heads whose dots are worked out together.
pub(super) const HEADS: usize = 8;
/// Half the distance of 1 and the next f32: the relative error of a rounding.
const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
/// Half the smallest f32: the absolute error of a product that underflows.
const UNDERFLOW: f64 = 0.5 * f32::from_bits(1) as f64;

/// Queries of one token with their weights, quantized.
///
/// Scores and bounds are in a unit of their own, so that none of them is lost to underflow.
#[derive(Clone, Debug)]
pub struct QueryCodes {
    dim: usize,
    /// Codes of [`GROUP`] columns each, for [`HEADS`] heads side by side.
    pub(super) words: Vec<[i32; HEADS]>,
    /// The same as 16-bit integers: even columns, odd columns.
    pub(super) pairs: Vec<[[i32; 2]; HEADS]>,
    /// For as many heads: what the dot starts from, for keys to have no sign.
    pub(super) starts: Vec<[i32; HEADS]>,
    /// `w_h` times the scale of the head, in this unit: at most 1.
    pub(super) factors: Vec<[f32; HEADS]>,
    /// The unit.
    unit: f64,
    /// Of keys, in this unit: what an interval has for `|k - k^|`, for `|k|`, and for nothing.
    slack: [f32; 3],
    /// The longest key with which no f32 score can overflow.
    longest: f64,
}

impl QueryCodes {
    /// `q` is `[heads, dim]`. `None` where no useful bounds are to be had, or none at all: weights of 0, numbers that are not
    /// finite, or that are too large or too small.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn new(vectors: Vectors, dim: usize, q: &[f32], weights: &[f32]) -> Option<Self> {
        assert_eq!(q.len(), weights.len() * dim);
        if dim == 0 || dim > MAX_DIM || weights.len() > MAX_HEADS {
            return None;
        }
        let heads: Vec<Quantized> = q.chunks_exact(dim).map(Quantized::new).collect();
        if !(heads.iter().all(|head| head.norm.is_finite()) && weights.iter().all(|w| w.is_finite())) {
            return None;
        }
        let factor = |(head, w): (&Quantized, &f32)| f64::from(*w) * f64::from(head.scale);
        let unit = heads.iter().zip(weights).map(factor).fold(0.0, |max: f64, f| max.max(f.abs()));
        if unit == 0.0 {
            return None;
        }

        let sum = |f: fn(&Quantized) -> f64| -> f64 {
            heads.iter().zip(weights).map(|(head, w)| f64::from(w.abs()) * f(head)).sum()
        };
        let (norms, rounded_norms, weight) =
            (sum(|head| head.norm), sum(|head| head.rounded_norm), sum(|_| 1.0));
        let n = weights.len() as f64;
        let products: Vec<f64> = q
            .chunks_exact(dim)
            .zip(weights)
            .flat_map(|(q, w)| q.iter().map(move |&q| f64::from(*w) * f64::from(q)))
            .collect();
        let errors: Vec<f64> = q
            .chunks_exact(dim)
            .zip(heads.iter().zip(weights))
            .flat_map(|(q, (head, w))| {
                let scale = f64::from(head.scale);
                let error = move |(q, code): (&f32, &i8)| f64::from(*q) - scale * f64::from(*code);
                q.iter().zip(&head.codes).map(move |at| f64::from(*w) * error(at))
            })
            .collect();
        let length = |rows: &[f64], norms: f64| {
            // What the sums of f64 may have lost.
            (kernels::positive_products(vectors.set(), dim, rows) + 1e-12 * norms * norms).sqrt()
        };

        // In f32, of a term: a product, its sum with the others of its block, the sum of blocks, the weight, the sum of heads. In 8 bits:
        // the factor, its product, the sum of heads, the scale. Some more stand for products of roundings.
        let blocks = dim.div_ceil(DOT_BLOCK) as f64;
        let exact = (DOT_BLOCK as f64 + blocks + n + 8.0) * ROUNDING * norms;
        let approximate = (n + 8.0) * ROUNDING * rounded_norms;
        let lost = (2.0 * weight * (dim as f64 + blocks) + 2.0 * n) * UNDERFLOW;
        // The kernel's own products that underflow: of a factor with a dot below 2^24, and with a scale, which is below `|k|`.
        let of_factors = 2.0 * n * f64::from(1 << 24) * UNDERFLOW;
        let slack = [
            length(&products, norms) / unit,
            (length(&errors, norms) + exact + approximate) / unit + of_factors,
            lost / unit + f64::from(f32::MIN_POSITIVE),
        ];
        // Roundings where the interval is put together.
        let slack = slack.map(|x| up(x * (1.0 + 16.0 * ROUNDING)));
        if !slack.iter().all(|x| *x <= 1e9) {
            return None;
        }
        let longest_head = heads.iter().map(|head| head.norm).fold(0.0, f64::max);
        let mut codes = Self {
            dim,
            words: Vec::new(),
            pairs: Vec::new(),
            starts: Vec::new(),
            factors: Vec::new(),
            unit,
            slack,
            longest: (1e37 / longest_head.max(norms)).min(f64::from(MAX_NORM)),
        };
        let factors: Vec<f32> = heads.iter().zip(weights).map(|at| (factor(at) / unit) as f32).collect();
        for (heads, factors) in heads.chunks(HEADS).zip(factors.chunks(HEADS)) {
            codes.push(heads, factors);
        }
        Some(codes)
    }

    /// At most [`HEADS`] heads. Missing ones are zeros.
    fn push(&mut self, heads: &[Quantized], factors: &[f32]) {
        let mut padded = [0.0; HEADS];
        padded[..factors.len()].copy_from_slice(factors);
        self.factors.push(padded);
        let mut starts = [0; HEADS];
        for (start, head) in starts.iter_mut().zip(heads) {
            *start = -i32::from(super::ZERO) * head.codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        }
        self.starts.push(starts);
        for first in (0..self.dim).step_by(GROUP) {
            let (mut words, mut pairs) = ([0; HEADS], [[0; 2]; HEADS]);
            for ((word, pair), head) in words.iter_mut().zip(&mut pairs).zip(heads) {
                let mut codes = [0_i8; GROUP];
                let group = &head.codes[first..self.dim.min(first + GROUP)];
                codes[..group.len()].copy_from_slice(group);
                *word = i32::from_le_bytes(codes.map(i8::cast_unsigned));
                let two = |a: i8, b: i8| i32::from(b) << 16 | i32::from(i16::from(a).cast_unsigned());
                *pair = [two(codes[0], codes[2]), two(codes[1], codes[3])];
            }
            self.words.push(words);
            self.pairs.push(pairs);
        }
    }

    /// [`GROUP`]s of columns.
    pub(super) fn groups(&self) -> usize {
        self.dim.div_ceil(GROUP)
    }

    /// Whether the intervals hold for these keys: all are finite, none so long that an f32 score might overflow.
    ///
    /// # Panics
    /// If they have another width.
    pub fn serve(&self, keys: &KeyCodes) -> bool {
        assert_eq!(keys.dim, self.dim);
        f64::from(keys.largest) <= self.longest
    }

    /// About `sum_h w_h relu(q_h . k)`, in the unit of these queries, for as many keys as `out` has place for, from `first` on. The bits
    /// do not depend on the instruction set.
    ///
    /// # Panics
    /// If `first` is not a multiple of [`KEY_BLOCK`], there are fewer keys, or they have another width.
    pub fn scores(&self, vectors: Vectors, keys: &KeyCodes, first: usize, out: &mut [f32]) {
        assert!(keys.dim == self.dim && first.is_multiple_of(KEY_BLOCK));
        let codes = &keys.codes[first * self.groups() * GROUP..];
        kernels::scores(vectors.set(), self, codes, &keys.scales[first..first + out.len()], out);
    }

    /// An f32 score in the unit of these queries, rounded down.
    pub fn threshold(&self, score: f32) -> f32 {
        ((f64::from(score) / self.unit) as f32).next_down().next_down()
    }

    /// Appends those keys, from `first` on, whose f32 score may reach `threshold`. `scores` are theirs from [`Self::scores`].
    ///
    /// # Panics
    /// If there are fewer keys.
    pub fn candidates(
        &self,
        vectors: Vectors,
        keys: &KeyCodes,
        first: usize,
        scores: &[f32],
        threshold: f32,
        out: &mut Vec<u32>,
    ) {
        let range = first..first + scores.len();
        let keys = kernels::Bounds {
            scores,
            errors: &keys.errors[range.clone()],
            norms: &keys.norms[range],
            slack: self.slack,
        };
        kernels::candidates(vectors.set(), keys, threshold, first, out);
    }

    /// An interval in which the f32 score of key `i` lies, in the unit of these queries, with its score from [`Self::scores`]: what
    /// [`Self::candidates`] goes by.
    pub fn interval(&self, keys: &KeyCodes, i: usize, score: f32) -> (f32, f32) {
        let slack = kernels::slack(self.slack, keys.errors[i], keys.norms[i]);
        (score - slack, score + slack)
    }

    /// What [`Self::scores`] and [`Self::threshold`] count in.
    pub fn unit(&self) -> f64 {
        self.unit
    }
}

#[cfg(test)]
mod tests {
    use super::super::norm;
    use super::*;

    /// A bound of `|sum_h c_h m_h|` holds at all corners of the cube, and is met where heads agree.
    #[test]
    fn positive_products_bound_every_partial_sum() {
        let set = Vectors::default().set();
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        for dim in [1, 2, 5, 17, 40] {
            for heads in 1..9 {
                let rows: Vec<f64> = (0..heads * dim).map(|_| next()).collect();
                let bound = kernels::positive_products(set, dim, &rows).sqrt();
                for corner in 0..1_u32 << heads {
                    let sum = (0..dim).map(|c| {
                        (0..heads).filter(|h| corner >> h & 1 == 1).map(|h| rows[h * dim + c]).sum::<f64>()
                    });
                    assert!(norm(sum) <= bound * (1.0 + 1e-12), "{heads} heads of {dim}");
                }
                let equal = rows[..dim].repeat(heads);
                let bound = kernels::positive_products(set, dim, &equal).sqrt();
                let length = heads as f64 * norm(rows[..dim].iter().copied());
                assert!((bound / length - 1.0).abs() < 1e-12);
            }
        }
    }
}
