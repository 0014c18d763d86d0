//! `quantization_config`: what the config says about the routed experts (`docs/checkpoint.md` 6.2, `docs/nvfp4.md`
//! 7 and 8) and about other matrices (`docs/dense-formats.md` 4).
//!
//! It decides nothing. How a matrix is stored follows from its tensors; what is read here is compared with that.

use std::fmt;

use k3_quant::WeightFormat;
use serde_json::{Map, Value};

use super::fields::{Fields, show};
use super::module_pattern::ModulePattern;

const KEY: &str = "quantization_config";

/// How the routed experts of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertFormat {
    /// `weight_packed`, `weight_scale` U8.
    Mxfp4,
    /// NVFP4 of compressed-tensors: `weight_packed`, `weight_scale` F8_E4M3, `weight_global_scale` (a divisor).
    Nvfp4CompressedTensors,
    /// NVFP4 of ModelOpt: `weight`, `weight_scale` F8_E4M3, `weight_scale_2` (a factor).
    Nvfp4ModelOpt,
}

impl ExpertFormat {
    /// Columns that share a block scale.
    pub fn group_size(self) -> usize {
        match self {
            Self::Mxfp4 => k3_quant::MX_BLOCK,
            Self::Nvfp4CompressedTensors | Self::Nvfp4ModelOpt => k3_quant::NV_BLOCK,
        }
    }
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4CompressedTensors => "NVFP4 (compressed-tensors)",
            Self::Nvfp4ModelOpt => "NVFP4 (ModelOpt)",
        })
    }
}

/// What `quantization_config` says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizationConfig {
    /// The format of the routed experts.
    pub format: ExpertFormat,
    /// Path of the entry that says so, for messages.
    pub entry: String,
    /// Modules that the config lists as not quantized, as written there.
    pub ignore: Vec<String>,
    /// Layers whose experts the config names, when it names them one by one (ModelOpt); `None` when one entry
    /// covers all.
    pub expert_layers: Option<Vec<usize>>,
    /// Whether the config also quantizes activations, which this engine does not.
    pub quantizes_activations: bool,
    /// Everything that the config says is quantized, routed experts included.
    pub groups: Vec<QuantizationGroup>,
}

/// Modules that are said to be quantized in one way.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizationGroup {
    /// Path of the entry that says how, for messages.
    pub entry: String,
    /// The format; `None` for one that this engine does not read.
    pub format: Option<WeightFormat>,
    /// Names, patterns (`re:` before them) and classes of modules, as written there.
    pub targets: Vec<String>,
}

/// A target that means every matrix that no other target names.
pub(crate) const EVERY_LINEAR: &str = "Linear";
/// A module that every model with routed experts has, or would have.
const SOME_EXPERT: &str = "language_model.model.layers.1.block_sparse_moe.experts.0.w1";

/// Reads the object at the root and in `text_config`; both present must be equal.
pub(super) fn read<'a>(root: &mut Fields<'a>, text: &mut Fields<'a>) -> Option<QuantizationConfig> {
    let at_root = root.get_optional(KEY);
    let in_text = text.get_optional(KEY);
    if let (Some(a), Some(b)) = (at_root, in_text)
        && a != b
    {
        let reason = "two quantization configs that differ: it is unclear which one the tensors follow";
        root.problem(KEY, "the same object as text_config.quantization_config", Some(a), reason);
        return None;
    }
    let (fields, value) = match (in_text, at_root) {
        (Some(value), _) => (text, value),
        (None, Some(value)) => (root, value),
        (None, None) => {
            text.problem(KEY, "an object", None, "how the routed experts are stored");
            return None;
        }
    };
    let Some(map) = value.as_object() else {
        fields.problem(KEY, "an object", Some(value), "how the routed experts are stored");
        return None;
    };
    let mut inner = Fields::new(&fields.path(KEY), map);
    let config = read_object(&mut inner, map);
    fields.absorb(inner.into_problems());
    config
}

fn read_object(fields: &mut Fields<'_>, map: &Map<String, Value>) -> Option<QuantizationConfig> {
    let method = fields.get("quant_method");
    match method.and_then(Value::as_str) {
        Some("compressed-tensors") => compressed_tensors(fields, map),
        Some("modelopt_mixed") => model_opt(fields),
        _ => {
            let reason = "supported are compressed-tensors MXFP4 and NVFP4 and ModelOpt's mixed NVFP4; with plain \
                          \"modelopt\" the experts of a mixed tree would be read as unquantized";
            fields.problem("quant_method", "\"compressed-tensors\" or \"modelopt_mixed\"", method, reason);
            None
        }
    }
}

fn compressed_tensors(fields: &mut Fields<'_>, map: &Map<String, Value>) -> Option<QuantizationConfig> {
    /// Of the whole tree, when its groups differ.
    const MIXED: &str = "mixed-precision";
    let format_value = fields.get("format");
    let overall = match format_value.and_then(Value::as_str) {
        Some(MIXED) => None,
        Some(name @ ("mxfp4-pack-quantized" | "nvfp4-pack-quantized")) => Some(name),
        _ => {
            let expected = "\"mxfp4-pack-quantized\", \"nvfp4-pack-quantized\" or \"mixed-precision\"";
            fields.problem("format", expected, format_value, "how the routed experts are stored");
            return None;
        }
    };
    let groups_reason = "the groups say how the routed experts and other matrices are stored";
    let mut groups = fields.object("config_groups", groups_reason)?;
    let names: Vec<&String> =
        map.get("config_groups").and_then(Value::as_object).into_iter().flat_map(Map::keys).collect();
    if names.is_empty() {
        groups.problem("group_0", "an object", None, groups_reason);
    }
    let mut quantizes_activations = false;
    let mut read = Vec::new();
    for name in names {
        let value = map.get("config_groups").and_then(|g| g.get(name));
        let Some(object) = value.and_then(Value::as_object) else {
            groups.problem(name, "an object", value, groups_reason);
            continue;
        };
        quantizes_activations |= object.get("input_activations").is_some_and(|v| !v.is_null());
        let mut group = Fields::new(&groups.path(name), object);
        read.extend(compressed_group(&mut group, overall, (&fields.path("format"), format_value)));
        groups.absorb(group.into_problems());
    }
    let experts = experts_group(&read);
    if experts.is_none() && !read.is_empty() {
        let expected = "a group of format mxfp4-pack-quantized or nvfp4-pack-quantized whose targets are \"Linear\" or \
                        the routed experts";
        groups.problem("group_0", expected, None, "routed experts are always quantized");
    }
    let problems = groups.into_problems();
    let good = problems.is_empty();
    fields.absorb(problems);
    let ignore = string_list(fields, "ignore", "modules that are not quantized");
    let (format, group) = experts.filter(|_| good)?;
    Some(QuantizationConfig {
        format,
        entry: read[group].entry.clone(),
        ignore,
        expert_layers: None,
        quantizes_activations,
        groups: read,
    })
}

/// The format of the routed experts and the position of the group that says so: one that names them, or else the one of
/// all matrices.
fn experts_group(groups: &[QuantizationGroup]) -> Option<(ExpertFormat, usize)> {
    let names_them = |target: &String| {
        target != EVERY_LINEAR
            && ModulePattern::new(target).is_ok_and(|mut p| p.speaks_of_experts(SOME_EXPERT).unwrap_or(false))
    };
    let find = |wanted: &dyn Fn(&String) -> bool| groups.iter().position(|g| g.targets.iter().any(wanted));
    let group = find(&names_them).or_else(|| find(&|target| target == EVERY_LINEAR))?;
    match groups[group].format {
        Some(WeightFormat::Mxfp4) => Some((ExpertFormat::Mxfp4, group)),
        Some(WeightFormat::Nvfp4) => Some((ExpertFormat::Nvfp4CompressedTensors, group)),
        _ => None,
    }
}

/// A group with a `format` of its own, or that of the whole tree.
fn compressed_group(
    group: &mut Fields<'_>,
    overall: Option<&str>,
    (overall_path, overall_value): (&str, Option<&Value>),
) -> Option<QuantizationGroup> {
    let own = group.get_optional("format");
    let (path, value) = match own {
        Some(own) if overall.is_none() => (group.path("format"), Some(own)),
        _ => (overall_path.to_owned(), overall_value),
    };
    let name = own.map_or(overall, Value::as_str);
    let Some(format) = name.and_then(compressed_format) else {
        let expected =
            "\"mxfp4-pack-quantized\", \"nvfp4-pack-quantized\", \"int-quantized\" or \"pack-quantized\"";
        group.problem("format", expected, own, "how the matrices of the group are stored");
        return None;
    };
    if overall.is_some() && overall != name {
        let expected = format!("{}, as {overall_path} says for all groups", show(overall_value));
        group.problem(
            "format",
            expected,
            own,
            "groups of different formats are \"mixed-precision\" together",
        );
        return None;
    }
    let float = matches!(format, WeightFormat::Mxfp4 | WeightFormat::Nvfp4);
    let mut weights = group.object("weights", "how the matrices of the group are stored")?;
    weights.only(
        "num_bits",
        if format == WeightFormat::Int8 { 8 } else { 4 },
        "bits of a code in this format",
    );
    weights.only("type", if float { "float" } else { "int" }, "what a code is in this format");
    if format == WeightFormat::Int8 {
        weights.only("strategy", "channel", "a scale belongs to a row in this format");
    } else {
        weights.only("group_size", format.column_block(), "columns that share a scale in this format");
    }
    weights.only("symmetric", true, "zero points are not implemented");
    let problems = weights.into_problems();
    let good = problems.is_empty();
    group.absorb(problems);
    let mut targets = string_list(group, "targets", "modules that are quantized");
    if targets.is_empty() {
        targets.push(EVERY_LINEAR.to_owned());
    }
    let entry = format!("{path} = {}", show(value));
    good.then_some(QuantizationGroup { entry, format: Some(format), targets })
}

fn compressed_format(name: &str) -> Option<WeightFormat> {
    Some(match name {
        "mxfp4-pack-quantized" => WeightFormat::Mxfp4,
        "nvfp4-pack-quantized" => WeightFormat::Nvfp4,
        "int-quantized" => WeightFormat::Int8,
        "pack-quantized" => WeightFormat::Int4,
        _ => return None,
    })
}

fn model_opt(fields: &mut Fields<'_>) -> Option<QuantizationConfig> {
    fields.only("quant_algo", "MIXED_PRECISION", "the layers are listed one by one in quantized_layers");
    let reason = "it lists the expert banks that are quantized";
    let value = fields.get("quantized_layers");
    let Some(layers) = value.and_then(Value::as_object) else {
        fields.problem("quantized_layers", "an object", value, reason);
        return None;
    };
    let mut inner = Fields::new(&fields.path("quantized_layers"), layers);
    let mut expert_layers = Vec::new();
    let mut every_layer = false;
    let mut groups = Vec::new();
    for (name, entry) in layers {
        let right = entry.get("quant_algo").and_then(Value::as_str) == Some("NVFP4")
            && entry.get("group_size").is_none_or(|size| size.as_u64() == Some(k3_quant::NV_BLOCK as u64));
        if !names_routed_experts(name) {
            groups.push(QuantizationGroup {
                entry: format!("{} = {}", inner.path(name), show(entry.get("quant_algo"))),
                format: right.then_some(WeightFormat::Nvfp4),
                targets: vec![name.clone()],
            });
            continue;
        }
        if !right {
            let found = Value::String(entry.to_string());
            inner.problem(
                name,
                "quant_algo NVFP4 with group_size 16",
                Some(&found),
                "routed experts are NVFP4",
            );
        }
        match layer_of(name) {
            Some(layer) => expert_layers.push(layer),
            None => every_layer = true,
        }
    }
    if expert_layers.is_empty() && !every_layer {
        let expected = "an entry for the routed experts, such as \"...block_sparse_moe.experts\"";
        fields.problem("quantized_layers", expected, value, reason);
    }
    fields.absorb(inner.into_problems());
    let ignore = string_list(fields, "exclude_modules", "modules that are not quantized");
    expert_layers.sort_unstable();
    expert_layers.dedup();
    Some(QuantizationConfig {
        format: ExpertFormat::Nvfp4ModelOpt,
        entry: format!("{} (quant_method \"modelopt_mixed\")", fields.path("quantized_layers")),
        ignore,
        expert_layers: (!every_layer).then_some(expert_layers),
        quantizes_activations: false,
        groups,
    })
}

/// Whether a module name or pattern, in any of the spellings that loaders probe, speaks of a bank of routed experts or
/// of a part of one. `shared_experts` is another module.
pub(super) fn names_routed_experts(name: &str) -> bool {
    let plain = |part: &'_ str| part.trim_matches(|c: char| !c.is_alphanumeric() && c != '_') == "experts";
    name.split('.').any(plain)
}

/// The number after `layers.`.
fn layer_of(name: &str) -> Option<usize> {
    let mut parts = name.split('.');
    parts.find(|part| *part == "layers")?;
    parts.next()?.parse().ok()
}

fn string_list(fields: &mut Fields<'_>, key: &'static str, reason: &str) -> Vec<String> {
    let Some(value) = fields.get_optional(key) else { return Vec::new() };
    let strings = value
        .as_array()
        .and_then(|list| list.iter().map(|v| v.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>());
    strings.unwrap_or_else(|| {
        fields.problem(key, "a list of strings", Some(value), reason);
        Vec::new()
    })
}
