//! Shows how far a long write is: a bar on a terminal, a line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, HumanDuration, ProgressBar, ProgressStyle};

use super::Progress;

/// Time between lines when the output is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

pub(super) struct Reporter {
    bar: Option<ProgressBar>,
    started: Instant,
    last_line: Instant,
}

impl Reporter {
    pub(super) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let template =
                "{bar:30} {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left  {msg}";
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(0).with_style(style)
        });
        let now = Instant::now();
        Self { bar, started: now, last_line: now }
    }

    pub(super) fn update(&mut self, progress: &Progress) {
        if let Some(bar) = &self.bar {
            bar.set_length(progress.bytes_total);
            bar.set_position(progress.bytes_done);
            bar.set_message(format!("shard {}/{}", progress.shard, progress.shards));
        } else if self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            let rate = progress.bytes_done as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
            let left = (progress.bytes_total - progress.bytes_done) as f64 / rate.max(1.0);
            eprintln!(
                "{} of {}, {}/s, {} left, shard {}/{}",
                DecimalBytes(progress.bytes_done),
                DecimalBytes(progress.bytes_total),
                DecimalBytes(rate as u64),
                HumanDuration(Duration::from_secs_f64(left)),
                progress.shard,
                progress.shards,
            );
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
