//! One recorded run: a prompt, and a greedy continuation.

use anyhow::{Result, anyhow, ensure};
use k3_graph::device::StateTensor;
use k3_graph::select::argmax;
use k3_graph::{Device, LogitsWanted};
use k3_runner::{Engine, LogitsHash, RunError};

use super::layout::fits_memory;
use super::record::{Choices, Injection, Recorder, Slot, Wanted};
use super::{Axis, Entry, Rule, Sizes, Tensor, Tensors, layout};

/// What a run gave.
#[derive(Debug)]
pub struct Recording {
    /// Every tensor of [`layout`] that was wanted.
    pub tensors: Tensors,
    /// Of the logits at every position of the prompt.
    pub logits_hash: LogitsHash,
}

/// Runs `prompt` and `sizes.continuation` tokens after it, the ones with the largest logit, on an engine that may
/// have fewer layers than its checkpoint. `layer_done` is called after every layer of every pass.
///
/// # Errors
/// More than 16 GiB to keep, and every error of a run ([`RunError`]).
pub fn record<D: Device>(
    engine: &Engine<D>,
    prompt: &[u32],
    sizes: &Sizes,
    wanted: Wanted,
    injection: Injection,
    layer_done: &mut dyn FnMut(),
) -> Result<Recording> {
    fits_memory(sizes, wanted)?;
    let mut recorder = Recorder::new(sizes, wanted, injection, layer_done);
    let mut sequence = engine.new_sequence()?;
    let mut logits = Vec::new();
    for chunk in prompt.chunks(engine.chunk_tokens()) {
        let start = sequence.position();
        recorder.begin(start..start + chunk.len());
        logits.extend(engine.run(&mut sequence, chunk, LogitsWanted::All, &mut recorder)?.values);
    }
    let state = sequence.state().export(engine.model().device()).map_err(|source| {
        // Only a sequence that failed cannot be exported, and this one did not.
        RunError::from(k3_graph::ForwardError::State { span: 0, source })
    })?;

    let vocab = sizes.config.vocab_size;
    let mut row = logits[logits.len() - vocab..].to_vec();
    let (mut greedy_ids, mut greedy_logits) = (Vec::new(), Vec::new());
    for _ in 0..sizes.continuation {
        let token = argmax(&row).unwrap_or(0);
        greedy_ids.push(token as i32);
        greedy_logits.extend_from_slice(&row);
        let start = sequence.position();
        recorder.begin(start..start + 1);
        row = engine.run(&mut sequence, &[token], LogitsWanted::Last, &mut recorder)?.values;
    }

    let mut found = Collected { recorder, sizes, state: state.layers, tensors: Tensors::new() };
    let logits_hash = LogitsHash::of(&logits);
    found.put_f32("logits", logits);
    found.put_i32("input_ids", prompt.iter().map(|&id| id as i32).collect());
    found.put_i32("greedy_ids", greedy_ids);
    found.put_f32("greedy_logits", greedy_logits);
    found.collect();
    Ok(Recording { tensors: found.tensors, logits_hash })
}

/// A finished recorder on its way to tensors.
struct Collected<'a> {
    recorder: Recorder<'a>,
    sizes: &'a Sizes,
    /// One entry a layer.
    state: Vec<Vec<StateTensor>>,
    tensors: Tensors,
}

impl Collected<'_> {
    fn collect(&mut self) {
        for entry in layout(self.sizes) {
            if let Rule::LayerList(axis) = entry.rule
                && !(entry.is_of_indexer() && self.sizes.ignore_indexer)
            {
                let layers = self.sizes.layers_on(axis).iter().map(|&l| l as i32).collect();
                self.put_i32(entry.name, layers);
            }
        }
        self.activations();
        self.choices();
        self.states();
    }

    /// Values of all layers of an axis, one after the other.
    fn each(&self, axis: Axis, mut values: impl FnMut(usize) -> Vec<f32>) -> Vec<f32> {
        self.sizes.layers_on(axis).into_iter().flat_map(&mut values).collect()
    }

    fn activations(&mut self) {
        let hidden = self.sizes.config.hidden_size;
        let slots = [
            ("attn_in", "attn_in_last", Slot::AttnIn),
            ("attn_out", "attn_out_last", Slot::AttnOut),
            ("mlp_in", "mlp_in_last", Slot::MlpIn),
            ("mlp_out", "mlp_out_last", Slot::MlpOut),
            ("hidden", "hidden_last", Slot::Hidden),
        ];
        for (all, last, slot) in slots {
            let kept = |l| self.recorder.activations.get(&(slot, l)).cloned().unwrap_or_default();
            let last_row = |l| {
                let values = kept(l);
                values[values.len() - hidden..].to_vec()
            };
            self.put_f32(last, self.each(Axis::Layers, last_row));
            let kept = |l| self.recorder.activations.get(&(slot, l)).cloned().unwrap_or_default();
            self.put_f32(all, self.each(Axis::Layers, kept));
        }
        for (name, slot) in [("final_mix_last", Slot::FinalMix), ("final_norm_last", Slot::FinalNorm)] {
            let values = self.recorder.activations.get(&(slot, 0)).cloned().unwrap_or_default();
            self.put_f32(name, values);
        }
        let sources = self.sizes.layers.div_ceil(self.sizes.config.attn_res_block_size) + 1;
        let padded = |slot, l| {
            // The first layer has nothing to mix: its input is the embedding alone.
            let mut w = self.recorder.mix_weights.get(&(slot, l)).cloned().unwrap_or_else(|| vec![1.0]);
            w.resize(sources, 0.0);
            w
        };
        let attn = self.each(Axis::Layers, |l| padded(Slot::AttnIn, l));
        let mlp = self.each(Axis::Layers, |l| padded(Slot::MlpIn, l));
        let last = padded(Slot::FinalMix, 0);
        self.put_f32("attnres_attn_w_last", attn);
        self.put_f32("attnres_mlp_w_last", mlp);
        self.put_f32("attnres_final_w_last", last);
    }

    fn choices(&mut self) {
        let Self { recorder, sizes, .. } = &*self;
        let (topk, tokens) = (sizes.config.indexer.as_ref().map_or(0, |i| i.topk), sizes.tokens);
        let of = |choices: &Choices| {
            let experts: Vec<i32> = choices.experts.values().flatten().copied().collect();
            let keys: Vec<i32> = choices.keys.values().flatten().flat_map(|row| pad(row, topk, -1)).collect();
            (experts, keys)
        };
        let (experts, keys) = of(&recorder.prompt);
        let (cont_experts, cont_keys) = of(&recorder.continuation);
        let flat = |map: &std::collections::BTreeMap<usize, Vec<f32>>| -> Vec<f32> {
            map.values().flatten().copied().collect()
        };
        let (weights, gaps) = (flat(&recorder.prompt.weights), flat(&recorder.prompt.gaps));
        let index_gaps = flat(&recorder.prompt.index_gaps);
        let scores: Vec<f32> =
            recorder.prompt.scores.values().flatten().flat_map(|row| pad(row, tokens, 0.0)).collect();
        self.put_i32("router_idx", experts);
        self.put_f32("router_weight", weights);
        self.put_f32("router_gap", gaps);
        self.put_i32("cont_router_idx", cont_experts);
        self.put_i32("index_sel", keys);
        self.put_f32("index_gap", index_gaps);
        self.put_f32("index_scores", scores);
        self.put_i32("cont_index_sel", cont_keys);
    }

    fn states(&mut self) {
        let part = |l: usize, name: &str| {
            self.state[l].iter().find(|p| p.name == name).map_or_else(Vec::new, |p| p.values.to_f32())
        };
        for (name, axis, of) in [
            ("kda_state", Axis::Kda, "state"),
            ("kda_conv_state", Axis::Kda, "conv"),
            ("mla_latent", Axis::Mla, "latent"),
            ("mla_extra_key", Axis::Mla, "extra_key"),
            ("index_keys", Axis::Mla, "index_key"),
        ] {
            let values = self.each(axis, |l| part(l, of));
            self.tensors.extend(
                shaped(self.sizes, name, values.len())
                    .map(|e| (name.to_owned(), Tensor::f32(e.shape, values))),
            );
        }
    }

    fn put_f32(&mut self, name: &str, values: Vec<f32>) {
        if let Some(entry) = shaped(self.sizes, name, values.len()) {
            self.tensors.insert(name.to_owned(), Tensor::f32(entry.shape, values));
        }
    }

    fn put_i32(&mut self, name: &str, values: Vec<i32>) {
        if let Some(entry) = shaped(self.sizes, name, values.len()) {
            self.tensors.insert(name.to_owned(), Tensor::i32(entry.shape, values));
        }
    }
}

/// The entry of this name if `len` values fill it. Others were not wanted, or are not part of this model.
fn shaped(sizes: &Sizes, name: &str, len: usize) -> Option<Entry> {
    let entry = layout(sizes).into_iter().find(|e| e.name == name)?;
    (entry.shape.iter().product::<usize>() == len && len > 0).then_some(entry)
}

fn pad<T: Copy>(row: &[T], width: usize, with: T) -> Vec<T> {
    row.iter().copied().chain(std::iter::repeat(with)).take(width).collect()
}

/// An error unless a prompt of this length and its continuation fit the context.
pub(crate) fn fits_context(sizes: &Sizes) -> Result<()> {
    let context = sizes.config.max_position_embeddings;
    let end = sizes.tokens.checked_add(sizes.continuation).ok_or_else(|| anyhow!("too many tokens"))?;
    ensure!(
        end <= context,
        "{} prompt tokens and {} after them do not fit the model's context of {context}",
        sizes.tokens,
        sizes.continuation
    );
    Ok(())
}
