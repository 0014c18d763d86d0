//! Why a pass, or one span of it, failed.

use k3_experts::{ExpertError, ExpertId};

use crate::device::DeviceError;
use crate::observer::Point;
use crate::state::StateError;

/// Why one span of a batch failed. Its state is then unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpanError {
    /// A value that is not a number, or infinite, where a decision depends on it.
    #[error(
        "not a finite number at position {position}, {place}: the weights on this path or the state are damaged"
    )]
    NonFinite {
        /// Position of the token in its sequence.
        position: usize,
        /// What was being computed.
        place: Place,
    },
}

/// Where a non-finite value was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// Scores of the Lightning Indexer of a 0-based layer.
    Indexer(usize),
    /// Router scores of a 0-based layer.
    Router(usize),
    /// The logits.
    Logits,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Indexer(l) => write!(f, "indexer scores of layer {l}"),
            Self::Router(0) => f.write_str("router scores of layer 0 (or its attention)"),
            Self::Router(l) => {
                write!(f, "router scores of layer {l} (or its attention, or an expert of layer {})", l - 1)
            }
            Self::Logits => f.write_str("logits"),
        }
    }
}

/// Why tokens cannot follow a sequence. Nothing has been touched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// There are none.
    #[error("there are no tokens")]
    None,
    /// A token id outside the vocabulary.
    #[error("token {index} is id {id}, the vocabulary has {vocab_size}")]
    Unknown {
        /// Its place, from 0.
        index: usize,
        /// The id.
        id: u32,
        /// Ids below this exist.
        vocab_size: usize,
    },
    /// The media placeholder.
    #[error("token {index} is {id}, the placeholder of an image: this engine runs text only")]
    Media {
        /// Its place, from 0.
        index: usize,
        /// The id.
        id: u32,
    },
    /// The sequence would outgrow the model. A prompt is never cut to fit.
    #[error("{tokens} tokens{} do not fit the model's context of {context}", after(*position))]
    Context {
        /// How many.
        tokens: usize,
        /// Consumed before.
        position: usize,
        /// `max_position_embeddings`
        context: usize,
    },
}

/// What was consumed before, if anything was.
fn after(position: usize) -> String {
    if position == 0 { String::new() } else { format!(" after {position} already consumed") }
}

/// Why a whole pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The tokens of a span cannot be run.
    #[error("span {span} of the batch")]
    Tokens {
        /// Index in the batch.
        span: usize,
        /// Why.
        #[source]
        source: TokenError,
    },
    /// The state of a span cannot be used.
    #[error("state of span {span}")]
    State {
        /// Index in the batch.
        span: usize,
        /// Why.
        #[source]
        source: StateError,
    },
    /// An expert could not be had.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// The store ended before it had handed over every expert.
    #[error("the expert store handed over {found} of {expected} experts of layer {layer}")]
    MissingExperts {
        /// 0-based layer.
        layer: usize,
        /// Asked for.
        expected: usize,
        /// Handed over.
        found: usize,
    },
    /// The store handed over an expert that was not asked for, or one a second time.
    #[error(
        "the expert store handed over expert {expert} of layer {layer}, which was not asked for or came before"
    )]
    UnexpectedExpert {
        /// 0-based layer.
        layer: usize,
        /// The expert.
        expert: ExpertId,
    },
    /// The store handed over matrices of other sizes than the config says.
    #[error("expert {expert} of layer {layer} came as {found}, [{}, {}] expected", expected.0, expected.1)]
    ExpertShape {
        /// 0-based layer.
        layer: usize,
        /// The expert.
        expert: ExpertId,
        /// Rows and columns.
        expected: (usize, usize),
        /// The matrix.
        found: String,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Replacement activations of the wrong size.
    #[error("replacement for {point:?} has {found} values, {expected} expected")]
    Replacement {
        /// Where.
        point: Point,
        /// rows * hidden
        expected: usize,
        /// Given.
        found: usize,
    },
    /// The observer broke off.
    #[error("cancelled after {layers} layers")]
    Cancelled {
        /// Layers done.
        layers: usize,
    },
}
