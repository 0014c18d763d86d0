//! `cargo xtask drift`: how far the logits of one checkpoint are from those of another, for checkpoints that were made
//! from each other with a loss.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k3_graph::select::argmax;
use k3_graph::{LogitsWanted, Mode, Silent};
use serde::Serialize;

use crate::OpenArgs;
use crate::output::say;
use crate::prompt::fixed_prompt;

/// Arguments of `cargo xtask drift`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask repack /models/kimi-k3 /data/kimi-k3-int8 --dense int8
  cargo xtask drift /models/kimi-k3 /data/kimi-k3-int8
      the same fixed prompt through both, one after the other
  cargo xtask drift /models/kimi-k3 /data/kimi-k3-int8 --ids prompt.txt
      your own: k3 tokenize < text > prompt.txt

Every position of the prompt is compared, each after the same tokens. The prompt that is used without --ids is
random: on a trained model it shows errors of a kind that text does not.")]
pub struct Args {
    /// The checkpoint that counts
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The checkpoint to compare with it
    #[arg(value_name = "OTHER")]
    pub other: PathBuf,
    /// Token ids to run, separated by anything that is no digit
    #[arg(long, value_name = "FILE")]
    pub ids: Option<PathBuf>,
    /// Length of the fixed prompt that runs without --ids
    #[arg(long, default_value_t = 64, value_name = "N", conflicts_with = "ids")]
    pub tokens: usize,
    /// Arithmetic that OTHER runs with: exact, or int8, which rounds activations to 8-bit integers where weights have 4
    /// or 8 bits. SRC is always exact; it may be OTHER
    #[arg(long, default_value_t = Mode::Exact, value_name = "exact|int8")]
    pub arithmetic: Mode,
    /// Threads of the CPU device; 0 is one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    #[command(flatten)]
    #[allow(missing_docs, reason = "it would replace the description of the command")]
    pub open: OpenArgs,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

/// How far the logits at all positions of a prompt are apart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Drift {
    /// Positions compared.
    pub positions: usize,
    /// Bytes of weights outside the routed experts, of both.
    pub pinned_bytes: [u64; 2],
    /// `|other - source| / |source|` over all logits.
    pub relative_l2: f64,
    /// The largest of one position.
    pub worst_position: f64,
    /// Mean of the Kullback-Leibler divergence from the source's distribution to the other's, in nats a token.
    pub mean_kl: f64,
    /// Positions at which the most probable token is the same.
    pub same_top_token: usize,
    /// Whether all logits have the same bits.
    pub identical: bool,
}

/// Runs the command.
///
/// # Errors
/// What kept one of the checkpoints from being run; two that have different vocabularies.
pub fn run(args: &Args) -> Result<()> {
    let drift = measure(args)?;
    if args.json {
        return say(format_args!("{}", serde_json::to_string_pretty(&drift)?));
    }
    say(format_args!("{} positions, the same tokens before each", drift.positions))?;
    let [a, b] = drift.pinned_bytes.map(indicatif::DecimalBytes);
    say(format_args!("weights outside the routed experts: {a} and {b}"))?;
    if drift.identical {
        return say(format_args!("all logits are the same, bit for bit"));
    }
    say(format_args!(
        "logits, relative L2: {:.2e}, worst position {:.2e}",
        drift.relative_l2, drift.worst_position
    ))?;
    say(format_args!("mean KL divergence: {:.2e} nats a token", drift.mean_kl))?;
    let share = 100.0 * drift.same_top_token as f64 / drift.positions as f64;
    say(format_args!("most probable token the same at {} positions, {share:.1} %", drift.same_top_token))
}

/// Runs both checkpoints, one after the other, and compares.
///
/// # Errors
/// As [`run`].
pub fn measure(args: &Args) -> Result<Drift> {
    let given = args.ids.as_deref().map(read_ids).transpose()?;
    let (ids, source, bytes, vocab) = logits(args, &args.source, Mode::Exact, given)?;
    let (_, other, other_bytes, other_vocab) = logits(args, &args.other, args.arithmetic, Some(ids))?;
    ensure!(
        vocab == other_vocab,
        "{} has {vocab} logits a token, {} has {other_vocab}: these are different models",
        args.source.display(),
        args.other.display()
    );
    Ok(compare(&source, &other, vocab, [bytes, other_bytes]))
}

type Logits = (Vec<u32>, Vec<f32>, u64, usize);

/// The logits at every position, the ids they belong to, pinned bytes, and logits a token.
fn logits(args: &Args, dir: &Path, mode: Mode, ids: Option<Vec<u32>>) -> Result<Logits> {
    let engine = args.open.open(dir, k3_graph::Cpu::new(args.threads)?.with_mode(mode))?;
    let ids = match ids {
        Some(ids) => ids,
        None => fixed_prompt(&engine, args.tokens)?,
    };
    ensure!(!ids.is_empty(), "there are no tokens to run");
    let mut sequence = engine.new_sequence()?;
    let mut logits = Vec::new();
    for chunk in ids.chunks(engine.chunk_tokens()) {
        let found = engine.run(&mut sequence, chunk, LogitsWanted::All, &mut Silent);
        logits.extend(found.with_context(|| format!("running {}", dir.display()))?.values);
    }
    let vocab = engine.model().config().vocab_size;
    Ok((ids, logits, engine.checkpoint().resident_bytes(), vocab))
}

fn read_ids(file: &Path) -> Result<Vec<u32>> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("reading the ids of {}", file.display()))?;
    let words = text.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
    words
        .map(|word| word.parse().with_context(|| format!("{}: {word} is no token id", file.display())))
        .collect()
}

fn compare(source: &[f32], other: &[f32], vocab: usize, pinned_bytes: [u64; 2]) -> Drift {
    let square = |v: f64| v * v;
    let mut drift = Drift {
        positions: source.len() / vocab,
        pinned_bytes,
        relative_l2: 0.0,
        worst_position: 0.0,
        mean_kl: 0.0,
        same_top_token: 0,
        identical: source.iter().map(|v| v.to_bits()).eq(other.iter().map(|v| v.to_bits())),
    };
    let (mut error, mut norm) = (0.0, 0.0);
    for (p, q) in source.chunks(vocab).zip(other.chunks(vocab)) {
        let here: f64 = p.iter().zip(q).map(|(p, q)| square(f64::from(*q) - f64::from(*p))).sum();
        let size: f64 = p.iter().map(|p| square(f64::from(*p))).sum();
        drift.worst_position = drift.worst_position.max((here / size).sqrt());
        error += here;
        norm += size;
        drift.mean_kl += divergence(p, q);
        drift.same_top_token += usize::from(argmax(p) == argmax(q));
    }
    drift.relative_l2 = (error / norm).sqrt();
    drift.mean_kl /= drift.positions as f64;
    drift
}

/// `sum p (log p - log q)` of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (log_p, log_q) = (log_softmax(p), log_softmax(q));
    log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted: Vec<f64> = logits.iter().map(|v| f64::from(*v) - f64::from(max)).collect();
    let log_sum = shifted.iter().map(|v| v.exp()).sum::<f64>().ln();
    shifted.into_iter().map(|v| v - log_sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_comparison() {
        let same = compare(&[1.0, 2.0, 0.5, 0.0], &[1.0, 2.0, 0.5, 0.0], 2, [1, 2]);
        assert_eq!(
            (same.relative_l2, same.mean_kl, same.same_top_token, same.identical),
            (0.0, 0.0, 2, true)
        );
        // p = (1/4, 3/4), q = (1/2, 1/2); then equal rows.
        let (a, b) = ((1f32 / 3.0).ln(), 0.0);
        let found = compare(&[a, b, 3.0, 4.0], &[b, b, 3.0, 4.0], 2, [1, 2]);
        let kl: f64 = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((found.mean_kl - kl / 2.0).abs() < 1e-7, "{found:?}");
        assert!((found.worst_position - 1.0).abs() < 1e-7 && !found.identical);
        assert_eq!((found.positions, found.same_top_token), (2, 1));
        let expected = f64::from(a.abs()) / (f64::from(a * a) + 25.0).sqrt();
        assert!((found.relative_l2 - expected).abs() < 1e-7, "{found:?}");
    }
}
