//! `cargo xtask nano`: how good a small trained checkpoint is, and whether its indexer matters.
//!
//! Made for `fixtures/nano`; any checkpoint with its tokenizer, dialogues or an evaluation file will do.

mod eval;
mod indexer;
mod random;
mod table;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Subcommand, ValueEnum};
use k3_graph::{Cpu, Device};
use k3_runner::Engine;

use crate::OpenArgs;
use crate::selfcheck::fixtures;

pub use eval::{EvalArgs, Item, Reply, Score, read_items, replies, scores};
pub use indexer::{Difference, IndexerArgs, Measured, differences, judge};
pub use random::RandomSelection;

/// Measure a small trained checkpoint
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    Eval(EvalArgs),
    Indexer(IndexerArgs),
}

/// Runs the command.
///
/// # Errors
/// What kept it from measuring.
pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Eval(args) => eval::run(args),
        What::Indexer(args) => indexer::run(args),
    }
}

/// Which keys a token attends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IndexerMode {
    /// Those that the indexer selects
    #[default]
    On,
    /// All: the indexer does not run
    Off,
    /// As many as the indexer would select, at random for every layer and token
    Random,
}

/// Something to do on an engine, whatever its device.
trait OnEngine {
    type Output;

    fn on<D: Device>(self, engine: &Engine<D>) -> Result<Self::Output>;
}

/// Opens the snapshot in `dir` on `cpu`, with the keys of `mode` attended, and does `work` on it.
fn on_engine<W: OnEngine>(dir: &Path, mode: IndexerMode, cpu: Cpu, seed: u64, work: W) -> Result<W::Output> {
    let open = OpenArgs { ignore_indexer: mode == IndexerMode::Off, ..OpenArgs::default() };
    match mode {
        IndexerMode::On | IndexerMode::Off => work.on(&open.open(dir, cpu)?),
        IndexerMode::Random => work.on(&open.open(dir, RandomSelection::new(cpu, seed))?),
    }
}

/// The model of the repository's fixtures.
fn nano() -> PathBuf {
    fixtures().join("nano")
}
