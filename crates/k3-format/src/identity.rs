//! What tells one checkpoint from another.

use std::fmt;

use serde_json::Value;

use crate::shard_file::ShardFile;

/// A hash over what `config.json` says and over every shard's name, length and header. Layout and order of keys in
/// `config.json` do not count; the bytes of the tensors do not either, since reading them takes an hour.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId([u8; 32]);

impl CheckpointId {
    pub(crate) fn new(config: &Value, files: &[ShardFile]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hash_json(&mut hasher, config);
        let mut files: Vec<&ShardFile> = files.iter().collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        for file in files {
            hash_text(&mut hasher, &file.name);
            hasher.update(&file.len.to_le_bytes());
            hasher.update(&file.header_hash);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointId({self})")
    }
}

/// Lengths go before contents, so that no two values hash alike by running into each other.
fn hash_text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

fn hash_json(hasher: &mut blake3::Hasher, value: &Value) {
    match value {
        Value::Object(map) => {
            hasher.update(b"{");
            hasher.update(&(map.len() as u64).to_le_bytes());
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            for (key, value) in entries {
                hash_text(hasher, key);
                hash_json(hasher, value);
            }
        }
        Value::Array(list) => {
            hasher.update(b"[");
            hasher.update(&(list.len() as u64).to_le_bytes());
            for value in list {
                hash_json(hasher, value);
            }
        }
        other => {
            hasher.update(b"v");
            hash_text(hasher, &other.to_string());
        }
    }
}
