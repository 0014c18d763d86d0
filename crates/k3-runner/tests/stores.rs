//! The logits do not depend on how experts come, which stay, or in what order they arrive.

#[path = "../../k3-experts/tests/support/hostile.rs"]
mod hostile;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use k3_experts::policy::PolicyName;
use k3_experts::slab::{Buffered, Direct, Reader};
use k3_experts::{ExpertStore, MappedStore, SlabOptions, SlabStore};
use k3_format::{Checkpoint, OpenOptions};
use k3_graph::device::{ExpertWork, InFlight, SituCaps};
use k3_graph::{Cpu, Device, DeviceError, LogitsWanted, Lookahead, ModelOptions, Reference, Silent};
use k3_runner::{Engine, EngineOptions, LogitsHash};

use hostile::Hostile;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn open(name: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&fixture(name), &OpenOptions::default()).unwrap())
}

/// Logits of a prompt, prefilled in chunks, and of tokens after it, one by one.
fn hash(
    checkpoint: &Arc<Checkpoint>,
    store: Arc<dyn ExpertStore>,
    threads: usize,
    chunk: usize,
) -> LogitsHash {
    let mut options = EngineOptions::default();
    options.chunk_tokens = Some(chunk);
    hash_on(Cpu::new(threads).unwrap(), checkpoint, store, &options)
}

fn hash_on<D: Device>(
    device: D,
    checkpoint: &Arc<Checkpoint>,
    store: Arc<dyn ExpertStore>,
    options: &EngineOptions,
) -> LogitsHash {
    let engine = Engine::with_store(checkpoint.clone(), store, device, options, &mut |_| {}).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let ids: Vec<u32> = (0..40).map(|i| 3 + i * 7919 % 500).collect();
    let mut logits = engine.run(&mut sequence, &ids[..30], LogitsWanted::All, &mut Silent).unwrap().values;
    for id in &ids[30..] {
        logits.extend(engine.run(&mut sequence, &[*id], LogitsWanted::All, &mut Silent).unwrap().values);
    }
    LogitsHash::of(&logits)
}

fn slab(
    checkpoint: &Arc<Checkpoint>,
    reader: &Arc<dyn Reader>,
    buffers: u64,
    options: SlabOptions,
) -> SlabStore {
    let probe = SlabStore::new(checkpoint.clone(), reader, SlabOptions::default()).unwrap();
    let budget_bytes = buffers * probe.slot_bytes() as u64;
    SlabStore::new(checkpoint.clone(), reader, SlabOptions { budget_bytes, ..options }).unwrap()
}

#[test]
fn every_budget_policy_and_way_of_reading_gives_the_same_logits() {
    for name in ["tiny-k31", "tiny-k3"] {
        let checkpoint = open(name);
        let expected = hash(&checkpoint, Arc::new(MappedStore::new(checkpoint.clone())), 2, 512);
        let mut readers: Vec<Arc<dyn Reader>> = vec![
            Arc::new(Buffered::new(checkpoint.clone()).unwrap()),
            Hostile::new(&checkpoint, 1, 1),
            Hostile::new(&checkpoint, 2, 4096),
        ];
        readers
            .extend(Direct::new(checkpoint.clone()).ok().map(|direct| Arc::new(direct) as Arc<dyn Reader>));
        let top_k = checkpoint.config().moe.num_experts_per_token as u64;
        for reader in readers {
            for policy in [PolicyName::GlobalLru, PolicyName::LayerLru, PolicyName::Retention] {
                for (buffers, threads, chunk, piece_bytes) in
                    [(top_k, 1, 512, 1), (2 * top_k + 1, 2, 7, 512), (60, 1, 512, 1 << 20), (500, 2, 1, 4096)]
                {
                    let options = SlabOptions { policy, piece_bytes, ..SlabOptions::default() };
                    let store = Arc::new(slab(&checkpoint, &reader, buffers, options));
                    let found = hash(&checkpoint, store.clone(), threads, chunk);
                    assert_eq!(
                        found, expected,
                        "{name}, {reader:?}, {options:?}, {buffers} buffers, chunk {chunk}"
                    );
                    assert_eq!(store.counters().over_budget, 0, "{options:?}, {buffers} buffers");
                }
            }
        }
    }
}

/// With as few slots as a token uses, a prompt that needs every expert of every layer.
#[test]
fn a_long_prompt_needs_no_more_than_a_token_does() {
    let checkpoint = open("tiny-k31");
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let run = |store: Arc<dyn ExpertStore>| {
        let device = Cpu::new(2).unwrap();
        let engine =
            Engine::with_store(checkpoint.clone(), store, device, &EngineOptions::default(), &mut |_| {});
        let engine = engine.unwrap();
        let mut sequence = engine.new_sequence().unwrap();
        let ids: Vec<u32> = (0..1500).map(|i| 3 + i * 7919 % 500).collect();
        LogitsHash::of(&engine.run(&mut sequence, &ids, LogitsWanted::Last, &mut Silent).unwrap().values)
    };
    let store = Arc::new(slab(&checkpoint, &reader, 4, SlabOptions::default()));
    assert_eq!(run(store.clone()), run(Arc::new(MappedStore::new(checkpoint.clone()))));
    assert_eq!(store.buffers(), 4);
    // One chunk: no expert is read twice.
    assert!(store.counters().misses <= 12 * 16);
}

/// What a wider chunk reads once, narrow ones read again.
#[test]
fn bytes_for_a_prompt_fall_with_the_chunk() {
    let checkpoint = open("tiny-k31");
    let mut before = u64::MAX;
    for chunk in [1, 16, 512] {
        let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
        let store = Arc::new(slab(&checkpoint, &reader, 30, SlabOptions::default()));
        hash(&checkpoint, store.clone(), 1, chunk);
        let read = store.counters().bytes_demanded;
        assert!(read < before, "{read} bytes with chunks of {chunk}, {before} with smaller ones");
        before = read;
    }
}

/// A prompt of 2,048 tokens is one chunk: no expert is asked for twice, whatever the store keeps.
#[test]
fn a_prompt_of_2048_tokens_asks_for_each_expert_at_most_once() {
    let checkpoint = open("tiny-k31");
    let store = Arc::new(MappedStore::new(checkpoint.clone()));
    let device = Cpu::new(2).unwrap();
    let options = EngineOptions::default();
    let engine =
        Engine::with_store(checkpoint.clone(), store.clone(), device, &options, &mut |_| {}).unwrap();
    let ids: Vec<u32> = (0..2048).map(|i| 3 + i * 7919 % 500).collect();
    engine.prefill(&mut engine.new_sequence().unwrap(), &ids).unwrap();
    let moe = &checkpoint.config().moe;
    let requested = store.counters().requested;
    assert!(requested <= 12 * moe.num_experts as u64, "{requested} experts");
    assert_eq!(store.counters().bytes, requested * checkpoint.experts().layout().len as u64);
}

/// A budget that is too small for the prompt cuts it, and every chunk asks anew; the logits stay.
#[test]
fn the_activation_budget_cuts_the_prompt_and_changes_no_bit() {
    let checkpoint = open("tiny-k31");
    let mut found = Vec::new();
    for activation_bytes in [1, 1 << 18, 2 << 30] {
        let store = Arc::new(MappedStore::new(checkpoint.clone()));
        let mut options = EngineOptions::default();
        options.activation_bytes = activation_bytes;
        let device = Cpu::new(2).unwrap();
        let engine =
            Engine::with_store(checkpoint.clone(), store.clone(), device, &options, &mut |_| {}).unwrap();
        let ids: Vec<u32> = (0..100).map(|i| 3 + i * 7919 % 500).collect();
        let logits = engine.run(&mut engine.new_sequence().unwrap(), &ids, LogitsWanted::Last, &mut Silent);
        found.push((LogitsHash::of(&logits.unwrap().values), store.counters().requested));
    }
    assert!(found.iter().all(|(hash, _)| *hash == found[0].0), "{found:?}");
    assert!(found.is_sorted_by(|a, b| a.1 > b.1), "{found:?}");
}

/// Experts behind the share of weight are not asked for, and both devices leave out the same ones.
#[test]
fn routed_top_p_asks_for_fewer_experts() {
    let checkpoint = open("tiny-k31");
    let ids: Vec<u32> = (0..40).map(|i| 3 + i * 7919 % 500).collect();
    let mut before = u64::MAX;
    for p in [None, Some(0.8), Some(0.5), Some(1e-9)] {
        let mut options = EngineOptions::default();
        options.model = ModelOptions::default().with_routed_top_p(p);
        let mut logits = Vec::new();
        let mut requested = Vec::new();
        let store = Arc::new(MappedStore::new(checkpoint.clone()));
        let device = Cpu::new(2).unwrap();
        let engine =
            Engine::with_store(checkpoint.clone(), store.clone(), device, &options, &mut |_| {}).unwrap();
        decode(&engine, &ids, &mut logits);
        requested.push(store.counters().requested);
        let store = Arc::new(MappedStore::new(checkpoint.clone()));
        let engine = Engine::with_store(checkpoint.clone(), store.clone(), Reference, &options, &mut |_| {});
        decode(&engine.unwrap(), &ids, &mut logits);
        requested.push(store.counters().requested);
        assert_eq!(requested[0], requested[1], "{p:?}");
        assert!(requested[0] < before, "{p:?}: {requested:?}");
        before = requested[0];
        let (cpu, reference) = logits.split_at(logits.len() / 2);
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
        let distance = square(&mut cpu.iter().zip(reference).map(|(a, b)| a - b));
        assert!(distance < 1e-4 * square(&mut reference.iter().copied()), "{p:?}: {distance}");
    }
    // One expert a token and layer at the least.
    assert_eq!(before, 40 * 12);
}

/// Token by token.
fn decode<D: Device>(engine: &Engine<D>, ids: &[u32], logits: &mut Vec<f32>) {
    let mut sequence = engine.new_sequence().unwrap();
    for id in ids {
        logits.extend(engine.decode(&mut sequence, *id).unwrap().values);
    }
}

/// Guesses are read by a reader that fails, waits and delivers in pieces: the logits stay, some guesses come true, and
/// none takes a buffer that a demand waits for.
#[test]
fn lookahead_changes_no_bit() {
    let checkpoint = open("tiny-k31");
    let ids: Vec<u32> = (0..40).map(|i| 3 + i * 7919 % 500).collect();
    let run = |store: Arc<dyn ExpertStore>, lookahead, threads| {
        let mut options = EngineOptions::default();
        options.model = ModelOptions::default().with_lookahead(lookahead);
        let device = Cpu::new(threads).unwrap();
        let engine = Engine::with_store(checkpoint.clone(), store, device, &options, &mut |_| {}).unwrap();
        let mut logits = Vec::new();
        decode(&engine, &ids, &mut logits);
        LogitsHash::of(&logits)
    };
    let expected = run(Arc::new(MappedStore::new(checkpoint.clone())), Lookahead::Off, 2);
    let top_k = checkpoint.config().moe.num_experts_per_token as u64;
    for lookahead in [Lookahead::Off, Lookahead::Input, Lookahead::Shared] {
        for (buffers, threads, seed, guesses) in
            [(top_k, 1, 1, 6), (2 * top_k + 1, 2, 2, 4), (60, 2, 3, 6), (500, 1, 4, 6)]
        {
            let reader: Arc<dyn Reader> = Hostile::new(&checkpoint, seed, 4096);
            let options = SlabOptions { guesses, piece_bytes: 512, ..SlabOptions::default() };
            let store = Arc::new(slab(&checkpoint, &reader, buffers, options));
            assert_eq!(run(store.clone(), lookahead, threads), expected, "{lookahead:?}, {buffers} buffers");
            let counters = store.counters();
            assert_eq!(counters.over_budget, 0, "{lookahead:?}, {buffers} buffers");
            assert_eq!(counters.requested, counters.hits + counters.joined + counters.misses);
            assert!(counters.guesses_used <= counters.guesses);
            // Where everything stays nothing is guessed.
            if lookahead == Lookahead::Off || buffers == 500 {
                assert_eq!(counters.guesses, 0, "{lookahead:?}, {buffers} buffers");
            }
        }
    }
}

/// The CPU as a device that works behind the caller's back: what a call reads is in use until somebody has asked for it
/// `lag` times in vain.
struct Lagging {
    cpu: Cpu,
    lag: usize,
}

impl Device for Lagging {
    k3_graph::delegate_device!(cpu: Cpu, types, rows, attn_res, kda, mla, index_select, route, experts, states);

    fn kind(&self) -> &'static str {
        self.cpu.kind()
    }

    fn deviation(&self) -> Option<&'static str> {
        self.cpu.deviation()
    }

    fn experts_ffn(
        &self,
        experts: &[ExpertWork],
        z: &Self::Act,
        caps: SituCaps,
        out: &mut Self::Act,
    ) -> Result<Option<InFlight>, DeviceError> {
        self.cpu.experts_ffn(experts, z, caps, out)?;
        let (asked, lag) = (AtomicUsize::new(0), self.lag);
        Ok(Some(Arc::new(move || asked.fetch_add(1, Relaxed) >= lag)))
    }
}

/// Leases of a device that still reads go back to the store with its events, and their experts stay in memory until then.
#[test]
fn a_device_that_lags_behind_keeps_its_experts() {
    let checkpoint = open("tiny-k31");
    let mapped = || Arc::new(MappedStore::new(checkpoint.clone()));
    let expected = hash(&checkpoint, mapped(), 2, 7);
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone()).unwrap());
    let mut options = EngineOptions::default();
    options.chunk_tokens = Some(7);
    let on = |lag, store: Arc<dyn ExpertStore>| {
        let device = Lagging { cpu: Cpu::new(2).unwrap(), lag };
        hash_on(device, &checkpoint, store, &options)
    };
    for lag in [0, 1, 20] {
        assert_eq!(on(lag, mapped()), expected, "mapped, {lag} questions behind");
        for buffers in [checkpoint.config().moe.num_experts_per_token as u64, 30, 500] {
            let store = Arc::new(slab(&checkpoint, &reader, buffers, SlabOptions::default()));
            assert_eq!(on(lag, store.clone()), expected, "{buffers} buffers, {lag} questions behind");
            let counters = store.counters();
            assert!(counters.retired_checks > 0, "{buffers} buffers, {lag}: {counters:?}");
            assert_eq!(counters.over_budget, 0, "{buffers} buffers, {lag}: {counters:?}");
        }
    }
}
