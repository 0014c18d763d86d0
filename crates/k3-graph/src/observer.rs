//! Looking into a forward pass.

use std::ops::ControlFlow;

use crate::device::{Routing, Selection};

/// Something that an [`Observer`] can ask to see. Nothing is computed or copied for what is not asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Probe {
    /// [`Observer::activation`] at every [`Point`].
    Activations,
    /// [`Observer::attn_res_weights`]
    AttnRes,
    /// [`Observer::routing`]
    Routing,
    /// [`Observer::selection`], with scores; the indexer then also runs where every key fits.
    Indexer,
}

/// A place in the model where activations `[rows, hidden]` pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// The AttnRes mix that enters `input_layernorm`.
    AttnIn(usize),
    /// The attention sublayer's output.
    AttnOut(usize),
    /// The AttnRes mix that enters `post_attention_layernorm`.
    MlpIn(usize),
    /// The MLP or MoE sublayer's output.
    MlpOut(usize),
    /// The running depth sum after the layer. Restarts at block starts.
    Hidden(usize),
    /// The output AttnRes mix, of the rows whose logits are wanted.
    FinalMix,
    /// After the final norm, of the rows whose logits are wanted.
    FinalNorm,
}

/// Follows a forward pass. All methods have empty defaults.
pub trait Observer {
    /// Whether to compute and hand over `probe`.
    fn wants(&self, probe: Probe) -> bool {
        let _ = probe;
        false
    }

    /// Activations in f32, `[rows, hidden]`.
    fn activation(&mut self, point: Point, values: &[f32]) {
        let _ = (point, values);
    }

    /// Values to use instead of what was computed, at [`Point::AttnIn`] and [`Point::MlpIn`].
    fn replace(&mut self, point: Point) -> Option<Vec<f32>> {
        let _ = point;
        None
    }

    /// Softmax weights `[rows, sources]` of the mix at `point` ([`Point::AttnIn`], [`Point::MlpIn`] or
    /// [`Point::FinalMix`]).
    fn attn_res_weights(&mut self, point: Point, weights: &[f32]) {
        let _ = (point, weights);
    }

    /// The experts of every row.
    fn routing(&mut self, layer: usize, routing: &Routing) {
        let _ = (layer, routing);
    }

    /// The keys of every row, and the scores they were selected by.
    fn selection(&mut self, layer: usize, selection: &Selection, scores: &[Vec<f32>]) {
        let _ = (layer, selection, scores);
    }

    /// `done` of `layers` layers are finished. Breaking cancels the pass: the states of the batch are then unusable.
    fn layer_done(&mut self, done: usize, layers: usize) -> ControlFlow<()> {
        let _ = (done, layers);
        ControlFlow::Continue(())
    }
}

/// Sees nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}
