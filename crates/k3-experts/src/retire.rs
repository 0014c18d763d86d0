//! Bytes that work in flight still reads.

use std::collections::VecDeque;
use std::fmt;

/// Work that reads an expert's bytes after the call that started it returned: a copy to a device, of which an event
/// tells the end.
pub trait Completion: Send {
    /// Whether nothing reads the bytes any more. Must not wait, and must not call the store.
    fn is_complete(&self) -> bool;
}

impl<F: Fn() -> bool + Send> Completion for F {
    fn is_complete(&self) -> bool {
        self()
    }
}

/// What is kept until its work is complete. Events of a stream complete in order, so only the front is asked.
pub struct Retirement<T> {
    queue: VecDeque<(T, Box<dyn Completion>)>,
}

impl<T> Retirement<T> {
    /// Keeps `item` until `after` is complete.
    pub fn push(&mut self, item: T, after: Box<dyn Completion>) {
        self.queue.push_back((item, after));
    }

    /// Asks the oldest, and gives it back if it is complete.
    pub fn reclaim(&mut self) -> Option<T> {
        self.queue.pop_front_if(|(_, after)| after.is_complete()).map(|(item, _)| item)
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

/// What work still reads when the store ends stays for good: to give it back would be to write under that work's hands.
impl<T> Drop for Retirement<T> {
    fn drop(&mut self) {
        while let Some((item, after)) = self.queue.pop_front() {
            if !after.is_complete() {
                std::mem::forget(item);
            }
        }
    }
}

impl<T> Default for Retirement<T> {
    fn default() -> Self {
        Self { queue: VecDeque::new() }
    }
}

impl<T> fmt::Debug for Retirement<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retirement").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    #[test]
    fn what_is_still_read_is_not_given_back_at_the_end() {
        let item = Arc::new(());
        let asked = Arc::new(AtomicUsize::new(0));
        let mut retirement = Retirement::default();
        for is_complete in [true, false, true] {
            let asked = asked.clone();
            let after = move || {
                asked.fetch_add(1, Relaxed);
                is_complete
            };
            retirement.push(item.clone(), Box::new(after));
        }
        drop(retirement);
        assert_eq!(asked.load(Relaxed), 3);
        // Ours, and that of the work that has not ended.
        assert_eq!(Arc::strong_count(&item), 2);
    }
}
