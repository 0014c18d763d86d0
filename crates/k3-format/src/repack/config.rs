//! The config of a repacked tree (`docs/nvfp4.md` 8): that of the source, with another quantization.

use serde_json::{Map, Value, json};

use crate::ModelConfig;
use crate::names::LAYER_PREFIX;

use super::dense_config::{self, DenseGroup, spellings};
use super::plan::Plan;
use super::raw_object::RawObject;
use super::{ExpertTarget, Naming};

const QUANTIZATION: &str = "quantization_config";
const TEXT: &str = "text_config";

/// Modules that are not quantized, besides those that the source lists: generic readers go by the list, and readers
/// of the source know these without it.
const ALSO_IGNORED: [&str; 4] = [
    "re:.*routed_expert_(down|up)_proj.*",
    "re:.*block_sparse_moe\\.gate$",
    "re:.*mlp\\.gate$",
    "re:.*_res_proj.*",
];

/// The same for readers that take shell patterns.
const EXCLUDED: [&str; 15] = [
    "lm_head",
    "*lm_head*",
    "*embed_tokens*",
    "*self_attn*",
    "*shared_experts*",
    "*routed_expert_down_proj*",
    "*routed_expert_up_proj*",
    "*block_sparse_moe.gate",
    "*mlp.gate",
    "*mlp.gate_proj*",
    "*mlp.up_proj*",
    "*mlp.down_proj*",
    "*_res_proj*",
    "*vision_tower*",
    "*mm_projector*",
];

/// The config files of a tree.
pub(super) struct Rewritten {
    /// `config.json`.
    pub(super) config: Vec<u8>,
    /// `hf_quant_config.json`, which belongs to ModelOpt's names.
    pub(super) hf_quant_config: Vec<u8>,
}

/// Rewrites the text of the source's `config.json`; `Err` says what of it is not as it must be.
pub(super) fn rewrite(source: &[u8], plan: &Plan, model: &ModelConfig) -> Result<Rewritten, String> {
    let text = std::str::from_utf8(source).map_err(|e| e.to_string())?;
    let parse = |text: &str| RawObject::parse(text).map_err(|e| e.to_string());
    let mut root = parse(text.trim_start_matches('\u{feff}'))?;
    let mut language = parse(root.get(TEXT).ok_or("it has no text_config")?)?;
    let found =
        language.get(QUANTIZATION).or(root.get(QUANTIZATION)).ok_or("it has no quantization_config")?;
    let found = found.to_owned();
    let ignored = || -> Result<Vec<Value>, String> {
        let value: Value = serde_json::from_str(&found).map_err(|e| e.to_string())?;
        Ok(value.get("ignore").and_then(Value::as_array).cloned().unwrap_or_default())
    };
    let mut hf_quant_config = Vec::new();
    let dense = DenseGroup::of(plan);
    match (plan.recipe.experts, plan.recipe.names) {
        (ExpertTarget::Mxfp4, _) if dense.is_none() => {
            root.set(QUANTIZATION, found.clone());
            language.set(QUANTIZATION, found);
        }
        (ExpertTarget::Nvfp4, Naming::ModelOpt) => {
            let object = model_opt(model, dense.as_ref());
            root.set(QUANTIZATION, pretty(&object, 2));
            language.remove(QUANTIZATION);
            // Without a version: a tree is the same whatever release makes it.
            let producer = json!({ "name": "k3" });
            let file = json!({ "producer": producer, "quantization": object });
            hf_quant_config = (pretty(&file, 0) + "\n").into_bytes();
        }
        (experts, _) => {
            let mut object = match experts {
                ExpertTarget::Nvfp4 => compressed_tensors(ignored()?),
                ExpertTarget::Mxfp4 => serde_json::from_str(&found).map_err(|e| e.to_string())?,
            };
            if let Some(dense) = dense {
                dense.add_to(&mut object)?;
            }
            root.set(QUANTIZATION, pretty(&object, 2));
            language.set(QUANTIZATION, pretty(&object, 4));
        }
    }
    root.set(TEXT, language.print(2));
    Ok(Rewritten { config: (root.print(0) + "\n").into_bytes(), hf_quant_config })
}

/// Weight-only NVFP4 of compressed-tensors.
fn compressed_tensors(mut ignore: Vec<Value>) -> Value {
    for pattern in ALSO_IGNORED {
        if !ignore.iter().any(|entry| entry == pattern) {
            ignore.push(pattern.into());
        }
    }
    json!({
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": ["Linear"],
                "input_activations": null,
                "output_activations": null,
                "weights": dense_config::nvfp4_weights(),
            },
        },
        "ignore": ignore,
    })
}

/// ModelOpt's mixed NVFP4: every expert bank by name, under every spelling that a loader may ask for.
fn model_opt(model: &ModelConfig, dense: Option<&DenseGroup>) -> Value {
    let mut layers = Map::new();
    for layer in (0..model.num_hidden_layers()).filter(|&layer| model.is_moe(layer)) {
        for name in spellings(&format!("{LAYER_PREFIX}{layer}.block_sparse_moe.experts")) {
            layers.insert(name, json!({ "quant_algo": "NVFP4", "group_size": k3_quant::NV_BLOCK }));
        }
    }
    let mut excluded: Vec<String> = EXCLUDED.map(str::to_owned).into();
    if let Some(dense) = dense {
        for module in &dense.modules {
            for name in spellings(module) {
                layers.insert(name, json!({ "quant_algo": "NVFP4", "group_size": k3_quant::NV_BLOCK }));
            }
        }
        excluded = dense_config::EXCLUDED.map(str::to_owned).into();
        excluded.extend(dense.others.iter().flat_map(|module| spellings(module)));
    }
    json!({
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": null,
        "quantized_layers": layers,
        "exclude_modules": excluded,
    })
}

/// As text, keys in alphabetical order whatever the order of `serde_json`'s maps in this build; lines after the first
/// begin with `indent` spaces more.
fn pretty(value: &Value, indent: usize) -> String {
    let text = serde_json::to_string_pretty(&sorted(value)).unwrap_or_default();
    text.replace('\n', &format!("\n{:1$}", "", indent))
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut members: Vec<_> = map.iter().collect();
            members.sort_by_key(|(key, _)| *key);
            Value::Object(members.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
        }
        Value::Array(list) => Value::Array(list.iter().map(sorted).collect()),
        other => other.clone(),
    }
}
