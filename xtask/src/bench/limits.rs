//! What this machine does at most, measured in the same run as what is compared with it.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_quant::cpu::probe;
use memmap2::MmapMut;

/// Bytes that are read: more than any cache holds.
const BYTES: usize = 1 << 29;
/// Bytes that a thread takes at once.
const PIECE: usize = 1 << 20;
/// Each rate is the best of so many.
const TRIES: usize = 3;
/// How far ahead of the loads lines are asked for; `None` leaves it to the processor.
const AHEAD: [Option<usize>; 3] = [None, Some(1536), Some(4096)];
/// Rounds of [`probe::multiply_add`] of one thread: some tenths of a second.
const ROUNDS: usize = 20_000_000;

/// Rates of some threads together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes a second that are read from memory.
    pub(super) read: f64,
    /// Floating-point operations a second in fused multiply-adds of the widest registers.
    pub(super) flops: f64,
}

impl Limits {
    pub(super) fn measure(threads: usize) -> Result<Self> {
        let reader = Reader::new(threads)?;
        let read = (0..TRIES).map(|_| reader.rate()).fold(0.0, f64::max);
        Ok(Self { read, flops: flops(threads) })
    }

    /// Seconds that reading `bytes` takes at least.
    pub(super) fn reading(&self, bytes: f64) -> f64 {
        bytes / self.read
    }

    /// Seconds that `products`, each added to something, take at least.
    pub(super) fn adding(&self, products: f64) -> f64 {
        2.0 * products / self.flops
    }
}

/// Reads memory with some threads.
pub(super) struct Reader {
    bytes: MmapMut,
    threads: usize,
    /// What was the fastest of [`AHEAD`].
    ahead: Option<usize>,
}

impl Reader {
    pub(super) fn new(threads: usize) -> Result<Self> {
        let mut bytes = MmapMut::map_anon(BYTES).context("allocating memory to read")?;
        // The engine asks for the same.
        #[cfg(target_os = "linux")]
        let _ = bytes.advise(memmap2::Advice::HugePage);
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8 | 1);
        let mut reader = Self { bytes, threads, ahead: None };
        let mut best = 0.0;
        for ahead in AHEAD.into_iter().cycle().take(AHEAD.len() * TRIES) {
            let rate = reader.rate_with(ahead);
            if rate > best {
                (reader.ahead, best) = (ahead, rate);
            }
        }
        Ok(reader)
    }

    /// How far ahead of its loads the fastest way to read asks for lines.
    pub(super) fn ahead(&self) -> Option<usize> {
        self.ahead
    }

    /// Bytes a second, once through the memory.
    pub(super) fn rate(&self) -> f64 {
        self.rate_with(self.ahead)
    }

    fn rate_with(&self, ahead: Option<usize>) -> f64 {
        let next = AtomicUsize::new(0);
        let seconds = seconds(self.threads, || {
            while let Some(piece) = self.bytes.chunks(PIECE).nth(next.fetch_add(1, Relaxed)) {
                std::hint::black_box(probe::read(piece, ahead));
            }
        });
        self.bytes.len() as f64 / seconds
    }
}

/// Seconds until all of `threads` threads are done with `work`.
fn seconds(threads: usize, work: impl Fn() + Sync) -> f64 {
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(&work);
        }
        work();
    });
    start.elapsed().as_secs_f64()
}

pub(super) fn flops(threads: usize) -> f64 {
    let rate = |_| {
        let (operations, _) = probe::multiply_add(1);
        let seconds = seconds(threads, || {
            std::hint::black_box(probe::multiply_add(ROUNDS));
        });
        operations * (ROUNDS * threads) as f64 / seconds
    };
    (0..TRIES).map(rate).fold(0.0, f64::max)
}
