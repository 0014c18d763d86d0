//! `cargo xtask nano`: evaluation, and what the indexer's choice does.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::fs;
use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;

use k3_graph::{Cpu, Device, LogitsWanted, Observer, Probe, Selected, Selection};
use k3_runner::{Engine, EngineOptions, Generate, Sampling};
use k3_tokenizer::Tokenizer;
use serde_json::{Value, json};
use support::{copy, fixture, i32s, program, temporary, with_words};
use xtask::expect::{Check, Found, read_tensors, write_tensors};
use xtask::nano::{
    Difference, Item, Measured, RandomSelection, Reply, differences, judge, read_items, replies, scores,
};

fn open<D: Device>(dir: &Path, device: D) -> Engine<D> {
    Engine::open(dir, device, &EngineOptions::default(), &mut |_| {}).unwrap()
}

fn cpu() -> Cpu {
    Cpu::new(2).unwrap()
}

fn random(seed: u64) -> Engine<RandomSelection> {
    open(&fixture("tiny-k31"), RandomSelection::new(cpu(), seed))
}

fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + 11) % 250).collect()
}

/// What was selected, and nothing else.
#[derive(Default)]
struct Selections(Vec<Selection>);

impl Observer for Selections {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Indexer
    }
    fn selection(&mut self, _layer: usize, selection: &Selection, _scores: &[Vec<f32>]) {
        self.0.push(selection.clone());
    }
}

/// Logits of a prompt that goes through in chunks, and the selections.
fn run<D: Device>(engine: &mut Engine<D>, tokens: u32, chunk: usize) -> (Vec<f32>, Vec<Selection>) {
    engine.set_chunk_tokens(chunk);
    let mut seen = Selections::default();
    let mut sequence = engine.new_sequence().unwrap();
    let logits = engine.run(&mut sequence, &ids(tokens), LogitsWanted::All, &mut seen).unwrap();
    (logits.values, seen.0)
}

/// Within the budget there is nothing to choose, and the device is the CPU, bit for bit.
#[test]
fn a_random_selection_changes_nothing_within_the_budget() {
    let expected = run(&mut open(&fixture("tiny-k31"), cpu()), 16, 16).0;
    assert_eq!(run(&mut random(0), 16, 16).0, expected);
    assert_eq!(run(&mut random(0), 16, 5).0, expected);
}

#[test]
fn a_random_selection_is_as_large_and_follows_from_its_seed() {
    let (logits, selections) = run(&mut random(0), 40, 40);
    // Full attention on layers 4, 8, 12 and 13; 40 rows of them each.
    assert_eq!(selections.iter().map(|s| s.rows.len()).collect::<Vec<_>>(), [40; 4]);
    for selection in &selections {
        for (position, row) in selection.rows.iter().enumerate() {
            match row {
                Selected::All => assert!(position < 16, "{position}"),
                Selected::Keys(keys) => {
                    assert!(position >= 16 && keys.len() == 16, "{position}: {keys:?}");
                    assert!(keys.is_sorted_by(|a, b| a < b) && keys[15] as usize <= position, "{keys:?}");
                }
                Selected::NonFinite => panic!("{position} is lost"),
            }
        }
    }
    assert_ne!(selections[0], selections[1], "layers draw for themselves");
    assert_ne!(selections[0].rows[38], selections[0].rows[39], "and so do tokens");
    for chunk in [1, 7] {
        assert_eq!(run(&mut random(0), 40, chunk).0, logits, "chunk {chunk}");
    }
    assert_ne!(run(&mut random(1), 40, 40).1, selections);
    assert_ne!(run(&mut open(&fixture("tiny-k31"), cpu()), 40, 40).0, logits);
}

/// The recorded logits are those of the indexer's choice: others are far away.
#[test]
fn the_indexer_matters() {
    let measured = differences(&fixture("tiny-k31"), 2, 0).unwrap();
    assert_eq!(judge(&measured), [""; 0]);
    let [prompt] = measured.differences.as_slice() else { panic!("{measured:?}") };
    assert_eq!((measured.topk, prompt.name.as_str(), prompt.tokens), (16, "prompt", 80));
    // Rows of four layers, for the prompt and for the continuation.
    let selections: Vec<_> = measured.selections.iter().map(|(_, c)| (c.name.as_str(), &c.found)).collect();
    let all = |n: usize| Found::Equal { equal: n, of: n };
    assert_eq!(
        selections,
        [("greedy_ids", &all(16)), ("index_sel", &all(4 * 80)), ("cont_index_sel", &all(4 * 16))]
    );
    assert!(prompt.indexer < 3e-5, "{prompt:?}");
    assert!(prompt.dense > 0.1 && prompt.random > 0.1, "{prompt:?}");

    let refused = |dir: &Path| format!("{:#}", differences(dir, 2, 0).unwrap_err());
    assert!(refused(&fixture("tiny-k3")).contains("has no indexer"));
    let bare = copy("tiny-k31", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    assert!(refused(bare.path()).contains("no expectations"));
    let without_logits = copy("tiny-k31", &["expected.safetensors", "trace.safetensors"]);
    assert!(refused(without_logits.path()).contains("no prompt with logits"));
}

/// On the trained model the choice is what it was trained with: dense or random attention is another function.
#[test]
fn the_indexer_matters_to_the_trained_model() {
    let measured = differences(&fixture("nano"), 2, 0).unwrap();
    assert_eq!(judge(&measured), [""; 0]);
    assert_eq!(measured.topk, 64);
    assert!(measured.selections.iter().any(|(_, c)| c.name == "cont_index_sel"), "{measured:?}");
    let found = &measured.differences;
    assert!(found.len() >= 10, "{found:?}");
    for prompt in found {
        assert!(prompt.tokens > 64 && prompt.indexer < 1e-5, "{prompt:?}");
        // Far beyond rounding. Dense attention adds only keys that the indexer found to matter little.
        assert!(prompt.dense > 10.0 * prompt.indexer && prompt.random > 1e-2, "{prompt:?}");
        if prompt.name.ends_with("recall512") {
            assert!(prompt.dense > 1e-3 && prompt.random > 0.5, "{prompt:?}");
        }
    }
}

/// What is said of prompts at these distances, with the indexer, dense and random, where 1e-5 is allowed.
#[track_caller]
fn judged(distances: &[[f64; 3]], selections: &[(String, Check)], wrong: &[&str]) {
    let difference = |(i, [indexer, dense, random]): (usize, &[f64; 3])| Difference {
        name: format!("p{i}"),
        tokens: 100,
        bound: 1e-5,
        indexer: *indexer,
        dense: *dense,
        random: *random,
    };
    let differences = distances.iter().enumerate().map(difference).collect();
    let found = judge(&Measured { topk: 64, differences, selections: selections.to_vec() });
    assert_eq!(found.len(), wrong.len(), "{found:?}");
    for (found, wrong) in found.iter().zip(wrong) {
        assert!(found.starts_with(wrong), "{found}");
    }
}

#[test]
fn what_an_indexer_is_held_to() {
    let good = [2e-7, 3e-3, 0.5];
    judged(&[good, good], &[], &[]);
    // A short prompt may come near, if far beyond rounding.
    judged(&[good, [2e-7, 1e-5, 0.5], good], &[], &[]);
    judged(&[good, [2e-5, 3e-3, 0.5], good], &[], &["p1: with the indexer logits are 2.0e-5"]);
    judged(&[good, [f64::NAN, 3e-3, 0.5], good], &[], &["p1: with the indexer", "p1: dense", "p1: random"]);
    // The indexer ran where it should not, or random keys were none.
    judged(&[good, [2e-7, 2e-7, 0.5], good], &[], &["p1: dense logits are 2.0e-7"]);
    judged(&[good, [2e-7, 3e-3, f64::NAN], good], &[], &["p1: random logits are NaN"]);
    judged(&[[2e-7, 9e-5, 0.5]; 3], &[], &["median: dense logits are 9.0e-5"]);
    judged(&[[2e-7, 3e-3, 9e-5]; 3], &[], &["median: random logits are 9.0e-5"]);
    let check = |equal| Check::of("index_sel", equal == 4, Found::Equal { equal, of: 4 }, "first at layer 3");
    let selections = [("p0".to_owned(), check(4)), ("p1".to_owned(), check(3))];
    judged(&[good, good], &selections, &["p1: index_sel: 3/4 equal (first at layer 3)"]);
}

/// A recorded choice that does not come again fails the command, and is named.
#[test]
fn other_selections_are_a_failure() {
    let dir = copy("tiny-k31", &[]);
    let file = dir.path().join("expected.safetensors");
    let mut tensors = read_tensors(&file).unwrap();
    let last = i32s(tensors.get_mut("index_sel").unwrap()).last_mut().unwrap();
    *last = i32::from(*last == 0);
    fs::remove_file(&file).unwrap();
    write_tensors(&file, &tensors, "a test", false).unwrap();
    let (good, out, err) = nano(&["indexer", "--model", dir.path().to_str().unwrap()]);
    assert!(!good && err.contains("not as it was recorded"), "{out}{err}");
    assert!(out.contains("selections: 383 of 384 as recorded"), "{out}");
    assert!(out.contains("FAILED prompt: index_sel: 319/320 equal (first at layer "), "{out}");
}

/// A few of the held-out dialogues; `cargo xtask nano eval` takes all.
#[test]
fn the_trained_model_calls_its_tool() {
    let (good, out, err) = nano(&["eval", "--per-task", "10", "--task", "call", "--json"]);
    assert!(good, "{err}");
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["tasks"][0]["dialogues"], 10);
    assert!(found["tasks"][0]["exact"].as_u64().unwrap() >= 9, "{out}");
    let model = Path::new(found["model"].as_str().unwrap());
    assert!(
        model.ends_with("fixtures/nano") && !model.components().any(|c| c == Component::ParentDir),
        "{out}"
    );
}

fn item(task: &str, prompt: Vec<u32>, reply: Vec<u32>, value: Option<(usize, Vec<u32>)>) -> Item {
    Item { task: task.to_owned(), prompt, reply, value, distance: None }
}

/// Replies are the greedy continuations, up to the end or a few tokens too long, whatever else is in the batch.
#[test]
fn replies_are_greedy_and_alone() {
    let engine = open(&fixture("tiny-k31"), cpu());
    let generate =
        Generate { max_tokens: 12, sampling: Sampling::greedy(), ignore_eos: true, stop: Vec::new() };
    let greedy = |prompt: &[u32]| {
        let mut sequence = engine.new_sequence().unwrap();
        let go_on = &mut |_| std::ops::ControlFlow::Continue(());
        engine.generate(&mut sequence, prompt, &generate, go_on).unwrap().tokens
    };
    let prompts: Vec<Vec<u32>> = (0..20).map(|n| ids(5 + n)).collect();
    let whole = greedy(&prompts[3]);
    // What one of them happens to write is the end for all.
    let end = whole[4];
    let items: Vec<Item> = prompts.iter().map(|p| item("a", p.clone(), vec![1; 4], None)).collect();
    let found = replies(&engine, &items, end).unwrap();
    for (item, reply) in items.iter().zip(&found) {
        let whole = greedy(&item.prompt);
        let until = whole.iter().position(|&id| id == end).map_or(12, |at| at + 1);
        assert_eq!(reply.tokens, whole[..until]);
    }
    assert!(found[3].tokens.len() <= 5 && found.iter().any(|r| r.tokens.len() == 12));
}

/// How many are exact, and how many have the value at its place: whole replies, given and intended.
#[track_caller]
fn check(pairs: &[(&[u32], &[u32])], value: Option<&(usize, Vec<u32>)>, exact: usize, found: usize) {
    let (mut items, mut given) = (Vec::new(), Vec::new());
    for (tokens, intended) in pairs {
        items.push(item("a", vec![1], intended.to_vec(), value.cloned()));
        given.push(Reply { tokens: tokens.to_vec(), time: std::time::Duration::from_secs(1) });
    }
    let [score] = scores(&items, &given).try_into().unwrap();
    assert_eq!((score.dialogues, score.exact, score.found), (pairs.len(), exact, found));
    assert_eq!(score.values, if value.is_some() { pairs.len() } else { 0 });
    assert_eq!(score.tokens, pairs.iter().map(|(tokens, _)| 1 + tokens.len()).sum::<usize>());
}

#[test]
fn what_counts() {
    check(&[(&[1, 2, 9], &[1, 2, 9])], None, 1, 0);
    check(&[(&[1, 2, 9], &[1, 2, 9]), (&[1, 3, 9], &[1, 2, 9])], None, 1, 0);
    // One token more or less is not exact.
    check(&[(&[1, 2], &[1, 2, 9]), (&[1, 2, 9, 9], &[1, 2, 9])], None, 0, 0);
    let value = (1, vec![7, 8]);
    check(&[(&[1, 7, 8, 9], &[1, 7, 8, 9])], Some(&value), 1, 1);
    check(&[(&[5, 7, 8, 5], &[1, 7, 8, 9])], Some(&value), 0, 1);
    check(&[(&[1, 2, 7, 8], &[1, 7, 8, 9]), (&[1, 7], &[1, 7, 8, 9])], Some(&value), 0, 0);
}

#[test]
fn tasks_are_scored_apart_in_order() {
    let items: Vec<Item> = ["b", "a", "b"].map(|task| item(task, vec![1], vec![2], None)).into();
    let given: Vec<Reply> =
        [2, 2, 3].map(|id| Reply { tokens: vec![id], time: std::time::Duration::ZERO }).into();
    let scores = scores(&items, &given);
    let found: Vec<_> = scores.iter().map(|s| (s.task.as_str(), s.dialogues, s.exact)).collect();
    assert_eq!(found, [("b", 2, 1), ("a", 1, 1)]);
}

fn small() -> Tokenizer {
    Tokenizer::open(fixture("tokenizer/small")).unwrap()
}

fn line(change: impl FnOnce(&mut Value)) -> String {
    let mut line = json!({
        "task": "recall",
        "request": {"messages": [{"role": "user", "content": "What does Anna have?"}], "reasoning_effort": "low"},
        "reply": {"role": "assistant", "reasoning_content": "Anna: plum.", "content": "Anna has plum."},
        "value": "plum", "distance": 70,
    });
    change(&mut line);
    line.to_string()
}

fn file(lines: &[String]) -> (tempfile::TempDir, PathBuf) {
    let dir = temporary();
    let file = dir.path().join("eval.jsonl");
    fs::write(&file, lines.join("\n")).unwrap();
    (dir, file)
}

#[test]
fn dialogues_are_rendered_here() {
    let (_dir, path) = file(&[line(|_| {}), String::new(), line(|l| l["value"] = Value::Null)]);
    let items = read_items(&path, &small()).unwrap();
    assert_eq!(items.len(), 2);
    let (place, value) = items[0].value.clone().unwrap();
    assert_eq!(value, small().encode(" plum"));
    assert_eq!(place, small().encode("Anna:").len(), "the first place counts");
    assert_eq!((items[0].distance, items[1].value.clone()), (Some(70), None));
    let text = small().decode_lossy(&items[0].prompt).unwrap();
    assert!(text.contains("thinking_effort=low") && text.contains("What does Anna have?"), "{text}");
    assert!(text.ends_with("<|open|>think<|sep|>"), "{text}");
    assert_eq!(
        small().decode_lossy(&items[0].reply).unwrap(),
        "Anna: plum.<|close|>think<|sep|><|open|>response<|sep|>Anna has plum.<|close|>response<|sep|><|close|>message<|sep|>\
         <|end_of_msg|>"
    );
}

/// Calls are compared as the model writes them.
#[test]
fn replies_may_call() {
    let call = json!({"function": {"name": "get_weather", "arguments": "{\"city\": \"Old Oslo\"}"}});
    let (_dir, path) = file(&[line(|l| {
        l["reply"] = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        l["request"]["reasoning_effort"] = json!("none");
        l["value"] = Value::Null;
    })]);
    let [item] = read_items(&path, &small()).unwrap().try_into().unwrap();
    let reply = small().decode_lossy(&item.reply).unwrap();
    assert!(reply.starts_with("<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="), "{reply}");
    assert!(
        reply.contains("<|open|>argument key=\"city\" type=\"string\"<|sep|>Old Oslo<|close|>"),
        "{reply}"
    );
}

#[test]
fn dialogues_may_be_compressed() {
    let (dir, path) = file(&[line(|_| {})]);
    let packed = dir.path().join("eval.jsonl.gz");
    let mut encoder =
        flate2::write::GzEncoder::new(fs::File::create(&packed).unwrap(), flate2::Compression::best());
    encoder.write_all(&fs::read(&path).unwrap()).unwrap();
    encoder.finish().unwrap();
    assert_eq!(read_items(&packed, &small()).unwrap(), read_items(&path, &small()).unwrap());
    let bytes = fs::read(&packed).unwrap();
    fs::write(&packed, &bytes[..bytes.len() - 9]).unwrap();
    let error = format!("{:#}", read_items(&packed, &small()).unwrap_err());
    assert!(error.contains("reading the dialogues"), "{error}");
}

#[test]
fn bad_lines_are_named() {
    let refused = |change: fn(&mut Value), why: &str| {
        let (_dir, path) = file(&[line(|_| {}), line(change)]);
        let error = format!("{:#}", read_items(&path, &small()).unwrap_err());
        assert!(error.contains("line 2") && error.contains(why), "{error}");
    };
    refused(|l| drop(l.as_object_mut().unwrap().remove("reply")), "key `reply`");
    refused(|l| l["reply"] = json!([1]), "`reply`");
    refused(|l| l["reply"] = json!({"role": "user", "content": "x"}), "a message of the assistant");
    refused(|l| l["value"] = json!(6), "`value`: expected a string");
    refused(|l| l["value"] = json!("fig"), "`value` is no part of `reply`");
    refused(|l| l["distance"] = json!("far"), "`distance`: expected a count");
    refused(|l| l["task"] = json!(1), "`task`: expected a string");
    refused(|l| l["request"] = json!({"messages": 1}), "`request`");
    refused(|l| l["request"]["response_format"] = json!({"type": "json_object"}), "where the reply begins");
    refused(
        |l| l["request"]["chat_template_kwargs"] = json!({"add_generation_prompt": false}),
        "asks for no reply",
    );
}

/// Runs the program: whether it says success, and its stdout and stderr.
fn nano(args: &[&str]) -> (bool, String, String) {
    let output = program(&[&["nano"], args].concat(), Stdio::piped());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_program_evaluates() {
    let model = with_words();
    let (_dir, path) = file(&[line(|_| {}), line(|l| l["task"] = json!("call")), line(|_| {})]);
    let (model, path) = (model.path().to_str().unwrap(), path.to_str().unwrap());
    let args = ["eval", "--model", model, "--eval", path];
    let (good, out, err) = nano(&args);
    assert!(good, "{err}");
    let rows: Vec<Vec<&str>> = out.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["task", "dialogues", "exact", "value", "distance", "tokens/s"]);
    assert_eq!(rows[2][..7], ["recall", "2", "0.0", "%", "0.0", "%", "70"], "{out}");
    assert_eq!(rows[3][..4], ["call", "1", "0.0", "%"]);

    let one = [&args[..], &["--per-task", "1", "--task", "recall", "--json", "--indexer", "random"]].concat();
    let (good, out, err) = nano(&one);
    assert!(good, "{err}");
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&found["indexer"], found["tasks"].as_array().unwrap().len()), (&json!("random"), 1));
    assert_eq!((&found["tasks"][0]["dialogues"], &found["tasks"][0]["exact"]), (&json!(1), &json!(0)));

    let (good, out, err) = nano(&[&args[..], &["--show", "1", "--indexer", "off"]].concat());
    assert!(
        good && out.contains("indexer off (dense)") && out.matches("  found ").count() == 2,
        "{out}{err}"
    );
    assert!(nano(&[&args[..], &["--task", "nothing"]].concat()).2.contains("no dialogue of that task"));

    let (good, out, err) = nano(&["indexer", "--model", fixture("tiny-k31").to_str().unwrap()]);
    assert!(good && out.contains("1 prompt of more than 16 tokens") && out.contains("median"), "{out}{err}");
    assert!(out.contains("selections: 384 of 384 as recorded") && out.contains("PASS"), "{out}");
}
