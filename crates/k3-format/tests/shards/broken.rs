//! Shards that are absent, cut, or no weights at all.

use std::fs;
use std::os::unix::fs::FileExt as _;

use k3_format::{AbsentShard, Content, HeaderError, ShardError};
use safetensors::SafeTensors;

use crate::tree::{LFS_POINTER, NAMES, Tree, hand_made, header_len, shard_bytes};

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
