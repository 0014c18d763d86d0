//! Every field of `config.json` that the engine reads, and how each is refused.

mod generation;
mod presence;
mod quantization;
mod values;

use std::path::Path;

use k3_format::{AttentionKind, ConfigError, ConfigFile, Error, ExpertFormat, GateError, Variant};
use serde_json::{Value, json};

const K3: &str = include_str!("../../../../fixtures/configs/kimi-k3.config.json");
const K31: &str = include_str!("../../../../fixtures/configs/kimi-k31.config.json");

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

#[test]
fn the_published_configs_are_read_without_a_warning() {
    for (text, variant) in [(K3, Variant::K3), (K31, Variant::K31)] {
        let file = good(&parse(text));
        assert_eq!(file.unknown_keys, [""; 0]);
        assert_eq!(file.dsa.is_some(), variant == Variant::K31);
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
