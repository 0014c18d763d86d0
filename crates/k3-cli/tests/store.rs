//! Stores, their budget, and what a run says about them, as a user meets them.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// 12 layers of 16 experts, 4 a token.
fn model() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31").display().to_string()
}

/// Stderr of `k3 generate` on the fixture, which must succeed: 3 tokens in, 3 out.
#[track_caller]
fn told(arguments: &[&str]) -> String {
    let (success, told) = run(Command::new(env!("CARGO_BIN_EXE_k3")), arguments);
    assert!(success, "{arguments:?}: {told}");
    told
}

fn run(mut command: Command, arguments: &[&str]) -> (bool, String) {
    let fixed =
        ["--ids", "5,6,7", "--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--threads", "2"];
    command.arg("generate").arg(model()).args(fixed).args(arguments);
    let output = command.output().unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

fn hash(told: &str) -> &str {
    told.lines().find(|line| line.starts_with("logits_hash")).unwrap_or_else(|| panic!("no hash: {told}"))
}

/// Stores with slots that this file system has.
fn slab_stores() -> impl Iterator<Item = &'static str> {
    let (direct, told) =
        run(Command::new(env!("CARGO_BIN_EXE_k3")), &["--store", "direct", "--usage", "none"]);
    assert!(direct || told.contains("try --store buffered"), "{told}");
    ["buffered", "direct"].into_iter().take(1 + usize::from(direct))
}

#[test]
fn every_store_gives_the_same_logits_and_says_what_it_is() {
    let auto = told(&[]);
    assert!(auto.contains("experts: mapped: the checkpoint, "), "{auto}");
    assert!(auto.contains("fits in a quarter of memory"), "{auto}");
    let mapped = told(&["--store", "mapped"]);
    assert!(mapped.contains("experts: mapped: as asked"), "{mapped}");
    assert_eq!(hash(&mapped), hash(&auto));
    for store in slab_stores() {
        let found =
            told(&["--store", store, "--usage", "none", "--expert-budget", "1MB", "--reads-in-flight", "3"]);
        assert_eq!(hash(&found), hash(&auto), "{store}");
        assert!(found.contains(&format!("experts: {store}, as asked; 1.00 MB = ")), "{found}");
        let all = told(&["--store", store, "--usage", "none"]);
        assert!(all.contains("expected hit rate 1.00"), "{all}");
        assert_eq!(hash(&all), hash(&auto), "{store}");
    }
}

#[test]
fn a_budget_that_is_not_there_is_told() {
    let found = told(&["--store", "buffered", "--usage", "none", "--expert-budget", "900000GB"]);
    assert!(found.contains("note: --expert-budget 900.00 TB is "), "{found}");
    assert!(found.contains("more than there is: "), "{found}");
    assert!(found.contains("MISSING") && found.contains("pinned weights"), "{found}");
    let (success, told) =
        run(Command::new(env!("CARGO_BIN_EXE_k3")), &["--store", "buffered", "--expert-budget", "1kB"]);
    assert!(!success && told.contains("is too small"), "{told}");
}

/// A limit is a limit: what would be left to the page cache is read into slots if their bytes are named.
#[test]
fn a_budget_rules_the_page_cache_out() {
    let found = told(&["--expert-budget", "1MB", "--usage", "none"]);
    assert!(found.contains("experts: direct, ") || found.contains("experts: buffered, "), "{found}");
    assert!(found.contains("; 1.00 MB = "), "{found}");
}

#[test]
fn a_place_for_uses_that_cannot_be_written_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("uses").display().to_string();
    let (success, told) =
        run(Command::new(env!("CARGO_BIN_EXE_k3")), &["--store", "buffered", "--usage", &below]);
    assert!(!success && told.contains("the uses of experts in") && !told.contains("experts: "), "{told}");
}

#[test]
fn statistics_are_a_table() {
    for store in slab_stores() {
        let found = told(&["--store", store, "--usage", "none", "--expert-budget", "3MB", "--stats"]);
        for label in [
            "prompt ",
            "completion ",
            "experts ",
            "bytes ",
            "waiting ",
            "slots ",
            "drive 0 ",
            "peak memory ",
            "memory ",
            "  reserve ",
        ] {
            assert!(found.lines().any(|line| line.starts_with(label)), "{label:?} in\n{found}");
        }
        // 3 tokens, then 2 steps of 12 layers with 4 experts each.
        assert!(found.contains(" hits (") && found.contains("completion    3 tokens, "), "{found}");
        assert!(found.lines().count() < 40, "{found}");
    }
    let mapped = told(&["--stats"]);
    assert!(mapped.contains("is up to the system's page cache"), "{mapped}");
    assert!(mapped.contains("planned "), "{mapped}");
}

#[test]
fn a_trace_has_every_fetch_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let file = path.display().to_string();
    let arguments =
        ["--store", "buffered", "--usage", "none", "--expert-budget", "1MB", "--trace", &file, "--stats"];
    let with = told(&arguments);
    assert_eq!(hash(&with), hash(&told(&[])));
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let named = |name: &str| -> Vec<&Value> {
        events.iter().filter(|e| e["ph"] == "X" && e["name"] == name).collect()
    };
    // A prompt and two steps through 12 layers.
    let fetches = named("fetch");
    assert_eq!(fetches.len(), 36);
    let misses: u64 = fetches.iter().map(|event| event["args"]["misses"].as_u64().unwrap()).sum();
    let reads = named("read");
    assert!(reads.len() as u64 >= misses && misses > 0, "{misses} misses in {} reads", reads.len());
    assert!(reads.iter().all(|event| event["args"]["bytes"].as_u64().unwrap() > 0));
    let threads = events.iter().filter(|event| event["name"] == "thread_name");
    let names: Vec<&str> = threads.map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"experts-0") && names.contains(&"main"), "{names:?}");

    let empty = "--trace has nothing to write of mapped files";
    assert!(!with.contains(empty));
    assert!(told(&["--store", "mapped", "--trace", &file]).contains(empty));

    let (success, told) =
        run(Command::new(env!("CARGO_BIN_EXE_k3")), &["--trace", "/nonexistent/trace.json"]);
    assert!(!success && told.contains("writing a trace to /nonexistent/trace.json"), "{told}");
}

#[test]
fn uses_are_kept_between_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k3/uses");
    let file = path.display().to_string();
    let arguments = ["--store", "buffered", "--expert-budget", "3MB", "--usage", &file, "--stats"];
    let first = told(&arguments);
    assert!(path.is_file() && first.contains("0 bytes from earlier use"), "{first}");
    let second = told(&arguments);
    assert_eq!(hash(&first), hash(&second));

    let kept = std::fs::read(&path).unwrap();
    std::fs::write(&path, &kept[..kept.len() / 2]).unwrap();
    let third = told(&arguments);
    assert!(third.contains("does not hold uses of this checkpoint's experts"), "{third}");
    assert!(third.contains("it will be replaced") && hash(&third) == hash(&first), "{third}");
    assert!(!told(&arguments).contains("does not hold uses"));

    std::fs::write(&path, "a letter").unwrap();
    let (success, refused) = run(Command::new(env!("CARGO_BIN_EXE_k3")), &arguments);
    assert!(!success && refused.contains("is left as it is"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a letter");

    // In the user's cache, unless it is told not to.
    let cache = |arguments: &[&str]| {
        let cache = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_k3"));
        command.env("XDG_CACHE_HOME", cache.path());
        let (success, told) = run(command, arguments);
        assert!(success, "{told}");
        std::fs::read_dir(cache.path().join("k3")).map_or(0, Iterator::count)
    };
    assert_eq!(cache(&["--store", "buffered"]), 1);
    assert_eq!(cache(&["--store", "buffered", "--usage", "none"]), 0);
    assert_eq!(cache(&["--store", "mapped"]), 0);
}

/// The plan is made from the limit of the process, and keeps to it.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_holds() {
    let limited = |kilobytes: u64, arguments: &[&str]| {
        let mut command = Command::new("sh");
        // Where memory ends, telling of it must not need more.
        command.env("RUST_BACKTRACE", "0");
        command.args([
            "-c",
            &format!("ulimit -d {kilobytes} && exec \"$@\""),
            "sh",
            env!("CARGO_BIN_EXE_k3"),
        ]);
        run(command, arguments)
    };
    let expected = told(&[]);
    for store in slab_stores() {
        let (success, found) = limited(64 << 10, &["--store", store, "--usage", "none", "--stats"]);
        assert!(success, "{found}");
        assert_eq!(hash(&found), hash(&expected));
        assert!(found.contains("the process limit \"Max data size\""), "{found}");
    }
    let (success, found) = limited(14 << 10, &["--store", "buffered", "--usage", "none"]);
    assert!(!success && found.contains("of memory are missing to run this checkpoint"), "{found}");
}
