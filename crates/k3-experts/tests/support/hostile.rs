//! A reader that does everything a real one may do, and more often.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k3_experts::slab::{Buffered, Reader};
use k3_format::Checkpoint;

/// Delivers what the page cache has in pieces of random length, after random delays, with interruptions.
#[derive(Debug)]
pub(crate) struct Hostile {
    inner: Buffered,
    state: Mutex<u64>,
    /// Reads fail while this is set.
    pub(crate) broken: AtomicBool,
    /// Reads panic while this is set.
    pub(crate) panicking: AtomicBool,
    pub(crate) reads: AtomicU64,
    /// Reads wait while this is set.
    pub(crate) held: AtomicBool,
    align: usize,
}

impl Hostile {
    pub(crate) fn new(checkpoint: &Arc<Checkpoint>, seed: u64, align: usize) -> Arc<Self> {
        let inner = Buffered::new(checkpoint.clone()).unwrap();
        let [broken, panicking, held] = [false; 3].map(AtomicBool::new);
        let (state, reads) = (Mutex::new(seed), AtomicU64::new(0));
        Arc::new(Self { inner, state, broken, panicking, reads, held, align })
    }

    fn random(&self) -> u64 {
        let mut state = self.state.lock().unwrap();
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 33
    }
}

impl Reader for Hostile {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.reads.fetch_add(1, Relaxed);
        while self.held.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!self.panicking.load(Relaxed), "no such thing as shard {shard}");
        if self.broken.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        match self.random() % 8 {
            0 => return Err(io::ErrorKind::Interrupted.into()),
            1 => std::thread::sleep(Duration::from_micros(self.random() % 300)),
            _ => {}
        }
        let len = 1 + self.random() as usize % buf.len().min(3000);
        self.inner.read_at(shard, &mut buf[..len], offset)
    }

    fn alignment(&self) -> usize {
        self.align
    }

    fn drive(&self, shard: usize) -> usize {
        shard % 2
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.inner.path(shard)
    }
}
