//! Which experts stay in memory.
//!
//! One token visits every layer once, in order, so between two uses of an expert lies a pass over the whole model: a
//! policy that is not aware of that scan evicts what the next pass asks first. What all policies of this module
//! but [`GlobalLru`] share (`docs/expert-store.md` 2): each layer has slots of its own, all of a layer's experts are looked up before any is
//! evicted, a member of the current set is never evicted, misses are admitted the most wanted first, and
//! bypass the slots when only members remain.
//!
//! A policy moves no bytes. The store asks it at each visit of a layer, and the simulator ([`crate::simulate`]) does
//! so without a store.

use std::fmt;

use crate::ExpertId;
use crate::trace::Geometry;

mod global_lru;
mod layer_lru;
mod regression;
mod retention;

pub use global_lru::GlobalLru;
pub use layer_lru::LayerLru;
pub use retention::Retention;

/// One visit of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Visit<'a> {
    /// Which layer, counted among the layers with experts.
    pub layer: usize,
    /// Distinct experts, the most wanted first.
    pub experts: &'a [ExpertId],
    /// What each token of the visit chose, `[tokens, ranks]`, oldest token first, best rank first.
    pub choices: &'a [ExpertId],
    /// Width of `choices`.
    pub ranks: usize,
    /// How many of a token's ranks it uses; the others nearly came.
    pub per_token: usize,
}

/// What becomes of an expert of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is in a slot.
    Hit,
    /// It gets a slot, in which another may have been.
    Admitted {
        /// Layer and id of the one that leaves.
        evicted: Option<(usize, ExpertId)>,
    },
    /// It is read for this visit only.
    Bypassed,
}

/// A replacement policy over a fixed number of slots.
pub trait Policy: fmt::Debug + Send {
    /// Decides on every expert of `visit`: `verdicts` is cleared and gets one for each, in the same order.
    ///
    /// # Panics
    /// If the visit names a layer or an expert that the policy was not made for.
    fn visit(&mut self, visit: Visit<'_>, verdicts: &mut Vec<Verdict>);

    /// An admitted expert could not be read: its slot is empty.
    fn forget(&mut self, layer: usize, expert: ExpertId);

    /// Gives an expert that nobody asked for a slot, if one is free. It is the first to leave.
    fn admit_free(&mut self, _layer: usize, _expert: ExpertId) -> bool {
        false
    }

    /// How often `tokens` of earlier runs used each expert of a layer.
    fn remember(&mut self, _layer: usize, _uses: &[f32], _tokens: f64) {}

    /// Experts that may be in slots at once.
    fn slots(&self) -> usize;
}

/// The policies of this module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyName {
    /// [`GlobalLru`]
    GlobalLru,
    /// [`LayerLru`]
    LayerLru,
    /// [`Retention`]
    #[default]
    Retention,
}

impl PolicyName {
    /// Makes the policy for a model.
    pub fn make(self, slots: usize, geometry: Geometry) -> Box<dyn Policy> {
        let Geometry { layers, experts, per_token } = geometry;
        match self {
            Self::GlobalLru => Box::new(GlobalLru::new(slots)),
            Self::LayerLru => Box::new(LayerLru::new(slots, layers)),
            Self::Retention => Box::new(Retention::new(slots, layers, experts, per_token)),
        }
    }
}

/// `slots` over `layers` as evenly as possible, the remainder spread out.
pub fn spread(slots: usize, layers: usize) -> impl Iterator<Item = usize> {
    (0..layers).map(move |l| (l + 1) * slots / layers - l * slots / layers)
}
