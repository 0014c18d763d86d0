//! The whole model in f64, written to be read: no cache, no blocking, one token after the other,
//! straight from `docs/arithmetic.md` 2 to 8. It shares no code with the crate it judges. A
//! [`Trap`] makes it wrong in one chosen way, to prove that the fixtures would show that mistake.

mod attnres;
mod indexer;
mod kda;
mod load;
mod mla;
mod moe;
mod mxfp4;
pub(crate) mod num;
pub(crate) mod ops;
pub(crate) mod snapshot;
pub(crate) mod trap;

use attnres::{ResPair, Stream};
use kda::Kda;
use mla::Mla;
use moe::{Glu, Moe};
use num::{Matrix, Rows, rms, rms_no_gain};
use trap::Trap;

/// The widths that decide whether a mistake fits at all.
#[derive(Debug)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    pub(crate) latent: usize,
    pub(crate) q_lora: usize,
    pub(crate) kv_lora: usize,
    pub(crate) q_b: usize,
    pub(crate) attention_out: usize,
}

/// A loaded snapshot.
pub(crate) struct Model {
    pub(crate) widths: Widths,
    eps: f64,
    block: usize,
    embedding: Matrix,
    layers: Vec<Layer>,
    output_res: ResPair,
    norm: Vec<f64>,
    head: Matrix,
}

struct Layer {
    input_norm: Vec<f64>,
    post_norm: Vec<f64>,
    attention_res: ResPair,
    mlp_res: ResPair,
    attention: Attention,
    mlp: Mlp,
}

enum Attention {
    Kda(Box<Kda>),
    Mla(Box<Mla>),
}

enum Mlp {
    Dense(Glu),
    Moe(Box<Moe>),
}

/// Everything the fixtures have an expectation for; rows are tokens unless said otherwise.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) logits: Rows,
    /// `[layer][token]`: the sublayer inputs (mixes) and outputs.
    pub(crate) attention_in: Vec<Rows>,
    pub(crate) attention_out: Vec<Rows>,
    pub(crate) mlp_in: Vec<Rows>,
    pub(crate) mlp_out: Vec<Rows>,
    /// `[layer]`: the running sum of the last token.
    pub(crate) hidden_last: Rows,
    pub(crate) final_mix_last: Vec<f64>,
    pub(crate) final_norm_last: Vec<f64>,
    /// `[MoE layer][token]`: experts in rank order with their weights.
    pub(crate) routes: Vec<Vec<Vec<(usize, f64)>>>,
    /// `[KDA layer][head][key, value]`, and the convolution windows.
    pub(crate) kda_state: Vec<Rows>,
    pub(crate) kda_window: Rows,
    /// `[full-attention layer][token]`.
    pub(crate) mla_latent: Vec<Rows>,
    pub(crate) mla_extra_key: Vec<Rows>,
    /// `[indexed layer][token]`: keys; reported scores of positions `0..=t`; the emitted positions (of the
    /// first head where a trap selects per head).
    pub(crate) index_keys: Vec<Rows>,
    pub(crate) index_scores: Vec<Rows>,
    pub(crate) index_selected: Vec<Vec<Vec<usize>>>,
}

impl Model {
    /// Runs a sequence from its first token and returns the logits after every position.
    pub(crate) fn run(&self, ids: &[i32], trap: Trap) -> Outcome {
        let mut outcome = Outcome::default();
        let mut streams: Vec<Stream> = ids
            .iter()
            .map(|&id| {
                let x = self.embedding.row(usize::try_from(id).expect("a token id"));
                Stream::new(if trap == Trap::EmbeddingNormed { rms_no_gain(x, self.eps) } else { x.to_vec() })
            })
            .collect();
        for (l, layer) in self.layers.iter().enumerate() {
            let h: Rows = streams
                .iter_mut()
                .map(|s| s.enter_attention(l, self.block, &layer.attention_res, trap))
                .collect();
            let x = self.normed(&h, &layer.input_norm);
            let y = match &layer.attention {
                Attention::Kda(kda) => outcome.kda(kda, &x, trap),
                Attention::Mla(mla) => outcome.mla(mla, &x, trap),
            };
            for ((stream, y), h) in streams.iter_mut().zip(&y).zip(&h) {
                stream.add(y, h, trap);
            }
            outcome.attention_in.push(h);
            outcome.attention_out.push(y);

            let h: Rows = streams.iter().map(|s| s.mix(&layer.mlp_res, trap)).collect();
            let x = self.normed(&h, &layer.post_norm);
            let y = match &layer.mlp {
                Mlp::Dense(mlp) => mlp.apply_rows(&x, trap),
                Mlp::Moe(moe) => {
                    let moe = moe.run(&x, trap);
                    outcome.routes.push(moe.routes);
                    moe.y
                }
            };
            for ((stream, y), h) in streams.iter_mut().zip(&y).zip(&h) {
                stream.add(y, h, trap);
            }
            outcome.mlp_in.push(h);
            outcome.mlp_out.push(y);
            outcome.hidden_last.extend(streams.last().and_then(|s| s.prefix.clone()));
        }
        let mixes: Rows = streams.iter().map(|s| s.mix(&self.output_res, trap)).collect();
        let normed = self.normed(&mixes, &self.norm);
        outcome.logits = self.head.apply_rows(&normed);
        outcome.final_mix_last = mixes.last().cloned().unwrap_or_default();
        outcome.final_norm_last = normed.last().cloned().unwrap_or_default();
        outcome
    }

    fn normed(&self, xs: &[Vec<f64>], gain: &[f64]) -> Rows {
        xs.iter().map(|x| rms(x, gain, self.eps)).collect()
    }
}

impl Outcome {
    fn kda(&mut self, kda: &Kda, x: &[Vec<f64>], trap: Trap) -> Rows {
        let out = kda.run(x, trap);
        self.kda_state.push(out.state);
        self.kda_window.push(out.window);
        out.y
    }

    fn mla(&mut self, mla: &Mla, x: &[Vec<f64>], trap: Trap) -> Rows {
        let out = mla.run(x, trap);
        self.mla_latent.push(out.latent);
        self.mla_extra_key.push(out.extra_key);
        if let Some(index) = out.index {
            self.index_scores.push(index.reported_scores());
            self.index_keys.push(index.keys);
            self.index_selected
                .push(index.selected.into_iter().map(|mut sets| sets.swap_remove(0)).collect());
        }
        out.y
    }
}
