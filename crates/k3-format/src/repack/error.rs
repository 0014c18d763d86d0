//! Why a tree cannot be repacked or does not hold what it should.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use k3_quant::encode::OutOfRange;

use crate::error::Error;
use crate::experts::matrix_name;
use crate::header::HeaderError;
use crate::shard_error::ShardError;
use crate::{ExpertFormat, LinearFormat};

use super::differences::{Differences, IndexFate};
use super::report::Exponents;
use super::scales::{FirstMisfit, Misfit};

/// Why a repack did not start, did not end, or what a verification found.
///
/// Whatever the error, shards that were completed stay, and the same call goes on from there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages show")]
pub enum RepackError {
    /// The source does not open, or the result does not.
    #[error(transparent)]
    Checkpoint(#[from] Error),
    /// A shard cannot be read or written.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A shard cannot be written because the disk is full, or a limit of the system is reached.
    #[error(
        "the target has no room for `{}`; {completed} of {shards} shards are complete and stay: free {needed} bytes on \
         its file system and run the same command again, which goes on from there", .path.display()
    )]
    Full { path: PathBuf, completed: usize, shards: usize, needed: u64, source: io::Error },
    /// The experts of the source are not those that are converted.
    #[error(
        "the routed experts of `{}` are {found}; only MXFP4, as the model is published, is repacked: give the \
         published checkpoint as the source", .dir.display()
    )]
    SourceFormat { dir: PathBuf, found: ExpertFormat },
    /// A recipe that asks for what does not exist.
    #[error("{recipe}: {why}")]
    Recipe { recipe: String, why: &'static str },
    /// The source has quantized matrices outside the routed experts.
    #[error(
        "{count} matrices of `{}` outside the routed experts are {format} already; only BF16, as the model is published, \
         is repacked: give the published checkpoint as the source", .dir.display()
    )]
    SourceQuantized { dir: PathBuf, count: usize, format: LinearFormat },
    /// A matrix that is to be quantized holds something else than weights.
    #[error(
        "cannot quantize `{name}`; the source is damaged or was converted wrongly: compare its checksums with the \
         published ones and get the file again"
    )]
    NotAWeight { name: String, source: OutOfRange },
    /// The tensors planned for a shard have no valid header.
    #[error("the shard `{shard}` of the result cannot be planned")]
    Unplannable { shard: String, source: HeaderError },
    /// A range of layers that the model does not have.
    #[error("layers {begin}..{end} were asked for; the model has layers 0..{layers}")]
    Layers { begin: usize, end: usize, layers: usize },
    /// The memory budget does not hold one expert.
    #[error("the memory budget of {budget} bytes is too small: one shard in flight needs {needed} bytes")]
    Budget { budget: u64, needed: u64 },
    /// The target is a symbolic link.
    #[error(
        "refusing to write into `{}`: it is a symbolic link, and what it points to may be another checkpoint; name a \
         new directory", .dir.display()
    )]
    TargetIsLink { dir: PathBuf },
    /// The target is something else than a directory, or has no sensible path.
    #[error("cannot write into `{}`: {what}; name a new directory", .dir.display())]
    Target { dir: PathBuf, what: String },
    /// The target is the source, or lies in it.
    #[error(
        "refusing to write into `{}`: it is the source `{}` or lies in it, and the source is only read; name a \
         directory elsewhere", .dir.display(), .source_dir.display()
    )]
    TargetInSource { dir: PathBuf, source_dir: PathBuf },
    /// A file of the source lies in the target.
    #[error(
        "refusing to write into `{}`: `{}` of the source really lies there, and the source is only read; name a \
         directory elsewhere", .dir.display(), .file.display()
    )]
    TargetHoldsSource { dir: PathBuf, file: PathBuf },
    /// The target holds something that no repack began.
    #[error(
        "`{}` is not empty (it holds {found}) and no repack was begun there; name a new or empty directory",
        .dir.display()
    )]
    TargetNotEmpty { dir: PathBuf, found: String },
    /// Another process repacks into the target.
    #[error("`{}` is being written by another repack; wait for it, or name another directory", .dir.display())]
    TargetBusy { dir: PathBuf },
    /// The target was begun with another recipe.
    #[error(
        "`{}` was begun with {found}, this run asks for {wanted}; repeat the first arguments, or name another directory",
        .dir.display()
    )]
    OtherRecipe { dir: PathBuf, found: String, wanted: String },
    /// The source is not the one that the target was begun with.
    #[error(
        "`{}` was begun from another source: {what}; restore the source as it was, or name another directory",
        .dir.display()
    )]
    SourceChanged { dir: PathBuf, what: String },
    /// The source was written to while it was read.
    #[error(
        "the source was modified while it was read: {what}; `{}` is not finished. When nothing writes to the source any \
         more, run the same command again, which compares the complete shards with it first", .dir.display()
    )]
    SourceModified { dir: PathBuf, what: String },
    /// The notes of an earlier run are lost, and what is there is not what this run would make.
    #[error(
        "`{}` has no notes of an earlier run that can be read, and its `{file}` is not what this command makes; repeat the \
         arguments that the tree was made with, or name another directory; if that file is damaged or none of the tree, \
         remove it", .dir.display()
    )]
    OtherTree { dir: PathBuf, file: String },
    /// The target's file system is too small.
    #[error(
        "`{}` needs {needed} bytes more, its file system has {free} bytes free; take another disk, or free some",
        .dir.display()
    )]
    NoSpace { dir: PathBuf, needed: u64, free: u64 },
    /// A small file cannot be read, written or understood.
    #[error("cannot {doing} `{}`", .path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    /// The config of the source cannot be rewritten.
    #[error("cannot rewrite `{}`: {message}", .path.display())]
    Config { path: PathBuf, message: String },
    /// Experts that cannot be converted without loss.
    #[error(transparent)]
    Refused(#[from] Refusals),
    /// The result failed its verification.
    #[error(transparent)]
    Differs(#[from] Box<Differences>),
    /// The result is whole and does not open as the source's model.
    #[error("`{}` does not open as the model of the source{what}; {index}", .dir.display())]
    NotOpened { dir: PathBuf, what: &'static str, index: IndexFate, source: Option<Box<Error>> },
    /// The source lost a tensor that it was opened with. A mistake of this program.
    #[error("the source has no tensor `{name}`")]
    NoTensor { name: String },
    /// Direct transfers were asked for and are not possible.
    #[error(
        "direct transfers are not possible at `{}`: run with --io cached, which goes through the page cache",
        .path.display()
    )]
    NoDirect { path: PathBuf, source: io::Error },
    /// A thread that writes ended; never the error of a run, which is that thread's own.
    #[error("the writing thread ended")]
    WriterEnded,
}

impl RepackError {
    /// For `map_err`: an answer of the system, with what was being done on which path.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }
}

/// A matrix of a routed expert that is not converted.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// 0-based layer.
    pub layer: usize,
    /// Expert id.
    pub expert: usize,
    /// `w1`, `w2` or `w3`.
    pub matrix: &'static str,
    /// 0-based row of the first block that cannot be converted.
    pub row: usize,
    /// 0-based number of the block (32 columns) in the row.
    pub block: usize,
    /// Its E8M0 byte.
    pub e: u8,
    /// Exponent of the largest live block of the matrices that share a scale; `None` if no block is live.
    pub kmax: Option<i32>,
    /// Blocks of the matrix that do not fit, other than those whose scale is NaN.
    pub blocks: u64,
    /// Blocks of the matrix whose scale is NaN.
    pub nan_blocks: u64,
    /// Why that first block cannot be converted.
    pub why: &'static str,
}

impl Refusal {
    /// `per_row` is the number of blocks of a row.
    pub(super) fn new(
        (layer, expert, matrix): (usize, usize, usize),
        misfit: FirstMisfit,
        per_row: usize,
        kmax: Option<i32>,
    ) -> Self {
        let why = match misfit.why {
            Misfit::Nan => "the block scale 255 is NaN",
            Misfit::OutOfWindow => {
                "the block is not zero and lies more than 17 binades below the largest one"
            }
            Misfit::GlobalScale => {
                "weights so large that readers would take the matrix scale for an inverse one"
            }
        };
        Self {
            layer,
            expert,
            matrix: crate::experts::MATRICES[matrix],
            row: misfit.block / per_row,
            block: misfit.block % per_row,
            e: misfit.e,
            kmax,
            blocks: misfit.count,
            nan_blocks: misfit.nan,
            why,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let which = crate::experts::MATRICES.iter().position(|m| *m == self.matrix).unwrap_or(0);
        let kmax = self.kmax.map_or_else(|| "none".to_owned(), |k| k.to_string());
        write!(
            f,
            "{} (layer {}, expert {}, matrix {}): row {}, block {}: e = {}, kmax = {kmax}: {}; ",
            matrix_name(self.layer, self.expert, which),
            self.layer,
            self.expert,
            self.matrix,
            self.row,
            self.block,
            self.e,
            self.why,
        )?;
        match (self.blocks, self.nan_blocks) {
            (blocks, 0) => write!(f, "{blocks} such block(s)"),
            (0, nan) => write!(f, "{nan} such block(s)"),
            (blocks, nan) => write!(f, "{blocks} block(s) that do not fit, {nan} NaN"),
        }
    }
}

/// All matrices that cannot be converted without loss.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct Refusals {
    /// The first [`Refusals::LISTED`], by layer, expert and matrix.
    pub first: Vec<Refusal>,
    /// How many there are.
    pub total: usize,
    /// Of these, matrices with a scale that is NaN, which no format keeps.
    pub nan: usize,
    /// The exponents of every layer that was read, the refused ones among them, by layer.
    pub exponents: Vec<Exponents>,
}

impl Refusals {
    /// Refusals that are kept; the rest is counted.
    pub const LISTED: usize = 100;
    /// Refusals that the message shows.
    const SHOWN: usize = 10;

    /// Matrices that are refused as NVFP4 only: as MXFP4 they stay as they are.
    pub fn as_nvfp4_only(&self) -> usize {
        self.total - self.nan
    }

    pub(super) fn push(&mut self, refusal: Refusal) {
        self.total += 1;
        self.nan += usize::from(refusal.nan_blocks > 0);
        if self.first.len() < Self::LISTED {
            self.first.push(refusal);
        }
    }

    pub(super) fn extend(&mut self, other: Self) {
        self.total += other.total;
        self.nan += other.nan;
        self.first.extend(other.first);
        self.first.sort_by_key(|r| (r.layer, r.expert, r.matrix));
        self.first.truncate(Self::LISTED);
        self.exponents.extend(other.exponents);
        self.exponents.sort_by_key(|exponents| exponents.layer);
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} matrices of routed experts cannot be converted without loss, and nothing is rounded ({} with scales that \
             do not fit NVFP4, {} with scales that are NaN); shards without them are complete:",
            self.total,
            self.as_nvfp4_only(),
            self.nan
        )?;
        for refusal in self.first.iter().take(Self::SHOWN) {
            write!(f, "\n  {refusal}")?;
        }
        if self.total > Self::SHOWN {
            write!(f, "\n  and {} more", self.total - Self::SHOWN.min(self.first.len()))?;
        }
        if self.nan > 0 {
            f.write_str(
                "\na NaN is in no published weight: the source is damaged or was converted wrongly; compare its checksums \
                 with the published ones and get those files again",
            )?;
        }
        if self.nan == 0 {
            f.write_str(
                "\nrepack with MXFP4 experts (--experts mxfp4), which keeps these blocks as they are",
            )?;
        }
        Ok(())
    }
}
