//! A drive of a steady rate.

use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use k3_experts::slab::{Direct, Reader};

/// Reads from the files, and gives what it has read when a drive of `rate` that reads one thing after the other would. A disk
/// that gives more for a while than it keeps up, or less when its neighbours read, looks the same to all that is measured,
/// as long as it keeps up the rate.
#[derive(Debug)]
pub(super) struct Paced {
    inner: Direct,
    /// Bytes a second.
    rate: f64,
    /// When all is done that was asked for.
    done: Mutex<Instant>,
}

impl Paced {
    pub(super) fn new(inner: Direct, rate: u64) -> Self {
        Self { inner, rate: rate as f64, done: Mutex::new(Instant::now()) }
    }
}

impl Reader for Paced {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let until = {
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            *done = Instant::now().max(*done) + Duration::from_secs_f64(buf.len() as f64 / self.rate);
            *done
        };
        let got = self.inner.read_at(shard, buf, offset)?;
        thread::sleep(until.saturating_duration_since(Instant::now()));
        Ok(got)
    }

    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.inner.path(shard)
    }
}
