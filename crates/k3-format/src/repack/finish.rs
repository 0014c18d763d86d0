//! The last files of a tree: everything beside the shards, its report, and the index.

use std::fs::{self, File};
use std::path::Path;

use crate::index::INDEX_FILE;
use crate::new_file::NewFile;
use crate::small_file::read_small;
use crate::writer::{index_text, write_index};
use crate::{Checkpoint, Error, OpenOptions, ShardError};

use super::REPORT_FILE;
use super::differences::IndexFate;
use super::error::RepackError;
use super::extras::Extras;
use super::plan::Plan;
use super::report::{Exponents, FileRecord, KindRounding, LeftOut, Report};
use super::source_id::SourceId;

/// The report of a tree whose shards are all complete; `shards` in the order of the plan.
pub(super) fn report(
    plan: &Plan,
    source: &SourceId,
    shards: Vec<FileRecord>,
    extras: &Extras,
) -> Result<Report, RepackError> {
    let record = |name: &str, len: u64, hash: blake3::Hash| FileRecord {
        name: name.to_owned(),
        len,
        blake3: hash.to_hex().to_string(),
        exponents: None,
        rounding: Vec::new(),
    };
    let mut files: Vec<FileRecord> =
        extras.outputs.iter().map(|extra| record(&extra.name, extra.len, extra.hash)).collect();
    let (mut len, mut hasher) = (0, blake3::Hasher::new());
    index_text(INDEX_FILE.as_ref(), weight_map(plan), plan.data_bytes(), &mut |piece| {
        len += piece.len() as u64;
        hasher.update(piece);
        Ok(())
    })?;
    files.push(record(INDEX_FILE, len, hasher.finalize()));
    Ok(Report {
        k3_repack: 1,
        recipe: plan.recipe,
        source: source.clone(),
        total_size: plan.data_bytes(),
        tensors: plan.shards.iter().map(|shard| shard.tensors).sum(),
        exponents: Exponents::sum(shards.iter().filter_map(|shard| shard.exponents.as_ref())),
        rounding: KindRounding::of(shards.iter().flat_map(|shard| &shard.rounding)),
        not_quantized: plan.quantized().1.into_iter().map(|dense| dense.source.clone()).collect(),
        files,
        left_out: LeftOut {
            tensors: plan.dropped.iter().map(|dropped| (dropped.why, dropped.tensors)).collect(),
            files: extras.left_out.clone(),
        },
        shards,
    })
}

/// Each tensor with its shard, in file order.
fn weight_map(plan: &Plan) -> impl Iterator<Item = (String, &str)> {
    let of = |shard| plan.specs(shard).map(|spec| (spec.name, shard.name.as_str()));
    plan.shards.iter().flat_map(of)
}

/// The text of `repack.json`.
pub(super) fn report_text(report: &Report) -> Result<Vec<u8>, RepackError> {
    let mut text = serde_json::to_vec_pretty(report)
        .map_err(|e| RepackError::Config { path: REPORT_FILE.into(), message: e.to_string() })?;
    text.push(b'\n');
    Ok(text)
}

/// Writes what is not there yet or differs, the index last.
pub(super) fn write(dir: &Path, plan: &Plan, extras: &Extras, report: &Report) -> Result<(), RepackError> {
    for extra in &extras.outputs {
        extra.write(dir)?;
    }
    let mut file = NewFile::create(&dir.join(REPORT_FILE))?;
    file.write(&report_text(report)?)?;
    file.commit()?;
    Ok(write_index(dir, weight_map(plan), plan.data_bytes())?)
}

/// Whether everything beside the shards of a finished tree is as it was written.
pub(super) fn is_whole(dir: &Path, report: &Report) -> Result<bool, RepackError> {
    if read_small(&dir.join(REPORT_FILE)).ok().as_deref() != Some(&report_text(report)?) {
        return Ok(false);
    }
    let same = |record: &FileRecord| {
        let path = dir.join(&record.name);
        let is_file = fs::symlink_metadata(&path).is_ok_and(|m| m.is_file() && m.len() == record.len);
        let mut hasher = blake3::Hasher::new();
        let hashed =
            is_file && File::open(&path).and_then(|file| hasher.update_reader(file).map(drop)).is_ok();
        hashed && hasher.finalize().to_hex().as_str() == record.blake3
    };
    Ok(report.files.iter().all(same))
}

/// Opens a finished tree as an engine does, and checks that it is the same model.
pub(super) fn open(dir: &Path, source: &Checkpoint) -> Result<(), RepackError> {
    let result = Checkpoint::open(dir, &open_options(source)).map_err(|error| not_opened(dir, error))?;
    if result.config() == source.config() && result.variant() == source.variant() {
        return Ok(());
    }
    let (what, index) = (": its config is another model's", IndexFate::remove(dir));
    Err(RepackError::NotOpened { dir: dir.to_owned(), what, index, source: None })
}

/// Takes the index from a finished tree that does not open, unless the system was what failed.
pub(super) fn not_opened(dir: &Path, error: Error) -> RepackError {
    if matches!(error, Error::ReadFile { .. } | Error::Shards(ShardError::Io { .. })) {
        return error.into();
    }
    let index = IndexFate::remove(dir);
    RepackError::NotOpened { dir: dir.to_owned(), what: "", index, source: Some(Box::new(error)) }
}

/// Options that find the tensors of the same model as `source` does.
pub(super) fn open_options(source: &Checkpoint) -> OpenOptions {
    match source.indexer_names() {
        Some(resolution) => OpenOptions::default().indexer_names(resolution.names.clone()),
        None => OpenOptions::default(),
    }
}
