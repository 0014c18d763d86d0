//! Commands whose output nobody reads, as after `| true`.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use support::{fixture, temporary, unread};

/// The checkpoint is what the command is for.
#[test]
fn synth_writes_all_the_same() {
    let dir = temporary();
    let to = dir.path().join("tiny");
    let args = ["synth", to.to_str().unwrap(), "--geometry", "tiny", "--layers", "2"];
    assert_eq!(unread(&args), (Some(0), String::new()));
    assert!(to.join("model.safetensors.index.json").is_file());
}

#[test]
fn bench_ends_quietly() {
    let model = fixture("tiny-k3");
    let args = ["bench", "index", "--repeat", "1", "--model", model.to_str().unwrap()];
    assert_eq!(unread(&args), (Some(1), String::new()));
}

/// A full disk behind stdout is no closed pipe.
#[cfg(target_os = "linux")]
#[test]
fn other_errors_are_told() {
    let model = fixture("tiny-k3");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = support::program(&["bench", "index", "--model", model.to_str().unwrap()], full);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("No space left"), "{text}");
}
