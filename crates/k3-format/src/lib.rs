//! k3-format
mod model_config;
mod role;
pub use model_config::{AttentionKind, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant};
pub use role::{Role, TensorId};
