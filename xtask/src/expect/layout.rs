//! What each tensor of an expectation is: its shape for a given model and prompt, and how it is compared.

use anyhow::{Result, ensure};
use indicatif::BinaryBytes;
use k3_format::{AttentionKind, ModelConfig};
use safetensors::Dtype;

use super::Wanted;

/// Largest recording, in bytes of its tensors: it is held in memory, and twice while it
/// is put together.
const MAX_RECORDING: u64 = 16 << 30;

/// The sizes that the shapes of expectations depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// The model. Only the first [`Sizes::layers`] of its layers count.
    pub config: ModelConfig,
    /// Decoder layers that run.
    pub layers: usize,
    /// Prompt tokens.
    pub tokens: usize,
    /// Tokens of the greedy continuation.
    pub continuation: usize,
    /// The indexer is there and does not run: its tensors can be expected, and are not compared.
    pub ignore_indexer: bool,
}

impl Sizes {
    /// 0-based layers of one sort, in order; none for [`Axis::None`].
    pub fn layers_on(&self, axis: Axis) -> Vec<usize> {
        let is = |l: usize| match axis {
            Axis::None => false,
            Axis::Layers => true,
            Axis::Moe => self.config.is_moe(l),
            Axis::Kda => self.config.layers[l] == AttentionKind::Kda,
            Axis::Mla => self.config.layers[l] == AttentionKind::FullAttention,
        };
        (0..self.layers).filter(|&l| is(l)).collect()
    }
}

/// Over what the first dimension runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Not over layers.
    None,
    /// All decoder layers.
    Layers,
    /// Layers with routed experts.
    Moe,
    /// KDA layers.
    Kda,
    /// Full-attention layers.
    Mla,
}

/// Over what the dimension after [`Axis`] runs (the first if that is [`Axis::None`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Values of the last position of the prompt, or of a state after it.
    Last,
    /// Positions of the prompt.
    Prompt,
    /// Tokens of the greedy continuation.
    Continuation,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The prompt itself.
    Input,
    /// 0-based numbers of the layers that an [`Axis`] runs over.
    LayerList(Axis),
    /// Relative L2 within a bound, each layer for itself.
    Close,
    /// Relative L2 within a bound, over the whole tensor and in each row for itself.
    CloseRows,
    /// Equal in every element, order included.
    Equal,
    /// Says how safe a choice is; not compared.
    Margin,
}

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its name in the file.
    pub name: &'static str,
    /// Its exact shape.
    pub shape: Vec<usize>,
    /// First dimension.
    pub axis: Axis,
    /// Next dimension.
    pub rows: Rows,
    /// How it is compared.
    pub rule: Rule,
}

impl Entry {
    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        match self.rule {
            Rule::Close | Rule::CloseRows | Rule::Margin => Dtype::F32,
            Rule::Input | Rule::LayerList(_) | Rule::Equal => Dtype::I32,
        }
    }

    /// Whether an expectation of this shape can be compared. Logits of a continuation may be those of its first tokens
    /// only: they are large.
    pub fn admits(&self, shape: &[usize]) -> bool {
        match (self.name, shape, self.shape.as_slice()) {
            ("greedy_logits", [rows, width], [most, vocab]) => rows <= most && width == vocab,
            _ => shape == self.shape,
        }
    }

    /// Whether it tells what the indexer did.
    pub fn is_of_indexer(&self) -> bool {
        INDEXER.contains(&self.name)
    }

    /// Whether a run keeps it.
    fn is_recorded(&self, sizes: &Sizes, wanted: Wanted) -> bool {
        match self.name {
            _ if self.is_of_indexer() && sizes.ignore_indexer => false,
            "index_scores" => wanted.index_scores,
            name if SUBLAYERS.contains(&name) => wanted.all_positions,
            _ => true,
        }
    }

    /// Bytes, if they can be counted.
    fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(4, |bytes: u64, &size| bytes.checked_mul(size as u64))
    }
}

/// Tensors that tell what the indexer did.
const INDEXER: [&str; 6] =
    ["index_layers", "index_sel", "index_scores", "index_gap", "index_keys", "cont_index_sel"];

/// Inputs and outputs of all sublayers at all positions.
const SUBLAYERS: [&str; 4] = ["attn_in", "attn_out", "mlp_in", "mlp_out"];

/// An error if the tensors that a run keeps would have more than 16 GiB, before any of them is made.
pub(super) fn fits_memory(sizes: &Sizes, wanted: Wanted) -> Result<()> {
    let table = layout(sizes);
    let kept = || table.iter().filter(|entry| entry.is_recorded(sizes, wanted));
    let total = kept().try_fold(0_u64, |sum, entry| sum.checked_add(entry.bytes()?));
    let largest = kept().max_by_key(|entry| entry.bytes().unwrap_or(u64::MAX));
    let bytes = |count: Option<u64>| match count {
        Some(count) => format!("{count} bytes ({})", BinaryBytes(count)),
        None => "more than 2^64 bytes".to_owned(),
    };
    ensure!(
        total.is_some_and(|total| total <= MAX_RECORDING),
        "recording {} prompt tokens and {} after them on {} layers takes {}, and {} are the limit{}; record fewer \
         tokens, or fewer layers with --layers",
        sizes.tokens,
        sizes.continuation,
        sizes.layers,
        bytes(total),
        bytes(Some(MAX_RECORDING)),
        largest.map_or_else(String::new, |e| format!(
            "; the largest tensor is `{}` {:?} with {}",
            e.name,
            e.shape,
            bytes(e.bytes())
        )),
    );
    Ok(())
}

/// Every tensor that a model of these sizes can have, in the order of `docs/vectors.md`.
pub fn layout(sizes: &Sizes) -> Vec<Entry> {
    use {Axis as A, Rows as R, Rule as U};
    let c = &sizes.config;
    let (t, g, e, v) = (sizes.tokens, sizes.continuation, c.hidden_size, c.vocab_size);
    let n = |axis| sizes.layers_on(axis).len();
    let (l, moe, kda, mla) = (sizes.layers, n(A::Moe), n(A::Kda), n(A::Mla));
    let sources = l.div_ceil(c.attn_res_block_size) + 1;
    let k = c.moe.num_experts_per_token;
    let (heads, dim) = (c.kda.num_heads, c.kda.head_dim);
    let window = c.kda.short_conv_kernel_size - 1;

    let mut table = Vec::new();
    let mut add = |name, axis, rows, rule, shape: &[usize]| {
        table.push(Entry { name, axis, rows, rule, shape: shape.to_vec() });
    };
    add("input_ids", A::None, R::Prompt, U::Input, &[t]);
    add("logits", A::None, R::Prompt, U::CloseRows, &[t, v]);
    add("greedy_ids", A::None, R::Continuation, U::Equal, &[g]);
    add("greedy_logits", A::None, R::Continuation, U::CloseRows, &[g, v]);
    for name in ["hidden_last", "attn_in_last", "attn_out_last", "mlp_in_last", "mlp_out_last"] {
        add(name, A::Layers, R::Last, U::Close, &[l, e]);
    }
    add("final_mix_last", A::None, R::Last, U::Close, &[e]);
    add("final_norm_last", A::None, R::Last, U::Close, &[e]);
    add("attnres_attn_w_last", A::Layers, R::Last, U::Close, &[l, sources]);
    add("attnres_mlp_w_last", A::Layers, R::Last, U::Close, &[l, sources]);
    add("attnres_final_w_last", A::None, R::Last, U::Close, &[sources]);
    add("router_layers", A::Moe, R::Last, U::LayerList(A::Moe), &[moe]);
    add("router_idx", A::Moe, R::Prompt, U::Equal, &[moe, t, k]);
    add("router_weight", A::Moe, R::Prompt, U::Close, &[moe, t, k]);
    add("router_gap", A::Moe, R::Prompt, U::Margin, &[moe, t]);
    add("cont_router_idx", A::Moe, R::Continuation, U::Equal, &[moe, g, k]);
    add("kda_layers", A::Kda, R::Last, U::LayerList(A::Kda), &[kda]);
    add("kda_state", A::Kda, R::Last, U::Close, &[kda, heads, dim, dim]);
    add("kda_conv_state", A::Kda, R::Last, U::Close, &[kda, 3, window, heads * dim]);
    add("mla_layers", A::Mla, R::Last, U::LayerList(A::Mla), &[mla]);
    add("mla_latent", A::Mla, R::Prompt, U::Close, &[mla, t, c.mla.kv_lora_rank]);
    add("mla_extra_key", A::Mla, R::Prompt, U::Close, &[mla, t, c.mla.qk_rope_head_dim]);
    if let Some(indexer) = &c.indexer {
        add("index_layers", A::Mla, R::Last, U::LayerList(A::Mla), &[mla]);
        add("index_sel", A::Mla, R::Prompt, U::Equal, &[mla, t, indexer.topk]);
        add("index_scores", A::Mla, R::Prompt, U::Close, &[mla, t, t]);
        add("index_gap", A::Mla, R::Prompt, U::Margin, &[mla, t]);
        add("index_keys", A::Mla, R::Prompt, U::Close, &[mla, t, indexer.head_dim]);
        add("cont_index_sel", A::Mla, R::Continuation, U::Equal, &[mla, g, indexer.topk]);
    }
    for name in SUBLAYERS {
        add(name, A::Layers, R::Prompt, U::Close, &[l, t, e]);
    }
    table
}

#[cfg(test)]
mod tests {
    use k3_format::Variant;

    use super::*;
    use crate::synth::Geometry;

    const ALL: Wanted = Wanted { all_positions: true, index_scores: true };

    /// What a refusal says; nothing if it fits.
    #[track_caller]
    fn check(tokens: usize, continuation: usize, ignore_indexer: bool, wanted: Wanted, refusal: &str) {
        let config = Geometry::released(Variant::K31).model;
        let sizes = Sizes { config, layers: 93, tokens, continuation, ignore_indexer };
        let found = fits_memory(&sizes, wanted).map_or_else(|error| error.to_string(), |()| String::new());
        assert!(found.contains(refusal) && found.is_empty() == refusal.is_empty(), "{found}");
    }

    #[test]
    fn recordings_of_the_release() {
        check(512, 16, false, ALL, "");
        check(8192, 16, false, Wanted::default(), "");
        check(8192, 16, false, ALL, "`mlp_out` [93, 8192, 7168] with 21843935232 bytes");
        let scores = Wanted { index_scores: true, ..Wanted::default() };
        check(12_000, 0, false, scores, "`index_scores` [24, 12000, 12000] with 13824000000 bytes");
        check(12_000, 0, true, scores, "");
        check(1 << 20, 0, true, Wanted::default(), "`logits`");
        check(usize::MAX, 0, false, ALL, "more than 2^64 bytes");
    }
}
