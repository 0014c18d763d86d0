//! What a verification finds wrong, and what becomes of a tree that is not as it should be.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::index::INDEX_FILE;

use super::report::Outcome;

/// Differences of one shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShardDifferences {
    /// File name.
    pub file: String,
    /// How many there are.
    pub total: u64,
    /// The first [`ShardDifferences::LISTED`], each with its coordinates.
    pub first: Vec<String>,
}

impl ShardDifferences {
    /// Differences of a shard that are kept; the rest is counted.
    pub const LISTED: usize = 20;

    pub(super) fn new(file: &str) -> Self {
        Self { file: file.to_owned(), ..Self::default() }
    }

    /// Takes in a difference; `what` is asked only where it is kept.
    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        self.total += 1;
        if self.first.len() < Self::LISTED {
            self.first.push(what());
        }
    }
}

/// A tree that failed its verification.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub struct Differences {
    /// The tree.
    pub dir: PathBuf,
    /// The shards that differ, in the order of their names.
    pub shards: Vec<ShardDifferences>,
    /// What became of the index.
    pub index: IndexFate,
    /// What the run did before.
    pub outcome: Outcome,
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: u64 = self.shards.iter().map(|shard| shard.total).sum();
        write!(f, "`{}` failed its verification, {total} difference(s):", self.dir.display())?;
        for ShardDifferences { file, total, first } in &self.shards {
            write!(f, "\n  {file}: {total} difference(s)")?;
            for what in first {
                write!(f, "\n    {what}")?;
            }
            let more = total - first.len() as u64;
            if more > 0 {
                write!(f, "\n    and {more} more")?;
            }
        }
        write!(f, "\n{}", self.index)
    }
}

/// What became of the index of a tree that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum IndexFate {
    /// It was removed: nothing takes the tree for whole, and the next run compares every shard with the source.
    Removed,
    /// It is still there.
    Left {
        /// What the system said.
        why: String,
    },
}

impl IndexFate {
    /// Removes the index of the tree `dir`.
    pub(super) fn remove(dir: &Path) -> Self {
        match fs::remove_file(dir.join(INDEX_FILE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Self::Left { why: e.to_string() },
            _ => Self::Removed,
        }
    }
}

impl fmt::Display for IndexFate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Removed => write!(
                f,
                "{INDEX_FILE} was removed, so that nothing takes the tree for whole; run the same command again: it \
                 compares every shard with the source, keeps what is right and makes the rest anew; if this repeats, \
                 check the disk and the memory of the machine"
            ),
            Self::Left { why } => write!(
                f,
                "{INDEX_FILE} could not be removed ({why}), so the tree still looks whole: do not use it; where it can be \
                 written, run the same command again, which compares every shard with the source"
            ),
        }
    }
}
