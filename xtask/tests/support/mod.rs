//! Fixtures and damaged copies of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use xtask::expect::{Tensor, Tensors, Values, read_tensors, write_tensors};
use xtask::selfcheck::{self, Report};
use xtask::synth;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

pub(crate) fn temporary() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A fixture that can be damaged, without the files in `without`.
pub(crate) fn copy(name: &str, without: &[&str]) -> TempDir {
    let to = temporary();
    copy_to(to.path(), name, without);
    to
}

/// The same, into an existing folder.
pub(crate) fn copy_to(to: &Path, name: &str, without: &[&str]) {
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap();
        if !without.contains(&file) {
            // Written anew: the originals may be read-only.
            fs::write(to.join(file), fs::read(&path).unwrap()).unwrap();
        }
    }
}

/// The expectations of a fixture, changed, as a file in a folder of its own.
pub(crate) fn changed(name: &str, change: impl FnOnce(&mut Tensors)) -> (TempDir, PathBuf) {
    let dir = temporary();
    let file = dir.path().join("changed.safetensors");
    let mut tensors = read_tensors(&fixture(name).join("expected.safetensors")).unwrap();
    change(&mut tensors);
    write_tensors(&file, &tensors, "a test", false).unwrap();
    (dir, file)
}

pub(crate) fn f32s(tensor: &mut Tensor) -> &mut Vec<f32> {
    match &mut tensor.values {
        Values::F32(values) => values,
        Values::I32(_) => panic!("not F32"),
    }
}

pub(crate) fn i32s(tensor: &mut Tensor) -> &mut Vec<i32> {
    match &mut tensor.values {
        Values::I32(values) => values,
        Values::F32(_) => panic!("not I32"),
    }
}

/// Runs selfcheck; the reports and what it printed.
pub(crate) fn selfcheck(args: &selfcheck::Args) -> (Vec<Report>, String) {
    let mut out = Vec::new();
    let reports = selfcheck::check(args, &mut out).unwrap_or_else(|e| panic!("{e:#}"));
    (reports, String::from_utf8(out).unwrap())
}

/// The error that keeps selfcheck from running.
pub(crate) fn refusal(args: &selfcheck::Args) -> String {
    match selfcheck::check(args, &mut Vec::new()) {
        Ok(_) => panic!("selfcheck ran"),
        Err(error) => format!("{error:#}"),
    }
}

/// Arguments for one model, with expectations from a file of their own.
pub(crate) fn on(model: impl Into<PathBuf>, expect: Option<&Path>) -> selfcheck::Args {
    selfcheck::Args {
        model: Some(model.into()),
        expect: expect.map(Path::to_owned),
        cycles: 1,
        ..selfcheck::Args::default()
    }
}

/// Runs the program with its output to `stdout`.
pub(crate) fn program(args: &[&str], stdout: impl Into<Stdio>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(args).env_remove("RUST_LOG").stdout(stdout).stderr(Stdio::piped());
    command.spawn().unwrap().wait_with_output().unwrap()
}

/// Runs the program with its output to a pipe that nobody reads: its exit code and what it says on stderr.
pub(crate) fn unread(args: &[&str]) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = program(args, writer);
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A small random checkpoint with the words of `fixtures/tokenizer/small`.
pub(crate) fn with_words() -> TempDir {
    let dir = temporary();
    synth::run(&synth::Args {
        dir: dir.path().to_owned(),
        geometry: synth::GeometryName::Tiny,
        variant: None,
        layers: None,
        experts: None,
        tokenizer: Some(fixture("tokenizer/small")),
        seed: 0,
        sparse: false,
    })
    .unwrap();
    dir
}
