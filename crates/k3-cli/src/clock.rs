//! Times of a run, and a line of progress.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use k3_graph::Device;
use k3_runner::Engine;

use crate::output::tell;

/// Times of a run, and a line of progress: redrawn on a terminal, else every few seconds.
pub(crate) struct Clock {
    start: Instant,
    first_token: Option<Duration>,
    shown: Option<Instant>,
    /// Bytes of experts that had been read for the prompt.
    prompt_bytes: u64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), first_token: None, shown: None, prompt_bytes: 0 }
    }

    pub(crate) fn prefill(&mut self, layers: usize, of: usize) {
        if layers == of {
            self.clear();
        } else {
            self.line("prefill", layers, of);
        }
    }

    /// The same, and notes the bytes that the whole prompt took.
    pub(crate) fn prefill_from<D: Device>(&mut self, engine: &Engine<D>, layers: usize, of: usize) {
        self.prefill(layers, of);
        if layers == of {
            let counters = engine.store().counters();
            // A backend that leaves caching to the system knows only what it handed over.
            let is_told = counters.hits + counters.misses > 0;
            self.prompt_bytes = if is_told { counters.bytes_demanded } else { counters.bytes };
        }
    }

    pub(crate) fn decoding(&mut self) {
        self.first_token.get_or_insert_with(|| self.start.elapsed());
    }

    pub(crate) fn line(&mut self, what: &str, done: usize, of: usize) {
        let terminal = stderr().is_terminal();
        let pause = if terminal { Duration::from_millis(200) } else { Duration::from_secs(5) };
        let last = self.shown.unwrap_or(self.start);
        if done == 0 || last.elapsed() < pause {
            return;
        }
        self.shown = Some(Instant::now());
        let elapsed = self.start.elapsed().as_secs_f64();
        let left = elapsed / done as f64 * (of - done) as f64;
        let (before, after) = if terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        tell(format_args!("{before}{what}: layer {done} of {of}, {left:.0} s left{after}"));
    }

    pub(crate) fn clear(&mut self) {
        if self.shown.take().is_some() && stderr().is_terminal() {
            tell(format_args!("\r\x1b[K"));
        }
    }

    pub(crate) fn report<D: Device>(&self, engine: &Engine<D>, prompt: usize, completion: usize) {
        let (first, before, after) = self.rates(prompt, completion);
        tell(format_args!(
            "first token after {first:.2?} ({before:.2} prompt tokens/s, {:.2} MB of experts a prompt token), \
             then {after:.2} tokens/s; experts{}: {}\n",
            self.prompt_bytes as f64 / 1e6 / prompt.max(1) as f64,
            engine.deviation(),
            engine.store().counters()
        ));
    }

    /// The time to the first token, tokens a second of `prompt` until then, and of `completion` after it.
    pub(crate) fn rates(&self, prompt: usize, completion: usize) -> (Duration, f64, f64) {
        let total = self.start.elapsed();
        let first = self.first_token.unwrap_or(total);
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        (first, rate(prompt, first), rate(completion.saturating_sub(1), total.saturating_sub(first)))
    }
}
