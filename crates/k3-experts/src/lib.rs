//! The expert store: *give me these experts of this layer, each as soon as it is there*.
//!
//! [`ExpertStore`] is the whole public face for who computes. A forward pass asks for all experts of a layer at once
//! ([`ExpertStore::fetch`]) and gets them back in the order in which they arrive, each as an [`Expert`]: a lease
//! on the bytes that lives as long as anyone (a kernel, an asynchronous device copy) still reads them.
//!
//! ```
//! use std::sync::Arc;
//!
//! use k3_experts::{Choices, ExpertRequest, ExpertStore, MappedStore, Phase};
//! use k3_format::{Checkpoint, OpenOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-k31");
//! let store = MappedStore::new(Arc::new(Checkpoint::open(dir.as_ref(), &OpenOptions::default())?));
//! let experts = &[3, 0];
//! let request = ExpertRequest { layer: 1, experts, choices: Choices::default(), phase: Phase::Decode };
//! for expert in store.fetch(request) {
//!     let expert = expert?;
//!     println!("expert {}: {:?}, {:?}, {:?}", expert.id, expert.w1, expert.w2, expert.w3);
//! }
//! assert_eq!(store.counters().requested, 2);
//! # Ok(())
//! # }
//! ```
//!
//! There are two stores. [`MappedStore`] leaves caching to the system, which is best where all experts fit into memory;
//! [`SlabStore`] keeps slots under a byte budget, because the system's cache knows neither that a model is scanned layer by
//! layer nor what a router nearly chose. [`backend`] chooses between them from a [`plan`] of the memory and a short
//! measurement; [`policy`] decides what stays, and [`simulate`] judges policies on a [`trace`].
//!
//! This crate knows no arithmetic, no device and no model: it moves bytes and counts what it moved. Whatever a store does, it
//! changes times and never a result. Why it is built so: `docs/expert-store.md`. Start reading here, then `mapped.rs`, then
//! [`slab`].

#![forbid(unsafe_code)]

use std::fmt;

use k3_quant::Matrix;

pub mod backend;
mod mapped;
pub mod memory;
pub mod plan;
pub mod policy;
mod request;
mod retire;
pub mod simulate;
pub mod slab;
pub mod trace;
pub mod usage;

pub use mapped::MappedStore;
pub use retire::{Completion, Retirement};
pub use slab::{SlabOptions, SlabStore};

/// Index of a routed expert within its layer.
pub type ExpertId = u32;

/// What a forward pass needs of one layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRequest<'a> {
    /// 0-based decoder layer.
    pub layer: usize,
    /// Experts, each once, the most wanted first: by best gate rank over the tokens of the batch, then by number
    /// of tokens, then by id. A store admits to its cache in this order.
    pub experts: &'a [ExpertId],
    /// What each token chose, for stores that keep what is likely to be asked for again.
    pub choices: Choices<'a>,
    /// What the batch is doing.
    pub phase: Phase,
}

/// The router's choices for the tokens of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices<'a> {
    /// `[tokens, ranks]`, oldest token first, best rank first.
    pub ids: &'a [ExpertId],
    /// Ranks of each token: those it uses, and behind them those that nearly came. 0: not known.
    pub ranks: usize,
    /// Ranks that a token uses.
    pub used: usize,
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
pub type Arrivals<'a> = Box<dyn Arrive + 'a>;

/// What [`ExpertStore::fetch`] gives: an iterator whose `next` waits.
pub trait Arrive: Iterator<Item = Result<Expert, ExpertError>> + Send {
    /// The next one if it can be had without waiting for a read. `None` says nothing of what is still to come.
    fn next_ready(&mut self) -> Option<Result<Expert, ExpertError>>;
}

/// Arrivals of a store that never waits: whatever comes next is there.
#[derive(Clone, Debug)]
pub struct Ready<I>(pub I);

impl<I: Iterator> Iterator for Ready<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<I: Iterator<Item = Result<Expert, ExpertError>> + Send> Arrive for Ready<I> {
    fn next_ready(&mut self) -> Option<Result<Expert, ExpertError>> {
        self.0.next()
    }
}

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

    /// Whether guesses are worth making now. A caller that has to compute them asks first.
    fn wants_guesses(&self) -> bool {
        false
    }

    /// Gives an expert back that work in flight still reads: its bytes stay until `after` is complete. Handles
    /// complete by themselves, in the order in which they were given. Neither this nor an eviction waits for them; a
    /// fetch that finds no buffer does.
    fn retire(&self, expert: Expert, after: Box<dyn Completion>);

    /// What was moved so far.
    fn counters(&self) -> Counters;

    /// What each drive gave so far, where the store knows.
    fn drives(&self) -> Vec<DriveCounters> {
        Vec::new()
    }
}

/// Totals since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Experts asked for.
    pub requested: u64,
    /// Of those, found in memory that the store manages.
    pub hits: u64,
    /// Of those, on the way when they were asked for.
    pub joined: u64,
    /// Of those, read.
    pub misses: u64,
    /// Of the misses, read for one use and not kept.
    pub bypassed: u64,
    /// Bytes handed over.
    pub bytes: u64,
    /// Bytes read because they were asked for, with what alignment adds.
    pub bytes_demanded: u64,
    /// Experts read on a guess.
    pub guesses: u64,
    /// Of those, asked for while or after they were read.
    pub guesses_used: u64,
    /// Bytes read on a guess.
    pub bytes_guessed: u64,
    /// Of those, never asked for.
    pub bytes_wasted: u64,
    /// Bytes read because earlier runs used them, before anybody asked.
    pub bytes_warmed: u64,
    /// Experts that left memory to make room.
    pub evictions: u64,
    /// Times that the oldest retired lease was asked whether its work is complete.
    pub retired_checks: u64,
    /// Buffers beyond the budget, because the caller kept more experts than the budget has room for.
    pub over_budget: u64,
    /// Nanoseconds in which a caller waited for an expert.
    pub wait_ns: u64,
}

/// What one drive gave since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriveCounters {
    /// Reads that began, pieces of experts counted singly.
    pub reads: u64,
    /// Bytes of those that ended.
    pub bytes: u64,
    /// The most reads in flight at once.
    pub depth_max: u64,
    /// Reads in flight when one began, itself included, summed over all.
    pub depth_sum: u64,
    /// Nanoseconds in which at least one was in flight.
    pub busy_ns: u64,
}

impl DriveCounters {
    /// Reads in flight when one began, on average.
    pub fn mean_depth(&self) -> f64 {
        self.depth_sum as f64 / self.reads.max(1) as f64
    }

    /// Bytes a second while it was busy.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 * 1e9 / self.busy_ns.max(1) as f64
    }
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
    /// The request names an expert twice.
    #[error("one request names expert {expert} of layer {layer} more than once, and gets it once")]
    Repeated {
        /// 0-based layer.
        layer: usize,
        /// The id asked for.
        expert: ExpertId,
    },
    /// The store ended while experts were on their way.
    #[error("the expert store ended while experts were on their way")]
    Stopped {
        /// How.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
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
            write!(f, ", {} hits, {} joined, {} misses", self.hits, self.joined, self.misses)?;
            write!(f, " ({} not kept), {} evictions", self.bypassed, self.evictions)?;
            write!(f, ", {:.2} GB read", self.bytes_demanded as f64 / 1e9)?;
        }
        if self.bytes_guessed > 0 {
            let (guessed, wasted) = (self.bytes_guessed as f64 / 1e9, self.bytes_wasted as f64 / 1e9);
            write!(f, ", {} guesses of which {} were used", self.guesses, self.guesses_used)?;
            write!(f, " ({guessed:.2} GB, {wasted:.2} of them wasted)")?;
        }
        if self.bytes_warmed > 0 {
            write!(f, ", {:.2} GB from earlier use", self.bytes_warmed as f64 / 1e9)?;
        }
        if self.over_budget > 0 {
            write!(f, ", {} buffers over budget", self.over_budget)?;
        }
        if self.wait_ns > 0 {
            write!(f, ", {:.2} s waited", self.wait_ns as f64 / 1e9)?;
        }
        Ok(())
    }
}
