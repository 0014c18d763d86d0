//! `cargo xtask selfcheck` on checkpoints that can be talked to.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::fs;

use serde_json::json;
use support::{copy, f32s, fixture, i32s, on, refusal, selfcheck, with_words};
use xtask::expect::{Outcome, Tensor, Tensors, read_tensors, write_tensors};
use xtask::selfcheck::{Args, Report};

fn names(report: &Report, outcome: Outcome) -> Vec<&str> {
    report.checks.iter().filter(|c| c.outcome == outcome).map(|c| c.name.as_str()).collect()
}

/// The oracle's prompt, last logits and continuation of tiny-k31 as a dialogue, and a second one without logits.
fn dialogues() -> Tensors {
    let all = read_tensors(&fixture("tiny-k31").join("expected.safetensors")).unwrap();
    let logits = all["logits"].as_f32().unwrap();
    let last = Tensor::f32([512], logits[logits.len() - 512..].to_vec());
    let mut tensors = Tensors::new();
    for name in ["one", "two"] {
        tensors.insert(format!("{name}/input_ids"), all["input_ids"].clone());
        tensors.insert(format!("{name}/greedy_ids"), all["greedy_ids"].clone());
    }
    tensors.insert("one/logits_last".to_owned(), last);
    tensors
}

/// Runs the dialogues, changed, on tiny-k31.
fn check(change: impl FnOnce(&mut Tensors)) -> (Report, String) {
    let dir = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    let mut tensors = dialogues();
    change(&mut tensors);
    write_tensors(&dir.path().join("expected.safetensors"), &tensors, "a test", false).unwrap();
    let (reports, text) = selfcheck(&on(dir.path(), None));
    let [report] = reports.try_into().unwrap();
    (report, text)
}

#[track_caller]
fn fails(change: impl FnOnce(&mut Tensors), failed: &str, note: &str) {
    let (report, text) = check(change);
    assert_eq!(names(&report, Outcome::Failed), [failed], "{text}");
    assert!(report.check(failed).unwrap().note.contains(note), "{text}");
}

#[test]
fn dialogues_are_expectations() {
    let (report, text) = check(|_| {});
    assert!(report.is_good(), "{text}");
    assert_eq!(names(&report, Outcome::Passed), ["finite", "dialogue logits", "dialogue greedy"]);
    assert!(text.contains("2 dialogues; fixed prompt: 16 prompt tokens"), "{text}");
    assert!(text.contains("dialogues greedy 2/2"), "{text}");

    fails(|t| i32s(t.get_mut("two/greedy_ids").unwrap())[3] ^= 1, "dialogue greedy", "two: token 3");
    fails(|t| f32s(t.get_mut("one/logits_last").unwrap())[3] += 1.0, "dialogue logits", "one: ");
    fails(|t| f32s(t.get_mut("one/logits_last").unwrap())[3] = f32::NAN, "dialogue logits", "one: ");

    let (report, text) = check(|t| drop(t.insert("two/margin".to_owned(), Tensor::f32([1], vec![0.5]))));
    assert!(report.is_good() && text.contains("not known, not compared: two/margin"), "{text}");
}

#[test]
fn bad_dialogues_are_named() {
    let refused = |change: fn(&mut Tensors), why: &str| {
        let dir = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
        let mut tensors = dialogues();
        change(&mut tensors);
        write_tensors(&dir.path().join("expected.safetensors"), &tensors, "a test", false).unwrap();
        let error = refusal(&on(dir.path(), None));
        assert!(error.contains("expected.safetensors") && error.contains(why), "{error}");
    };
    refused(|t| drop(t.remove("one/input_ids")), "expected token ids in `one/input_ids`");
    refused(|t| i32s(t.get_mut("one/input_ids").unwrap())[1] = 512, "below 512, found 512 at 1");
    refused(|t| drop(t.remove("two/greedy_ids")), "found nothing to compare");
    refused(|t| drop(t.insert("one/logits_last".into(), Tensor::f32([2], vec![0.0; 2]))), "F32 [512]");
    refused(|t| drop(t.insert("one/greedy_ids".into(), Tensor::i32([4090], vec![1; 4090]))), "do not fit");
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
