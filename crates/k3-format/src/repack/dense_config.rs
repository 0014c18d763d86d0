//! What the config of a repacked tree says about quantized matrices outside the routed experts
//! (`docs/dense-formats.md` 4).

use serde_json::{Value, json};

use crate::config::ModulePattern;
use crate::names::LAYER_PREFIX;

use super::DenseFormat;
use super::dense::module;
use super::plan::{DensePlan, Plan};

/// Patterns of the modules that are quantized.
const TARGETS: [&str; 4] = [
    "re:.*self_attn\\.(q|k|v|g|o|q_a|q_b)_proj$",
    "re:.*self_attn\\.kv_a_proj_with_mqa$",
    "re:.*(mlp|shared_experts)\\.(gate|up|down)_proj$",
    "re:.*routed_expert_(down|up)_proj$",
];
/// What is not quantized of the modules that a list without quantized matrices names with them.
const STILL_IGNORED: [&str; 5] = [
    "re:.*self_attn\\.(f_a|f_b|b|kv_b)_proj$",
    "re:.*self_attn\\.indexer.*",
    "re:.*block_sparse_moe\\.gate$",
    "re:.*mlp\\.gate$",
    "re:.*_res_proj.*",
];
/// The same for readers that take shell patterns.
pub(super) const EXCLUDED: [&str; 13] = [
    "lm_head",
    "*lm_head*",
    "*embed_tokens*",
    "*self_attn.f_a_proj",
    "*self_attn.f_b_proj",
    "*self_attn.b_proj",
    "*self_attn.kv_b_proj",
    "*self_attn.indexer*",
    "*block_sparse_moe.gate",
    "*mlp.gate",
    "*_res_proj*",
    "*vision_tower*",
    "*mm_projector*",
];

/// The quantized matrices of a plan.
pub(super) struct DenseGroup {
    format: DenseFormat,
    /// Their modules.
    pub(super) modules: Vec<String>,
    /// Modules of the same kind that are not quantized.
    pub(super) others: Vec<String>,
}

impl DenseGroup {
    /// `None` if nothing is quantized.
    pub(super) fn of(plan: &Plan) -> Option<Self> {
        let (quantized, others) = plan.quantized();
        let modules = |list: Vec<&DensePlan>| -> Vec<String> {
            list.into_iter().map(|dense| module(&dense.source).to_owned()).collect()
        };
        let (modules, others) = (modules(quantized), modules(others));
        (!modules.is_empty()).then_some(Self { format: plan.recipe.dense, modules, others })
    }

    /// Adds the group to a config of compressed-tensors, and takes its modules off the list of exceptions.
    pub(super) fn add_to(&self, config: &mut Value) -> Result<(), String> {
        let (name, weights) = match self.format {
            DenseFormat::Bf16 => return Ok(()),
            DenseFormat::Nvfp4 => ("nvfp4-pack-quantized", nvfp4_weights()),
            DenseFormat::Int8 => ("int-quantized", integers(8, "channel", None)),
            DenseFormat::Int4 => ("pack-quantized", integers(4, "group", Some(k3_quant::INT4_GROUP))),
        };
        let group = json!({
            "format": name, "targets": TARGETS, "weights": weights,
            "input_activations": null, "output_activations": null,
        });
        if config["format"] != name {
            config["format"] = "mixed-precision".into();
        }
        let groups = config.get_mut("config_groups").and_then(Value::as_object_mut);
        let groups = groups.ok_or("its quantization_config has no config_groups")?;
        // Of so many names one is free.
        let free =
            (1..=groups.len() + 1).map(|n| format!("group_{n}")).find(|name| !groups.contains_key(name));
        groups.extend(free.map(|name| (name, group)));

        let mut ignore = config.get("ignore").and_then(Value::as_array).cloned().unwrap_or_default();
        ignore.retain(|entry| !entry.as_str().is_some_and(|entry| self.names_one(entry)));
        let still = STILL_IGNORED.iter().copied().chain(self.others.iter().map(String::as_str));
        for entry in still.map(Value::from) {
            if !ignore.contains(&entry) {
                ignore.push(entry);
            }
        }
        config["ignore"] = ignore.into();
        Ok(())
    }

    /// Whether an entry of the list of exceptions stands for a module that is quantized.
    fn names_one(&self, entry: &str) -> bool {
        let Ok(mut pattern) = ModulePattern::new(entry) else { return false };
        let mut matches = |name: String| pattern.matches(&name).unwrap_or(false);
        self.modules.iter().any(|module| spellings(module).into_iter().any(&mut matches))
    }
}

/// What compressed-tensors says of matrices in NVFP4, experts and others alike.
pub(super) fn nvfp4_weights() -> Value {
    json!({
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": k3_quant::NV_BLOCK,
        "symmetric": true, "dynamic": false, "actorder": null, "block_structure": null,
        "observer": "minmax", "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    })
}

fn integers(bits: usize, strategy: &str, group_size: Option<usize>) -> Value {
    json!({
        "num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size,
        "symmetric": true, "dynamic": false, "actorder": null, "block_structure": null,
        "observer": "minmax", "observer_kwargs": {},
    })
}

/// The names under which loaders may look for a module of a layer.
pub(super) fn spellings(module: &str) -> Vec<String> {
    let Some(rest) = module.strip_prefix(LAYER_PREFIX) else { return vec![module.to_owned()] };
    let mut names = Vec::new();
    for prefix in [LAYER_PREFIX, "model.layers.", "layers."] {
        names.push(format!("{prefix}{rest}"));
        if rest.contains(".block_sparse_moe.") {
            names.push(format!("{prefix}{}", rest.replace(".block_sparse_moe.", ".mlp.")));
        }
    }
    names
}
