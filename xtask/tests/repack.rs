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
use support::{copy, fixture, on, selfcheck, temporary};

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

fn read_json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A dry run says that there is no room, and writes its report.
#[test]
fn a_dry_run_without_room() {
    let dir = temporary();
    let report = dir.path().join("report.json");
    let args = ["--dry-run", "--report", report.to_str().unwrap()];
    let text = good(&fixture("tiny-k31"), &dir.path().join("tree"), &args);
    assert!(!text.contains("warning"), "{text}");
    let found = read_json(&report);
    assert_eq!((&found["dry_run"]["fits"], &found["dry_run"]["shards"]), (&true.into(), &15.into()));
    assert!(found["dry_run"]["estimate"]["needed_bytes"].as_u64().unwrap() > 5_000_000);
    // A file system of 0 bytes.
    let text = good(&fixture("tiny-k31"), Path::new("/proc/self/tree"), &args);
    assert!(text.contains("warning: there is no room for that"), "{text}");
    assert_eq!(read_json(&report)["dry_run"]["fits"], false);
}

/// What is said of a source is true of a run that copies it whole.
#[test]
fn notes() {
    let dir = temporary();
    let text = good(&fixture("tiny-k31"), &dir.path().join("all"), &["--dry-run"]);
    assert!(!text.contains("skipped") && !text.contains("vision"), "{text}");
    let text = good(&fixture("tiny-k31"), &dir.path().join("text"), &["--dry-run", "--text-only"]);
    assert!(text.contains("left out: 2 tensors") && text.contains("vision, by --text-only"), "{text}");
}

/// Runs that finish nothing say what they read.
#[test]
fn exponents_of_every_run() {
    let dir = temporary();
    let text = good(&fixture("tiny-k31"), &dir.path().join("part"), &["--layers", "2..4", "--jobs", "0"]);
    for wanted in ["  layer   2: ", "  layer   3: ", "  e = 123: ", "the tree is not finished: 11 shards"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(!text.contains("  layer   4: "), "{text}");

    // The scale of a block becomes NaN.
    let damaged = copy("tiny-k31", &[]);
    let source = k3_format::Checkpoint::open(damaged.path(), &k3_format::OpenOptions::default()).unwrap();
    let name = "language_model.model.layers.4.block_sparse_moe.experts.2.w2.weight_scale";
    let tensor = source.shards().get(name).unwrap();
    let (file, at) = (source.shards().files()[tensor.shard].path.clone(), tensor.begin as usize + 7);
    drop(source);
    let mut bytes = fs::read(&file).unwrap();
    bytes[at] = 255;
    fs::write(&file, bytes).unwrap();
    for args in [&[][..], &["--experts", "mxfp4"]] {
        let (target, report) = (dir.path().join(args.join("")), dir.path().join("report.json"));
        let (success, out, err) = repack(
            damaged.path(),
            &target.join("tree"),
            &[args, &["--report", report.to_str().unwrap()]].concat(),
        );
        assert!(!success);
        for wanted in [
            "  layer   4: ",
            "  layer  12: ",
            "  e = 123: ",
            "refused: 0 matrices with scales that do not fit NVFP4, 1 with scales that are NaN",
        ] {
            assert!(out.contains(wanted), "{wanted}: {out}");
        }
        assert!(err.contains("the source is damaged") && !err.contains("--experts mxfp4"), "{err}");
        let report = read_json(&report);
        assert_eq!((&report["run"]["refused"], &report["run"]["refused_for_nan"]), (&1.into(), &1.into()));
        assert_eq!(report["run"]["exponents"].as_array().unwrap().len(), 12);
    }
}

/// A tree that fails its verification is reported, and mended by the same command.
#[test]
fn a_failed_verification() {
    let dir = temporary();
    let (target, report) = (dir.path().join("tree"), dir.path().join("report.json"));
    let args = ["--verify", "full", "--report", report.to_str().unwrap()];
    good(&fixture("tiny-k31"), &target, &[]);
    let before = files(&target);
    let shard = target.join("model-00005-of-00015.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    // The last scalar of the last expert, of which the exponent changes.
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let (success, out, err) = repack(&fixture("tiny-k31"), &target, &args);
    assert!(!success);
    assert!(out.contains("  layer   4: ") && !out.contains("finished: "), "{out}");
    assert!(err.contains("failed its verification") && err.contains("index.json was removed"), "{err}");
    let found = read_json(&report);
    let failed = &found["failed_verification"]["shards"][0];
    assert_eq!(failed["file"], "model-00005-of-00015.safetensors");
    assert!(failed["total"].as_u64().unwrap() > 0 && !failed["first"].as_array().unwrap().is_empty());
    assert_eq!(found["failed_verification"]["index"], "removed");
    assert_eq!(found["run"]["report"], read_json(&target.join("repack.json")));
    let out = good(&fixture("tiny-k31"), &target, &args);
    assert!(out.contains("14 are right, 1 are made again"), "{out}");
    assert!(out.contains("verified: all 15 shards have the BLAKE3"), "{out}");
    assert!(files(&target) == before);
}

/// Lines end where the terminal does, and not in the middle of it.
#[test]
fn help_fits() {
    for width in [80, 100] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        let output = command.args(["repack", "--help"]).env("COLUMNS", width.to_string()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!((width * 3 / 4..=width).contains(&longest), "{longest} of {width}: {text}");
        // Text that was broken by hand for another width leaves short lines between long ones.
        let end = text.split("An interrupted run").nth(1).unwrap();
        let lines: Vec<&str> = end.trim_end().lines().collect();
        for line in &lines[1..lines.len() - 1] {
            assert!(line.chars().count() > width * 3 / 4, "{line:?} in {width}: {text}");
        }
    }
}

#[test]
fn a_report_for_machines() {
    let dir = temporary();
    let (target, report) = (dir.path().join("tree"), dir.path().join("report.json"));
    good(&fixture("tiny-k31"), &target, &["--report", report.to_str().unwrap(), "--verify", "read"]);
    let (run, own) = (read_json(&report), read_json(&target.join("repack.json")));
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
    // A second name of a file of the source gets the report, and the file stays.
    let second = dir.path().join("second");
    fs::hard_link(source.join("config.json"), &second).unwrap();
    good(&source, &target, &["--report", second.to_str().unwrap()]);
    assert!(fs::read_to_string(&second).unwrap().contains("\"seconds\""));
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

/// Twenty kills at random moments, in histories of several kills each, some of which lose their notes. Whatever the
/// moments are, the tree must be the one of an uninterrupted run.
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
            // And now and then its notes are lost: what was not verified since is not trusted.
            let is_shard = |name: &String| name.starts_with("model-") && name.ends_with(".safetensors");
            if rng.next_u32() % 4 == 0 && target.exists() && files(&target).keys().any(is_shard) {
                for notes in [".repack-journal", "repack.json"] {
                    let _ = fs::remove_file(target.join(notes));
                }
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
