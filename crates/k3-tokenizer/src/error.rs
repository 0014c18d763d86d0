//! Everything that can be wrong with tokenizer files or ids.

use std::path::PathBuf;

/// A tokenizer that could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The folder has no `tiktoken.model`.
    #[error(
        "opening the tokenizer: there is no tiktoken.model in {} ({}). Kimi K3's vocabulary is published as tiktoken.model \
         beside tokenizer_config.json: put both files of the checkpoint into this folder. A tokenizer.json or a merges file \
         cannot replace them, since a merge list made from ranks gives other ids",
        dir.display(), describe(found)
    )]
    MissingRanks {
        /// The folder that was looked into.
        dir: PathBuf,
        /// Names of the files there that look like tokenizer files, sorted.
        found: Vec<String>,
    },
    /// The folder has no `tokenizer_config.json`.
    #[error(
        "opening the tokenizer: there is no tokenizer_config.json in {} ({}). It names the control tokens: copy it from the \
         checkpoint",
        dir.display(), describe(found)
    )]
    MissingConfig {
        /// The folder that was looked into.
        dir: PathBuf,
        /// Names of the files there that look like tokenizer files, sorted.
        found: Vec<String>,
    },
    /// A file could not be read.
    #[error("reading {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is larger than any tokenizer file may be.
    #[error("reading {}: more than {limit} bytes, which no such file has; is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most bytes that are read.
        limit: u64,
    },
    /// A line of `tiktoken.model` is not as it must be.
    #[error("reading {} line {line}: {problem}", path.display())]
    Line {
        /// The file, or a name for tokens that came from memory.
        path: PathBuf,
        /// Line number, from 1; the rank is one less.
        line: usize,
        /// What is wrong.
        problem: LineProblem,
    },
    /// `tiktoken.model` ends before the 256 single bytes are complete.
    #[error("reading {}: {found} tokens, but the first 256 must be the single bytes; the file is not complete", path.display())]
    TooFewRanks {
        /// The file, or a name for tokens that came from memory.
        path: PathBuf,
        /// Tokens found.
        found: usize,
    },
    /// `tokenizer_config.json` is not JSON of the expected form.
    #[error("reading {}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// An entry of `added_tokens_decoder` does not fit the 256 control slots.
    #[error("reading {}, added_tokens_decoder: control token {id}: {problem}", path.display())]
    Control {
        /// The file, or a name for control tokens that came from memory.
        path: PathBuf,
        /// The id as written.
        id: u32,
        /// What is wrong.
        problem: ControlProblem,
    },
}

/// What can be wrong with one line of `tiktoken.model`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineProblem {
    /// Not two fields with one space between.
    #[error("expected `base64(token) SP rank`, found {found:?}")]
    Form {
        /// The line, shortened.
        found: String,
    },
    /// The first field is not base64.
    #[error("the token is not base64")]
    Base64 {
        /// Where and why.
        source: base64::DecodeError,
    },
    /// The second field is not the rank that follows.
    #[error("expected rank {expected} (ranks are dense and in order), found {found:?}")]
    Rank {
        /// The rank that was due.
        expected: usize,
        /// The field, shortened.
        found: String,
    },
    /// The token has no bytes.
    #[error("the token is empty")]
    Empty,
    /// The token is longer than any token may be.
    #[error("the token has {bytes} bytes, the most is {limit}")]
    TooLong {
        /// Bytes of the token.
        bytes: usize,
        /// The most a token may have.
        limit: usize,
    },
    /// One of the first 256 tokens is not a single byte.
    #[error("one of the first 256 tokens, which must be the single bytes, has {bytes} bytes")]
    NotAByte {
        /// Bytes of the token.
        bytes: usize,
    },
    /// The same bytes twice.
    #[error("the same token already stands in line {first}")]
    Duplicate {
        /// Line of the first.
        first: usize,
    },
    /// More tokens than any vocabulary may have.
    #[error("more than {limit} tokens")]
    TooMany {
        /// The most tokens that are read.
        limit: usize,
    },
}

/// What can be wrong with a control token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlProblem {
    /// The id is not in one of the 256 slots after the ranks.
    #[error(
        "the id is outside {first}..={last}, the 256 slots after the ranks of tiktoken.model; do the two files belong together?"
    )]
    OutOfRange {
        /// First slot.
        first: u32,
        /// Last slot.
        last: u32,
    },
    /// The id stands in the file twice.
    #[error("the id is given twice")]
    DuplicateId,
    /// Another slot has the same spelling.
    #[error("its spelling {spelling:?} is that of {other} too")]
    DuplicateSpelling {
        /// The spelling.
        spelling: String,
        /// The other id.
        other: u32,
    },
    /// The spelling is empty.
    #[error("its spelling is empty")]
    EmptySpelling,
}

/// An id that is neither a token nor a control token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("decoding: token id {id} is outside the vocabulary of {vocab_size}")]
pub struct UnknownId {
    /// The id.
    pub id: u32,
    /// Ids are `0..vocab_size`.
    pub vocab_size: usize,
}

fn describe(found: &[String]) -> String {
    if found.is_empty() {
        "no tokenizer file at all".to_owned()
    } else {
        format!("there is: {}", found.join(", "))
    }
}
