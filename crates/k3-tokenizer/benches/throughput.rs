//! Our encoder and tiktoken-rs on the same ranks, pattern and text: `cargo bench -p k3-tokenizer`.
//!
//! The two take turns and the best round of each counts, so that other work on the machine hits both alike.

use std::{
    hint::black_box,
    path::Path,
    time::{Duration, Instant},
};

use k3_tokenizer::Tokenizer;
use tiktoken_rs::CoreBPE;

const RANKS: u32 = 199_998;
/// Kimi's pattern as tiktoken takes it, `docs/checkpoint.md` 8.
const PATTERN: &str = concat!(
    r"[\p{Han}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

fn main() {
    // Without `--bench` this is a test run of all targets: one round shows that it works.
    let rounds = if std::env::args().any(|arg| arg == "--bench") { 7 } else { 1 };
    let o200k = tiktoken_rs::o200k_base().expect("the ranks in tiktoken-rs");
    let tokens: Vec<Vec<u8>> =
        (0..RANKS).map(|id| o200k.decode_bytes(&[id]).expect("a dense vocabulary")).collect();
    let started = Instant::now();
    let no_names: [(u32, &str); 0] = [];
    let ours = Tokenizer::from_parts(&tokens, no_names).expect("o200k_base in order");
    println!("vocabulary of {RANKS} ranks built in {:.0} ms", started.elapsed().as_secs_f64() * 1e3);
    let theirs = CoreBPE::new(tokens.into_iter().zip(0..).collect(), std::iter::empty().collect(), PATTERN)
        .expect("a pattern that tiktoken takes");

    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizer");
    let corpus = std::fs::read_to_string(fixtures.join("corpus.jsonl")).expect("the corpus");
    let lines: Vec<String> =
        corpus.lines().map(|line| serde_json::from_str(line).expect("a JSON string")).collect();
    let source =
        [include_str!("../src/lib.rs"), include_str!("../src/ranks.rs"), include_str!("../src/hf.rs")]
            .concat();
    // The first 7,300 lines are prose in twelve languages, the others are made to be hard.
    let (prose, hard) = lines.split_at(7_300);
    for (name, text) in [
        ("prose, 12 languages", prose.join("\n")),
        ("hostile mixtures", hard.join("\n")),
        ("Rust source", source.repeat(16)),
        ("all lines", lines.join("\n")),
    ] {
        compare(name, &documents(&text), rounds, &ours, &theirs);
    }
}

/// The text in documents of about 100 kB: short of the limits where our cuts, which tiktoken-rs lacks, change ids.
fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in text.split_inclusive('\n') {
        if documents.last().is_none_or(|document| document.len() > 100_000) {
            documents.push(String::new());
        }
        documents.last_mut().expect("at least one").push_str(line);
    }
    documents
}

fn compare(name: &str, documents: &[String], rounds: usize, ours: &Tokenizer, theirs: &CoreBPE) {
    let (mut our_best, mut their_best) = (Duration::MAX, Duration::MAX);
    for _ in 0..rounds {
        let (time, our_ids) = timed(|| documents.iter().map(|text| ours.encode(text)).collect::<Vec<_>>());
        our_best = our_best.min(time);
        let (time, their_ids) =
            timed(|| documents.iter().map(|text| theirs.encode_ordinary(text)).collect::<Vec<_>>());
        their_best = their_best.min(time);
        assert_eq!(our_ids, their_ids, "{name}");
    }
    let megabytes = documents.iter().map(String::len).sum::<usize>() as f64 / 1e6;
    let speed = |time: Duration| megabytes / time.as_secs_f64();
    println!(
        "{name:<20} {megabytes:6.2} MB   ours {:6.1} MB/s   tiktoken-rs {:6.1} MB/s   ratio {:.2}",
        speed(our_best),
        speed(their_best),
        speed(our_best) / speed(their_best)
    );
}

fn timed<T>(f: impl FnOnce() -> T) -> (Duration, T) {
    let started = Instant::now();
    let value = black_box(f());
    (started.elapsed(), value)
}
