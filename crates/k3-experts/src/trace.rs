//! Routing traces: which experts each token chose, layer by layer.
//!
//! Policies are judged on traces, without I/O ([`crate::simulate`]). A trace is generated ([`Generator`]) with the
//! statistics that were measured on the released model (`docs/expert-store.md` 1), or recorded from a run and kept in
//! a file ([`Trace::read`], [`Trace::write`]).

mod file;
mod generate;
mod random;
mod statistics;

pub use file::{Format, MAGIC, TraceFileError};
pub use generate::{Generator, RELEASED};
pub use statistics::Statistics;

use crate::ExpertId;

/// What a trace is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Layers with routed experts.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts a token uses in a layer.
    pub per_token: usize,
}

impl Geometry {
    /// Experts that one token uses in all layers: its working set.
    pub fn working_set(&self) -> usize {
        self.layers * self.per_token
    }
}

/// The choices of a sequence of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    geometry: Geometry,
    ranks: usize,
    /// `[tokens, layers, ranks]`
    ids: Vec<ExpertId>,
}

impl Trace {
    /// An empty trace that keeps the best `ranks` experts of each choice: those the token used, and after them those
    /// that it would have used next. The latter tell a policy what nearly came.
    ///
    /// # Panics
    /// If `ranks` is smaller than what a token uses, or larger than a layer.
    pub fn new(geometry: Geometry, ranks: usize) -> Self {
        let range = geometry.per_token..=geometry.experts;
        assert!(range.contains(&ranks), "{ranks} ranks of {geometry:?}");
        Self { geometry, ranks, ids: Vec::new() }
    }

    /// Layers, experts, experts a token.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Ranks kept of each choice.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.ids.len() / (self.geometry.layers * self.ranks).max(1)
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The choice of `token` in a layer (counted among the layers with experts), best rank first, with the experts
    /// that nearly came.
    ///
    /// # Panics
    /// If there is no such token or layer.
    pub fn ranked(&self, token: usize, layer: usize) -> &[ExpertId] {
        assert!(layer < self.geometry.layers, "layer {layer} of {:?}", self.geometry);
        let at = (token * self.geometry.layers + layer) * self.ranks;
        &self.ids[at..at + self.ranks]
    }

    /// The experts that `token` used in a layer, best rank first.
    ///
    /// # Panics
    /// As [`Trace::ranked`].
    pub fn routed(&self, token: usize, layer: usize) -> &[ExpertId] {
        &self.ranked(token, layer)[..self.geometry.per_token]
    }

    /// Adds a token: its choices `[layers, ranks]`.
    ///
    /// # Panics
    /// If there are not as many, or one names no expert.
    pub fn push(&mut self, choices: &[ExpertId]) {
        assert_eq!(choices.len(), self.geometry.layers * self.ranks, "choices of one token");
        assert!(choices.iter().all(|&id| (id as usize) < self.geometry.experts), "an id that no expert has");
        self.ids.extend_from_slice(choices);
    }
}
