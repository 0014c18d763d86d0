//! What tells one checkpoint from another.

use std::fmt;

use serde_json::Value;

use crate::names::IndexerNames;
use crate::shard_file::ShardFile;
use crate::shards::TensorInfo;

/// A hash over what `config.json` says; every shard's name, length and header; the names under which the indexer
/// tensors were found; and the stored bytes of all small tensors: norms, `A_log`, `dt_bias`, router biases, AttnRes
/// vectors, and the global scales of NVFP4 experts.
///
/// Layout and order of keys in `config.json` do not count, nor does the directory or how its files are linked. The
/// bytes of matrices, convolutions and experts do not count either, since reading them takes an hour: two
/// checkpoints that differ in those alone, such as one with adapters merged into its projections, look alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId([u8; 32]);

impl CheckpointId {
    /// `values` is the hash of the small tensors.
    pub(crate) fn new(
        config: &Value,
        files: &[ShardFile],
        indexer: Option<&IndexerNames>,
        values: blake3::Hash,
    ) -> Self {
        let mut hasher = blake3::Hasher::new();
        hash_json(&mut hasher, config);
        let mut files: Vec<&ShardFile> = files.iter().collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        for file in files {
            hash_text(&mut hasher, &file.name);
            hasher.update(&file.len.to_le_bytes());
            hasher.update(&file.header_hash);
        }
        // Another assignment of names to the five tensors is another function of the same bytes.
        for (_, name) in indexer.iter().flat_map(|names| names.all()) {
            hash_text(&mut hasher, name);
        }
        hasher.update(values.as_bytes());
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

/// A small tensor: the type counts, since BF16 and F32 bytes mean different numbers.
pub(crate) fn hash_tensor(hasher: &mut blake3::Hasher, tensor: &TensorInfo<'_>, bytes: &[u8]) {
    hash_text(hasher, tensor.name);
    hash_text(hasher, &tensor.dtype.to_string());
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
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
