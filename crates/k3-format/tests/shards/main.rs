//! Checkpoint directories as users have them, whole and broken in every known way. All files are made by hand
//! here; the safetensors crate is the second opinion.

mod broken;
mod directory;
mod reads;
mod tree;

use std::fs;

use k3_format::{Dtype, Shards, TensorInfo};
use safetensors::SafeTensors;

use crate::tree::{NAMES, Tree, fixture, hand_made, header_len};

#[test]
fn a_whole_tree() {
    let tree = Tree::whole();
    let shards = tree.open().unwrap();
    assert_eq!(shards.len(), 6);
    assert_eq!(shards.files().iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), NAMES);
    assert_eq!(shards.iter().map(|t| t.name).collect::<Vec<_>>(), ["1.a", "1.b", "2.a", "2.b", "3.a", "3.b"]);
    let start = header_len() as u64;
    let expected = TensorInfo {
        name: "2.b",
        dtype: Dtype::BF16,
        shape: &[10, 100],
        shard: 1,
        begin: start + 6000,
        end: start + 8000,
    };
    assert_eq!(shards.get("2.b"), Some(expected));
    for absent in ["2.c", "", "2", "2.bb"] {
        assert_eq!(shards.get(absent), None, "{absent}");
    }
    for (i, file) in shards.files().iter().enumerate() {
        let bytes = hand_made(i + 1);
        assert_eq!(file.len, bytes.len() as u64);
        assert_eq!(file.data_start, start);
        assert_eq!(file.header_hash, *blake3::hash(&bytes[8..start as usize]).as_bytes());
        assert_eq!(file.tensors, 2 * i..2 * i + 2);
    }
}

#[test]
fn fixtures_equal_the_safetensors_crate() {
    for name in ["tiny-k3", "tiny-k31", "dims-k31"] {
        let shards = Shards::open(&fixture(name)).unwrap();
        let mut tensors = 0;
        for (i, file) in shards.files().iter().enumerate() {
            let bytes = fs::read(&file.path).unwrap();
            let oracle = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(oracle.len(), file.tensors.len());
            for (name, view) in oracle.tensors() {
                let tensor = shards.get(&name).unwrap();
                assert_eq!((tensor.shard, tensor.dtype), (i, view.dtype()), "{name}");
                assert!(tensor.shape.iter().map(|&d| d as usize).eq(view.shape().iter().copied()), "{name}");
                assert_eq!(shards.read(&tensor).unwrap(), view.data(), "{name}");
                assert_eq!(shards.map(&tensor).unwrap(), view.data(), "{name}");
                tensors += 1;
            }
        }
        assert_eq!(tensors, shards.len(), "{name}");
    }
}

#[test]
fn a_single_file_needs_no_index() {
    let tree = Tree::empty();
    tree.put("model.safetensors", &hand_made(1));
    let shards = tree.open().unwrap();
    assert_eq!((shards.files().len(), shards.len()), (1, 2));
    assert_eq!(shards.read(&shards.get("1.a").unwrap()).unwrap()[..], hand_made(1)[header_len()..][..6000]);
}
