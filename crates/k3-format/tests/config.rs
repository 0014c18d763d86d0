//! Every field of `config.json` that the engine reads, and how each is refused.

use std::path::Path;

use k3_format::{
    AttentionKind, ConfigError, ConfigFile, Error, ExpertFormat, GateError, GenerationConfig, Variant, gate,
};
use serde_json::{Value, json};

const K3: &str = include_str!("../../../fixtures/configs/kimi-k3.config.json");
const K31: &str = include_str!("../../../fixtures/configs/kimi-k31.config.json");

fn parse(text: &str) -> Value {
    serde_json::from_str(text).expect("the fixture is JSON")
}

/// The slot of a dotted path; its parent must exist.
fn at<'a>(json: &'a mut Value, path: &str) -> (&'a mut serde_json::Map<String, Value>, String) {
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().expect("a path has a key");
    let parent = keys.into_iter().fold(json, |v, key| &mut v[key]);
    (parent.as_object_mut().expect("the parent is an object"), last.to_owned())
}

fn set(json: &mut Value, path: &str, value: Value) {
    let (map, key) = at(json, path);
    map.insert(key, value);
}

fn remove(json: &mut Value, path: &str) -> Value {
    let (map, key) = at(json, path);
    map.remove(&key).unwrap_or_else(|| panic!("{path} is not in the config"))
}

fn read(json: &Value) -> Result<ConfigFile, Error> {
    ConfigFile::check(json, Path::new("config.json"))
}

fn good(json: &Value) -> ConfigFile {
    read(json).unwrap_or_else(|e| panic!("{e}"))
}

fn refused(json: &Value, case: &str) -> ConfigError {
    match read(json) {
        Err(Error::Config(e)) => e,
        other => panic!("{case}: expected a config error, got {other:?}"),
    }
}

fn fields(error: &ConfigError) -> Vec<&str> {
    error.problems.iter().map(|p| p.field.as_str()).collect()
}

/// Setting `path` of the K3.1 config to `value` is refused, for the field `field` and no other.
fn check(path: &str, value: Value, field: &str) {
    let mut json = parse(K31);
    let case = format!("{path} = {value}");
    set(&mut json, path, value);
    let error = refused(&json, &case);
    assert!(!error.problems.is_empty(), "{case}: no problem");
    assert!(fields(&error).iter().all(|f| *f == field), "{case}: expected {field}, got {error}");
    let text = error.to_string();
    assert!(text.contains(field) && text.contains("config.json"), "{case}: {text}");
}

/// The same in `text_config`, where the field reported is the one that was set.
fn check_text(key: &str, value: Value) {
    let path = format!("text_config.{key}");
    check(&path, value, &path);
}

/// Setting it is fine.
fn accepted(path: &str, value: Value) -> ConfigFile {
    let mut json = parse(K31);
    set(&mut json, path, value);
    good(&json)
}

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
fn the_published_configs_are_read_without_a_warning() {
    for (text, variant) in [(K3, Variant::K3), (K31, Variant::K31)] {
        let file = good(&parse(text));
        assert_eq!(file.unknown_keys, [""; 0]);
        assert_eq!(gate::wrapper(&file.markers), Ok(variant));
        assert_eq!(file.markers.dsa_config, variant == Variant::K31);
        assert_eq!(file.quantization.format, ExpertFormat::Mxfp4);
        let model = &file.model;
        assert_eq!((model.hidden_size, model.vocab_size, model.num_hidden_layers()), (7168, 163_840, 93));
        assert_eq!((model.rms_norm_eps, model.activation_situ_beta), (1e-5, 4.0));
        assert_eq!((model.activation_situ_linear_beta, model.attn_res_block_size), (25.0, 12));
        assert_eq!((model.first_k_dense_replace, model.intermediate_size), (1, 33_792));
        assert_eq!(model.max_position_embeddings, 1_048_576);
        assert_eq!((model.mla.num_heads, model.mla.q_lora_rank, model.mla.kv_lora_rank), (96, 1536, 512));
        assert_eq!(
            (model.mla.qk_nope_head_dim, model.mla.qk_rope_head_dim, model.mla.v_head_dim),
            (128, 64, 128)
        );
        assert_eq!((model.kda.num_heads, model.kda.head_dim, model.kda.short_conv_kernel_size), (96, 128, 4));
        assert_eq!(model.kda.gate_lower_bound, -5.0);
        assert_eq!((model.moe.num_experts, model.moe.num_experts_per_token), (896, 16));
        assert_eq!((model.moe.num_shared_experts, model.moe.moe_intermediate_size), (2, 3072));
        assert_eq!((model.moe.routed_expert_hidden_size, model.moe.routed_scaling_factor), (3584, 1.0));
        assert!(model.moe.moe_renormalize);
        assert_eq!((model.tokens.bos, model.tokens.pad), (Some(163_584), Some(163_839)));
        assert_eq!((&model.tokens.eos[..], model.tokens.media_placeholder), (&[163_586][..], Some(163_605)));
        assert_eq!(model.indexer, None);
    }
    let dsa = good(&parse(K31)).dsa.expect("the K3.1 config has one");
    assert_eq!((dsa.n_heads, dsa.head_dim, dsa.topk), (Some(32), Some(128), 2048));
}

#[test]
fn full_attention_is_where_the_lists_say_counted_from_1() {
    let model = good(&parse(K3)).model;
    let full: Vec<usize> = (0..93).filter(|&l| model.layers[l] == AttentionKind::FullAttention).collect();
    let expected =
        [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75, 79, 83, 87, 91, 92];
    assert_eq!(full, expected);
    assert!(!model.is_moe(0) && model.is_moe(1) && model.is_moe(92));
}

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

#[test]
fn all_problems_come_at_once() {
    let mut json = parse(K31);
    remove(&mut json, "text_config.hidden_size");
    set(&mut json, "text_config.hidden_act", json!("gelu"));
    set(&mut json, "text_config.linear_attn_config.head_dim", json!("128"));
    set(&mut json, "text_config.dsa_config.index_rope_dim", json!(64));
    set(&mut json, "eos_token_id", json!("stop"));
    let error = refused(&json, "five problems");
    let mut found = fields(&error);
    found.sort_unstable();
    let expected = [
        "eos_token_id",
        "text_config.dsa_config.index_rope_dim",
        "text_config.hidden_act",
        "text_config.hidden_size",
        "text_config.linear_attn_config.head_dim",
    ];
    assert_eq!(found, expected);
    let text = error.to_string();
    assert!(text.contains("expected \"situ\", found \"gelu\""), "{text}");
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn an_unknown_key_is_named_once_and_is_no_error() {
    let file = accepted("text_config.rope_theta", json!(50_000.0));
    assert_eq!(file.unknown_keys, ["text_config.rope_theta"]);
    let file = accepted("text_config.linear_attn_config.window", json!(1));
    assert_eq!(file.unknown_keys, ["text_config.linear_attn_config.window"]);
    assert_eq!(accepted("anything", json!(1)).unknown_keys, [""; 0]);
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
fn quantization_must_be_one_that_the_engine_reads() {
    let q = "text_config.quantization_config";
    let w = format!("{q}.config_groups.group_0.weights");
    for (path, value) in [
        (format!("{q}.quant_method"), json!("gptq")),
        (format!("{q}.quant_method"), json!("modelopt")),
        (format!("{q}.format"), json!("int-quantized")),
        (format!("{w}.num_bits"), json!(8)),
        (format!("{w}.type"), json!("int")),
        (format!("{w}.group_size"), json!(16)),
        (format!("{w}.symmetric"), json!(false)),
    ] {
        check(&path, value, &path);
    }
    check(&format!("{q}.config_groups"), json!({}), &format!("{q}.config_groups.group_0"));
    check("quantization_config", json!({"quant_method": "compressed-tensors"}), "quantization_config");
    // The same object at both places is what a repacked tree has.
    let same = parse(K31)["text_config"]["quantization_config"].clone();
    assert_eq!(accepted("quantization_config", same.clone()).quantization.format, ExpertFormat::Mxfp4);
    let mut json = parse(K31);
    remove(&mut json, q);
    set(&mut json, "quantization_config", same);
    assert_eq!(good(&json).quantization.format, ExpertFormat::Mxfp4);
}

#[test]
fn both_nvfp4_conventions_are_read() {
    let mut json = parse(K31);
    let q = "text_config.quantization_config";
    set(&mut json, &format!("{q}.format"), json!("nvfp4-pack-quantized"));
    let group = format!("{q}.config_groups.group_0.format");
    assert_eq!(fields(&refused(&json, "two formats")), [group.as_str()]);
    set(&mut json, &group, json!("nvfp4-pack-quantized"));
    assert_eq!(
        fields(&refused(&json, "group 32")),
        [format!("{q}.config_groups.group_0.weights.group_size")]
    );
    set(&mut json, &format!("{q}.config_groups.group_0.weights.group_size"), json!(16));
    // Groups of 16 allow widths that MXFP4 does not.
    set(&mut json, "text_config.moe_intermediate_size", json!(3088));
    let file = good(&json);
    assert_eq!(file.quantization.format, ExpertFormat::Nvfp4CompressedTensors);
    assert_eq!(file.quantization.expert_layers, None);
    set(&mut json, &format!("{q}.config_groups.group_0.input_activations"), json!({"num_bits": 4}));
    assert!(good(&json).quantization.quantizes_activations);

    let model_opt = |layers: Value| {
        let mut json = parse(K31);
        remove(&mut json, q);
        let object = json!({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers});
        set(&mut json, "quantization_config", object);
        json
    };
    let nvfp4 = json!({"quant_algo": "NVFP4", "group_size": 16});
    let file = good(&model_opt(json!({
        "language_model.model.layers.1.block_sparse_moe.experts": nvfp4,
        "model.layers.2.mlp.experts": nvfp4,
        "model.layers.2.mlp.shared_experts": {"quant_algo": "FP8"},
    })));
    assert_eq!(file.quantization.format, ExpertFormat::Nvfp4ModelOpt);
    assert_eq!(file.quantization.expert_layers, Some(vec![1, 2]));
    let path = "quantization_config.quantized_layers";
    assert_eq!(fields(&refused(&model_opt(json!({})), "no layers")), [path]);
    let fp8 = model_opt(json!({"model.layers.1.mlp.experts": {"quant_algo": "FP8"}}));
    assert_eq!(fields(&refused(&fp8, "FP8")), [format!("{path}.model.layers.1.mlp.experts")]);
}

#[test]
fn groups_of_several_formats_are_mixed_precision() {
    let q = "text_config.quantization_config";
    let groups = format!("{q}.config_groups");
    let with = |path: &str, value: Value| {
        let mut json = parse(K31);
        set(&mut json, &format!("{q}.format"), json!("mixed-precision"));
        let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
        let group = json!({"format": "int-quantized", "targets": ["re:.*mlp.*"], "weights": weights});
        set(&mut json, &format!("{groups}.group_1"), group);
        set(&mut json, path, value);
        json
    };
    let read = good(&with("text_config.unused", json!(null))).quantization;
    assert_eq!((read.format, read.groups.len()), (ExpertFormat::Mxfp4, 2));
    assert!(read.entry.contains("group_0.format"), "{}", read.entry);
    assert_eq!(read.groups[1].targets, ["re:.*mlp.*"]);
    // A group that names the experts goes before that of all.
    let named = with(&format!("{groups}.group_1.targets"), json!(["re:.*experts\\..*"]));
    assert_eq!(fields(&refused(&named, "INT8 experts")), [format!("{groups}.group_0")]);
    for (path, value, field) in [
        ("group_0.format", json!("int-quantized"), "group_0.weights.num_bits"),
        ("group_0.format", json!("naive-quantized"), "group_0.format"),
        ("group_0.format", json!(null), "group_0.format"),
        ("group_1.weights.num_bits", json!(4), "group_1.weights.num_bits"),
        ("group_1.weights.strategy", json!("group"), "group_1.weights.strategy"),
        ("group_1.weights.symmetric", json!(false), "group_1.weights.symmetric"),
        ("group_1.weights", json!(null), "group_1.weights"),
        ("group_1.targets", json!("Linear"), "group_1.targets"),
    ] {
        let error = refused(&with(&format!("{groups}.{path}"), value), path);
        let field = format!("{groups}.{field}");
        assert!(fields(&error).contains(&field.as_str()), "{path}: {error}");
    }
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
    let file = good(&json);
    assert!(file.dsa.is_none() && file.markers.dsa_config);
}

#[test]
fn the_wrapper_must_be_one_of_two() {
    let gate = |change: &dyn Fn(&mut Value)| {
        let mut json = parse(K3);
        change(&mut json);
        match read(&json) {
            Err(Error::Gate(e)) => e,
            other => panic!("expected a gate error, got {other:?}"),
        }
    };
    let other =
        |found: Option<&str>| GateError::UnsupportedModelType { model_type: found.map(str::to_owned) };
    assert_eq!(gate(&|j| set(j, "model_type", json!("kimi_k2"))), other(Some("kimi_k2")));
    assert_eq!(gate(&|j| set(j, "model_type", json!(3))), other(Some("3")));
    assert_eq!(gate(&|j| _ = remove(j, "model_type")), other(None));
    let bare = gate(&|j| *j = j["text_config"].clone());
    assert_eq!(bare, GateError::NoTextConfig { model_type: Some("kimi_linear".to_owned()) });
    let null = gate(&|j| set(j, "text_config", Value::Null));
    assert_eq!(null, GateError::NoTextConfig { model_type: Some("kimi_k3".to_owned()) });
    assert_eq!(gate(&|j| *j = json!([])), GateError::NoTextConfig { model_type: None });
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

#[test]
fn generation_config_is_lenient_about_absence_and_strict_about_types() {
    let read = |json: Value| GenerationConfig::check(&json, 163_840, Path::new("generation_config.json"));
    let of = |json: Value| read(json).unwrap_or_else(|e| panic!("{e}"));
    let release = of(json!({"max_length": 1_048_576, "eos_token_id": 163_586}));
    assert_eq!(release, GenerationConfig { eos: vec![163_586], ..GenerationConfig::default() });
    assert_eq!(of(json!({})), GenerationConfig::default());
    assert_eq!(of(json!({"eos_token_id": null, "top_k": null})), GenerationConfig::default());
    let full = of(json!({"eos_token_id": [3, 2, 3], "temperature": 0, "top_p": 0.95, "top_k": 40}));
    let expected =
        GenerationConfig { eos: vec![3, 2], temperature: Some(0.0), top_p: Some(0.95), top_k: Some(40) };
    assert_eq!(full, expected);
    for (json, field) in [
        (json!({"eos_token_id": "163586"}), "eos_token_id"),
        (json!({"eos_token_id": 163_840}), "eos_token_id"),
        (json!({"temperature": "1"}), "temperature"),
        (json!({"temperature": -1.0}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!([]), "(the file)"),
    ] {
        match read(json.clone()) {
            Err(Error::Config(e)) => assert_eq!(fields(&e), [field], "{json}"),
            other => panic!("{json}: {other:?}"),
        }
    }
}
