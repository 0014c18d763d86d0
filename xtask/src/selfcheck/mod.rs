//! `cargo xtask selfcheck`: does this engine compute what it should, on these files, on this machine?
//!
//! Cycles through prefill chunk sizes must agree bit for bit, and everything that is expected of the checkpoint
//! (`docs/vectors.md`) must hold. What cannot be checked is skipped, and skipped is not passed.

pub mod conversation;
mod divergence;
mod goldens;
mod model;
mod print;
mod stack;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use crate::OpenArgs;

pub(crate) use goldens::{BOUND as GOLDENS_BOUND, FOLDER as GOLDENS};

pub use divergence::{Divergence, Forced, Sublayer};
pub use model::{Bounds, Cycle, Report};

/// Checkpoints with expectations in the `fixtures` folder of the sources.
/// The one that was trained is last, so that its conversation is what a person sees.
const FIXTURES: [&str; 4] = ["tiny-k3", "tiny-k31", "dims-k31", "nano"];

/// Arguments of `cargo xtask selfcheck`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask selfcheck
      the checkpoints in fixtures/ of this repository, all expectations, and a conversation
  cargo xtask selfcheck --model /models/kimi-k3
      cycles on a checkpoint of yours; with expected.safetensors or .json in its folder, those too
  cargo xtask selfcheck --model /models/kimi-k3 --expect /data/other-engine.safetensors
      against the results of any engine, in the format of docs/vectors.md
  cargo xtask selfcheck --device reference
      the same in double precision, slowly: tells a wrong file from a wrong kernel

Results go to stdout, progress to stderr. Exit code 0 only if something was checked and nothing failed.")]
pub struct Args {
    /// Snapshot to check [default: the checkpoints in fixtures/ of this repository]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// What runs the model
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
    /// Runs to compare; they take the whole prompt at once (512 tokens at most), chunks of 7, and single tokens in turn
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cycles: u32,
    /// Expected results: a .safetensors or .json file, or a folder of one or many [default: those in the snapshot's folder,
    /// and in the folder `goldens` there]
    #[arg(long, value_name = "FILE", requires = "model")]
    pub expect: Option<PathBuf>,
    /// Threads of the CPU device; 0 is one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Use this prefill chunk size in all cycles
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// Length of a fixed prompt of random ids, to run where there are no expectations [default: 16; a checkpoint with a
    /// tokenizer is asked a question]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "it would replace the description of the command")]
    pub open: OpenArgs,
    /// Print every check, not only those that failed
    #[arg(long, short)]
    pub verbose: bool,
}

/// `--device`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    /// The host in single precision
    Cpu,
    /// The host in double precision, plain loops
    Reference,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            model: None,
            device: DeviceName::Cpu,
            cycles: 3,
            expect: None,
            threads: 0,
            chunk: None,
            tokens: None,
            open: OpenArgs::default(),
            verbose: false,
        }
    }
}

/// Runs the command and prints its results.
///
/// # Errors
/// What kept a checkpoint from being checked, or that checks failed.
pub fn run(args: &Args) -> Result<()> {
    let reports = check(args, &mut std::io::stdout())?;
    let failed = reports.iter().filter(|r| !r.is_good()).count();
    ensure!(failed == 0, "selfcheck failed for {failed} of {} models", reports.len());
    Ok(())
}

/// Runs the command, with its results to `out`, and returns them: one report a model.
///
/// # Errors
/// What kept a checkpoint from being checked. Failed checks are no error.
pub fn check(args: &Args, out: &mut dyn std::io::Write) -> Result<Vec<Report>> {
    if args.chunk == Some(0) {
        bail!("--chunk 0: a chunk has at least one token");
    }
    if args.tokens == Some(0) {
        bail!("--tokens 0: a prompt has at least one token");
    }
    if let Some(dir) = &args.model {
        let reports = vec![check_model(args, dir, out)?];
        print::end(args, &reports, out)?;
        return Ok(reports);
    }
    if args.open.layers.is_some() || args.open.indexer_names.is_some() {
        bail!("--layers and --indexer-names are about one checkpoint: name it with --model DIR");
    }
    check_folder(args, &fixtures(), out)
}

/// The `fixtures` folder of the sources, as people write it.
pub(crate) fn fixtures() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).join("fixtures")
}

/// Checks the checkpoints of a `fixtures` folder, as [`check`] does without a model. One that cannot be opened
/// or run is a failed check of its own and keeps no other from being checked.
///
/// # Errors
/// What kept the results from being written.
pub fn check_folder(args: &Args, fixtures: &Path, out: &mut dyn std::io::Write) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    for name in FIXTURES {
        let dir = fixtures.join(name);
        let report = check_model(args, &dir, out).or_else(|error| {
            let error = if dir.join("config.json").is_file() {
                error
            } else {
                error.context(format!(
                    "the checkpoint {} is not there: restore the `fixtures` folder of the repository, or name a \
                     checkpoint with --model DIR",
                    dir.display()
                ))
            };
            let report = Report::obstacle(&dir, &error);
            print::model(args, &report, out).map(|()| report)
        })?;
        reports.push(report);
    }
    print::end(args, &reports, out)?;
    Ok(reports)
}

fn check_model(args: &Args, dir: &Path, out: &mut dyn std::io::Write) -> Result<Report> {
    match args.device {
        DeviceName::Cpu => {
            let device = k3_graph::Cpu::new(args.threads)?;
            let threads = device.threads();
            model::check(args, dir, device, threads, Bounds::CPU, out)
        }
        DeviceName::Reference => model::check(args, dir, k3_graph::Reference, 1, Bounds::REFERENCE, out),
    }
}
