//! Reads a fixture folder into plain f64 (`docs/checkpoint.md` 2, 3, 6).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::num::Matrix;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

pub(crate) fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("parsing {}: {e}", path.display()))
}

struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Tensors by name, of one file or of all shards of a snapshot.
pub(crate) struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    pub(crate) fn of_file(path: &Path) -> Self {
        let mut all = Self(HashMap::new());
        all.read(path);
        all
    }

    /// Shard names come from the index alone.
    pub(crate) fn of_snapshot(folder: &Path) -> Self {
        let index = json(&folder.join("model.safetensors.index.json"));
        let weight_map = index["weight_map"].as_object().expect("weight_map is an object");
        let mut shards: Vec<&str> = weight_map.values().map(|v| v.as_str().expect("a shard name")).collect();
        shards.sort_unstable();
        shards.dedup();
        let mut all = Self(HashMap::new());
        for shard in shards {
            all.read(&folder.join(shard));
        }
        all
    }

    fn read(&mut self, path: &Path) {
        let file = fs::read(path).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
        let tensors =
            SafeTensors::deserialize(&file).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
        for (name, view) in tensors.tensors() {
            let (shape, bytes) = (view.shape().to_vec(), view.data().to_vec());
            self.0.insert(name, Tensor { dtype: view.dtype(), shape, bytes });
        }
    }

    fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn shape(&self, name: &str) -> &[usize] {
        &self.get(name).shape
    }

    /// BF16 or F32, by the dtype in the header.
    pub(crate) fn floats(&self, name: &str) -> Vec<f64> {
        let tensor = self.get(name);
        match tensor.dtype {
            Dtype::F32 => {
                tensor.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
            }
            Dtype::BF16 => {
                let wide = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                tensor.bytes.as_chunks::<2>().0.iter().map(|b| f64::from(wide(b))).collect()
            }
            other => panic!("{name}: expected BF16 or F32, found {other:?}"),
        }
    }

    pub(crate) fn matrix(&self, name: &str) -> Matrix {
        let &[rows, cols] = self.shape(name) else { panic!("{name}: expected two axes") };
        Matrix { rows, cols, data: self.floats(name) }
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<i32> {
        let tensor = self.get(name);
        assert_eq!(tensor.dtype, Dtype::I32, "{name}");
        tensor.bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let tensor = self.get(name);
        assert_eq!(tensor.dtype, Dtype::U8, "{name}");
        tensor.bytes.clone()
    }
}
