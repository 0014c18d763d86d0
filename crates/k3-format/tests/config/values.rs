//! Values that describe another model, that nothing could hold, or that contradict each other.

use serde_json::{Value, json};

use crate::{K3, K31, accepted, at, check, check_text, fields, good, parse, refused, remove, set};

#[test]
fn values_that_describe_another_model_are_refused() {
    check_text("model_type", json!("kimi_k2"));
    check_text("hidden_act", json!("silu"));
    check_text("rms_norm_eps", json!(0.0));
    check_text("rms_norm_eps", json!(9.9e-13));
    check_text("rms_norm_eps", json!(1e-320));
    check_text("rms_norm_eps", json!(1.0));
    check_text("rms_norm_eps", json!(-1e-5));
    check_text("activation_situ_beta", json!(0));
    check_text("activation_situ_linear_beta", Value::Null);
    check_text("activation_situ_linear_beta", json!(-25.0));
    check_text("attn_res_block_size", json!(0));
    check_text("attn_res_block_size", json!(-12));
    check_text("attn_res_block_size", Value::Null);
    check_text("first_k_dense_replace", json!(94));
    check_text("moe_layer_freq", json!(2));
    check_text("num_key_value_heads", json!(8));
    check_text("q_lora_rank", Value::Null);
    check_text("mla_use_nope", json!(false));
    check_text("mla_use_output_gate", json!(false));
    check_text("linear_attn_config.gate_lower_bound", Value::Null);
    check_text("linear_attn_config.gate_lower_bound", json!(0.0));
    check_text("linear_attn_config.gate_lower_bound", json!(-5.1));
    check_text("linear_attn_config.use_full_rank_gate", json!(false));
    check_text("linear_attn_config.num_heads", json!(0));
    check_text("linear_attn_config.head_dim", json!(0));
    check_text("linear_attn_config.short_conv_kernel_size", json!(0));
    check_text("num_experts_per_token", json!(0));
    check_text("num_experts_per_token", json!(897));
    check_text("routed_expert_hidden_size", Value::Null);
    check_text("routed_expert_hidden_size", json!(3600));
    check_text("moe_intermediate_size", json!(3088));
    check_text("latent_moe_use_norm", json!(false));
    check_text("moe_router_activation_func", json!("softmax"));
    check_text("routed_scaling_factor", json!(0.0));
    check_text("num_expert_group", json!(8));
    check_text("topk_group", json!(4));
    check_text("topk_method", json!("greedy"));
    check_text("num_nextn_predict_layers", json!(1));
    check_text("tie_word_embeddings", json!(true));
    check_text("rope_scaling", json!({"type": "yarn"}));
    check("tie_word_embeddings", json!(true), "tie_word_embeddings");
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_allocated() {
    check_text("hidden_size", json!(0));
    check_text("hidden_size", json!(16_777_217));
    check_text("hidden_size", json!(7168.5));
    check_text("hidden_size", json!(7168.0));
    check_text("hidden_size", json!("7168"));
    check_text("hidden_size", json!(u64::MAX));
    check_text("vocab_size", json!(1e300));
    check_text("num_experts", json!(16_777_216));
    check_text("num_attention_heads", json!(0));
    check_text("linear_attn_config.num_heads", json!(16_777_216));
    check_text("num_shared_experts", json!(16_777_216));
    // What later code keeps or allocates, though each factor is a plausible width.
    let many: Vec<usize> = vec![1; 10_001];
    check_text("linear_attn_config.kda_layers", json!(many));
    for (key, value) in [("head_dim", 16_384), ("short_conv_kernel_size", 1025)] {
        let field = if key == "head_dim" { "num_heads" } else { key };
        let field = format!("text_config.linear_attn_config.{field}");
        check(&format!("text_config.linear_attn_config.{key}"), json!(value), &field);
    }
    let mut json = parse(K31);
    set(&mut json, "text_config.linear_attn_config.num_heads", json!(16_384));
    set(&mut json, "text_config.linear_attn_config.head_dim", json!(1024));
    assert_eq!(fields(&refused(&json, "KDA state")), ["text_config.linear_attn_config.num_heads"]);
    let mut json = parse(K31);
    set(&mut json, "text_config.linear_attn_config.num_heads", json!(1 << 20));
    set(&mut json, "text_config.linear_attn_config.head_dim", json!(16));
    set(&mut json, "text_config.linear_attn_config.short_conv_kernel_size", json!(1024));
    assert_eq!(fields(&refused(&json, "taps")), ["text_config.linear_attn_config.num_heads"]);
    let mut json = parse(K31);
    set(&mut json, "text_config.num_hidden_layers", json!(10_001));
    assert!(fields(&refused(&json, "10,001 layers")).contains(&"text_config.num_hidden_layers"));
    let mut json = parse(K31);
    set(&mut json, "text_config.num_attention_heads", json!(1_000_000));
    set(&mut json, "text_config.num_key_value_heads", json!(1_000_000));
    assert_eq!(fields(&refused(&json, "a million heads")), ["text_config.num_attention_heads"]);
}

#[test]
fn there_is_no_largest_number_of_experts_but_the_sane_one() {
    for (experts, topk) in [(896, 16), (1100, 40), (1, 1), (64, 64)] {
        let mut json = parse(K31);
        set(&mut json, "text_config.num_experts", json!(experts));
        set(&mut json, "text_config.num_experts_per_token", json!(topk));
        let moe = good(&json).model.moe;
        assert_eq!((moe.num_experts, moe.num_experts_per_token), (experts, topk));
    }
}

#[test]
fn experts_per_token_has_two_spellings() {
    let mut json = parse(K31);
    let value = remove(&mut json, "text_config.num_experts_per_token");
    set(&mut json, "text_config.num_experts_per_tok", value);
    let file = good(&json);
    assert_eq!((file.model.moe.num_experts_per_token, file.unknown_keys.len()), (16, 0));
    accepted("text_config.num_experts_per_tok", json!(16));
    check_text("num_experts_per_tok", json!(8));
}

#[test]
fn the_layer_map_is_a_partition() {
    let kda = "text_config.linear_attn_config.kda_layers";
    let full = "text_config.linear_attn_config.full_attn_layers";
    let edit = |path: &str, change: &dyn Fn(&mut Vec<Value>)| {
        // dsa_layers must follow, so that only the layer map is wrong.
        let mut json = parse(K3);
        let (map, key) = at(&mut json, path);
        change(map[&key].as_array_mut().expect("a list"));
        fields(&refused(&json, path)).iter().map(|f| (*f).to_owned()).collect::<Vec<_>>()
    };
    assert!(edit(kda, &|l| l[0] = json!(0)).contains(&kda.to_owned()), "0 is no layer");
    assert_eq!(edit(kda, &|l| l.push(json!(94))), [kda], "94 of 93");
    assert_eq!(edit(kda, &|l| l.push(json!(1))), [kda], "twice");
    assert_eq!(edit(full, &|l| l.push(json!(1))), [full], "in both lists");
    assert_eq!(edit(kda, &|l| _ = l.pop()), [kda], "in neither list");
    assert_eq!(edit(full, &|l| l[0] = json!("4")), [full], "no number");
    assert_eq!(edit(full, &|l| l[0] = json!(-4)), [full], "negative");
}

#[test]
fn dsa_config_has_aliases_and_optional_parts() {
    let read_dsa = |change: &dyn Fn(&mut Value)| {
        let mut json = parse(K31);
        change(&mut json);
        let dsa = good(&json).dsa.expect("read");
        (dsa.n_heads, dsa.head_dim, dsa.topk)
    };
    let rename = |from: &str, to: &str| {
        read_dsa(&|json| {
            let value = remove(json, &format!("text_config.dsa_config.{from}"));
            set(json, &format!("text_config.dsa_config.{to}"), value);
        })
    };
    let all = (Some(32), Some(128), 2048);
    for name in ["n_heads", "num_heads", "index_num_heads"] {
        assert_eq!(rename("index_n_heads", name), all);
    }
    assert_eq!(rename("index_head_dim", "head_dim"), all);
    assert_eq!(rename("index_topk", "topk"), all);
    assert_eq!(rename("index_topk", "top_k"), all);
    let without = |key: &str| read_dsa(&|json| _ = remove(json, &format!("text_config.dsa_config.{key}")));
    assert_eq!(without("index_n_heads"), (None, Some(128), 2048));
    assert_eq!(without("index_head_dim"), (Some(32), None, 2048));

    check_text("dsa_config.topk", json!(1024));
    check_text("dsa_config.index_topk", json!(0));
    check_text("dsa_config.index_topk", json!(16_777_217));
    check_text("dsa_config.index_topk", json!(u32::MAX));
    for alias in ["topk", "top_k"] {
        let mut json = parse(K31);
        remove(&mut json, "text_config.dsa_config.index_topk");
        set(&mut json, &format!("text_config.dsa_config.{alias}"), json!(u32::MAX));
        assert_eq!(fields(&refused(&json, alias)), [format!("text_config.dsa_config.{alias}")]);
    }
    assert_eq!(
        accepted("text_config.dsa_config.index_topk", json!(16_777_216)).dsa.expect("read").topk,
        1 << 24
    );
    check_text("dsa_config.index_n_heads", json!(131_073));
    check_text("dsa_config.index_rope_dim", json!(64));
    check_text("dsa_config.dsa_layers", json!([4, 8]));
    check_text("dsa_config.dsa_layers", json!([8, 4]));
    check_text("dsa_config.dsa_layers", json!([0]));
    check_text("dsa_config.dsa_layers", json!([94]));
    check("text_config.dsa_config", json!("yes"), "text_config.dsa_config");
    // A K3 wrapper is for the gate to judge, whatever the object holds.
    let mut json = parse(K3);
    set(&mut json, "text_config.dsa_config", json!({}));
    assert_eq!(good(&json).dsa, None);
}

#[test]
fn stop_tokens_add_up() {
    let eos = |root: Value, text: Value| {
        let mut json = parse(K3);
        set(&mut json, "eos_token_id", root);
        set(&mut json, "text_config.eos_token_id", text);
        good(&json).model.tokens.eos
    };
    assert_eq!(eos(json!(163_586), json!(163_585)), [163_586, 163_585]);
    assert_eq!(eos(json!([163_586, 163_585]), json!([163_585, 7])), [163_586, 163_585, 7]);
    assert_eq!(eos(Value::Null, json!(1)), [1]);
    check("eos_token_id", json!(163_840), "eos_token_id");
    check("eos_token_id", json!([1, "2"]), "eos_token_id");
    check("text_config.eos_token_id", json!(-1), "text_config.eos_token_id");
    check("bos_token_id", json!(true), "bos_token_id");
}
