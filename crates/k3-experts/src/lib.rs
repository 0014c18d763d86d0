//! The expert store: *give me these experts of this layer, each as soon as it is there*.
//!
//! [`ExpertStore`] is the whole public face. A forward pass asks for all experts of a layer at once
//! ([`ExpertStore::fetch`]) and gets them back in the order in which they arrive, each as an [`Expert`]: a lease
//! on the bytes that lives as long as anyone (a kernel, an asynchronous device copy) still reads them.
//!
//! This crate knows no arithmetic, no device and no model: it moves bytes and counts what it moved.

#![forbid(unsafe_code)]

use std::fmt;

use k3_quant::Matrix;

mod mapped;
pub mod policy;
pub mod simulate;
pub mod trace;

pub use mapped::{MappedStore, READ_AHEAD};

/// Index of a routed expert within its layer.
pub type ExpertId = u32;

/// What a forward pass needs of one layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRequest<'a> {
    /// 0-based decoder layer.
    pub layer: usize,
    /// Distinct experts, the most wanted first: by best gate rank over the tokens of the batch, then by number
    /// of tokens, then by id. A store admits to its cache in this order.
    pub experts: &'a [ExpertId],
    /// What the batch is doing.
    pub phase: Phase,
}

/// Why experts are asked for. Policies differ: lookahead is off in prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// At least one sequence of the batch has several tokens.
    Prefill,
    /// One token a sequence.
    Decode,
}

/// A routed expert in memory. Holding it keeps its bytes; dropping it gives them back to the store.
#[derive(Clone, Debug)]
pub struct Expert {
    /// Which expert of the layer.
    pub id: ExpertId,
    /// Gate projection `[inner, latent]`.
    pub w1: Matrix,
    /// Down projection `[latent, inner]`.
    pub w2: Matrix,
    /// Up projection `[inner, latent]`.
    pub w3: Matrix,
}

/// Experts in order of arrival. Each requested expert comes exactly once, or an error comes in its place.
pub type Arrivals<'a> = Box<dyn Iterator<Item = Result<Expert, ExpertError>> + Send + 'a>;

/// A source of routed experts.
pub trait ExpertStore: Send + Sync {
    /// Issues the reads of all experts in `request` and hands them over as they arrive.
    ///
    /// As many reads as the backend keeps in flight are under way when this returns; dropping the iterator abandons
    /// what did not arrive.
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a>;

    /// A guess at what `layer` will ask for, the most likely first. Costs idle bandwidth at most, and may be
    /// ignored.
    fn prefetch(&self, _layer: usize, _experts: &[ExpertId]) {}

    /// What was moved so far.
    fn counters(&self) -> Counters;
}

/// Totals since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Experts asked for.
    pub requested: u64,
    /// Of those, found in memory that the store manages.
    pub hits: u64,
    /// Of those, read.
    pub misses: u64,
    /// Bytes handed over.
    pub bytes: u64,
    /// Experts that left memory to make room.
    pub evictions: u64,
    /// Nanoseconds in which a caller waited for an expert.
    pub wait_ns: u64,
}

/// Why an expert could not be had. There is no way to go on without one: dropping an expert changes the output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertError {
    /// The request names an expert that the checkpoint does not have.
    #[error("layer {layer} has no routed expert {expert} (it has {experts})")]
    Unknown {
        /// 0-based layer.
        layer: usize,
        /// The id asked for.
        expert: ExpertId,
        /// Routed experts of that layer.
        experts: usize,
    },
    /// Its bytes could not be read.
    #[error("reading expert {expert} of layer {layer}")]
    Read {
        /// 0-based layer.
        layer: usize,
        /// The id asked for.
        expert: ExpertId,
        /// What went wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} experts, {:.2} GB", self.requested, self.bytes as f64 / 1e9)?;
        // A backend that leaves caching to the system cannot tell the two apart.
        if self.hits + self.misses > 0 {
            write!(f, ", {} hits, {} misses, {} evictions", self.hits, self.misses, self.evictions)?;
        }
        if self.wait_ns > 0 {
            write!(f, ", {:.2} s waited", self.wait_ns as f64 / 1e9)?;
        }
        Ok(())
    }
}
