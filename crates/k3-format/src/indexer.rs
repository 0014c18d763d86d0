//! Finding the five indexer tensors of each full-attention layer, by name or by shape (`docs/checkpoint.md` 9).

use std::collections::BTreeMap;
use std::fmt;

use crate::config::DsaConfig;
use crate::error::Error;
use crate::gate::IndexerTensors;
use crate::names::{IndexerNames, layer_name};
use crate::shards::{Shards, TensorInfo};
use crate::values::read_vector;
use crate::{AttentionKind, ModelConfig};

/// A tensor of a decoder layer that is not part of Kimi K3.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unplaced<'a> {
    pub(crate) layer: usize,
    pub(crate) suffix: &'a str,
    pub(crate) tensor: TensorInfo<'a>,
}

/// The names of the indexer tensors, and how they were found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexerResolution {
    /// The names in use.
    pub names: IndexerNames,
    /// Where they come from.
    pub by: ResolvedBy,
}

/// Where the names of the indexer tensors come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolvedBy {
    /// The tensors are called as this engine's table proposes.
    Table,
    /// The caller gave the names.
    Caller,
    /// The shapes of the only unknown tensors on the full-attention layers; gain and bias of the key norm have one
    /// shape and were told apart by their names.
    ShapeAndName,
    /// The same, with gain and bias told apart by their values: gains are near 1, biases near 0.
    ShapeAndValues,
}

impl fmt::Display for IndexerResolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.by {
            ResolvedBy::Table => "indexer tensors found under the proposed names:",
            ResolvedBy::Caller => "indexer tensors found under the given names:",
            ResolvedBy::ShapeAndName => "indexer tensors found by shape, key norm gain and bias by name:",
            ResolvedBy::ShapeAndValues => {
                "indexer tensors found by shape, key norm gain and bias by their values:"
            }
        })?;
        let n = &self.names;
        write!(
            f,
            " query {}, key {}, key norm gain {}, key norm bias {}, head weights {}",
            n.query, n.key, n.key_norm_gain, n.key_norm_bias, n.head_weights
        )
    }
}

/// Looks for the indexer tensors among `unplaced`: by `requested` names if the caller gave some, else by the
/// proposed names, else by shape.
pub(crate) fn resolve(
    config: &ModelConfig,
    dsa: Option<&DsaConfig>,
    requested: Option<&IndexerNames>,
    unplaced: &[Unplaced<'_>],
    shards: &Shards,
) -> Result<(IndexerTensors, IndexerResolution), Error> {
    let (names, by) = match requested {
        Some(names) => (names.clone(), ResolvedBy::Caller),
        None => (IndexerNames::default(), ResolvedBy::Table),
    };
    let mut tensors = count(config, &names, unplaced);
    let resolution = IndexerResolution { names, by };
    let complete = tensors.missing.is_empty() && tensors.outside.is_empty();
    if requested.is_some() || complete || unplaced.is_empty() {
        return Ok((tensors, resolution));
    }
    match by_shape(config, dsa, unplaced, shards)? {
        Ok(resolution) => Ok((count(config, &resolution.names, unplaced), resolution)),
        Err(why) => {
            tensors.by_shape = Some(why);
            Ok((tensors, resolution))
        }
    }
}

fn full_attention_layers(config: &ModelConfig) -> impl Iterator<Item = usize> {
    config.layers.iter().enumerate().filter(|(_, k)| **k == AttentionKind::FullAttention).map(|(l, _)| l)
}

fn count(config: &ModelConfig, names: &IndexerNames, unplaced: &[Unplaced<'_>]) -> IndexerTensors {
    let suffixes = names.all().map(|(_, name)| name);
    let mut found = BTreeMap::new();
    for candidate in unplaced {
        if let Some(which) = suffixes.iter().position(|s| *s == candidate.suffix) {
            found.insert((candidate.layer, which), candidate.tensor.name);
        }
    }
    let mut tensors = IndexerTensors::default();
    for layer in full_attention_layers(config) {
        for (which, suffix) in suffixes.iter().enumerate() {
            let name = layer_name(layer, suffix);
            if tensors.expected.len() < suffixes.len() {
                tensors.expected.push(name.clone());
            }
            match found.remove(&(layer, which)) {
                Some(_) => tensors.found += 1,
                None => tensors.missing.push(name),
            }
        }
    }
    tensors.outside = found.into_values().map(str::to_owned).collect();
    tensors
}

/// The names that follow from shapes, or in words why none do.
fn by_shape(
    config: &ModelConfig,
    dsa: Option<&DsaConfig>,
    unplaced: &[Unplaced<'_>],
    shards: &Shards,
) -> Result<Result<IndexerResolution, String>, Error> {
    let mut layers: BTreeMap<usize, BTreeMap<&str, &TensorInfo<'_>>> = BTreeMap::new();
    for candidate in unplaced {
        layers.entry(candidate.layer).or_default().insert(candidate.suffix, &candidate.tensor);
    }
    let none = BTreeMap::new();
    let mut full = full_attention_layers(config).map(|layer| (layer, layers.get(&layer).unwrap_or(&none)));
    let Some((first_layer, first)) = full.next() else {
        return Ok(Err("there is no full-attention layer".into()));
    };
    if first.len() != 5 {
        return Ok(Err(format!("layer {first_layer} has {} unknown tensors, not 5", first.len())));
    }
    for (layer, here) in full {
        let alike =
            here.len() == 5 && here.iter().zip(first).all(|((a, x), (b, y))| a == b && x.shape == y.shape);
        if !alike {
            return Ok(Err(format!("the unknown tensors of layers {first_layer} and {layer} differ")));
        }
    }
    let (query, key, head_weights) = match matrices(config, dsa, first) {
        Ok(found) => found,
        Err(why) => return Ok(Err(why)),
    };
    let head_dim = first[key].shape[0];
    let norms: Vec<&str> = first.iter().filter(|(_, t)| t.shape == [head_dim]).map(|(s, _)| *s).collect();
    let [a, b] = norms[..] else {
        return Ok(Err(format!("{} of the unknown tensors have the shape [{head_dim}], not 2", norms.len())));
    };
    let ((gain, bias), by) = match (is_bias(a), is_bias(b)) {
        (false, true) => ((a, b), ResolvedBy::ShapeAndName),
        (true, false) => ((b, a), ResolvedBy::ShapeAndName),
        _ => match by_values(a, b, config, &layers, shards)? {
            Ok(pair) => (pair, ResolvedBy::ShapeAndValues),
            Err(why) => return Ok(Err(why)),
        },
    };
    let names = IndexerNames {
        query: query.to_owned(),
        key: key.to_owned(),
        key_norm_gain: gain.to_owned(),
        key_norm_bias: bias.to_owned(),
        head_weights: head_weights.to_owned(),
    };
    Ok(Ok(IndexerResolution { names, by }))
}

fn is_bias(name: &str) -> bool {
    name.rsplit('.').next() == Some("bias")
}

/// Query, key and head weights: the only assignment in which query rows = heads * head width.
fn matrices<'a>(
    config: &ModelConfig,
    dsa: Option<&DsaConfig>,
    five: &BTreeMap<&'a str, &TensorInfo<'_>>,
) -> Result<(&'a str, &'a str, &'a str), String> {
    let matrices: Vec<(&str, [u64; 2])> =
        five.iter().filter_map(|(s, t)| Some((*s, <[u64; 2]>::try_from(t.shape).ok()?))).collect();
    let shapes = || five.iter().map(|(s, t)| format!("{s} {:?}", t.shape)).collect::<Vec<_>>().join(", ");
    let [x, y, z] = matrices[..] else { return Err(format!("not three matrices: {}", shapes())) };
    let (latent, hidden) = (config.mla.q_lora_rank as u64, config.hidden_size as u64);
    let given = |value: Option<usize>, found: u64| value.is_none_or(|v| v as u64 == found);
    let fits = |(_, q): (&str, [u64; 2]), (_, k): (&str, [u64; 2]), (_, w): (&str, [u64; 2])| {
        q[1] == latent
            && k[1] == hidden
            && w[1] == hidden
            && k[0].checked_mul(w[0]) == Some(q[0])
            && given(dsa.and_then(|d| d.head_dim), k[0])
            && given(dsa.and_then(|d| d.n_heads), w[0])
            && five.values().filter(|t| t.shape == [k[0]]).count() == 2
    };
    let orders = [(x, y, z), (x, z, y), (y, x, z), (y, z, x), (z, x, y), (z, y, x)];
    let mut fitting = orders.into_iter().filter(|(q, k, w)| fits(*q, *k, *w));
    match (fitting.next(), fitting.next()) {
        (Some((q, k, w)), None) => Ok((q.0, k.0, w.0)),
        (Some(_), Some(_)) => Err(format!("the shapes fit in more than one way: {}", shapes())),
        (None, _) => Err(format!("the shapes are not those of an indexer: {}", shapes())),
    }
}

/// Gain and bias of the key norm: on every layer the gain's mean is nearer to 1 and the bias's nearer to 0.
fn by_values<'a>(
    a: &'a str,
    b: &'a str,
    config: &ModelConfig,
    layers: &BTreeMap<usize, BTreeMap<&str, &TensorInfo<'_>>>,
    shards: &Shards,
) -> Result<Result<(&'a str, &'a str), String>, Error> {
    let mut order = None;
    for layer in full_attention_layers(config) {
        let mut is_gain = [false; 2];
        for (suffix, is_gain) in [a, b].into_iter().zip(&mut is_gain) {
            let Some(values) = layers.get(&layer).and_then(|l| l.get(suffix)).map(|t| read_vector(shards, t))
            else {
                return Ok(Err(format!("layer {layer} has no {suffix}")));
            };
            let Some(values) = values? else { return Ok(Err(format!("{suffix} is neither BF16 nor F32"))) };
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len().max(1) as f64;
            *is_gain = mean > 0.5;
        }
        if is_gain[0] == is_gain[1] || order.is_some_and(|before| before != is_gain) {
            return Ok(Err(format!("neither names nor values tell which of {a} and {b} is the gain")));
        }
        order = Some(is_gain);
    }
    Ok(Ok(if order == Some([true, false]) { (a, b) } else { (b, a) }))
}
