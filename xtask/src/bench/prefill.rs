//! Seconds of a prompt, against reading its weights once and against its arithmetic.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_experts::memory::peak_rss;
use serde_json::{Value, json};

use super::decode::{Args, print_memory, size, threads};
use super::limits::Limits;
use super::profile::Profile;
use crate::prompt::fixed_prompt;

/// A prompt's time is the best of so many.
const TRIES: usize = 2;

/// One length of prompt.
struct Run {
    tokens: usize,
    seconds: f64,
    profile: Profile,
}

impl Run {
    fn floors(&self, limits: &Limits) -> [f64; 2] {
        [limits.reading(self.profile.bytes()), limits.adding(self.profile.products())]
    }

    fn ratio(&self, limits: &Limits) -> f64 {
        let [read, add] = self.floors(limits);
        self.seconds / read.max(add)
    }

    fn json(&self, limits: &Limits) -> Value {
        let [read, add] = self.floors(limits);
        json!({
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bytes": self.profile.bytes(),
            "products": self.profile.products(),
            "read_floor_seconds": read,
            "arithmetic_floor_seconds": add,
            "ratio": self.ratio(limits),
            "profile": self.profile.json(1.0),
        })
    }

    fn print(&self, limits: &Limits, out: &mut impl Write) -> Result<()> {
        let [read, add] = self.floors(limits);
        writeln!(
            out,
            "{} tokens: {:.3} s, {:.1} tokens/s; floors {read:.3} s for {:.2} GB and {add:.3} s for {:.0} GFLOP; ratio {:.2}",
            self.tokens,
            self.seconds,
            self.tokens as f64 / self.seconds,
            self.profile.bytes() / 1e9,
            2e-9 * self.profile.products(),
            self.ratio(limits)
        )?;
        self.profile.print(1.0, self.seconds, limits, out)
    }
}

pub(super) fn run(args: &Args, tokens: &[usize]) -> Result<()> {
    let engine = args.open()?;
    let mut runs: Vec<Run> = Vec::new();
    for &tokens in tokens {
        let ids = fixed_prompt(&engine, tokens.max(1))?;
        let mut best: Option<Run> = None;
        for _ in 0..TRIES {
            let mut sequence = engine.new_sequence()?;
            engine.model().device().take();
            let start = Instant::now();
            engine.prefill(&mut sequence, &ids)?;
            let seconds = start.elapsed().as_secs_f64();
            let profile = engine.model().device().take();
            if best.as_ref().is_none_or(|best| seconds < best.seconds) {
                best = Some(Run { tokens: ids.len(), seconds, profile });
            }
        }
        runs.extend(best);
    }
    let (peak, size) = (peak_rss(), size(&args.model)?);
    drop(engine);
    // Last: its buffer is no part of the peak.
    let threads = threads(args)?;
    let limits = Limits::measure(threads)?;
    let mut out = std::io::stdout();
    if args.json {
        let report = json!({
            "threads": threads,
            "read_bytes_a_second": limits.read,
            "flops": limits.flops,
            "peak_memory": peak,
            "snapshot_bytes": size,
            "prompts": runs.iter().map(|run| run.json(&limits)).collect::<Value>(),
        });
        return writeln!(out, "{report:#}").context("writing to stdout");
    }
    writeln!(
        out,
        "{threads} threads: reading goes at {:.1} GB/s, fused multiply-adds at {:.0} GFLOP/s",
        limits.read / 1e9,
        limits.flops / 1e9
    )?;
    print_memory(peak, size, &mut out)?;
    runs.iter().try_for_each(|run| run.print(&limits, &mut out))
}
