//! `cargo xtask selfcheck`, through its library entry and as a program.

mod divergence;
mod refusals;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use k3_format::IndexerNames;
use support::{changed, copy, copy_to, f32s, fixture, i32s, on, refusal, selfcheck, temporary, unread};
use xtask::OpenArgs;
use xtask::expect::{Outcome, Tensor, Tensors};
use xtask::selfcheck::{Args, DeviceName, Report, Sublayer, check_folder};

/// Names of the checks with an outcome.
fn names(report: &Report, outcome: Outcome) -> Vec<&str> {
    report.checks.iter().filter(|c| c.outcome == outcome).map(|c| c.name.as_str()).collect()
}

fn fixtures_pass(device: DeviceName) {
    let (reports, text) = selfcheck(&Args { device, ..Args::default() });
    let models: Vec<&str> = reports.iter().map(|r| r.model.as_str()).collect();
    assert_eq!(models, ["tiny-k3", "tiny-k31", "dims-k31", "nano"]);
    let (nano, random) = reports.split_last().unwrap();
    assert!(nano.is_good(), "{text}");
    assert_eq!(nano.cycles.iter().skip(1).map(|c| c.chunk).collect::<Vec<_>>(), [7, 1]);
    assert_eq!(
        names(nano, Outcome::Passed),
        [
            "finite",
            "bit-identical cycles",
            "goldens greedy_ids",
            "goldens greedy_logits",
            "goldens cont_index_sel",
            "tool call",
            "tool answer"
        ]
    );
    assert_eq!(
        (names(nano, Outcome::Skipped), nano.unknown.as_slice()),
        (vec![], [""; 0].map(String::from).as_slice())
    );
    let said: Vec<&str> = text.lines().skip_while(|l| *l != "  conversation:").collect();
    assert!(said[1].starts_with("    user      What is the weather in Paris?"), "{text}");
    assert!(said.iter().any(|l| l.starts_with("    call      get_weather {\"city\": \"Paris\"}")), "{text}");
    for report in random {
        assert!(report.is_good(), "{text}");
        let chunks: Vec<usize> = report.cycles.iter().map(|c| c.chunk).collect();
        assert_eq!(chunks[1..], [7, 1]);
        assert!(chunks[0] > 7);
        // Everything that the fixtures hold is compared, nothing is skipped.
        assert_eq!(names(report, Outcome::Skipped), [""; 0]);
        let indexed = usize::from(report.model != "tiny-k3") * 4;
        assert_eq!(report.count(Outcome::Passed), 33 + indexed);
        assert!(report.unknown.is_empty(), "{:?}", report.unknown);
    }
    let lines = |word: &str| text.lines().filter(|l| l.trim_start().starts_with(word)).count();
    assert_eq!((lines("cycle "), lines("PASS "), lines("FAIL ")), (12, 5, 0), "{text}");
    assert!(text.lines().last().unwrap().starts_with("next: cargo xtask "), "{text}");
}

#[test]
fn fixtures_pass_on_the_cpu() {
    fixtures_pass(DeviceName::Cpu);
}

#[test]
fn fixtures_pass_on_the_reference() {
    fixtures_pass(DeviceName::Reference);
}

/// A change of the expectations fails exactly these checks, and the first note says this.
#[track_caller]
fn check_changed(change: impl FnOnce(&mut Tensors), failed: &[&str], note: &str) -> Report {
    let (_dir, file) = changed("tiny-k31", change);
    let (reports, text) = selfcheck(&on(fixture("tiny-k31"), Some(&file)));
    let [report] = reports.try_into().unwrap();
    assert!(!report.is_good());
    assert_eq!(names(&report, Outcome::Failed), failed, "{text}");
    assert!(report.check(failed[0]).unwrap().note.contains(note), "{text}");
    assert!(text.contains("FAIL tiny-k31") && text.contains(failed[0]), "{text}");
    report
}

#[test]
fn one_greedy_id_changed() {
    let change = |t: &mut Tensors| i32s(t.get_mut("greedy_ids").unwrap())[5] ^= 1;
    check_changed(change, &["greedy_ids"], "first at token 5 after the prompt: expected 447, found 446");
}

#[test]
fn one_router_index_changed() {
    // MoE layer 3 is decoder layer 4; 80 tokens, top-4.
    let change = |t: &mut Tensors| i32s(t.get_mut("router_idx").unwrap())[(3 * 80 + 9) * 4] ^= 1;
    let report = check_changed(change, &["router_idx"], "first at layer 4, position 9: expected [");
    let divergence = report.divergence.unwrap();
    assert_eq!(
        (divergence.layer, divergence.sublayer, divergence.position),
        (Some(4), Sublayer::Router, Some(9))
    );
}

/// Other engines need not list a token's experts in rank order; the weights then follow.
#[test]
fn experts_in_another_order_are_the_same_experts() {
    let (_dir, file) = changed("tiny-k31", |t| {
        i32s(t.get_mut("router_idx").unwrap()).swap(0, 1);
        f32s(t.get_mut("router_weight").unwrap()).swap(0, 1);
        i32s(t.get_mut("cont_router_idx").unwrap()).swap(4, 7);
    });
    let (reports, text) = selfcheck(&on(fixture("tiny-k31"), Some(&file)));
    assert!(reports[0].is_good(), "{text}");
    assert!(text.contains("2 tokens list their experts in another order than rank order"), "{text}");
    // Weights that did not move with their experts are wrong weights.
    let change = |t: &mut Tensors| i32s(t.get_mut("router_idx").unwrap()).swap(0, 1);
    check_changed(change, &["router_weight"], "layer 1");
}

#[test]
fn one_selected_key_changed() {
    let change = |t: &mut Tensors| i32s(t.get_mut("index_sel").unwrap())[(2 * 80 + 79) * 16 + 15] = 0;
    let report = check_changed(change, &["index_sel"], "position 79");
    assert_eq!(report.divergence.unwrap().sublayer, Sublayer::Indexer);
}

#[test]
fn scaled_logits() {
    let change = |t: &mut Tensors| f32s(t.get_mut("logits").unwrap()).iter_mut().for_each(|v| *v *= 1.001);
    let report = check_changed(change, &["logits"], "position 0: rel-L2 1.0e-3");
    let divergence = report.divergence.unwrap();
    assert_eq!((divergence.layer, divergence.sublayer), (None, Sublayer::LmHead));
}

/// An error at one of 80 positions is small over the whole tensor; every position is held to the bound.
#[test]
fn scaled_logits_of_one_position() {
    let scale = |row: usize, by: f32| {
        move |values: &mut Vec<f32>| values[row * 512..(row + 1) * 512].iter_mut().for_each(|v| *v *= by)
    };
    let logits = |row, by| move |t: &mut Tensors| scale(row, by)(f32s(t.get_mut("logits").unwrap()));
    let report = check_changed(logits(41, 1.0005), &["logits"], "position 41: rel-L2 5.0e-4");
    let divergence = report.divergence.unwrap();
    assert_eq!((divergence.sublayer, divergence.position), (Sublayer::LmHead, Some(41)));
    check_changed(logits(7, 1.0001), &["logits"], "position 7: rel-L2 1.0e-4, 1.");
    let greedy = |t: &mut Tensors| scale(3, 1.0001)(f32s(t.get_mut("greedy_logits").unwrap()));
    check_changed(greedy, &["greedy_logits"], "token 3 after the prompt: rel-L2 1.0e-4");
}

#[test]
fn nan_is_no_agreement() {
    let change = |t: &mut Tensors| f32s(t.get_mut("logits").unwrap())[512 * 9 + 7] = f32::NAN;
    check_changed(change, &["logits"], "position 9");
    let change = |t: &mut Tensors| f32s(t.get_mut("kda_state").unwrap())[7] = f32::NAN;
    check_changed(change, &["kda_state"], "layer 0");
}

#[test]
fn absent_tensors_are_skipped_not_passed() {
    let (_dir, file) = changed("tiny-k31", |t| {
        t.retain(|name, _| ["input_ids", "logits"].contains(&name.as_str()));
        t.insert("by_another_engine".to_owned(), Tensor::f32([1], vec![0.0]));
    });
    let (reports, text) = selfcheck(&on(fixture("tiny-k31"), Some(&file)));
    let [report] = reports.try_into().unwrap();
    assert!(report.is_good());
    assert_eq!(names(&report, Outcome::Passed), ["finite", "watched run", "logits", "logits argmax"]);
    let skipped = names(&report, Outcome::Skipped);
    for name in ["bit-identical cycles", "router_idx", "index_sel", "kda_state", "attn_in", "MoE alone"] {
        assert!(skipped.contains(&name), "{name}: {text}");
    }
    assert_eq!(report.unknown, ["by_another_engine"]);
    assert!(text.contains(&format!("4 passed, 0 failed, {} skipped", skipped.len())), "{text}");
}

#[test]
fn without_expectations() {
    let dir = copy("tiny-k3", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    let args = Args { cycles: 3, tokens: Some(20), ..on(dir.path(), None) };
    let (reports, text) = selfcheck(&args);
    let [report] = reports.try_into().unwrap();
    assert!(report.is_good());
    assert_eq!(names(&report, Outcome::Passed), ["finite", "bit-identical cycles"]);
    assert_eq!(names(&report, Outcome::Skipped), ["expectations"]);
    assert_eq!(report.cycles.iter().map(|c| c.chunk).collect::<Vec<_>>(), [20, 7, 1]);
    assert_eq!(report.cycles[0].greedy.len(), 8);
    assert!(text.contains("--expect FILE"), "{text}");
}

#[test]
fn a_json_alone_is_enough() {
    let dir = copy("tiny-k3", &["expected.safetensors", "trace.safetensors"]);
    let (reports, text) = selfcheck(&on(dir.path(), Some(&dir.path().join("expected.json"))));
    assert!(reports[0].check("greedy (json)").is_some_and(|c| c.outcome == Outcome::Passed), "{text}");
}

#[test]
fn a_json_alone_beside_the_weights_counts() {
    let dir = copy("tiny-k3", &["expected.safetensors"]);
    let (reports, text) = selfcheck(&on(dir.path(), None));
    assert!(reports[0].is_good(), "{text}");
    assert_eq!(reports[0].check("greedy (json)").unwrap().outcome, Outcome::Passed);
    // The trace beside it goes with its prompt.
    assert_eq!(reports[0].check("KDA alone").unwrap().outcome, Outcome::Passed, "{text}");

    let file = dir.path().join("expected.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let id = json["greedy"][2].as_u64().unwrap();
    json["greedy"][2] = (id ^ 1).into();
    fs::write(&file, serde_json::to_vec(&json).unwrap()).unwrap();
    let (reports, text) = selfcheck(&on(dir.path(), None));
    assert_eq!(names(&reports[0], Outcome::Failed), ["greedy (json)"], "{text}");
}

/// What has the name of an expectation and cannot be read as one is not passed over.
#[test]
fn expectations_that_are_no_files() {
    for name in ["expected.safetensors", "expected.json", "trace.safetensors"] {
        let dir = copy("tiny-k3", &[name]);
        fs::create_dir(dir.path().join(name)).unwrap();
        for expect in [None, Some(dir.path())] {
            let error = refusal(&on(dir.path(), expect));
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
        }
        #[cfg(unix)]
        {
            fs::remove_dir(dir.path().join(name)).unwrap();
            std::os::unix::fs::symlink("/no/such/file", dir.path().join(name)).unwrap();
            let error = refusal(&on(dir.path(), None));
            assert!(error.contains(name) && error.contains("a link that leads to no"), "{error}");
        }
    }
    let dir = copy("tiny-k3", &["expected.safetensors", "expected.json"]);
    let error = refusal(&on(dir.path(), None));
    assert!(error.contains("one of which has the prompt"), "{error}");
}

/// A file with nothing in it to compare is no agreement.
#[test]
fn expectations_that_compare_nothing() {
    for keep in [&[][..], &["logit", "kda_layers", "router_gap"], &["greedy_ids"]] {
        let (_dir, file) = changed("tiny-k31", |t| {
            let logits = t["logits"].clone();
            t.insert("logit".to_owned(), logits);
            t.insert("greedy_ids".to_owned(), Tensor::i32([0], Vec::new()));
            t.retain(|name, _| name == "input_ids" || keep.contains(&name.as_str()));
        });
        let (reports, text) = selfcheck(&on(fixture("tiny-k31"), Some(&file)));
        assert_eq!(names(&reports[0], Outcome::Failed), ["expectations"], "{text}");
        assert!(!reports[0].is_good() && text.contains("nothing was compared: "), "{text}");
        assert!(keep.iter().all(|name| text.contains(name)), "{text}");
    }
    // Beside the weights it is skipped, and what was checked counts.
    let dir = copy("tiny-k3", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    fs::write(dir.path().join("expected.json"), r#"{"prompt": [1, 2, 3], "greedy": []}"#).unwrap();
    let (reports, text) = selfcheck(&Args { cycles: 2, ..on(dir.path(), None) });
    assert!(reports[0].is_good(), "{text}");
    assert_eq!(reports[0].check("expectations").unwrap().outcome, Outcome::Skipped, "{text}");
    assert!(reports[0].check("greedy (json)").is_none(), "{text}");
}

#[test]
fn the_summary_without_logits() {
    let (_dir, file) = changed("tiny-k31", |t| {
        t.retain(|name, _| ["input_ids", "router_idx"].contains(&name.as_str()));
    });
    let (_, text) = selfcheck(&on(fixture("tiny-k31"), Some(&file)));
    let summary = text.lines().find(|line| line.starts_with("PASS ")).unwrap();
    assert!(summary.contains(" skipped; router 960/960"), "{summary}");
}

/// One fixture that cannot be opened, and one that is absent, are failed checks beside the good one.
#[test]
fn one_fixture_does_not_stop_the_others() {
    let fixtures = temporary();
    for name in ["tiny-k3", "dims-k31"] {
        fs::create_dir(fixtures.path().join(name)).unwrap();
        copy_to(&fixtures.path().join(name), name, &[]);
    }
    fs::write(fixtures.path().join("tiny-k3/config.json"), "{").unwrap();
    let mut out = Vec::new();
    let reports = check_folder(&Args { cycles: 1, ..Args::default() }, fixtures.path(), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let good: Vec<_> = reports.iter().map(|r| (r.model.rsplit('/').next().unwrap(), r.is_good())).collect();
    assert_eq!(
        good,
        [("tiny-k3", false), ("tiny-k31", false), ("dims-k31", true), ("nano", false)],
        "{text}"
    );
    assert!(reports[0].check("runs").unwrap().note.contains("config.json"), "{text}");
    assert!(reports[1].check("runs").unwrap().note.contains("is not there: restore"), "{text}");
    assert!(text.contains("FAIL tiny-k3: 0 passed, 1 failed") && text.contains("PASS dims-k31"), "{text}");
    assert!(text.contains("FAIL total: 1 of 4 models"), "{text}");
}

/// A long prompt goes through in pieces of what the engine takes at once, with one hash over all of them.
#[test]
fn long_prompts_are_cut() {
    let dir = copy("tiny-k3", &["expected.safetensors", "expected.json", "trace.safetensors"]);
    let args = Args { cycles: 2, tokens: Some(520), open: first(2), ..on(dir.path(), None) };
    let (reports, text) = selfcheck(&args);
    assert_eq!(reports[0].cycles.iter().map(|c| c.chunk).collect::<Vec<_>>(), [512, 7], "{text}");
    assert!(reports[0].check("bit-identical cycles").is_some_and(|c| c.outcome == Outcome::Passed), "{text}");
}

fn first(layers: usize) -> OpenArgs {
    OpenArgs { layers: Some(layers), ..OpenArgs::default() }
}

/// With the indexer ignored its expectations are skipped by name, and the rest shows that the function is another.
#[test]
fn an_ignored_indexer_is_skipped_by_name() {
    let open = OpenArgs { ignore_indexer: true, ..OpenArgs::default() };
    let args = Args { open: open.clone(), cycles: 1, ..on(fixture("tiny-k31"), None) };
    let (reports, text) = selfcheck(&args);
    assert!(text.lines().next().unwrap().contains("with its indexer IGNORED (attends as Kimi K3)"), "{text}");
    for name in ["index_sel", "index_scores", "index_keys", "cont_index_sel"] {
        let check = reports[0].check(name).unwrap();
        assert_eq!(
            (check.outcome, check.note.contains("--ignore-indexer")),
            (Outcome::Skipped, true),
            "{name}"
        );
    }
    assert_eq!(reports[0].check("logits").unwrap().outcome, Outcome::Failed);
    assert!(reports[0].unknown.is_empty(), "{text}");
    assert!(text.lines().last().unwrap().contains(" --ignore-indexer "), "{text}");

    let (reports, text) = selfcheck(&Args { open, cycles: 1, ..on(fixture("tiny-k3"), None) });
    assert!(reports[0].is_good() && text.contains("--ignore-indexer changes nothing here"), "{text}");
}

#[test]
fn other_names_of_the_indexer() {
    let dir = copy("tiny-k31", &[]);
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("model") {
            continue;
        }
        let mut bytes = fs::read(&path).unwrap();
        // Names of the same length leave the shards' offsets as they are.
        for at in 0..bytes.len().saturating_sub(9) {
            if &bytes[at..at + 9] == b".indexer." {
                bytes[at..at + 9].copy_from_slice(b".chooser.");
            }
        }
        fs::write(&path, bytes).unwrap();
    }
    let names = dir.path().join("names.json");
    let defaults = IndexerNames::default();
    let keys = ["query", "key", "key_norm_gain", "key_norm_bias", "head_weights"];
    let renamed: serde_json::Map<String, serde_json::Value> = keys
        .into_iter()
        .zip(defaults.all())
        .map(|(key, (_, name))| (key.to_owned(), name.replace(".indexer.", ".chooser.").into()))
        .collect();
    fs::write(&names, serde_json::to_vec(&renamed).unwrap()).unwrap();
    let with = |file: &Path| {
        let open = OpenArgs { indexer_names: Some(file.to_owned()), ..OpenArgs::default() };
        Args { open, ..on(dir.path(), None) }
    };
    let (reports, text) = selfcheck(&with(&names));
    assert!(reports[0].is_good(), "{text}");
    assert!(text.contains("20 indexer tensors on 4 full-attention layers under the given names"), "{text}");

    fs::write(&names, r#"{"query": "self_attn.no_such.weight"}"#).unwrap();
    let error = refusal(&with(&names));
    assert!(error.contains("self_attn.no_such.weight"), "{error}");
    let error = refusal(&with(&dir.path().join("absent.json")));
    assert!(error.contains("--indexer-names") && error.contains("absent.json"), "{error}");
}

/// Runs the program: whether it says success, and what it printed to stdout and stderr.
fn program(args: &[&str]) -> (bool, String, String) {
    let args = [&["selfcheck"], args].concat();
    let output = support::program(&args, Stdio::piped());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn exit_codes() {
    let tiny = fixture("tiny-k3");
    let tiny = tiny.to_str().unwrap();
    let (good, out, err) = program(&["--model", tiny, "--cycles", "1", "--threads", "1"]);
    assert!(good && out.contains("PASS tiny-k3") && out.contains("1 thread "), "{out}");
    // What is odd about the checkpoint is a note, once, and not also a warning in the log.
    assert!(out.contains("  note: ") && !err.contains("WARN"), "{out}{err}");

    let (_dir, file) = changed("tiny-k3", |t| i32s(t.get_mut("greedy_ids").unwrap())[0] ^= 1);
    let (good, out, err) = program(&["--model", tiny, "--cycles", "1", "--expect", file.to_str().unwrap()]);
    assert!(!good && out.contains("FAIL tiny-k3") && err.contains("1 of 1 models"), "{out}{err}");

    let (good, out, err) = program(&["--model", tiny, "--threads", "1000000"]);
    assert!(!good && !out.contains("PASS") && err.contains("at most 1024"), "{out}{err}");

    assert_eq!(unread(&["selfcheck", "--model", tiny, "--cycles", "1"]), (Some(1), String::new()));

    let (good, _, err) = program(&["--device", "cuda"]);
    assert!(!good && err.contains("cuda") && err.contains("cpu, reference"), "{err}");
}
