//! What can go wrong between opening a checkpoint and the last token.

use std::path::PathBuf;

use k3_graph::{DeviceError, ForwardError, LoadError, SpanError, TokenError};

use crate::SamplingError;

/// Why a checkpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The files.
    #[error("opening the checkpoint {}", dir.display())]
    Checkpoint {
        /// The snapshot folder.
        dir: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<k3_format::Error>,
    },
    /// The weights.
    #[error("loading the weights of {}", dir.display())]
    Load {
        /// The snapshot folder.
        dir: PathBuf,
        /// What is wrong with them.
        #[source]
        source: LoadError,
    },
}

/// Why a sequence could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The pass failed as a whole.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// This sequence failed.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The request cannot be honoured.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The tokens cannot be run. Nothing has been consumed.
    #[error("the prompt cannot be run")]
    Tokens(#[from] TokenError),
}
