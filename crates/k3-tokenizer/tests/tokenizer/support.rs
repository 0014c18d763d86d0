//! Fixtures and vocabularies; `fixtures/tokenizer/README.md` says how they came about.

use std::{path::PathBuf, sync::LazyLock};

use k3_tokenizer::Tokenizer;
use serde::Deserialize;

/// The path of a file in `fixtures/tokenizer`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizer").join(name)
}

/// The small vocabulary: 768 ranks in the released layout.
pub(crate) fn small() -> &'static Tokenizer {
    static SMALL: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(fixture("small")).unwrap());
    &SMALL
}

/// Number of ranks of o200k_base.
pub(crate) const O200K_RANKS: u32 = 199_998;

/// The ranks of o200k_base with K3's control tokens behind them, at the offsets of the release.
pub(crate) fn o200k() -> &'static Tokenizer {
    static O200K: LazyLock<Tokenizer> = LazyLock::new(|| {
        let tiktoken = tiktoken_rs::o200k_base().unwrap();
        let tokens = (0..O200K_RANKS).map(|id| tiktoken.decode_bytes(&[id]).unwrap());
        Tokenizer::from_parts(tokens, NAMED.map(|(offset, name)| (O200K_RANKS + offset, name))).unwrap()
    });
    &O200K
}

/// `docs/checkpoint.md` 8: slot, counted from the first one, and spelling.
pub(crate) const NAMED: [(u32, &str); 16] = [
    (0, "[BOS]"),
    (1, "[EOS]"),
    (2, "<|end_of_msg|>"),
    (3, "<|open|>"),
    (4, "<|close|>"),
    (5, "<|sep|>"),
    (6, "[start_header_id]"),
    (7, "[end_header_id]"),
    (9, "[EOT]"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (21, "<|media_pad|>"),
    (65, "<osagent_mode>"),
    (254, "[UNK]"),
    (255, "[PAD]"),
];

/// The mixed lines.
pub(crate) fn corpus() -> &'static [String] {
    static CORPUS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let file = std::fs::read_to_string(fixture("corpus.jsonl")).unwrap();
        file.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    });
    &CORPUS
}

/// `expected.json`.
#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) lines: usize,
    pub(crate) tokens: usize,
    pub(crate) small: Small,
    pub(crate) runs: Vec<Run>,
}

#[derive(Deserialize)]
pub(crate) struct Small {
    pub(crate) tokens: usize,
    pub(crate) ids: String,
}

#[derive(Deserialize)]
pub(crate) struct Run {
    pub(crate) name: String,
    parts: Vec<(String, usize)>,
    pub(crate) tokens: usize,
    pub(crate) ids: String,
}

impl Run {
    pub(crate) fn text(&self) -> String {
        self.parts.iter().map(|(text, count)| text.repeat(*count)).collect()
    }
}

pub(crate) fn expected() -> Expected {
    serde_json::from_slice(&std::fs::read(fixture("expected.json")).unwrap()).unwrap()
}

/// The first eight bytes of the BLAKE3 hash of the ids as little-endian `u32`.
pub(crate) fn digest(ids: &[u32]) -> [u8; 8] {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    *blake3::hash(&bytes).as_bytes().first_chunk().unwrap()
}

/// The same in hexadecimal.
pub(crate) fn hex_digest(ids: &[u32]) -> String {
    format!("{:016x}", u64::from_be_bytes(digest(ids)))
}
