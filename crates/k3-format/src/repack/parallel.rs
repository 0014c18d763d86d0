//! Work on several shards at a time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};

use super::error::RepackError;

/// Does `work` for all of `items`, `jobs` at a time, and returns what came out in their order. The first error stops the
/// rest: `work` sees that in its flag. `report` hears, on this thread, of what `work` sends.
pub(super) fn each<I: Copy + Sync, E: Send, T: Send>(
    items: &[I],
    jobs: usize,
    report: &mut dyn FnMut(E),
    work: impl Fn(I, &AtomicBool, &Sender<E>) -> Result<T, RepackError> + Sync,
) -> Result<Vec<T>, RepackError> {
    let (events, heard) = mpsc::channel();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done = Mutex::new(Vec::new());
    let trouble: Mutex<Option<RepackError>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(items.len()) {
            let events = events.clone();
            let (next, stop, done, trouble, work) = (&next, &stop, &done, &trouble, &work);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&item) = items.get(at) else { return };
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    match work(item, stop, &events) {
                        Ok(made) => locked(done).push((at, made)),
                        Err(error) => {
                            stop.store(true, Ordering::Relaxed);
                            let mut trouble = locked(trouble);
                            // Who was stopped says so only.
                            if matches!(*trouble, None | Some(RepackError::WriterEnded)) {
                                *trouble = Some(error);
                            }
                            return;
                        }
                    }
                }
            });
        }
        drop(events);
        heard.into_iter().for_each(report);
    });
    if let Some(error) = trouble.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, made)| made).collect())
}

/// No thread panics while it holds one of these locks; what they guard is whole at any moment.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
