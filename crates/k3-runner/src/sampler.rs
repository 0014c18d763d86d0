//! From logits to a token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How to choose a token. Applied in this order: suppressed ids leave, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. 0 takes the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// The same seed and the same logits give the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    /// The vendor's recommendation: temperature 1, `top_p` 0.95.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 0.95, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// A value that means nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// Out of range.
    #[error("{field} is {found}, it must be {expected}")]
    Range {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        found: f32,
        /// What is allowed.
        expected: &'static str,
    },
    /// No token is left to choose from.
    #[error("every token of the vocabulary is suppressed or has no finite logit")]
    NothingLeft,
}

/// Draws tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    suppressed: Vec<u32>,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler that never returns an id of `suppressed`.
    pub fn new(sampling: Sampling, suppressed: Vec<u32>) -> Result<Self, SamplingError> {
        let check = |field, found: f32, ok: bool, expected| {
            if ok { Ok(()) } else { Err(SamplingError::Range { field, found, expected }) }
        };
        let Sampling { temperature: t, top_p, min_p, .. } = sampling;
        check("temperature", t, t.is_finite() && t >= 0.0, "finite and not negative")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "between 0 and 1")?;
        let rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        Ok(Self { sampling, suppressed, rng })
    }

    /// The next token after `logits [vocab]`.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let mut candidates: Vec<(u32, f32)> = logits
            .iter()
            .enumerate()
            .map(|(id, &l)| (id as u32, l))
            .filter(|(id, l)| l.is_finite() && !self.suppressed.contains(id))
            .collect();
        let best = candidates
            .iter()
            .copied()
            .reduce(|a, b| if b.1 > a.1 { b } else { a })
            .ok_or(SamplingError::NothingLeft)?;
        if self.sampling.temperature == 0.0 {
            return Ok(best.0);
        }
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.sampling.top_k > 0 {
            candidates.truncate(self.sampling.top_k);
        }
        let t = f64::from(self.sampling.temperature);
        let mut weights: Vec<f64> =
            candidates.iter().map(|(_, l)| ((f64::from(*l) - f64::from(best.1)) / t).exp()).collect();
        self.cut(&mut weights);
        // 53 bits of one word of the stream: the stream is stable over versions, distributions are not.
        let unit = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = unit * weights.iter().sum::<f64>();
        for ((id, _), w) in candidates.iter().zip(&weights) {
            left -= w;
            if left < 0.0 {
                return Ok(*id);
            }
        }
        // Rounding can leave a sliver past the last one.
        Ok(candidates[weights.len() - 1].0)
    }

    /// `top_p` and `min_p` on weights in descending order; the first is 1 and always stays.
    fn cut(&self, weights: &mut Vec<f64>) {
        let total: f64 = weights.iter().sum();
        let (mut sum, mut keep) = (0.0, 0);
        for w in weights.iter() {
            sum += w;
            keep += 1;
            if sum >= f64::from(self.sampling.top_p) * total {
                break;
            }
        }
        // top_p 1 keeps all, also where a sum in f64 reaches the total early.
        if self.sampling.top_p < 1.0 {
            weights.truncate(keep);
        }
        let min = f64::from(self.sampling.min_p);
        let keep = weights.iter().take_while(|w| **w >= min).count();
        weights.truncate(keep.max(1));
    }
}
