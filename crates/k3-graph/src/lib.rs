//! The Kimi K3 model, written once over a [`Device`] trait.
//!
//! Read `docs/arithmetic.md` beside [`Model::forward`] (`forward.rs`): the names and the order are the same.
//!
//! * [`Model`]: weights on a device, and the control flow of a forward pass over a batch of [`Span`]s.
//! * [`Device`]: one method an operation. [`Reference`] computes in f64 with plain loops and is what everything is
//!   tested against; [`Cpu`] is the host path in f32.
//! * [`SequenceState`]: what a sequence carries from token to token, an explicit value that can be cloned,
//!   exported and restored.
//! * [`Observer`]: looks at, and can replace, what flows between sublayers.
//!
//! This crate knows no file, no CUDA and no chat. Weights come through [`WeightSource`], experts through
//! [`k3_experts::ExpertStore`].

#![forbid(unsafe_code)]

/// Raised by every change that moves bits of a result. A state that was saved under another number would continue,
/// but not bit-exactly.
pub const ARITHMETIC: u32 = 2;

mod cpu;
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
