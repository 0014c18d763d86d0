//! Experts in slots of their own, read past the page cache, under a byte budget.
//!
//! A [`Policy`] decides which experts stay. Those that do not, and those that are still on their way, take buffers
//! from the same budget. All misses of a layer are issued at once, as far as there are buffers; hits are handed over
//! first, then experts as they complete.
//!
//! No lock is held while anything is read, and no eviction waits: the buffer of an evicted expert is free when its
//! last lease ends, and reads that found no buffer start by themselves when one becomes free.

mod arrivals;
mod balance;
mod drives;
mod guesses;
mod lookahead;
mod place;
mod pool;
mod probe;
mod reader;
mod ticket;
mod warm;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k3_format::Checkpoint;

use crate::policy::{Policy, PolicyName, Verdict, Visit};
use crate::request::experts_of;
use crate::retire::{Completion, Retirement};
use crate::trace::Geometry;
use crate::usage::Usage;
use crate::{
    Arrivals, Counters, DriveCounters, Expert, ExpertError, ExpertId, ExpertRequest, ExpertStore, Phase,
};

use arrivals::Pending;
use drives::{Drives, Urgency};
use lookahead::Lookahead;
use place::Places;
pub use place::slot_bytes;
use pool::{Filled, Pool};
pub use probe::{DriveRate, ProbeOptions, probe};
use reader::drives_of;
pub use reader::{Buffered, Direct, Reader, SlotReadError, drive_count};
use ticket::{Key, Ticket, Waiter};
use warm::Warming;

/// How to keep and read experts.
#[derive(Clone, Copy, Debug)]
pub struct SlabOptions {
    /// Bytes for experts in memory, those on their way included.
    pub budget_bytes: u64,
    /// Which experts stay.
    pub policy: PolicyName,
    /// Reads in flight on each drive, on average over drives, 1 to [`SlabOptions::MOST_READS_IN_FLIGHT`]. 4 to 8 whole
    /// experts keep one busy; more only adds latency.
    pub reads_in_flight: usize,
    /// The last misses of a layer, fewer than reads can be in flight, are read in several pieces each, none smaller
    /// than this.
    pub piece_bytes: usize,
    /// Experts read on a guess ([`ExpertStore::prefetch`]) that may be in memory at once.
    pub guesses: usize,
    /// Bytes read on guesses while the model is passed once, at most; `None`: `guesses` experts of each layer.
    pub guess_bytes: Option<u64>,
}

impl Default for SlabOptions {
    fn default() -> Self {
        Self {
            budget_bytes: 8 << 30,
            policy: PolicyName::Retention,
            reads_in_flight: 6,
            piece_bytes: 1 << 20,
            guesses: 6,
            guess_bytes: None,
        }
    }
}

impl SlabOptions {
    /// The most reads in flight on each drive: each has a thread, and a buffer as large as an expert.
    pub const MOST_READS_IN_FLIGHT: usize = 256;

    /// The most buffers for experts on their way, on so many drives: those being read, guesses, one that is handed over
    /// and one that the caller holds.
    pub fn moving(&self, drives: usize) -> usize {
        self.reads_in_flight.saturating_mul(drives).saturating_add(self.guesses).saturating_add(2)
    }

    /// Whether a store can be as they say.
    ///
    /// # Errors
    /// [`SlabError::ReadsInFlight`].
    pub fn check(&self) -> Result<(), SlabError> {
        let asked = self.reads_in_flight;
        let is_possible = (1..=Self::MOST_READS_IN_FLIGHT).contains(&asked);
        if is_possible { Ok(()) } else { Err(SlabError::ReadsInFlight { asked }) }
    }
}

/// Why there is no slab store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlabError {
    /// Not even one token's experts of one layer fit.
    #[error(
        "an expert budget of {budget} bytes is too small: a layer's {per_token} experts at {slot_bytes} bytes need {needed}"
    )]
    Budget {
        /// As asked for.
        budget: u64,
        /// Experts of a token in a layer.
        per_token: usize,
        /// Bytes of a slot.
        slot_bytes: usize,
        /// The least.
        needed: u64,
    },
    /// More reads in flight than there should be threads, or none.
    #[error(
        "{asked} reads in flight on each drive, expected 1 to {}: each takes a thread and the memory of an expert, 4 to 8 \
         keep a drive busy, and more only wait behind each other",
        SlabOptions::MOST_READS_IN_FLIGHT
    )]
    ReadsInFlight {
        /// As asked for.
        asked: usize,
    },
    /// The checkpoint's parts do not fit together.
    #[error("finding the experts")]
    Checkpoint(#[source] Box<k3_format::Error>),
    /// A shard cannot be read in the way asked for.
    #[error("opening {path} for reading experts")]
    Open {
        /// Which.
        path: std::path::PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// No thread for reading.
    #[error("starting a thread that reads experts")]
    Thread(#[source] std::io::Error),
}

/// A store of experts in slots.
pub struct SlabStore {
    shared: Arc<Shared>,
    options: SlabOptions,
}

/// What the store, its arrivals and its reading threads share.
pub(crate) struct Shared {
    checkpoint: Arc<Checkpoint>,
    places: Places,
    pool: Arc<Pool>,
    drives: Arc<Drives>,
    state: Mutex<State>,
    wait_ns: AtomicU64,
    bytes: AtomicU64,
}

struct State {
    policy: Box<dyn Policy>,
    /// What the policy believes to be in slots.
    slots: HashMap<Key, Entry>,
    /// What was read on a guess, until its layer passes.
    guesses: HashMap<Key, Entry>,
    /// Whether more of them are wanted.
    lookahead: Lookahead,
    /// Bytes that guesses may still read in this pass.
    guess_bytes: u64,
    /// The layer that was asked for last.
    layer: usize,
    retirement: Retirement<Expert>,
    counters: Counters,
    usage: Usage,
    warming: Warming,
}

#[derive(Clone)]
enum Entry {
    OnItsWay(Arc<Ticket>),
    Here(Arc<Filled>),
}

impl SlabStore {
    /// A store over the experts of `checkpoint` that reads through `reader`. Touches no expert; buffers are allocated
    /// when they are first needed.
    ///
    /// # Errors
    /// [`SlabError`].
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        reader: &Arc<dyn Reader>,
        options: SlabOptions,
    ) -> Result<Self, SlabError> {
        Self::with_rates(checkpoint, reader, options, &[])
    }

    /// The same on drives of known rates, in bytes a second: each has reads in flight in proportion, and the misses of
    /// a layer are issued so that drives end together. Rates of another number of drives, or of which one is not
    /// positive, do not count.
    ///
    /// # Errors
    /// [`SlabError`].
    pub fn with_rates(
        checkpoint: Arc<Checkpoint>,
        reader: &Arc<dyn Reader>,
        options: SlabOptions,
        rates: &[f64],
    ) -> Result<Self, SlabError> {
        options.check()?;
        let config = checkpoint.config();
        let geometry = Geometry {
            layers: config.num_hidden_layers() - config.first_k_dense_replace,
            experts: config.moe.num_experts,
            per_token: config.moe.num_experts_per_token,
        };
        let places = Places::new(&checkpoint, reader.alignment());
        let slot_bytes = places.slot_bytes();
        let buffers = usize::try_from(options.budget_bytes / slot_bytes.max(1) as u64).unwrap_or(usize::MAX);
        if buffers < geometry.per_token {
            let needed = geometry.per_token as u64 * slot_bytes as u64;
            let (budget, per_token) = (options.budget_bytes, geometry.per_token);
            return Err(SlabError::Budget { budget, per_token, slot_bytes, needed });
        }
        let of_shard = drives_of(&checkpoint, &**reader);
        let drives = Arc::new(Drives::new(reader.clone(), of_shard, rates, options.reads_in_flight));
        let pool = Arc::new(Pool::new(buffers, slot_bytes, reader.alignment(), drives.clone()));
        let moving = options.moving(drives.len());
        let slots = (buffers - (buffers / 2).min(moving)).min(geometry.layers * geometry.experts);
        let of_pass = geometry.layers.saturating_mul(options.guesses) as u64;
        let guess_bytes = options.guess_bytes.unwrap_or(of_pass.saturating_mul(slot_bytes as u64));
        // Where everything stays nothing is to be guessed.
        let guesses = if slots < geometry.layers * geometry.experts { options.guesses } else { 0 };
        let options = SlabOptions { guess_bytes: Some(guess_bytes), guesses, ..options };
        let state = State {
            policy: options.policy.make(slots, geometry),
            slots: HashMap::new(),
            guesses: HashMap::new(),
            lookahead: Lookahead::default(),
            guess_bytes,
            layer: usize::MAX,
            retirement: Retirement::default(),
            counters: Counters::default(),
            usage: Usage::new(geometry),
            warming: Warming::default(),
        };
        let shared = Arc::new(Shared {
            checkpoint,
            places,
            pool,
            drives,
            state: Mutex::new(state),
            wait_ns: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let store = Self { shared, options };
        Drives::start(&store.shared).map_err(SlabError::Thread)?;
        Ok(store)
    }

    /// Experts that stay in memory at most; the rest of the budget is for those on their way.
    pub fn slots(&self) -> usize {
        self.shared.state().policy.slots()
    }

    /// Bytes of a slot: an expert, and what alignment adds.
    pub fn slot_bytes(&self) -> usize {
        self.shared.places.slot_bytes()
    }

    /// Reads in flight on each drive.
    pub fn reads_in_flight(&self) -> &[usize] {
        self.shared.drives.shares()
    }

    /// Buffers that exist now.
    pub fn buffers(&self) -> usize {
        self.shared.pool.allocated()
    }
}

impl Drop for SlabStore {
    fn drop(&mut self) {
        self.shared.drives.close();
    }
}

impl fmt::Debug for SlabStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabStore")
            .field("options", &self.options)
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of an expert, if the checkpoint has it.
    fn key(&self, layer: usize, id: ExpertId) -> Result<Key, ExpertError> {
        let experts = experts_of(&self.checkpoint, layer);
        if id as usize >= experts {
            return Err(ExpertError::Unknown { layer, expert: id, experts });
        }
        Ok(Key { layer, id })
    }

    fn row(&self, layer: usize) -> usize {
        layer - self.checkpoint.config().first_k_dense_replace
    }

    fn layer(&self, row: usize) -> usize {
        row + self.checkpoint.config().first_k_dense_replace
    }

    /// A lease on an expert in memory.
    fn lease(&self, key: Key, filled: &Arc<Filled>) -> Result<Expert, ExpertError> {
        let parts = filled.parts(self.places.ranges(&self.checkpoint, key)?);
        let found = self.checkpoint.experts().matrices_of(key.layer, key.id, parts);
        let m = found.map_err(|source| key.unreadable(source))?;
        let expert = Expert { id: key.id, w1: m.w1, w2: m.w2, w3: m.w3 };
        self.bytes.fetch_add(self.checkpoint.experts().layout().len as u64, Relaxed);
        Ok(expert)
    }

    /// Called by whoever ended a ticket: the thread of its last read, or who waits and finds no memory for it.
    fn finish(&self, ticket: &Arc<Ticket>, result: Result<Filled, SlotReadError>) {
        let result = result.map(Arc::new);
        let mut state = self.state();
        let state = &mut *state;
        if ticket.urgency == Urgency::Warm {
            state.warming.ended();
        }
        for (table, is_slot) in [(&mut state.slots, true), (&mut state.guesses, false)] {
            let Some(entry) = table.get_mut(&ticket.key) else { continue };
            if !matches!(entry, Entry::OnItsWay(other) if Arc::ptr_eq(other, ticket)) {
                continue;
            }
            if let Ok(filled) = &result {
                *entry = Entry::Here(filled.clone());
            } else {
                table.remove(&ticket.key);
                if is_slot {
                    state.policy.forget(self.row(ticket.key.layer), ticket.key.id);
                }
            }
        }
        ticket.complete(&result);
    }

    /// Lets go of the oldest retired expert, if its work is complete. Returns whether it was.
    fn reclaim(&self) -> bool {
        let mut state = self.state();
        let reclaimed = state.reclaim();
        drop(state);
        reclaimed.is_some()
    }

    fn awaits_work_in_flight(&self) -> bool {
        !self.state().retirement.is_empty()
    }
}

impl State {
    fn reclaim(&mut self) -> Option<Expert> {
        if self.retirement.is_empty() {
            return None;
        }
        self.counters.retired_checks += 1;
        self.retirement.reclaim()
    }
}

impl ExpertStore for SlabStore {
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a> {
        let shared = &*self.shared;
        let span = tracing::debug_span!(
            "fetch",
            layer = request.layer,
            experts = request.experts.len(),
            misses = tracing::field::Empty
        );
        let (sender, receiver) = channel();
        let mut pending = Pending::new(shared, receiver, span);
        let mut known = Vec::with_capacity(request.experts.len());
        for asked in request.checked(&shared.checkpoint) {
            match asked {
                Ok(id) => known.push(id),
                Err(error) => pending.ready.push_back(Err(error)),
            }
        }
        if known.is_empty() {
            return Box::new(pending);
        }
        let waiter = |id| Waiter { id, sender: sender.clone(), abandoned: pending.abandoned.clone() };

        let mut state = shared.state();
        let state = &mut *state;
        if request.layer <= state.layer {
            state.lookahead.pass();
            state.guess_bytes = self.options.guess_bytes.unwrap_or(0);
        }
        state.layer = request.layer;
        let mut verdicts = Vec::with_capacity(known.len());
        let row = shared.row(request.layer);
        let choices = request.choices;
        let is_known =
            choices.ids.iter().all(|&id| (id as usize) < shared.checkpoint.config().moe.num_experts);
        let visit = if is_known && choices.ranks > 0 {
            let (choices, ranks, per_token) = (choices.ids, choices.ranks, choices.used);
            Visit { layer: row, experts: &known, choices, ranks, per_token }
        } else {
            Visit { layer: row, experts: &known, choices: &known, ranks: known.len(), per_token: known.len() }
        };
        state.policy.visit(visit, &mut verdicts);
        state.counters.requested += known.len() as u64;
        let tokens = visit.choices.len().checked_div(visit.ranks).unwrap_or(0);
        let used = visit.choices.chunks(visit.ranks.max(1)).flat_map(|ids| ids.iter().take(visit.per_token));
        state.usage.count(row, used.copied(), tokens);

        // Hits first: what a visit evicts may be a hit of the same visit.
        let mut waiting = 0;
        for (&id, _) in known.iter().zip(&verdicts).filter(|(_, verdict)| **verdict == Verdict::Hit) {
            let key = Key { layer: request.layer, id };
            match state.slots.get(&key) {
                Some(Entry::Here(filled)) => {
                    state.counters.hits += 1;
                    pending.hits.push_back((key, filled.clone()));
                }
                Some(Entry::OnItsWay(ticket)) => {
                    state.counters.joined += 1;
                    waiting += 1;
                    ticket.join(waiter(id));
                    if ticket.urgency != Urgency::Demand {
                        shared.drives.demand(shared.drives.take(ticket));
                    }
                }
                // The policy and the table are changed together.
                None => unreachable!("expert {id} of layer {} has a slot and no entry", request.layer),
            }
        }
        let mut tickets = Vec::new();
        for (&id, verdict) in known.iter().zip(&verdicts) {
            let key = Key { layer: request.layer, id };
            let keep = match *verdict {
                Verdict::Hit => continue,
                Verdict::Bypassed => false,
                Verdict::Admitted { evicted } => {
                    if let Some((row, id)) = evicted {
                        state.slots.remove(&Key { layer: shared.layer(row), id });
                        state.counters.evictions += 1;
                        drop(state.reclaim());
                    }
                    true
                }
            };
            let mut guess = state.guesses.remove(&key);
            if let Some(Entry::OnItsWay(ticket)) = &guess
                && shared.take_back(ticket)
            {
                // One that was not even started is no help.
                state.guess_bytes = state.guess_bytes.saturating_add(ticket.place.bytes() as u64);
                guess = None;
            }
            if guess.is_some() {
                state.counters.guesses_used += 1;
                state.lookahead.judged(true);
            }
            let entry = match guess {
                Some(Entry::Here(filled)) => {
                    state.counters.hits += 1;
                    pending.hits.push_back((key, filled.clone()));
                    Entry::Here(filled)
                }
                Some(Entry::OnItsWay(ticket)) => {
                    state.counters.joined += 1;
                    waiting += 1;
                    // `take_back` has put what was still queued to the demands.
                    ticket.join(waiter(id));
                    Entry::OnItsWay(ticket)
                }
                None => {
                    state.counters.misses += 1;
                    state.counters.bypassed += u64::from(!keep);
                    waiting += 1;
                    let place = match shared.places.of(&shared.checkpoint, key) {
                        Ok(place) => place,
                        Err(error) => {
                            state.policy.forget(row, id);
                            pending.ready.push_back(Err(error));
                            waiting -= 1;
                            continue;
                        }
                    };
                    state.counters.bytes_demanded += place.bytes() as u64;
                    let pieces = (1, self.options.piece_bytes);
                    let ticket = Arc::new(Ticket::new(key, place, keep, pieces, Urgency::Demand));
                    ticket.join(waiter(id));
                    tickets.push(ticket.clone());
                    if !keep {
                        pending.bypassing.push(ticket.clone());
                    }
                    Entry::OnItsWay(ticket)
                }
            };
            if keep {
                state.slots.insert(key, entry);
            }
        }
        // Guesses that were wrong, and in prefill all of them.
        let is_over = |layer| layer == request.layer || request.phase == Phase::Prefill;
        shared.expire(state, |key, _| is_over(key.layer));
        pending.span.record("misses", tickets.len());
        shared.drives.issue_all(tickets, |ticket| shared.pool.request(ticket));
        pending.waiting = waiting;
        drop(sender);
        Box::new(pending)
    }

    fn prefetch(&self, layer: usize, experts: &[ExpertId]) {
        self.shared.guess(layer, experts, &self.options);
    }

    fn wants_guesses(&self) -> bool {
        self.options.guesses > 0 && self.shared.state().lookahead.is_on()
    }

    fn retire(&self, expert: Expert, after: Box<dyn Completion>) {
        // Two may leave for each that comes: what has piled up goes away without a wait or an eviction.
        let _ = self.shared.reclaim() && self.shared.reclaim();
        self.shared.state().retirement.push(expert, after);
    }

    fn counters(&self) -> Counters {
        let mut counters = self.shared.state().counters;
        counters.bytes = self.shared.bytes.load(Relaxed);
        counters.wait_ns = self.shared.wait_ns.load(Relaxed);
        counters.over_budget = self.shared.pool.over_budget();
        (counters.guesses, counters.bytes_guessed) = self.shared.pool.guessed();
        counters
    }

    fn drives(&self) -> Vec<DriveCounters> {
        self.shared.drives.counters()
    }
}
