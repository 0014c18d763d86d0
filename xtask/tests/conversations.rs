//! `cargo xtask selfcheck` on checkpoints that can be talked to.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use support::{copy, f32s, fixture, i32s, on, program, refusal, selfcheck, with_words};
use tempfile::TempDir;
use xtask::OpenArgs;
use xtask::expect::{Outcome, Tensor, Tensors, read_tensors, write_tensors};
use xtask::selfcheck::{Args, Report};

fn names(report: &Report, outcome: Outcome) -> Vec<&str> {
    report.checks.iter().filter(|c| c.outcome == outcome).map(|c| c.name.as_str()).collect()
}

/// tiny-k31 with the oracle's expectations as two goldens, the second with the logits of the first token only.
fn goldens(change: impl FnOnce(&mut Tensors)) -> TempDir {
    let dir = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    fs::create_dir(dir.path().join("goldens")).unwrap();
    let mut one = read_tensors(&fixture("tiny-k31").join("expected.safetensors")).unwrap();
    let known = ["input_ids", "greedy_ids", "greedy_logits", "index_layers", "cont_index_sel"];
    one.retain(|name, _| known.contains(&name.as_str()));
    let mut two = one.clone();
    let logits = two["greedy_logits"].as_f32().unwrap()[..512].to_vec();
    two.insert("greedy_logits".to_owned(), Tensor::f32([1, 512], logits));
    two.remove("cont_index_sel");
    change(&mut two);
    for (name, tensors) in [("1-one", one), ("2-two", two)] {
        let file = dir.path().join(format!("goldens/{name}.safetensors"));
        write_tensors(&file, &tensors, "a test", false).unwrap();
    }
    dir
}

#[track_caller]
fn fails(change: impl FnOnce(&mut Tensors), failed: &str, note: &str) {
    let dir = goldens(change);
    let (reports, text) = selfcheck(&on(dir.path(), None));
    assert_eq!(names(&reports[0], Outcome::Failed), [failed], "{text}");
    assert!(reports[0].check(failed).unwrap().note.contains(note), "{text}");
}

#[test]
fn goldens_are_expectations() {
    let dir = goldens(|_| {});
    let folder = dir.path().join("goldens");
    // Beside the weights, or named.
    for expect in [None, Some(folder.as_path())] {
        let (reports, text) = selfcheck(&on(dir.path(), expect));
        assert!(reports[0].is_good(), "{text}");
        let passed = names(&reports[0], Outcome::Passed);
        let of = ["goldens greedy_ids", "goldens greedy_logits", "goldens cont_index_sel"];
        assert_eq!(passed, [&["finite"], &of[..]].concat());
        assert_eq!(names(&reports[0], Outcome::Skipped), ["bit-identical cycles"]);
        assert!(text.contains("expectations: 2 goldens; fixed prompt: 16 prompt tokens"), "{text}");
        // Both continuations of 16 tokens; the selections of one, on four layers.
        assert!(text.contains("greedy tokens 32/32, indexer 64/64"), "{text}");
        assert!(text.contains("goldens logits rel-L2 at most"), "{text}");
    }

    let id = |t: &mut Tensors| i32s(t.get_mut("greedy_ids").unwrap())[3] ^= 1;
    fails(id, "goldens greedy_ids", "2-two: first at token 3 after the prompt");
    let logits = |t: &mut Tensors| f32s(t.get_mut("greedy_logits").unwrap())[3] += 1.0;
    fails(logits, "goldens greedy_logits", "2-two: token 0 after the prompt");
    let nan = |t: &mut Tensors| f32s(t.get_mut("greedy_logits").unwrap())[3] = f32::NAN;
    fails(nan, "goldens greedy_logits", "2-two");
    // Within the bound of random weights, outside that of goldens.
    let near =
        |t: &mut Tensors| f32s(t.get_mut("greedy_logits").unwrap()).iter_mut().for_each(|v| *v *= 1.000_02);
    fails(near, "goldens greedy_logits", "2-two");

    let dir = goldens(|t| drop(t.insert("margin".to_owned(), Tensor::f32([1], vec![0.5]))));
    let (reports, text) = selfcheck(&on(dir.path(), None));
    assert!(reports[0].is_good() && text.contains("not known, not compared: margin"), "{text}");
}

#[test]
fn bad_goldens_are_named() {
    let refused = |change: fn(&mut Tensors), why: &str| {
        let error = refusal(&on(goldens(change).path(), None));
        assert!(error.contains("2-two.safetensors") && error.contains(why), "{error}");
    };
    refused(|t| drop(t.remove("input_ids")), "there is no prompt");
    refused(|t| i32s(t.get_mut("input_ids").unwrap())[1] = 512, "below 512, found 512 at 1");
    refused(|t| t.retain(|name, _| name == "input_ids"), "nothing in it that can be compared");
    refused(
        |t| drop(t.insert("greedy_logits".into(), Tensor::f32([17, 512], vec![0.0; 17 * 512]))),
        "[17, 512]",
    );
    refused(|t| drop(t.insert("greedy_ids".into(), Tensor::i32([4090], vec![1; 4090]))), "do not fit");
    let dir = goldens(|_| {});
    for file in ["1-one", "2-two"] {
        fs::remove_file(dir.path().join(format!("goldens/{file}.safetensors"))).unwrap();
    }
    assert!(refusal(&on(dir.path(), None)).contains("nor any other .safetensors file"));
}

/// The prompt of a checkpoint with words is a conversation; without the tokenizer's consent it is none.
#[test]
fn a_control_prompt_is_framed() {
    let dir = with_words();
    let args = Args { cycles: 3, ..on(dir.path(), None) };
    let (reports, text) = selfcheck(&args);
    assert!(reports[0].is_good(), "{text}");
    assert!(text.contains("no expectations; control prompt, framed as a conversation: "), "{text}");
    assert_eq!(names(&reports[0], Outcome::Skipped), ["expectations"]);

    let (_, text) = selfcheck(&Args { tokens: Some(5), ..on(dir.path(), None) });
    assert!(text.contains("no expectations; fixed prompt: 5 prompt tokens"), "{text}");

    let other = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    for file in ["tiktoken.model", "tokenizer_config.json"] {
        fs::copy(fixture("tokenizer/small").join(file), other.path().join(file)).unwrap();
    }
    let error = refusal(&on(other.path(), None));
    assert!(error.contains("1024 ids, the model 512"), "{error}");
}

/// Random weights call no tool: the conversation is shown all the same, and its checks are not passed.
#[test]
fn a_round_trip_that_fails() {
    let dir = with_words();
    let scene = json!({
        "request": {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": {"name": "get_weather"}}],
            "reasoning_effort": "low",
        },
        "call": {"name": "get_weather", "arguments": {"city": "Paris"}},
        "result": "rain, 17 degrees", "answer": ["rain", "17"],
    });
    fs::write(dir.path().join("conversation.json"), scene.to_string()).unwrap();
    let (reports, text) = selfcheck(&on(dir.path(), None));
    assert_eq!(names(&reports[0], Outcome::Failed), ["tool call"], "{text}");
    assert_eq!(names(&reports[0], Outcome::Skipped), ["bit-identical cycles", "tool answer"], "{text}");
    let said: Vec<&str> = text.lines().skip_while(|l| *l != "  conversation:").collect();
    assert!(said[1].starts_with("    user      What is the weather in Paris?"), "{text}");
    assert!(said[2].starts_with("    think     "), "{text}");
    assert!(text.contains("expected get_weather {\"city\":\"Paris\"}, found no call"), "{text}");

    fs::write(dir.path().join("conversation.json"), "{}").unwrap();
    let error = refusal(&on(dir.path(), None));
    assert!(error.contains("conversation.json") && error.contains("expected the key"), "{error}");
}

/// The first layers are held to nothing that is of all of them: it is skipped with the reason or, if it was asked for by
/// name, failed.
#[test]
fn the_first_layers_are_not_the_model() {
    let four = || OpenArgs { layers: Some(4), ..OpenArgs::default() };
    let nano = fixture("nano");
    let (reports, text) = selfcheck(&Args { open: four(), cycles: 2, ..on(&nano, None) });
    assert!(reports[0].is_good(), "{text}");
    assert_eq!(names(&reports[0], Outcome::Passed), ["finite", "bit-identical cycles"], "{text}");
    assert_eq!(names(&reports[0], Outcome::Skipped), ["goldens", "tool call"], "{text}");
    assert!(
        text.contains("note: goldens skipped: 20 of 20 goldens are of all 9 layers, and --layers 4"),
        "{text}"
    );
    assert!(text.contains("note: tool call skipped: conversation.json is of all 9 layers"), "{text}");

    let tiny = fixture("tiny-k31");
    let (reports, text) = selfcheck(&Args { open: four(), cycles: 2, ..on(&tiny, None) });
    assert_eq!(names(&reports[0], Outcome::Skipped), ["expectations"], "{text}");
    assert!(reports[0].is_good() && text.contains("of all 13 layers, and --layers 4"), "{text}");

    let asked = |model: &Path, expect: &Path, failed: &str| {
        let (reports, text) = selfcheck(&Args { open: four(), ..on(model, Some(expect)) });
        assert_eq!(names(&reports[0], Outcome::Failed), [failed], "{text}");
        assert!(reports[0].check(failed).unwrap().note.contains("run without --layers"), "{text}");
        assert!(text.lines().last().unwrap().ends_with("(all layers)"), "{text}");
        assert!(!text.lines().last().unwrap().contains("--layers"), "{text}");
    };
    asked(&nano, &nano.join("goldens"), "goldens");
    asked(&tiny, &tiny.join("expected.safetensors"), "expectations");
    let expect = tiny.join("expected.safetensors");
    let args = ["selfcheck", "--model", tiny.to_str().unwrap(), "--layers", "4", "--expect"];
    let output = program(&[&args[..], &[expect.to_str().unwrap()]].concat(), Stdio::piped());
    assert_eq!(output.status.code(), Some(1));

    // What says nothing of layers is of the model where it stands beside the weights, and of the run if it was named.
    let dir = goldens(|_| {});
    let folder = dir.path().join("goldens");
    for name in ["1-one", "2-two"] {
        let file = folder.join(format!("{name}.safetensors"));
        let mut tensors = read_tensors(&file).unwrap();
        tensors.retain(|name, _| ["input_ids", "greedy_ids"].contains(&name.as_str()));
        fs::remove_file(&file).unwrap();
        write_tensors(&file, &tensors, "a test", false).unwrap();
    }
    let (reports, text) = selfcheck(&Args { open: four(), ..on(dir.path(), None) });
    assert!(names(&reports[0], Outcome::Skipped).contains(&"goldens"), "{text}");
    let (reports, text) = selfcheck(&Args { open: four(), ..on(dir.path(), Some(&folder)) });
    assert_eq!(names(&reports[0], Outcome::Failed), ["goldens greedy_ids"], "{text}");
}
