//! Everything that can be wrong with the files of a checkpoint.

use std::error::Error as _;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::content::Content;
use crate::header::HeaderError;

/// Why the shards of a checkpoint cannot be opened, read or written.
///
/// Each message names the file, what was expected, what was found and what to do. What another error says is never
/// part of the message: it is the [`source`](std::error::Error::source), so show the whole chain.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The checkpoint directory does not exist.
    #[error("the checkpoint directory `{}` does not exist; check the path, and whether its drive is mounted", .dir.display())]
    NoDirectory {
        /// As given.
        dir: PathBuf,
    },
    /// The path of the checkpoint is a file.
    #[error("`{}` is not a directory; give the directory that holds config.json, model.safetensors.index.json and the shards", .path.display())]
    NotADirectory {
        /// As given.
        path: PathBuf,
    },
    /// The directory has neither an index nor a single `model.safetensors`.
    #[error("`{}` holds neither model.safetensors.index.json nor model.safetensors; {hint}", .dir.display())]
    NoIndex {
        /// The checkpoint directory.
        dir: PathBuf,
        /// What it holds instead, and what to do.
        hint: String,
    },
    /// Files that the index names are not there.
    #[error("{}", absent_message(.dir, .absent, *.shards, *.tensors_found, *.tensors))]
    AbsentShards {
        /// The checkpoint directory.
        dir: PathBuf,
        /// All shards that are not there, by name.
        absent: Vec<AbsentShard>,
        /// Shards that the index names.
        shards: usize,
        /// Tensors in the shards that are there, by the index.
        tensors_found: usize,
        /// Tensors that the index names.
        tensors: usize,
    },
    /// A symbolic link without target.
    #[error("`{}` is a link to `{}`, which does not exist; the download into the cache is incomplete or its blob was deleted: download it again", .link.display(), .target.display())]
    DanglingLink {
        /// The link.
        link: PathBuf,
        /// Its target, as written in the link.
        target: PathBuf,
    },
    /// A directory, device or pipe where a file is needed.
    #[error("`{}` is not a regular file; put the file from the model's publisher in its place", .path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Something else stands in the place of a file.
    #[error("`{}` should be {expected}, but it is {content}", .path.display())]
    WrongContent {
        /// The file.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        content: Content,
    },
    /// A shard is shorter than its header says.
    #[error("`{}` is incomplete: {}; an interrupted copy or download is the likely cause: copy or download this file again", .path.display(), truncated_message(*.declared, *.found, .tensor.as_deref()))]
    Truncated {
        /// The shard.
        path: PathBuf,
        /// Bytes that the file must have; without its whole header, at least.
        declared: u64,
        /// Bytes that it has.
        found: u64,
        /// The first tensor in disk order with missing bytes; `None` if the header itself is cut.
        tensor: Option<String>,
    },
    /// A shard is longer than its header says.
    #[error("`{}` has {found} bytes, its header declares {declared}; the file was overwritten or appended to: copy or download it again", .path.display())]
    TrailingBytes {
        /// The shard.
        path: PathBuf,
        /// Bytes that the file must have.
        declared: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A shard's header breaks a rule of the format.
    #[error("`{}` is not a valid safetensors file (damaged, or from a faulty writer: copy or download it again)", .path.display())]
    Header {
        /// The shard.
        path: PathBuf,
        /// The rule.
        #[source]
        problem: HeaderError,
    },
    /// Several shards have such problems. The message has all of them with their own causes, since an error has
    /// only one source.
    #[error("{} shards are unusable:{}", .0.len(), lines(.0))]
    Several(
        /// One error a shard, in the order of their names.
        Vec<ShardError>,
    ),
    /// The index is not valid.
    #[error("the index `{}` is not valid: {message}; download it again", .path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong, with the position.
        message: String,
    },
    /// The index names a shard by something that is not a plain file name.
    #[error("the index `{}` names the shard {shard:?}; a shard must be a plain file name without control characters in the same directory: download the index again", .path.display())]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// The name.
        shard: String,
    },
    /// The index puts tensors into shards whose headers do not have them.
    #[error("the index `{}` puts {count} tensor(s) into shards that do not hold them, the first: `{tensor}` into `{shard}`{}; index and shards are not of the same release: download both again", .path.display(), elsewhere(.found_in.as_deref()))]
    NotInShard {
        /// The index file.
        path: PathBuf,
        /// How many tensors.
        count: usize,
        /// The first of them.
        tensor: String,
        /// Its shard by the index.
        shard: String,
        /// The shard that does hold it, if any.
        found_in: Option<String>,
    },
    /// The shards hold tensors that the index does not name.
    #[error("the shards hold {count} tensor(s) that the index `{}` does not name, the first: `{tensor}` in `{shard}`; index and shards are not of the same release: download both again", .path.display())]
    NotInIndex {
        /// The index file.
        path: PathBuf,
        /// How many tensors.
        count: usize,
        /// The first of them.
        tensor: String,
        /// The shard that holds it.
        shard: String,
    },
    /// Two shards hold a tensor of the same name.
    #[error("tensor `{tensor}` stands in two shards, `{}` and `{}`; remove the shard that does not belong to the checkpoint and get its index again", .first.display(), .second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// More shards, tensors or names than the index in memory can number.
    #[error("the checkpoint `{}` is too large: {what}", .dir.display())]
    TooLarge {
        /// The checkpoint directory.
        dir: PathBuf,
        /// What there is too much of, with the limit.
        what: String,
    },
    /// A read was asked for bytes that the file does not have. A mistake of the caller.
    #[error("asked for bytes {begin}..{end} of `{}`, which has {len}", .path.display())]
    OutOfRange {
        /// The shard.
        path: PathBuf,
        /// First byte.
        begin: u64,
        /// End.
        end: u64,
        /// Its length when it was opened.
        len: u64,
    },
    /// A shard number that the checkpoint does not have. A mistake of the caller.
    #[error("asked for shard number {shard} (from 0) of {shards}")]
    NoSuchShard {
        /// The number.
        shard: usize,
        /// How many there are.
        shards: usize,
    },
    /// A file ended before the bytes that a read wanted.
    #[error("`{}` ended early: wanted {wanted} bytes at offset {offset}, got {got}; the file was changed while it was open: restore it and start again", .path.display())]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that there were.
        got: u64,
    },
    /// A file has another length than when it was opened.
    #[error("`{}` had {opened} bytes when it was opened and has {now} now; the file was changed while it was open: restore it and start again", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes at opening.
        opened: u64,
        /// Bytes now.
        now: u64,
    },
    /// A tensor to be written got another number of bytes than declared.
    #[error("writing `{}`: tensor `{tensor}` is declared with {declared} bytes, got {got}", .path.display())]
    WriteLength {
        /// The shard under its final name.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Bytes declared.
        declared: u64,
        /// Bytes given, including those before.
        got: u64,
    },
    /// Bytes beyond the last declared tensor.
    #[error("writing `{}`: {got} bytes given after the last declared tensor", .path.display())]
    WriteBeyondEnd {
        /// The shard under its final name.
        path: PathBuf,
        /// Bytes given.
        got: u64,
    },
    /// What was declared to a writer is not a valid header.
    #[error("cannot write `{}`: the declared tensors make no valid header", .path.display())]
    Declared {
        /// The shard under its final name.
        path: PathBuf,
        /// The rule that it breaks.
        #[source]
        problem: HeaderError,
    },
    /// What was given to a writer cannot be a file of a checkpoint.
    #[error("cannot write `{}`: {message}", .path.display())]
    Unwritable {
        /// The file under its final name.
        path: PathBuf,
        /// The rule that it breaks.
        message: String,
    },
    /// The place of an output is a symbolic link.
    #[error("refusing to write `{}`: it is a symbolic link, and what it points to may belong to another checkpoint; remove the link, or choose a new directory for the output", .path.display())]
    OutputIsLink {
        /// The link.
        path: PathBuf,
    },
    /// Somebody else is writing an output of this name.
    #[error("`{}` is being written by another process or thread; wait for it, or choose another name for the output", .partial.display())]
    OutputIsBusy {
        /// The unfinished file.
        partial: PathBuf,
    },
    /// There is not enough memory for what was to be read.
    #[error("{bytes} bytes of {what} in `{}` do not fit into memory; use LoadMode::Map or a machine with more", .path.display())]
    NoMemory {
        /// The shard.
        path: PathBuf,
        /// The tensor or the part.
        what: String,
        /// Bytes to be read.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The operating system refused.
    #[error("cannot {doing} `{}`", .path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
}

impl ShardError {
    /// For `map_err`: an answer of the system, with what was being done on which path.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |cause| Self::Io { doing, path, cause }
    }

    /// No memory for `bytes` bytes of a file.
    pub(crate) fn no_memory(path: &Path, what: &str, bytes: u64, source: io::Error) -> Self {
        Self::NoMemory { path: path.to_owned(), what: what.to_owned(), bytes, source }
    }
}

/// A shard that the index names and the directory does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentShard {
    /// Its file name.
    pub name: String,
    /// If there is a symbolic link of that name: its target, which does not exist.
    pub dangling: Option<PathBuf>,
}

/// More names than this do not help a reader; the error's field has them all.
const MOST_NAMES: usize = 100;

fn absent_message(
    dir: &Path,
    absent: &[AbsentShard],
    shards: usize,
    tensors_found: usize,
    tensors: usize,
) -> String {
    let mut names: Vec<String> = absent
        .iter()
        .take(MOST_NAMES)
        .map(|shard| match &shard.dangling {
            None => shard.name.clone(),
            Some(target) => {
                format!("{} (a link to `{}`, which does not exist)", shard.name, target.display())
            }
        })
        .collect();
    if absent.len() > MOST_NAMES {
        names.push(format!("and {} more", absent.len() - MOST_NAMES));
    }
    format!(
        "`{}` is incomplete: found {} of {shards} shards with {tensors_found} of {tensors} tensors; absent: {}; an \
         interrupted copy or download is the likely cause: copy or download the absent files into the directory, \
         which continues where it stopped with most tools",
        dir.display(),
        shards - absent.len(),
        names.join(", "),
    )
}

fn truncated_message(declared: u64, found: u64, tensor: Option<&str>) -> String {
    match tensor {
        Some(name) => {
            format!(
                "its header declares {declared} bytes, found {found}, the first tensor affected is `{name}`"
            )
        }
        None => format!(
            "its header alone needs {declared} bytes, found {found}, so not even the names of its tensors are known"
        ),
    }
}

fn lines(errors: &[ShardError]) -> String {
    let mut text = String::new();
    for error in errors {
        _ = write!(text, "\n  {error}");
        let mut cause = error.source();
        while let Some(e) = cause {
            _ = write!(text, ": {e}");
            cause = e.source();
        }
    }
    text
}

fn elsewhere(shard: Option<&str>) -> String {
    shard.map_or_else(|| " (no shard holds it)".to_owned(), |shard| format!(" (it is in `{shard}`)"))
}
