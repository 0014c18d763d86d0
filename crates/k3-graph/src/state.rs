//! What a sequence carries from token to token.

use k3_format::{AttentionKind, IndexerConfig, ModelConfig};

use crate::device::{Device, DeviceError, StateTensor};

/// State of one sequence at exactly one position: KDA states, convolution windows, latents and indexer keys of all
/// layers. AttnRes needs nothing between tokens.
///
/// KDA's recurrence cannot be wound back, so a state only moves forward; keep a clone to return to.
pub struct SequenceState<D: Device> {
    pub(crate) position: usize,
    pub(crate) layers: Vec<LayerState<D>>,
    /// Set while a forward pass is under way, and left set when it fails: layers then stand at different positions.
    pub(crate) broken: bool,
}

/// State of one decoder layer.
#[derive(Debug)]
pub enum LayerState<D: Device> {
    /// Kimi Delta Attention.
    Kda(D::KdaState),
    /// Full attention.
    Mla(D::MlaState),
}

impl<D: Device> Clone for LayerState<D> {
    fn clone(&self) -> Self {
        match self {
            Self::Kda(s) => Self::Kda(s.clone()),
            Self::Mla(s) => Self::Mla(s.clone()),
        }
    }
}

impl<D: Device> Clone for SequenceState<D> {
    fn clone(&self) -> Self {
        Self { position: self.position, layers: self.layers.clone(), broken: self.broken }
    }
}

impl<D: Device> std::fmt::Debug for SequenceState<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceState")
            .field("position", &self.position)
            .field("layers", &self.layers.len())
            .field("broken", &self.broken)
            .finish()
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
    /// The state before the first token, for the first `layers` layers of the model.
    pub(crate) fn new(
        device: &D,
        config: &ModelConfig,
        layers: usize,
        indexer: Option<&IndexerConfig>,
    ) -> Result<Self, DeviceError> {
        let layers = config.layers[..layers]
            .iter()
            .map(|kind| {
                Ok(match kind {
                    AttentionKind::Kda => LayerState::Kda(device.new_kda_state(&config.kda)?),
                    AttentionKind::FullAttention => {
                        LayerState::Mla(device.new_mla_state(&config.mla, indexer)?)
                    }
                })
            })
            .collect::<Result<_, DeviceError>>()?;
        Ok(Self { position: 0, layers, broken: false })
    }

    /// Tokens consumed so far; the position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Whether a failed pass left it unusable.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Copies everything to the host.
    pub fn export(&self, device: &D) -> Result<ExportedState, StateError> {
        if self.broken {
            return Err(StateError::Broken { position: self.position });
        }
        let layers = self
            .layers
            .iter()
            .enumerate()
            .map(|(layer, state)| {
                match state {
                    LayerState::Kda(s) => device.export_kda(s),
                    LayerState::Mla(s) => device.export_mla(s),
                }
                .map_err(|source| StateError::Layer { layer, source })
            })
            .collect::<Result<_, _>>()?;
        Ok(ExportedState { device: device.kind().to_owned(), position: self.position, layers })
    }

    pub(crate) fn import(
        device: &D,
        config: &ModelConfig,
        layers: usize,
        indexer: Option<&IndexerConfig>,
        exported: &ExportedState,
    ) -> Result<Self, StateError> {
        if exported.device != device.kind() {
            return Err(StateError::Device { expected: device.kind(), found: exported.device.clone() });
        }
        if exported.layers.len() != layers {
            return Err(StateError::Layers { expected: layers, found: exported.layers.len() });
        }
        let position = exported.position;
        let layers = config.layers[..layers]
            .iter()
            .zip(&exported.layers)
            .enumerate()
            .map(|(layer, (kind, parts))| {
                match kind {
                    AttentionKind::Kda => device.import_kda(&config.kda, parts).map(LayerState::Kda),
                    AttentionKind::FullAttention => {
                        device.import_mla(&config.mla, indexer, position, parts).map(LayerState::Mla)
                    }
                }
                .map_err(|source| StateError::Layer { layer, source })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { position, layers, broken: false })
    }
}
