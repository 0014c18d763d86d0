//! Writes a geometry to a directory, one block of one tensor at a time.
//!
//! Full shards go through the same writer as any tool of this workspace; sparse ones have no data to write and take their
//! header from the safetensors crate.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use indicatif::DecimalBytes;
use k3_format::{ShardWriter, TensorSpec, write_index};
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::fill::Filler;
use super::layout::{self, Tensor};
use super::{Geometry, config};

/// What does not change the sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SynthOptions {
    /// Seed of the values.
    pub seed: u64,
    /// Leave the data of every shard as a hole that reads as zeros.
    pub sparse: bool,
}

/// How far a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of tensor data written.
    pub bytes_done: u64,
    /// Bytes of tensor data in all.
    pub bytes_total: u64,
    /// The shard being written, 1-based.
    pub shard: usize,
    /// Shards in all.
    pub shards: usize,
}

/// What a checkpoint consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Shard files.
    pub shards: usize,
    /// Names in the index.
    pub tensors: usize,
    /// Bytes of tensor data: the index's `total_size`.
    pub data_bytes: u64,
    /// Bytes of all shard files, headers included, holes counted in full.
    pub file_bytes: u64,
}

/// Data starts at a multiple of this, as in the release: 8, not a page (`docs/checkpoint.md` 5).
const DATA_ALIGNMENT: u64 = 8;

/// What [`write`] would make, if `geometry` can exist. `file_bytes` is an upper bound.
pub(super) fn plan(geometry: &Geometry) -> Result<Summary> {
    geometry.check()?;
    let mut summary = Summary { shards: layout::shard_count(geometry), ..Summary::default() };
    for index in 0..summary.shards {
        let tensors = layout::shard(geometry, index);
        summary.tensors += tensors.len();
        let data = tensors.iter().try_fold(summary.data_bytes, |sum, tensor| sum.checked_add(tensor.bytes()));
        summary.data_bytes = data.context("a checkpoint of these sizes would have more than 2^64 bytes")?;
        summary.file_bytes += tensors.iter().map(header_bytes).sum::<u64>() + 4096;
    }
    summary.file_bytes = summary.file_bytes.saturating_add(summary.data_bytes);
    Ok(summary)
}

/// Writes a complete checkpoint of `geometry` to `dir`, which must be missing or empty, in bounded memory.
///
/// `report` is called after every block. The index comes last: a directory without one is an interrupted write.
///
/// # Errors
///
/// A geometry that no checkpoint can have, a directory with something in it, too little free space, and every
/// error of the file system.
pub fn write(
    dir: &Path,
    geometry: &Geometry,
    options: &SynthOptions,
    report: &mut dyn FnMut(Progress),
) -> Result<Summary> {
    let plan = plan(geometry)?;
    prepare(dir)?;
    check_space(dir, &plan, options)?;
    let mut summary = Summary { shards: plan.shards, ..Summary::default() };
    let config = config::config(geometry)?;
    write_json(&dir.join("config.json"), &config)?;
    write_json(&dir.join("generation_config.json"), &config::generation_config(geometry, &config))?;

    let mut filler = Filler::new(options.seed);
    let mut weight_map = Vec::with_capacity(plan.tensors);
    for index in 0..plan.shards {
        let tensors = layout::shard(geometry, index);
        let file = layout::shard_name(geometry, index);
        let path = dir.join(&file);
        let step =
            Progress { bytes_done: 0, bytes_total: plan.data_bytes, shard: index + 1, shards: plan.shards };
        if options.sparse {
            summary.file_bytes += sparse_shard(&path, &tensors)?;
            summary.data_bytes += tensors.iter().map(Tensor::bytes).sum::<u64>();
            report(Progress { bytes_done: summary.data_bytes, ..step });
        } else {
            let written = |bytes| {
                summary.data_bytes += bytes;
                report(Progress { bytes_done: summary.data_bytes, ..step });
            };
            summary.file_bytes += full_shard(&path, &tensors, &mut filler, written)?;
        }
        summary.tensors += tensors.len();
        weight_map.extend(tensors.into_iter().map(|tensor| (tensor.name, file.clone())));
    }
    // The order of an index says nothing of the order on disk; in the release it does not either.
    weight_map.sort_unstable();
    write_index(dir, weight_map, summary.data_bytes)?;
    Ok(summary)
}

/// Returns the length of the file. `written` is told of every block.
fn full_shard(
    path: &Path,
    tensors: &[Tensor],
    filler: &mut Filler,
    mut written: impl FnMut(u64),
) -> Result<u64> {
    let specs: Vec<TensorSpec> = tensors.iter().map(Tensor::spec).collect();
    let mut shard = ShardWriter::create(path, DATA_ALIGNMENT, &specs, None)?;
    for tensor in tensors {
        filler.fill(&tensor.name, tensor.fill, tensor.store(), tensor.elements(), |block| {
            shard.write(block)?;
            written(block.len() as u64);
            anyhow::Ok(())
        })?;
    }
    Ok(shard.finish()?)
}

/// The same file with a hole for the data. Returns its length.
fn sparse_shard(path: &Path, tensors: &[Tensor]) -> Result<u64> {
    let mut entries = Vec::with_capacity(tensors.len());
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += tensor.bytes() as usize;
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        entries.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (begin, end) }));
    }
    let doing = || format!("writing {}", path.display());
    let header = Metadata::new(None, entries).with_context(doing)?;
    let mut json = serde_json::to_vec(&header).with_context(doing)?;
    json.resize((8 + json.len()).next_multiple_of(DATA_ALIGNMENT as usize) - 8, b' ');
    let length = 8 + json.len() as u64 + end as u64;
    let mut file = File::create_new(path).with_context(doing)?;
    file.write_all(&(json.len() as u64).to_le_bytes()).with_context(doing)?;
    file.write_all(&json).with_context(doing)?;
    file.set_len(length).with_context(|| format!("extending {} to {length} bytes", path.display()))?;
    Ok(length)
}

/// A generous estimate of a tensor's entry in a header and in the index.
fn header_bytes(tensor: &Tensor) -> u64 {
    2 * tensor.name.len() as u64 + 200
}

fn prepare(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating the directory {}", dir.display()))?;
    let mut entries = fs::read_dir(dir).with_context(|| format!("looking into {}", dir.display()))?;
    if let Some(entry) =
        entries.next().transpose().with_context(|| format!("looking into {}", dir.display()))?
    {
        anyhow::bail!(
            "{} is not empty (it holds {}); name a new or empty directory, or delete what is there if it is an \
             interrupted synth",
            dir.display(),
            entry.file_name().display(),
        );
    }
    Ok(())
}

fn check_space(dir: &Path, plan: &Summary, options: &SynthOptions) -> Result<()> {
    let needed = if options.sparse { plan.file_bytes - plan.data_bytes } else { plan.file_bytes };
    let stat = rustix::fs::statvfs(dir)
        .map_err(io::Error::from)
        .with_context(|| format!("asking for the free space of {}", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    ensure!(
        needed <= free,
        "{} needs {} ({needed} bytes), its file system has {} ({free} bytes) free; take another disk, a smaller \
         --geometry, fewer --layers or --experts, or --sparse",
        dir.display(),
        DecimalBytes(needed),
        DecimalBytes(free),
    );
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(value).context("serialising")?;
    text.push(b'\n');
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
