//! Checkpoints made by hand, byte for byte, and not by the writer of this crate.

use std::fs;
use std::path::{Path, PathBuf};

use k3_format::{ShardError, Shards};
use tempfile::TempDir;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

pub(crate) fn shard_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

pub(crate) const NAMES: [&str; 3] = [
    "model-00001-of-000003.safetensors",
    "model-00002-of-000003.safetensors",
    "model-00003-of-000003.safetensors",
];

/// Shard `i` of the hand-made checkpoint: 6000 bytes `{i}.a`, then 2000 bytes `{i}.b` as BF16.
pub(crate) fn hand_made(i: usize) -> Vec<u8> {
    let header = format!(
        r#"{{"{i}.b":{{"dtype":"BF16","shape":[10,100],"data_offsets":[6000,8000]}},"{i}.a":{{"dtype":"U8","shape":[6000],"data_offsets":[0,6000]}}}}"#
    );
    let data: Vec<u8> = (0..8000).map(|at| (at * 7 + at / 256 + i) as u8).collect();
    shard_bytes(&header, &data)
}

pub(crate) fn header_len() -> usize {
    hand_made(1).len() - 8000
}

pub(crate) fn index_of(weight_map: &[(&str, &str)]) -> String {
    let entries: Vec<_> = weight_map.iter().map(|(name, shard)| format!("\"{name}\":\"{shard}\"")).collect();
    format!(r#"{{"metadata":{{"total_size":24000}},"weight_map":{{{}}}}}"#, entries.join(","))
}

/// Not in disk order, as published.
pub(crate) const WEIGHT_MAP: [(&str, &str); 6] = [
    ("3.a", NAMES[2]),
    ("1.b", NAMES[0]),
    ("2.a", NAMES[1]),
    ("1.a", NAMES[0]),
    ("3.b", NAMES[2]),
    ("2.b", NAMES[1]),
];

/// An error with all its causes, as a program shows it. No cause is said twice.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        let said = e.to_string();
        assert!(!text.contains(&said), "`{said}` is said twice in: {text}");
        text = format!("{text}: {said}");
        cause = e.source();
    }
    text
}

/// What git-lfs leaves in place of a file.
pub(crate) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n\
    oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 16990916912\n";

pub(crate) struct Tree(pub(crate) TempDir);

impl Tree {
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn whole() -> Self {
        let tree = Self::empty();
        for (i, name) in NAMES.iter().enumerate() {
            tree.put(name, &hand_made(i + 1));
        }
        tree.put("model.safetensors.index.json", index_of(&WEIGHT_MAP).as_bytes());
        tree
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn open(&self) -> Result<Shards, ShardError> {
        Shards::open(self.0.path())
    }

    /// The error of opening, with the words that its message must have.
    pub(crate) fn refused(&self, words: &[&str]) -> ShardError {
        let error = self.open().expect_err("the tree is broken");
        let message = chain(&error);
        for word in words {
            assert!(message.contains(word), "no `{word}` in: {message}");
        }
        error
    }
}
