//! The Kimi K3 model, written once over a [`Device`] trait.
//!
//! Read `docs/arithmetic.md` beside [`Model::forward`] (`forward.rs`): the names and the order are the same.
//!
//! * [`Model`]: weights on a device, and the control flow of a forward pass over a batch of [`Span`]s.
//! * [`Device`]: one method an operation. [`Reference`] computes in f64 with plain loops and is what everything is
//!   tested against; [`Cpu`] is the host path in f32.
//! * [`SequenceState`]: what a sequence carries from token to token, an explicit value that can be copied,
//!   exported and restored.
//! * [`Observer`]: looks at, and can replace, what flows between sublayers.
//!
//! ```
//! use std::sync::Arc;
//!
//! use k3_experts::MappedStore;
//! use k3_format::{Checkpoint, OpenOptions};
//! use k3_graph::{Cpu, LogitsWanted, Model, ModelOptions, Silent, Span};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-k31");
//! let checkpoint = Arc::new(Checkpoint::open(dir.as_ref(), &OpenOptions::default())?);
//! let (config, options) = (checkpoint.config().clone(), ModelOptions::default());
//! let model = Model::load(Cpu::new(1)?, config, &*checkpoint, &options, &mut |_, _| {})?;
//! let store = MappedStore::new(checkpoint);
//!
//! let mut state = model.new_state()?;
//! let span = Span { state: &mut state, tokens: &[1, 2, 3], logits: LogitsWanted::Last };
//! for logits in model.forward(&mut [span], &store, &mut Silent)? {
//!     assert_eq!(logits?.values.len(), model.config().vocab_size);
//! }
//! assert_eq!(state.position(), 3);
//! # Ok(())
//! # }
//! ```
//!
//! The control flow is in one place, so that a device cannot have a model of its own: a new one brings operations, and what
//! `Reference` is tested against holds for it as well. Results are bit-identical for any threads, chunks, batch and order of
//! arrival (`docs/architecture.md`, "Determinism").
//!
//! This crate knows no file, no CUDA and no chat. Weights come through [`WeightSource`], experts through
//! [`k3_experts::ExpertStore`].

#![forbid(unsafe_code)]

/// Raised by every change that moves bits of a result. A state that was saved under another number would continue,
/// but not bit-exactly.
pub const ARITHMETIC: u32 = 2;

mod cpu;
mod delegate;
pub mod device;
mod forward;
mod model;
mod observer;
mod reference;
pub mod scalar;
pub mod select;
mod state;

#[doc(hidden)]
pub use cpu::IndexFilter;
pub use cpu::{Cpu, MAX_THREADS, index_key_bytes};
pub use device::{Device, DeviceError, Routing, Selected, Selection};
pub use forward::{
    ForwardError, Logits, LogitsWanted, Lookahead, Place, Span, SpanError, SpanResult, TokenError,
    check_tokens, working_bytes_per_token,
};
pub use k3_format::WeightSource;
pub use k3_quant::cpu::Mode;
pub use model::{LoadError, Model, ModelOptions};
pub use observer::{Observer, Point, Probe, Silent};
pub use reference::Reference;
pub use state::{ExportedState, LayerState, SequenceState, StateError};
