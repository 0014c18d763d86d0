//! Reads and checks Kimi K3 and Kimi K3.1 Pro checkpoints.
//!
//! [`Checkpoint::open`] is the way in: it reads `config.json`, opens the shards, decides the variant, compares every
//! tensor with the one table of names, shapes and dtypes, and from then on hands out matrices, vectors and routed
//! experts by what they are for. Nothing is guessed: what does not fit is refused with its name.

mod content;
mod checkpoint;
mod config;
mod error;
mod expert_survey;
mod experts;
pub mod gate;
pub mod names;
mod generation_config;
mod header;
mod identity;
mod index;
mod indexer;
mod map;
mod new_file;
mod read;
mod shard_error;
mod shard_file;
mod shards;
mod survey;
mod values;
mod warning;
mod weight_source;
mod writer;
mod model_config;
mod role;
pub use model_config::{AttentionKind, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant};
pub use role::{Role, TensorId};
pub use content::Content;
pub use header::{HeaderError, MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_RANK};
pub use safetensors::Dtype;
pub use shard_error::{AbsentShard, ShardError};
pub use shard_file::ShardFile;
pub use shards::{Shards, TensorInfo};
pub use writer::{ShardWriter, TensorSpec, write_index};
pub use checkpoint::{Checkpoint, LoadMode, OpenOptions};
pub use config::{ConfigError, ConfigFile, ConfigProblem, DsaConfig, ExpertFormat, QuantizationConfig};
pub use error::{Error, TensorErrors, TensorProblem};
pub use experts::{ExpertLayout, ExpertLocation, ExpertMatrices, Experts, PartLocation};
pub use gate::GateError;
pub use generation_config::GenerationConfig;
pub use identity::CheckpointId;
pub use indexer::{IndexerResolution, ResolvedBy};
pub use names::IndexerNames;
pub use warning::Warning;
pub use weight_source::{SourceError, WeightSource};
