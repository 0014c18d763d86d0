//! Checkpoint directories as users have them, whole and broken in every known way. All files are made by hand
//! here; the safetensors crate is the second opinion.

mod reads;
mod tree;

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};

use k3_format::{AbsentShard, Content, Dtype, HeaderError, ShardError, Shards, TensorInfo};
use safetensors::SafeTensors;

use crate::tree::{NAMES, Tree, WEIGHT_MAP, fixture, hand_made, header_len, index_of, shard_bytes};

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

// F2: absent shards.

#[test]
fn absent_shards_are_all_named_at_once() {
    for absent in [&[0][..], &[1], &[2], &[0, 2], &[0, 1, 2]] {
        let tree = Tree::whole();
        // Whatever else is wrong: the absent ones come first.
        tree.put(NAMES[(absent[0] + 1) % 3], b"");
        for &i in absent {
            fs::remove_file(tree.path(NAMES[i]))
                .unwrap_or_else(|e| assert_eq!(e.kind(), std::io::ErrorKind::NotFound));
        }
        let found = 3 - absent.len();
        let numbers = format!("found {found} of 3 shards with {} of 6 tensors", 2 * found);
        let mut words =
            vec![numbers.as_str(), "interrupted copy or download", "copy or download the absent files"];
        words.extend(absent.iter().map(|&i| NAMES[i]));
        let ShardError::AbsentShards { absent: names, shards: 3, tensors_found, tensors: 6, .. } =
            tree.refused(&words)
        else {
            panic!("another error")
        };
        let expected: Vec<_> =
            absent.iter().map(|&i| AbsentShard { name: NAMES[i].into(), dangling: None }).collect();
        assert_eq!((names, tensors_found), (expected, 2 * found));
    }
}

// F1: incomplete shards.

fn cut(shard: usize, len: usize, words: &[&str]) -> ShardError {
    let tree = Tree::whole();
    tree.put(NAMES[shard], &hand_made(shard + 1)[..len]);
    tree.refused(&[words, &[NAMES[shard], "interrupted copy or download"]].concat())
}

#[test]
fn a_short_shard_names_the_first_tensor_affected() {
    let (start, whole) = (header_len(), hand_made(1).len());
    for (shard, len, tensor) in [
        (0, whole - 1, "1.b"),
        (1, whole - 1, "2.b"),
        (2, whole - 4096, "3.a"),
        (1, start + 6000, "2.b"),
        (1, start + 5999, "2.a"),
        (0, start + 1, "1.a"),
        (0, start, "1.a"),
    ] {
        let numbers = format!("declares {whole} bytes, found {len}");
        match cut(shard, len, &[&numbers, &format!("first tensor affected is `{tensor}`")]) {
            ShardError::Truncated { declared, found, tensor: Some(name), .. } => {
                assert_eq!((declared, found, name.as_str()), (whole as u64, len as u64, tensor));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_shard_cut_inside_its_header() {
    let start = header_len();
    for len in [8, 9, 40, start - 1] {
        let numbers = format!("needs {start} bytes, found {len}");
        let error = cut(1, len, &[&numbers]);
        assert!(matches!(error, ShardError::Truncated { tensor: None, .. }), "{error}");
    }
}

#[test]
fn a_shard_with_bytes_after_its_end() {
    let tree = Tree::whole();
    tree.put(NAMES[1], &[hand_made(2), vec![0]].concat());
    let whole = hand_made(2).len();
    let numbers = format!("has {} bytes, its header declares {whole}", whole + 1);
    assert!(matches!(tree.refused(&[NAMES[1], &numbers]), ShardError::TrailingBytes { .. }));
}

#[test]
fn several_broken_shards_are_all_reported() {
    let tree = Tree::whole();
    tree.put(NAMES[0], &hand_made(1)[..8000]);
    tree.put(NAMES[2], b"");
    let ShardError::Several(errors) =
        tree.refused(&["2 shards are unusable", NAMES[0], NAMES[2], "an empty file"])
    else {
        panic!("another error")
    };
    assert!(matches!(errors[..], [ShardError::Truncated { .. }, ShardError::WrongContent { .. }]));
}

#[test]
fn a_header_that_declares_more_than_any_file() {
    let tree = Tree::empty();
    let end = u64::MAX / 8;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{end}],"data_offsets":[0,{end}]}}}}"#);
    tree.put("model.safetensors", &shard_bytes(&header, b"1234"));
    tree.refused(&["first tensor affected is `t`"]);
}

// F3: not weights at all.

fn content(bytes: &[u8], words: &[&str]) -> Content {
    let tree = Tree::whole();
    tree.put(NAMES[1], bytes);
    match tree.refused(&[words, &[NAMES[1], "should be a safetensors shard"]].concat()) {
        ShardError::WrongContent { content, .. } => content,
        other => panic!("{other}"),
    }
}

const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n\
    oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 16990916912\n";

#[test]
fn something_else_in_the_place_of_a_shard() {
    assert_eq!(content(LFS_POINTER, &["a git-lfs pointer", "git lfs pull"]), Content::GitLfsPointer);
    assert_eq!(
        content(b"# xet version 0\nfilesize = 3\nhash = 'x'\n", &["a Xet pointer"]),
        Content::XetPointer
    );
    assert_eq!(
        content(b"<!DOCTYPE html>\n<html lang=en>", &["an HTML page", "access rights"]),
        Content::Html
    );
    assert_eq!(content(b"\n  <HTML><head>", &["an HTML page"]), Content::Html);
    assert_eq!(content(b"<?xml version='1.0'?><Error>", &["an XML document"]), Content::Xml);
    assert_eq!(content(br#"{"error":"Entry not found"}"#, &["JSON text"]), Content::Json);
    assert_eq!(content(b"[ 1 ]", &["JSON text"]), Content::Json);
    assert_eq!(
        content(b"Entry not found", &["text that begins with \"Entry not found\""]),
        Content::Text("Entry not found".into())
    );
    assert_eq!(content(b"", &["an empty file", "free space"]), Content::Empty);
    assert_eq!(content(b"1234567", &["text that begins"]), Content::Text("1234567".into()));
    assert_eq!(
        content(&[1, 2, 3, 4, 5, 6, 7], &["bytes 01 02 03 04 05 06 07"]),
        Content::Unknown(vec![1, 2, 3, 4, 5, 6, 7])
    );
    assert_eq!(content(&[0xff; 8], &["bytes ff ff ff ff ff ff ff ff"]), Content::Unknown(vec![0xff; 8]));
    assert_eq!(content(b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", &["a GGUF model"]), Content::Gguf);
    assert_eq!(content(b"PK\x03\x04\0\0\x08\x08\0\0", &["a zip archive"]), Content::Zip);
    assert_eq!(content(&[0; 9000], &["zeros at its beginning"]), Content::Zeros);
    // A plausible length, but no header behind it.
    let unknown = [&100u64.to_le_bytes()[..], &[7; 200]].concat();
    assert_eq!(content(&unknown, &["no safetensors header"]), Content::Unknown(unknown[..16].to_vec()));
}

#[test]
fn a_header_length_beyond_the_limit_is_not_allocated() {
    let tree = Tree::empty();
    let file = fs::File::create(tree.path("model.safetensors")).unwrap();
    // Sparse, so long enough that the length alone would be believed.
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&[&(1u64 << 39).to_le_bytes()[..], b"{"].concat(), 0).unwrap();
    assert!(matches!(tree.refused(&["bytes 00 00 00 00 80"]), ShardError::WrongContent { .. }));
}

#[test]
fn a_header_that_breaks_the_format() {
    let tree = Tree::whole();
    let header = r#"{"2.a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}"#;
    tree.put(NAMES[1], &shard_bytes(header, b"x"));
    match tree.refused(&[NAMES[1], "tensor `2.a` has the unknown dtype \"Q4\""]) {
        ShardError::Header { problem: HeaderError::UnknownDtype { tensor, .. }, .. } => {
            assert_eq!(tensor, "2.a");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn damaged_files_never_panic() {
    let whole = hand_made(1);
    let tree = Tree::empty();
    let mut state = 42u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let mut refused = 0;
    for _ in 0..500 {
        let mut bytes = whole.clone();
        for _ in 0..=below(4) {
            bytes[below(header_len())] = below(256) as u8;
        }
        bytes.truncate(bytes.len() - below(3) * below(whole.len() / 2));
        tree.put("model.safetensors", &bytes);
        match tree.open() {
            // What is accepted must be what the file says.
            Ok(shards) => {
                let oracle = SafeTensors::deserialize(&bytes).unwrap();
                for t in shards.iter() {
                    assert_eq!(oracle.tensor(t.name).unwrap().data(), shards.read(&t).unwrap());
                }
            }
            Err(e) => refused += usize::from(e.to_string().contains("model.safetensors")),
        }
    }
    assert!(refused > 250, "{refused}");
}

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

// F9: reads.
