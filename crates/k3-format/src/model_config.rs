//! What a checked `config.json` says about the model: every number the engine computes with, and nothing else.

use std::fmt;

/// Which model a checkpoint is. Decided by the gate of `docs/checkpoint.md` 9.1, never by a single marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Kimi K3: full-attention layers attend every key.
    K3,
    /// Kimi K3.1 Pro: full-attention layers attend the keys that a Lightning Indexer selects.
    K31,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::K3 => "Kimi K3",
            Self::K31 => "Kimi K3.1 Pro",
        })
    }
}

/// How a decoder layer attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Kimi Delta Attention: a recurrent state, no cache that grows.
    Kda,
    /// Gated multi-head latent attention without positional encoding.
    FullAttention,
}

/// The language model of a checkpoint. Field names are those of `text_config`; widths in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Width of the depth stream.
    pub hidden_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Epsilon of every RMSNorm except `q_a_layernorm` and `kv_a_layernorm`.
    pub rms_norm_eps: f64,
    /// Cap of the gate in SiTU-GLU.
    pub activation_situ_beta: f64,
    /// Cap of the up projection in SiTU-GLU.
    pub activation_situ_linear_beta: f64,
    /// AttnRes pushes a snapshot at layers `l % attn_res_block_size == 0`.
    pub attn_res_block_size: usize,
    /// Layers below this one have the dense MLP, all others the mixture of experts.
    pub first_k_dense_replace: usize,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// Context ceiling in tokens.
    pub max_position_embeddings: usize,
    /// One entry a decoder layer, 0-based.
    pub layers: Vec<AttentionKind>,
    /// Kimi Delta Attention.
    pub kda: KdaConfig,
    /// Gated MLA.
    pub mla: MlaConfig,
    /// The mixture of experts.
    pub moe: MoeConfig,
    /// The Lightning Indexer of every full-attention layer; `None` for Kimi K3.
    pub indexer: Option<IndexerConfig>,
    /// Token ids with a meaning.
    pub tokens: SpecialTokens,
}

/// `linear_attn_config`.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Key and value width of a head.
    pub head_dim: usize,
    /// Taps of the causal depthwise convolution.
    pub short_conv_kernel_size: usize,
    /// The lower bound of the log decay, in `[-5, 0)`.
    pub gate_lower_bound: f64,
}

/// Gated MLA.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// `num_attention_heads`
    pub num_heads: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Width of the key/value latent, which is what the cache holds.
    pub kv_lora_rank: usize,
    /// Key width of a head that comes from the latent.
    pub qk_nope_head_dim: usize,
    /// Extra key width shared by all heads. Never rotated, whatever the name says.
    pub qk_rope_head_dim: usize,
    /// Value width of a head.
    pub v_head_dim: usize,
}

/// LatentMoE.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts that a token uses.
    pub num_experts_per_token: usize,
    /// Shared experts, fused into one MLP of `num_shared_experts * moe_intermediate_size`.
    pub num_shared_experts: usize,
    /// Inner width of a routed expert.
    pub moe_intermediate_size: usize,
    /// Width of the latent that routed experts read and write.
    pub routed_expert_hidden_size: usize,
    /// Divide the weights of the selected experts by their sum.
    pub moe_renormalize: bool,
    /// Multiplies the weights, after that.
    pub routed_scaling_factor: f64,
}

/// `dsa_config`, with what it leaves out taken from the tensor shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerConfig {
    /// Heads.
    pub n_heads: usize,
    /// Width of a head, and of a cached indexer key.
    pub head_dim: usize,
    /// Keys that a query attends at most.
    pub topk: usize,
}

/// Token ids named in `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token_id`
    pub bos: Option<u32>,
    /// `eos_token_id` of the root and of `text_config`, a number or a list; in order, without repeats.
    pub eos: Vec<u32>,
    /// `pad_token_id`
    pub pad: Option<u32>,
    /// `media_placeholder_token_id`: a text prompt must not carry it.
    pub media_placeholder: Option<u32>,
}

impl ModelConfig {
    /// Decoder layers.
    pub fn num_hidden_layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether layer `layer` (0-based) has routed experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
    }
}

impl KdaConfig {
    /// Width of q, k, v, the gates and the output: `num_heads * head_dim`.
    pub fn projection_size(&self) -> usize {
        self.num_heads * self.head_dim
    }
}

impl MlaConfig {
    /// Width of a query or key of one head, extra dims included.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Width of the attention output before `o_proj`: `num_heads * v_head_dim`.
    pub fn output_size(&self) -> usize {
        self.num_heads * self.v_head_dim
    }
}

impl MoeConfig {
    /// Inner width of the fused shared MLP.
    pub fn shared_intermediate_size(&self) -> usize {
        self.num_shared_experts * self.moe_intermediate_size
    }
}
