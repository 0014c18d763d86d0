//! Work shared among threads: fixed tiles, handed out as threads get free.
//!
//! The thread that calls works too and the helpers join as they wake: what a late one would have done, the others do. A
//! call still ends only when every helper that it woke has run and found nothing left. It looks for that for about as long
//! as a last tile takes, since going to sleep and being woken takes longer; then it sleeps, so that a core that another
//! process holds delays it until the helper there had its turn, and no more. Small work is not shared at all: waking a
//! helper takes longer. None of that is seen in a result, since a tile is worked out in one piece wherever it is.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::topology::default_threads;

/// Nanoseconds of work below which a call stays on its own thread.
const WORTH_SHARING: usize = 30_000;
/// How long a thread without work looks out for the ends of others' last tiles before it sleeps.
const PATIENCE: Duration = Duration::from_micros(20);

/// The calling thread and its helpers.
pub(super) struct Threads {
    /// One fewer than the threads.
    helpers: Option<rayon::ThreadPool>,
    worth_sharing: usize,
}

impl Threads {
    pub(super) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let threads = if threads == 0 { default_threads() } else { threads };
        let start = |helpers| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(helpers)
                .thread_name(|i| format!("k3-cpu-{}", i + 1))
                .build()
        };
        let helpers = if threads > 1 { Some(start(threads - 1)?) } else { None };
        Ok(Self { helpers, worth_sharing: WORTH_SHARING })
    }

    /// Shares everything, however small.
    pub(super) fn share_everything(&mut self) {
        self.worth_sharing = 0;
    }

    pub(super) fn count(&self) -> usize {
        1 + self.helpers.as_ref().map_or(0, rayon::ThreadPool::current_num_threads)
    }

    /// `work` on every tile, in any order. `nanoseconds` is about what all of it takes on one thread.
    pub(super) fn share<T: Send>(
        &self,
        nanoseconds: usize,
        tiles: impl Iterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        self.share_with(nanoseconds, tiles, || (), |(), tile| work(tile));
    }

    /// The same with something that each thread makes for itself, such as a buffer.
    pub(super) fn share_with<T: Send, S>(
        &self,
        nanoseconds: usize,
        tiles: impl Iterator<Item = T> + Send,
        own: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, T) + Sync,
    ) {
        let Some(helpers) = self.helpers.as_ref().filter(|_| nanoseconds >= self.worth_sharing) else {
            let mut own = own();
            return tiles.for_each(|tile| work(&mut own, tile));
        };
        let tiles = Mutex::new(tiles.fuse());
        let take = || tiles.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run = || {
            let Some(first) = take() else { return };
            let mut own = own();
            work(&mut own, first);
            while let Some(tile) = take() {
                work(&mut own, tile);
            }
        };
        // More helpers than a share of the work is worth waking for have nothing to do but to wait for the lock.
        let useful = nanoseconds / (self.worth_sharing / 2).max(1);
        let wake = helpers.current_num_threads().min(useful.max(1));
        let under_way = AtomicUsize::new(wake);
        helpers.in_place_scope(|scope| {
            for _ in 0..wake {
                scope.spawn(|_| {
                    run();
                    under_way.fetch_sub(1, Ordering::Release);
                });
            }
            run();
            let start = Instant::now();
            while under_way.load(Ordering::Acquire) > 0 && start.elapsed() < PATIENCE {
                std::hint::spin_loop();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::Threads;

    #[test]
    fn every_tile_is_worked_on_once() {
        for threads in [1, 2, 5] {
            for nanoseconds in [0, 1_000_000] {
                let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
                let threads = Threads::new(threads).unwrap();
                threads.share(nanoseconds, counts.iter(), |count| {
                    count.fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Relaxed) == 1));
                threads.share(nanoseconds, std::iter::empty(), |(): ()| unreachable!("there is no tile"));
            }
        }
    }
}
