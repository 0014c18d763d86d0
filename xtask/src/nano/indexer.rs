//! `cargo xtask nano indexer`: what the indexer's choice does to the logits.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k3_graph::{Cpu, Device};
use k3_runner::Engine;

use super::table::{Column, table};
use super::{IndexerMode, OnEngine, nano, on_engine};
use crate::bench::median;
use crate::expect::{
    Check, Expectations, Found, Injection, Outcome, Sizes, Wanted, align, compare, exceeds, fits_context,
    record, relative_l2,
};
use crate::progress::Progress;
use crate::selfcheck::{Bounds, GOLDENS, GOLDENS_BOUND};

/// Whether the indexer selects as recorded, and how far logits move when tokens attend all keys, or random ones
///
/// Runs the expected prompts of a checkpoint that are longer than the indexer's budget in three ways, and prints the
/// relative L2 of the logits after the prompt to the expected ones. It fails where a recorded selection differs, where the
/// logits with the indexer are beyond the bound that selfcheck holds them to (docs/vectors.md 5: 3e-5, of goldens, 6: 1e-5),
/// or where other keys make no difference: for each prompt, dense and random attention have to be 10 times as far as the
/// indexer, and in the median 10 times as far as the bound.
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

/// How many times as far as what has to be near is what has to be far: beyond any rounding.
const FAR: f64 = 10.0;

/// Relative L2 of the logits after one prompt to the expected ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Name of the dialogue; `prompt` for the one that is recorded in full.
    pub name: String,
    /// Its tokens.
    pub tokens: usize,
    /// What it may be with the indexer (`docs/vectors.md` 5 and 6).
    pub bound: f64,
    /// With the indexer.
    pub indexer: f64,
    /// With every key attended.
    pub dense: f64,
    /// With random keys.
    pub random: f64,
}

/// What the indexer did on a checkpoint's expected prompts, and what other keys do.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Keys that the indexer selects.
    pub topk: usize,
    /// For every prompt that is longer.
    pub differences: Vec<Difference>,
    /// Names of prompts, and whether the selections that are recorded of them, and the tokens that were selected for, came
    /// again.
    pub selections: Vec<(String, Check)>,
}

pub(super) fn run(args: &IndexerArgs) -> Result<()> {
    let dir = args.model.clone().unwrap_or_else(nano);
    let measured = differences(&dir, args.threads, args.seed)?;
    let Measured { topk, differences, selections } = &measured;
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
    let medians = [0, 1, 2].map(|i| median(differences.iter().map(|d| each(d)[i]).collect()));
    rows.push(row("median", String::new(), medians));
    let mut out = std::io::stdout();
    writeln!(
        out,
        "logits after the prompt, relative L2 to the expected ones; {} of more than {topk} tokens",
        match differences.len() {
            1 => "1 prompt".to_owned(),
            n => format!("{n} prompts"),
        },
    )?;
    table(&columns, &rows, &mut out)?;
    let (mut equal, mut of) = (0, 0);
    for (_, check) in selections.iter().filter(|(_, check)| SELECTIONS.contains(&check.name.as_str())) {
        if let Found::Equal { equal: e, of: o } = check.found {
            (equal, of) = (equal + e, of + o);
        }
    }
    match of {
        0 => writeln!(out, "selections: none are recorded, only logits tell")?,
        _ => writeln!(out, "selections: {equal} of {of} as recorded")?,
    }
    let wrong = judge(&measured);
    for why in &wrong {
        writeln!(out, "FAILED {why}")?;
    }
    ensure!(
        wrong.is_empty(),
        "{}: the indexer, or what it is measured against, is not as it was recorded",
        dir.display()
    );
    writeln!(
        out,
        "PASS: near with the indexer, far without (cargo xtask nano indexer --help has the bounds)"
    )?;
    Ok(())
}

/// What is wrong, line by line: nothing if every recorded selection came again, logits with the indexer are within their
/// bound, and other keys move them far beyond it.
pub fn judge(measured: &Measured) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, check) in &measured.selections {
        if check.outcome == Outcome::Failed {
            wrong.push(format!("{name}: {}: {} ({})", check.name, check.found, check.note));
        }
    }
    for d in &measured.differences {
        if exceeds(d.indexer, d.bound) {
            wrong.push(format!(
                "{}: with the indexer logits are {:.1e} from the expected ones, at most {:.0e} is allowed",
                d.name, d.indexer, d.bound
            ));
        }
        for (what, distance) in [("dense", d.dense), ("random", d.random)] {
            if !exceeds(distance, FAR * d.indexer) || distance.is_nan() {
                wrong.push(format!(
                    "{}: {what} logits are {distance:.1e} from the expected ones, more than {FAR} times the {:.1e} with the \
                     indexer is needed: other keys make no difference there",
                    d.name, d.indexer
                ));
            }
        }
    }
    let bound = measured.differences.iter().map(|d| d.bound).fold(0.0, f64::max);
    let dense = ("dense", median(measured.differences.iter().map(|d| d.dense).collect()));
    let random = ("random", median(measured.differences.iter().map(|d| d.random).collect()));
    for (what, distance) in [dense, random] {
        if !exceeds(distance, FAR * bound) || distance.is_nan() {
            wrong.push(format!(
                "median: {what} logits are {distance:.1e} from the expected ones, more than {FAR} times the bound of \
                 {bound:.0e} is needed"
            ));
        }
    }
    wrong
}

/// What the indexer does for every expected prompt that is longer than its budget, and what other keys do.
///
/// # Errors
/// A checkpoint without an indexer, without expectations of logits, or without a prompt that is long enough.
pub fn differences(dir: &Path, threads: usize, seed: u64) -> Result<Measured> {
    let folder = dir.join(GOLDENS);
    let mut expected = if folder.is_dir() { Expectations::read_each(&folder)? } else { Vec::new() };
    expected.extend(Expectations::beside(dir)?.map(|e| (IN_FULL.to_owned(), e)));
    ensure!(
        !expected.is_empty(),
        "{}: there are no expectations beside the weights (docs/vectors.md)",
        dir.display()
    );
    let run = |mode| on_engine(dir, mode, Cpu::new(threads)?, seed, Logits { expected: &expected });
    let (topk, prompts, indexer) = run(IndexerMode::On)?;
    let selections =
        on_engine(dir, IndexerMode::On, Cpu::new(threads)?, seed, Selected { expected: &expected })?;
    let (_, _, dense) = run(IndexerMode::Off)?;
    let (_, _, random) = run(IndexerMode::Random)?;
    let distances = indexer.into_iter().zip(dense).zip(random);
    let difference = |(prompt, ((indexer, dense), random)): (Prompt, _)| Difference {
        tokens: prompt.ids.len(),
        bound: if prompt.name == IN_FULL { Bounds::CPU.model } else { GOLDENS_BOUND },
        name: prompt.name,
        indexer,
        dense,
        random,
    };
    Ok(Measured {
        topk,
        differences: prompts.into_iter().zip(distances).map(difference).collect(),
        selections,
    })
}

/// The name of what is recorded in full, beside goldens.
const IN_FULL: &str = "prompt";
/// Tensors of selections.
const SELECTIONS: [&str; 2] = ["index_sel", "cont_index_sel"];

/// Runs every prompt of which selections are recorded, and compares them. Those after the prompt are for the recorded
/// tokens, which have to come again.
struct Selected<'a> {
    expected: &'a [(String, Expectations)],
}

impl OnEngine for Selected<'_> {
    type Output = Vec<(String, Check)>;

    fn on<D: Device>(self, engine: &Engine<D>) -> Result<Self::Output> {
        let config = engine.model().config();
        let mut checks = Vec::new();
        for (name, expected) in self.expected {
            if !SELECTIONS.iter().any(|tensor| expected.tensors.contains_key(*tensor)) {
                continue;
            }
            let prompt = expected.prompt(config.vocab_size)?;
            let sizes = Sizes {
                config: config.clone(),
                layers: engine.model().num_layers(),
                tokens: prompt.len(),
                continuation: expected.continuation(),
                ignore_indexer: false,
            };
            fits_context(&sizes).with_context(|| expected.files_text())?;
            expected.validate(&sizes)?;
            let run = record(engine, &prompt, &sizes, Wanted::default(), Injection::default(), &mut || {})?;
            let (found, _) = align(&expected.tensors, run.tensors);
            let mut compared = compare(expected, &found, &sizes, Bounds::CPU.model);
            compared.retain(|check| {
                let is_choice = SELECTIONS.contains(&check.name.as_str()) || check.name == "greedy_ids";
                is_choice && check.outcome != Outcome::Skipped
            });
            checks.extend(compared.into_iter().map(|check| (name.clone(), check)));
        }
        Ok(checks)
    }
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
