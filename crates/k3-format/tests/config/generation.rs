//! `generation_config.json`.

use std::path::Path;

use k3_format::{Error, GenerationConfig};
use serde_json::{Value, json};

use crate::fields;

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
