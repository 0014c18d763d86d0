//! What a run needs in memory beside routed experts, from sizes alone.

use k3_experts::plan::{ExpertSizes, Needs};
use k3_experts::trace::Geometry;
use k3_format::{AttentionKind, ModelConfig};
use k3_graph::{Device, LogitsWanted, index_key_bytes, working_bytes_per_token};

use crate::EngineOptions;

/// Bytes of a sequence's state on the CPU device: fixed, and for each token of its context.
pub fn state_bytes(config: &ModelConfig) -> (u64, u64) {
    let kda_layers = config.layers.iter().filter(|kind| **kind == AttentionKind::Kda).count();
    let p = config.kda.projection_size();
    let kda = p * config.kda.head_dim + 3 * (config.kda.short_conv_kernel_size - 1) * p;
    let indexer = config.indexer.as_ref().map_or(0, |i| index_key_bytes(i.head_dim));
    let mla = 4 * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) + indexer;
    let full = config.num_hidden_layers() - kda_layers;
    ((4 * kda_layers * kda) as u64, (full * mla) as u64)
}

/// Tokens that prefill computes at once at most under [`EngineOptions::activation_bytes`], on a device with
/// activations of `value_bytes` ([`Device::VALUE_BYTES`]), if these logits are wanted of it.
pub fn chunk_tokens(
    config: &ModelConfig,
    options: &EngineOptions,
    value_bytes: usize,
    wanted: LogitsWanted,
) -> usize {
    let bytes = working_bytes_per_token(config, value_bytes, wanted).max(1);
    let fitting = usize::try_from(options.activation_bytes / bytes).unwrap_or(usize::MAX);
    options.chunk_tokens.unwrap_or(fitting).max(1)
}

/// What `sequences` of up to `context` tokens need on `device`, when prefill computes `chunk` tokens at once and `pinned` bytes
/// of weights are kept.
pub fn needs<D: Device>(
    config: &ModelConfig,
    pinned: u64,
    sequences: u64,
    context: u64,
    chunk: usize,
    device: &D,
) -> Needs {
    let (fixed, growing) = state_bytes(config);
    // What grows is doubled when it is full.
    let state = fixed.saturating_add(growing.saturating_mul(context).saturating_mul(2));
    let working = working_bytes_per_token(config, D::VALUE_BYTES, LogitsWanted::Last);
    let scores = device.score_bytes(config, usize::try_from(context).unwrap_or(usize::MAX));
    let activations = working.saturating_mul(context.min(chunk as u64)).saturating_add(scores);
    Needs { pinned, state: state.saturating_mul(sequences), activations }
}

/// The routed experts of a model, `slot_bytes` each, of which `moving` are on their way at most.
pub fn expert_sizes(config: &ModelConfig, slot_bytes: u64, moving: usize) -> ExpertSizes {
    let geometry = Geometry {
        layers: config.num_hidden_layers() - config.first_k_dense_replace,
        experts: config.moe.num_experts,
        per_token: config.moe.num_experts_per_token,
    };
    ExpertSizes { geometry, slot_bytes, moving: moving as u64 }
}
