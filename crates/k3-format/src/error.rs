//! Why a checkpoint cannot be used, apart from its files being damaged.

use std::fmt;
use std::io;
use std::path::PathBuf;

use k3_quant::MatrixError;

use crate::TensorId;
use crate::config::ConfigError;
use crate::gate::GateError;
use crate::shard_error::ShardError;

/// Why a checkpoint cannot be opened, or something in it not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shards are absent, damaged, or could not be read.
    #[error(transparent)]
    Shards(#[from] ShardError),
    /// A small file beside the shards could not be read.
    #[error("reading {}", .file.display())]
    ReadFile {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A small file beside the shards is not the JSON it should be.
    #[error("{} is not valid JSON; get this file again from where the checkpoint came from", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A JSON file gives a key two values.
    #[error(
        "{}: the key {key:?} occurs twice in one object (the second before line {line}, column {column}), and which \
         of the two counts differs between programs: remove one, or get this file again from where the checkpoint \
         came from",
        .file.display()
    )]
    RepeatedKey {
        /// The file.
        file: PathBuf,
        /// The key, with those of the objects around it.
        key: String,
        /// Line of the second one.
        line: usize,
        /// Column, near its end.
        column: usize,
    },
    /// There are weights, but nothing says of which model.
    #[error(
        "{} has no config.json; it holds {found}: download config.json of the same release into it",
        .dir.display()
    )]
    NoConfig {
        /// The checkpoint directory.
        dir: PathBuf,
        /// What it holds instead.
        found: String,
    },
    /// Fields of a config file are missing or bad.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The markers of the variant disagree.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The tensors are not those of the config.
    #[error(transparent)]
    Tensors(#[from] TensorErrors),
    /// The names given for the indexer cannot be used.
    #[error(
        "{name:?} is no usable name for an indexer tensor: the five names must be given, differ, and not be those \
         of other tensors"
    )]
    IndexerNames {
        /// The name.
        name: String,
    },
    /// The model has no such tensor.
    #[error("this model has no {id}")]
    NoSuchTensor {
        /// What was asked for.
        id: TensorId,
    },
    /// A vector was asked for as a matrix, or the other way round.
    #[error("{id} is not a {asked}")]
    WrongKind {
        /// What was asked for.
        id: TensorId,
        /// As what.
        asked: &'static str,
    },
    /// The model has no such routed expert.
    #[error("this model has no routed expert {expert} in layer {layer} (0-based)")]
    NoSuchExpert {
        /// 0-based layer.
        layer: usize,
        /// The id asked for.
        expert: u32,
    },
    /// Bytes for an expert do not fit its layout.
    #[error("routed expert {expert} of layer {layer} has {expected} bytes, the buffer {found}")]
    ExpertBuffer {
        /// 0-based layer.
        layer: usize,
        /// The id asked for.
        expert: u32,
        /// Bytes of the expert.
        expected: usize,
        /// Bytes of the buffer.
        found: usize,
    },
    /// A weight matrix holds an infinity or NaN.
    #[error(
        "{name}: row {row}, column {column} (from 0) is {value}, and every weight must be a finite number; {} is \
         damaged or was converted wrongly: compare its checksum with the published one and get the file again",
        .file.display()
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// Its shard.
        file: PathBuf,
        /// 0-based row of the first such value.
        row: usize,
        /// Its 0-based column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// A scale of a quantized matrix is no scale.
    #[error(
        "{name}: row {row}, column {column} (from 0) is {value}, and every scale must be a finite number that is not \
         negative; {} is damaged or was converted wrongly: compare its checksum with the published one and get the \
         file again",
        .file.display()
    )]
    BadScale {
        /// The tensor of scales.
        name: String,
        /// Its shard.
        file: PathBuf,
        /// 0-based row of the first such scale.
        row: usize,
        /// Its 0-based column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// Bytes do not make a matrix.
    #[error("{name}")]
    Matrix {
        /// The tensor.
        name: String,
        /// Why.
        source: MatrixError,
    },
}

/// How a tensor differs from what the config asks for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages show")]
pub enum TensorProblem {
    /// It is not in the shards.
    #[error("{name}: missing, expected {expected}")]
    Missing { name: String, expected: String },
    /// Its elements are of a type that has another meaning or none.
    #[error("{name}: expected {expected}, found {found}")]
    Dtype { name: String, expected: String, found: String },
    /// Its shape does not follow from the config.
    #[error(
        "{name}: expected shape {expected}, found {found}; config.json and weights do not belong together"
    )]
    Shape { name: String, expected: String, found: String },
    /// A part of the language model that this engine does not know.
    #[error("{name}: not a tensor of this model; running without it would run another model")]
    Unknown { name: String },
    /// A part of a routed expert that its format does not have.
    #[error("{name}: does not belong to an expert stored as {format}, as {entry} says")]
    Unexpected { name: String, format: String, entry: String },
    /// A part of a quantized matrix that its format does not have.
    #[error("{name}: does not belong to a matrix stored as {format}")]
    Surplus { name: String, format: String },
    /// A tensor that is quantized in no checkpoint.
    #[error(
        "{name}: part of a quantized tensor, but this one must be BF16 or F32: it steers what the others compute; \
         convert the checkpoint again without quantizing it"
    )]
    NeverQuantized { name: String },
    /// A matrix is stored in another way than the config says.
    #[error("{name}: the tensors are {found}, but {entry}; get config.json and weights from one place")]
    Disagrees { name: String, found: String, entry: String },
    /// Its values cannot be those of this tensor.
    #[error("{name}: {what}; the file is damaged or was converted wrongly")]
    Value { name: String, what: String },
}

impl TensorProblem {
    /// The tensor.
    pub fn name(&self) -> &str {
        match self {
            Self::Missing { name, .. }
            | Self::Dtype { name, .. }
            | Self::Shape { name, .. }
            | Self::Unknown { name }
            | Self::Unexpected { name, .. }
            | Self::Surplus { name, .. }
            | Self::NeverQuantized { name }
            | Self::Disagrees { name, .. }
            | Self::Value { name, .. } => name,
        }
    }
}

/// All differences between the tensors and the config; of many, the first.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct TensorErrors {
    /// The first [`TensorErrors::LISTED`] problems.
    pub problems: Vec<TensorProblem>,
    /// How many there are in all.
    pub total: usize,
}

impl TensorErrors {
    /// Problems that are kept; the rest is counted.
    pub const LISTED: usize = 20;

    /// Counts a problem, and keeps it if it is among the first.
    pub(crate) fn push(&mut self, problem: impl FnOnce() -> TensorProblem) {
        self.total += 1;
        if self.problems.len() < Self::LISTED {
            self.problems.push(problem());
        }
    }
}

impl fmt::Display for TensorErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.total == 1 { "difference" } else { "differences" };
        write!(f, "the tensors are not those of config.json: {} {plural}:", self.total)?;
        for problem in &self.problems {
            write!(f, "\n  {problem}")?;
        }
        if self.total > self.problems.len() {
            write!(f, "\n  and {} more", self.total - self.problems.len())?;
        }
        Ok(())
    }
}

/// `U8 [3072, 1792]`
pub(crate) fn describe(tensor: &crate::TensorInfo<'_>) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}
