//! Fields that are absent, null, misspelled or of another type.

use serde_json::{Value, json};

use crate::{K31, accepted, fields, good, parse, refused, remove, set};

const REQUIRED: [&str; 41] = [
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "first_k_dense_replace",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "mla_use_output_gate",
    "linear_attn_config",
    "linear_attn_config.num_heads",
    "linear_attn_config.head_dim",
    "linear_attn_config.short_conv_kernel_size",
    "linear_attn_config.gate_lower_bound",
    "linear_attn_config.use_full_rank_gate",
    "linear_attn_config.kda_layers",
    "linear_attn_config.full_attn_layers",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "moe_router_activation_func",
    "moe_renormalize",
    "routed_scaling_factor",
    "max_position_embeddings",
    "tie_word_embeddings",
    "quantization_config",
    "use_grouped_topk",
];

const REQUIRED_TOO: [&str; 3] = ["num_expert_group", "topk_group", "dsa_config.index_topk"];

#[test]
fn every_required_field_is_missed_by_name() {
    for key in REQUIRED.iter().chain(&REQUIRED_TOO) {
        let path = format!("text_config.{key}");
        let mut json = parse(K31);
        remove(&mut json, &path);
        let error = refused(&json, &path);
        assert!(fields(&error).contains(&path.as_str()), "{path}: {error}");
        assert!(error.to_string().contains("the key is absent"), "{path}: {error}");
    }
}

#[test]
fn a_renamed_key_is_missed_and_its_new_name_is_shown() {
    for key in REQUIRED.iter().chain(&REQUIRED_TOO) {
        let path = format!("text_config.{key}");
        let mut json = parse(K31);
        let value = remove(&mut json, &path);
        set(&mut json, &format!("{path}_x"), value);
        let error = refused(&json, &path);
        assert!(fields(&error).contains(&path.as_str()), "{path}: {error}");
        assert!(error.unknown_keys.contains(&format!("{path}_x")), "{path}: {error}");
    }
}

#[test]
fn null_is_no_value_for_a_required_field() {
    for key in REQUIRED.iter().chain(&REQUIRED_TOO) {
        let path = format!("text_config.{key}");
        let mut json = parse(K31);
        set(&mut json, &path, Value::Null);
        assert!(fields(&refused(&json, &path)).contains(&path.as_str()), "{path}");
    }
}

#[test]
fn a_value_of_the_wrong_type_is_refused_for_every_field() {
    for key in
        REQUIRED.iter().chain(&REQUIRED_TOO).chain(&["dsa_config", "num_nextn_predict_layers", "topk_method"])
    {
        for wrong in [json!({"a": 1}), json!("7168 "), json!([[1]]), json!(-7), json!(1e30)] {
            let path = format!("text_config.{key}");
            // An object without the right keys is still an object, and a list of nothing right is still a list.
            let mut json = parse(K31);
            set(&mut json, &path, wrong.clone());
            let error = refused(&json, &format!("{path} = {wrong}"));
            assert!(fields(&error).iter().any(|f| f.starts_with(&path)), "{path} = {wrong}: {error}");
        }
    }
}

#[test]
fn optional_fields_may_be_absent_or_null() {
    for key in ["moe_layer_freq", "topk_method", "num_nextn_predict_layers"] {
        accepted(&format!("text_config.{key}"), Value::Null);
        let mut json = parse(K31);
        remove(&mut json, &format!("text_config.{key}"));
        good(&json);
    }
    accepted("text_config.rope_scaling", Value::Null);
    accepted("text_config.use_grouped_topk", json!(false));
    accepted("text_config.moe_renormalize", json!(false));
    accepted("text_config.activation_situ_beta", json!(4));
    for key in ["bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"] {
        let mut json = parse(K31);
        remove(&mut json, key);
        good(&json);
    }
}
