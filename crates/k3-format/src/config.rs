//! `config.json`: parsed once, into a [`ModelConfig`] that holds, or refused with every problem at once
//! (`docs/checkpoint.md` 2).
//!
//! Nothing that shapes the model has a default: the vendor's own defaults describe another model, and an engine
//! that fills them in builds a network that still talks.

mod dsa;
mod fields;
mod layer_map;
mod module_pattern;
mod quantization;

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use dsa::DsaConfig;
pub use fields::ConfigProblem;
pub use quantization::{ExpertFormat, QuantizationConfig, QuantizationGroup};

pub(crate) use fields::{Fields, show};
pub(crate) use module_pattern::ModulePattern;
pub(crate) use quantization::EVERY_LINEAR;

use crate::error::Error;
use crate::gate::{self, Markers};
use crate::{KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant};
use dsa::{Alias, alias};

/// Largest width, of one dimension of one tensor, that is taken for a model and not for damage. Products of two
/// such widths and an element size fit 64 bits.
pub(crate) const MAX_WIDTH: usize = 1 << 24;
/// Most elements of what a layer keeps of one sequence, such as the KDA state `num_heads * head_dim * head_dim`
/// (1.6 million in the release).
const MAX_STATE: usize = 1 << 28;
/// Most decoder layers.
pub(crate) const MAX_LAYERS: usize = 10_000;
/// Most routed experts in all layers together.
const MAX_EXPERTS: usize = 1 << 24;
/// Largest context ceiling.
const MAX_POSITIONS: usize = 1 << 40;

/// Keys of `text_config` that every transformers config carries and that say nothing to this engine. Sampling
/// defaults are not taken from here (`docs/checkpoint.md` 2.2).
const IGNORED_KEYS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// A `config.json` that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// Every problem found, in the order of the tables in `docs/checkpoint.md` 2.
    pub problems: Vec<ConfigProblem>,
    /// Keys that the engine does not know; one of them may be a missing field under another spelling.
    pub unknown_keys: Vec<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.problems.len();
        let plural = if count == 1 { "field" } else { "fields" };
        write!(f, "{}: {count} {plural} cannot be used:", self.file.display())?;
        for problem in &self.problems {
            write!(f, "\n  {problem}")?;
        }
        if !self.unknown_keys.is_empty() {
            write!(f, "\n  keys that are not known, perhaps misspelled: {}", self.unknown_keys.join(", "))?;
        }
        Ok(())
    }
}

/// What `config.json` says, before the tensors are looked at.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ConfigFile {
    /// The language model. `indexer` is `None` until the gate has decided.
    pub model: ModelConfig,
    /// What the file says about the variant.
    pub(crate) markers: Markers,
    /// `dsa_config`; read for a `kimi_k31` root only.
    pub dsa: Option<DsaConfig>,
    /// How the routed experts are said to be stored.
    pub quantization: QuantizationConfig,
    /// Keys of `text_config` that are neither read nor known boilerplate.
    pub unknown_keys: Vec<String>,
}

impl ConfigFile {
    /// Checks a parsed `config.json`; `file` is for messages.
    ///
    /// # Errors
    /// [`Error::Gate`] if the root has no `text_config` or another `model_type`, else [`Error::Config`] with all
    /// fields that are missing or bad.
    pub fn check(json: &Value, file: &Path) -> Result<Self, Error> {
        let markers = Markers::of(json);
        let wrapper = gate::wrapper(&markers)?;
        let refused = |problems, unknown_keys| {
            Err(Error::Config(ConfigError { file: file.to_owned(), problems, unknown_keys }))
        };
        let Some(root_map) = json.as_object() else { return refused(Vec::new(), Vec::new()) };
        let mut root = Fields::new("", root_map);
        let Some(mut text) = root.object("text_config", "the language model") else {
            return refused(root.into_problems(), Vec::new());
        };
        root.only_if_present("tie_word_embeddings", false, TIED);
        let quantization = quantization::read(&mut root, &mut text);
        let model = read_model(&mut root, &mut text, quantization.as_ref());
        let dsa_object = text.get_optional("dsa_config").is_some();
        let mut unknown_keys = Vec::new();
        let mut dsa = None;
        if wrapper == Variant::K31
            && dsa_object
            && let Some(mut fields) = text.object("dsa_config", "the Lightning Indexer")
        {
            dsa = dsa::read(&mut fields, model.layers.as_deref());
            unknown_keys.extend(fields.unknown_keys(&[]));
            text.absorb(fields.into_problems());
        }
        unknown_keys.extend(model.unknown_keys);
        unknown_keys.extend(text.unknown_keys(IGNORED_KEYS));

        let mut problems = root.into_problems();
        problems.extend(text.into_problems());
        match (model.config, quantization) {
            (Some(model), Some(quantization)) if problems.is_empty() => {
                Ok(Self { model, markers, dsa, quantization, unknown_keys })
            }
            _ => refused(problems, unknown_keys),
        }
    }
}

const TIED: &str = "a head tied to the embedding is not implemented";

/// What could be read of the model, good or not.
struct ReadModel {
    config: Option<ModelConfig>,
    layers: Option<Vec<crate::AttentionKind>>,
    unknown_keys: Vec<String>,
}

fn read_model(
    root: &mut Fields<'_>,
    text: &mut Fields<'_>,
    quantization: Option<&QuantizationConfig>,
) -> ReadModel {
    let width = 1..=MAX_WIDTH;
    let positive = "a number from 1e-6 to 1e6";

    text.only("model_type", "kimi_linear", "the language model of both supported variants");
    let hidden_size = text.int("hidden_size", width.clone(), "width of the depth stream");
    let num_layers = text.int("num_hidden_layers", 1..=MAX_LAYERS, "decoder layers");
    let vocab_size = text.int("vocab_size", width.clone(), "rows of the embedding and of the head");
    // Far smaller ones are 0 as f32, and a row of zeros would be divided by zero; no model has one below this.
    let eps = |x| (1e-12..1.0).contains(&x);
    let rms_norm_eps =
        text.float("rms_norm_eps", "a number from 1e-12 to below 1", eps, "epsilon of the RMSNorms");
    text.only("hidden_act", "situ", "the only activation implemented");
    let gate_cap = text.float("activation_situ_beta", positive, is_factor, "cap of the gate in SiTU-GLU");
    let reason = "cap of the up projection in SiTU-GLU; null, no cap, is not implemented";
    let up_cap = text.float("activation_situ_linear_beta", positive, is_factor, reason);
    let reason = "AttnRes snapshot period; null, plain residuals, is not implemented";
    let attn_res_block_size = text.int("attn_res_block_size", 1..=MAX_LAYERS, reason);
    let reason = "layers below it have the dense MLP";
    let first_k = text.int("first_k_dense_replace", 0..=num_layers.unwrap_or(MAX_LAYERS), reason);
    text.only_if_present("moe_layer_freq", 1, "every layer from first_k_dense_replace on must have experts");
    let intermediate_size = text.int("intermediate_size", width.clone(), "inner width of the dense MLP");

    let mla = read_mla(text);
    let (kda, layers, mut unknown_keys) = read_kda(text, num_layers);
    let moe = read_moe(text, quantization);
    if let (Some(layers), Some(moe)) = (num_layers, &moe)
        && layers.checked_mul(moe.num_experts).is_none_or(|n| n > MAX_EXPERTS)
    {
        let expected = format!("at most {MAX_EXPERTS} experts in all {layers} layers together");
        text.problem("num_experts", expected, Some(&moe.num_experts.into()), "routed experts of a layer");
    }

    let reason = "multi-token prediction layers are not implemented";
    text.only_if_present("num_nextn_predict_layers", 0, reason);
    let max_positions = text.int("max_position_embeddings", 1..=MAX_POSITIONS, "context ceiling in tokens");
    text.only("tie_word_embeddings", false, TIED);
    if let Some(scaling) = text.get_optional("rope_scaling") {
        text.problem("rope_scaling", "no such field", Some(scaling), "nothing in this model is rotated");
    }
    let tokens = read_tokens(root, text, vocab_size);
    unknown_keys.sort();

    let config = (|| {
        Some(ModelConfig {
            hidden_size: hidden_size?,
            vocab_size: vocab_size?,
            rms_norm_eps: rms_norm_eps?,
            activation_situ_beta: gate_cap?,
            activation_situ_linear_beta: up_cap?,
            attn_res_block_size: attn_res_block_size?,
            first_k_dense_replace: first_k?,
            intermediate_size: intermediate_size?,
            max_position_embeddings: max_positions?,
            layers: layers.clone()?,
            kda: kda?,
            mla: mla?,
            moe: moe?,
            indexer: None,
            tokens,
        })
    })();
    ReadModel { config, layers, unknown_keys }
}

/// A number that f32 arithmetic can multiply with.
fn is_factor(x: f64) -> bool {
    (1e-6..=1e6).contains(&x)
}

fn read_mla(text: &mut Fields<'_>) -> Option<MlaConfig> {
    let width = 1..=MAX_WIDTH;
    let num_heads = text.int("num_attention_heads", width.clone(), "attention heads of the MLA layers");
    match num_heads {
        Some(heads) => text.only("num_key_value_heads", heads, "MLA has as many key/value heads as heads"),
        None => _ = text.int("num_key_value_heads", width.clone(), "must equal num_attention_heads"),
    }
    let reason = "width of the query latent; null, a plain q_proj, is not implemented";
    let q_lora_rank = text.int("q_lora_rank", width.clone(), reason);
    let kv_lora_rank = text.int("kv_lora_rank", width.clone(), "width of the key/value latent");
    let qk_nope_head_dim = text.int("qk_nope_head_dim", width.clone(), "key width of a head from the latent");
    let qk_rope_head_dim = text.int("qk_rope_head_dim", width.clone(), "extra key width shared by all heads");
    let v_head_dim = text.int("v_head_dim", width, "value width of a head");
    text.only("mla_use_nope", true, "rotated MLA keys are not implemented");
    text.only("mla_use_output_gate", true, "MLA without g_proj is not implemented");
    let mla = MlaConfig {
        num_heads: num_heads?,
        q_lora_rank: q_lora_rank?,
        kv_lora_rank: kv_lora_rank?,
        qk_nope_head_dim: qk_nope_head_dim?,
        qk_rope_head_dim: qk_rope_head_dim?,
        v_head_dim: v_head_dim?,
    };
    let (heads, nope, extra, value) =
        (mla.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
    let product =
        |name: &str, width: Option<usize>| width.is_none_or(|n| n > MAX_WIDTH).then(|| name.to_owned());
    let too_wide = product(
        "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
        heads.checked_mul(nope + extra),
    )
    .or_else(|| {
        product("num_attention_heads * (qk_nope_head_dim + v_head_dim)", heads.checked_mul(nope + value))
    })
    .or_else(|| product("kv_lora_rank + qk_rope_head_dim", mla.kv_lora_rank.checked_add(extra)));
    if let Some(product) = too_wide {
        text.problem(
            "num_attention_heads",
            format!("{product} of at most {MAX_WIDTH}"),
            Some(&heads.into()),
            "rows of one tensor",
        );
        return None;
    }
    Some(mla)
}

fn read_kda(
    text: &mut Fields<'_>,
    num_layers: Option<usize>,
) -> (Option<KdaConfig>, Option<Vec<crate::AttentionKind>>, Vec<String>) {
    let Some(mut fields) = text.object("linear_attn_config", "the Kimi Delta Attention and the layer map")
    else {
        return (None, None, Vec::new());
    };
    let width = 1..=MAX_WIDTH;
    let num_heads = fields.int("num_heads", width.clone(), "heads of Kimi Delta Attention");
    let head_dim = fields.int("head_dim", width.clone(), "key and value width of a KDA head");
    let taps = fields.int("short_conv_kernel_size", 1..=1024, "taps of the short convolutions");
    let reason = "it selects the bounded gate; null would select another formula, which is not implemented";
    let bound =
        fields.float("gate_lower_bound", "a number from -5 to below 0", |x| (-5.0..0.0).contains(&x), reason);
    fields.only("use_full_rank_gate", true, "a low-rank output gate (g_a_proj, g_b_proj) is not implemented");
    let layers = layer_map::read(&mut fields, num_layers);
    let kda = (|| {
        Some(KdaConfig {
            num_heads: num_heads?,
            head_dim: head_dim?,
            short_conv_kernel_size: taps?,
            gate_lower_bound: bound?,
        })
    })();
    if let Some(kda) = &kda {
        let product = |factors: &[usize]| factors.iter().try_fold(1usize, |n, &f| n.checked_mul(f));
        let (heads, dim, taps) = (kda.num_heads, kda.head_dim, kda.short_conv_kernel_size);
        let too_large = [
            ("num_heads * head_dim", product(&[heads, dim]), MAX_WIDTH, "rows of one tensor"),
            (
                "num_heads * head_dim * head_dim",
                product(&[heads, dim, dim]),
                MAX_STATE,
                "the state of a layer",
            ),
            (
                "num_heads * head_dim * short_conv_kernel_size",
                product(&[heads, dim, taps]),
                MAX_STATE,
                "the taps of a convolution",
            ),
        ];
        let too_large = too_large.into_iter().find(|(_, n, max, _)| n.is_none_or(|n| n > *max));
        if let Some((what, _, max, reason)) = too_large {
            fields.problem("num_heads", format!("{what} of at most {max}"), Some(&heads.into()), reason);
        }
    }
    let unknown = fields.unknown_keys(&[]);
    text.absorb(fields.into_problems());
    (kda, layers, unknown)
}

fn read_moe(text: &mut Fields<'_>, quantization: Option<&QuantizationConfig>) -> Option<MoeConfig> {
    let width = 1..=MAX_WIDTH;
    let num_experts = text.int("num_experts", width.clone(), "routed experts of a layer");
    let most = num_experts.unwrap_or(MAX_WIDTH);
    let reason = "experts that a token uses, at most num_experts";
    let topk = alias(text, &["num_experts_per_token", "num_experts_per_tok"], most, reason);
    if topk == Alias::Absent {
        text.problem("num_experts_per_token", format!("an integer from 1 to {most}"), None, reason);
    }
    let num_shared_experts =
        text.int("num_shared_experts", width.clone(), "shared experts, fused into one MLP");
    let inner = text.int("moe_intermediate_size", width.clone(), "inner width of a routed expert");
    let reason = "width of the latent of the routed experts; null, experts at full width, is not implemented";
    let latent = text.int("routed_expert_hidden_size", width, reason);
    // Both widths are columns of an expert matrix, which share scales in groups.
    let group = quantization.map_or(k3_quant::NV_BLOCK, |q| q.format.group_size());
    for (key, size) in [("moe_intermediate_size", inner), ("routed_expert_hidden_size", latent)] {
        if let Some(size) = size
            && !size.is_multiple_of(group)
        {
            let expected = format!("a multiple of {group}");
            text.problem(key, expected, Some(&size.into()), "columns that share a scale");
        }
    }
    text.only("latent_moe_use_norm", true, "a latent without norm is not implemented");
    text.only("moe_router_activation_func", "sigmoid", "the only router implemented");
    let renormalize = text.boolean("moe_renormalize", "whether the weights of the chosen experts sum to 1");
    let reason = "multiplies the weights of the chosen experts";
    let scaling = text.float("routed_scaling_factor", "a number from 1e-6 to 1e6", is_factor, reason);
    let grouped = "group-limited expert selection is not implemented; with one group it is no limit";
    _ = text.boolean("use_grouped_topk", grouped);
    text.only("num_expert_group", 1, grouped);
    text.only("topk_group", 1, grouped);
    text.only_if_present("topk_method", "noaux_tc", "the only selection implemented");
    let moe = MoeConfig {
        num_experts: num_experts?,
        num_experts_per_token: topk.given()?,
        num_shared_experts: num_shared_experts?,
        moe_intermediate_size: inner?,
        routed_expert_hidden_size: latent?,
        moe_renormalize: renormalize?,
        routed_scaling_factor: scaling?,
    };
    if moe.num_shared_experts.checked_mul(moe.moe_intermediate_size).is_none_or(|n| n > MAX_WIDTH) {
        let expected = format!("num_shared_experts * moe_intermediate_size of at most {MAX_WIDTH}");
        text.problem(
            "num_shared_experts",
            expected,
            Some(&moe.num_shared_experts.into()),
            "rows of one tensor",
        );
        return None;
    }
    Some(moe)
}

fn read_tokens(root: &mut Fields<'_>, text: &mut Fields<'_>, vocab_size: Option<usize>) -> SpecialTokens {
    let mut eos = root.token_ids("eos_token_id", vocab_size);
    eos.extend(text.token_ids("eos_token_id", vocab_size));
    let mut one = |key| {
        let at_root = root.token_ids(key, vocab_size);
        let in_text = text.token_ids(key, vocab_size);
        at_root.first().or(in_text.first()).copied()
    };
    SpecialTokens {
        bos: one("bos_token_id"),
        pad: one("pad_token_id"),
        media_placeholder: one("media_placeholder_token_id"),
        eos: without_repeats(eos),
    }
}

/// The ids in order of first appearance.
pub(crate) fn without_repeats(ids: Vec<u32>) -> Vec<u32> {
    let mut seen = HashSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).collect()
}
