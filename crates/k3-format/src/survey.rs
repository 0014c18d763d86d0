//! One pass over all tensors: what each is, before the variant is known.

use std::collections::HashMap;

use crate::config::ConfigFile;
use crate::error::TensorErrors;
use crate::expert_survey::{ExpertSurvey, Visit, is_activation_scale};
use crate::experts::EXPERTS_PREFIX;
use crate::indexer::Unplaced;
use crate::linear::{Parts, split_part};
use crate::names::{IndexerNames, LANGUAGE_MODEL, Names, split_layer};
use crate::shards::{Shards, TensorInfo};
use crate::{ModelConfig, TensorId};

/// Parts of the checkpoint that text generation does not need.
pub(crate) const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];
/// Unknown tensors that a warning names.
const NAMED: usize = 5;

/// What all tensors are.
pub(crate) struct Survey<'a> {
    /// Those of the table of Kimi K3.
    pub(crate) table: HashMap<TensorId, TensorInfo<'a>>,
    /// Parts of quantized tensors of the table.
    pub(crate) parts: HashMap<TensorId, Parts<'a>>,
    /// Those of decoder layers that are not Kimi K3's: an indexer, or unknown.
    pub(crate) unplaced: Vec<Unplaced<'a>>,
    pub(crate) experts: ExpertSurvey,
    /// Other tensors of the language model.
    pub(crate) unknown_language: Vec<&'a str>,
    pub(crate) vision: usize,
    pub(crate) activation_scales: usize,
    pub(crate) cache_scales: usize,
    pub(crate) unknown: usize,
    /// The first of the unknown ones.
    pub(crate) unknown_named: Vec<String>,
    /// Problems of expert tensors.
    pub(crate) errors: TensorErrors,
}

impl<'a> Survey<'a> {
    pub(crate) fn new(file: &ConfigFile, shards: &'a Shards) -> Self {
        let config = &file.model;
        let names = Names::new(IndexerNames::default());
        let mut survey = Self {
            table: HashMap::new(),
            parts: HashMap::new(),
            unplaced: Vec::new(),
            experts: ExpertSurvey::new(config),
            unknown_language: Vec::new(),
            vision: 0,
            activation_scales: 0,
            cache_scales: 0,
            unknown: 0,
            unknown_named: Vec::new(),
            errors: TensorErrors::default(),
        };
        for tensor in shards.iter() {
            let name = tensor.name;
            if let Some((layer, suffix)) = split_layer(name) {
                let has_experts = layer < config.num_hidden_layers() && config.is_moe(layer);
                if let Some(rest) = suffix.strip_prefix(EXPERTS_PREFIX).filter(|_| has_experts) {
                    match survey.experts.visit(layer, rest, &tensor, &mut survey.errors) {
                        Visit::Part => {}
                        Visit::ActivationScale => survey.activation_scales += 1,
                        Visit::Unknown => survey.unknown_language.push(name),
                    }
                } else if let Some(entry) = names.by_suffix(config, Some(layer), suffix) {
                    survey.table.insert(TensorId::layer(layer, entry.role), tensor);
                } else if is_cache_scale(suffix) {
                    survey.cache_scales += 1;
                } else if !survey.take_part(&names, config, Some(layer), suffix, tensor) {
                    survey.unplaced.push(Unplaced { layer, suffix, tensor });
                }
            } else if let Some(entry) = names.by_suffix(config, None, name) {
                survey.table.insert(TensorId::model(entry.role), tensor);
            } else if VISION_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
                survey.vision += 1;
            } else if name.starts_with(LANGUAGE_MODEL) {
                if !survey.take_part(&names, config, None, name, tensor) {
                    survey.unknown_language.push(name);
                }
            } else {
                survey.unknown += 1;
                if survey.unknown_named.len() < NAMED {
                    survey.unknown_named.push(name.to_owned());
                }
            }
        }
        survey
    }

    /// Takes a tensor that belongs to a tensor of the table stored quantized, or says that it does not.
    fn take_part(
        &mut self,
        names: &Names,
        config: &ModelConfig,
        layer: Option<usize>,
        suffix: &str,
        tensor: TensorInfo<'a>,
    ) -> bool {
        let of = |module: &str| names.by_suffix(config, layer, &format!("{module}.weight"));
        if let Some((module, part)) = split_part(suffix)
            && let Some(entry) = of(module)
        {
            let id = TensorId { layer, role: entry.role };
            self.parts.entry(id).or_default().set(part, tensor);
            return true;
        }
        let activation = suffix.rsplit_once('.').filter(|(_, part)| is_activation_scale(part));
        let found = activation.is_some_and(|(module, _)| of(module).is_some());
        self.activation_scales += usize::from(found);
        found
    }
}

/// Scales of a quantized attention cache, which this engine does not keep.
fn is_cache_scale(suffix: &str) -> bool {
    let scale = |rest: &str| matches!(rest, "k_scale" | "v_scale" | "k_proj.k_scale" | "v_proj.v_scale");
    suffix.strip_prefix("self_attn.").is_some_and(scale)
}
