//! Reads, checks and repacks Kimi K3 and Kimi K3.1 Pro checkpoints.
//!
//! [`Checkpoint::open`] is the way in: it reads `config.json`, opens the shards, decides the variant, compares every
//! tensor with the one table of names, shapes and dtypes, and from then on hands out matrices, vectors and routed
//! experts by what they are for. Nothing is guessed: what does not fit is refused with its name. [`repack`] converts a
//! checkpoint once.

#![deny(unsafe_code)]

mod checkpoint;
mod config;
mod content;
mod direct;
mod directory;
mod error;
mod expert_survey;
mod experts;
mod gate;
mod generation_config;
mod header;
mod identity;
mod index;
mod indexer;
mod json;
mod linear;
mod linear_config;
mod map;
mod model_config;
pub mod names;
mod new_file;
mod printable;
mod read;
pub mod repack;
mod role;
mod shard_error;
mod shard_file;
mod shards;
mod small_file;
mod survey;
mod tensor_check;
mod values;
mod warning;
mod weight_source;
mod writer;

pub use checkpoint::{Checkpoint, LoadMode, OpenOptions};
pub use config::{
    ConfigError, ConfigFile, ConfigProblem, DsaConfig, ExpertFormat, QuantizationConfig, QuantizationGroup,
};
pub use content::Content;
pub use error::{Error, TensorErrors, TensorProblem};
pub use experts::{ExpertLayout, ExpertLocation, ExpertMatrices, Experts, PartLocation};
pub use gate::GateError;
pub use generation_config::GenerationConfig;
pub use header::HeaderError;
pub use identity::CheckpointId;
pub use indexer::{IndexerResolution, ResolvedBy};
pub use linear::LinearFormat;
pub use model_config::{
    AttentionKind, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant,
};
pub use names::IndexerNames;
pub use new_file::NewFile;
pub use role::{Role, TensorId};
pub use safetensors::Dtype;
pub use shard_error::{AbsentShard, ShardError};
pub use shard_file::ShardFile;
pub use shards::{Shards, TensorInfo};
pub use warning::Warning;
pub use weight_source::{SourceError, WeightSource};
pub use writer::{ShardWriter, TensorSpec, write_index};
