//! AttnRes: the mix over depth and the running stream of one token (`docs/arithmetic.md` 3).

use super::Trap;
use super::num::{add_scaled, add_to, dot, mean_square, rms_no_gain, scaled, softmax, to_bf16};

pub(crate) const SCORE_EPS: f64 = 1e-5;

/// `*_res_norm.weight` and `*_res_proj.weight`, both `[hidden]`.
pub(crate) struct ResPair {
    pub(crate) norm: Vec<f64>,
    pub(crate) proj: Vec<f64>,
}

impl ResPair {
    /// The mixed vector and the weight of each source, snapshots first and the prefix last.
    pub(crate) fn mix(&self, sources: &[&[f64]], trap: Trap) -> (Vec<f64>, Vec<f64>) {
        let c: Vec<f64> = self.norm.iter().zip(&self.proj).map(|(g, a)| g * a).collect();
        let c = if trap == Trap::MixGainFoldedInBf16 { c.into_iter().map(to_bf16).collect() } else { c };
        let temperature = if trap == Trap::MixScoreScaled { (c.len() as f64).powf(-0.5) } else { 1.0 };
        let scores: Vec<f64> =
            sources.iter().map(|v| temperature * dot(v, &c) / (mean_square(v) + SCORE_EPS).sqrt()).collect();
        let weights = softmax(&scores);
        let mut out = vec![0.0; c.len()];
        for (v, w) in sources.iter().zip(&weights) {
            if trap == Trap::MixNormalisedSources {
                add_scaled(&mut out, *w, &rms_no_gain(v, SCORE_EPS));
            } else {
                add_scaled(&mut out, *w, v);
            }
        }
        (out, weights)
    }
}

/// One token's depth stream.
pub(crate) struct Stream {
    pub(crate) stack: Vec<Vec<f64>>,
    /// None right after a push.
    pub(crate) prefix: Option<Vec<f64>>,
}

impl Stream {
    pub(crate) fn new(embedding: Vec<f64>) -> Self {
        Self { stack: Vec::new(), prefix: Some(embedding) }
    }

    pub(crate) fn mix(&self, pair: &ResPair, trap: Trap) -> Vec<f64> {
        let mut sources: Vec<&[f64]> = self.stack.iter().map(Vec::as_slice).collect();
        let leave_out = trap == Trap::PrefixLeftOut && !sources.is_empty();
        if !leave_out {
            sources.extend(self.prefix.as_deref());
        }
        pair.mix(&sources, trap).0
    }

    /// The vector that enters `input_layernorm` of layer `layer`; pushes at a block start.
    pub(crate) fn enter_attention(
        &mut self,
        layer: usize,
        block: usize,
        pair: &ResPair,
        trap: Trap,
    ) -> Vec<f64> {
        let counted = if trap == Trap::BlockCountedFromNextLayer { layer + 1 } else { layer };
        let at_block_start = counted.is_multiple_of(block);
        let prefix = self.prefix.clone().expect("a layer begins with a prefix");
        if at_block_start && trap == Trap::PushBeforeAttentionMix {
            self.stack.push(prefix.clone());
        }
        let h = if self.stack.is_empty() { prefix.clone() } else { self.mix(pair, trap) };
        if at_block_start {
            if trap != Trap::PushBeforeAttentionMix {
                self.stack.push(prefix);
            }
            if trap != Trap::PrefixKeptAfterPush {
                self.prefix = None;
            }
        }
        h
    }

    /// Adds a sublayer output; `input` is the mix it came from.
    pub(crate) fn add(&mut self, output: &[f64], input: &[f64], trap: Trap) {
        let prefix = self.prefix.get_or_insert_with(|| scaled(output, 0.0));
        add_to(prefix, output);
        if trap == Trap::MixAddedToPrefix {
            add_to(prefix, input);
        }
    }
}
