//! Sequences on the fixtures: continue, save, restore, stop, cancel.

use std::ops::ControlFlow;
use std::path::PathBuf;

use k3_graph::{Cpu, Device, LogitsWanted, ModelOptions, Reference, Silent, TokenError};
use k3_runner::{
    Engine, EngineOptions, Event, Finish, Generate, LogitsHash, RunError, Sampling, SavedStateError, Step,
};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn open_with<D: Device>(name: &str, device: D, options: &EngineOptions) -> Engine<D> {
    Engine::open(fixture(name), device, options, &mut |_| {}).unwrap()
}

fn open(name: &str) -> Engine<Cpu> {
    open_with(name, Cpu::new(2).unwrap(), &EngineOptions::default())
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + i * 7919 % 500).collect()
}

fn quiet(_: Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Hash of the logits after `rest`, consumed after `sequence`.
fn finish<D: Device>(engine: &Engine<D>, sequence: &mut k3_runner::Sequence<D>, rest: &[u32]) -> LogitsHash {
    LogitsHash::of(&engine.run(sequence, rest, LogitsWanted::All, &mut Silent).unwrap().values)
}

fn save_and_restore<D: Device>(name: &str, device: impl Fn() -> D) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let ids = prompt(60);
    let engine = open_with(name, device(), &EngineOptions::default());
    let mut sequence = engine.new_sequence().unwrap();
    engine.prefill(&mut sequence, &ids[..41]).unwrap();
    engine.save(&sequence, &path).unwrap();
    let uninterrupted = finish(&engine, &mut sequence, &ids[41..]);
    drop(engine);

    // As a new process would: everything opened anew.
    let engine = open_with(name, device(), &EngineOptions::default());
    let mut restored = engine.restore(&path).unwrap();
    assert_eq!((restored.position(), restored.tokens()), (41, &ids[..41]));
    assert_eq!(finish(&engine, &mut restored, &ids[41..]), uninterrupted, "{name}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn a_saved_sequence_continues_with_the_same_bits() {
    for name in ["tiny-k3", "tiny-k31", "dims-k31"] {
        save_and_restore(name, || Cpu::new(2).unwrap());
    }
    save_and_restore("tiny-k31", || Reference);
}

/// The second half of [`a_saved_sequence_continues_in_a_new_process`], in that process.
#[test]
#[ignore = "started by another test"]
fn child_continues() {
    let path = std::env::var_os("K3_TEST_STATE").expect("set by the parent");
    let engine = open("tiny-k31");
    let mut sequence = engine.restore(path).unwrap();
    println!("hash {}", finish(&engine, &mut sequence, &prompt(60)[41..]));
}

#[test]
fn a_saved_sequence_continues_in_a_new_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let engine = open("tiny-k31");
    let mut sequence = engine.new_sequence().unwrap();
    engine.prefill(&mut sequence, &prompt(60)[..41]).unwrap();
    engine.save(&sequence, &path).unwrap();
    let uninterrupted = finish(&engine, &mut sequence, &prompt(60)[41..]);
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_continues", "--ignored", "--nocapture"])
        .env("K3_TEST_STATE", &path)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&child.stdout);
    assert!(printed.contains(&format!("hash {uninterrupted}")), "{printed}");
}

#[cfg(unix)]
#[test]
fn a_state_is_never_written_through_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    std::fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let engine = open("tiny-k31");
    assert!(matches!(
        engine.save(&engine.new_sequence().unwrap(), &link),
        Err(SavedStateError::Write { .. })
    ));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
}

#[test]
fn an_empty_sequence_can_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open("tiny-k31");
    let path = dir.path().join("state");
    engine.save(&engine.new_sequence().unwrap(), &path).unwrap();
    assert_eq!(engine.restore(&path).unwrap().position(), 0);
}

/// One byte changed anywhere, in the header, the checksum or the values, or one byte more or less: refused.
#[test]
fn a_damaged_state_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let engine = open("tiny-k31");
    let mut sequence = engine.new_sequence().unwrap();
    engine.prefill(&mut sequence, &prompt(20)).unwrap();
    engine.save(&sequence, &path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&path, bytes).unwrap();
        assert!(engine.restore(&path).is_err(), "{what}");
    };
    let header = 8 + u64::from_le_bytes(*good.first_chunk().unwrap()) as usize;
    let values = (header..good.len()).step_by(good.len() / 40);
    for at in (0..header).step_by(3).chain(values).chain([good.len() - 1]) {
        for flip in [0x01, 0x20] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            refused(&bad, &format!("byte {at} of {} changed by {flip:#x}", good.len()));
        }
    }
    refused(&good[..good.len() - 1], "a byte short");
    refused(&[&good[..], &[0]].concat(), "a byte long");
    refused(&[], "empty");
    std::fs::write(&path, &good).unwrap();
    engine.restore(&path).unwrap();
}

#[test]
fn a_state_of_something_else_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let k31 = open("tiny-k31");
    let mut sequence = k31.new_sequence().unwrap();
    k31.prefill(&mut sequence, &prompt(20)).unwrap();
    k31.save(&sequence, &path).unwrap();

    let mismatch = |result: Result<(), SavedStateError>, expected: &str| match result {
        Err(SavedStateError::Mismatch { what, .. }) => assert_eq!(what, expected),
        other => panic!("{expected}: {other:?}"),
    };
    mismatch(open("tiny-k3").restore(&path).map(drop), "checkpoint");
    let reference = open_with("tiny-k31", Reference, &EngineOptions::default());
    mismatch(reference.restore(&path).map(drop), "device");
    let mut options = EngineOptions::default();
    options.model = ModelOptions::default().with_layers(Some(5));
    mismatch(open_with("tiny-k31", Cpu::new(1).unwrap(), &options).restore(&path).map(drop), "layers");
    options.model = ModelOptions::default().with_ignore_indexer(true);
    mismatch(open_with("tiny-k31", Cpu::new(1).unwrap(), &options).restore(&path).map(drop), "attention to");
    assert!(matches!(k31.restore(dir.path().join("absent")), Err(SavedStateError::Io { .. })));
    assert!(matches!(
        k31.restore(fixture("tiny-k31").join("expected.safetensors")),
        Err(SavedStateError::NotAState { .. })
    ));
}

/// A copy goes its own way, and the original is where it was.
#[test]
fn a_fork_is_a_snapshot() {
    let engine = open("tiny-k31");
    let ids = prompt(50);
    let mut sequence = engine.new_sequence().unwrap();
    engine.prefill(&mut sequence, &ids[..30]).unwrap();
    let mut copy = engine.fork(&sequence).unwrap();
    let first = finish(&engine, &mut sequence, &ids[30..]);
    assert_eq!(finish(&engine, &mut copy, &ids[30..]), first);
}

#[test]
fn generation_stops_for_a_reason_and_says_which() {
    let engine = open("tiny-k31");
    let ids = prompt(20);
    let greedy =
        Generate { max_tokens: 12, sampling: Sampling::greedy(), ignore_eos: true, ..Generate::default() };
    let mut sequence = engine.new_sequence().unwrap();
    let mut heard = Vec::new();
    let reply = engine
        .generate(&mut sequence, &ids, &greedy, &mut |event| {
            if let Event::Token(id) = event {
                heard.push(id);
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((reply.finish, reply.tokens.len(), reply.prompt_tokens), (Finish::Length, 12, 20));
    assert_eq!(heard, reply.tokens);
    // All but the last are consumed, so the conversation can go on.
    assert_eq!(sequence.tokens(), [&ids[..], &reply.tokens[..11]].concat());

    let stop = reply.tokens[4];
    let at = reply.tokens.iter().position(|t| *t == stop).unwrap();
    let request = Generate { stop: vec![stop], ..greedy.clone() };
    let reply = engine.generate(&mut engine.new_sequence().unwrap(), &ids, &request, &mut quiet).unwrap();
    assert_eq!((reply.finish, reply.tokens.len()), (Finish::Stop(stop), at + 1));

    let mut tokens = 0;
    let reply = engine
        .generate(&mut engine.new_sequence().unwrap(), &ids, &greedy, &mut |event| {
            tokens += usize::from(matches!(event, Event::Token(_)));
            if tokens == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!((reply.finish, reply.tokens.len()), (Finish::Cancelled, 3));
}

#[test]
fn a_cancelled_prefill_leaves_an_unusable_sequence() {
    let engine = open("tiny-k3");
    let mut sequence = engine.new_sequence().unwrap();
    let reply = engine
        .generate(&mut sequence, &prompt(9), &Generate::default(), &mut |_| ControlFlow::Break(()))
        .unwrap();
    assert_eq!((reply.finish, reply.tokens.len()), (Finish::Cancelled, 0));
    assert!(sequence.state().is_broken());
    assert!(engine.prefill(&mut sequence, &[5]).is_err());
    assert!(matches!(engine.save(&sequence, "/nonexistent"), Err(SavedStateError::State { .. })));
}

/// A prompt that cannot be run is refused as a whole, also where its first chunks could be.
#[test]
fn a_bad_prompt_is_refused_before_any_of_it_is_consumed() {
    let mut engine = open("tiny-k3");
    engine.set_chunk_tokens(4);
    let mut sequence = engine.new_sequence().unwrap();
    let mut refused = |tokens: &[u32]| match engine.prefill(&mut sequence, tokens) {
        Err(RunError::Tokens(error)) => {
            assert_eq!((sequence.position(), sequence.tokens().len()), (0, 0));
            error
        }
        other => panic!("{other:?}"),
    };
    // Never cut: both numbers are named.
    let error = refused(&prompt(5000));
    assert_eq!(error, TokenError::Context { tokens: 5000, position: 0, context: 4096 });
    assert!(error.to_string().contains("5000") && error.to_string().contains("4096"));
    let mut ids = prompt(20);
    ids[17] = 512;
    assert_eq!(refused(&ids), TokenError::Unknown { index: 17, id: 512, vocab_size: 512 });
    assert_eq!(refused(&[]), TokenError::None);
    engine.prefill(&mut sequence, &[5]).unwrap();
}

#[test]
fn a_step_of_several_sequences_gives_each_what_it_gets_alone() {
    let engine = open("tiny-k31");
    let ids = prompt(60);
    let alone = |tokens: &[u32]| {
        let mut sequence = engine.new_sequence().unwrap();
        LogitsHash::of(engine.prefill(&mut sequence, tokens).unwrap().last().unwrap())
    };
    let mut sequences = [engine.new_sequence().unwrap(), engine.new_sequence().unwrap()];
    engine.prefill(&mut sequences[0], &ids[..30]).unwrap();
    let [a, b] = &mut sequences;
    let batch = &mut [
        Step { sequence: a, tokens: &ids[30..31], logits: LogitsWanted::Last },
        Step { sequence: b, tokens: &ids[5..50], logits: LogitsWanted::Last },
    ];
    let results = engine.step(batch, &mut Silent).unwrap();
    let hashes: Vec<_> = results.iter().map(|r| LogitsHash::of(&r.as_ref().unwrap().values)).collect();
    assert_eq!(hashes, [alone(&ids[..31]), alone(&ids[5..50])]);
    assert_eq!((sequences[0].tokens(), sequences[1].tokens()), (&ids[..31], &ids[5..50]));
}

/// A state means the weights that computed it: it does not move between engines but by a file.
#[test]
fn a_sequence_belongs_to_its_engine() {
    let (one, other) = (open("tiny-k31"), open("tiny-k31"));
    let mut sequence = one.new_sequence().unwrap();
    one.prefill(&mut sequence, &prompt(5)).unwrap();
    assert!(matches!(other.prefill(&mut sequence, &[5]), Err(RunError::Forward(_))));
    one.prefill(&mut sequence, &[5]).unwrap();
}

/// A state is continued only by the function that made it.
#[test]
fn a_state_of_another_routed_top_p_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let open = |p: Option<f64>| {
        let mut options = EngineOptions::default();
        options.model = ModelOptions::default().with_routed_top_p(p);
        open_with("tiny-k31", Cpu::new(2).unwrap(), &options)
    };
    let hash = |engine: &Engine<Cpu>| finish(engine, &mut engine.new_sequence().unwrap(), &prompt(30));
    let engines = [None, Some(1.0), Some(0.5), Some(0.7)].map(open);
    assert_eq!(hash(&engines[0]), hash(&engines[1]), "1 leaves nothing out");
    assert_ne!(hash(&engines[0]), hash(&engines[2]));
    assert_eq!(
        engines.each_ref().map(Engine::deviation),
        ["", "", " (routed top-p 0.5)", " (routed top-p 0.7)"]
    );
    for (i, from) in engines.iter().enumerate() {
        let mut sequence = from.new_sequence().unwrap();
        from.prefill(&mut sequence, &prompt(9)).unwrap();
        from.save(&sequence, &path).unwrap();
        for (j, to) in engines.iter().enumerate() {
            match to.restore(&path) {
                Ok(restored) => assert!(i == j || i + j == 1, "{i} to {j}: {restored:?}"),
                Err(SavedStateError::Mismatch { what: "routed top-p", .. }) => assert!(i != j && i + j != 1),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_routed_top_p_that_is_no_share_is_refused() {
    for p in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
        let mut options = EngineOptions::default();
        options.model = ModelOptions::default().with_routed_top_p(Some(p));
        let opened = Engine::open(fixture("tiny-k3"), Cpu::new(1).unwrap(), &options, &mut |_| {});
        let Err(k3_runner::Error::Load { source, .. }) = opened else { panic!("{p} was taken") };
        assert!(matches!(source, k3_graph::LoadError::RoutedTopP { .. }), "{source}");
    }
}
