//! Recorded routing, and options that decide nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use k3_experts::policy::{LayerLru, Policy, Retention};
use k3_experts::simulate::replay;
use k3_experts::trace::{Geometry, Trace};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn k3(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_k3")).args(args).output().unwrap()
}

#[test]
fn routing_is_recorded() {
    let model = fixtures().join("tiny-k31").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace").display().to_string();
    let args = [
        "generate",
        &model,
        "--ids",
        "5,6,7",
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--record-routing",
        &file,
    ];
    let output = k3(&args);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && told.contains("routing of 5 tokens in "), "{told}");
    assert!(told.contains(" MB of experts a prompt token"), "{told}");
    let bytes = std::fs::read(&file).unwrap();
    let header = b"k3-routing 1 12 16 4 16\n";
    assert!(bytes.starts_with(header));
    assert_eq!(bytes.len(), header.len() + 5 * 12 * 16 * 2);
    let refused = k3(&["generate", &model, "--ids", "5", "--record-routing", "/nonexistent/trace"]);
    let told = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && told.contains("recording routing in /nonexistent/trace"), "{told}");
    assert!(!told.contains("experts: "), "before anything is loaded: {told}");
}

/// A slip in the name of an output costs nobody a file.
#[test]
fn outputs_replace_only_their_like() {
    let model = fixtures().join("tiny-k31").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (file, config) = (path("new"), path("config.json"));
    // A trace begins with the first line of these, too.
    const LIST: &str = "[\n  {}\n]\n";
    std::fs::write(&config, LIST).unwrap();
    let fixed = ["generate", &model, "--ids", "5,6", "--max-tokens", "1", "--store", "buffered"];
    let check = |more: &[&str], expected: Result<(), &str>| {
        let output = k3(&[&fixed[..], more].concat());
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.success(), expected.is_ok(), "{more:?}: {told}");
        assert!(expected.err().is_none_or(|words| told.contains(words)), "{more:?}: {told}");
        assert_eq!(std::fs::read_to_string(&config).unwrap(), LIST, "{more:?}");
    };
    for (option, refusal) in [
        ("--record-routing", "a file of another kind has this name"),
        ("--trace", "a file of another kind has this name"),
        ("--usage", "is no file of uses of experts"),
    ] {
        let usage = if option == "--usage" { &[][..] } else { &["--usage", "none"] };
        check(&[&[option, &config], usage].concat(), Err(refusal));
        // Twice: its own file is replaced.
        check(&[&[option, &file], usage].concat(), Ok(()));
        check(&[&[option, &file], usage].concat(), Ok(()));
        std::fs::remove_file(&file).unwrap();
    }
    let same = Err("name the same file");
    check(&["--trace", &file, "--record-routing", &file, "--usage", "none"], same);
    check(&["--record-routing", &file, "--usage", &file], same);
    // Neither is there yet, and the names differ.
    let spelled = path("../") + dir.path().file_name().unwrap().to_str().unwrap() + "/./new";
    check(&["--trace", &file, "--record-routing", &spelled, "--usage", "none"], same);
    assert!(!std::fs::exists(&file).unwrap());
    check(&["--usage", &dir.path().display().to_string()], Err("is no file of uses of experts"));
}

/// What was asked for and decides nothing is said, and nothing else is.
#[test]
fn options_without_effect() {
    let model = fixtures().join("tiny-k31").display().to_string();
    let check = |more: &[&str], note: Option<&str>| {
        let fixed = ["generate", &model, "--ids", "5,6", "--max-tokens", "1", "--usage", "none"];
        let output = k3(&[&fixed[..], more].concat());
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        let found = told.lines().find(|line| line.starts_with("note: ") && line.contains("--"));
        assert_eq!(found.is_some(), note.is_some(), "{more:?}: {told}");
        assert!(found.zip(note).is_none_or(|(found, words)| found.contains(words)), "{more:?}: {told}");
    };
    check(&["--seed", "7", "--top-k", "5"], None);
    check(&["--temperature", "0"], None);
    check(&["--temperature", "0", "--seed", "7", "--min-p", "0.1"], Some("whatever --min-p, --seed may be"));
    check(&["--threads", "2"], None);
    check(&["--threads", "2", "--device", "reference"], Some("--threads"));
    check(&["--store", "mapped"], None);
    check(&["--store", "mapped", "--lookahead", "off"], None);
    check(&["--store", "mapped", "--lookahead", "input"], Some("which --lookahead cannot change"));
    check(&["--reads-in-flight", "3"], Some("which --reads-in-flight cannot change"));
    check(
        &["--store", "mapped", "--expert-budget", "5MB", "--reads-in-flight", "3"],
        Some("which --expert-budget, --reads-in-flight cannot change"),
    );
    check(&["--store", "buffered", "--expert-budget", "5MB", "--reads-in-flight", "3"], None);
    check(&["--ignore-indexer"], None);
    let without = fixtures().join("tiny-k3").display().to_string();
    let output = k3(&["generate", &without, "--ids", "5", "--max-tokens", "1", "--ignore-indexer"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("this checkpoint has no indexer"), "{told}");
}

/// The trained model's own routing: recency alone is not better, whatever fits.
#[test]
fn retention_on_recorded_routing() {
    let model = fixtures().join("nano").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace");
    let (path, prompt) = (file.display().to_string(), "What is the weather in Paris?");
    let args = ["generate", &model, "--prompt", prompt, "--max-tokens", "300", "--ignore-eos"];
    let output = k3(&[&args[..], &["--record-routing", &path]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trace = Trace::read(std::io::BufReader::new(std::fs::File::open(&file).unwrap())).unwrap();
    let Geometry { layers, experts, per_token } = trace.geometry();
    for working_sets in [0.5, 1.0, 1.5, 2.0, 3.0] {
        let slots = (working_sets * trace.geometry().working_set() as f64) as usize;
        let rate = |policy: &mut dyn Policy| replay(&trace, policy, trace.len() / 2).hit_rate();
        let (lru, ours) = (
            rate(&mut LayerLru::new(slots, layers)),
            rate(&mut Retention::new(slots, layers, experts, per_token)),
        );
        assert!(ours > lru, "{ours:.4} against {lru:.4} at {working_sets} working sets");
    }
}
