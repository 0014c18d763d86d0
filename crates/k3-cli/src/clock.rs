//! Times of a run, and a line of progress.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use k3_graph::Device;
use k3_runner::Engine;

use crate::output::tell;

/// Times of a run, and a line of progress: redrawn on a terminal, else every few seconds.
pub(crate) struct Clock {
    start: Instant,
    pace: Pace,
    shown: Option<Instant>,
    /// Bytes of experts that had been read for the prompt.
    prompt_bytes: u64,
}

/// When tokens were sampled, counted from the start.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    first: Option<Duration>,
    last: Duration,
}

/// What a run took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Until the first token was there.
    pub(crate) first: Duration,
    /// Tokens of the prompt a second until then.
    pub(crate) prompt: f64,
    /// Tokens a second between the first and the last; none where there are not two.
    pub(crate) reply: Option<f64>,
}

impl Pace {
    fn token(&mut self, at: Duration) {
        self.first.get_or_insert(at);
        self.last = at;
    }

    /// The rates of a run that took `total`.
    fn rates(self, total: Duration, prompt: usize, completion: usize) -> Rates {
        let first = self.first.unwrap_or(total);
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        // The first token of the reply belongs to the time of the prompt.
        let after = completion.checked_sub(1).filter(|after| *after > 0);
        Rates {
            first,
            prompt: rate(prompt, first),
            reply: after.map(|after| rate(after, self.last.saturating_sub(first))),
        }
    }
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), pace: Pace::default(), shown: None, prompt_bytes: 0 }
    }

    pub(crate) fn prefill(&mut self, layers: usize, of: usize) {
        if layers == of {
            self.clear();
        } else {
            self.line("prefill", layers, of);
        }
    }

    /// A token was sampled, whether anything of it can be seen or not.
    pub(crate) fn token(&mut self) {
        self.pace.token(self.start.elapsed());
    }

    /// As [`Self::prefill`], and notes the bytes that the whole prompt took.
    pub(crate) fn prefill_from<D: Device>(&mut self, engine: &Engine<D>, layers: usize, of: usize) {
        self.prefill(layers, of);
        if layers == of {
            let counters = engine.store().counters();
            // A backend that leaves caching to the system knows only what it handed over.
            let is_told = counters.hits + counters.misses > 0;
            self.prompt_bytes = if is_told { counters.bytes_demanded } else { counters.bytes };
        }
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
        let Rates { first, prompt: prompt_rate, reply } = self.rates(prompt, completion);
        let then = reply.map_or_else(String::new, |rate| format!(", then {rate:.2} tokens/s"));
        tell(format_args!(
            "first token after {first:.2?} ({prompt_rate:.2} prompt tokens/s, {:.2} MB of experts a prompt token){then}; \
             experts{}: {}\n",
            self.prompt_bytes as f64 / 1e6 / prompt.max(1) as f64,
            engine.deviation(),
            engine.store().counters()
        ));
    }

    /// The time to the first token, tokens a second of `prompt` until then, and of `completion` after it.
    pub(crate) fn rates(&self, prompt: usize, completion: usize) -> Rates {
        self.pace.rates(self.start.elapsed(), prompt, completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates of a run of 10 s with a prompt of 6 tokens whose tokens came after these seconds.
    #[track_caller]
    fn check(tokens: &[u64], first: u64, prompt: f64, reply: Option<f64>) {
        let mut pace = Pace::default();
        for &at in tokens {
            pace.token(Duration::from_secs(at));
        }
        let expected = Rates { first: Duration::from_secs(first), prompt, reply };
        assert_eq!(pace.rates(Duration::from_secs(10), 6, tokens.len()), expected, "{tokens:?}");
    }

    /// From the first token to the last, and over the tokens that came in that time; what follows does not count.
    #[test]
    fn the_pace_of_a_reply() {
        check(&[2, 3, 4, 5, 6], 2, 3.0, Some(1.0));
        check(&[2, 4, 8], 2, 3.0, Some(1.0 / 3.0));
        check(&[3], 3, 2.0, None);
        check(&[], 10, 0.6, None);
    }
}
