//! What a repack found and wrote.

use std::collections::BTreeMap;

use k3_quant::encode::RoundingError;
use serde::{Deserialize, Serialize};

use crate::names::split_layer;

use super::dense::module;
use super::recipe::Recipe;
use super::scales::Census;
use super::source_id::SourceId;
use super::verify::Proof;

/// The block exponents of the routed experts of a layer, or of all layers together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Exponents {
    /// 0-based layer; `None` of all together.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub layer: Option<usize>,
    /// Smallest exponent of a live block, as a power of two; `None` if no block is live.
    pub kmin: Option<i32>,
    /// Largest exponent of a live block.
    pub kmax: Option<i32>,
    /// The largest difference of two exponents of live blocks that share a matrix scale; 17 fit.
    pub widest: Option<u32>,
    /// Blocks with a code that is not zero.
    pub live_blocks: u64,
    /// Blocks of zeros.
    pub zero_blocks: u64,
    /// Blocks of zeros whose exponent did not fit, and was replaced by that of 1.0. Their E8M0 byte is lost, their
    /// value is not.
    pub zero_blocks_replaced: u64,
    /// Live blocks by E8M0 byte.
    pub histogram: BTreeMap<u8, u64>,
    /// Matrices by the exponent `m` of their scale `2^m`; empty for MXFP4.
    pub global_exponents: BTreeMap<i32, u64>,
}

impl Exponents {
    pub(super) fn new(layer: usize) -> Self {
        Self { layer: Some(layer), ..Self::default() }
    }

    /// All layers together.
    pub fn sum<'a>(layers: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for layer in layers {
            all.kmin = [all.kmin, layer.kmin].into_iter().flatten().min();
            all.kmax = all.kmax.max(layer.kmax);
            all.widest = all.widest.max(layer.widest);
            all.live_blocks += layer.live_blocks;
            all.zero_blocks += layer.zero_blocks;
            all.zero_blocks_replaced += layer.zero_blocks_replaced;
            for (e, count) in &layer.histogram {
                *all.histogram.entry(*e).or_default() += count;
            }
            for (m, count) in &layer.global_exponents {
                *all.global_exponents.entry(*m).or_default() += count;
            }
        }
        all
    }

    /// Takes in the matrices that share a scale; `m` is its exponent, if they are to have one.
    pub(super) fn add(&mut self, census: &Census, replaced: u64, m: Option<(i32, u64)>) {
        if let Some((kmin, kmax)) = census.range() {
            self.kmin = Some(self.kmin.map_or(kmin, |k| k.min(kmin)));
            self.kmax = Some(self.kmax.map_or(kmax, |k| k.max(kmax)));
            self.widest = self.widest.max(Some(kmax.abs_diff(kmin)));
        }
        self.live_blocks += census.live_blocks();
        self.zero_blocks += census.zero_blocks();
        self.zero_blocks_replaced += replaced;
        for (e, &count) in census.live.iter().enumerate().filter(|(_, count)| **count > 0) {
            *self.histogram.entry(e as u8).or_default() += count;
        }
        if let Some((m, matrices)) = m {
            *self.global_exponents.entry(m).or_default() += matrices;
        }
    }
}

/// What quantizing a matrix cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MatrixRounding {
    /// The tensor of the source.
    pub tensor: String,
    /// `|W' - W| / |W|`
    pub relative_l2: f64,
    /// The largest difference of two elements.
    pub largest: f64,
    /// Sum of squared differences, and of squared weights.
    pub squares: [f64; 2],
}

impl MatrixRounding {
    pub(super) fn new(tensor: &str, error: &RoundingError) -> Self {
        Self {
            tensor: tensor.to_owned(),
            relative_l2: error.relative_l2(),
            largest: error.largest,
            squares: [error.squared_error, error.squared_norm],
        }
    }
}

/// What quantizing cost all matrices that are called alike, such as `self_attn.q_proj`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct KindRounding {
    /// Their name without that of the layer.
    pub kind: String,
    /// How many.
    pub matrices: usize,
    /// `|W' - W| / |W|` of all of them together.
    pub relative_l2: f64,
    /// The largest of a single one.
    pub worst_relative_l2: f64,
    /// Which one that is.
    pub worst: String,
    /// The largest difference of two elements.
    pub largest: f64,
}

impl KindRounding {
    /// By kind, in alphabetical order; `matrices` in the order of the plan.
    pub(super) fn of<'a>(matrices: impl Iterator<Item = &'a MatrixRounding>) -> Vec<Self> {
        let mut kinds: BTreeMap<&str, Vec<&MatrixRounding>> = BTreeMap::new();
        for matrix in matrices {
            let name = module(&matrix.tensor);
            kinds.entry(split_layer(name).map_or(name, |(_, kind)| kind)).or_default().push(matrix);
        }
        let kind = |(kind, matrices): (&str, Vec<&MatrixRounding>)| {
            let mut all = RoundingError::default();
            let mut worst = matrices[0];
            for matrix in &matrices {
                let [squared_error, squared_norm] = matrix.squares;
                all.add(&RoundingError { squared_error, squared_norm, largest: matrix.largest });
                worst = if matrix.relative_l2 > worst.relative_l2 { matrix } else { worst };
            }
            Self {
                kind: kind.to_owned(),
                matrices: matrices.len(),
                relative_l2: all.relative_l2(),
                worst_relative_l2: worst.relative_l2,
                worst: worst.tensor.clone(),
                largest: all.largest,
            }
        };
        kinds.into_iter().map(kind).collect()
    }
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FileRecord {
    /// File name.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// BLAKE3 of the whole file, in hexadecimal, as `b3sum` prints it.
    pub blake3: String,
    /// The exponents of the routed experts in it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exponents: Option<Exponents>,
    /// The matrices in it that were quantized.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub rounding: Vec<MatrixRounding>,
}

/// What of the source is not in the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LeftOut {
    /// Tensors, by reason.
    pub tensors: BTreeMap<&'static str, usize>,
    /// Files beside the shards.
    pub files: Vec<String>,
}

/// What a finished tree is. It stands in the tree as `repack.json` and is the same whatever happened on the way there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The version of this object.
    pub k3_repack: u32,
    /// What was asked for.
    #[serde(serialize_with = "as_text")]
    pub recipe: Recipe,
    /// What it was made of.
    pub source: SourceId,
    /// Bytes of all tensors.
    pub total_size: u64,
    /// Tensors.
    pub tensors: usize,
    /// All layers together.
    pub exponents: Exponents,
    /// What quantizing dense matrices cost.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rounding: Vec<KindRounding>,
    /// Matrices that stayed BF16 because their columns are no whole blocks of the format.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_quantized: Vec<String>,
    /// The shards.
    pub shards: Vec<FileRecord>,
    /// Everything else but this file, the index among it.
    pub files: Vec<FileRecord>,
    /// What of the source is not in it.
    pub left_out: LeftOut,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn as_text<S: serde::Serializer>(recipe: &Recipe, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(recipe)
}

/// What one call did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// The finished tree; `None` if shards are missing, because the run was over some layers only.
    pub report: Option<Report>,
    /// Shards that this run wrote.
    pub written: Vec<FileRecord>,
    /// Shards that were complete before, and of those that had to be compared with the source, the ones that are right.
    pub resumed: usize,
    /// Shards of the result that do not exist yet.
    pub missing: Vec<String>,
    /// The exponents of every layer whose shard is complete, by layer.
    pub exponents: Vec<Exponents>,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// What was verified, if that was asked for.
    pub proof: Option<Proof>,
    /// What a user should hear once.
    pub notes: Vec<String>,
}

/// `hash` in hexadecimal.
pub(super) fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}
