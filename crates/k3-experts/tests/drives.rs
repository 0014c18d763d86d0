//! Several drives, what is measured of them, and slots that fill in idle time. Nothing here looks at a clock: readers
//! let through as many reads as a test says.

#[path = "support/request.rs"]
mod request;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use k3_experts::slab::{Buffered, ProbeOptions, Reader, SlabOptions, SlabStore, probe};
use k3_experts::trace::Geometry;
use k3_experts::usage::{Usage, UsageError};
use k3_experts::{ExpertId, ExpertStore};
use k3_format::{Checkpoint, OpenOptions};

use request::request;

/// 12 layers of 16 experts, 4 a token, in three shards.
fn open() -> Arc<Checkpoint> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31");
    Arc::new(Checkpoint::open(&dir, &OpenOptions::default()).unwrap())
}

const GEOMETRY: Geometry = Geometry { layers: 12, experts: 16, per_token: 4 };

/// Drives by shard; reads wait at a gate that lets so many through on each drive.
#[derive(Debug)]
struct Gated {
    inner: Buffered,
    drives: Vec<usize>,
    gates: Mutex<Gates>,
    changed: Condvar,
    reads: AtomicU64,
}

#[derive(Debug)]
struct Gates {
    /// Reads that may go on, of each drive.
    open: Vec<usize>,
    /// Reads that wait, of each drive.
    waiting: Vec<usize>,
    /// Drive, shard and offset of each read, in the order in which they went through.
    passed: Vec<(usize, usize, u64)>,
}

impl Gated {
    /// `drives` of each shard; `open` reads of each drive go through at once.
    fn new(checkpoint: &Arc<Checkpoint>, drives: &[usize], open: usize) -> Arc<Self> {
        let inner = Buffered::new(checkpoint.clone()).unwrap();
        let count = drives.iter().max().unwrap() + 1;
        let gates = Gates { open: vec![open; count], waiting: vec![0; count], passed: Vec::new() };
        let (gates, changed) = (Mutex::new(gates), Condvar::new());
        Arc::new(Self { inner, drives: drives.to_vec(), gates, changed, reads: AtomicU64::new(0) })
    }

    fn let_through(&self, drive: usize, reads: usize) {
        let mut gates = self.gates.lock().unwrap();
        gates.open[drive] = gates.open[drive].saturating_add(reads);
        self.changed.notify_all();
    }

    /// Waits until as many reads of each drive wait at its gate.
    fn until_waiting(&self, expected: &[usize]) {
        let mut gates = self.gates.lock().unwrap();
        while gates.waiting != expected {
            let (changed, waited) = self.changed.wait_timeout(gates, Duration::from_mins(1)).unwrap();
            assert!(!waited.timed_out(), "{:?} reads wait, expected {expected:?}", changed.waiting);
            gates = changed;
        }
    }

    fn passed(&self) -> Vec<(usize, usize, u64)> {
        self.gates.lock().unwrap().passed.clone()
    }
}

impl Reader for Gated {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let drive = self.drives[shard];
        self.reads.fetch_add(1, Relaxed);
        let mut gates = self.gates.lock().unwrap();
        gates.waiting[drive] += 1;
        self.changed.notify_all();
        while gates.open[drive] == 0 {
            gates = self.changed.wait(gates).unwrap();
        }
        gates.open[drive] -= usize::from(gates.open[drive] != usize::MAX);
        gates.waiting[drive] -= 1;
        gates.passed.push((drive, shard, offset));
        self.changed.notify_all();
        drop(gates);
        self.inner.read_at(shard, buf, offset)
    }

    fn drive(&self, shard: usize) -> usize {
        self.drives[shard]
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.inner.path(shard)
    }
}

fn store(
    checkpoint: &Arc<Checkpoint>,
    reader: &Arc<Gated>,
    buffers: u64,
    options: SlabOptions,
    rates: &[f64],
) -> SlabStore {
    let reader: Arc<dyn Reader> = reader.clone();
    let probe = SlabStore::new(checkpoint.clone(), &reader, SlabOptions::default()).unwrap();
    let budget_bytes = buffers * probe.slot_bytes() as u64;
    SlabStore::with_rates(checkpoint.clone(), &reader, SlabOptions { budget_bytes, ..options }, rates)
        .unwrap()
}

/// Experts of each drive, by the layers they are in.
fn by_drive(checkpoint: &Checkpoint, drives: &[usize]) -> BTreeMap<usize, Vec<(usize, ExpertId)>> {
    let mut found: BTreeMap<usize, Vec<(usize, ExpertId)>> = BTreeMap::new();
    for layer in 1..13 {
        for id in 0..16 {
            if let k3_format::ExpertLocation::Run { shard, .. } =
                checkpoint.experts().location(layer, id).unwrap()
            {
                found.entry(drives[shard]).or_default().push((layer, id));
            }
        }
    }
    found
}

#[test]
fn reads_in_flight_follow_the_rates_of_drives() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let drives: Vec<usize> = (0..shards).map(|shard| shard % 2).collect();
    let check = |rates: &[f64], expected: &[usize]| {
        let reader = Gated::new(&checkpoint, &drives, 0);
        let options = SlabOptions { reads_in_flight: 4, piece_bytes: 1, ..SlabOptions::default() };
        let store = store(&checkpoint, &reader, 400, options, rates);
        assert_eq!(store.reads_in_flight(), expected);
        // Experts of both drives, in many pieces: each drive has as many reads in flight as it should.
        let all: Vec<u32> = (0..16).collect();
        let arrivals: Vec<_> = (1..13).map(|layer| store.fetch(request(layer, &all))).collect();
        reader.until_waiting(expected);
        for (drive, share) in expected.iter().enumerate() {
            reader.let_through(drive, usize::MAX);
            assert_eq!(store.drives()[drive].depth_max, *share as u64);
        }
        let found: usize = arrivals.into_iter().map(|all| all.map(Result::unwrap).count()).sum();
        assert_eq!(found, 12 * 16);
        let bytes: u64 = store.drives().iter().map(|drive| drive.bytes).sum();
        assert_eq!(bytes, store.counters().bytes_demanded);
        assert!(store.drives().iter().all(|drive| drive.mean_depth() >= 1.0 && drive.bytes > 0));
    };
    check(&[1.0, 1.0], &[4, 4]);
    check(&[3e9, 1e9], &[6, 2]);
    // The slowest has some all the same.
    check(&[1.0, 7.0], &[2, 6]);
    // What is no rate does not count.
    check(&[1.0], &[4, 4]);
    check(&[0.0, 1.0], &[4, 4]);
    check(&[f64::NAN, 1.0], &[4, 4]);
}

/// With buffers for some of a layer's misses only, the slow drive has its own first.
#[test]
fn the_slow_drive_begins_first() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let drives: Vec<usize> = (0..shards).map(|shard| usize::from(shard + 1 == shards)).collect();
    let by_drive = by_drive(&checkpoint, &drives);
    // A layer that lies on both.
    let of = |drive: usize, layer: usize| -> Vec<u32> {
        by_drive[&drive].iter().filter(|(l, _)| *l == layer).map(|(_, id)| *id).collect()
    };
    let Some(layer) = (1..13).find(|&layer| of(0, layer).len() >= 4 && of(1, layer).len() >= 2) else {
        panic!("no layer of the fixture lies in two shards: {by_drive:?}");
    };
    let wanted = [&of(0, layer)[..4], &of(1, layer)[..2]].concat();
    let check = |rates: &[f64], buffers: u64, expected: [usize; 2]| {
        let reader = Gated::new(&checkpoint, &drives, 0);
        let options = SlabOptions { reads_in_flight: 4, piece_bytes: 1 << 20, ..SlabOptions::default() };
        let store = store(&checkpoint, &reader, buffers, options, rates);
        let arrivals = store.fetch(request(layer, &wanted));
        // As many reads as there are buffers are under way.
        reader.until_waiting(&expected);
        (0..2).for_each(|drive| reader.let_through(drive, usize::MAX));
        assert_eq!(arrivals.map(Result::unwrap).count(), 6);
    };
    // Equal drives: one of the longer queue first, then in turn, as they are wanted.
    check(&[1.0, 1.0], 4, [3, 1]);
    // A drive of a fifth of the rate has its reads issued first.
    check(&[5.0, 1.0], 4, [2, 2]);
}

/// What was only for a caller that is gone is not read any more; what was to stay is.
#[test]
fn an_abandoned_fetch_leaves_its_queue() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let reader = Gated::new(&checkpoint, &vec![0; shards], 0);
    let options = SlabOptions { reads_in_flight: 2, ..SlabOptions::default() };
    let store = store(&checkpoint, &reader, 10, options, &[]);
    let arrivals = store.fetch(request(1, &(0..16).collect::<Vec<_>>()));
    reader.until_waiting(&[2]);
    let kept = 16 - store.counters().bypassed;
    assert!(kept < 8, "{kept} stay");
    drop(arrivals);
    reader.let_through(0, usize::MAX);
    assert_eq!(store.fetch(request(2, &[1, 2, 3])).map(Result::unwrap).count(), 3);
    // Two were under way.
    assert!(reader.reads.load(Relaxed) <= kept + 2 + 3, "{} reads", reader.reads.load(Relaxed));
    assert_eq!(store.counters().over_budget, 0);
}

/// A guess is read behind every demand: when its layer passes, what has not begun is not read at all.
#[test]
fn what_is_left_of_a_guess_costs_nothing() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let len = checkpoint.experts().layout().len as u64;
    let check = |asked: ExpertId, pieces: u64, expected: (u64, u64, u64, u64), reads: u64| {
        let reader = Gated::new(&checkpoint, &vec![0; shards], 0);
        let options = SlabOptions { reads_in_flight: 1, piece_bytes: 1, ..SlabOptions::default() };
        let store = store(&checkpoint, &reader, 60, options, &[]);
        store.prefetch(4, &[1, 2, 3]);
        reader.until_waiting(&[1]);
        assert_eq!(store.counters().guesses, 3);
        let arrivals = store.fetch(request(4, &[asked]));
        reader.let_through(0, usize::MAX);
        assert_eq!(arrivals.map(|e| e.unwrap().id).collect::<Vec<_>>(), [asked]);
        let counters = store.counters();
        let found = (counters.guesses, counters.guesses_used, counters.joined, counters.misses);
        assert_eq!(found, expected, "expert {asked}");
        assert_eq!((counters.bytes_guessed, counters.bytes_wasted), (len, len * pieces), "expert {asked}");
        assert_eq!(reader.reads.load(Relaxed), reads, "expert {asked}");
    };
    // The one that is being read, one that has not begun, and one that nobody guessed.
    check(1, 0, (1, 1, 1, 0), 1);
    check(2, 1, (1, 0, 0, 1), 2);
    check(9, 1, (1, 0, 0, 1), 2);
}

fn usage(counts: &[(usize, ExpertId, usize)]) -> Usage {
    let mut usage = Usage::new(GEOMETRY);
    for &(row, id, times) in counts {
        usage.count(row, std::iter::repeat_n(id, times), usize::from(row == 0) * times);
    }
    usage
}

#[test]
fn what_was_used_most_is_read_in_idle_time() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let reader = Gated::new(&checkpoint, &vec![0; shards], usize::MAX);
    let store = store(&checkpoint, &reader, 400, SlabOptions::default(), &[]);
    let usage = usage(&[(0, 3, 9), (0, 5, 2), (4, 7, 1), (11, 15, 4)]);
    assert_eq!(usage.ranked(), [(0, 3), (4, 7), (11, 15), (0, 5)]);
    store.warm(&usage);
    let len = checkpoint.experts().layout().len as u64;
    while store.counters().bytes_warmed < 4 * len {
        std::thread::yield_now();
    }
    for (layer, id) in [(1, 3), (1, 5), (5, 7), (12, 15)] {
        assert_eq!(store.fetch(request(layer, &[id])).map(|e| e.unwrap().id).collect::<Vec<_>>(), [id]);
    }
    let counters = store.counters();
    assert_eq!(counters.bytes_warmed, 4 * len);
    assert_eq!((counters.misses, counters.bytes_demanded), (0, 0));
    assert_eq!(counters.hits + counters.joined, 4);
    assert_eq!(store.usage().layer(0)[3], 1.0);
}

#[test]
fn a_demand_goes_before_what_nobody_asked_for() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let reader = Gated::new(&checkpoint, &vec![0; shards], 0);
    let store =
        store(&checkpoint, &reader, 400, SlabOptions { reads_in_flight: 4, ..SlabOptions::default() }, &[]);
    let counts: Vec<_> = (0..12).flat_map(|row| (0..8).map(move |id| (row, id, 1))).collect();
    store.warm(&usage(&counts));
    // Two of four threads at most.
    reader.until_waiting(&[2]);
    let arrivals = store.fetch(request(9, &[12, 13]));
    reader.until_waiting(&[4]);
    assert_eq!(store.counters().misses, 2);
    reader.let_through(0, usize::MAX);
    assert_eq!(arrivals.map(Result::unwrap).count(), 2);
    // Joined, read early, or still to be read: whatever nobody had asked for takes nothing away.
    for layer in 1..13 {
        assert_eq!(store.fetch(request(layer, &[0, 1, 2, 3, 4, 5, 6, 7])).map(Result::unwrap).count(), 8);
    }
    let counters = store.counters();
    assert_eq!((counters.evictions, counters.over_budget), (0, 0));
    let len = checkpoint.experts().layout().len as u64;
    assert_eq!(counters.bytes_warmed + counters.bytes_demanded, (12 * 8 + 2) * len);
}

/// With few slots, only the most used of each layer are read, and nothing is evicted for them.
#[test]
fn warming_fills_free_slots_only() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let reader = Gated::new(&checkpoint, &vec![0; shards], usize::MAX);
    let store =
        store(&checkpoint, &reader, 40, SlabOptions { reads_in_flight: 2, ..SlabOptions::default() }, &[]);
    let slots = store.slots() as u64;
    assert!(slots < 12 * 8);
    let counts: Vec<_> = (0..12).flat_map(|row| (0..8).map(move |id| (row, id, 8 - id as usize))).collect();
    store.warm(&usage(&counts));
    for layer in 1..13 {
        for expert in store.fetch(request(layer, &[0, 9])) {
            assert!(expert.is_ok());
        }
    }
    assert!(store.buffers() <= 40 && store.counters().over_budget == 0);
    assert!(store.counters().bytes_warmed <= slots * checkpoint.experts().layout().len as u64);
}

#[test]
fn uses_add_up_and_old_ones_fade() {
    let mut all = usage(&[(0, 3, 8)]);
    let mut later = Usage::new(GEOMETRY);
    later.count(0, std::iter::once(4), 10_000);
    all.add(&later);
    assert_eq!((all.tokens(), all.layer(0)[3], all.layer(0)[4]), (10_004.0, 4.0, 1.0));
}

#[test]
fn uses_are_kept_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k3/some.usage");
    let identity = open().identity();
    assert_eq!(Usage::load(&path, identity, GEOMETRY).unwrap(), None);
    let usage = usage(&[(0, 3, 9), (11, 15, 4)]);
    usage.save(&path, identity).unwrap();
    assert_eq!(Usage::load(&path, identity, GEOMETRY).unwrap().as_ref(), Some(&usage));
    usage.save(&path, identity).unwrap();

    let good = std::fs::read(&path).unwrap();
    let check = |bytes: &[u8], expected: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = Usage::load(&path, identity, GEOMETRY).unwrap_err();
        let UsageError::Content { problem, .. } = &error else { panic!("{error}") };
        assert!(problem.contains(expected), "{problem}");
        assert!(error.to_string().contains("some.usage"));
    };
    check(&[], "too short");
    check(&good[..good.len() - 1], "checksum");
    let mut flipped = good.clone();
    flipped[70] ^= 1;
    check(&flipped, "checksum");
    // Well sealed, and wrong.
    let sealed = |content: &[u8]| [content, blake3::hash(content).as_bytes()].concat();
    check(&sealed(&good[..30]), "too short");
    check(&sealed(&good[..100]), "bytes of counts");
    let mut negative = good[..good.len() - 32].to_vec();
    negative[60..64].copy_from_slice(&(-1.0_f32).to_le_bytes());
    check(&sealed(&negative), "negative");
    let mut other = good[..good.len() - 32].to_vec();
    other[9] ^= 1;
    // That of another checkpoint and a file of another kind are not replaced.
    let other = sealed(&other);
    std::fs::write(&path, &other).unwrap();
    for error in
        [Usage::load(&path, identity, GEOMETRY).unwrap_err(), usage.save(&path, identity).unwrap_err()]
    {
        assert!(matches!(error, UsageError::OtherCheckpoint { .. }), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), other);
    let foreign = [b"K3USAGE2", &good[8..]].concat();
    std::fs::write(&path, &foreign).unwrap();
    for error in
        [Usage::load(&path, identity, GEOMETRY).unwrap_err(), usage.save(&path, identity).unwrap_err()]
    {
        assert!(matches!(error, UsageError::Foreign { .. }), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), foreign);
    let error = Usage::load(dir.path(), identity, GEOMETRY).unwrap_err();
    assert!(matches!(error, UsageError::Foreign { .. }), "{error}");
}

#[test]
fn a_probe_reads_whole_experts_of_every_drive_once() {
    let checkpoint = open();
    let shards = checkpoint.shards().files().len();
    let drives: Vec<usize> = (0..shards).map(|shard| shard % 2).collect();
    let len = checkpoint.experts().layout().len as u64;
    let by_drive = by_drive(&checkpoint, &drives);
    let everything = ProbeOptions { time: Duration::MAX, ..ProbeOptions::default() };
    let reader = Gated::new(&checkpoint, &drives, usize::MAX);
    let rates = probe(&checkpoint, &*reader, everything).unwrap();
    let expected: Vec<u64> = by_drive.values().map(|experts| experts.len() as u64 * len).collect();
    assert_eq!(rates.iter().map(|rate| rate.bytes).collect::<Vec<_>>(), expected);
    let mut passed = reader.passed();
    let reads = passed.len();
    passed.sort_unstable();
    passed.dedup();
    assert_eq!(passed.len(), reads, "an expert was read twice");
    assert!(rates.iter().all(|rate| rate.rate() > 0.0));

    // A limit of bytes is passed by what is in flight at most; no time at all still gives one of each drive.
    let reader = Gated::new(&checkpoint, &drives, usize::MAX);
    let rates =
        probe(&checkpoint, &*reader, ProbeOptions { most_bytes: 3 * len, reads_in_flight: 2, ..everything })
            .unwrap();
    assert!(rates.iter().all(|rate| (3 * len..=5 * len).contains(&rate.bytes)), "{rates:?}");
    let hurried = ProbeOptions { time: Duration::ZERO, reads_in_flight: 2, ..ProbeOptions::default() };
    let rates = probe(&checkpoint, &*reader, hurried).unwrap();
    assert!(rates.iter().all(|rate| (len..=2 * len).contains(&rate.bytes)), "{rates:?}");
}
