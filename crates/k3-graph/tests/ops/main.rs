//! Every operation of both devices: against the operator vectors, and the host device against the reference.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod closed_form;
mod index_filter;
mod routing;
mod tables;
mod vectors;

use k3_format::MlaConfig;

/// The attention of a layer of which only the indexer matters.
const NARROW_MLA: MlaConfig = MlaConfig {
    num_heads: 1,
    q_lora_rank: 1,
    kv_lora_rank: 1,
    qk_nope_head_dim: 1,
    qk_rope_head_dim: 1,
    v_head_dim: 1,
};

/// Relative L2 of the f64 device: what is left is that operands and results are rounded to f32.
const REFERENCE_BOUND: f64 = 1e-7;
/// Relative L2 of the f32 device, for one operation.
const CPU_BOUND: f64 = 1e-6;
