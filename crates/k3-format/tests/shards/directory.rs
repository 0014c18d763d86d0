//! Directories and indices: as a hub leaves them, of something else, contradicting their shards.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use k3_format::{Content, ShardError, Shards};

use crate::tree::{LFS_POINTER, NAMES, Tree, WEIGHT_MAP, hand_made, header_len, index_of, shard_bytes};

// F4: the layout of a hub cache.

#[test]
fn a_hub_cache() {
    let tree = Tree::empty();
    let (blobs, snapshot) = (tree.path("blobs"), tree.path("snapshots/f831ab66"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let add = |blob: &str, name: &str, bytes: &[u8]| {
        fs::write(blobs.join(blob), bytes).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    };
    for (i, name) in NAMES.iter().enumerate() {
        add(&format!("b{i}"), name, &hand_made(i + 1));
    }
    add("index", "model.safetensors.index.json", index_of(&WEIGHT_MAP).as_bytes());
    let shards = Shards::open(&snapshot).unwrap();
    assert_eq!(shards.read(&shards.get("2.a").unwrap()).unwrap()[..], hand_made(2)[header_len()..][..6000]);

    // The folder above the snapshot.
    assert!(tree.refused(&["give the folder of one revision"]).to_string().contains("snapshots"));

    fs::remove_file(blobs.join("b1")).unwrap();
    let error = Shards::open(&snapshot).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains(&format!("{} (a link to `../../blobs/b1`, which does not exist)", NAMES[1])),
        "{message}"
    );
    assert!(message.contains("found 2 of 3 shards with 4 of 6 tensors"), "{message}");
    // What was open stays readable.
    assert_eq!(shards.read(&shards.get("2.a").unwrap()).unwrap()[..], hand_made(2)[header_len()..][..6000]);

    fs::remove_file(blobs.join("index")).unwrap();
    match Shards::open(&snapshot).unwrap_err() {
        ShardError::DanglingLink { link, target } => {
            assert_eq!(link, snapshot.join("model.safetensors.index.json"));
            assert_eq!(target, Path::new("../../blobs/index"));
        }
        other => panic!("{other}"),
    }
}

// The directory and the index.

#[test]
fn no_checkpoint_directory() {
    let tree = Tree::empty();
    let open = |path: PathBuf| Shards::open(&path).unwrap_err();
    assert!(matches!(open(tree.path("nowhere")), ShardError::NoDirectory { .. }));
    tree.put("file", b"x");
    assert!(matches!(open(tree.path("file")), ShardError::NotADirectory { .. }));
    symlink("gone", tree.path("link")).unwrap();
    assert!(matches!(open(tree.path("link")), ShardError::DanglingLink { .. }));
}

#[test]
fn no_index() {
    for (file, words) in [
        (None, "it is empty"),
        (Some("kimi-k3-q4.gguf"), "1 GGUF file(s)"),
        (Some("pytorch_model-00001-of-00002.bin"), "1 PyTorch file(s)"),
        (Some(NAMES[0]), "1 .safetensors file(s): download model.safetensors.index.json"),
        (Some("README.md"), "1 other file(s)"),
        (
            Some("model-00001-of-000002.safetensors.partial"),
            "1 unfinished file(s) *.partial and 0 finished .safetensors file(s): the program that wrote it was \
             interrupted",
        ),
    ] {
        let tree = Tree::empty();
        if let Some(file) = file {
            tree.put(file, b"x");
        }
        assert!(matches!(tree.refused(&["holds neither", words]), ShardError::NoIndex { .. }));
    }
}

fn index(text: &[u8], words: &[&str]) -> ShardError {
    let tree = Tree::whole();
    tree.put("model.safetensors.index.json", text);
    tree.refused(&[words, &["model.safetensors.index.json"]].concat())
}

#[test]
fn an_invalid_index() {
    index(
        b"{\"weight_map\":{\"a\":\n7}}",
        &["invalid type: integer `7`, expected a string at line 2 column 1"],
    );
    index(br#"{"weight_map":{"a":"b""#, &["EOF while parsing an object at line 1 column 22"]);
    index(br#"{"weight_map":[]}"#, &["expected `weight_map` to map tensor names to shard file names"]);
    index(br#"{"weight_map":{}}"#, &["names no tensor"]);
    index(br#"{"metadata":{}}"#, &["missing field `weight_map`"]);
    index(br#"{"weight_map":{},"weight_map":{}}"#, &["duplicate field `weight_map`"]);
    index(b"{\"weight_map\":{\"\xff\":\"b\"}}", &["not UTF-8 after byte 16"]);
    for (text, expected) in [
        (&b""[..], Content::Empty),
        (LFS_POINTER, Content::GitLfsPointer),
        (b"<html>", Content::Html),
        (b"[]", Content::Json),
    ] {
        match index(text, &["should be the index of a checkpoint"]) {
            ShardError::WrongContent { content, .. } => assert_eq!(content, expected),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn names_in_an_index_cannot_act_on_a_terminal() {
    let error = index(
        index_of(&[("\\u001b[1A\\nall is well", NAMES[0])]).as_bytes(),
        &["control character", r"\u{1b}[1A\nall is well"],
    );
    assert!(!error.to_string().contains(char::is_control), "{error}");
}

#[test]
fn shard_names_stay_in_the_directory() {
    for name in [
        "../m.safetensors",
        "/etc/passwd",
        "a/b",
        "a/",
        "./a",
        ".",
        "..",
        "",
        "a\\\\b",
        "a\\u0000b",
        "a\\n",
        "\\u001b[1A",
    ] {
        let error = index(index_of(&[("1.a", name)]).as_bytes(), &["plain file name"]);
        assert!(matches!(error, ShardError::ShardName { .. }), "{name}: {error}");
    }
}

#[test]
fn an_index_that_does_not_match_the_headers() {
    // A name that no shard has.
    let extra = [&WEIGHT_MAP[..], &[("1.c", NAMES[0]), ("1.d", NAMES[0])]].concat();
    let words = ["2 tensor(s)", "the first: `1.c`", NAMES[0], "no shard holds it"];
    assert!(matches!(index(index_of(&extra).as_bytes(), &words), ShardError::NotInShard { count: 2, .. }));

    // A name in the wrong shard.
    let mut swapped = WEIGHT_MAP;
    swapped[0].1 = NAMES[0];
    let words = ["1 tensor(s)", "`3.a`", "it is in `model-00003"];
    assert!(matches!(index(index_of(&swapped).as_bytes(), &words), ShardError::NotInShard { count: 1, .. }));

    // A name left out.
    let words = ["1 tensor(s)", "does not name", "`3.a`", NAMES[2]];
    assert!(matches!(
        index(index_of(&WEIGHT_MAP[1..]).as_bytes(), &words),
        ShardError::NotInIndex { count: 1, .. }
    ));

    // A name twice.
    let twice = [&WEIGHT_MAP[..], &WEIGHT_MAP[..1]].concat();
    index(index_of(&twice).as_bytes(), &["it has the tensor `3.a` twice"]);
}

#[test]
fn a_tensor_in_two_shards() {
    let tree = Tree::whole();
    tree.put(NAMES[2], &hand_made(1));
    match tree.refused(&["`1.a` stands in two shards", NAMES[0], NAMES[2]]) {
        ShardError::DuplicateTensor { tensor, .. } => assert_eq!(tensor, "1.a"),
        other => panic!("{other}"),
    }
}

#[test]
fn a_directory_or_a_pipe_in_the_place_of_a_shard() {
    let tree = Tree::whole();
    fs::remove_file(tree.path(NAMES[1])).unwrap();
    fs::create_dir(tree.path(NAMES[1])).unwrap();
    assert!(matches!(tree.refused(&[NAMES[1], "not a regular file"]), ShardError::NotAFile { .. }));
    fs::remove_dir(tree.path(NAMES[1])).unwrap();
    symlink("/dev/zero", tree.path(NAMES[1])).unwrap();
    assert!(matches!(tree.refused(&[NAMES[1], "not a regular file"]), ShardError::NotAFile { .. }));
}

#[test]
fn a_link_to_itself() {
    let tree = Tree::whole();
    fs::remove_file(tree.path(NAMES[1])).unwrap();
    symlink(NAMES[1], tree.path(NAMES[1])).unwrap();
    assert!(matches!(tree.refused(&["cannot open", NAMES[1], "symbolic link"]), ShardError::Io { .. }));
}

#[test]
fn causes_are_said_once_wherever_they_are() {
    let broken = shard_bytes(r#"{"2.a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}"#, b"x");
    let cause = "tensor `2.a` has the unknown dtype \"Q4\"";
    let tree = Tree::whole();
    tree.put(NAMES[1], &broken);
    let error = tree.refused(&[cause]);
    assert!(!error.to_string().contains(cause), "{error}");
    // Among several it has no other place than the message.
    tree.put(NAMES[2], &broken);
    let error = tree.refused(&[NAMES[1], NAMES[2]]);
    assert_eq!(error.to_string().matches(cause).count(), 2, "{error}");
    assert!(std::error::Error::source(&error).is_none());
}

#[test]
fn the_index_decides_if_there_is_one() {
    // A single file beside it is no part of the checkpoint, whatever it holds.
    let tree = Tree::whole();
    for bytes in [&hand_made(4)[..], b"", b"<html>"] {
        tree.put("model.safetensors", bytes);
        let shards = tree.open().unwrap();
        assert_eq!((shards.len(), shards.files().len()), (6, 3));
        assert!(shards.get("4.a").is_none());
    }
    // A shard that the index does not name is not read, either.
    tree.put("model-00004-of-000004.safetensors", &hand_made(4));
    assert_eq!(tree.open().unwrap().len(), 6);
    // A broken index is not passed over for the single file.
    tree.put("model.safetensors", &hand_made(4));
    tree.put("model.safetensors.index.json", b"");
    assert!(matches!(tree.refused(&["an empty file"]), ShardError::WrongContent { .. }));
    fs::remove_file(tree.path("model.safetensors.index.json")).unwrap();
    symlink("gone", tree.path("model.safetensors.index.json")).unwrap();
    assert!(matches!(tree.refused(&["gone"]), ShardError::DanglingLink { .. }));
    // An index may also name the single file.
    fs::remove_file(tree.path("model.safetensors.index.json")).unwrap();
    let map = [("4.a", "model.safetensors"), ("4.b", "model.safetensors")];
    tree.put("model.safetensors.index.json", index_of(&map).as_bytes());
    assert_eq!(tree.open().unwrap().len(), 2);
}

#[test]
fn shards_without_an_index_are_not_put_together() {
    let tree = Tree::whole();
    fs::remove_file(tree.path("model.safetensors.index.json")).unwrap();
    let words = ["holds neither", "3 .safetensors file(s): download model.safetensors.index.json"];
    assert!(matches!(tree.refused(&words), ShardError::NoIndex { .. }));
    // One of the name that needs no index is the whole checkpoint, by its name.
    tree.put("model.safetensors", &hand_made(4));
    let shards = tree.open().unwrap();
    assert_eq!(shards.iter().map(|t| t.name).collect::<Vec<_>>(), ["4.a", "4.b"]);
}
