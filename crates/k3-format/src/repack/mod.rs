//! Converting a checkpoint once, as pure I/O and provably without loss (`docs/nvfp4.md`, `docs/repack.md`).
//!
//! A [`Plan`] follows from the source's headers and a [`Recipe`] and decides every byte of the result. [`Repack::run`]
//! carries it out shard by shard. It can be killed at any moment and called again: the tree is the same in the end.
//!
//! ```no_run
//! # fn main() -> Result<(), k3_format::repack::RepackError> {
//! use k3_format::repack::{Recipe, Repack, RunOptions};
//! use k3_format::{Checkpoint, OpenOptions};
//!
//! let source = Checkpoint::open("/models/kimi-k3".as_ref(), &OpenOptions::default())?;
//! let repack = Repack::new(&source, Recipe::default())?;
//! let outcome = repack.run("/data/kimi-k3-nvfp4".as_ref(), &RunOptions::default(), &mut |_| {})?;
//! # Ok(())
//! # }
//! ```

mod call;
mod compare;
mod config;
mod dense;
mod dense_config;
mod differences;
mod error;
mod estimate;
mod existing;
mod expert;
mod extras;
mod finish;
mod journal;
mod parallel;
mod pipeline;
mod plan;
mod raw_object;
mod read;
mod recipe;
mod report;
mod run;
mod scales;
mod sink;
mod source_id;
mod target;
mod verify;

pub use differences::{Differences, IndexFate, ShardDifferences};
pub use error::{Refusal, Refusals, RepackError};
pub use estimate::Estimate;
pub use plan::{DensePlan, Dropped, Plan, ShardPlan};
pub use recipe::{DenseFormat, ExpertTarget, Naming, Recipe};
pub use report::{Exponents, FileRecord, KindRounding, LeftOut, MatrixRounding, Outcome, Report};
pub use run::{IoMode, Phase, Progress, Repack, RunOptions, VerifyMode};
pub use source_id::{SourceFile, SourceId};
pub use verify::Proof;

/// Name of the report in a finished tree.
pub const REPORT_FILE: &str = "repack.json";
