//! `cargo xtask nano indexer`: what the indexer's choice does to the logits.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k3_graph::Device;
use k3_runner::Engine;

use super::table::{Column, table};
use super::{IndexerMode, OnEngine, nano, on_engine};
use crate::expect::{Expectations, relative_l2};
use crate::progress::Progress;
use crate::selfcheck::GOLDENS;

/// How far logits move when tokens attend all keys, or random ones, instead of the indexer's
///
/// Runs the expected prompts of a checkpoint that are longer than the indexer's budget in three ways, and prints the
/// relative L2 of the logits after the prompt to the expected ones.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask nano indexer
  cargo xtask nano indexer --model fixtures/tiny-k31")]
pub struct IndexerArgs {
    /// Snapshot with expectations in its folder [default: fixtures/nano of this repository]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Threads of the CPU device; 0 is one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Seed of the random selection
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// Relative L2 of the logits after one prompt to the expected ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Name of the dialogue; `prompt` for the one that is recorded in full.
    pub name: String,
    /// Its tokens.
    pub tokens: usize,
    /// With the indexer.
    pub indexer: f64,
    /// With every key attended.
    pub dense: f64,
    /// With random keys.
    pub random: f64,
}

pub(super) fn run(args: &IndexerArgs) -> Result<()> {
    let dir = args.model.clone().unwrap_or_else(nano);
    let (topk, differences) = differences(&dir, args.threads, args.seed)?;
    let columns = [
        Column::left("prompt"),
        Column::right("tokens"),
        Column::right("indexer"),
        Column::right("dense"),
        Column::right("random"),
    ];
    let row = |name: &str, tokens: String, [indexer, dense, random]: [f64; 3]| {
        vec![
            name.to_owned(),
            tokens,
            format!("{indexer:.1e}"),
            format!("{dense:.1e}"),
            format!("{random:.1e}"),
        ]
    };
    let each = |d: &Difference| [d.indexer, d.dense, d.random];
    let mut rows: Vec<Vec<String>> =
        differences.iter().map(|d| row(&d.name, d.tokens.to_string(), each(d))).collect();
    let median = |i: usize| {
        let mut values: Vec<f64> = differences.iter().map(|d| each(d)[i]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    rows.push(row("median", String::new(), [median(0), median(1), median(2)]));
    let mut out = std::io::stdout();
    writeln!(
        out,
        "logits after the prompt, relative L2 to the expected ones; {} of more than {topk} tokens",
        match differences.len() {
            1 => "1 prompt".to_owned(),
            n => format!("{n} prompts"),
        },
    )?;
    Ok(table(&columns, &rows, &mut out)?)
}

/// The budget of the indexer, and the differences for every expected prompt that is longer.
///
/// # Errors
/// A checkpoint without an indexer, without expectations of logits, or without a prompt that is long enough.
pub fn differences(dir: &Path, threads: usize, seed: u64) -> Result<(usize, Vec<Difference>)> {
    let folder = dir.join(GOLDENS);
    let mut expected = if folder.is_dir() { Expectations::read_each(&folder)? } else { Vec::new() };
    expected.extend(Expectations::beside(dir)?.map(|e| ("prompt".to_owned(), e)));
    ensure!(
        !expected.is_empty(),
        "{}: there are no expectations beside the weights (docs/vectors.md)",
        dir.display()
    );
    let run = |mode| on_engine(dir, mode, threads, seed, Logits { expected: &expected });
    let (topk, prompts, indexer) = run(IndexerMode::On)?;
    let (_, _, dense) = run(IndexerMode::Off)?;
    let (_, _, random) = run(IndexerMode::Random)?;
    let distances = indexer.into_iter().zip(dense).zip(random);
    let difference = |(prompt, ((indexer, dense), random)): (Prompt, _)| Difference {
        name: prompt.name,
        tokens: prompt.ids.len(),
        indexer,
        dense,
        random,
    };
    Ok((topk, prompts.into_iter().zip(distances).map(difference).collect()))
}

/// A prompt and the logits that are expected after it.
struct Prompt {
    name: String,
    ids: Vec<u32>,
    logits: Vec<f32>,
}

/// The distances of the logits after every prompt of more tokens than the budget.
struct Logits<'a> {
    expected: &'a [(String, Expectations)],
}

impl OnEngine for Logits<'_> {
    type Output = (usize, Vec<Prompt>, Vec<f64>);

    fn on<D: Device>(self, engine: &Engine<D>) -> Result<Self::Output> {
        let config = engine.model().config();
        let topk = config
            .indexer
            .as_ref()
            .with_context(|| format!("{} has no indexer that could matter", engine.checkpoint().variant()))?;
        let topk = topk.topk;
        let mut prompts = Vec::new();
        for (name, expected) in self.expected {
            let rows = |tensor: &str| {
                let values = expected.tensors.get(tensor).and_then(|t| t.as_f32()).unwrap_or_default();
                values.chunks_exact(config.vocab_size)
            };
            let ids = expected.prompt(config.vocab_size)?;
            if let Some(logits) = rows("greedy_logits").next().or_else(|| rows("logits").last())
                && ids.len() > topk
            {
                prompts.push(Prompt { name: name.clone(), ids, logits: logits.to_vec() });
            }
        }
        ensure!(
            !prompts.is_empty(),
            "{}: no prompt with logits has more than the indexer's {topk} tokens",
            engine.checkpoint().dir().display()
        );
        let mut progress = Progress::steps(engine.model().device().kind(), prompts.len());
        let mut distance = |p: &Prompt| -> Result<f64> {
            let logits = engine.prefill(&mut engine.new_sequence()?, &p.ids)?;
            progress.step();
            Ok(relative_l2(&logits.values, &p.logits).0)
        };
        let distances = prompts.iter().map(&mut distance).collect::<Result<_>>()?;
        Ok((topk, prompts, distances))
    }
}
