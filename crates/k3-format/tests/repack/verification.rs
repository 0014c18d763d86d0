//! What a verification finds, and what becomes of a tree that fails one.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use k3_format::repack::{
    Differences, ExpertTarget, IndexFate, Recipe, Repack, RepackError, RunOptions, ShardDifferences,
    VerifyMode,
};

use super::{Workshop, files, flip, open, place, same};

fn with(verify: VerifyMode) -> RunOptions {
    let mut options = RunOptions::default();
    options.verify = verify;
    options
}

/// A finished tree, and copies of it to damage.
struct Tree {
    workshop: Workshop,
    recipe: Recipe,
    dir: PathBuf,
    index: Vec<u8>,
}

impl Tree {
    fn new(recipe: Recipe) -> Self {
        Self::of(Workshop::of("tiny-k31"), recipe)
    }

    fn of(workshop: Workshop, recipe: Recipe) -> Self {
        workshop.tree("whole", recipe, &RunOptions::default());
        workshop.tree("tree", recipe, &RunOptions::default());
        let dir = workshop.out.path().join("tree");
        let index = fs::read(dir.join("model.safetensors.index.json")).expect("an index");
        Self { workshop, recipe, dir, index }
    }

    fn place(&self, name: &str) -> (PathBuf, usize, usize) {
        place(&self.dir, name)
    }

    /// What a verification finds. The index, which is gone then, is put back.
    #[track_caller]
    fn failed(&self, verify: VerifyMode) -> Differences {
        let index = self.dir.join("model.safetensors.index.json");
        match self.workshop.run("tree", self.recipe, &with(verify)) {
            Err(RepackError::Differs(found)) => {
                assert_eq!((&found.dir, &found.index), (&self.dir, &IndexFate::Removed));
                assert!(!index.exists(), "{found}");
                assert!(found.to_string().contains("was removed"), "{found}");
                assert!(found.outcome.report.is_some() && found.outcome.proof.is_none());
                fs::write(index, &self.index).expect("written");
                *found
            }
            other => panic!("{verify:?}: {:?}", other.map(|o| o.proof)),
        }
    }

    /// The same command mends a tree that lost its index.
    fn mended(&self, written: usize) {
        fs::remove_file(self.dir.join("model.safetensors.index.json")).expect("removed");
        let outcome = self.workshop.tree("tree", self.recipe, &with(VerifyMode::Full));
        assert_eq!(outcome.written.len(), written);
        same(&self.workshop.files("whole"), &self.workshop.files("tree"));
    }
}

fn expert(layer: usize, expert: usize, part: &str) -> String {
    format!("language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}")
}

/// Verification reads the files, and finds any byte that is not as it should be.
#[test]
fn every_byte_is_verified() {
    let tree = Tree::new(Recipe::default());
    let name = "model-00004-of-00015.safetensors";
    let path = tree.dir.join(name);
    let len = fs::metadata(&path).expect("a file").len() as usize;
    let start =
        fs::read(&path).expect("a file").first_chunk().map_or(0, |n| 8 + u64::from_le_bytes(*n) as usize);
    for at in (start..len).step_by(len / 25).chain([start, len - 1]) {
        flip(&path, [at]);
        for verify in [VerifyMode::Read, VerifyMode::Full] {
            let found = tree.failed(verify);
            assert_eq!(found.shards.len(), 1, "{found}");
            assert_eq!(found.shards[0].file, name);
        }
        flip(&path, [at]);
    }
    flip(&path, [start + 77]);
    tree.failed(VerifyMode::Read);
    tree.mended(1);
}

/// All differences are counted, and the first of each shard shown with their places.
#[test]
fn all_differences_are_told() {
    let tree = Tree::new(Recipe::default());
    // w1 is [96, 64]: 32 bytes of codes and 4 scales a row.
    let (file, begin, _) = tree.place(&expert(3, 7, "w1.weight_packed"));
    flip(&file, (0..30).map(|i| begin + 33 * i + 2));
    let (file, begin, _) = tree.place(&expert(5, 15, "w3.weight_scale"));
    flip(&file, [begin + 4 * 10 + 3, begin + 4 * 11]);
    let (file, begin, _) = tree.place("language_model.model.layers.8.input_layernorm.weight");
    flip(&file, [begin + 2 * 5]);
    let found = tree.failed(VerifyMode::Full);
    let totals: Vec<u64> = found.shards.iter().map(|shard| shard.total).collect();
    assert_eq!(totals, [30, 2, 1]);
    assert_eq!(found.shards[0].first.len(), ShardDifferences::LISTED);
    let text = found.to_string();
    for wanted in [
        "33 difference(s)",
        "model-00004-of-00015.safetensors: 30 difference(s)",
        "(layer 3, expert 7, matrix w1): row 0, columns 4 and 5: codes 0x",
        "(layer 3, expert 7, matrix w1): row 1, columns 6 and 7: codes 0x",
        "and 10 more",
        "(layer 5, expert 15, matrix w3): row 10, block 1: e = ",
        "(layer 5, expert 15, matrix w3): row 11, block 0: e = ",
        "`language_model.model.layers.8.input_layernorm.weight` at [5] (byte 10): ",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    // The hashes of the same three shards.
    let found = tree.failed(VerifyMode::Read);
    assert_eq!(found.shards.len(), 3);
    assert!(found.to_string().contains("repack.json says that it was written with"), "{found}");
    assert!(!found.to_string().contains("source's"), "{found}");
    tree.mended(3);
}

#[test]
fn mxfp4_and_quantized_matrices() {
    let recipe = Recipe::default().experts(ExpertTarget::Mxfp4).dense(k3_format::repack::DenseFormat::Int8);
    let tree = Tree::new(recipe);
    let (file, begin, _) = tree.place(&expert(3, 7, "w2.weight_scale"));
    flip(&file, [begin + 3 * 20 + 1]);
    let name = "language_model.model.layers.5.self_attn.q_proj.weight";
    let (file, begin, end) = tree.place(name);
    let rows = open(&tree.dir).shards().get(name).expect("a tensor").shape[0] as usize;
    flip(&file, [begin + (end - begin) / rows * 2 + 9]);
    let text = tree.failed(VerifyMode::Full).to_string();
    assert!(text.contains("matrix w2): row 20, block 1: e = "), "{text}");
    assert!(text.contains(&format!("`{name}` at [2, 9]")) && text.contains("what quantizing"), "{text}");
    tree.mended(2);
}

/// A matrix of zeros says nothing about its scale, and a scale that is no number makes it something else.
#[test]
fn the_scale_of_a_matrix_of_zeros_is_verified() {
    let workshop = Workshop::of("tiny-k31");
    let matrix = expert(1, 0, "w2");
    let (file, begin, end) = place(workshop.source.path(), &format!("{matrix}.weight_packed"));
    let mut bytes = fs::read(&file).expect("a file");
    bytes[begin..end].fill(0);
    fs::write(&file, bytes).expect("written");
    let tree = Tree::of(workshop, Recipe::default());
    let scale = format!("{matrix}.weight_global_scale");
    let (file, begin, end) = tree.place(&scale);
    let good = fs::read(&file).expect("a file");
    for wrong in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-45] {
        let mut bad = good.clone();
        bad[begin..end].copy_from_slice(&wrong.to_le_bytes());
        fs::write(&file, bad).expect("written");
        let found = tree.failed(VerifyMode::Full);
        assert!(found.shards[0].first[0].contains(&scale), "{found}");
    }
    tree.mended(1);
}

/// A record that does not belong to its shard.
#[test]
fn recorded_hashes_are_verified() {
    let tree = Tree::new(Recipe::default());
    let report = tree.dir.join("repack.json");
    let hash = blake3::hash(&fs::read(tree.dir.join("model-00002-of-00015.safetensors")).expect("a file"));
    let text = fs::read_to_string(&report).expect("a file");
    let wrong = blake3::hash(b"wrong").to_hex();
    let changed = text.replacen(hash.to_hex().as_str(), wrong.as_str(), 1);
    assert!(changed != text);
    fs::write(&report, changed).expect("written");
    for verify in [VerifyMode::Read, VerifyMode::Full] {
        let found = tree.failed(verify);
        assert!(found.shards.len() == 1 && found.to_string().contains(wrong.as_str()), "{found}");
    }
    // The shard is right, and the record is mended.
    tree.mended(0);
}

/// A tree that this engine does not open does not stay finished, however it is given.
#[test]
fn a_finished_tree_is_opened() {
    let tree = Tree::new(Recipe::default());
    let (file, begin, end) = tree.place(&expert(2, 3, "w1.weight_global_scale"));
    let mut bytes = fs::read(&file).expect("a file");
    bytes[begin..end].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).expect("written");
    match tree.workshop.run("tree", tree.recipe, &RunOptions::default()) {
        Err(error @ RepackError::NotOpened { index: IndexFate::Removed, .. }) => {
            assert!(error.to_string().contains("does not open"), "{error}");
        }
        other => panic!("{:?}", other.map(|o| o.notes)),
    }
    fs::write(tree.dir.join("model.safetensors.index.json"), &tree.index).expect("written");
    tree.mended(1);
}

/// When what a folder holds was last changed.
fn times(dir: &Path) -> Vec<(i64, i64)> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(dir).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    paths.push(dir.to_owned());
    paths.sort_unstable();
    let metadata = paths.iter().map(|path| fs::metadata(path).expect("a file"));
    metadata.map(|m| (m.ctime(), m.ctime_nsec())).collect()
}

/// Nothing is written for a verification, and nothing asked of the disk.
#[test]
fn verifying_needs_no_writing() {
    let tree = Tree::new(Recipe::default());
    for path in files(&tree.dir).keys().map(|name| tree.dir.join(name)).chain([tree.dir.clone()]) {
        let mode = if path.is_dir() { 0o555 } else { 0o444 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
    }
    let before = times(&tree.dir);
    let source = open(tree.workshop.source.path());
    let repack = Repack::new(&source, tree.recipe).unwrap_or_else(|e| panic!("{e}"));
    let estimate = repack.estimate(&tree.dir, &with(VerifyMode::Full)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((estimate.needed_bytes, estimate.shards, estimate.complete), (0, 0, 15));
    assert!(estimate.fits() && estimate.write_rate.is_none());
    for verify in [VerifyMode::None, VerifyMode::Read, VerifyMode::Full] {
        let outcome = tree.workshop.tree("tree", tree.recipe, &with(verify));
        assert_eq!(
            outcome.proof.map(|proof| proof.shards_hashed),
            (verify != VerifyMode::None).then_some(15)
        );
    }
    assert_eq!(times(&tree.dir), before);
    fs::set_permissions(&tree.dir, fs::Permissions::from_mode(0o755)).expect("set");
}
