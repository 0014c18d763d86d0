//! Comparing a snapshot's tensors with its config: variant, presence, dtypes, shapes, values of small tensors, routed
//! experts, and nothing unknown (`docs/checkpoint.md` 10).

use std::collections::HashMap;

use bytes::Bytes;
use safetensors::Dtype;

use crate::config::{ConfigFile, MAX_WIDTH, ModulePattern};
use crate::error::{Error, TensorErrors, TensorProblem, describe};
use crate::experts::{Experts, matrix_name};
use crate::gate;
use crate::identity::{hash_sample, hash_tensor};
use crate::indexer::{self, IndexerResolution, ResolvedBy, Unplaced};
use crate::linear::{self, StoredLinear, split_part};
use crate::linear_config;
use crate::names::{Extent, IndexerNames, Names, TableEntry};
use crate::shards::{Shards, TensorInfo};
use crate::survey::Survey;
use crate::values::{check_vector, read_vector, widen};
use crate::warning::Warning;
use crate::{IndexerConfig, ModelConfig, Role, TensorId, Variant};

/// What the checks of an opened checkpoint yield.
pub(crate) struct Checked {
    pub(crate) config: ModelConfig,
    pub(crate) variant: Variant,
    pub(crate) names: Names,
    pub(crate) indexer: Option<IndexerResolution>,
    pub(crate) experts: Experts,
    /// Matrices that are stored quantized.
    pub(crate) linears: HashMap<TensorId, StoredLinear>,
    pub(crate) warnings: Vec<Warning>,
    pub(crate) table_bytes: u64,
    /// Hash of the small tensors, which were all read, and of samples of the others.
    pub(crate) values: blake3::Hash,
}

/// Checks everything; `requested` are names for the indexer tensors that the caller gave.
pub(crate) fn check(
    file: ConfigFile,
    requested: Option<&IndexerNames>,
    shards: &Shards,
) -> Result<Checked, Error> {
    let mut survey = Survey::new(&file, shards);
    check_indexer_is_plain(requested, &survey.unplaced)?;
    let (tensors, resolution) =
        indexer::resolve(&file.model, file.dsa.as_ref(), requested, &survey.unplaced, shards)?;
    let variant = gate::decide(&file.markers, &tensors)?;

    let mut warnings = config_warnings(&file);
    let mut errors = std::mem::take(&mut survey.errors);
    let mut table = survey.table;
    let parts = survey.parts;
    let mut config = file.model;
    let names = Names::new(resolution.names.clone());
    let mut indexer = None;
    let mut unplaced = survey.unplaced;
    if variant == Variant::K31 {
        let placed = place_indexer(&mut unplaced, &resolution.names);
        config.indexer = indexer_config(file.dsa.as_ref(), &placed, &config, &mut errors);
        table.extend(placed);
        if !matches!(resolution.by, ResolvedBy::Table) {
            warnings.push(Warning::IndexerNames(resolution.clone()));
        }
        indexer = Some(resolution);
    }

    let part_bytes = parts.values().flat_map(linear::Parts::iter).map(|t| t.byte_len());
    let table_bytes = table.values().map(TensorInfo::byte_len).chain(part_bytes).sum();
    let mut narrower = Vec::new();
    let mut values = blake3::Hasher::new();
    let mut linears = HashMap::new();
    for (id, entry) in Names::tensors(&config) {
        let (tensor, parts) = (table.get(&id), parts.get(&id));
        let quantized = parts.is_some();
        if quantized && !entry.role.may_be_quantized() {
            for part in parts.into_iter().flat_map(linear::Parts::iter) {
                errors.push(|| TensorProblem::NeverQuantized { name: part.name.to_owned() });
            }
        } else if let Extent::Matrix(rows, cols) = entry.extent(&config)
            && quantized
        {
            let module = names.module(entry, id.layer);
            let parts = parts.copied().unwrap_or_default();
            let stored =
                linear::find(&module, (rows, cols), tensor, &parts, shards, &mut errors, &mut values)?;
            linears.extend(stored.map(|stored| (id, stored)));
        } else {
            match tensor {
                Some(tensor) => {
                    match check_entry(entry, &config, tensor, shards, &mut errors, &mut narrower)? {
                        Entry::Small(bytes) => hash_tensor(&mut values, tensor, &bytes),
                        Entry::Large => hash_sample(&mut values, tensor, shards)?,
                        Entry::Bad => {}
                    }
                }
                None => errors.push(|| TensorProblem::Missing {
                    name: names.name(entry, id.layer),
                    expected: format!("{} {}", entry.release, entry.extent(&config)),
                }),
            }
        }
    }
    linear_config::compare(&file.quantization, &config, &names, &linears, &mut errors, &mut warnings);
    let unknown = unplaced.iter().map(|u| u.tensor.name).chain(survey.unknown_language.iter().copied());
    for name in unknown {
        errors.push(|| TensorProblem::Unknown { name: name.to_owned() });
    }
    let experts = survey.experts.finish(&config, &file.quantization, shards, &mut errors)?;
    let Some(experts) = experts.filter(|_| errors.total == 0) else { return Err(errors.into()) };

    experts.hash_global_scales(&mut values);
    if !narrower.is_empty() {
        warnings.push(Warning::NarrowerThanRelease(narrower));
    }
    let (vision, activation_scales, cache_scales) =
        (survey.vision, survey.activation_scales, survey.cache_scales);
    if vision + activation_scales + cache_scales > 0 {
        warnings.push(Warning::Skipped { vision, activation_scales, cache_scales });
    }
    if survey.unknown > 0 {
        warnings.push(Warning::UnknownTensors { count: survey.unknown, first: survey.unknown_named });
    }
    if experts.scattered() > 0 {
        warnings.push(Warning::ScatteredExperts(experts.scattered()));
    }
    let values = values.finalize();
    Ok(Checked { config, variant, names, indexer, experts, linears, warnings, table_bytes, values })
}

fn config_warnings(file: &ConfigFile) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if !file.unknown_keys.is_empty() {
        warnings.push(Warning::UnknownConfigKeys(file.unknown_keys.clone()));
    }
    if file.quantization.quantizes_activations {
        warnings.push(Warning::ActivationsNotQuantized);
    }
    let layer = file.model.first_k_dense_replace;
    if layer < file.model.num_hidden_layers() {
        let module = matrix_name(layer, 0, 0);
        for entry in &file.quantization.ignore {
            match ModulePattern::new(entry).and_then(|mut pattern| pattern.speaks_of_experts(&module)) {
                Ok(false) => {}
                Ok(true) => {
                    let tensor = format!("{module}.weight_scale");
                    warnings.push(Warning::IgnoredModuleIsQuantized { tensor, entry: entry.clone() });
                }
                Err(why) => warnings.push(Warning::IgnorePattern { entry: entry.clone(), why }),
            }
        }
    }
    warnings
}

/// Refuses a quantized indexer before its tensors are looked for: they would seem to be missing.
fn check_indexer_is_plain(
    requested: Option<&IndexerNames>,
    unplaced: &[Unplaced<'_>],
) -> Result<(), TensorErrors> {
    let names = requested.cloned().unwrap_or_default();
    let all = names.all();
    let mut errors = TensorErrors::default();
    for u in unplaced {
        let module = split_part(u.suffix).map(|(module, _)| module);
        let whole = |name: &str| name.strip_suffix(".weight").is_some_and(|m| Some(m) == module);
        if all.iter().any(|(_, name)| whole(name)) {
            errors.push(|| TensorProblem::NeverQuantized { name: u.tensor.name.to_owned() });
        }
    }
    if errors.total == 0 { Ok(()) } else { Err(errors) }
}

/// Takes the indexer tensors out of `unplaced`.
fn place_indexer<'a>(
    unplaced: &mut Vec<Unplaced<'a>>,
    names: &IndexerNames,
) -> HashMap<TensorId, TensorInfo<'a>> {
    let roles = names.all();
    let mut placed = HashMap::new();
    unplaced.retain(|u| match roles.iter().find(|(_, name)| *name == u.suffix) {
        Some((role, _)) => placed.insert(TensorId::layer(u.layer, *role), u.tensor).is_some(),
        None => true,
    });
    placed
}

/// The indexer, with what `dsa_config` leaves out taken from the shapes of the first layer that has one. The check
/// of all shapes against it comes later.
fn indexer_config(
    dsa: Option<&crate::DsaConfig>,
    placed: &HashMap<TensorId, TensorInfo<'_>>,
    config: &ModelConfig,
    errors: &mut TensorErrors,
) -> Option<IndexerConfig> {
    let dsa = dsa?;
    let first = placed.keys().filter_map(|id| id.layer).min();
    let mut rows = |given: Option<usize>, role| {
        if given.is_some() {
            return given;
        }
        let tensor = placed.get(&TensorId { layer: first, role })?;
        let rows = match *tensor.shape {
            [rows, cols] if cols == config.hidden_size as u64 => usize::try_from(rows).ok(),
            _ => None,
        };
        let rows = rows.filter(|rows| (1..=MAX_WIDTH).contains(rows));
        if rows.is_none() {
            errors.push(|| TensorProblem::Shape {
                name: tensor.name.to_owned(),
                expected: format!("[rows, {}], which dsa_config leaves to the tensors", config.hidden_size),
                found: format!("{:?}", tensor.shape),
            });
        }
        rows
    };
    let head_dim = rows(dsa.head_dim, Role::IndexerWk);
    let n_heads = rows(dsa.n_heads, Role::IndexerWeightsProj);
    let (n_heads, head_dim) = (n_heads?, head_dim?);
    if n_heads * head_dim > MAX_WIDTH {
        let query = placed.get(&TensorId { layer: first, role: Role::IndexerWqB });
        errors.push(|| TensorProblem::Shape {
            name: query.map_or_else(|| "the indexer's query projection".to_owned(), |t| t.name.to_owned()),
            expected: format!("at most {MAX_WIDTH} rows"),
            found: format!("{n_heads} heads of width {head_dim}"),
        });
        return None;
    }
    Some(IndexerConfig { n_heads, head_dim, topk: dsa.topk })
}

/// What a tensor of the table is found to be.
enum Entry {
    /// A vector that was read: its stored bytes.
    Small(Bytes),
    /// A matrix or convolution of the right dtype and shape.
    Large,
    /// Neither, as the errors say.
    Bad,
}

/// Dtype, shape, and for vectors (but not the larger convolutions) the values.
fn check_entry(
    entry: &TableEntry,
    config: &ModelConfig,
    tensor: &TensorInfo<'_>,
    shards: &Shards,
    errors: &mut TensorErrors,
    narrower: &mut Vec<String>,
) -> Result<Entry, Error> {
    let extent = entry.extent(config);
    let mut good = true;
    if !matches!(tensor.dtype, Dtype::BF16 | Dtype::F32) {
        good = false;
        errors.push(|| TensorProblem::Dtype {
            name: tensor.name.to_owned(),
            expected: "BF16 or F32".to_owned(),
            found: tensor.dtype.to_string(),
        });
    } else if tensor.dtype == Dtype::BF16 && entry.release == Dtype::F32 {
        narrower.push(tensor.name.to_owned());
    }
    if !extent.accepts(tensor.shape) {
        good = false;
        errors.push(|| TensorProblem::Shape {
            name: tensor.name.to_owned(),
            expected: extent.to_string(),
            found: format!("{:?}", tensor.shape),
        });
    }
    if !good {
        return Ok(Entry::Bad);
    }
    if matches!(extent, Extent::Matrix(..) | Extent::Conv(..)) {
        return Ok(Entry::Large);
    }
    let bytes = shards.read(tensor)?;
    let values = widen(tensor.dtype, &bytes);
    checked(values, tensor, extent, errors);
    Ok(Entry::Small(bytes))
}

/// The checked values of a vector; `None` if `errors` says what is wrong with them.
pub(crate) fn load_vector(
    shards: &Shards,
    tensor: &TensorInfo<'_>,
    extent: Extent,
    errors: &mut TensorErrors,
) -> Result<Option<Vec<f32>>, Error> {
    let values = read_vector(shards, tensor)?;
    Ok(checked(values, tensor, extent, errors))
}

fn checked(
    values: Option<Vec<f32>>,
    tensor: &TensorInfo<'_>,
    extent: Extent,
    errors: &mut TensorErrors,
) -> Option<Vec<f32>> {
    let Some(mut values) = values else {
        errors.push(|| TensorProblem::Dtype {
            name: tensor.name.to_owned(),
            expected: "BF16 or F32".to_owned(),
            found: describe(tensor),
        });
        return None;
    };
    match check_vector(&mut values, extent) {
        Ok(()) => Some(values),
        Err(what) => {
            errors.push(|| TensorProblem::Value { name: tensor.name.to_owned(), what });
            None
        }
    }
}
