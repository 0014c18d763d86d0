//! The table at the end of a run: where memory, bytes and time went.

use k3_experts::memory::peak_rss;
use k3_experts::plan::gigabytes;
use k3_experts::{Counters, DriveCounters};
use k3_graph::Device;
use k3_runner::Engine;

use crate::clock::{Clock, Rates};
use crate::output::tell;
use crate::store::Opened;

/// What the experts cost, and the tokens.
pub(crate) fn tell_run<D: Device>(engine: &Engine<D>, clock: &Clock, prompt: usize, completion: usize) {
    let Rates { first, prompt: rate, reply } = clock.rates(prompt, completion);
    let each = reply.map_or_else(String::new, |rate| format!(", {:.3} s a token", 1.0 / rate.max(1e-9)));
    line("prompt", format_args!("{prompt} tokens in {:.2} s, {rate:.2} a second", first.as_secs_f64()));
    line("completion", format_args!("{completion} tokens{each}"));
    let store = engine.store();
    table(&store.counters(), &store.drives(), &mut |label, text| line(label, format_args!("{text}")));
}

/// What was planned beside what the program had then, and what it came to.
pub(crate) fn tell_memory(opened: &Opened) {
    let before = opened.before;
    let peak = peak_rss().map_or_else(|| "not known here".to_owned(), gigabytes);
    let planned = before.unwrap_or(0).saturating_add(opened.plan.total());
    let before = gigabytes(before.unwrap_or(0));
    line(
        "peak memory",
        format_args!("{peak}; planned {}, {before} of it the program before loading", gigabytes(planned)),
    );
    tell(format_args!("{}", opened.table()));
}

fn line(label: &str, text: std::fmt::Arguments<'_>) {
    tell(format_args!("{label:<14}{text}\n"));
}

fn table(counters: &Counters, drives: &[DriveCounters], line: &mut dyn FnMut(&str, String)) {
    let c = counters;
    if c.hits + c.misses == 0 {
        line(
            "experts",
            format!(
                "{} asked for, {} handed over; what is read and what stays is up to the system's page cache",
                c.requested,
                gigabytes(c.bytes)
            ),
        );
        return;
    }
    let share = |n: u64| n as f64 / c.requested.max(1) as f64;
    line(
        "experts",
        format!(
            "{} asked for: {} hits ({:.3}), {} joined on their way ({:.3}), {} misses, of which {} not kept",
            c.requested,
            c.hits,
            share(c.hits),
            c.joined,
            share(c.joined),
            c.misses,
            c.bypassed
        ),
    );
    line(
        "bytes",
        format!(
            "{} demanded, {} guessed ({} wasted), {} from earlier use; {} handed to the arithmetic",
            gigabytes(c.bytes_demanded),
            gigabytes(c.bytes_guessed),
            gigabytes(c.bytes_wasted),
            gigabytes(c.bytes_warmed),
            gigabytes(c.bytes)
        ),
    );
    line("waiting", format!("{:.2} s for experts", c.wait_ns as f64 / 1e9));
    line(
        "slots",
        format!(
            "{} evictions, {} checks whether a buffer is still in use, {} buffers over budget",
            c.evictions, c.retired_checks, c.over_budget
        ),
    );
    for (number, drive) in drives.iter().enumerate() {
        line(
            &format!("drive {number}"),
            format!(
                "{} in {} reads, {:.2} GB/s while busy ({:.2} s), {:.1} in flight on average, {} at most",
                gigabytes(drive.bytes),
                drive.reads,
                drive.rate() / 1e9,
                drive.busy_ns as f64 / 1e9,
                drive.mean_depth(),
                drive.depth_max
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(counters: Counters, drives: &[DriveCounters]) -> String {
        let mut lines = Vec::new();
        table(&counters, drives, &mut |label, text| lines.push(format!("{label}: {text}")));
        lines.join("\n")
    }

    #[test]
    fn every_figure_is_told() {
        let mut counters = Counters::default();
        (counters.requested, counters.hits, counters.joined) = (1000, 250, 50);
        (counters.misses, counters.bypassed, counters.bytes_demanded) = (700, 123, 12_345_000_000);
        (counters.wait_ns, counters.evictions, counters.over_budget) = (1_500_000_000, 77, 3);
        let mut drive = DriveCounters::default();
        (drive.reads, drive.bytes, drive.busy_ns) = (10, 4_000_000_000, 2_000_000_000);
        (drive.depth_max, drive.depth_sum) = (6, 45);
        let found = text(counters, &[drive]);
        for expected in [
            "250 hits (0.250), 50 joined on their way (0.050), 700 misses, of which 123 not kept",
            "12.35 GB demanded",
            "1.50 s for experts",
            "77 evictions, 0 checks whether a buffer is still in use, 3 buffers over budget",
            "drive 0: 4.00 GB in 10 reads, 2.00 GB/s while busy (2.00 s), 4.5 in flight on average, 6 at most",
        ] {
            assert!(found.contains(expected), "{expected:?} in\n{found}");
        }
        let mut counters = Counters::default();
        counters.requested = 5;
        assert!(text(counters, &[]).contains("page cache"));
    }
}
