//! `cargo xtask bench`: measurements, each as a ratio to a limit measured in the same run.

mod decode;
mod indexer;
mod kernels;
mod limits;
mod overlap;
mod prefill;
mod profile;
mod repack;
mod store;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use k3_experts::memory::peak_rss;
use k3_format::{Checkpoint, OpenOptions};

pub(crate) use decode::median;

/// Measure something, and the limit it should be compared with
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Seconds and peak memory to open and check a checkpoint of 93 layers and 497,340 tensors
    ///
    /// Without --model, a tree with the released geometry is made first: real headers and index, and holes in place
    /// of 1.5 TB of weights. The limit is a plain read of the same headers and index. Everything is warm: on a
    /// first run the disk is in the way of both.
    Index {
        /// Open this snapshot instead
        #[arg(long)]
        model: Option<PathBuf>,
        /// How often to open it
        #[arg(long, default_value_t = 3)]
        repeat: usize,
    },
    /// Products with weights of every format, on one thread and on all
    ///
    /// The limits are reads of as many bytes, plain and with prefetches, and multiply-adds in registers.
    Kernels(kernels::Args),
    /// Seconds of a token and of a prompt, beside those of their reading alone and of their arithmetic alone
    ///
    /// The limit is the greater of the two, measured in the same run: what the experts take to read with nothing to
    /// compute, and what the tokens take with every expert in memory. A tree for it, 17 GB, of which all experts and
    /// the weights in use must fit into memory:
    /// `cargo xtask synth --geometry k31 --layers 4 --experts 112 DIR`.
    Overlap(overlap::Args),
    /// Seconds a token in decode and where they go, against reading what a token touches at the rate of memory
    ///
    /// Weights and states are counted, each as often as it has to be read or written.
    Decode {
        #[command(flatten)]
        args: decode::Args,
        /// Tokens to time
        #[arg(long, default_value_t = 32, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
        tokens: usize,
        /// Time as many again beside a thread that never sleeps
        #[arg(long)]
        busy: bool,
    },
    /// Seconds of a prompt and where they go, against reading the weights once and against the products at the rate of
    /// fused multiply-adds
    Prefill {
        #[command(flatten)]
        args: decode::Args,
        /// Tokens of a prompt; several, with commas between
        #[arg(long, value_delimiter = ',', default_values_t = [128, 512],
              value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
        tokens: Vec<usize>,
    },
    /// The best 2,048 keys of a long context, against reading the keys once
    Indexer {
        /// Keys in the context
        #[arg(long, default_value_t = 1_000_000)]
        keys: usize,
        /// Tokens of a prompt that select at once, measured beside one of decode
        #[arg(long, default_value_t = 64)]
        rows: usize,
        /// Threads, the calling one included; 0 takes one a physical core
        #[arg(long, default_value_t = 0)]
        threads: usize,
    },
    /// Seconds and peak memory of a repack, beside `cp` of the same files to the same disk
    ///
    /// Once with the source in the page cache and once without. A repack ends with its bytes on the disk and `cp` does
    /// not, so `cp` is also timed with a sync.
    Repack(repack::Args),
    /// Bytes per second that the expert stores give: read past the page cache, and mapped from it
    ///
    /// The limit of the first is as many threads that read experts of the same shards, whole or in pieces of 4 MiB, and do
    /// nothing else; that of the second is what as many threads read from memory. A tree for it, 17 GB:
    /// `cargo xtask synth --geometry k31 --layers 4 --experts 112 DIR`.
    Store {
        /// A snapshot with experts of the released size
        #[arg(long)]
        model: PathBuf,
        /// Reads in flight on a drive
        #[arg(long, default_value_t = 6, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
        reads_in_flight: usize,
        /// Megabytes for experts in memory
        #[arg(long, default_value_t = 800, allow_negative_numbers = true)]
        budget_mb: u64,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Kernels(args) => kernels::run(args),
        What::Overlap(args) => overlap::run(args),
        What::Decode { args, tokens, busy } => decode::run(args, *tokens, *busy),
        What::Prefill { args, tokens } => prefill::run(args, tokens),
        What::Indexer { keys, rows, threads } => indexer::run(*keys, *rows, *threads),
        What::Repack(args) => repack::run(args),
        What::Store { model, reads_in_flight, budget_mb } => {
            store::run(model, *reads_in_flight, budget_mb.saturating_mul(1_000_000))
        }
        What::Index { model: Some(dir), repeat } => index(dir, *repeat),
        What::Index { model: None, repeat } => {
            let parent = tempfile::tempdir().context("making a temporary folder")?;
            let dir = parent.path().join("k31-sparse");
            // In a process of its own: the peak of this one is that of opening.
            let this = std::env::current_exe().context("finding this program")?;
            let made = Command::new(this)
                .args(["synth", "--geometry", "k31", "--sparse"])
                .arg(&dir)
                .status()
                .context("starting `synth`")?;
            ensure!(made.success(), "`synth --geometry k31 --sparse` failed");
            index(&dir, *repeat)
        }
    }
}

fn index(dir: &Path, repeat: usize) -> Result<()> {
    let mut out = std::io::stdout();
    read_descriptions(dir)?;
    let (bytes, plain) = read_descriptions(dir)?;
    let (megabytes, seconds) = (bytes as f64 / 1e6, plain.as_secs_f64());
    writeln!(out, "plain read of index and headers: {megabytes:.1} MB in {seconds:.3} s")?;
    let before = peak_rss();
    for _ in 0..repeat.max(1) {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(dir, &OpenOptions::default())?;
        let seconds = start.elapsed().as_secs_f64();
        writeln!(
            out,
            "{} tensors in {} shards opened in {seconds:.3} s, {:.1} x the plain read",
            checkpoint.shards().len(),
            checkpoint.shards().files().len(),
            seconds / plain.as_secs_f64(),
        )?;
    }
    match (before, peak_rss()) {
        (Some(before), Some(peak)) => {
            writeln!(
                out,
                "peak memory {:.0} MB, {:.0} MB of it before opening",
                peak as f64 / 1e6,
                before as f64 / 1e6
            )?;
        }
        _ => writeln!(out, "peak memory not measured: there is no /proc here")?,
    }
    Ok(())
}

/// Reads what an open has to read at least: the JSON files and every shard's header.
fn read_descriptions(dir: &Path) -> Result<(u64, Duration)> {
    let start = Instant::now();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))? {
        let path = entry?.path();
        let mut file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        let mut left = match path.extension().and_then(|e| e.to_str()) {
            Some("json") => u64::MAX,
            Some("safetensors") => {
                let mut length = [0; 8];
                file.read_exact(&mut length).with_context(|| format!("reading {}", path.display()))?;
                u64::from_le_bytes(length)
            }
            _ => continue,
        };
        loop {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let got = file.read(&mut buffer[..want])? as u64;
            if got == 0 {
                break;
            }
            (bytes, left) = (bytes + got, left - got);
        }
    }
    Ok((bytes, start.elapsed()))
}
