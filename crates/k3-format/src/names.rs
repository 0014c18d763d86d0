//! The one table of tensor names, shapes and dtypes (`docs/checkpoint.md` 3 and 9), without routed experts.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;

use crate::error::Error;
use crate::small_file::read_json;
use crate::{AttentionKind, ModelConfig, Role, TensorId};

/// What every tensor of the language model begins with.
pub(crate) const LANGUAGE_MODEL: &str = "language_model.";
/// What every tensor of a decoder layer begins with; the 0-based layer and a dot follow.
pub const LAYER_PREFIX: &str = "language_model.model.layers.";

/// Where a tensor of the table exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Once, beside the decoder layers.
    Model,
    /// In every decoder layer.
    EveryLayer,
    /// In layers of Kimi Delta Attention.
    Kda,
    /// In full-attention layers.
    FullAttention,
    /// In full-attention layers of Kimi K3.1 Pro.
    Indexer,
    /// In layers with the dense MLP.
    Dense,
    /// In layers with routed experts.
    Moe,
}

/// What a tensor holds, and so the shapes it may come in (`docs/checkpoint.md` 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// `[rows, cols]`
    Matrix(usize, usize),
    /// `[n]`
    Vector(usize),
    /// `[1, n]` or `[n]`
    RowVector(usize),
    /// Channels and taps: `[channels, 1, taps]` or `[channels, taps]`
    Conv(usize, usize),
    /// Heads: `[heads]`, `[1, 1, heads, 1]`, or `[n]` with `n > heads` and zeros behind the heads.
    PerHead(usize),
    /// Heads and their width: `[heads * width]` or `[heads, width]`
    PerChannel(usize, usize),
}

impl Extent {
    /// Longest zero-padded per-head vector that is taken for one.
    const MAX_PADDED: u64 = 1 << 16;

    /// Whether a tensor of this shape may hold it.
    pub(crate) fn accepts(self, shape: &[u64]) -> bool {
        let is = |wanted: &[usize]| {
            wanted.len() == shape.len() && wanted.iter().zip(shape).all(|(&w, &s)| w as u64 == s)
        };
        match self {
            Self::Matrix(rows, cols) => is(&[rows, cols]),
            Self::Vector(n) => is(&[n]),
            Self::RowVector(n) => is(&[1, n]) || is(&[n]),
            Self::Conv(channels, taps) => is(&[channels, 1, taps]) || is(&[channels, taps]),
            Self::PerHead(heads) => {
                let padded = |n: u64| n >= heads as u64 && (n == heads as u64 || n <= Self::MAX_PADDED);
                is(&[1, 1, heads, 1]) || matches!(*shape, [n] if padded(n))
            }
            Self::PerChannel(heads, width) => is(&[heads * width]) || is(&[heads, width]),
        }
    }

    /// Elements that the engine uses.
    pub fn elements(self) -> usize {
        match self {
            Self::Matrix(a, b) | Self::Conv(a, b) | Self::PerChannel(a, b) => a * b,
            Self::Vector(n) | Self::RowVector(n) | Self::PerHead(n) => n,
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Matrix(rows, cols) => write!(f, "[{rows}, {cols}]"),
            Self::Vector(n) => write!(f, "[{n}]"),
            Self::RowVector(n) => write!(f, "[1, {n}] or [{n}]"),
            Self::Conv(channels, taps) => write!(f, "[{channels}, 1, {taps}] or [{channels}, {taps}]"),
            Self::PerHead(heads) => write!(
                f,
                "[{heads}], [1, 1, {heads}, 1], or [n] with n from {} to {} and zeros behind the first {heads}",
                heads + 1,
                Self::MAX_PADDED
            ),
            Self::PerChannel(heads, width) => write!(f, "[{}] or [{heads}, {width}]", heads * width),
        }
    }
}

/// A line of the table.
#[derive(Clone, Copy, Debug)]
pub struct TableEntry {
    /// What the tensor is for.
    pub role: Role,
    /// Where it exists.
    pub(crate) place: Place,
    /// The name: all of it at model level, else what follows the layer number and its dot. Names of indexer
    /// tensors are proposals that [`IndexerNames`] may replace.
    pub suffix: &'static str,
    /// How the release stores it. BF16 and F32 are both read, whichever it is.
    pub release: Dtype,
    extent: fn(&ModelConfig) -> Extent,
}

impl TableEntry {
    /// What the tensor holds in a model of this config.
    pub fn extent(&self, config: &ModelConfig) -> Extent {
        (self.extent)(config)
    }
}

const fn spec(
    place: Place,
    role: Role,
    suffix: &'static str,
    release: Dtype,
    extent: fn(&ModelConfig) -> Extent,
) -> TableEntry {
    TableEntry { role, place, suffix, release, extent }
}

/// Heads and head width of the indexer; zeros, which no tensor has, without one.
fn indexer(c: &ModelConfig) -> (usize, usize) {
    c.indexer.as_ref().map_or((0, 0), |i| (i.n_heads, i.head_dim))
}

/// Every tensor of the language model that is not part of a routed expert.
pub(crate) static TABLE: &[TableEntry] = {
    use Dtype::{BF16, F32};
    use Extent::{Conv, Matrix, PerChannel, PerHead, RowVector, Vector};
    use Place::{Dense, EveryLayer, FullAttention, Indexer, Kda, Model, Moe};
    &[
        spec(Model, Role::EmbedTokens, "language_model.model.embed_tokens.weight", BF16, |c| {
            Matrix(c.vocab_size, c.hidden_size)
        }),
        spec(Model, Role::Norm, "language_model.model.norm.weight", BF16, |c| Vector(c.hidden_size)),
        spec(Model, Role::OutputAttnResNorm, "language_model.model.output_attn_res_norm.weight", BF16, |c| {
            Vector(c.hidden_size)
        }),
        spec(Model, Role::OutputAttnResProj, "language_model.model.output_attn_res_proj.weight", BF16, |c| {
            RowVector(c.hidden_size)
        }),
        spec(Model, Role::LmHead, "language_model.lm_head.weight", BF16, |c| {
            Matrix(c.vocab_size, c.hidden_size)
        }),
        spec(EveryLayer, Role::InputLayernorm, "input_layernorm.weight", BF16, |c| Vector(c.hidden_size)),
        spec(EveryLayer, Role::PostAttentionLayernorm, "post_attention_layernorm.weight", BF16, |c| {
            Vector(c.hidden_size)
        }),
        spec(EveryLayer, Role::SelfAttentionResNorm, "self_attention_res_norm.weight", BF16, |c| {
            Vector(c.hidden_size)
        }),
        spec(EveryLayer, Role::SelfAttentionResProj, "self_attention_res_proj.weight", BF16, |c| {
            RowVector(c.hidden_size)
        }),
        spec(EveryLayer, Role::MlpResNorm, "mlp_res_norm.weight", BF16, |c| Vector(c.hidden_size)),
        spec(EveryLayer, Role::MlpResProj, "mlp_res_proj.weight", BF16, |c| RowVector(c.hidden_size)),
        spec(Kda, Role::GProj, "self_attn.g_proj.weight", BF16, |c| {
            Matrix(c.kda.projection_size(), c.hidden_size)
        }),
        spec(Kda, Role::OProj, "self_attn.o_proj.weight", BF16, |c| {
            Matrix(c.hidden_size, c.kda.projection_size())
        }),
        spec(Kda, Role::QProj, "self_attn.q_proj.weight", BF16, |c| {
            Matrix(c.kda.projection_size(), c.hidden_size)
        }),
        spec(Kda, Role::KProj, "self_attn.k_proj.weight", BF16, |c| {
            Matrix(c.kda.projection_size(), c.hidden_size)
        }),
        spec(Kda, Role::VProj, "self_attn.v_proj.weight", BF16, |c| {
            Matrix(c.kda.projection_size(), c.hidden_size)
        }),
        spec(Kda, Role::QConv1d, "self_attn.q_conv1d.weight", F32, |c| {
            Conv(c.kda.projection_size(), c.kda.short_conv_kernel_size)
        }),
        spec(Kda, Role::KConv1d, "self_attn.k_conv1d.weight", F32, |c| {
            Conv(c.kda.projection_size(), c.kda.short_conv_kernel_size)
        }),
        spec(Kda, Role::VConv1d, "self_attn.v_conv1d.weight", F32, |c| {
            Conv(c.kda.projection_size(), c.kda.short_conv_kernel_size)
        }),
        spec(Kda, Role::ALog, "self_attn.A_log", F32, |c| PerHead(c.kda.num_heads)),
        spec(Kda, Role::DtBias, "self_attn.dt_bias", F32, |c| PerChannel(c.kda.num_heads, c.kda.head_dim)),
        spec(Kda, Role::FAProj, "self_attn.f_a_proj.weight", BF16, |c| Matrix(c.kda.head_dim, c.hidden_size)),
        spec(Kda, Role::FBProj, "self_attn.f_b_proj.weight", BF16, |c| {
            Matrix(c.kda.projection_size(), c.kda.head_dim)
        }),
        spec(Kda, Role::BProj, "self_attn.b_proj.weight", BF16, |c| Matrix(c.kda.num_heads, c.hidden_size)),
        spec(Kda, Role::ONorm, "self_attn.o_norm.weight", F32, |c| Vector(c.kda.head_dim)),
        spec(FullAttention, Role::GProj, "self_attn.g_proj.weight", BF16, |c| {
            Matrix(c.mla.output_size(), c.hidden_size)
        }),
        spec(FullAttention, Role::OProj, "self_attn.o_proj.weight", BF16, |c| {
            Matrix(c.hidden_size, c.mla.output_size())
        }),
        spec(FullAttention, Role::QAProj, "self_attn.q_a_proj.weight", BF16, |c| {
            Matrix(c.mla.q_lora_rank, c.hidden_size)
        }),
        spec(FullAttention, Role::QALayernorm, "self_attn.q_a_layernorm.weight", BF16, |c| {
            Vector(c.mla.q_lora_rank)
        }),
        spec(FullAttention, Role::QBProj, "self_attn.q_b_proj.weight", BF16, |c| {
            Matrix(c.mla.num_heads * c.mla.qk_head_dim(), c.mla.q_lora_rank)
        }),
        spec(FullAttention, Role::KvAProjWithMqa, "self_attn.kv_a_proj_with_mqa.weight", BF16, |c| {
            Matrix(c.mla.kv_lora_rank + c.mla.qk_rope_head_dim, c.hidden_size)
        }),
        spec(FullAttention, Role::KvALayernorm, "self_attn.kv_a_layernorm.weight", BF16, |c| {
            Vector(c.mla.kv_lora_rank)
        }),
        spec(FullAttention, Role::KvBProj, "self_attn.kv_b_proj.weight", BF16, |c| {
            Matrix(c.mla.num_heads * (c.mla.qk_nope_head_dim + c.mla.v_head_dim), c.mla.kv_lora_rank)
        }),
        spec(Indexer, Role::IndexerWqB, "self_attn.indexer.wq_b.weight", BF16, |c| {
            let (heads, width) = indexer(c);
            Matrix(heads * width, c.mla.q_lora_rank)
        }),
        spec(Indexer, Role::IndexerWk, "self_attn.indexer.wk.weight", BF16, |c| {
            Matrix(indexer(c).1, c.hidden_size)
        }),
        spec(Indexer, Role::IndexerKNormWeight, "self_attn.indexer.k_norm.weight", BF16, |c| {
            Vector(indexer(c).1)
        }),
        spec(Indexer, Role::IndexerKNormBias, "self_attn.indexer.k_norm.bias", BF16, |c| {
            Vector(indexer(c).1)
        }),
        spec(Indexer, Role::IndexerWeightsProj, "self_attn.indexer.weights_proj.weight", BF16, |c| {
            Matrix(indexer(c).0, c.hidden_size)
        }),
        spec(Dense, Role::MlpGateProj, "mlp.gate_proj.weight", BF16, |c| {
            Matrix(c.intermediate_size, c.hidden_size)
        }),
        spec(Dense, Role::MlpUpProj, "mlp.up_proj.weight", BF16, |c| {
            Matrix(c.intermediate_size, c.hidden_size)
        }),
        spec(Dense, Role::MlpDownProj, "mlp.down_proj.weight", BF16, |c| {
            Matrix(c.hidden_size, c.intermediate_size)
        }),
        spec(Moe, Role::RouterGate, "block_sparse_moe.gate.weight", BF16, |c| {
            Matrix(c.moe.num_experts, c.hidden_size)
        }),
        spec(Moe, Role::RouterBias, "block_sparse_moe.gate.e_score_correction_bias", F32, |c| {
            Vector(c.moe.num_experts)
        }),
        spec(Moe, Role::RoutedExpertDownProj, "block_sparse_moe.routed_expert_down_proj.weight", BF16, |c| {
            Matrix(c.moe.routed_expert_hidden_size, c.hidden_size)
        }),
        spec(Moe, Role::RoutedExpertNorm, "block_sparse_moe.routed_expert_norm.weight", BF16, |c| {
            Vector(c.moe.routed_expert_hidden_size)
        }),
        spec(Moe, Role::RoutedExpertUpProj, "block_sparse_moe.routed_expert_up_proj.weight", BF16, |c| {
            Matrix(c.hidden_size, c.moe.routed_expert_hidden_size)
        }),
        spec(Moe, Role::SharedGateProj, "block_sparse_moe.shared_experts.gate_proj.weight", BF16, |c| {
            Matrix(c.moe.shared_intermediate_size(), c.hidden_size)
        }),
        spec(Moe, Role::SharedUpProj, "block_sparse_moe.shared_experts.up_proj.weight", BF16, |c| {
            Matrix(c.moe.shared_intermediate_size(), c.hidden_size)
        }),
        spec(Moe, Role::SharedDownProj, "block_sparse_moe.shared_experts.down_proj.weight", BF16, |c| {
            Matrix(c.hidden_size, c.moe.shared_intermediate_size())
        }),
    ]
};

/// Names of the five indexer tensors of a layer, without the layer prefix. The release's names are not public; the
/// default is a proposal (`docs/checkpoint.md` 9).
///
/// As a JSON file: `{"query": "self_attn.indexer.wq_b.weight", "key": .., "key_norm_gain": .., "key_norm_bias": ..,
/// "head_weights": ..}`, where absent keys keep their default.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IndexerNames {
    /// `[n_heads * head_dim, q_lora_rank]`
    pub query: String,
    /// `[head_dim, hidden_size]`
    pub key: String,
    /// `[head_dim]`
    pub key_norm_gain: String,
    /// `[head_dim]`
    pub key_norm_bias: String,
    /// `[n_heads, hidden_size]`
    pub head_weights: String,
}

impl Default for IndexerNames {
    fn default() -> Self {
        let name =
            |role| TABLE.iter().find(|s| s.role == role).map_or_else(String::new, |s| s.suffix.to_owned());
        Self {
            query: name(Role::IndexerWqB),
            key: name(Role::IndexerWk),
            key_norm_gain: name(Role::IndexerKNormWeight),
            key_norm_bias: name(Role::IndexerKNormBias),
            head_weights: name(Role::IndexerWeightsProj),
        }
    }
}

impl IndexerNames {
    /// Reads a side file.
    ///
    /// # Errors
    /// The file cannot be read, is not the JSON object described above, or names a tensor twice or not at all.
    pub fn load(file: &Path) -> Result<Self, Error> {
        let json = read_json(file)?;
        // Through a map, because serde reads a list as a struct, too.
        let names: Self = serde_json::from_value(json)
            .and_then(|map| serde_json::from_value(serde_json::Value::Object(map)))
            .map_err(|source| Error::Json { file: file.to_owned(), source })?;
        names.check()?;
        Ok(names)
    }

    /// Refuses names that cannot tell five tensors apart, from each other or from the rest of the table.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let all = self.all();
        for (i, (_, name)) in all.iter().enumerate() {
            let taken = TABLE.iter().any(|s| s.place != Place::Indexer && s.suffix == *name);
            if name.is_empty() || taken || all[..i].iter().any(|(_, other)| other == name) {
                return Err(Error::IndexerNames { name: (*name).to_owned() });
            }
        }
        Ok(())
    }

    /// Roles and names, in the order of the table.
    pub fn all(&self) -> [(Role, &str); 5] {
        [
            (Role::IndexerWqB, &self.query),
            (Role::IndexerWk, &self.key),
            (Role::IndexerKNormWeight, &self.key_norm_gain),
            (Role::IndexerKNormBias, &self.key_norm_bias),
            (Role::IndexerWeightsProj, &self.head_weights),
        ]
    }
}

/// The table for one model: which tensors it has, and how each is called.
#[derive(Clone, Debug)]
pub struct Names {
    indexer: IndexerNames,
    /// Name (without layer prefix) to lines of [`TABLE`]; `g_proj` and `o_proj` have one for each attention kind.
    by_suffix: HashMap<String, Vec<usize>>,
}

impl Names {
    /// The table with these names for the indexer.
    pub fn new(indexer: IndexerNames) -> Self {
        let mut names = Self { indexer, by_suffix: HashMap::new() };
        for (line, spec) in TABLE.iter().enumerate() {
            let suffix = names.suffix(spec).to_owned();
            names.by_suffix.entry(suffix).or_default().push(line);
        }
        names
    }

    /// The names of the indexer tensors.
    pub fn indexer(&self) -> &IndexerNames {
        &self.indexer
    }

    /// The name of a line of the table, without the layer prefix.
    pub(crate) fn suffix<'a>(&'a self, spec: &TableEntry) -> &'a str {
        let own = self.indexer.all().into_iter().find(|(role, _)| *role == spec.role);
        own.map_or(spec.suffix, |(_, name)| name)
    }

    /// The line of the table for a role in layer `layer` (0-based; `None` for model level), if this model has it.
    pub fn find(&self, config: &ModelConfig, id: TensorId) -> Option<&'static TableEntry> {
        TABLE.iter().find(|spec| spec.role == id.role && exists(config, spec.place, id.layer))
    }

    /// The line of the table that a name stands for in layer `layer`, if this model has it.
    pub(crate) fn by_suffix(
        &self,
        config: &ModelConfig,
        layer: Option<usize>,
        suffix: &str,
    ) -> Option<&'static TableEntry> {
        let lines = self.by_suffix.get(suffix)?;
        lines.iter().map(|&line| &TABLE[line]).find(|spec| exists(config, spec.place, layer))
    }

    /// The full name of a tensor.
    pub fn name(&self, spec: &TableEntry, layer: Option<usize>) -> String {
        let suffix = self.suffix(spec);
        layer.map_or_else(|| suffix.to_owned(), |layer| layer_name(layer, suffix))
    }

    /// The name of the module that a matrix belongs to: that of the tensor, without `.weight`.
    pub fn module(&self, spec: &TableEntry, layer: Option<usize>) -> String {
        let mut name = self.name(spec, layer);
        if let Some(module) = name.strip_suffix(".weight") {
            name.truncate(module.len());
        }
        name
    }

    /// Every tensor that a model of this config has, model level first, then layer by layer.
    pub fn tensors(config: &ModelConfig) -> impl Iterator<Item = (TensorId, &'static TableEntry)> {
        let places = std::iter::once(None).chain((0..config.num_hidden_layers()).map(Some));
        places.flat_map(move |layer| {
            let here = TABLE.iter().filter(move |spec| exists(config, spec.place, layer));
            here.map(move |spec| (TensorId { layer, role: spec.role }, spec))
        })
    }
}

/// `language_model.model.layers.{layer}.{suffix}`
pub(crate) fn layer_name(layer: usize, suffix: &str) -> String {
    let mut name = String::with_capacity(LAYER_PREFIX.len() + suffix.len() + 6);
    _ = write!(name, "{LAYER_PREFIX}{layer}.{suffix}");
    name
}

/// Whether a model has tensors of `place` at `layer`.
fn exists(config: &ModelConfig, place: Place, layer: Option<usize>) -> bool {
    let Some(layer) = layer else { return place == Place::Model };
    let Some(kind) = config.layers.get(layer) else { return false };
    match place {
        Place::Model => false,
        Place::EveryLayer => true,
        Place::Kda => *kind == AttentionKind::Kda,
        Place::FullAttention => *kind == AttentionKind::FullAttention,
        Place::Indexer => *kind == AttentionKind::FullAttention && config.indexer.is_some(),
        Place::Dense => !config.is_moe(layer),
        Place::Moe => config.is_moe(layer),
    }
}

/// Layer and rest of a decoder-layer name. Only the canonical spelling of a number counts.
pub(crate) fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.strip_prefix(LAYER_PREFIX)?.split_once('.')?;
    Some((index(number)?, rest))
}

/// A number without sign, leading zeros or overflow.
pub(crate) fn index(digits: &str) -> Option<usize> {
    let canonical =
        digits.bytes().all(|b| b.is_ascii_digit()) && (digits.len() == 1 || !digits.starts_with('0'));
    canonical.then(|| digits.parse().ok()).flatten()
}
