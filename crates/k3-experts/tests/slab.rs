//! The slab store on the fixture whose experts are not in id order and lie in three shards.

#[path = "support/contents.rs"]
mod contents;
#[path = "support/hostile.rs"]
mod hostile;
#[path = "support/request.rs"]
mod request;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use k3_experts::policy::PolicyName;
use k3_experts::slab::{
    Buffered, Direct, ProbeOptions, Reader, SlabError, SlabOptions, SlabStore, SlotReadError, probe,
};
use k3_experts::{Choices, Expert, ExpertError, ExpertRequest, ExpertStore, Phase};
use k3_format::{Checkpoint, OpenOptions};

use contents::check_contents;
use hostile::Hostile;
use request::request;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31")
}

fn open(dir: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(dir, &OpenOptions::default()).unwrap())
}

/// A copy of the fixture that a test may damage.
fn copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

/// So many slots, whatever a slot has.
fn with_buffers(
    checkpoint: &Arc<Checkpoint>,
    reader: &Arc<dyn Reader>,
    n: u64,
    options: SlabOptions,
) -> SlabStore {
    let probe = SlabStore::new(checkpoint.clone(), reader, SlabOptions::default()).unwrap();
    let budget_bytes = n * probe.slot_bytes() as u64;
    SlabStore::new(checkpoint.clone(), reader, SlabOptions { budget_bytes, ..options }).unwrap()
}

fn plain(checkpoint: &Arc<Checkpoint>, buffers: u64) -> SlabStore {
    let reader = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    with_buffers(checkpoint, &(reader as Arc<dyn Reader>), buffers, SlabOptions::default())
}

fn ids(store: &SlabStore, layer: usize, experts: &[u32]) -> Vec<u32> {
    store.fetch(request(layer, experts)).map(|e| e.unwrap().id).collect()
}

fn readers(checkpoint: &Arc<Checkpoint>) -> Vec<Arc<dyn Reader>> {
    let mut readers: Vec<Arc<dyn Reader>> = vec![
        Arc::new(Buffered::new(checkpoint.clone()).unwrap()),
        Hostile::new(checkpoint, 1, 1),
        Hostile::new(checkpoint, 2, 512),
        Hostile::new(checkpoint, 3, 4096),
    ];
    // Not every file system has direct reads.
    match Direct::new(checkpoint.clone()) {
        Ok(direct) => readers.push(Arc::new(direct)),
        Err(SlabError::Open { source, .. }) => {
            let kind = source.kind();
            assert!(matches!(kind, io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported), "{source}");
        }
        Err(error) => panic!("{error}"),
    }
    readers
}

#[test]
fn every_expert_comes_once_and_is_what_a_read_gives() {
    let checkpoint = open(&fixture());
    for reader in readers(&checkpoint) {
        for policy in [PolicyName::GlobalLru, PolicyName::LayerLru, PolicyName::Retention] {
            for (buffers, piece_bytes) in [(4, 1), (9, 700), (40, 1 << 20), (400, 4096)] {
                let options =
                    SlabOptions { policy, piece_bytes, reads_in_flight: 3, ..SlabOptions::default() };
                let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), buffers, options);
                for pass in 0..2 {
                    for layer in 1..13 {
                        let asked: Vec<u32> = (0..16).filter(|id| (id + layer as u32) % 3 != pass).collect();
                        let mut found = Vec::new();
                        for expert in store.fetch(request(layer, &asked)) {
                            let expert = expert.unwrap();
                            check_contents(&checkpoint, layer, &expert);
                            found.push(expert.id);
                        }
                        found.sort_unstable();
                        assert_eq!(found, asked);
                    }
                }
                let counters = store.counters();
                assert_eq!(counters.requested, counters.hits + counters.joined + counters.misses);
                assert_eq!(counters.over_budget, 0);
                assert!(store.buffers() as u64 <= buffers);
            }
        }
    }
}

#[test]
fn what_stays_is_not_read_again() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 400);
    for layer in 1..13 {
        assert_eq!(ids(&store, layer, &[7, 3, 9, 1]).len(), 4);
    }
    let before = store.counters();
    assert_eq!((before.hits, before.misses), (0, 48));
    assert_eq!(before.bytes_demanded, 48 * checkpoint.experts().layout().len as u64);
    for layer in 1..13 {
        // Hits come first.
        assert_eq!(ids(&store, layer, &[2, 7, 9])[..2], [7, 9]);
    }
    let after = store.counters();
    assert_eq!((after.hits, after.misses), (24, 60));
}

#[test]
fn opening_touches_no_expert() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 1);
    let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), 100, SlabOptions::default());
    assert_eq!((reader.reads.load(Relaxed), store.buffers()), (0, 0));
}

#[test]
fn a_caller_that_keeps_everything_is_served() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 4);
    let kept: Vec<Expert> = (1..4)
        .flat_map(|layer| store.fetch(request(layer, &[0, 1, 2, 3, 4, 5])).map(Result::unwrap))
        .collect();
    assert_eq!(kept.len(), 18);
    assert_eq!(store.counters().over_budget, 14);
    for (i, expert) in kept.iter().enumerate() {
        check_contents(&checkpoint, 1 + i / 6, expert);
    }
    drop(kept);
    assert_eq!(store.buffers(), 4);
}

#[test]
fn an_expert_outlives_its_store() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 20);
    let expert = store.fetch(request(5, &[3])).next().unwrap().unwrap();
    drop(store);
    check_contents(&checkpoint, 5, &expert);
}

#[test]
fn a_lease_keeps_its_bytes_while_others_pass() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 6);
    let lease = store.fetch(request(5, &[3])).next().unwrap().unwrap();
    for layer in 1..13 {
        assert_eq!(ids(&store, layer, &(0..16).collect::<Vec<_>>()).len(), 16);
    }
    check_contents(&checkpoint, 5, &lease);
}

#[test]
fn what_is_not_there_is_an_error_in_its_place() {
    let store = plain(&open(&fixture()), 20);
    let results: Vec<_> = store.fetch(request(3, &[2, 16, 4])).collect();
    assert_eq!(results.len(), 3);
    let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    assert!(matches!(errors[..], [ExpertError::Unknown { layer: 3, expert: 16, experts: 16 }]), "{errors:?}");
    let results: Vec<_> = store.fetch(request(3, &[2, 5, 2, 5, u32::MAX])).collect();
    let (found, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let mut found: Vec<u32> = found.into_iter().map(|e| e.unwrap().id).collect();
    found.sort_unstable();
    assert_eq!(found, [2, 5]);
    let errors: Vec<String> = errors.into_iter().map(|e| e.unwrap_err().to_string()).collect();
    assert!(
        errors.len() == 3 && errors[0].contains("names expert 2 of layer 3 more than once"),
        "{errors:?}"
    );
    for layer in [0, 13, usize::MAX] {
        let error = store.fetch(request(layer, &[0])).next().unwrap().unwrap_err();
        assert!(matches!(error, ExpertError::Unknown { experts: 0, .. }), "{error}");
    }
    store.prefetch(99, &[0]);
    store.prefetch(3, &[99]);
}

/// They only advise the policy: nothing is lost by choices that make no sense.
#[test]
fn choices_may_be_anything() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let all: Vec<u32> = (0..16).collect();
    let (equal, unknown, long) = ([3; 32], [0, 1, 99, u32::MAX], [7; 1600]);
    for policy in [PolicyName::GlobalLru, PolicyName::LayerLru, PolicyName::Retention] {
        let store = with_buffers(&checkpoint, &reader, 40, SlabOptions { policy, ..SlabOptions::default() });
        for ids in [&[][..], &all, &equal, &unknown, &long] {
            for (ranks, used) in
                [(0, 0), (0, 9), (1, 0), (3, 4), (4, 4), (16, 4), (5, usize::MAX), (usize::MAX, 1)]
            {
                let choices = Choices { ids, ranks, used };
                for layer in [1, 7, 12] {
                    let request = ExpertRequest { choices, ..request(layer, &[7, 3, 0, 12, 5]) };
                    assert_eq!(store.fetch(request).map(Result::unwrap).count(), 5);
                }
            }
        }
    }
}

#[test]
fn absurd_options_are_refused_or_harmless() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    for asked in [0, 257, usize::MAX] {
        let options = SlabOptions { reads_in_flight: asked, ..SlabOptions::default() };
        let error = SlabStore::new(checkpoint.clone(), &reader, options).unwrap_err();
        assert!(matches!(error, SlabError::ReadsInFlight { asked: found } if found == asked), "{error}");
        assert!(error.to_string().contains("expected 1 to 256"), "{error}");
    }
    let most = usize::MAX;
    for piece_bytes in [0, most] {
        let options =
            SlabOptions { piece_bytes, guesses: most, reads_in_flight: 256, ..SlabOptions::default() };
        for budget_bytes in [1 << 20, u64::MAX] {
            let options = SlabOptions { budget_bytes, ..options };
            let store = SlabStore::new(checkpoint.clone(), &reader, options).unwrap();
            store.prefetch(2, &[1, 2, 3]);
            assert_eq!(ids(&store, 2, &[1, 9]).len(), 2);
        }
    }
}

/// With what [`SlabOptions::moving`] says beside them, all experts have a slot, however many reads are in flight.
#[test]
fn what_is_on_its_way_takes_no_slot_of_a_store_for_everything() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Hostile::new(&checkpoint, 1, 1);
    for reads_in_flight in [1, 6, 40, 256] {
        let options = SlabOptions { reads_in_flight, ..SlabOptions::default() };
        let all = 12 * 16;
        let buffers = all + options.moving(2) as u64;
        assert_eq!(with_buffers(&checkpoint, &reader, buffers, options).slots() as u64, all);
    }
}

#[test]
fn a_budget_that_is_too_small_says_what_is_needed() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let options = SlabOptions { budget_bytes: 1000, ..SlabOptions::default() };
    let error = SlabStore::new(checkpoint.clone(), &reader, options).unwrap_err();
    let SlabError::Budget { needed, .. } = error else { panic!("{error}") };
    let options = SlabOptions { budget_bytes: needed, ..options };
    assert_eq!(ids(&SlabStore::new(checkpoint, &reader, options).unwrap(), 1, &[1, 2, 3, 4]).len(), 4);
}

#[test]
fn a_failed_read_is_an_error_and_leaves_nothing_behind() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 4096);
    let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), 50, SlabOptions::default());
    reader.broken.store(true, Relaxed);
    let error = store.fetch(request(2, &[5])).next().unwrap().unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(matches!(error, ExpertError::Read { layer: 2, expert: 5, .. }), "{error}");
    assert!(source.contains("model-0000") && source.contains("offset"), "{source}");
    reader.broken.store(false, Relaxed);
    let expert = store.fetch(request(2, &[5])).next().unwrap().unwrap();
    check_contents(&checkpoint, 2, &expert);
    assert_eq!(store.counters().misses, 2);
}

/// It may be a user's own. Everybody who waits is told, the threads go on, and no buffer is lost.
#[test]
fn a_reader_that_panics_fails_its_read_and_nothing_else() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 1);
    let options = SlabOptions { reads_in_flight: 2, piece_bytes: 700, ..SlabOptions::default() };
    let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), 60, options);
    let check = |error: ExpertError, layer: usize| -> u32 {
        let ExpertError::Read { layer: found, expert, source } = error else { panic!("{error}") };
        let panicked = source.downcast::<SlotReadError>().unwrap();
        let SlotReadError::Panicked { message, .. } = &*panicked else { panic!("{panicked}") };
        assert!(found == layer && message.starts_with("no such thing as shard "), "{layer}: {message}");
        expert
    };
    // More often than there are threads.
    for layer in 1..9 {
        reader.held.store(true, Relaxed);
        reader.panicking.store(true, Relaxed);
        let both = [store.fetch(request(layer, &[5, 6])), store.fetch(request(layer, &[6, 5]))];
        reader.held.store(false, Relaxed);
        for arrivals in both {
            let mut failed: Vec<u32> = arrivals.map(|e| check(e.unwrap_err(), layer)).collect();
            failed.sort_unstable();
            assert_eq!(failed, [5, 6]);
        }
        reader.panicking.store(false, Relaxed);
        for expert in store.fetch(request(layer, &[5, 6])) {
            check_contents(&checkpoint, layer, &expert.unwrap());
        }
    }
    let counters = store.counters();
    assert_eq!((counters.joined, counters.misses, counters.over_budget), (16, 32, 0));
    reader.panicking.store(true, Relaxed);
    let error = probe(&checkpoint, &*reader, ProbeOptions::default()).unwrap_err();
    assert!(matches!(error, ExpertError::Read { .. }), "{error}");
}

/// Says that it has read one byte more than there was room for.
#[derive(Debug)]
struct Boastful(Buffered);

impl Reader for Boastful {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(shard, buf, offset).map(|_| buf.len() + 1)
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.0.path(shard)
    }
}

#[test]
fn bytes_that_cannot_have_been_read_are_not_taken() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Arc::new(Boastful(Buffered::new(checkpoint.clone()).unwrap()));
    let store = with_buffers(&checkpoint, &reader, 20, SlabOptions::default());
    let error = store.fetch(request(2, &[5])).next().unwrap().unwrap_err();
    let ExpertError::Read { source, .. } = error else { panic!("{error}") };
    let SlotReadError::Io { source, .. } = *source.downcast::<SlotReadError>().unwrap() else {
        panic!("another error");
    };
    assert!(source.to_string().contains("into room for"), "{source}");
}

#[test]
fn a_file_that_was_cut_is_an_error() {
    let dir = copy();
    let checkpoint = open(dir.path());
    let store = plain(&checkpoint, 50);
    for shard in checkpoint.shards().files() {
        std::fs::File::options().write(true).open(&shard.path).unwrap().set_len(shard.data_start).unwrap();
    }
    let error = store.fetch(request(2, &[5])).next().unwrap().unwrap_err();
    let ExpertError::Read { source, .. } = error else { panic!("{error}") };
    let short = source.downcast::<SlotReadError>().unwrap();
    assert!(matches!(*short, SlotReadError::Short { got: 0, .. }), "{short}");
}

#[test]
fn a_file_that_is_gone_is_named_before_anything_is_read() {
    let dir = copy();
    let checkpoint = open(dir.path());
    let path = checkpoint.shards().files()[1].path.clone();
    std::fs::remove_file(&path).unwrap();
    match Direct::new(checkpoint.clone()) {
        Err(SlabError::Open { path: found, .. }) => assert_eq!(found, path),
        other => panic!("{other:?}"),
    }
    // What is open stays readable.
    assert_eq!(ids(&plain(&checkpoint, 20), 12, &[1, 2]).len(), 2);
}

#[test]
fn an_abandoned_fetch_costs_nobody_else() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 1);
    let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), 8, SlabOptions::default());
    reader.held.store(true, Relaxed);
    drop(store.fetch(request(1, &(0..16).collect::<Vec<_>>())));
    reader.held.store(false, Relaxed);
    for expert in store.fetch(request(2, &[1, 2, 3, 4])) {
        check_contents(&checkpoint, 2, &expert.unwrap());
    }
    assert_eq!(store.counters().over_budget, 0);
}

#[test]
fn a_demand_joins_a_guess_and_wrong_guesses_expire() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 1);
    let store = with_buffers(
        &checkpoint,
        &(reader.clone() as Arc<dyn Reader>),
        60,
        SlabOptions { guesses: 3, ..Default::default() },
    );
    reader.held.store(true, Relaxed);
    store.prefetch(4, &[1, 2, 3, 4, 5]);
    let len = checkpoint.experts().layout().len as u64;
    assert_eq!(store.counters().bytes_guessed, 3 * len);
    // What has not begun would be taken back.
    while reader.reads.load(Relaxed) < 3 {
        std::thread::yield_now();
    }
    let arrivals = store.fetch(request(4, &[2, 9]));
    reader.held.store(false, Relaxed);
    for expert in arrivals {
        check_contents(&checkpoint, 4, &expert.unwrap());
    }
    let counters = store.counters();
    assert_eq!((counters.joined, counters.misses), (1, 1));
    assert_eq!((counters.bytes_demanded, counters.bytes_wasted), (len, 2 * len));
    // A guess that came true stays like any other expert.
    assert_eq!(ids(&store, 4, &[2]), [2]);
    assert_eq!(store.counters().hits, 1);
}

/// Guesses that find no buffer wait for one, behind every demand, and cost nothing if their layer passes first.
#[test]
fn a_guess_waits_for_a_buffer_that_nobody_needs() {
    let checkpoint = open(&fixture());
    let reader = Hostile::new(&checkpoint, 1, 1);
    let options = SlabOptions { reads_in_flight: 2, ..Default::default() };
    let store = with_buffers(&checkpoint, &(reader.clone() as Arc<dyn Reader>), 6, options);
    assert!(store.wants_guesses());
    reader.held.store(true, Relaxed);
    let arrivals = store.fetch(request(3, &[0, 1, 2, 3, 4, 5, 6, 7]));
    store.prefetch(4, &[1, 2]);
    assert_eq!(store.counters().guesses, 0, "every buffer is taken");
    reader.held.store(false, Relaxed);
    assert_eq!(arrivals.map(Result::unwrap).count(), 8);
    for expert in store.fetch(request(4, &[1, 9])) {
        check_contents(&checkpoint, 4, &expert.unwrap());
    }
    let counters = store.counters();
    assert_eq!((counters.requested, counters.over_budget), (10, 0));
    assert_eq!(counters.bytes_guessed, counters.guesses * checkpoint.experts().layout().len as u64);
}

/// Waits until all that was begun has been read: what has not begun when its layer passes is not read at all.
fn until_read(store: &SlabStore) {
    let read = || store.drives().iter().map(|drive| drive.bytes).sum::<u64>();
    let begun = store.counters();
    while read() < begun.bytes_demanded + begun.bytes_guessed {
        std::thread::yield_now();
    }
}

/// In prefill every guess is dropped, and a pass has only so many bytes for them.
#[test]
fn guesses_end_with_prefill_and_with_their_bytes() {
    let checkpoint = open(&fixture());
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let len = checkpoint.experts().layout().len as u64;
    let guess_bytes = Some(2 * len + len / 2);
    let store = with_buffers(&checkpoint, &reader, 60, SlabOptions { guess_bytes, ..Default::default() });
    store.prefetch(4, &[1, 2, 3]);
    assert_eq!(store.counters().guesses, 2);
    until_read(&store);
    let request = ExpertRequest { phase: Phase::Prefill, ..request(3, &[0]) };
    assert_eq!(store.fetch(request).count(), 1);
    assert_eq!(store.counters().bytes_wasted, 2 * len);
    let guess = |asked: usize, guessed: usize| {
        assert_eq!(ids(&store, asked, &[0]), [0]);
        store.prefetch(guessed, &[1, 2, 3]);
        until_read(&store);
        store.counters().guesses
    };
    // A pass that begins has its bytes, and none are left later in it.
    assert_eq!((guess(3, 4), guess(4, 5), guess(5, 6)), (4, 4, 4));
    assert_eq!((guess(1, 2), guess(2, 3)), (6, 6));
}

/// Guesses that do not come true are not asked for any more.
#[test]
fn a_store_whose_guesses_fail_wants_no_more() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 60);
    let mut passes = 0;
    while store.wants_guesses() {
        for layer in 1..13 {
            store.prefetch(layer, &[8, 9, 10, 11]);
            until_read(&store);
            assert_eq!(ids(&store, layer, &[0]).len(), 1);
        }
        passes += 1;
        assert!(passes < 10);
    }
    for layer in (1..13).cycle().take(100 * 12) {
        assert_eq!(ids(&store, layer, &[0]).len(), 1);
        if store.wants_guesses() {
            return;
        }
    }
    panic!("they are never tried again");
}

/// An event as a device has it: it fires when the test says so.
fn event() -> (Arc<AtomicBool>, Arc<AtomicU64>, Box<dyn k3_experts::Completion>) {
    let (fired, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let handle = (fired.clone(), asked.clone());
    let completion = move || {
        handle.1.fetch_add(1, Relaxed);
        handle.0.load(Relaxed)
    };
    (fired, asked, Box::new(completion))
}

#[test]
fn an_eviction_asks_one_retired_lease_and_waits_for_none() {
    let checkpoint = open(&fixture());
    let options = SlabOptions { policy: PolicyName::LayerLru, ..SlabOptions::default() };
    let reader = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let store = with_buffers(&checkpoint, &(reader as Arc<dyn Reader>), 60, options);
    let slots = store.slots() / 12;
    // Fill the slots of layer 1, and retire two of them while a device still reads.
    let all: Vec<u32> = (0..slots as u32).collect();
    let (first, second) = (event(), event());
    let mut events = vec![second.2, first.2];
    for expert in store.fetch(request(1, &all)) {
        if let Some(event) = events.pop() {
            store.retire(expert.unwrap(), event);
        }
    }
    // When one comes, the front is asked as well.
    assert_eq!((store.counters().retired_checks, first.1.load(Relaxed)), (1, 1));
    let evict = |n: u32| {
        let before = store.counters();
        assert_eq!(ids(&store, 1, &[slots as u32 + n]).len(), 1);
        let after = store.counters();
        assert_eq!(after.evictions - before.evictions, 1);
        after.retired_checks - before.retired_checks
    };
    // The second is complete, but only the front is asked, once for each eviction.
    second.0.store(true, Relaxed);
    assert_eq!((evict(0), evict(1)), (1, 1));
    assert_eq!((first.1.load(Relaxed), second.1.load(Relaxed)), (3, 0));
    first.0.store(true, Relaxed);
    assert_eq!((evict(2), evict(3), evict(4)), (1, 1, 0));
    assert_eq!((first.1.load(Relaxed), second.1.load(Relaxed)), (4, 1));
}

/// With hits only there is neither an eviction nor a wait.
#[test]
fn retired_leases_leave_as_others_come() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 400);
    let retire = |fired: bool| {
        let expert = store.fetch(request(1, &[3])).next().unwrap().unwrap();
        let (has_fired, asked, event) = event();
        has_fired.store(fired, Relaxed);
        store.retire(expert, event);
        (has_fired, asked)
    };
    let events: Vec<_> = (0..5).map(|_| retire(false)).collect();
    events.iter().for_each(|(fired, _)| fired.store(true, Relaxed));
    // Two for each that comes.
    let before = store.counters().retired_checks;
    (0..4).for_each(|_| drop(retire(true)));
    assert_eq!(store.counters().retired_checks - before, 8);
    assert_eq!(store.counters().evictions, 0);
    assert!(events.iter().all(|(_, asked)| asked.load(Relaxed) >= 1));
}

#[test]
fn a_prompt_wider_than_the_slots_leaves_what_its_last_token_used() {
    let checkpoint = open(&fixture());
    let store = plain(&checkpoint, 60);
    let slots = store.slots() / 12;
    assert!((2..16).contains(&slots));
    let wanted: Vec<u32> = (0..16).collect();
    // 30 tokens that use everything; the last ones 12, 13, 14 and 15.
    let mut choices: Vec<u32> = (0..26 * 4).map(|i| i % 16).collect();
    choices.extend([12, 13, 14, 15].repeat(4));
    let request = ExpertRequest {
        layer: 6,
        experts: &wanted,
        choices: Choices { ids: &choices, ranks: 4, used: 4 },
        phase: Phase::Prefill,
    };
    assert_eq!(store.fetch(request).count(), 16);
    let before = store.counters();
    assert_eq!(ids(&store, 6, &[12, 13]), [12, 13]);
    assert_eq!(store.counters().hits - before.hits, 2);
}
