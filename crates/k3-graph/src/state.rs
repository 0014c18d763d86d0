//! What a sequence carries from token to token.

use std::sync::Arc;

use k3_format::{AttentionKind, IndexerConfig, KdaConfig, MlaConfig};

use crate::device::{Device, DeviceError, StateTensor};

/// State of one sequence at exactly one position: KDA states, convolution windows, latents and indexer keys of all
/// layers. AttnRes needs nothing between tokens.
///
/// KDA's recurrence cannot be wound back, so a state only moves forward; keep a copy ([`SequenceState::try_clone`]) to
/// return to.
pub struct SequenceState<D: Device> {
    pub(crate) shape: Arc<StateShape>,
    pub(crate) position: usize,
    pub(crate) layers: Vec<LayerState<D>>,
    /// Set while a forward pass is under way, and left set when it fails: layers then stand at different positions.
    pub(crate) broken: bool,
}

/// What a model's states consist of. A state holds its own model's: that is how they know each other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateShape {
    /// Of the layers that are loaded.
    pub(crate) layers: Vec<AttentionKind>,
    pub(crate) kda: KdaConfig,
    pub(crate) mla: MlaConfig,
    /// `None` also when the indexer is ignored.
    pub(crate) indexer: Option<IndexerConfig>,
}

/// State of one decoder layer.
#[derive(Debug)]
pub enum LayerState<D: Device> {
    /// Kimi Delta Attention.
    Kda(D::KdaState),
    /// Full attention.
    Mla(D::MlaState),
}

impl<D: Device> std::fmt::Debug for SequenceState<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceState")
            .field("position", &self.position)
            .field("layers", &self.layers.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

/// A state on the host, complete and device-independent in form.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportedState {
    /// [`Device::kind`] of the device that computed it. Values of one kind mean nothing to another.
    pub device: String,
    /// Tokens consumed.
    pub position: usize,
    /// One entry a layer. Names and shapes: [`StateTensor`].
    pub layers: Vec<Vec<StateTensor>>,
}

/// Why a state was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The pass that last used it failed.
    #[error(
        "the sequence state is incomplete: a forward pass over it failed at position {position}; go back to an earlier snapshot"
    )]
    Broken {
        /// Where the failed pass started.
        position: usize,
    },
    /// It was computed by other arithmetic.
    #[error(
        "the state was computed on device `{found}`, this is `{expected}`: its values would not continue bit-exactly"
    )]
    Device {
        /// The device at hand.
        expected: &'static str,
        /// The one that made it.
        found: String,
    },
    /// It belongs to another model.
    #[error("the state has {found} layers, the model {expected}")]
    Layers {
        /// Of the model.
        expected: usize,
        /// Of the state.
        found: usize,
    },
    /// It came from another [`crate::Model`]. Export and import it if the weights are the same.
    #[error("the state belongs to another model")]
    OtherModel,
    /// It belongs to a model of other sizes, or with another kind of attention.
    #[error("the state belongs to a model of another shape: expected {expected}, found {found}")]
    Shape {
        /// What the model needs.
        expected: String,
        /// What the state has.
        found: String,
    },
    /// A part does not fit.
    #[error("layer {layer}")]
    Layer {
        /// 0-based.
        layer: usize,
        /// What does not fit.
        #[source]
        source: DeviceError,
    },
}

impl<D: Device> SequenceState<D> {
    /// The state before the first token.
    pub(crate) fn new(device: &D, shape: &Arc<StateShape>) -> Result<Self, DeviceError> {
        let layers = shape
            .layers
            .iter()
            .map(|kind| {
                Ok(match kind {
                    AttentionKind::Kda => LayerState::Kda(device.new_kda_state(&shape.kda)?),
                    AttentionKind::FullAttention => {
                        LayerState::Mla(device.new_mla_state(&shape.mla, shape.indexer.as_ref())?)
                    }
                })
            })
            .collect::<Result<_, DeviceError>>()?;
        Ok(Self { shape: shape.clone(), position: 0, layers, broken: false })
    }

    /// Whether a model of this shape can continue it.
    pub(crate) fn check(&self, shape: &Arc<StateShape>) -> Result<(), StateError> {
        if self.broken {
            return Err(StateError::Broken { position: self.position });
        }
        let own = &self.shape;
        // Equal sizes are not enough: the values are those of one model's weights.
        if Arc::ptr_eq(own, shape) {
            return Ok(());
        }
        if own == shape {
            return Err(StateError::OtherModel);
        }
        if own.layers.len() != shape.layers.len() {
            return Err(StateError::Layers { expected: shape.layers.len(), found: own.layers.len() });
        }
        let (expected, found) = if own.indexer == shape.indexer {
            (
                format!("{:?} {:?} {:?}", shape.layers, shape.kda, shape.mla),
                format!("{:?} {:?} {:?}", own.layers, own.kda, own.mla),
            )
        } else {
            (format!("indexer {:?}", shape.indexer), format!("indexer {:?}", own.indexer))
        };
        Err(StateError::Shape { expected, found })
    }

    /// Tokens consumed so far; the position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Whether a failed pass left it unusable.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// A state of its own at the same position, on the device that holds this one.
    ///
    /// # Errors
    /// If the device has no room for it, or a failed pass left this one unusable.
    pub fn try_clone(&self, device: &D) -> Result<Self, StateError> {
        let layers = self.each_layer(|state| {
            Ok(match state {
                LayerState::Kda(s) => LayerState::Kda(device.copy_kda(s)?),
                LayerState::Mla(s) => LayerState::Mla(device.copy_mla(s)?),
            })
        })?;
        Ok(Self { shape: self.shape.clone(), position: self.position, layers, broken: false })
    }

    /// Something of each layer of a state that is whole.
    fn each_layer<T>(
        &self,
        of: impl Fn(&LayerState<D>) -> Result<T, DeviceError>,
    ) -> Result<Vec<T>, StateError> {
        if self.broken {
            return Err(StateError::Broken { position: self.position });
        }
        let layers = self.layers.iter().enumerate();
        layers.map(|(layer, state)| of(state).map_err(|source| StateError::Layer { layer, source })).collect()
    }

    /// Copies everything to the host.
    pub fn export(&self, device: &D) -> Result<ExportedState, StateError> {
        let layers = self.each_layer(|state| match state {
            LayerState::Kda(s) => device.export_kda(s),
            LayerState::Mla(s) => device.export_mla(s),
        })?;
        Ok(ExportedState { device: device.kind().to_owned(), position: self.position, layers })
    }

    pub(crate) fn import(
        device: &D,
        shape: &Arc<StateShape>,
        exported: &ExportedState,
    ) -> Result<Self, StateError> {
        if exported.device != device.kind() {
            return Err(StateError::Device { expected: device.kind(), found: exported.device.clone() });
        }
        if exported.layers.len() != shape.layers.len() {
            return Err(StateError::Layers { expected: shape.layers.len(), found: exported.layers.len() });
        }
        let position = exported.position;
        let layers = shape
            .layers
            .iter()
            .zip(&exported.layers)
            .enumerate()
            .map(|(layer, (kind, parts))| {
                match kind {
                    AttentionKind::Kda => device.import_kda(&shape.kda, parts).map(LayerState::Kda),
                    AttentionKind::FullAttention => device
                        .import_mla(&shape.mla, shape.indexer.as_ref(), position, parts)
                        .map(LayerState::Mla),
                }
                .map_err(|source| StateError::Layer { layer, source })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { shape: shape.clone(), position, layers, broken: false })
    }
}
