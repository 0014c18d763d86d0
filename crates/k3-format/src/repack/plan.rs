//! What a repack will do, from the headers of the source alone: which shards come out, what they hold in which order,
//! and where it comes from.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;

use crate::experts::{EXPERTS_PREFIX, ExpertLayout, MATRICES, matrix_name};
use crate::names::{Names, split_layer};
use crate::shards::TensorInfo;
use crate::survey::VISION_PREFIXES;
use crate::writer::{TensorSpec, planned_header};
use crate::{Checkpoint, ExpertFormat, ShardError, TensorId};

use super::dense::{self, dense_format};
use super::error::RepackError;
use super::{DenseFormat, Naming, Recipe};

/// The data section of every shard begins at a multiple of this.
pub(super) const DATA_ALIGN: u64 = 4096;

/// All shards that a source and a recipe give.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The recipe.
    pub recipe: Recipe,
    /// In the order of their names.
    pub shards: Vec<ShardPlan>,
    /// How the bytes of an expert follow each other in the result; bytes of the run are its stride.
    pub experts: ExpertLayout,
    /// Routed experts of a layer that has them.
    pub experts_per_layer: usize,
    /// Tensors of the source that the result does not have, with the reason.
    pub dropped: Vec<Dropped>,
}

/// Tensors that are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dropped {
    /// Why.
    pub why: &'static str,
    /// How many.
    pub tensors: usize,
    /// Their bytes in the source.
    pub bytes: u64,
}

/// One shard of the result: routed experts in id order, then dense tensors, then what experts have beside their runs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardPlan {
    /// File name.
    pub name: String,
    /// The decoder layer that it holds (0-based); `None` for the model level and for vision.
    pub layer: Option<usize>,
    /// Whether routed experts of that layer are in it.
    pub has_experts: bool,
    /// The other tensors, in file order.
    pub dense: Vec<DensePlan>,
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// Bytes of its data section.
    pub data_bytes: u64,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the file, as an upper bound.
    pub file_bytes: u64,
}

/// A tensor outside the routed experts, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DensePlan {
    /// Its name in the source.
    pub source: String,
    /// What it is for; `None` if the language model does not have it.
    pub id: Option<TensorId>,
    /// How it is written.
    pub format: DenseFormat,
    /// What it becomes, in file order.
    pub outputs: Vec<TensorSpec>,
}

/// Which shard a tensor goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Layer(usize),
    Model,
    Rest,
}

impl Plan {
    /// Plans a source.
    ///
    /// # Errors
    /// [`RepackError::SourceFormat`] if its experts are not MXFP4.
    pub fn new(source: &Checkpoint, recipe: Recipe) -> Result<Self, RepackError> {
        let config = source.config();
        if source.expert_format() != ExpertFormat::Mxfp4 {
            return Err(RepackError::SourceFormat {
                dir: source.dir().to_owned(),
                found: source.expert_format(),
            });
        }
        if let Some((&format, &(count, _))) = source.linear_formats().iter().next() {
            return Err(RepackError::SourceQuantized { dir: source.dir().to_owned(), count, format });
        }
        let integers = matches!(recipe.dense, DenseFormat::Int8 | DenseFormat::Int4);
        if integers && recipe.names == Naming::ModelOpt {
            return Err(RepackError::Recipe {
                recipe: recipe.to_string(),
                why: "ModelOpt stores integer weights in other layouts, which are not written; take --dense nvfp4, or the \
                      names of compressed-tensors",
            });
        }
        let ids: HashMap<String, TensorId> =
            Names::tensors(config).map(|(id, entry)| (source.names().name(entry, id.layer), id)).collect();
        let layers = config.num_hidden_layers();
        let mut dropped = Droppings::default();
        let mut found: Vec<(Place, TensorInfo<'_>)> = Vec::new();
        for tensor in source.shards().iter() {
            let place = match split_layer(tensor.name) {
                Some((layer, suffix)) if layer < layers => {
                    if config.is_moe(layer) && suffix.starts_with(EXPERTS_PREFIX) {
                        let part = suffix.rsplit('.').next().unwrap_or_default();
                        if !matches!(part, "weight_packed" | "weight_scale") {
                            dropped.add(
                                "activation scales of routed experts, which MXFP4 has no use for",
                                &tensor,
                            );
                        }
                        continue;
                    }
                    Place::Layer(layer)
                }
                _ if ids.contains_key(tensor.name) => Place::Model,
                _ => Place::Rest,
            };
            if recipe.text_only && VISION_PREFIXES.iter().any(|prefix| tensor.name.starts_with(prefix)) {
                dropped.add("vision, by --text-only", &tensor);
                continue;
            }
            found.push((place, tensor));
        }
        let format_of = |tensor: &TensorInfo<'_>| {
            dense_format(ids.get(tensor.name).map(|id| id.role), tensor, recipe.dense)
        };
        // Large elements first keeps every element aligned; then by name, whatever order the source has. Quantized
        // matrices begin with what is larger still, and have whole multiples of it.
        let rank = |tensor: &TensorInfo<'_>| {
            (format_of(tensor) == DenseFormat::Bf16, std::cmp::Reverse(tensor.dtype.bitsize()))
        };
        found.sort_by(|(a, x), (b, y)| a.cmp(b).then_with(|| rank(x).cmp(&rank(y))).then(x.name.cmp(y.name)));
        let mut places: Vec<Place> = (0..layers).map(Place::Layer).collect();
        places.extend(found.iter().map(|(place, _)| *place));
        places.sort_unstable();
        places.dedup();

        let mut plan = Self {
            recipe,
            shards: Vec::with_capacity(places.len()),
            experts: ExpertLayout::new(config, recipe.expert_format()),
            experts_per_layer: config.moe.num_experts,
            dropped: dropped.0,
        };
        let source_expert = source.experts().layout().len as u64;
        for (i, place) in places.iter().enumerate() {
            let here = found.iter().filter(|(p, _)| p == place);
            // The factor of an NVFP4 matrix comes from all of it.
            let times = |tensor| if format_of(tensor) == DenseFormat::Nvfp4 { 2 } else { 1 };
            let mut read_bytes: u64 = here.clone().map(|(_, t)| times(t) * t.byte_len()).sum();
            let dense = here
                .map(|(_, tensor)| {
                    let id = ids.get(tensor.name).copied();
                    let format = format_of(tensor);
                    let outputs = dense::outputs(tensor, format, recipe.names);
                    DensePlan { source: tensor.name.to_owned(), id, format, outputs }
                })
                .collect();
            let layer = if let Place::Layer(layer) = place { Some(*layer) } else { None };
            let has_experts = layer.is_some_and(|layer| config.is_moe(layer));
            if has_experts {
                read_bytes += source_expert * plan.experts_per_layer as u64;
            }
            let mut shard = ShardPlan {
                name: format!("model-{:05}-of-{:05}.safetensors", i + 1, places.len()),
                layer,
                has_experts,
                dense,
                read_bytes,
                data_bytes: 0,
                tensors: 0,
                file_bytes: 0,
            };
            let (mut tensors, mut data_bytes, mut header_bytes) = (0, 0, 0);
            for spec in plan.specs(&shard) {
                let unplannable = |source| RepackError::Unplannable { shard: shard.name.clone(), source };
                data_bytes += spec.byte_len().map_err(unplannable)?;
                tensors += 1;
                // dtype, shape and offsets of an entry have fewer characters than this.
                header_bytes += spec.name.len() as u64 + 200;
            }
            (shard.tensors, shard.data_bytes) = (tensors, data_bytes);
            shard.file_bytes = DATA_ALIGN + header_bytes + data_bytes;
            plan.shards.push(shard);
        }
        Ok(plan)
    }

    /// The tensors of a shard, in file order.
    pub(super) fn specs<'a>(&'a self, shard: &'a ShardPlan) -> impl Iterator<Item = TensorSpec> + 'a {
        let layer = shard.layer.filter(|_| shard.has_experts);
        let experts = layer.into_iter().flat_map(|layer| self.expert_specs(layer));
        let beside = layer.into_iter().flat_map(|layer| self.beside_specs(layer));
        experts.chain(shard.dense.iter().flat_map(|dense| dense.outputs.iter().cloned())).chain(beside)
    }

    /// What stands before the data of a shard, which will be at `path`.
    pub(super) fn header(&self, path: &Path, shard: &ShardPlan) -> Result<Vec<u8>, ShardError> {
        let specs: Vec<TensorSpec> = self.specs(shard).collect();
        Ok(planned_header(path, DATA_ALIGN, &specs, Some(&metadata()))?.bytes)
    }

    /// BLAKE3 of the JSON of that header, as [`crate::ShardFile::header_hash`].
    pub(super) fn header_hash(&self, path: &Path, shard: &ShardPlan) -> Result<[u8; 32], ShardError> {
        Ok(blake3::hash(&self.header(path, shard)?[8..]).into())
    }

    /// The runs of all experts of a layer.
    fn expert_specs(&self, layer: usize) -> impl Iterator<Item = TensorSpec> + '_ {
        let (packed, scale) = match self.experts.format {
            ExpertFormat::Mxfp4 => ("weight_packed", Dtype::U8),
            ExpertFormat::Nvfp4CompressedTensors => ("weight_packed", Dtype::F8_E4M3),
            ExpertFormat::Nvfp4ModelOpt => ("weight", Dtype::F8_E4M3),
        };
        let group = self.experts.format.group_size();
        matrices(self.experts_per_layer).flat_map(move |(expert, which)| {
            let module = matrix_name(layer, expert, which);
            let (rows, cols) = self.experts.shapes[which];
            let spec = |part: &str, dtype, cols: usize| TensorSpec {
                name: format!("{module}.{part}"),
                dtype,
                shape: vec![rows as u64, cols as u64],
            };
            [spec(packed, Dtype::U8, cols / 2), spec("weight_scale", scale, cols / group)]
        })
    }

    /// The scalars of all experts of a layer: they stand behind everything else, or they would shift what follows.
    fn beside_specs(&self, layer: usize) -> impl Iterator<Item = TensorSpec> + '_ {
        let parts: &[(&str, &[u64])] = match self.experts.format {
            ExpertFormat::Mxfp4 => &[],
            ExpertFormat::Nvfp4CompressedTensors => &[("weight_global_scale", &[1])],
            ExpertFormat::Nvfp4ModelOpt => &[("weight_scale_2", &[]), ("input_scale", &[])],
        };
        parts.iter().flat_map(move |(part, shape)| {
            matrices(self.experts_per_layer).map(move |(expert, which)| TensorSpec {
                name: format!("{}.{part}", matrix_name(layer, expert, which)),
                dtype: Dtype::F32,
                shape: shape.to_vec(),
            })
        })
    }

    /// Positions of the shards that a run over `layers` writes: those of the layers and all that belong to none.
    pub(super) fn selected(&self, layers: Option<&Range<usize>>) -> Vec<usize> {
        let selected = |shard: &ShardPlan| match (shard.layer, layers) {
            (Some(layer), Some(layers)) => layers.contains(&layer),
            _ => true,
        };
        (0..self.shards.len()).filter(|&i| selected(&self.shards[i])).collect()
    }

    /// Matrices that are quantized, and those that would be, had they other widths.
    pub(super) fn quantized(&self) -> (Vec<&DensePlan>, Vec<&DensePlan>) {
        let dense = self.shards.iter().flat_map(|shard| &shard.dense);
        let asked = |d: &&DensePlan| {
            self.recipe.dense != DenseFormat::Bf16 && d.id.is_some_and(|id| id.role.is_quantized_on_request())
        };
        dense.filter(asked).partition(|d| d.format != DenseFormat::Bf16)
    }

    /// Bytes of all tensors of the result.
    pub fn data_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.data_bytes).sum()
    }
}

/// `__metadata__` of every shard: loaders of PyTorch models ask for it.
pub(super) fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// All matrices of a layer's experts, in id order and in the order w1, w2, w3.
fn matrices(experts: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..experts).flat_map(|expert| (0..MATRICES.len()).map(move |which| (expert, which)))
}

/// Counts what is left out, by reason.
#[derive(Default)]
struct Droppings(Vec<Dropped>);

impl Droppings {
    fn add(&mut self, why: &'static str, tensor: &TensorInfo<'_>) {
        let at = self.0.iter().position(|d| d.why == why).unwrap_or_else(|| {
            self.0.push(Dropped { why, tensors: 0, bytes: 0 });
            self.0.len() - 1
        });
        self.0[at].tensors += 1;
        self.0[at].bytes += tensor.byte_len();
    }
}
