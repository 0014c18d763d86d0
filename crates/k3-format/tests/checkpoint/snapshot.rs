//! Snapshots to break: a fixture in memory, changed at will and written by hand, so that no reader is tested
//! against the engine's own writer.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use k3_format::{Checkpoint, Error, OpenOptions, TensorProblem};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) shard: String,
}

pub(crate) struct Snapshot {
    pub(crate) config: Value,
    pub(crate) generation: Option<Value>,
    pub(crate) tensors: Vec<Tensor>,
    /// Headers of odd length, so that no number of two bytes begins at an even offset.
    pub(crate) odd: bool,
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

impl Snapshot {
    pub(crate) fn of(name: &str) -> Self {
        let dir = fixture(name);
        let json = |file: &str| -> Value {
            serde_json::from_slice(&fs::read(dir.join(file)).expect(file)).expect(file)
        };
        let index = json("model.safetensors.index.json");
        let mut shards: Vec<&str> =
            index["weight_map"].as_object().expect("a map").values().filter_map(Value::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        let tensors = shards.into_iter().flat_map(|shard| read_shard(&dir, shard)).collect();
        Self { config: json("config.json"), generation: None, tensors, odd: false }
    }

    pub(crate) fn get(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub(crate) fn remove(&mut self, name: &str) -> Tensor {
        let at = self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
        self.tensors.remove(at)
    }

    pub(crate) fn add(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: Vec<u8>) {
        let shard = self.tensors.last().expect("tensors").shard.clone();
        self.tensors.push(Tensor {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.into(),
            bytes,
            shard,
        });
    }

    pub(crate) fn text(&mut self) -> &mut Map<String, Value> {
        self.config["text_config"].as_object_mut().expect("an object")
    }

    pub(crate) fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        let mut shards: BTreeMap<&str, Vec<&Tensor>> = BTreeMap::new();
        for tensor in &self.tensors {
            shards.entry(&tensor.shard).or_default().push(tensor);
        }
        let mut weight_map = Map::new();
        for (shard, tensors) in shards {
            let mut header = Map::new();
            let mut data = Vec::new();
            for t in tensors {
                let begin = data.len();
                data.extend_from_slice(&t.bytes);
                let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]});
                header.insert(t.name.clone(), entry);
                weight_map.insert(t.name.clone(), json!(shard));
            }
            let mut header = Value::Object(header).to_string();
            if self.odd && header.len().is_multiple_of(2) {
                header.push(' ');
            }
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend_from_slice(header.as_bytes());
            file.extend_from_slice(&data);
            fs::write(dir.path().join(shard), file).expect("write");
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
        fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).expect("write");
        fs::write(dir.path().join("config.json"), self.config.to_string()).expect("write");
        if let Some(generation) = &self.generation {
            fs::write(dir.path().join("generation_config.json"), generation.to_string()).expect("write");
        }
        dir
    }

    /// Files stay readable after the directory is gone.
    pub(crate) fn open_with(&self, options: &OpenOptions) -> Result<Checkpoint, Error> {
        let dir = self.write();
        Checkpoint::open(dir.path(), options)
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, Error> {
        self.open_with(&OpenOptions::default())
    }

    pub(crate) fn good(&self) -> Checkpoint {
        self.open().unwrap_or_else(|e| panic!("{e}"))
    }

    /// The problems of a snapshot whose tensors are refused, and how many there are.
    pub(crate) fn problems(&self) -> (Vec<TensorProblem>, usize) {
        match self.open() {
            Err(Error::Tensors(e)) => {
                assert!(e.problems.iter().all(|p| e.to_string().contains(p.name())), "{e}");
                (e.problems, e.total)
            }
            other => panic!("expected tensor errors, got {other:?}"),
        }
    }

    /// The only problem.
    pub(crate) fn problem(&self) -> TensorProblem {
        let (mut problems, total) = self.problems();
        assert_eq!(total, 1, "{problems:?}");
        problems.remove(0)
    }
}

fn read_shard(dir: &Path, shard: &str) -> Vec<Tensor> {
    let file = fs::read(dir.join(shard)).expect(shard);
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let header: Map<String, Value> = serde_json::from_slice(header).expect(shard);
    let mut tensors: Vec<(usize, Tensor)> = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, entry)| {
            let offset = |i: usize| entry["data_offsets"][i].as_u64().expect("an offset") as usize;
            let shape =
                entry["shape"].as_array().expect("a shape").iter().filter_map(Value::as_u64).collect();
            let dtype = entry["dtype"].as_str().expect("a dtype").to_owned();
            let bytes = data[offset(0)..offset(1)].to_vec();
            (offset(0), Tensor { name, dtype, shape, bytes, shard: shard.to_owned() })
        })
        .collect();
    tensors.sort_by_key(|(begin, _)| *begin);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Little-endian f32.
pub(crate) fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The upper halves of little-endian f32.
pub(crate) fn bf16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| [v.to_le_bytes()[2], v.to_le_bytes()[3]]).collect()
}
