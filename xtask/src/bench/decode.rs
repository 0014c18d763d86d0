//! Seconds a token in decode, against reading what a token touches.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_experts::memory::peak_rss;
use k3_graph::{Cpu, Mode};
use k3_runner::{Engine, Sequence};
use serde_json::json;

use super::limits::{Limits, Reader, flops};
use super::profile::{Profile, Profiled};
use crate::open::OpenArgs;
use crate::prompt::fixed_prompt;

/// Tokens in front of those that are timed.
const PROMPT: usize = 64;
/// Tokens decoded before the clock starts: every page that is touched then is in memory.
const WARM: usize = 4;

/// Arguments of `bench decode` and `bench prefill`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The snapshot; `cargo xtask synth --geometry bench DIR` makes one of 3 GB
    #[arg(long)]
    pub(super) model: PathBuf,
    /// Threads, the calling one included; 0 takes one a physical core
    #[arg(long, default_value_t = 0)]
    pub(super) threads: usize,
    /// exact, or int8: activations rounded to 8-bit integers where weights have 4 or 8 bits
    #[arg(long, default_value_t = Mode::Exact, value_name = "exact|int8")]
    pub(super) arithmetic: Mode,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) open: OpenArgs,
}

impl Args {
    pub(super) fn open(&self) -> Result<Engine<Profiled<Cpu>>> {
        self.open.open(&self.model, Profiled::new(Cpu::new(self.threads)?.with_mode(self.arithmetic)))
    }
}

/// Threads that the device of `args` has.
pub(super) fn threads(args: &Args) -> Result<usize> {
    Ok(Cpu::new(args.threads)?.threads())
}

/// Bytes of all files of a snapshot.
pub(super) fn size(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))? {
        bytes += fs::metadata(entry?.path()).map_or(0, |file| file.len());
    }
    Ok(bytes)
}

/// The middle one.
pub(crate) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Seconds of each of `tokens`.
fn decode(
    engine: &Engine<Profiled<Cpu>>,
    sequence: &mut Sequence<Profiled<Cpu>>,
    tokens: &[u32],
) -> Result<Vec<f64>> {
    let mut seconds = Vec::with_capacity(tokens.len());
    for &token in tokens {
        let start = Instant::now();
        engine.decode(sequence, token)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

pub(super) fn run(args: &Args, tokens: usize, busy: bool) -> Result<()> {
    let engine = args.open()?;
    // Ids without a pattern: experts are those of random tokens.
    let ids = fixed_prompt(&engine, PROMPT + WARM + 2 * tokens)?;
    let (prompt, ids) = ids.split_at(PROMPT);
    let (warm, ids) = ids.split_at(WARM);
    let mut sequence = engine.new_sequence()?;
    engine.prefill(&mut sequence, prompt)?;
    decode(&engine, &mut sequence, warm)?;
    // Before there is a buffer to read.
    let (peak, threads) = (peak_rss(), threads(args)?);
    // The rate of memory moves with what the neighbours of a virtual machine do: it is taken after every token.
    let reader = Reader::new(threads)?;
    engine.model().device().take();
    let (mut seconds, mut rates) = (Vec::new(), Vec::new());
    for token in ids[..tokens].chunks(1) {
        seconds.extend(decode(&engine, &mut sequence, token)?);
        rates.push(reader.rate());
    }
    let profile = engine.model().device().take();
    drop(reader);
    let beside = if busy { Some(median(beside_busy(&engine, &mut sequence, &ids[tokens..])?)) } else { None };
    let size = size(&args.model)?;
    drop((engine, sequence));
    let limits = Limits { read: median(rates), flops: flops(threads) };
    let report = Report { threads, tokens, seconds: median(seconds), profile, beside, peak, size, limits };
    if args.json { report.json() } else { report.print() }
}

/// The same with a thread that never sleeps, in competition for the cores.
fn beside_busy(
    engine: &Engine<Profiled<Cpu>>,
    sequence: &mut Sequence<Profiled<Cpu>>,
    tokens: &[u32],
) -> Result<Vec<f64>> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        let seconds = decode(engine, sequence, tokens);
        stop.store(true, Relaxed);
        seconds
    })
}

struct Report {
    threads: usize,
    tokens: usize,
    /// Of a token, the median.
    seconds: f64,
    profile: Profile,
    /// The same beside a busy thread.
    beside: Option<f64>,
    peak: Option<u64>,
    size: u64,
    limits: Limits,
}

impl Report {
    fn bytes(&self) -> f64 {
        self.profile.bytes() / self.tokens as f64
    }

    fn floor(&self) -> f64 {
        let products = self.profile.products() / self.tokens as f64;
        self.limits.reading(self.bytes()).max(self.limits.adding(products))
    }

    fn json(&self) -> Result<()> {
        let report = json!({
            "threads": self.threads,
            "seconds_a_token": self.seconds,
            "bytes_a_token": self.bytes(),
            "floor_seconds": self.floor(),
            "ratio": self.seconds / self.floor(),
            "seconds_beside_busy_thread": self.beside,
            "read_bytes_a_second": self.limits.read,
            "flops": self.limits.flops,
            "peak_memory": self.peak,
            "snapshot_bytes": self.size,
            "profile": self.profile.json(self.tokens as f64),
        });
        writeln!(std::io::stdout(), "{report:#}").context("writing to stdout")
    }

    fn print(&self) -> Result<()> {
        let mut out = std::io::stdout();
        writeln!(
            out,
            "{} threads: {:.4} s a token (median of {}), {:.1} tokens/s",
            self.threads,
            self.seconds,
            self.tokens,
            1.0 / self.seconds
        )?;
        writeln!(
            out,
            "{:.3} GB touched a token, reading goes at {:.1} GB/s: floor {:.4} s, ratio {:.2}",
            self.bytes() / 1e9,
            self.limits.read / 1e9,
            self.floor(),
            self.seconds / self.floor()
        )?;
        if let Some(beside) = self.beside {
            writeln!(
                out,
                "beside a busy thread: {beside:.4} s a token, {:.2} times as long",
                beside / self.seconds
            )?;
        }
        print_memory(self.peak, self.size, &mut out)?;
        self.profile.print(self.tokens as f64, self.seconds, &self.limits, &mut out)
    }
}

pub(super) fn print_memory(peak: Option<u64>, size: u64, out: &mut impl Write) -> Result<()> {
    match peak {
        Some(peak) => writeln!(
            out,
            "peak memory {:.2} GB, {:.2} times the snapshot's {:.2} GB",
            peak as f64 / 1e9,
            peak as f64 / size as f64,
            size as f64 / 1e9
        )?,
        None => writeln!(out, "peak memory not measured: there is no /proc here")?,
    }
    Ok(())
}
