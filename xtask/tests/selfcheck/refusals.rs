//! Expectations and arguments that are refused, and what is said of them.

use std::fs;

use xtask::expect::{Tensor, Tensors};
use xtask::selfcheck::Args;

use crate::first;
use crate::support::{changed, copy, fixture, on, refusal, temporary};

/// Malformed expectations are refused with this in the message.
#[track_caller]
fn check_refused(change: impl FnOnce(&mut Tensors), parts: &[&str]) {
    let (_dir, file) = changed("tiny-k31", change);
    let error = refusal(&on(fixture("tiny-k31"), Some(&file)));
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn malformed_expectations() {
    let put = |name: &'static str, tensor: Tensor| {
        move |t: &mut Tensors| {
            t.insert(name.to_owned(), tensor);
        }
    };
    check_refused(
        put("logits", Tensor::f32([2, 2], vec![0.0; 4])),
        &["`logits`", "[80, 512]", "[2, 2]", "changed.safetensors"],
    );
    check_refused(put("router_idx", Tensor::f32([1], vec![0.0])), &["`router_idx`", "I32", "F32"]);
    check_refused(put("input_ids", Tensor::i32([0], vec![])), &["`input_ids`"]);
    check_refused(put("input_ids", Tensor::i32([1], vec![512])), &["`input_ids`", "512"]);
    check_refused(put("input_ids", Tensor::i32([1], vec![-1])), &["`input_ids`", "-1"]);
    check_refused(put("kda_layers", Tensor::i32([9], vec![0; 9])), &["`kda_layers`", "[0, 1, 2, 4"]);
    check_refused(put("greedy_ids", Tensor::i32([], vec![1])), &["`greedy_ids`", "[]"]);
    check_refused(
        put("input_ids", Tensor::i32([5000], vec![1; 5000])),
        &["5000 prompt tokens", "context of 4096"],
    );
    check_refused(
        |t| {
            t.remove("input_ids");
        },
        &["no prompt", "input_ids"],
    );
}

#[test]
fn files_that_are_no_expectations() {
    let (dir, empty) = (temporary(), temporary());
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let cases = [
        (dir.path().join("absent.safetensors"), "no such file"),
        (file("short.safetensors", &[1, 2, 3]), "short.safetensors"),
        (file("long.safetensors", &[0xff; 64]), "long.safetensors"),
        (file("broken.json", b"{"), "is not JSON"),
        (file("wrong.json", b"{\"prompt\": [1, \"2\"]}"), "`prompt`"),
        (file("other.txt", b""), "other.txt"),
        // The first of its files.
        (dir.path().to_owned(), "long.safetensors"),
        (empty.path().to_owned(), "holds neither"),
    ];
    for (path, part) in cases {
        let error = refusal(&on(fixture("tiny-k3"), Some(&path)));
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn a_cut_shard_is_named() {
    let dir = copy("tiny-k31", &[]);
    let shard = dir.path().join("model-00002-of-000003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 4096]).unwrap();
    let error = refusal(&on(dir.path(), None));
    assert!(error.contains("model-00002-of-000003.safetensors"), "{error}");
    assert!(error.contains(&(bytes.len() - 4096).to_string()), "{error}");
}

#[test]
fn arguments_that_cannot_be_honoured() {
    let model = || fixture("tiny-k3");
    let bare = copy("tiny-k3", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    let cases = [
        (Args { chunk: Some(0), ..on(model(), None) }, "--chunk 0"),
        (Args { tokens: Some(0), ..on(model(), None) }, "--tokens 0"),
        (Args { tokens: Some(4), ..on(model(), None) }, "the prompt comes from"),
        (
            Args { tokens: Some(100_000_000_000), ..on(bare.path(), None) },
            "--tokens 100000000000 does not fit the model's context of 4096",
        ),
        (Args { tokens: Some(4097), ..on(bare.path(), None) }, "--tokens 4097"),
        (Args { threads: 1025, ..on(model(), None) }, "1025 threads"),
        (Args { open: first(14), ..on(model(), None) }, "14 layers asked for"),
        (Args { open: first(1), ..Args::default() }, "--model DIR"),
        (on("/no/such/checkpoint", None), "/no/such/checkpoint"),
    ];
    for (args, part) in cases {
        let error = refusal(&args);
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}
