//! An observer that keeps what expectations are about.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use anyhow::{Result, ensure};
use k3_graph::{Observer, Point, Probe, Routing, Selected, Selection};

use super::Sizes;
use super::tensor::Tensor;

/// What to keep of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Inputs and outputs of the sublayers at every position, not only the last.
    pub all_positions: bool,
    /// Scores of the indexer, `[tokens, tokens]` a full-attention layer.
    pub index_scores: bool,
}

/// Sublayer inputs to use instead of the model's own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Injection {
    /// `[layers, tokens, hidden]`
    pub attn_in: Option<Vec<f32>>,
    /// `[layers, tokens, hidden]`
    pub mlp_in: Option<Vec<f32>>,
}

impl Injection {
    /// The tensors `attn_in` and `mlp_in`, one of which must be there.
    pub fn new(attn_in: Option<&Tensor>, mlp_in: Option<&Tensor>, sizes: &Sizes) -> Result<Self> {
        let shape = [sizes.layers, sizes.tokens, sizes.config.hidden_size];
        let take = |name: &str, tensor: Option<&Tensor>| {
            let Some(tensor) = tensor else { return Ok(None) };
            let values = tensor.as_f32().filter(|_| tensor.shape == shape);
            ensure!(
                values.is_some(),
                "tensor `{name}` to inject: expected F32 {shape:?}, found {:?} {:?}",
                tensor.dtype(),
                tensor.shape
            );
            Ok(values.map(<[f32]>::to_vec))
        };
        ensure!(attn_in.is_some() || mlp_in.is_some(), "there is neither `attn_in` nor `mlp_in` to inject");
        Ok(Self { attn_in: take("attn_in", attn_in)?, mlp_in: take("mlp_in", mlp_in)? })
    }
}

/// What the layers chose, one entry a row.
#[derive(Debug, Default)]
pub(super) struct Choices {
    pub(super) experts: BTreeMap<usize, Vec<i32>>,
    pub(super) weights: BTreeMap<usize, Vec<f32>>,
    pub(super) gaps: BTreeMap<usize, Vec<f32>>,
    /// Keys of a row, unpadded.
    pub(super) keys: BTreeMap<usize, Vec<Vec<i32>>>,
    pub(super) index_gaps: BTreeMap<usize, Vec<f32>>,
    /// Scores of a row, for the keys up to its own.
    pub(super) scores: BTreeMap<usize, Vec<Vec<f32>>>,
}

/// Keeps what passes during a prompt and the tokens after it.
pub(super) struct Recorder<'a> {
    /// Called after every layer of every pass.
    layer_done: &'a mut dyn FnMut(),
    wanted: Wanted,
    injection: Injection,
    hidden: usize,
    topk: usize,
    /// `n_heads^-1/2 * head_dim^-1/2`, which scales no selection and is left out by the engine.
    score_scale: f64,
    tokens: usize,
    /// Positions of the pass under way.
    pass: Range<usize>,
    /// All positions, or the last.
    pub(super) activations: BTreeMap<(Slot, usize), Vec<f32>>,
    /// Of the last position.
    pub(super) mix_weights: BTreeMap<(Slot, usize), Vec<f32>>,
    pub(super) prompt: Choices,
    pub(super) continuation: Choices,
}

/// A [`Point`] without its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Slot {
    AttnIn,
    AttnOut,
    MlpIn,
    MlpOut,
    Hidden,
    FinalMix,
    FinalNorm,
}

impl Slot {
    fn of(point: Point) -> (Self, usize) {
        match point {
            Point::AttnIn(l) => (Self::AttnIn, l),
            Point::AttnOut(l) => (Self::AttnOut, l),
            Point::MlpIn(l) => (Self::MlpIn, l),
            Point::MlpOut(l) => (Self::MlpOut, l),
            Point::Hidden(l) => (Self::Hidden, l),
            Point::FinalMix => (Self::FinalMix, 0),
            Point::FinalNorm => (Self::FinalNorm, 0),
        }
    }

    fn is_sublayer(self) -> bool {
        matches!(self, Self::AttnIn | Self::AttnOut | Self::MlpIn | Self::MlpOut)
    }
}

impl<'a> Recorder<'a> {
    /// For a prompt of `sizes.tokens`.
    pub(super) fn new(
        sizes: &Sizes,
        wanted: Wanted,
        injection: Injection,
        layer_done: &'a mut dyn FnMut(),
    ) -> Self {
        let indexer = sizes.config.indexer.as_ref();
        Self {
            layer_done,
            wanted,
            injection,
            hidden: sizes.config.hidden_size,
            topk: indexer.map_or(0, |i| i.topk),
            score_scale: indexer.map_or(1.0, |i| ((i.n_heads * i.head_dim) as f64).sqrt().recip()),
            tokens: sizes.tokens,
            pass: 0..0,
            activations: BTreeMap::new(),
            mix_weights: BTreeMap::new(),
            prompt: Choices::default(),
            continuation: Choices::default(),
        }
    }

    /// The next pass runs these positions, with logits at each of them: a chunk of the prompt or one token after it.
    pub(super) fn begin(&mut self, pass: Range<usize>) {
        self.pass = pass;
    }

    fn in_prompt(&self) -> bool {
        self.pass.start < self.tokens
    }

    fn choices(&mut self) -> &mut Choices {
        if self.in_prompt() { &mut self.prompt } else { &mut self.continuation }
    }
}

impl Observer for Recorder<'_> {
    fn wants(&self, probe: Probe) -> bool {
        match probe {
            Probe::Activations | Probe::AttnRes => self.in_prompt(),
            Probe::Routing | Probe::Indexer => true,
        }
    }

    fn activation(&mut self, point: Point, values: &[f32]) {
        let (slot, layer) = Slot::of(point);
        let kept = self.activations.entry((slot, layer)).or_default();
        if self.wanted.all_positions && slot.is_sublayer() {
            kept.extend_from_slice(values);
        } else {
            kept.clear();
            kept.extend_from_slice(&values[values.len() - self.hidden..]);
        }
    }

    fn replace(&mut self, point: Point) -> Option<Vec<f32>> {
        let (values, layer) = match point {
            Point::AttnIn(l) => (self.injection.attn_in.as_ref()?, l),
            Point::MlpIn(l) => (self.injection.mlp_in.as_ref()?, l),
            _ => return None,
        };
        if !self.in_prompt() {
            return None;
        }
        let at = |position| (layer * self.tokens + position) * self.hidden;
        values.get(at(self.pass.start)..at(self.pass.end)).map(<[f32]>::to_vec)
    }

    fn attn_res_weights(&mut self, point: Point, weights: &[f32]) {
        let sources = weights.len() / self.pass.len().max(1);
        self.mix_weights.insert(Slot::of(point), weights[weights.len() - sources..].to_vec());
    }

    fn routing(&mut self, layer: usize, routing: &Routing) {
        let choices = self.choices();
        choices.experts.entry(layer).or_default().extend(routing.ids.iter().map(|&id| id as i32));
        choices.weights.entry(layer).or_default().extend(routing.weights.iter().map(|&w| w as f32));
        choices.gaps.entry(layer).or_default().extend(routing.gaps.iter().map(|&g| g as f32));
    }

    fn selection(&mut self, layer: usize, selection: &Selection, scores: &[Vec<f32>]) {
        let (topk, scale, keep_scores) = (self.topk, self.score_scale, self.wanted.index_scores);
        let choices = self.choices();
        for (selected, scores) in selection.rows.iter().zip(scores) {
            choices.keys.entry(layer).or_default().push(match selected {
                Selected::All => (0..scores.len() as i32).collect(),
                Selected::Keys(keys) => keys.iter().map(|&k| k as i32).collect(),
                Selected::NonFinite => Vec::new(),
            });
            let scaled: Vec<f32> = scores.iter().map(|&s| (f64::from(s) * scale) as f32).collect();
            choices.index_gaps.entry(layer).or_default().push(boundary_gap(&scaled, topk));
            if keep_scores {
                choices.scores.entry(layer).or_default().push(scaled);
            }
        }
    }

    fn layer_done(&mut self, _done: usize, _layers: usize) -> ControlFlow<()> {
        (self.layer_done)();
        ControlFlow::Continue(())
    }
}

/// Distance of the k-th to the next largest score; infinite if all are kept.
fn boundary_gap(scores: &[f32], k: usize) -> f32 {
    if scores.len() <= k || k == 0 {
        return f32::INFINITY;
    }
    let mut sorted = scores.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted[k - 1] - sorted[k]
}
