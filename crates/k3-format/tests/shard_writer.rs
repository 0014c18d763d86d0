//! What the shard writer writes, read by the safetensors crate, and what it refuses.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use k3_format::{Dtype, HeaderError, ShardError, ShardWriter, Shards, TensorSpec, write_index};
use safetensors::SafeTensors;

fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype, shape: shape.into() }
}

/// In an order that sorting by name, size or dtype would change.
fn specs() -> Vec<TensorSpec> {
    vec![
        spec("w1.weight_packed", Dtype::U8, &[3, 5]),
        spec("none", Dtype::F32, &[0, 4]),
        spec("norm \"é\"", Dtype::BF16, &[7]),
        spec("a", Dtype::F32, &[]),
        spec("fp4", Dtype::F4, &[2, 3]),
    ]
}

fn data(len: u64, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt)).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_shard_is_readable_by_others_and_by_us() {
    let dir = tempfile::tempdir().unwrap();
    let metadata =
        BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("q\"".to_owned(), "\n".to_owned())]);
    for align in [1, 8, 4096, 65536] {
        let path = dir.path().join("model.safetensors");
        let mut writer = ShardWriter::create(&path, align, &specs(), Some(&metadata)).unwrap();
        for (i, tensor) in specs().iter().enumerate() {
            writer.write_tensor(&data(tensor.byte_len().unwrap(), i as u8)).unwrap();
        }
        let len = writer.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, len);

        let oracle = SafeTensors::deserialize(&bytes).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["q\""], "\n");
        assert_eq!(oracle.len(), 5);
        let shards = Shards::open(dir.path()).unwrap();
        assert!(shards.files()[0].data_start.is_multiple_of(align));
        assert!(shards.iter().map(|t| t.name).eq(specs().iter().map(|t| t.name.as_str())));
        for (i, tensor) in specs().iter().enumerate() {
            let expected = data(tensor.byte_len().unwrap(), i as u8);
            let view = oracle.tensor(&tensor.name).unwrap();
            assert_eq!((view.dtype(), view.data()), (tensor.dtype, &expected[..]), "{}", tensor.name);
            assert!(
                view.shape().iter().map(|&d| d as u64).eq(tensor.shape.iter().copied()),
                "{}",
                tensor.name
            );
            assert_eq!(shards.read(&shards.get(&tensor.name).unwrap()).unwrap(), expected, "{}", tensor.name);
        }
    }
    assert_eq!(names(dir.path()), ["model.safetensors"]);
}

#[test]
fn pieces_of_any_size_give_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    let mut writer = ShardWriter::create(&whole, 4096, &specs(), None).unwrap();
    for (i, tensor) in specs().iter().enumerate() {
        writer.write_tensor(&data(tensor.byte_len().unwrap(), i as u8)).unwrap();
    }
    writer.finish().unwrap();
    for size in [1, 2, 3, 100] {
        let mut writer = ShardWriter::create(&pieces, 4096, &specs(), None).unwrap();
        for (i, tensor) in specs().iter().enumerate() {
            for piece in data(tensor.byte_len().unwrap(), i as u8).chunks(size) {
                writer.write(piece).unwrap();
                writer.write(&[]).unwrap();
            }
        }
        writer.finish().unwrap();
        assert_eq!(fs::read(&whole).unwrap(), fs::read(&pieces).unwrap(), "pieces of {size}");
    }
}

#[test]
fn a_shard_without_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    assert_eq!(ShardWriter::create(&path, 1, &[], None).unwrap().finish().unwrap(), 10);
    assert!(Shards::open(dir.path()).unwrap().is_empty());
}

#[test]
fn wrong_lengths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m");
    let two = [spec("a", Dtype::U8, &[4]), spec("b", Dtype::U8, &[2])];
    let writer = || ShardWriter::create(&path, 1, &two, None).unwrap();
    let check = |result: Result<(), ShardError>, name: &str, bytes: u64| match result {
        Err(ShardError::WriteLength { tensor, got, .. }) => assert_eq!((tensor.as_str(), got), (name, bytes)),
        other => panic!("{other:?}"),
    };
    check(writer().write_tensor(&[0; 3]), "a", 3);
    check(writer().write_tensor(&[0; 5]), "a", 5);
    check(writer().write(&[0; 5]), "a", 5);
    check(writer().finish().map(drop), "a", 0);

    let mut w = writer();
    w.write(&[0; 3]).unwrap();
    check(w.write(&[0; 2]), "a", 5);
    check(w.write_tensor(&[0; 1]), "a", 4);
    w.write(&[0; 1]).unwrap();
    check(w.write_tensor(&[0; 1]), "b", 1);
    w.write(&[0; 1]).unwrap();
    check(w.finish().map(drop), "b", 1);

    let mut w = writer();
    w.write_tensor(&[0; 4]).unwrap();
    w.write_tensor(&[0; 2]).unwrap();
    assert!(matches!(w.write(&[0]), Err(ShardError::WriteBeyondEnd { got: 1, .. })));
    assert!(matches!(w.write_tensor(&[]), Err(ShardError::WriteBeyondEnd { got: 0, .. })));
    w.finish().unwrap();
}

#[test]
fn what_cannot_be_read_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let check = |tensors: &[TensorSpec], accepted: fn(&HeaderError) -> bool| match ShardWriter::create(
        &dir.path().join("m"),
        1,
        tensors,
        None,
    )
    .unwrap_err()
    {
        ShardError::Declared { problem, .. } => assert!(accepted(&problem), "{problem}"),
        other => panic!("{other}"),
    };
    let u8s = |name: &str, shape: &[u64]| spec(name, Dtype::U8, shape);
    check(&[u8s("a", &[1]), u8s("a", &[2])], |e| matches!(e, HeaderError::DuplicateKey { .. }));
    check(&[u8s("__metadata__", &[1])], |e| matches!(e, HeaderError::DuplicateKey { .. }));
    check(&[u8s("a", &[1; 9])], |e| matches!(e, HeaderError::Rank { .. }));
    check(&[u8s(&"n".repeat(65_536), &[1])], |e| matches!(e, HeaderError::LongName { .. }));
    check(&[spec("a", Dtype::F4, &[3])], |e| matches!(e, HeaderError::PartialByte { .. }));
    check(&[u8s("a", &[1 << 40, 1 << 40])], |e| matches!(e, HeaderError::Overflow { .. }));
    check(&[0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i| u8s(&format!("{i}"), &[(1 << 61) - 1])), |e| {
        matches!(e, HeaderError::Overflow { .. })
    });
    for align in [0, u64::MAX, 1 << 40] {
        let result = ShardWriter::create(&dir.path().join("m"), align, &[], None);
        assert!(matches!(result, Err(ShardError::Unwritable { .. })), "{align}");
    }
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn an_abandoned_shard_leaves_the_partial_file_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let one = [spec("a", Dtype::U8, &[4])];
    fs::write(&path, "as before").unwrap();
    let mut writer = ShardWriter::create(&path, 1, &one, None).unwrap();
    writer.write(&[0; 3]).unwrap();
    drop(writer);
    assert_eq!(names(dir.path()), ["m.safetensors", "m.safetensors.partial"]);
    assert_eq!(fs::read(&path).unwrap(), b"as before");

    // The next run begins anew.
    let mut writer = ShardWriter::create(&path, 1, &one, None).unwrap();
    writer.write_tensor(b"wxyz").unwrap();
    writer.finish().unwrap();
    assert_eq!(names(dir.path()), ["m.safetensors"]);
    assert!(fs::read(&path).unwrap().ends_with(b"wxyz"));
}

#[test]
fn nothing_is_written_through_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let [path, blob, partial] = ["m", "blob", "m.partial"].map(|name| dir.path().join(name));
    fs::write(&blob, "sacred").unwrap();
    let one = [spec("a", Dtype::U8, &[4])];

    // A link in the place of the output.
    symlink("blob", &path).unwrap();
    assert!(matches!(ShardWriter::create(&path, 1, &one, None), Err(ShardError::OutputIsLink { .. })));
    fs::remove_file(&path).unwrap();

    // A link in the place of the partial file.
    symlink("blob", &partial).unwrap();
    let refused = ShardWriter::create(&path, 1, &one, None);
    assert!(matches!(refused, Err(ShardError::OutputIsLink { path }) if path == partial));
    fs::remove_file(&partial).unwrap();
    let mut writer = ShardWriter::create(&path, 1, &one, None).unwrap();
    writer.write_tensor(b"wxyz").unwrap();
    // A link that appears while it is written.
    symlink("blob", &path).unwrap();
    assert!(matches!(writer.finish(), Err(ShardError::OutputIsLink { .. })));

    // A dangling link is one as well.
    fs::remove_file(&path).unwrap();
    symlink("nowhere", &path).unwrap();
    assert!(matches!(ShardWriter::create(&path, 1, &one, None), Err(ShardError::OutputIsLink { .. })));
    assert_eq!(fs::read(&blob).unwrap(), b"sacred");
    assert!(!dir.path().join("nowhere").exists());
}

#[test]
fn an_index_makes_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let shards = [("x-1.safetensors", ["a\"", "b"]), ("x-2.safetensors", ["c", "d"])];
    for (shard, tensors) in shards {
        let specs = tensors.map(|name| spec(name, Dtype::U8, &[3]));
        let mut writer = ShardWriter::create(&dir.path().join(shard), 4096, &specs, None).unwrap();
        for _ in tensors {
            writer.write_tensor(b"123").unwrap();
        }
        writer.finish().unwrap();
    }
    let map = || shards.into_iter().flat_map(|(shard, tensors)| tensors.map(|tensor| (tensor, shard)));
    write_index(dir.path(), map(), 12).unwrap();
    let opened = Shards::open(dir.path()).unwrap();
    assert_eq!(opened.len(), 4);
    assert_eq!(opened.get("a\"").map(|t| t.shard), Some(0));
    assert_eq!(names(dir.path()), ["model.safetensors.index.json", "x-1.safetensors", "x-2.safetensors"]);
    let text = fs::read_to_string(dir.path().join("model.safetensors.index.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["metadata"]["total_size"], 12);
    assert_eq!(json["weight_map"]["d"], "x-2.safetensors");

    // Refused halfway: the index of before stays.
    let error = write_index(dir.path(), [("a", "../x")], 1).unwrap_err();
    assert!(matches!(error, ShardError::Unwritable { .. }), "{error}");
    assert_eq!(fs::read_to_string(dir.path().join("model.safetensors.index.json")).unwrap(), text);
}
