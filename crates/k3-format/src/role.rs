//! What a tensor is for, apart from how it is called.

use std::fmt;

/// The part of the model that a tensor plays. Names and shapes: [`crate::names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(
    missing_docs,
    reason = "each variant is the tensor of that name; the table in names.rs documents them"
)]
pub enum Role {
    // Model level.
    EmbedTokens,
    Norm,
    OutputAttnResNorm,
    OutputAttnResProj,
    LmHead,
    // Every decoder layer.
    InputLayernorm,
    PostAttentionLayernorm,
    SelfAttentionResNorm,
    SelfAttentionResProj,
    MlpResNorm,
    MlpResProj,
    GProj,
    OProj,
    // KDA.
    QProj,
    KProj,
    VProj,
    QConv1d,
    KConv1d,
    VConv1d,
    ALog,
    DtBias,
    FAProj,
    FBProj,
    BProj,
    ONorm,
    // Gated MLA.
    QAProj,
    QALayernorm,
    QBProj,
    KvAProjWithMqa,
    KvALayernorm,
    KvBProj,
    // Lightning Indexer.
    IndexerWqB,
    IndexerWk,
    IndexerKNormWeight,
    IndexerKNormBias,
    IndexerWeightsProj,
    // Dense MLP.
    MlpGateProj,
    MlpUpProj,
    MlpDownProj,
    // LatentMoE, without the routed experts.
    RouterGate,
    RouterBias,
    RoutedExpertDownProj,
    RoutedExpertNorm,
    RoutedExpertUpProj,
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
}

impl Role {
    /// Whether a checkpoint may hold this matrix quantized (`docs/dense-formats.md` 1). The others steer: selections
    /// (router, indexer), decay and gates of KDA, the mix of residuals, norms; or they are read a row at a time
    /// (embedding), where nothing is gained.
    pub fn may_be_quantized(self) -> bool {
        self.is_quantized_on_request() || matches!(self, Self::LmHead | Self::KvBProj)
    }

    /// Whether `repack` quantizes this matrix when it is asked for smaller dense weights: all that
    /// [`Role::may_be_quantized`] but two. The head's error is the logits' error, and every published recipe leaves it
    /// alone; `kv_b_proj` is used transposed in the absorbed form of attention, where engines expand it anyway, and is
    /// half a percent of the bytes.
    pub fn is_quantized_on_request(self) -> bool {
        matches!(
            self,
            Self::GProj
                | Self::OProj
                | Self::QProj
                | Self::KProj
                | Self::VProj
                | Self::QAProj
                | Self::QBProj
                | Self::KvAProjWithMqa
                | Self::MlpGateProj
                | Self::MlpUpProj
                | Self::MlpDownProj
                | Self::RoutedExpertDownProj
                | Self::RoutedExpertUpProj
                | Self::SharedGateProj
                | Self::SharedUpProj
                | Self::SharedDownProj
        )
    }
}

/// A tensor of the language model that is not part of a routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId {
    /// 0-based decoder layer, `None` for model level.
    pub layer: Option<usize>,
    /// What it is for.
    pub role: Role,
}

impl TensorId {
    /// A tensor beside the decoder layers.
    pub const fn model(role: Role) -> Self {
        Self { layer: None, role }
    }

    /// A tensor of decoder layer `layer` (0-based).
    pub const fn layer(layer: usize, role: Role) -> Self {
        Self { layer: Some(layer), role }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "{:?} of layer {layer}", self.role),
            None => write!(f, "{:?}", self.role),
        }
    }
}
