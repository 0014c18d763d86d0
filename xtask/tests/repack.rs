//! `cargo xtask repack` as a program: what it writes runs, opens elsewhere, and survives being killed.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use support::{fixture, on, selfcheck, temporary};

const SHAPES: [(&str, &[&str]); 3] =
    [("ct", &[]), ("mo", &["--names", "modelopt"]), ("mx", &["--experts", "mxfp4"])];

fn command(source: &Path, target: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("repack").arg(source).arg(target).args(args).env_remove("RUST_LOG");
    command
}

/// What it says on stdout, and on stderr.
fn repack(source: &Path, target: &Path, args: &[&str]) -> (bool, String, String) {
    let Output { status, stdout, stderr } = command(source, target, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.success(), text(stdout), text(stderr))
}

#[track_caller]
fn good(source: &Path, target: &Path, args: &[&str]) -> String {
    let (success, out, err) = repack(source, target, args);
    assert!(success, "{err}");
    out
}

/// Names and contents of a folder.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

#[track_caller]
fn same(a: &Path, b: &Path) {
    let (a, b) = (files(a), files(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(*bytes == b[name], "{name} differs");
    }
}

fn logits_hash(model: &Path, expect: Option<&Path>) -> String {
    let (reports, text) = selfcheck(&on(model, expect));
    assert!(reports[0].is_good(), "{text}");
    reports[0].cycles[0].logits_hash.to_string()
}

/// All three trees of both fixtures compute what their sources compute, to the bit.
#[test]
fn the_same_logits() {
    for name in ["tiny-k3", "tiny-k31"] {
        let (dir, source) = (temporary(), fixture(name));
        let expected = source.join("expected.safetensors");
        let hash = logits_hash(&source, Some(&expected));
        for (shape, args) in SHAPES {
            let target = dir.path().join(shape);
            let text = good(&source, &target, &[args, &["--verify", "full"]].concat());
            assert!(text.contains("verified: source and result of all 15 shards compared"), "{text}");
            assert!(text.contains("e = 123: "), "{text}");
            assert_eq!(logits_hash(&target, Some(&expected)), hash, "{name} as {shape}");
        }
    }
}

/// The interpreter to use; its packages may be missing.
fn python() -> PathBuf {
    std::env::var_os("K3_PYTHON").map_or_else(|| "python3".into(), PathBuf::from)
}

/// `safetensors` opens the trees, and the packages whose names they carry read the same values.
#[test]
fn other_peoples_packages_read_the_same_values() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/check_repack.py");
    let (dir, source) = (temporary(), fixture("tiny-k31"));
    let dense: [(&str, &[&str]); 4] = [
        ("dense NVFP4", &["--experts", "mxfp4", "--dense", "nvfp4"]),
        ("dense NVFP4 of ModelOpt", &["--names", "modelopt", "--dense", "nvfp4"]),
        ("dense INT8", &["--dense", "int8"]),
        ("dense INT4", &["--experts", "mxfp4", "--dense", "int4"]),
    ];
    for (shape, args) in SHAPES.into_iter().chain(dense) {
        let target = dir.path().join(shape);
        good(&source, &target, args);
        let output = match Command::new(python()).arg(&script).arg(&source).arg(&target).output() {
            Ok(output) => output,
            Err(error) => {
                eprintln!("SKIPPED: {} does not start ({error}); set K3_PYTHON", python().display());
                return;
            }
        };
        let text = String::from_utf8_lossy(&output.stdout);
        match output.status.code() {
            Some(0) => eprintln!("{}", text.trim()),
            Some(77) => eprintln!(
                "SKIPPED {shape}: {}; install safetensors, torch, compressed-tensors and nvidia-modelopt, and set \
                 K3_PYTHON to that interpreter",
                text.trim()
            ),
            _ => panic!("{shape}: {text}{}", String::from_utf8_lossy(&output.stderr)),
        }
    }
}

#[test]
fn a_dry_run_says_all_and_writes_nothing() {
    let dir = temporary();
    let target = dir.path().join("tree");
    let text = good(&fixture("tiny-k31"), &target, &["--dry-run"]);
    for wanted in [
        "to do: 15 shards, read 5.23 MB and write",
        " free",
        "at these rates it takes",
        "nothing was written",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(!target.exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_report_for_machines() {
    let dir = temporary();
    let (target, report) = (dir.path().join("tree"), dir.path().join("report.json"));
    good(&fixture("tiny-k31"), &target, &["--report", report.to_str().unwrap(), "--verify", "read"]);
    let read =
        |path: &Path| -> serde_json::Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let (run, own) = (read(&report), read(&target.join("repack.json")));
    assert_eq!(run["run"]["report"], own);
    assert_eq!(run["run"]["proof"]["shards_hashed"], 15);
    assert_eq!(own["exponents"]["histogram"]["119"], 8);
    assert_eq!(own["shards"].as_array().unwrap().len(), 15);
}

/// A report never takes the place of something else, and that is said before any work.
#[test]
fn a_report_has_its_own_place() {
    let dir = temporary();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for (name, bytes) in files(&fixture("tiny-k31")) {
        fs::write(source.join(name), bytes).unwrap();
    }
    let (before, target) = (files(&source), dir.path().join("tree"));
    std::os::unix::fs::symlink(source.join("config.json"), dir.path().join("link")).unwrap();
    let refused = |report: &Path, wanted: &str| {
        let (success, _, err) = repack(&source, &target, &["--report", report.to_str().unwrap()]);
        assert!(!success && err.contains(wanted), "{}: {err}", report.display());
    };
    refused(&source.join("config.json"), "into the source");
    refused(&dir.path().join("link"), "symbolic link");
    refused(&dir.path().join("nowhere/report.json"), "the folder of --report");
    refused(dir.path(), "no regular file");
    assert!(!target.exists());
    good(&source, &target, &[]);
    refused(&target.join("config.json"), "into the target");
    assert!(files(&source) == before);
}

#[test]
fn arguments_that_contradict() {
    let dir = temporary();
    let target = dir.path().join("tree");
    for (args, wanted) in [
        (&["--experts", "mxfp4", "--names", "modelopt"][..], "MXFP4 has one set of names"),
        (&["--layers", "5..3"], "expected A..B"),
        (&["--layers", "3..99"], "the model has layers 0..13"),
        (&["--memory", "1"], "too small"),
    ] {
        let (success, _, err) = repack(&fixture("tiny-k31"), &target, args);
        assert!(!success && err.contains(wanted), "{wanted}: {err}");
    }
    assert!(!target.exists());
}

/// Ends a run with SIGKILL after a while; whether it was still running.
fn kill_after(mut child: Child, after: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < after {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

/// Twenty kills at random moments, in histories of several kills each. Whatever the moments are, the tree must be the
/// one of an uninterrupted run.
#[test]
fn killed_twenty_times() {
    let dir = temporary();
    let (source, whole, target) = (fixture("tiny-k31"), dir.path().join("whole"), dir.path().join("tree"));
    let start = Instant::now();
    good(&source, &whole, &["--jobs", "2"]);
    let mut longest = start.elapsed();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (mut kills, mut histories) = (0, 0);
    while kills < 20 {
        let of_this = 1 + rng.next_u32() % 4;
        for _ in 0..of_this {
            let args = ["--jobs", "2", "--io", if rng.next_u32() % 2 == 0 { "auto" } else { "cached" }];
            let mut command = command(&source, &target, &args);
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let after = longest.mul_f64(f64::from(rng.next_u32()) / f64::from(u32::MAX));
            if kill_after(child, after) {
                kills += 1;
            } else {
                // It was through; shorter next time, so that this ends on any machine.
                longest = longest.mul_f64(0.8);
                break;
            }
        }
        good(&source, &target, &["--jobs", "2"]);
        same(&whole, &target);
        fs::remove_dir_all(&target).unwrap();
        histories += 1;
    }
    eprintln!("{kills} kills in {histories} histories");
}

/// Two runs at once on one target: one does the work, the other is refused or finds it done, and the tree is right.
#[test]
fn two_at_once() {
    let dir = temporary();
    let (source, whole, target) = (fixture("tiny-k31"), dir.path().join("whole"), dir.path().join("tree"));
    good(&source, &whole, &[]);
    for _ in 0..5 {
        let run =
            || command(&source, &target, &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let outputs: Vec<Output> =
            [run(), run()].into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        assert!(outputs.iter().any(|output| output.status.success()), "{outputs:?}");
        for output in outputs.iter().filter(|output| !output.status.success()) {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(text.contains("is being written by another repack"), "{text}");
        }
        same(&whole, &target);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// A limit of the system in place of a full disk: no file may have more than 400 KiB.
#[test]
fn no_more_room() {
    let dir = temporary();
    let (source, whole, target) = (fixture("tiny-k31"), dir.path().join("whole"), dir.path().join("tree"));
    good(&source, &whole, &[]);
    for io in ["cached", "auto"] {
        let script = "trap '' XFSZ; ulimit -f 800; exec \"$0\" repack \"$1\" \"$2\" --io \"$3\"";
        let output = Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_xtask")])
            .args([&source, &target])
            .arg(io)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        for wanted in
            ["the target has no room for", "shards are complete and stay", "run the same command again"]
        {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(!target.join("model.safetensors.index.json").exists());
        good(&source, &target, &["--io", io]);
        same(&whole, &target);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Places that nobody may write to.
#[test]
fn a_target_that_cannot_be_written() {
    let refused = |target: &Path, wanted: &str| {
        let (success, _, err) = repack(&fixture("tiny-k31"), target, &["--io", "cached"]);
        let named = err.contains(&target.display().to_string());
        assert!(!success && named && err.contains(wanted), "{wanted}: {err}");
    };
    refused(Path::new("/proc/self/tree"), "has 0 bytes free");
    let dir = temporary();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(closed.join("probe"), "").is_ok() {
        eprintln!("SKIPPED: this user may write into folders that forbid it; see xtask/tests/full_disk.sh");
        return;
    }
    refused(&closed, "cannot create");
    refused(&closed.join("tree"), "cannot create");
}
