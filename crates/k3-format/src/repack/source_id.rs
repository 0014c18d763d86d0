//! What tells one source from another, so that a resumed run does not mix two.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use serde::{Deserialize, Serialize};

use crate::Checkpoint;

use super::error::RepackError;
use super::extras::Extras;
use super::journal::Times;
use super::report::hex;

/// Bytes of an expert that count.
const SAMPLE: usize = 4096;

/// A source: every shard's name, length and header, the checkpoint's identity with its small tensors and samples of
/// large ones, samples of two experts a layer, and the small files beside the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceId {
    /// [`crate::CheckpointId`].
    pub checkpoint: String,
    /// BLAKE3 of the samples of routed experts.
    pub experts: String,
    /// The shards, by name.
    pub shards: Vec<SourceFile>,
    /// Config, tokenizer and other files that the result depends on, by name.
    pub files: Vec<SourceFile>,
}

/// A file of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceFile {
    /// File name.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// BLAKE3: of a shard's header, or of all of a small file.
    pub blake3: String,
}

impl SourceId {
    /// Reads what is needed of `source`: a few MB of the published model.
    pub(super) fn of(source: &Checkpoint, extras: &Extras) -> Result<Self, RepackError> {
        let shards = source.shards().files().iter().map(|file| SourceFile {
            name: file.name.clone(),
            len: file.len,
            blake3: hex(&file.header_hash),
        });
        Ok(Self {
            checkpoint: source.identity().to_string(),
            experts: sample_experts(source)?,
            shards: shards.collect(),
            files: extras.sources.clone(),
        })
    }

    /// What differs from `now`, if anything does.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        for (then, now) in [(&self.shards, &now.shards), (&self.files, &now.files)] {
            for file in then {
                match now.iter().find(|f| f.name == file.name) {
                    None => return Some(format!("`{}` is gone", file.name)),
                    Some(other) if other.len != file.len => {
                        return Some(format!("`{}` had {} bytes and has {}", file.name, file.len, other.len));
                    }
                    Some(other) if other.blake3 != file.blake3 => {
                        return Some(format!("`{}` has other contents", file.name));
                    }
                    Some(_) => {}
                }
            }
            if let Some(new) = now.iter().find(|f| then.iter().all(|t| t.name != f.name)) {
                return Some(format!("`{}` is new", new.name));
            }
        }
        if self.checkpoint != now.checkpoint {
            return Some(format!("its identity was {} and is {}", self.checkpoint, now.checkpoint));
        }
        (self.experts != now.experts).then(|| "routed experts have other values".to_owned())
    }
}

/// The middle of the first and the last expert of every layer.
fn sample_experts(source: &Checkpoint) -> Result<String, RepackError> {
    let config = source.config();
    let mut hasher = blake3::Hasher::new();
    let mut sample = [0; SAMPLE];
    let last = config.moe.num_experts.saturating_sub(1) as u32;
    for layer in config.first_k_dense_replace..config.num_hidden_layers() {
        for expert in [0, last] {
            let layout = source.experts().layout();
            // The nibbles of w2.
            let (shard, begin) = source.experts().location(layer, expert)?.part(layout, 2);
            let len = layout.parts[2].len();
            let sample = &mut sample[..len.min(SAMPLE)];
            source.shards().read_range(shard, begin + ((len - sample.len()) / 2) as u64, sample)?;
            hasher.update(sample);
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// A shard of a source as the file system sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    name: String,
    id: (u64, u64),
    len: u64,
    time: (i64, i64),
}

impl Stamp {
    /// Of every shard of `source`.
    pub(super) fn of(source: &Checkpoint) -> Result<Vec<Self>, RepackError> {
        let of = |file: &crate::ShardFile| {
            let metadata = fs::metadata(&file.path).map_err(RepackError::io("look at", &file.path))?;
            Ok(Self {
                name: file.name.clone(),
                id: (metadata.dev(), metadata.ino()),
                len: metadata.len(),
                time: (metadata.mtime(), metadata.mtime_nsec()),
            })
        };
        source.shards().files().iter().map(of).collect()
    }

    /// When the shards were last written. A copy may have other times with the same contents, so times that differ are
    /// no reason to refuse, but one to look closely.
    pub(super) fn times(stamps: &[Self]) -> Times {
        stamps.iter().map(|stamp| (stamp.name.clone(), stamp.time.0, stamp.time.1)).collect()
    }

    /// What happened to the files between two looks at them, if anything did.
    pub(super) fn difference(then: &[Self], now: &[Self]) -> Option<String> {
        then.iter().zip(now).find(|(then, now)| then != now).map(|(then, now)| {
            if then.len == now.len {
                format!("`{}` was written to or replaced", now.name)
            } else {
                format!("`{}` had {} bytes and has {}", now.name, then.len, now.len)
            }
        })
    }
}
