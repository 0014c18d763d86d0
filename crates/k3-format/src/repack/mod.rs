//! Converting a checkpoint once, as pure I/O and provably without loss (`docs/nvfp4.md`, `docs/repack.md`).
//!
//! A [`Plan`] follows from the source's headers and a [`Recipe`]; it decides every byte of the result. [`Repack::run`]
//! carries it out shard by shard, and can be killed and repeated at any moment.

mod dense;
mod error;
mod plan;
mod read;
mod recipe;
mod scales;
mod sink;

pub use dense::dense_format;
pub use error::{Refusal, Refusals, RepackError};
pub use plan::{DensePlan, Dropped, Plan, ShardPlan};
pub use recipe::{DenseFormat, ExpertTarget, Naming, Recipe};
