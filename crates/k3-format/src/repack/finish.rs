//! The last files of a tree: everything beside the shards, its report, and the index.

use std::path::Path;

use crate::Checkpoint;
use crate::new_file::NewFile;
use crate::small_file::read_small;
use crate::writer::write_index;

use super::REPORT_FILE;
use super::error::RepackError;
use super::extras::Extras;
use super::plan::Plan;
use super::report::{FileRecord, KindRounding, LayerExponentsOfAll, LeftOut, Report};
use super::source_id::SourceId;

/// The report of a tree whose shards are all complete; `shards` in the order of the plan.
pub(super) fn report(plan: &Plan, source: &SourceId, shards: Vec<FileRecord>, extras: &Extras) -> Report {
    let files = extras.outputs.iter().map(|(name, bytes)| FileRecord {
        name: name.clone(),
        len: bytes.len() as u64,
        blake3: blake3::hash(bytes).to_hex().to_string(),
        exponents: None,
        rounding: Vec::new(),
    });
    Report {
        k3_repack: 1,
        recipe: plan.recipe,
        source: source.clone(),
        total_size: plan.data_bytes(),
        tensors: plan.shards.iter().map(|shard| shard.tensors).sum(),
        exponents: LayerExponentsOfAll::of(shards.iter().filter_map(|shard| shard.exponents.as_ref())),
        rounding: KindRounding::of(shards.iter().flat_map(|shard| &shard.rounding)),
        not_quantized: plan.quantized().1.into_iter().map(|dense| dense.source.clone()).collect(),
        files: files.collect(),
        left_out: LeftOut {
            tensors: plan.dropped.iter().map(|dropped| (dropped.why, dropped.tensors)).collect(),
            files: extras.left_out.clone(),
        },
        shards,
    }
}

/// The text of `repack.json`.
pub(super) fn report_text(report: &Report) -> Result<Vec<u8>, RepackError> {
    let mut text = serde_json::to_vec_pretty(report).map_err(|e| RepackError::Config {
        path: REPORT_FILE.into(),
        message: e.to_string(),
    })?;
    text.push(b'\n');
    Ok(text)
}

/// Writes what is not there yet or differs, the index last.
pub(super) fn write(dir: &Path, plan: &Plan, extras: &Extras, report: &Report) -> Result<(), RepackError> {
    for (name, bytes) in &extras.outputs {
        write_small(dir, name, bytes)?;
    }
    write_small(dir, REPORT_FILE, &report_text(report)?)?;
    let weight_map = plan.shards.iter().flat_map(|shard| {
        plan.specs(shard).map(|spec| (spec.name, shard.name.as_str()))
    });
    Ok(write_index(dir, weight_map, plan.data_bytes())?)
}

/// Whether all small files of a finished tree are as they were written.
pub(super) fn extras_differ(dir: &Path, extras: &Extras, report: &Report) -> Result<Option<String>, RepackError> {
    let text = report_text(report)?;
    let own = std::iter::once((REPORT_FILE, text.as_slice()));
    let all = extras.outputs.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
    for (name, bytes) in all.chain(own) {
        if read_small(&dir.join(name)).ok().as_deref() != Some(bytes) {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

fn write_small(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), RepackError> {
    let mut file = NewFile::create(&dir.join(name))?;
    file.write(bytes)?;
    Ok(file.commit()?)
}

/// Opens a finished tree as an engine does, and checks that it is the same model.
pub(super) fn open(dir: &Path, source: &Checkpoint) -> Result<(), RepackError> {
    let mut options = crate::OpenOptions::default();
    if let Some(resolution) = source.indexer_names() {
        options = options.indexer_names(resolution.names.clone());
    }
    let result = Checkpoint::open(dir, &options)?;
    if result.config() != source.config() || result.variant() != source.variant() {
        let what = "its config opens as another model than the source's".to_owned();
        return Err(RepackError::Differs { file: dir.join("config.json"), what });
    }
    Ok(())
}
