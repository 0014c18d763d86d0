//! Reading and mapping tensors of an open checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;

use k3_format::{Dtype, ShardError, TensorInfo};

use crate::tree::{NAMES, Tree, hand_made, header_len, shard_bytes};

#[test]
fn reads_and_mappings_give_the_bytes_of_the_file() {
    let tree = Tree::whole();
    let shards = tree.open().unwrap();
    let mut kept = Vec::new();
    for tensor in shards.iter() {
        let file = hand_made(tensor.shard + 1);
        let expected = &file[tensor.begin as usize..tensor.end as usize];
        let read = shards.read(&tensor).unwrap();
        assert_eq!(read, expected, "{}", tensor.name);
        assert!(read.as_ptr().addr().is_multiple_of(64), "{}", tensor.name);
        kept.push((shards.map(&tensor).unwrap(), expected.to_vec()));
        let mut buf = [0; 100];
        shards.read_range(tensor.shard, tensor.end - 100, &mut buf).unwrap();
        assert_eq!(buf, expected[expected.len() - 100..], "{}", tensor.name);
        assert_eq!(shards.map_range(tensor.shard, tensor.begin, tensor.begin + 5).unwrap(), expected[..5]);
    }
    // A mapped tensor outlives the checkpoint, its tree and its neighbours.
    drop((shards, tree));
    for (mapped, expected) in kept {
        assert_eq!(mapped, expected);
    }
}

#[test]
fn a_shard_is_mapped_once() {
    let tree = Tree::whole();
    let shards = tree.open().unwrap();
    let [a, b] = ["1.a", "1.b"].map(|name| shards.map(&shards.get(name).unwrap()).unwrap());
    assert_eq!(a.as_ptr().addr() + 6000, b.as_ptr().addr());
}

#[test]
fn a_file_that_shrinks_while_it_is_open() {
    let tree = Tree::whole();
    let shards = tree.open().unwrap();
    let (a, b) = (shards.get("2.a").unwrap(), shards.get("2.b").unwrap());
    let mapped = shards.get("3.a").map(|t| shards.map(&t).unwrap()).unwrap();
    let whole = hand_made(2).len() as u64;
    fs::OpenOptions::new().write(true).open(tree.path(NAMES[1])).unwrap().set_len(b.begin + 500).unwrap();
    shards.read(&a).unwrap();
    let error = shards.read(&b).unwrap_err();
    let message = format!("wanted 2000 bytes at offset {}, got 500", b.begin);
    assert!(error.to_string().contains(&message), "{error}");
    assert!(matches!(error, ShardError::ShortRead { wanted: 2000, got: 500, .. }));
    assert!(matches!(shards.read_range(1, b.end - 1, &mut [0]), Err(ShardError::ShortRead { got: 0, .. })));
    match shards.map(&a).unwrap_err() {
        ShardError::Changed { opened, now, .. } => assert_eq!((opened, now), (whole, b.begin + 500)),
        other => panic!("{other}"),
    }
    assert_eq!(mapped[..], hand_made(3)[header_len()..][..6000]);
}

#[test]
fn reads_outside_of_files() {
    let tree = Tree::whole();
    let shards = tree.open().unwrap();
    let len = hand_made(1).len() as u64;
    let mut buf = [0; 8];
    assert!(matches!(shards.read_range(0, len - 7, &mut buf), Err(ShardError::OutOfRange { .. })));
    assert!(matches!(shards.read_range(0, u64::MAX, &mut buf), Err(ShardError::OutOfRange { .. })));
    assert!(matches!(shards.map_range(0, 0, len + 1), Err(ShardError::OutOfRange { .. })));
    assert!(matches!(shards.map_range(0, 9, 8), Err(ShardError::OutOfRange { .. })));
    assert!(matches!(
        shards.read_range(3, 0, &mut buf),
        Err(ShardError::NoSuchShard { shard: 3, shards: 3 })
    ));
    assert!(shards.map_range(0, len, len).unwrap().is_empty());
    for (shard, begin, end) in [(0, 9, 8), (0, len, len + 1), (3, 0, 1), (0, 5, 5), (0, 0, len)] {
        shards.will_need(shard, begin, end);
    }
    // The tensor of another checkpoint.
    let stranger = TensorInfo { name: "x", dtype: Dtype::U8, shape: &[], shard: 9, begin: 0, end: 1 };
    assert!(matches!(shards.read(&stranger), Err(ShardError::NoSuchShard { .. })));
}

/// A sparse file with one tensor of more than 2.2 GiB, with marks at its ends and where one read must stop.
fn large_tensor() -> (Tree, u64) {
    let tree = Tree::empty();
    let len = 2_400_000_000u64;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let start = 8 + header.len() as u64;
    tree.put("model.safetensors", &shard_bytes(&header, &[]));
    let file = fs::OpenOptions::new().write(true).open(tree.path("model.safetensors")).unwrap();
    file.set_len(start + len).unwrap();
    for (at, mark) in marks(len) {
        file.write_all_at(&[mark], start + at).unwrap();
    }
    (tree, len)
}

fn marks(len: u64) -> [(u64, u8); 5] {
    [(0, 1), ((1 << 31) - 4097, 2), ((1 << 31) - 4096, 3), (1 << 31, 4), (len - 1, 5)]
}

#[test]
fn the_ends_of_a_tensor_above_2_gib() {
    let (tree, len) = large_tensor();
    let shards = tree.open().unwrap();
    let tensor = shards.get("t").unwrap();
    assert_eq!(tensor.byte_len(), len);
    let mapped = shards.map(&tensor).unwrap();
    for (at, mark) in marks(len) {
        let mut byte = [0];
        shards.read_range(0, tensor.begin + at, &mut byte).unwrap();
        assert_eq!((byte[0], mapped[at as usize]), (mark, mark), "byte {at}");
    }
}

#[test]
#[ignore = "reads 2.4 GB into memory"]
fn a_whole_tensor_above_2_gib() {
    let (tree, len) = large_tensor();
    let shards = tree.open().unwrap();
    let bytes = shards.read(&shards.get("t").unwrap()).unwrap();
    assert_eq!(bytes.len() as u64, len);
    let found: BTreeMap<_, _> =
        bytes.iter().enumerate().filter(|(_, b)| **b != 0).map(|(at, b)| (at as u64, *b)).collect();
    assert_eq!(found, marks(len).into());
}
