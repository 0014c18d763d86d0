//! Shows on stderr how far long runs are: a bar on a terminal, a line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

/// Time between lines when stderr is no terminal, and before a bar appears on one.
const LINE_EVERY: Duration = Duration::from_secs(5);
const BAR_AFTER: Duration = Duration::from_secs(1);

/// Progress of one task that is made of equal steps.
pub(crate) struct Progress {
    label: String,
    done: u64,
    of: u64,
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// A task of `of` steps.
    pub(crate) fn new(label: impl Into<String>, of: usize) -> Self {
        let now = Instant::now();
        Self { label: label.into(), done: 0, of: of as u64, started: now, last_line: now, bar: None }
    }

    /// One more step is done.
    pub(crate) fn step(&mut self) {
        self.set(self.done + 1);
    }

    /// `done` steps are done.
    pub(crate) fn set(&mut self, done: u64) {
        self.done = done;
        let elapsed = self.started.elapsed();
        if std::io::stderr().is_terminal() {
            if elapsed >= BAR_AFTER {
                let bar = self.bar.get_or_insert_with(|| {
                    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}  {eta} left");
                    let bar = ProgressBar::new(self.of)
                        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                        .with_message(self.label.clone());
                    bar.reset_eta();
                    bar
                });
                bar.set_position(done);
            }
        } else if self.last_line.elapsed() >= LINE_EVERY && done > 0 {
            self.last_line = Instant::now();
            let left = elapsed.mul_f64(self.of.saturating_sub(done) as f64 / done as f64);
            eprintln!("{}: {done}/{}, {} left", self.label, self.of, HumanDuration(left));
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
