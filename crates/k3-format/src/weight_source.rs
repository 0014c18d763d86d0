//! Pinned weights by what they are for, wherever they come from.

use k3_quant::Matrix;

use crate::{Checkpoint, TensorId};

/// What a [`WeightSource`] says when it has no answer.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Where a model's weights come from, except those of routed experts. A [`Checkpoint`] is one.
pub trait WeightSource {
    /// A weight matrix `[out, in]`.
    fn matrix(&self, id: TensorId) -> Result<Matrix, SourceError>;
    /// A weight vector in f32, in row-major order of its stored shape. `A_log` comes without its padding.
    fn vector(&self, id: TensorId) -> Result<Vec<f32>, SourceError>;
}

impl WeightSource for Checkpoint {
    fn matrix(&self, id: TensorId) -> Result<Matrix, SourceError> {
        Ok(self.matrix(id)?)
    }

    fn vector(&self, id: TensorId) -> Result<Vec<f32>, SourceError> {
        Ok(self.vector(id)?)
    }
}
