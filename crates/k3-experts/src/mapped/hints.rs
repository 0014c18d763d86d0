//! Which experts the kernel is told of.
//!
//! A hint looks at every page of an expert. Where all of them are in memory that is a sixth of the time that reading them
//! takes (`docs/expert-store.md` 5), and for nothing; where they are not, reading without one is several times slower.

use std::collections::HashSet;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::ExpertId;

/// Fetches in which everything is hinted after this process had to wait for a page from a file.
const WARY: u32 = 256;
/// Fetches for which the system is asked once whether there was such a wait: the answer takes it longer than a small expert
/// takes to compute.
const ASKING: u64 = 16;

/// Hints what was not handed over before, and everything while memory does not keep what it was given.
#[derive(Debug)]
pub(super) struct Hints {
    state: Mutex<State>,
    fetches: AtomicU64,
    /// Times that this process had to wait for a page from a file, where the system tells.
    faults: fn() -> Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    handed_over: HashSet<(usize, ExpertId)>,
    faults: u64,
    wary: u32,
}

impl Hints {
    pub(super) fn new(faults: fn() -> Option<u64>) -> Self {
        Self { state: Mutex::default(), fetches: AtomicU64::new(0), faults }
    }

    /// Of the experts of a fetch, those to be hinted.
    pub(super) fn of(&self, layer: usize, ids: &[ExpertId]) -> Vec<bool> {
        // A file is read for it: before the lock, which other fetches wait for.
        let is_asked = self.fetches.fetch_add(1, Relaxed).is_multiple_of(ASKING);
        let faults = is_asked.then(self.faults);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match faults {
            None => state.wary = state.wary.saturating_sub(1),
            Some(Some(faults)) if faults == state.faults => state.wary = state.wary.saturating_sub(1),
            Some(faults) => (state.faults, state.wary) = (faults.unwrap_or(0), WARY),
        }
        let wary = state.wary > 0;
        ids.iter().map(|&id| state.handed_over.insert((layer, id)) || wary).collect()
    }
}

/// Major page faults of this process.
pub(super) fn major_faults() -> Option<u64> {
    major_faults_in(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// The name in the second field may have spaces and parentheses.
fn major_faults_in(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(9)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_behind_any_name() {
        let check = |stat: &str, expected| assert_eq!(major_faults_in(stat), expected, "{stat}");
        check("1 (k3) S 2 3 4 5 6 7 800 9 77 11 12", Some(77));
        check("1 (a) b (c) S 2 3 4 5 6 7 800 9 77 11 12", Some(77));
        check("1 (k3) S 2 3", None);
        check("", None);
    }

    #[test]
    fn what_memory_keeps_is_hinted_once() {
        static FAULTS: AtomicU64 = AtomicU64::new(0);
        let hints = Hints::new(|| Some(FAULTS.load(Relaxed)));
        assert_eq!(hints.of(1, &[3, 4]), [true, true]);
        assert_eq!(hints.of(1, &[3, 5]), [false, true]);
        assert_eq!(hints.of(2, &[3]), [true]);
        // A page had to come from a file: memory does not keep them, which is noticed soon.
        FAULTS.store(1, Relaxed);
        let until = |hinted: bool| (0..2 * WARY).take_while(|_| hints.of(1, &[3]) != [hinted]).count();
        assert!((1..ASKING as usize).contains(&until(true)));
        // The first of them is counted by neither.
        assert_eq!(until(false), WARY as usize - 1);
        assert_eq!(until(true), 2 * WARY as usize, "nothing is hinted while nothing is waited for");
    }

    #[test]
    fn without_a_count_everything_is_hinted() {
        let hints = Hints::new(|| None);
        (0..3 * WARY).for_each(|_| assert_eq!(hints.of(1, &[3]), [true]));
    }
}
