//! `cargo xtask trace`, through its library entry.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use support::{changed, copy, fixture, i32s, on, selfcheck, temporary, unread};
use xtask::expect::{Outcome, Tensor, Tensors, read_tensors, write_tensors};
use xtask::selfcheck::{self, DeviceName};
use xtask::trace::{Args, run};
use xtask::{LoadName, OpenArgs};

fn args(model: &str, out: PathBuf) -> Args {
    Args {
        model: fixture(model),
        ids: vec![3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4],
        ids_file: None,
        open: OpenArgs::default(),
        inject: None,
        greedy: Some(4),
        device: DeviceName::Cpu,
        threads: 2,
        out,
        force: false,
    }
}

fn distance(found: &Tensors, expected: &Tensors, name: &str) -> f64 {
    let of = |tensors: &Tensors| tensors[name].as_f32().unwrap().to_vec();
    let (found, expected) = (of(found), of(expected));
    assert_eq!(found.len(), expected.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let error = squares(&mut found.iter().zip(&expected).map(|(f, e)| f64::from(*f) - f64::from(*e)));
    (error / squares(&mut expected.iter().map(|e| f64::from(*e)))).sqrt()
}

/// A trace, read back as the expectations of another run opened in the same way, which skips this.
fn roundtrip(model: &str, open: &OpenArgs, skips: &[&str]) -> (Tensors, String) {
    let dir = temporary();
    let out = dir.path().join("run.safetensors");
    run(&Args { open: open.clone(), ..args(model, out.clone()) }).unwrap();
    let check = selfcheck::Args { open: open.clone(), ..on(fixture(model), Some(&out)) };
    let (reports, text) = selfcheck(&check);
    assert!(reports[0].is_good(), "{text}");
    // Nothing that could be in a trace is missing: what is skipped is in no file of tensors.
    let skipped = reports[0].checks.iter().filter(|c| c.outcome == Outcome::Skipped);
    assert_eq!(skipped.map(|c| c.name.as_str()).collect::<Vec<_>>(), skips, "{text}");
    assert!(reports[0].unknown.is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "one file, and no other beside it");
    (read_tensors(&out).unwrap(), text)
}

fn first(layers: usize) -> OpenArgs {
    OpenArgs { layers: Some(layers), ..OpenArgs::default() }
}

#[test]
fn roundtrip_k3() {
    roundtrip("tiny-k3", &OpenArgs::default(), &["bit-identical cycles"]);
}

#[test]
fn roundtrip_k31() {
    roundtrip("tiny-k31", &OpenArgs::default(), &["bit-identical cycles"]);
}

#[test]
fn roundtrip_of_four_layers() {
    roundtrip("tiny-k31", &first(4), &["bit-identical cycles"]);
}

#[test]
fn roundtrip_mapped() {
    let open = OpenArgs { load: LoadName::Map, ..OpenArgs::default() };
    let (_, text) = roundtrip("tiny-k31", &open, &["bit-identical cycles"]);
    assert!(text.contains("of weights mapped at"), "{text}");
}

/// Without the indexer nothing of it is in the trace, and the run is that of another function.
#[test]
fn roundtrip_without_the_indexer() {
    let open = OpenArgs { ignore_indexer: true, ..OpenArgs::default() };
    let skips = ["bit-identical cycles", "index_sel", "index_scores", "index_keys", "cont_index_sel"];
    let (without, text) = roundtrip("tiny-k31", &open, &skips);
    assert!(
        text.starts_with("tiny-k31: Kimi K3.1 Pro with its indexer IGNORED (attends as Kimi K3)"),
        "{text}"
    );
    assert!(!without.keys().any(|name| name.contains("index_")), "{:?}", without.keys());
    let (with, _) = roundtrip("tiny-k31", &OpenArgs::default(), &["bit-identical cycles"]);
    assert_eq!(with.keys().filter(|name| name.contains("index_")).count(), 6);
    // 20 tokens against top-16: the first 16 rows attend to everything either way.
    let (a, b) = (with["logits"].as_f32().unwrap(), without["logits"].as_f32().unwrap());
    assert_eq!(a[..16 * 512], b[..16 * 512]);
    assert_ne!(a[16 * 512..], b[16 * 512..]);
}

#[test]
fn the_last_of_three_layers() {
    let dir = temporary();
    let out = dir.path().join("run.safetensors");
    run(&Args { open: first(3), greedy: Some(0), ..args("tiny-k3", out.clone()) }).unwrap();
    let tensors = read_tensors(&out).unwrap();
    assert_eq!(tensors["attn_in"].shape, [3, 20, 128]);
    assert_eq!(tensors["logits"].shape, [20, 512]);
    assert_eq!(tensors["router_layers"].as_i32().unwrap(), [1, 2]);
    assert!(!tensors.contains_key("greedy_ids") && !tensors.contains_key("mla_layers"));
}

/// The trace of a fixture's own prompt is that of the fixture.
#[test]
fn as_the_fixture() {
    let dir = temporary();
    let prompt = dir.path().join("prompt.txt");
    let expected = read_tensors(&fixture("tiny-k31").join("expected.safetensors")).unwrap();
    fs::write(&prompt, format!("{:?}\n", expected["input_ids"].as_i32().unwrap())).unwrap();
    let out = dir.path().join("run.safetensors");
    let ids =
        Args { ids: Vec::new(), ids_file: Some(prompt), greedy: Some(16), ..args("tiny-k31", out.clone()) };
    run(&ids).unwrap();
    let found = read_tensors(&out).unwrap();
    for (name, tensor) in &expected {
        assert_eq!(found[name].shape, tensor.shape, "{name}");
        assert_eq!(found[name].dtype(), tensor.dtype(), "{name}");
        if tensor.as_i32().is_some() {
            assert_eq!(found[name], *tensor, "{name}");
        }
    }
    // Gaps are differences of nearly equal numbers: absolute, and infinite at the same places.
    for name in ["router_gap", "index_gap"] {
        let (found, expected) = (found[name].as_f32().unwrap(), expected[name].as_f32().unwrap());
        let near = |(f, e): (&f32, &f32)| f == e || (f - e).abs() < 2e-5;
        assert!(found.iter().zip(expected).all(near), "{name}");
    }
}

#[test]
fn injected_inputs_give_the_outputs_of_the_fixture() {
    for model in ["tiny-k3", "tiny-k31", "dims-k31"] {
        let dir = temporary();
        let out = dir.path().join("run.safetensors");
        let theirs = fixture(model).join("trace.safetensors");
        let expected = read_tensors(&fixture(model).join("expected.safetensors")).unwrap();
        let ids = expected["input_ids"].as_i32().unwrap().iter().map(|&id| id as u32).collect();
        run(&Args { ids, inject: Some(theirs.clone()), greedy: None, ..args(model, out.clone()) }).unwrap();
        let (found, expected) = (read_tensors(&out).unwrap(), read_tensors(&theirs).unwrap());
        assert_eq!(found["attn_in"], expected["attn_in"]);
        assert_eq!(found["mlp_in"], expected["mlp_in"]);
        for name in ["attn_out", "mlp_out"] {
            let distance = distance(&found, &expected, name);
            assert!(distance < 1e-6, "{model}: {name} {distance:.1e}");
        }
        assert!(!found.contains_key("greedy_ids"));
    }
}

/// A refused command names this, and writes nothing.
#[track_caller]
fn refused(args: &Args, part: &str) {
    let error = format!("{:#}", run(args).expect_err("it ran"));
    assert!(error.contains(part), "`{part}` is not in: {error}");
}

#[test]
fn refusals() {
    let dir = temporary();
    let out = dir.path().join("run.safetensors");
    let base = args("tiny-k3", out.clone());
    let text = dir.path().join("ids.txt");
    fs::write(&text, "1, 2, three").unwrap();

    refused(&Args { ids: vec![512], ..base.clone() }, "512");
    refused(&Args { ids: Vec::new(), ids_file: Some(text), ..base.clone() }, "`three`");
    refused(&Args { ids: vec![1; 4097], ..base.clone() }, "context of 4096");
    refused(&Args { open: first(0), ..base.clone() }, "0 layers");
    refused(&Args { out: fixture("tiny-k3").join("run.safetensors"), ..base.clone() }, "only read");
    refused(
        &Args { out: Path::new("/no/such/folder/run.safetensors").into(), ..base.clone() },
        "/no/such/folder",
    );
    let theirs = fixture("tiny-k3").join("trace.safetensors");
    let inject = |file: &Path| Args { inject: Some(file.to_owned()), greedy: None, ..base.clone() };
    refused(&inject(&theirs), "`attn_in`");
    refused(&Args { greedy: Some(4), ..inject(&theirs) }, "--greedy 4");
    refused(&Args { ids: Vec::new(), ..inject(&theirs) }, "there is no prompt");
    refused(&Args { greedy: Some(usize::MAX), ..base.clone() }, "too many tokens");
    refused(&Args { greedy: Some(4090), ..base.clone() }, "20 prompt tokens and 4090 after them");
    let (_dir, file) = changed("tiny-k3", |t| i32s(t.get_mut("input_ids").unwrap())[0] = -1);
    refused(&inject(&file), "-1 is no token id");
    refused(&Args { threads: 1_000_000, ..base.clone() }, "at most 1024");
    for name in ["run.st", "run", ".safetensors", "run.safetensors.gz"] {
        refused(&Args { out: dir.path().join(name), ..base.clone() }, "has to end in .safetensors");
    }
    assert!(!out.exists());

    fs::write(&out, "mine").unwrap();
    refused(&base, "--force");
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    run(&Args { force: true, ..base }).unwrap();
    assert!(read_tensors(&out).unwrap().contains_key("logits"));
}

/// Neither a link at the place of the file nor one at that of the unfinished file is followed.
#[cfg(unix)]
#[test]
fn links_are_not_written_through() {
    let dir = temporary();
    let (target, link) = (dir.path().join("target"), dir.path().join("link.safetensors"));
    fs::write(&target, "theirs").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for force in [false, true] {
        refused(&Args { force, open: first(1), ..args("tiny-k3", link.clone()) }, "symbolic link");
    }
    let out = dir.path().join("run.safetensors");
    std::os::unix::fs::symlink(&target, dir.path().join("run.safetensors.partial")).unwrap();
    refused(&Args { open: first(1), ..args("tiny-k3", out.clone()) }, "run.safetensors.partial");
    assert_eq!(fs::read(&target).unwrap(), b"theirs");
    assert!(!out.exists());
}

/// What is wrong with the place is said before anything is opened or run: here, a checkpoint that is not there.
#[cfg(unix)]
#[test]
fn the_place_is_checked_first() {
    let dir = temporary();
    let place = |name: &str| dir.path().join(name);
    let base =
        Args { force: true, model: "/no/such/checkpoint".into(), ..args("tiny-k3", place("x.safetensors")) };
    refused(&base, "/no/such/checkpoint");
    refused(&Args { out: place("x.st"), ..base.clone() }, "has to end in .safetensors");
    std::os::unix::fs::symlink("/no/such/file", place("link.safetensors")).unwrap();
    refused(&Args { out: place("link.safetensors"), ..base.clone() }, "symbolic link");
    std::os::unix::fs::symlink("/no/such/file", place("left.safetensors.partial")).unwrap();
    refused(
        &Args { out: place("left.safetensors"), ..base.clone() },
        "left.safetensors.partial is a symbolic link",
    );
    let socket = place("socket.safetensors");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    refused(&Args { out: socket, ..base.clone() }, "not a regular file");
    fs::create_dir(place("folder.safetensors")).unwrap();
    refused(&Args { out: place("folder.safetensors"), ..base }, "is a directory");
}

/// In the layout of the hub's cache, the files of a snapshot are links into another folder.
#[cfg(unix)]
#[test]
fn a_checkpoint_behind_links_is_not_written_to() {
    let cache = temporary();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/main"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(&blobs).unwrap();
    support::copy_to(&blobs, "tiny-k3", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    let mut files = fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
    let shard = files.find(|path| path.extension().is_some_and(|e| e == "safetensors")).unwrap();
    let before = fs::read(&shard).unwrap();
    let base = Args {
        model: snapshot.clone(),
        force: true,
        open: first(1),
        ..args("tiny-k3", cache.path().join("run.safetensors"))
    };
    refused(&Args { out: shard.clone(), ..base.clone() }, "only read");
    refused(&Args { out: blobs.join("run.safetensors"), ..base.clone() }, "only read");
    refused(&Args { out: snapshot.join("run.safetensors"), ..base.clone() }, "only read");
    assert_eq!(fs::read(&shard).unwrap(), before);
    run(&base).unwrap();
}

/// Inputs that say what prompt they are of need no other, and take no other.
#[test]
fn the_prompt_of_injected_inputs() {
    let dir = temporary();
    let inputs = dir.path().join("inputs.safetensors");
    let out = dir.path().join("run.safetensors");
    let mut tensors = read_tensors(&fixture("tiny-k3").join("trace.safetensors")).unwrap();
    let prompt = read_tensors(&fixture("tiny-k3").join("expected.safetensors")).unwrap()["input_ids"].clone();
    tensors.insert("input_ids".to_owned(), prompt.clone());
    write_tensors(&inputs, &tensors, "a test", false).unwrap();
    let base =
        Args { ids: Vec::new(), inject: Some(inputs), greedy: Some(0), ..args("tiny-k3", out.clone()) };
    run(&base).unwrap();
    assert_eq!(read_tensors(&out).unwrap()["input_ids"], prompt);

    let mut ids: Vec<u32> = prompt.as_i32().unwrap().iter().map(|&id| id as u32).collect();
    run(&Args { ids: ids.clone(), force: true, ..base.clone() }).unwrap();
    ids[7] ^= 1;
    refused(&Args { ids: ids.clone(), force: true, ..base.clone() }, "at position 7 expected ");
    refused(&Args { ids: ids[..7].to_vec(), force: true, ..base.clone() }, "found the end");
    tensors.insert("input_ids".to_owned(), Tensor::i32([0], Vec::new()));
    let empty = dir.path().join("empty.safetensors");
    write_tensors(&empty, &tensors, "a test", false).unwrap();
    refused(&Args { inject: Some(empty), force: true, ..base }, "`input_ids`: expected I32 [tokens]");
}

/// The file is what a trace is for: it is written, and nobody reading what is said about it is no error.
#[test]
fn a_closed_pipe_loses_no_trace() {
    let dir = temporary();
    let (model, out) = (fixture("tiny-k3"), dir.path().join("run.safetensors"));
    let (model, file) = (model.to_str().unwrap(), out.to_str().unwrap());
    let args = ["trace", "--model", model, "--layers", "1", "--ids", "1,2", "--greedy", "0", "--out", file];
    assert_eq!(unread(&args), (Some(0), String::new()));
    assert!(read_tensors(&out).unwrap().contains_key("logits"));
}

/// The config asks for rows of 16 million keys: said before anything is recorded.
#[test]
fn a_recording_larger_than_memory_is_refused() {
    let model = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    let config = model.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let huge = text.replace("\"index_topk\": 16,", "\"index_topk\": 16777216,");
    assert_ne!(text, huge);
    fs::write(&config, huge).unwrap();
    let dir = temporary();
    let out = dir.path().join("run.safetensors");
    let base = Args { model: model.path().into(), ids: (0..80).collect(), ..args("tiny-k31", out) };
    // 4 full-attention layers, 80 prompt tokens.
    refused(&base, "`index_sel` [4, 80, 16777216] with 21474836480 bytes");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // What records nothing of it runs.
    let open = OpenArgs { ignore_indexer: true, ..first(1) };
    run(&Args { open, ..base }).unwrap();
    let (reports, text) = selfcheck(&on(model.path(), None));
    assert!(reports[0].is_good(), "{text}");
}
