//! The sizes of a synthetic checkpoint.

use anyhow::{Result, bail, ensure};
use k3_format::{
    AttentionKind, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant,
};
use k3_quant::MX_BLOCK;

/// The largest size of a geometry: the bytes of one tensor, a product of three sizes, stay below 2^63.
const LIMIT: usize = 1 << 20;

/// What to write: the language model, and whether the vision tensors of the release go with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Every size of the language model. [`ModelConfig::indexer`] decides the variant.
    pub model: ModelConfig,
    /// Also write the projector and the vision tower of `docs/checkpoint.md` 3.7, in two more shards, so that
    /// the names and bytes add up to those of the release.
    pub vision: bool,
}

impl Geometry {
    /// A few MB: 13 layers as in `fixtures/tiny-k31`, 16 experts top-4, vocabulary 512.
    pub fn tiny(variant: Variant) -> Self {
        let model = ModelConfig {
            hidden_size: 128,
            vocab_size: 512,
            attn_res_block_size: 3,
            intermediate_size: 160,
            max_position_embeddings: 4096,
            layers: layer_map(13, |number| number % 4 == 0),
            kda: kda(3, 32),
            mla: MlaConfig {
                num_heads: 4,
                q_lora_rank: 48,
                kv_lora_rank: 32,
                qk_nope_head_dim: 16,
                qk_rope_head_dim: 8,
                v_head_dim: 16,
            },
            moe: moe(16, 4, 96, 64),
            indexer: indexer(variant, 2, 16, 16),
            tokens: special_tokens(512),
            ..scalars()
        };
        Self { model, vision: false }
    }

    /// About 3 GB: the released head sizes, 13 layers, 96 experts top-16. Large enough that reads, kernels and the
    /// expert store dominate, small enough for one disk and one machine.
    pub fn bench(variant: Variant) -> Self {
        let model = ModelConfig {
            hidden_size: 2048,
            vocab_size: 8192,
            attn_res_block_size: 3,
            intermediate_size: 8192,
            max_position_embeddings: 1 << 20,
            layers: layer_map(13, |number| number % 4 == 0),
            kda: kda(24, 128),
            mla: mla(24, 512),
            moe: moe(96, 16, 896, 1024),
            indexer: indexer(variant, 32, 128, 512),
            tokens: special_tokens(8192),
            ..scalars()
        };
        Self { model, vision: false }
    }

    /// The released sizes (`docs/checkpoint.md` 2 and 3), vision included: 1.56 TB.
    pub fn released(variant: Variant) -> Self {
        let model = ModelConfig {
            hidden_size: 7168,
            vocab_size: 163_840,
            attn_res_block_size: 12,
            intermediate_size: 33_792,
            max_position_embeddings: 1 << 20,
            layers: layer_map(93, |number| number % 4 == 0),
            kda: kda(96, 128),
            mla: mla(96, 1536),
            moe: moe(896, 16, 3072, 3584),
            indexer: indexer(variant, 32, 128, 2048),
            tokens: special_tokens(163_840),
            ..scalars()
        };
        Self { model, vision: true }
    }

    /// The variant that these sizes describe.
    pub fn variant(&self) -> Variant {
        if self.model.indexer.is_some() { Variant::K31 } else { Variant::K3 }
    }

    /// The first `layers` decoder layers, the last of them made full attention as in the release.
    pub fn with_layers(mut self, layers: usize) -> Result<Self> {
        let known = self.model.layers.len();
        ensure!(
            (1..=known).contains(&layers),
            "--layers {layers}: this geometry has {known} layers, so take 1 to {known}"
        );
        self.model.layers.truncate(layers);
        if let Some(last) = self.model.layers.last_mut() {
            *last = AttentionKind::FullAttention;
        }
        Ok(self)
    }

    /// Another number of routed experts a layer. Experts per token stay; [`Self::check`] refuses too few.
    #[must_use]
    pub fn with_experts(mut self, experts: usize) -> Self {
        self.model.moe.num_experts = experts;
        self
    }

    /// Whether a checkpoint of these sizes can exist: every size at least 1, MXFP4 blocks whole, no more experts
    /// per token than experts, and all byte counts within `u64` by a wide margin.
    pub fn check(&self) -> Result<()> {
        let m = &self.model;
        let sizes = [
            ("hidden_size", m.hidden_size),
            ("vocab_size", m.vocab_size),
            ("attn_res_block_size", m.attn_res_block_size),
            ("intermediate_size", m.intermediate_size),
            ("max_position_embeddings", m.max_position_embeddings),
            ("num_hidden_layers", m.layers.len()),
            ("linear_attn_config.num_heads", m.kda.num_heads),
            ("linear_attn_config.head_dim", m.kda.head_dim),
            ("linear_attn_config.short_conv_kernel_size", m.kda.short_conv_kernel_size),
            ("num_attention_heads", m.mla.num_heads),
            ("q_lora_rank", m.mla.q_lora_rank),
            ("kv_lora_rank", m.mla.kv_lora_rank),
            ("qk_nope_head_dim", m.mla.qk_nope_head_dim),
            ("qk_rope_head_dim", m.mla.qk_rope_head_dim),
            ("v_head_dim", m.mla.v_head_dim),
            ("num_experts", m.moe.num_experts),
            ("num_experts_per_token", m.moe.num_experts_per_token),
            ("num_shared_experts", m.moe.num_shared_experts),
            ("moe_intermediate_size", m.moe.moe_intermediate_size),
            ("routed_expert_hidden_size", m.moe.routed_expert_hidden_size),
        ];
        let indexer = m.indexer.as_ref().map_or([("", 1); 3], |i| {
            [("index_n_heads", i.n_heads), ("index_head_dim", i.head_dim), ("index_topk", i.topk)]
        });
        for (name, size) in sizes.into_iter().chain(indexer) {
            ensure!(
                (1..=LIMIT).contains(&size),
                "{name} is {size}; a synthetic checkpoint takes 1 to {LIMIT}"
            );
        }
        for (name, size) in [
            ("moe_intermediate_size", m.moe.moe_intermediate_size),
            ("routed_expert_hidden_size", m.moe.routed_expert_hidden_size),
        ] {
            if size % MX_BLOCK != 0 {
                bail!("{name} is {size}; MXFP4 experts need a multiple of {MX_BLOCK}");
            }
        }
        ensure!(
            m.moe.num_experts_per_token <= m.moe.num_experts,
            "{} experts, but a token uses {} of them; ask for at least {1} with --experts",
            m.moe.num_experts,
            m.moe.num_experts_per_token,
        );
        let tokens = [m.tokens.bos, m.tokens.pad, m.tokens.media_placeholder].into_iter().flatten();
        for id in tokens.chain(m.tokens.eos.iter().copied()) {
            ensure!(
                (id as usize) < m.vocab_size,
                "token id {id} is outside the vocabulary of {}",
                m.vocab_size
            );
        }
        Ok(())
    }
}

/// Full attention where `full` says so for the 1-based layer number, and on the last layer.
fn layer_map(layers: usize, full: impl Fn(usize) -> bool) -> Vec<AttentionKind> {
    (1..=layers)
        .map(
            |number| {
                if full(number) || number == layers {
                    AttentionKind::FullAttention
                } else {
                    AttentionKind::Kda
                }
            },
        )
        .collect()
}

/// The numbers that all geometries share, in a config whose sizes are still to be set.
fn scalars() -> ModelConfig {
    ModelConfig {
        hidden_size: 0,
        vocab_size: 0,
        rms_norm_eps: 1e-5,
        activation_situ_beta: 4.0,
        activation_situ_linear_beta: 25.0,
        attn_res_block_size: 0,
        first_k_dense_replace: 1,
        intermediate_size: 0,
        max_position_embeddings: 0,
        layers: Vec::new(),
        kda: kda(0, 0),
        mla: mla(0, 0),
        moe: moe(0, 0, 0, 0),
        indexer: None,
        tokens: SpecialTokens::default(),
    }
}

fn kda(num_heads: usize, head_dim: usize) -> KdaConfig {
    KdaConfig { num_heads, head_dim, short_conv_kernel_size: 4, gate_lower_bound: -5.0 }
}

/// The released head sizes.
fn mla(num_heads: usize, q_lora_rank: usize) -> MlaConfig {
    MlaConfig {
        num_heads,
        q_lora_rank,
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
    }
}

fn moe(experts: usize, per_token: usize, inner: usize, latent: usize) -> MoeConfig {
    MoeConfig {
        num_experts: experts,
        num_experts_per_token: per_token,
        num_shared_experts: 2,
        moe_intermediate_size: inner,
        routed_expert_hidden_size: latent,
        moe_renormalize: true,
        routed_scaling_factor: 1.0,
    }
}

fn indexer(variant: Variant, n_heads: usize, head_dim: usize, topk: usize) -> Option<IndexerConfig> {
    (variant == Variant::K31).then_some(IndexerConfig { n_heads, head_dim, topk })
}

/// The released ids, counted from the end of the vocabulary, where the release has its 256 special tokens.
fn special_tokens(vocab_size: u32) -> SpecialTokens {
    let id = |released: u32| Some(released + vocab_size - 163_840);
    SpecialTokens {
        bos: id(163_584),
        eos: id(163_586).into_iter().collect(),
        pad: id(163_839),
        media_placeholder: id(163_605),
    }
}
