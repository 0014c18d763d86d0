//! `cargo xtask repack`: converts a checkpoint once, for the engine and for servers, without loss.

mod print;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use k3_format::repack::{
    DenseFormat, ExpertTarget, IoMode, Naming, Outcome, Phase, Recipe, Repack, RepackError, RunOptions,
    VerifyMode,
};
use k3_format::{Checkpoint, IndexerNames, NewFile, OpenOptions, Warning};
use serde_json::{Value, json};

use crate::output::say;
use crate::progress::Progress;

/// Paragraphs are one line each, since clap breaks them where the terminal ends; examples fit into 80 columns.
const AFTER_HELP: &str = "\
Examples:
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-nvfp4 --dry-run
      bytes to read and write, free space, time at the rates of these drives
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-nvfp4 --verify full
      NVFP4 experts under the names of compressed-tensors (vLLM), then compared
      with the source, every code and every scale
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-sglang --names modelopt
      the same experts under the names of ModelOpt (SGLang)
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-int8 --dense int8
      also makes what is kept in memory smaller, 60 instead of 114 GB, with a
      loss that is measured for every matrix (docs/dense-formats.md)
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-aligned --experts mxfp4
      experts as they are, in id order and page-aligned: less to read on CPUs

An interrupted run goes on where it stopped when it is started again with the same arguments, and the tree is the same \
in the end, byte for byte. A finished tree can be given again: it is verified, or mended. The source is only read. \
docs/repack.md has the guarantees.";

/// Arguments of `cargo xtask repack`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Snapshot to convert, with MXFP4 experts as published
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// Directory to write to: new, empty, or one of an earlier run with the same arguments
    #[arg(value_name = "DST")]
    pub target: PathBuf,
    /// Format of the routed experts
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub experts: ExpertsName,
    /// Names and config of NVFP4 experts [default: compressed-tensors]
    #[arg(long, value_enum, value_name = "WHOSE")]
    pub names: Option<NamesName>,
    /// Format of the large matrices outside the routed experts
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub dense: DenseName,
    /// Leave out the vision tower and its projector
    #[arg(long)]
    pub text_only: bool,
    /// Write only these layers, 0-based and without B, and what belongs to no layer; the run that completes the last
    /// shard finishes the tree
    #[arg(long, value_name = "A..B", value_parser = layers)]
    pub layers: Option<Range<usize>>,
    /// Shards in flight; 0: one for each core [default: 4]
    #[arg(long, value_name = "N")]
    pub jobs: Option<usize>,
    /// The most memory for buffers, in MiB; fewer shards are in flight if it asks for that
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub memory: u64,
    /// Through the page cache or past it
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub io: IoName,
    /// What is read again from the finished tree
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub verify: VerifyName,
    /// Only say what would be done, and whether there is room for it
    #[arg(long)]
    pub dry_run: bool,
    /// Also write what was found and done to this JSON file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// A JSON file with other names for the five indexer tensors of K3.1
    #[arg(long, value_name = "FILE")]
    pub indexer_names: Option<PathBuf>,
}

/// `--experts`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExpertsName {
    /// The same 4-bit codes with rewritten scales; 5.9 % more bytes
    #[default]
    Nvfp4,
    /// As published, in id order and aligned
    Mxfp4,
}

/// `--names`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NamesName {
    /// For vLLM
    CompressedTensors,
    /// For SGLang
    Modelopt,
}

/// `--dense`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DenseName {
    /// As they are
    #[default]
    Bf16,
    /// 4.5 bits a weight; with a loss
    Nvfp4,
    /// 8 bits a weight; with a loss
    Int8,
    /// 4.25 bits a weight, names of compressed-tensors only; with a loss
    Int4,
}

/// `--io`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IoName {
    /// Past the page cache where both file systems can
    #[default]
    Auto,
    /// Through the page cache
    Cached,
    /// Past the page cache, or not at all
    Direct,
}

/// `--verify`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum VerifyName {
    /// Headers, config and index only
    #[default]
    None,
    /// Every byte of the result against the hashes it was written with
    Read,
    /// Every code, scale and dense weight of the result against the source
    Full,
}

/// `A..B`
fn layers(text: &str) -> Result<Range<usize>, String> {
    let range = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    range
        .filter(|range| !range.is_empty())
        .ok_or_else(|| "expected A..B with A below B, such as 0..46".to_owned())
}

impl Args {
    fn recipe(&self) -> Result<Recipe> {
        ensure!(
            self.experts == ExpertsName::Nvfp4 || self.names != Some(NamesName::Modelopt),
            "--names modelopt names NVFP4 experts; MXFP4 has one set of names: leave --names out"
        );
        let recipe = Recipe::default().text_only(self.text_only);
        let recipe = recipe.experts(match self.experts {
            ExpertsName::Nvfp4 => ExpertTarget::Nvfp4,
            ExpertsName::Mxfp4 => ExpertTarget::Mxfp4,
        });
        let recipe = recipe.names(match self.names {
            None | Some(NamesName::CompressedTensors) => Naming::CompressedTensors,
            Some(NamesName::Modelopt) => Naming::ModelOpt,
        });
        Ok(recipe.dense(match self.dense {
            DenseName::Bf16 => DenseFormat::Bf16,
            DenseName::Nvfp4 => DenseFormat::Nvfp4,
            DenseName::Int8 => DenseFormat::Int8,
            DenseName::Int4 => DenseFormat::Int4,
        }))
    }

    fn options(&self) -> RunOptions {
        let mut options = RunOptions::default();
        options.layers.clone_from(&self.layers);
        options.jobs = self.jobs.unwrap_or(options.jobs);
        options.memory = self.memory.saturating_mul(1 << 20);
        options.io = match self.io {
            IoName::Auto => IoMode::Auto,
            IoName::Cached => IoMode::Cached,
            IoName::Direct => IoMode::Direct,
        };
        options.verify = match self.verify {
            VerifyName::None => VerifyMode::None,
            VerifyName::Read => VerifyMode::Read,
            VerifyName::Full => VerifyMode::Full,
        };
        options
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let (recipe, options) = (args.recipe()?, args.options());
    check_report(args)?;
    let mut open = OpenOptions::default();
    if let Some(file) = &args.indexer_names {
        open = open.indexer_names(IndexerNames::load(file).context("reading the names of --indexer-names")?);
    }
    let source = Checkpoint::open(&args.source, &open)?;
    // What is skipped here is copied, or named below.
    for warning in source.warnings().iter().filter(|warning| !matches!(warning, Warning::Skipped { .. })) {
        say(format_args!("note: {warning}"))?;
    }
    let repack = Repack::new(&source, recipe)?;
    print::plan(&source, &repack)?;
    let estimate = repack.estimate(&args.target, &options)?;
    print::estimate(&args.target, &estimate, &options)?;
    if args.dry_run {
        let plan = repack.plan();
        let dry_run = json!({
            "recipe": plan.recipe.to_string(),
            "shards": plan.shards.len(),
            "tensors": plan.shards.iter().map(|shard| shard.tensors).sum::<usize>(),
            "data_bytes": plan.data_bytes(),
            "fits": estimate.fits(),
            "estimate": estimate,
        });
        write_report(args, json!({ "dry_run": dry_run }))?;
        return say(format_args!("nothing was written"));
    }

    let start = Instant::now();
    let outcome = convert(&repack, args, &options);
    let seconds = start.elapsed().as_secs_f64();
    let error = match outcome {
        Ok(outcome) => {
            print::outcome(&outcome, seconds)?;
            write_report(args, json!({ "seconds": seconds, "run": outcome }))?;
            return print::finished(&args.target, &outcome);
        }
        Err(error) => error,
    };
    let run = match &error {
        RepackError::Differs(differences) => {
            print::outcome(&differences.outcome, seconds)?;
            let failed = json!({ "shards": differences.shards, "index": differences.index });
            json!({ "run": differences.outcome, "failed_verification": failed })
        }
        RepackError::Refused(refusals) => {
            print::exponents(&refusals.exponents)?;
            print::refused(refusals)?;
            let run = json!({
                "refused": refusals.total,
                "refused_for_nan": refusals.nan,
                "first_refusals": refusals.first,
                "exponents": refusals.exponents,
            });
            json!({ "run": run })
        }
        _ => json!({}),
    };
    let error = anyhow::Error::from(error);
    let mut report = json!({ "seconds": seconds, "error": format!("{error:#}") });
    if let (Value::Object(report), Value::Object(run)) = (&mut report, run) {
        report.extend(run);
    }
    if let Err(unwritten) = write_report(args, report) {
        say(format_args!("note: {unwritten:#}"))?;
    }
    Err(error)
}

fn convert(repack: &Repack<'_>, args: &Args, options: &RunOptions) -> Result<Outcome, RepackError> {
    let mut shown: Option<(Phase, Progress)> = None;
    repack.run(&args.target, options, &mut |at| {
        let label = match at.phase {
            Phase::Writing => "writing",
            Phase::Checking => "comparing complete shards with the source",
            Phase::Verifying => "verifying",
        };
        if shown.as_ref().is_none_or(|(phase, _)| *phase != at.phase) {
            shown = Some((at.phase, Progress::bytes(label, at.bytes_total)));
        }
        if let Some((_, progress)) = &mut shown {
            progress.set(at.bytes_done);
        }
    })
}

/// An error unless the report has a place of its own, before hours of work end with it.
fn check_report(args: &Args) -> Result<()> {
    let Some(file) = &args.report else { return Ok(()) };
    let refuse = |why: &str| bail!("--report {}: {why}; name a new file elsewhere", file.display());
    let absolute = std::path::absolute(file).with_context(|| format!("--report {}", file.display()))?;
    let folder = absolute.parent().unwrap_or(&absolute);
    let folder =
        folder.canonicalize().with_context(|| format!("the folder of --report {}", file.display()))?;
    let holds = |dir: &PathBuf| dir.canonicalize().is_ok_and(|dir| folder.starts_with(dir));
    if holds(&args.source) {
        return refuse("it would be written into the source");
    }
    if holds(&args.target) {
        return refuse("it would be written into the target, which has a report of its own");
    }
    match file.symlink_metadata() {
        Ok(found) if found.is_symlink() => refuse("it is a symbolic link"),
        Ok(found) if !found.is_file() => refuse("it is no regular file"),
        _ => Ok(()),
    }
}

fn write_report(args: &Args, mut report: Value) -> Result<()> {
    let Some(file) = &args.report else { return Ok(()) };
    report["source"] = json!(args.source);
    report["target"] = json!(args.target);
    let text = serde_json::to_string_pretty(&report)? + "\n";
    let write = || {
        // A file that has the name already may have another one in the source.
        let mut file = NewFile::create(file)?;
        file.write(text.as_bytes())?;
        file.commit()
    };
    write().with_context(|| format!("writing the report {}", file.display()))
}

#[cfg(test)]
mod tests {
    #[track_caller]
    fn check(text: &str, expected: Option<(usize, usize)>) {
        let range = super::layers(text).ok();
        assert_eq!(range.map(|range| (range.start, range.end)), expected, "{text}");
    }

    #[test]
    fn ranges_of_layers() {
        check("0..46", Some((0, 46)));
        check("3..4", Some((3, 4)));
        for bad in ["", "3", "..", "3..", "..3", "4..4", "5..4", "a..b", "-1..3", "0..=3"] {
            check(bad, None);
        }
    }
}
