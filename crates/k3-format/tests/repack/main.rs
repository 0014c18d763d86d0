//! Repacking the fixtures: what comes out, what is refused, and that no history of interruptions shows.

mod histories;
mod recovery;
mod refusals;
#[allow(dead_code, reason = "shared with the tests of opening")]
#[path = "../checkpoint/snapshot.rs"]
mod snapshot;
mod targets;
mod trees;
mod verification;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use k3_format::repack::{Outcome, Recipe, Repack, RepackError, RunOptions};
use k3_format::{Checkpoint, OpenOptions};
use snapshot::Snapshot;
use tempfile::TempDir;

/// A source and a place for what comes out.
pub(crate) struct Workshop {
    pub(crate) source: TempDir,
    pub(crate) out: TempDir,
}

impl Workshop {
    pub(crate) fn new(source: &Snapshot) -> Self {
        Self { source: source.write(), out: tempfile::tempdir().expect("a directory") }
    }

    pub(crate) fn of(fixture: &str) -> Self {
        Self::new(&Snapshot::of(fixture))
    }

    pub(crate) fn run(
        &self,
        name: &str,
        recipe: Recipe,
        options: &RunOptions,
    ) -> Result<Outcome, RepackError> {
        run(self.source.path(), &self.out.path().join(name), recipe, options)
    }

    /// A finished tree of this name.
    pub(crate) fn tree(&self, name: &str, recipe: Recipe, options: &RunOptions) -> Outcome {
        let outcome = self.run(name, recipe, options).unwrap_or_else(|e| panic!("{e}"));
        assert!(outcome.report.is_some(), "{name} is not finished");
        outcome
    }

    /// A tree of this name, of which another run makes these layers.
    pub(crate) fn part(&self, name: &str, layers: Range<usize>) -> Outcome {
        self.run(name, Recipe::default(), &of_layers(layers)).unwrap_or_else(|e| panic!("{e}"))
    }

    pub(crate) fn files(&self, name: &str) -> BTreeMap<String, Vec<u8>> {
        files(&self.out.path().join(name))
    }
}

pub(crate) fn of_layers(layers: Range<usize>) -> RunOptions {
    let mut options = RunOptions::default();
    options.layers = Some(layers);
    options
}

pub(crate) fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

pub(crate) fn run(
    source: &Path,
    target: &Path,
    recipe: Recipe,
    options: &RunOptions,
) -> Result<Outcome, RepackError> {
    let source = open(source);
    let repack = Repack::new(&source, recipe)?;
    repack.run(target, options, &mut |_| {})
}

/// Where the bytes of a tensor are: file, start, end.
pub(crate) fn place(dir: &Path, name: &str) -> (PathBuf, usize, usize) {
    let tree = open(dir);
    let tensor = tree.shards().get(name).unwrap_or_else(|| panic!("{name}"));
    let begin = tensor.begin as usize;
    (dir.join(&tree.shards().files()[tensor.shard].name), begin, begin + tensor.byte_len() as usize)
}

/// Flips the lowest bit of some bytes of a file, in place.
pub(crate) fn flip(path: &Path, places: impl IntoIterator<Item = usize>) {
    let file = fs::File::options().read(true).write(true).open(path).expect("a file");
    for at in places {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).expect("a byte");
        file.write_all_at(&[byte[0] ^ 1], at as u64).expect("written");
    }
}

/// Flips the lowest bit of the last byte of a file.
pub(crate) fn flip_last(path: &Path) {
    flip(path, [fs::metadata(path).expect("a file").len() as usize - 1]);
}

/// Names and contents of a folder.
pub(crate) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    entries
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read(path).expect("a file"))
        })
        .collect()
}

/// Two folders hold the same, byte for byte.
#[track_caller]
pub(crate) fn same(a: &BTreeMap<String, Vec<u8>>, b: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in a {
        assert!(*bytes == b[name], "{name} differs");
    }
}
