//! `text_config.dsa_config`, the Lightning Indexer of Kimi K3.1 Pro (`docs/checkpoint.md` 9).

use super::MAX_WIDTH;
use super::fields::Fields;
use crate::AttentionKind;

/// What `dsa_config` says. What it may leave out, the tensor shapes say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DsaConfig {
    /// Heads, if given.
    pub n_heads: Option<usize>,
    /// Width of a head, if given.
    pub head_dim: Option<usize>,
    /// Keys that a query attends at most.
    pub topk: usize,
}

/// Reads and checks the object. `layers` are the layer kinds, if they could be read.
pub(super) fn read(fields: &mut Fields<'_>, layers: Option<&[AttentionKind]>) -> Option<DsaConfig> {
    let dsa_layers = fields.int_list("dsa_layers", "the layers with an indexer, counted from 1");
    if let (Some(dsa), Some(kinds)) = (&dsa_layers, layers) {
        check_layers(fields, dsa, kinds);
    }
    fields.only(
        "index_rope_dim",
        0,
        "rotated indexer keys are not implemented: nothing in this model is rotated",
    );

    let reason = "heads of the indexer";
    let n_heads =
        alias(fields, &["index_n_heads", "n_heads", "num_heads", "index_num_heads"], MAX_WIDTH, reason);
    let head_dim = alias(fields, &["index_head_dim", "head_dim"], MAX_WIDTH, "width of an indexer head");
    let reason = "keys that a query attends; a default would be a guess about the model";
    let topk = alias(fields, &["index_topk", "topk", "top_k"], MAX_WIDTH, reason);
    if topk == Alias::Absent {
        fields.problem("index_topk", format!("an integer from 1 to {MAX_WIDTH}"), None, reason);
    }
    if let (Alias::Given(heads), Alias::Given(dim)) = (n_heads, head_dim)
        && heads.checked_mul(dim).is_none_or(|n| n > MAX_WIDTH)
    {
        let expected = format!("heads * head width of at most {MAX_WIDTH}");
        fields.problem("index_n_heads", expected, Some(&heads.into()), "rows of one tensor");
        return None;
    }
    match (n_heads, head_dim, topk) {
        (Alias::Bad, _, _) | (_, Alias::Bad, _) => None,
        (n_heads, head_dim, Alias::Given(topk)) => {
            Some(DsaConfig { n_heads: n_heads.given(), head_dim: head_dim.given(), topk })
        }
        _ => None,
    }
}

fn check_layers(fields: &mut Fields<'_>, dsa: &[usize], kinds: &[AttentionKind]) {
    let full = kinds.iter().enumerate().filter(|(_, k)| **k == AttentionKind::FullAttention);
    let full: Vec<usize> = full.map(|(l, _)| l + 1).collect();
    let found = |what: String| Some(serde_json::Value::String(what));
    if let Some(layer) = dsa.iter().find(|l| !(1..=kinds.len()).contains(*l)) {
        let expected = format!("entries from 1 to num_hidden_layers {}", kinds.len());
        fields.problem("dsa_layers", expected, Some(&(*layer).into()), "layers are counted from 1");
    } else if let Some((before, after)) = dsa.iter().zip(dsa.iter().skip(1)).find(|(a, b)| a >= b) {
        let found = found(format!("{after} after {before}"));
        fields.problem(
            "dsa_layers",
            "strictly increasing entries",
            found.as_ref(),
            "a layer has one indexer",
        );
    } else if dsa != full {
        let differing = |a: &[usize], b: &[usize]| {
            let list: Vec<String> =
                a.iter().filter(|l| !b.contains(l)).take(8).map(ToString::to_string).collect();
            list.join(", ")
        };
        let found =
            found(format!("without [{}], beyond it [{}]", differing(&full, dsa), differing(dsa, &full)));
        let reason =
            "a subset would need dense and sparse full-attention layers mixed, which is not implemented";
        fields.problem("dsa_layers", "the same layers as full_attn_layers", found.as_ref(), reason);
    }
}

/// A field with more than one spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alias {
    Given(usize),
    Absent,
    Bad,
}

impl Alias {
    pub(super) fn given(self) -> Option<usize> {
        match self {
            Self::Given(n) => Some(n),
            Self::Absent | Self::Bad => None,
        }
    }
}

/// The field under the first of `keys` that is there. Two spellings with different values are refused.
pub(super) fn alias(fields: &mut Fields<'_>, keys: &[&'static str], max: usize, reason: &str) -> Alias {
    let mut result = Alias::Absent;
    let mut first = "";
    for key in keys {
        let Some(value) = fields.get_optional(key) else { continue };
        match (fields.int_value(key, Some(value), 1..=max, reason), result) {
            (None, _) => result = Alias::Bad,
            (Some(n), Alias::Absent) => {
                result = Alias::Given(n);
                first = key;
            }
            (Some(n), Alias::Given(other)) if n != other => {
                let expected = format!("{other}, as in {first}");
                fields.problem(key, expected, Some(value), "two spellings of one field that differ");
                result = Alias::Bad;
            }
            (Some(_), _) => {}
        }
    }
    result
}
