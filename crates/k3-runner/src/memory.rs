//! What a run needs in memory beside routed experts, from sizes alone.

use k3_experts::plan::{ExpertSizes, Needs};
use k3_experts::trace::Geometry;
use k3_format::{AttentionKind, ModelConfig};

/// Bytes of a sequence's state on the CPU device: fixed, and for each token of its context.
pub fn state_bytes(config: &ModelConfig) -> (u64, u64) {
    let kda_layers = config.layers.iter().filter(|kind| **kind == AttentionKind::Kda).count();
    let p = config.kda.projection_size();
    let kda = p * config.kda.head_dim + 3 * (config.kda.short_conv_kernel_size - 1) * p;
    let indexer = config.indexer.as_ref().map_or(0, |i| i.head_dim);
    let mla = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim + indexer;
    let full = config.num_hidden_layers() - kda_layers;
    ((4 * kda_layers * kda) as u64, (4 * full * mla) as u64)
}

/// Bytes of the values that are in memory at once while `rows` tokens go through a layer of the CPU device: the
/// running sum and its snapshots, what the widest sublayer keeps, and the copies that a product makes.
pub fn activation_bytes(config: &ModelConfig, rows: usize) -> u64 {
    let e = config.hidden_size;
    let snapshots = config.num_hidden_layers().div_ceil(config.attn_res_block_size.max(1));
    // Snapshots, running sum, mix, norm, output.
    let stream = (snapshots + 4) * e;
    // q, k, v before and after their convolution, decay, output twice, gate, gated.
    let p = config.kda.projection_size();
    let kda = 9 * p;
    let mla = &config.mla;
    let index =
        config.indexer.as_ref().map_or(0, |i| i.n_heads * (i.head_dim + 1) + i.topk.min(rows.max(1) * 4));
    let attention = mla.num_heads * mla.qk_head_dim() + mla.q_lora_rank + 3 * mla.output_size() + index;
    let moe = &config.moe;
    let (shared, latent) = (moe.shared_intermediate_size(), moe.routed_expert_hidden_size);
    let routed = (moe.num_experts_per_token + 3) * latent + 3 * moe.moe_intermediate_size;
    let experts = moe.num_experts + 3 * shared + e + routed;
    let dense = if config.first_k_dense_replace > 0 { 3 * config.intermediate_size } else { 0 };
    let widest = [e, p, mla.num_heads * mla.qk_head_dim(), shared, dense / 3].into_iter().max().unwrap_or(e);
    let sublayer = [kda, attention, experts, dense].into_iter().max().unwrap_or(0);
    4 * rows as u64 * (stream + sublayer + 2 * widest) as u64
}

/// What `sequences` of up to `context` tokens need, when prefill computes `rows` tokens at once and `pinned` bytes of
/// weights are kept.
pub fn needs(config: &ModelConfig, pinned: u64, sequences: u64, context: u64, rows: usize) -> Needs {
    let (fixed, growing) = state_bytes(config);
    // What grows is doubled when it is full.
    let state = fixed.saturating_add(growing.saturating_mul(context).saturating_mul(2));
    Needs { pinned, state: state.saturating_mul(sequences), activations: activation_bytes(config, rows) }
}

/// The routed experts of a model, `slot_bytes` each.
pub fn expert_sizes(config: &ModelConfig, slot_bytes: u64) -> ExpertSizes {
    let geometry = Geometry {
        layers: config.num_hidden_layers() - config.first_k_dense_replace,
        experts: config.moe.num_experts,
        per_token: config.moe.num_experts_per_token,
    };
    ExpertSizes { geometry, slot_bytes }
}
