//! A store that tells where the time of a pass goes, as far as it sees it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use k3_experts::{
    Arrivals, Arrive, Choices, Completion, Counters, DriveCounters, Expert, ExpertError, ExpertId,
    ExpertRequest, ExpertStore, Phase, SlabStore,
};

/// What a pass asked the store for.
#[derive(Clone)]
pub(super) struct Asked {
    pub(super) layer: usize,
    pub(super) experts: Vec<ExpertId>,
    pub(super) choices: Vec<ExpertId>,
    pub(super) ranks: usize,
    pub(super) used: usize,
    pub(super) phase: Phase,
}

/// The seconds of one fetch, and of what came before it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Visit {
    /// From the end of the fetch before to this one's request: attention, dense layers, router.
    pub(super) outside: f64,
    /// From the request to the last expert's end, without waiting.
    pub(super) inside: f64,
    /// Of these, after the last wait.
    pub(super) tail: f64,
    /// Waiting for the first expert that had to be waited for.
    pub(super) first_wait: f64,
    /// Waiting for others.
    pub(super) later_wait: f64,
    /// In which a drive, on average over drives, had nothing to read: before the request, and after it.
    pub(super) idle_outside: f64,
    pub(super) idle_inside: f64,
    /// It is what comes after the last fetch of a pass.
    pub(super) is_end: bool,
}

impl Visit {
    pub(super) const NOTHING: Self = Self {
        outside: 0.0,
        inside: 0.0,
        tail: 0.0,
        first_wait: 0.0,
        later_wait: 0.0,
        idle_outside: 0.0,
        idle_inside: 0.0,
        is_end: true,
    };

    /// From the request to the last expert's end.
    pub(super) fn fetch(&self) -> f64 {
        self.inside + self.first_wait + self.later_wait
    }

    pub(super) fn add(&mut self, other: &Self) {
        let Self { outside, inside, tail, first_wait, later_wait, idle_outside, idle_inside, is_end: _ } =
            other;
        self.outside += outside;
        self.inside += inside;
        self.tail += tail;
        self.first_wait += first_wait;
        self.later_wait += later_wait;
        self.idle_outside += idle_outside;
        self.idle_inside += idle_inside;
    }
}

/// Whether the `rank`-th guess comes true in the released model, as it was published.
const PUBLISHED: [f64; 16] =
    [0.92, 0.88, 0.84, 0.80, 0.75, 0.69, 0.64, 0.60, 0.57, 0.53, 0.48, 0.43, 0.39, 0.35, 0.31, 0.28];

/// A store whose requests are written down and timed, and whose guesses may be made as good as published ones.
pub(super) struct Timed<'a> {
    store: &'a SlabStore,
    tape: Mutex<Tape>,
    /// What will be asked for, if guesses are to come true as often as in the released model.
    future: Option<&'a [Asked]>,
}

struct Tape {
    asked: Vec<Asked>,
    visits: Vec<Visit>,
    /// Fetches since the store was made.
    done: usize,
    /// When the last fetch ended, and how long drives had been busy then.
    end: Instant,
    busy: f64,
}

/// Seconds in which drives were busy, on average.
fn busy(store: &SlabStore) -> f64 {
    let drives = store.drives();
    drives.iter().map(|drive| drive.busy_ns as f64 / 1e9).sum::<f64>() / drives.len().max(1) as f64
}

impl<'a> Timed<'a> {
    pub(super) fn new(store: &'a SlabStore, future: Option<&'a [Asked]>) -> Self {
        let tape =
            Tape { asked: Vec::new(), visits: Vec::new(), done: 0, end: Instant::now(), busy: busy(store) };
        Self { store, tape: Mutex::new(tape), future }
    }

    fn tape(&self) -> MutexGuard<'_, Tape> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time until the next fetch counts from now.
    pub(super) fn begin(&self) {
        let mut tape = self.tape();
        (tape.end, tape.busy) = (Instant::now(), busy(self.store));
    }

    /// What was asked for and measured since the last call. What follows the last fetch counts as if another followed.
    pub(super) fn take(&self) -> (Vec<Asked>, Vec<Visit>) {
        let mut tape = self.tape();
        (std::mem::take(&mut tape.asked), std::mem::take(&mut tape.visits))
    }

    /// Ends a pass: the time since its last fetch is one more visit, without a fetch.
    pub(super) fn end(&self) {
        let (now, busy) = (Instant::now(), busy(self.store));
        let mut tape = self.tape();
        let outside = (now - tape.end).as_secs_f64();
        let idle_outside = outside - (busy - tape.busy);
        tape.visits.push(Visit { outside, idle_outside, ..Visit::NOTHING });
        (tape.end, tape.busy) = (now, busy);
    }

    /// As many guesses, of which the published share are what the next request has at that rank.
    fn published(&self, layer: usize, guesses: &[ExpertId], future: &[Asked]) -> Vec<ExpertId> {
        let done = self.tape().done;
        let Some(at) = (done..future.len()).take(2).find(|&at| future[at].layer == layer) else {
            return Vec::new();
        };
        let next = &future[at];
        let random = |rank: usize| {
            let x = (at as u64 * 31 + rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11) as f64 / (1_u64 << 53) as f64
        };
        let guess = |(rank, guess): (usize, &ExpertId)| {
            let is_true = random(rank) < PUBLISHED.get(rank).copied().unwrap_or(0.2);
            if is_true {
                next.choices.get(rank).copied()
            } else {
                Some(*guess).filter(|id| !next.experts.contains(id))
            }
        };
        guesses.iter().enumerate().filter_map(guess).collect()
    }
}

impl ExpertStore for Timed<'_> {
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a> {
        let Choices { ids, ranks, used } = request.choices;
        let (begin, busy) = (Instant::now(), busy(self.store));
        let mut tape = self.tape();
        let asked = Asked {
            layer: request.layer,
            experts: request.experts.to_vec(),
            choices: ids.to_vec(),
            ranks,
            used,
            phase: request.phase,
        };
        tape.asked.push(asked);
        tape.done += 1;
        let outside = (begin - tape.end).as_secs_f64();
        let visit = Visit { outside, idle_outside: outside - (busy - tape.busy), ..Visit::default() };
        drop(tape);
        let inner = self.store.fetch(request);
        Box::new(TimedArrivals { inner: Some(inner), of: self, begin, busy, last: begin, visit })
    }

    fn prefetch(&self, layer: usize, experts: &[ExpertId]) {
        match self.future {
            Some(future) => self.store.prefetch(layer, &self.published(layer, experts, future)),
            None => self.store.prefetch(layer, experts),
        }
    }

    fn wants_guesses(&self) -> bool {
        self.store.wants_guesses()
    }

    fn retire(&self, expert: Expert, after: Box<dyn Completion>) {
        self.store.retire(expert, after);
    }

    fn counters(&self) -> Counters {
        self.store.counters()
    }

    fn drives(&self) -> Vec<DriveCounters> {
        self.store.drives()
    }
}

struct TimedArrivals<'a> {
    inner: Option<Arrivals<'a>>,
    of: &'a Timed<'a>,
    begin: Instant,
    busy: f64,
    /// When the last wait ended.
    last: Instant,
    visit: Visit,
}

impl Iterator for TimedArrivals<'_> {
    type Item = Result<Expert, ExpertError>;

    fn next(&mut self) -> Option<Self::Item> {
        let before = self.of.store.counters().wait_ns;
        let next = self.inner.as_mut()?.next();
        let waited = (self.of.store.counters().wait_ns - before) as f64 / 1e9;
        if waited > 0.0 {
            let wait = if self.visit.first_wait > 0.0 {
                &mut self.visit.later_wait
            } else {
                &mut self.visit.first_wait
            };
            *wait += waited;
            self.last = Instant::now();
        }
        next
    }
}

impl Arrive for TimedArrivals<'_> {
    fn next_ready(&mut self) -> Option<Self::Item> {
        self.inner.as_mut()?.next_ready()
    }
}

impl Drop for TimedArrivals<'_> {
    fn drop(&mut self) {
        self.inner = None;
        let (end, busy) = (Instant::now(), busy(self.of.store));
        let fetch = (end - self.begin).as_secs_f64();
        self.visit.inside = fetch - self.visit.first_wait - self.visit.later_wait;
        self.visit.tail = (end - self.last).as_secs_f64();
        self.visit.idle_inside = fetch - (busy - self.busy);
        let mut tape = self.of.tape();
        tape.visits.push(self.visit);
        (tape.end, tape.busy) = (end, busy);
    }
}
