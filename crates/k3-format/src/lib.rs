//! Reads, checks and repacks Kimi K3 and Kimi K3.1 Pro checkpoints.
//!
//! [`Checkpoint::open`] is the way in: it reads `config.json`, opens the shards, decides the variant, compares every
//! tensor with the one table of names, shapes and dtypes, and from then on hands out matrices, vectors and routed
//! experts by what they are for. Nothing is guessed: what does not fit is refused with its name. [`repack`] converts a
//! checkpoint once.
//!
//! ```
//! use k3_format::{Checkpoint, OpenOptions, Role, TensorId, Variant};
//!
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-k31");
//! let checkpoint = Checkpoint::open(dir.as_ref(), &OpenOptions::default())?;
//! assert_eq!(checkpoint.variant(), Variant::K31);
//!
//! let config = checkpoint.config();
//! let router = checkpoint.matrix(TensorId::layer(1, Role::RouterGate))?;
//! assert_eq!((router.rows(), router.cols()), (config.moe.num_experts, config.hidden_size));
//! let expert = checkpoint.expert(1, 0)?; // mapped: its bytes are read when they are touched
//! assert_eq!(expert.w1.cols(), config.moe.routed_expert_hidden_size);
//! # Ok::<(), k3_format::Error>(())
//! ```
//!
//! All that is wrong with a config or with tensors is told at once, because a download of 1.5 TB is not tried twice for the
//! fun of it. Files are untrusted: sizes are checked before memory is asked for, and offsets before reads.
//!
//! This crate knows what weights are called and how they are stored, and not what they are for: it computes no product, and
//! gives no advice on memory. What is on disk: `docs/checkpoint.md`. Start reading at `checkpoint.rs`, then [`names`].

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
pub use new_file::{NewFile, check_replaceable};
pub use role::{Role, TensorId};
pub use safetensors::Dtype;
pub use shard_error::{AbsentShard, ShardError};
pub use shard_file::ShardFile;
pub use shards::{Shards, TensorInfo};
pub use warning::Warning;
pub use weight_source::{SourceError, WeightSource};
pub use writer::{ShardWriter, TensorSpec, write_index};
