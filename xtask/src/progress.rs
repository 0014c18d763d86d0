//! Shows on stderr how far long work is: a bar on a terminal, a line every few seconds elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, HumanDuration, ProgressBar, ProgressStyle};

/// Time between lines when stderr is no terminal, and before a bar appears on one.
const LINE_EVERY: Duration = Duration::from_secs(5);
const BAR_AFTER: Duration = Duration::from_secs(1);

/// What progress is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Steps,
    Bytes,
}

/// Progress of one task of a known size.
pub(crate) struct Progress {
    label: String,
    unit: Unit,
    done: u64,
    of: u64,
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// A task of `of` equal steps.
    pub(crate) fn steps(label: impl Into<String>, of: usize) -> Self {
        Self::new(label.into(), Unit::Steps, of as u64)
    }

    /// A task of `of` bytes.
    pub(crate) fn bytes(label: impl Into<String>, of: u64) -> Self {
        Self::new(label.into(), Unit::Bytes, of)
    }

    fn new(label: String, unit: Unit, of: u64) -> Self {
        let now = Instant::now();
        Self { label, unit, done: 0, of, started: now, last_line: now, bar: None }
    }

    /// One more step is done.
    pub(crate) fn step(&mut self) {
        self.set(self.done + 1);
    }

    /// `done` of all are done.
    pub(crate) fn set(&mut self, done: u64) {
        self.done = done;
        let elapsed = self.started.elapsed();
        if std::io::stderr().is_terminal() {
            if elapsed >= BAR_AFTER {
                self.bar.get_or_insert_with(|| bar(&self.label, self.unit, self.of)).set_position(done);
            }
        } else if self.last_line.elapsed() >= LINE_EVERY && done > 0 {
            self.last_line = Instant::now();
            // Nobody has to read it.
            let _ = writeln!(std::io::stderr(), "{}", self.line(elapsed));
        }
    }

    /// What has been done after `elapsed`, and how long the rest takes at that rate.
    fn line(&self, elapsed: Duration) -> String {
        let Self { label, done, of, .. } = self;
        let rest = of.saturating_sub(*done) as f64 / (*done).max(1) as f64;
        let left =
            HumanDuration(Duration::try_from_secs_f64(elapsed.as_secs_f64() * rest).unwrap_or_default());
        match self.unit {
            Unit::Steps => format!("{label}: {done}/{of}, {left} left"),
            Unit::Bytes => {
                let rate = *done as f64 / elapsed.as_secs_f64().max(1e-9);
                let (done, of, rate) = (DecimalBytes(*done), DecimalBytes(*of), DecimalBytes(rate as u64));
                format!("{label}: {done} of {of}, {rate}/s, {left} left")
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(label: &str, unit: Unit, of: u64) -> ProgressBar {
    let template = match unit {
        Unit::Steps => "{msg} {bar:30} {pos}/{len}  {eta} left",
        Unit::Bytes => {
            "{msg} {bar:30} {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left"
        }
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(of).with_style(style).with_message(label.to_owned());
    bar.reset_eta();
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(mut progress: Progress, done: u64, seconds: u64, line: &str) {
        progress.done = done;
        assert_eq!(progress.line(Duration::from_secs(seconds)), line);
    }

    #[test]
    fn lines() {
        check(Progress::steps("layers", 12), 4, 10, "layers: 4/12, 20 seconds left");
        check(
            Progress::bytes("writing", 3_000_000),
            1_000_000,
            2,
            "writing: 1.00 MB of 3.00 MB, 500.00 kB/s, 4 seconds left",
        );
        check(Progress::steps("nothing", 0), 0, 0, "nothing: 0/0, 0 seconds left");
    }
}
