//! The weights of the tiny model.

use std::error::Error;

use k3_format::{
    AttentionKind, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, Role, SpecialTokens,
    TensorId, Variant,
};
use k3_graph::WeightSource;
use k3_quant::Matrix;

use super::{Lcg, bf16_matrix, f32_matrix};

/// Ids below this exist.
pub(crate) const VOCAB: usize = 97;
/// Keys that a query of the K3.1 model attends at most.
pub(crate) const TOPK: usize = 8;

/// Seven layers, full attention in the fourth and seventh, no two widths equal where a mix-up could hide.
pub(crate) fn tiny_config(variant: Variant) -> ModelConfig {
    use AttentionKind::{FullAttention as Mla, Kda};
    ModelConfig {
        hidden_size: 64,
        vocab_size: VOCAB,
        rms_norm_eps: 1e-5,
        activation_situ_beta: 4.0,
        activation_situ_linear_beta: 25.0,
        attn_res_block_size: 3,
        first_k_dense_replace: 1,
        intermediate_size: 96,
        max_position_embeddings: 2048,
        layers: vec![Kda, Kda, Kda, Mla, Kda, Kda, Mla],
        kda: KdaConfig { num_heads: 2, head_dim: 16, short_conv_kernel_size: 4, gate_lower_bound: -5.0 },
        mla: MlaConfig {
            num_heads: 2,
            q_lora_rank: 24,
            kv_lora_rank: 32,
            qk_nope_head_dim: 16,
            qk_rope_head_dim: 8,
            v_head_dim: 16,
        },
        moe: MoeConfig {
            num_experts: 12,
            num_experts_per_token: 3,
            num_shared_experts: 1,
            moe_intermediate_size: 32,
            routed_expert_hidden_size: 32,
            moe_renormalize: true,
            routed_scaling_factor: 1.0,
        },
        indexer: match variant {
            Variant::K3 => None,
            Variant::K31 => Some(IndexerConfig { n_heads: 2, head_dim: 16, topk: TOPK }),
        },
        tokens: SpecialTokens { media_placeholder: Some(96), ..SpecialTokens::default() },
    }
}

type Edit = Box<dyn Fn(&mut [f32])>;

/// Weights made from the tensor's name when asked for: BF16 matrices, an F32 router.
pub(crate) struct TinyWeights {
    pub(crate) config: ModelConfig,
    edits: Vec<(TensorId, Edit)>,
}

impl TinyWeights {
    pub(crate) fn new(variant: Variant) -> Self {
        Self { config: tiny_config(variant), edits: Vec::new() }
    }

    /// Changes the values of a tensor, row-major, before they are stored.
    #[must_use]
    pub(crate) fn edit(mut self, id: TensorId, edit: impl Fn(&mut [f32]) + 'static) -> Self {
        self.edits.push((id, Box::new(edit)));
        self
    }

    /// The same change in every full-attention layer.
    #[must_use]
    pub(crate) fn edit_full_attention(
        mut self,
        role: Role,
        edit: impl Fn(&mut [f32]) + Copy + 'static,
    ) -> Self {
        for l in 0..self.config.layers.len() {
            if self.config.layers[l] == AttentionKind::FullAttention {
                self = self.edit(TensorId::layer(l, role), edit);
            }
        }
        self
    }

    /// `[out, in]`; vectors have one row, convolutions `[width, taps]`.
    fn shape(&self, id: TensorId) -> (usize, usize) {
        let c = &self.config;
        let (e, kda, mla, moe) = (c.hidden_size, &c.kda, &c.mla, &c.moe);
        let (p, o) = (kda.projection_size(), mla.output_size());
        let is_kda = id.layer.is_some_and(|l| c.layers[l] == AttentionKind::Kda);
        let index = || c.indexer.as_ref().expect("indexer weights are asked for only where there is one");
        match id.role {
            Role::EmbedTokens | Role::LmHead => (c.vocab_size, e),
            Role::Norm
            | Role::OutputAttnResNorm
            | Role::OutputAttnResProj
            | Role::InputLayernorm
            | Role::PostAttentionLayernorm
            | Role::SelfAttentionResNorm
            | Role::SelfAttentionResProj
            | Role::MlpResNorm
            | Role::MlpResProj => (1, e),
            Role::GProj => (if is_kda { p } else { o }, e),
            Role::OProj => (e, if is_kda { p } else { o }),
            Role::QProj | Role::KProj | Role::VProj => (p, e),
            Role::QConv1d | Role::KConv1d | Role::VConv1d => (p, kda.short_conv_kernel_size),
            Role::ALog => (1, kda.num_heads),
            Role::DtBias => (1, p),
            Role::FAProj => (kda.head_dim, e),
            Role::FBProj => (p, kda.head_dim),
            Role::BProj => (kda.num_heads, e),
            Role::ONorm => (1, kda.head_dim),
            Role::QAProj => (mla.q_lora_rank, e),
            Role::QALayernorm => (1, mla.q_lora_rank),
            Role::QBProj => (mla.num_heads * mla.qk_head_dim(), mla.q_lora_rank),
            Role::KvAProjWithMqa => (mla.kv_lora_rank + mla.qk_rope_head_dim, e),
            Role::KvALayernorm => (1, mla.kv_lora_rank),
            Role::KvBProj => (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            Role::IndexerWqB => (index().n_heads * index().head_dim, mla.q_lora_rank),
            Role::IndexerWk => (index().head_dim, e),
            Role::IndexerKNormWeight | Role::IndexerKNormBias => (1, index().head_dim),
            Role::IndexerWeightsProj => (index().n_heads, e),
            Role::MlpGateProj | Role::MlpUpProj => (c.intermediate_size, e),
            Role::MlpDownProj => (e, c.intermediate_size),
            Role::RouterGate => (moe.num_experts, e),
            Role::RouterBias => (1, moe.num_experts),
            Role::RoutedExpertDownProj => (moe.routed_expert_hidden_size, e),
            Role::RoutedExpertNorm => (1, moe.routed_expert_hidden_size),
            Role::RoutedExpertUpProj => (e, moe.routed_expert_hidden_size),
            Role::SharedGateProj | Role::SharedUpProj => (moe.shared_intermediate_size(), e),
            Role::SharedDownProj => (e, moe.shared_intermediate_size()),
        }
    }

    fn values(&self, id: TensorId) -> Vec<f32> {
        let (rows, cols) = self.shape(id);
        let seed = id.to_string().bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        // A vector's values are `centre +- spread`.
        let (centre, spread) = match id.role {
            Role::EmbedTokens => (0.0, 1.7),
            Role::QConv1d | Role::KConv1d | Role::VConv1d | Role::ALog => (0.0, 0.7),
            Role::OutputAttnResProj | Role::SelfAttentionResProj | Role::MlpResProj => (0.0, 0.3),
            Role::DtBias => (0.0, 1.5),
            Role::RouterBias => (0.0, 0.1),
            Role::IndexerKNormBias => (0.0, 0.2),
            _ if rows == 1 => (1.0, 0.3),
            _ => (0.0, (3.0 / cols as f32).sqrt()),
        };
        let mut values = Lcg::new(seed).values(rows * cols, spread);
        values.iter_mut().for_each(|v| *v += centre);
        for (_, edit) in self.edits.iter().filter(|(edited, _)| *edited == id) {
            edit(&mut values);
        }
        values
    }
}

impl WeightSource for TinyWeights {
    fn matrix(&self, id: TensorId) -> Result<Matrix, Box<dyn Error + Send + Sync>> {
        let (rows, cols) = self.shape(id);
        let values = self.values(id);
        Ok(match id.role {
            Role::RouterGate => f32_matrix(rows, cols, &values),
            _ => bf16_matrix(rows, cols, &values),
        })
    }

    fn vector(&self, id: TensorId) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
        Ok(self.values(id))
    }
}
