//! `config.json` and `generation_config.json` of a synthetic checkpoint: every field of the release, sizes replaced.

use anyhow::{Context, Result};
use k3_format::{AttentionKind, Variant};
use serde_json::{Value, json};

use super::Geometry;

/// The released config of Kimi K3, and the one that `docs/checkpoint.md` 9 reconstructs for Kimi K3.1 Pro.
fn template(variant: Variant) -> &'static str {
    match variant {
        Variant::K3 => include_str!("../../../fixtures/configs/kimi-k3.config.json"),
        Variant::K31 => include_str!("../../../fixtures/configs/kimi-k31.config.json"),
    }
}

/// `config.json`.
pub(super) fn config(geometry: &Geometry) -> Result<Value> {
    let m = &geometry.model;
    let mut root: Value = serde_json::from_str(template(geometry.variant())).context("config template")?;
    let eos = match m.tokens.eos.as_slice() {
        [one] => json!(one),
        many => json!(many),
    };
    set(
        &mut root,
        [
            ("bos_token_id", json!(m.tokens.bos)),
            ("eos_token_id", eos.clone()),
            ("pad_token_id", json!(m.tokens.pad)),
            ("media_placeholder_token_id", json!(m.tokens.media_placeholder)),
        ],
    );
    set(&mut root["vision_config"], [("text_hidden_size", json!(m.hidden_size))]);
    let text = &mut root["text_config"];
    set(
        text,
        [
            ("hidden_size", json!(m.hidden_size)),
            ("vocab_size", json!(m.vocab_size)),
            ("num_hidden_layers", json!(m.layers.len())),
            ("rms_norm_eps", json!(m.rms_norm_eps)),
            ("activation_situ_beta", json!(m.activation_situ_beta)),
            ("activation_situ_linear_beta", json!(m.activation_situ_linear_beta)),
            ("attn_res_block_size", json!(m.attn_res_block_size)),
            ("first_k_dense_replace", json!(m.first_k_dense_replace)),
            ("intermediate_size", json!(m.intermediate_size)),
            ("max_position_embeddings", json!(m.max_position_embeddings)),
            ("num_attention_heads", json!(m.mla.num_heads)),
            ("num_key_value_heads", json!(m.mla.num_heads)),
            ("q_lora_rank", json!(m.mla.q_lora_rank)),
            ("kv_lora_rank", json!(m.mla.kv_lora_rank)),
            ("qk_nope_head_dim", json!(m.mla.qk_nope_head_dim)),
            ("qk_rope_head_dim", json!(m.mla.qk_rope_head_dim)),
            ("v_head_dim", json!(m.mla.v_head_dim)),
            ("num_experts", json!(m.moe.num_experts)),
            ("num_experts_per_token", json!(m.moe.num_experts_per_token)),
            ("num_shared_experts", json!(m.moe.num_shared_experts)),
            ("moe_intermediate_size", json!(m.moe.moe_intermediate_size)),
            ("routed_expert_hidden_size", json!(m.moe.routed_expert_hidden_size)),
            ("moe_renormalize", json!(m.moe.moe_renormalize)),
            ("routed_scaling_factor", json!(m.moe.routed_scaling_factor)),
            ("bos_token_id", json!(m.tokens.bos)),
            ("eos_token_id", eos),
            ("pad_token_id", json!(m.tokens.pad)),
        ],
    );
    let full = numbers(geometry, AttentionKind::FullAttention);
    set(
        &mut text["linear_attn_config"],
        [
            ("num_heads", json!(m.kda.num_heads)),
            ("head_dim", json!(m.kda.head_dim)),
            ("short_conv_kernel_size", json!(m.kda.short_conv_kernel_size)),
            ("gate_lower_bound", json!(m.kda.gate_lower_bound)),
            ("kda_layers", json!(numbers(geometry, AttentionKind::Kda))),
            ("full_attn_layers", json!(full)),
        ],
    );
    if let Some(indexer) = &m.indexer {
        set(
            &mut text["dsa_config"],
            [
                ("dsa_layers", json!(full)),
                ("index_n_heads", json!(indexer.n_heads)),
                ("index_head_dim", json!(indexer.head_dim)),
                ("index_topk", json!(indexer.topk)),
            ],
        );
    }
    Ok(root)
}

/// `generation_config.json` (`docs/checkpoint.md` 1).
pub(super) fn generation_config(geometry: &Geometry, config: &Value) -> Value {
    json!({ "max_length": geometry.model.max_position_embeddings, "eos_token_id": config["eos_token_id"] })
}

fn set<const N: usize>(object: &mut Value, fields: [(&str, Value); N]) {
    for (name, value) in fields {
        object[name] = value;
    }
}

/// Layer numbers of one kind, 1-based as the config counts them.
fn numbers(geometry: &Geometry, kind: AttentionKind) -> Vec<usize> {
    let layers = geometry.model.layers.iter().enumerate();
    layers.filter(|(_, k)| **k == kind).map(|(layer, _)| layer + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The released sizes give the released config back, field for field.
    fn check(variant: Variant) {
        let expected: Value = serde_json::from_str(template(variant)).unwrap();
        let geometry = Geometry::released(variant);
        assert_eq!(config(&geometry).unwrap(), expected);
        let generation = generation_config(&geometry, &expected);
        assert_eq!(generation, json!({ "max_length": 1_048_576, "eos_token_id": 163_586 }));
    }

    #[test]
    fn released_k3() {
        check(Variant::K3);
    }

    #[test]
    fn released_k31() {
        check(Variant::K31);
    }
}
