//! Any history of interruptions ends in the same tree, or in an error that says why not.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use k3_format::repack::{Phase, Recipe, RepackError, RunOptions, VerifyMode};

use super::snapshot::Snapshot;
use super::{Workshop, open, same};

fn layers(range: std::ops::Range<usize>) -> RunOptions {
    let mut options = RunOptions::default();
    options.layers = Some(range);
    options
}

const JOURNAL: &str = ".repack-journal";

#[test]
fn parts_add_up() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    for range in [7..13, 0..2] {
        let outcome =
            workshop.run("parts", Recipe::default(), &layers(range)).unwrap_or_else(|e| panic!("{e}"));
        assert!(outcome.report.is_none() && !outcome.missing.is_empty());
        let files = workshop.files("parts");
        assert!(!files.contains_key("model.safetensors.index.json") && files.contains_key(JOURNAL));
    }
    let outcome = workshop.run("parts", Recipe::default(), &layers(2..7)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((outcome.resumed, outcome.written.len()), (10, 5));
    assert!(outcome.report.is_some());
    same(&workshop.files("whole"), &workshop.files("parts"));

    // A finished tree is left as it is.
    let outcome = workshop.tree("parts", Recipe::default(), &RunOptions::default());
    assert_eq!((outcome.resumed, outcome.written.len()), (15, 0));
    same(&workshop.files("whole"), &workshop.files("parts"));
}

/// A journal that ends anywhere, as a killed run leaves it: beside shards that it names, and shards that it does not.
#[test]
fn journals_cut_anywhere() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    let whole = workshop.files("whole");
    workshop.run("part", Recipe::default(), &layers(0..4)).unwrap_or_else(|e| panic!("{e}"));
    let part = workshop.files("part");
    let journal = &part[JOURNAL];
    let target = workshop.out.path().join("cut");
    let ends: Vec<usize> = journal.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i).collect();
    assert_eq!(ends.len(), 7);
    let mut cuts = vec![0, 1, ends[0] / 2, journal.len()];
    cuts.extend(ends.iter().skip(1).flat_map(|&end| [end - 1, end, end + 1]));
    cuts.extend([ends[0], ends[0] + 1]);
    for cut in cuts {
        fs::create_dir(&target).expect("made");
        for (name, bytes) in &part {
            let bytes = if name == JOURNAL { &bytes[..cut] } else { &bytes[..] };
            fs::write(target.join(name), bytes).expect("written");
        }
        // What a shard in flight leaves.
        fs::write(target.join("model-00013-of-00015.safetensors.partial"), "half").expect("written");
        let outcome = workshop.tree("cut", Recipe::default(), &RunOptions::default());
        let lines = ends.iter().filter(|&&end| end < cut).count();
        assert_eq!(outcome.resumed, lines.saturating_sub(1), "cut at {cut}");
        same(&whole, &workshop.files("cut"));
        fs::remove_dir_all(&target).expect("removed");
    }
}

/// Shards that are gone or cut are made again, in unfinished and in finished trees.
#[test]
fn what_is_damaged_is_made_again() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let whole = workshop.files("tree");
    let path = |name: &str| workshop.out.path().join("tree").join(name);
    let cut = |name: &str| {
        let bytes = fs::read(path(name)).expect("a file");
        fs::write(path(name), &bytes[..bytes.len() - 1]).expect("written");
    };
    let again = |written: usize| {
        let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
        assert_eq!(outcome.written.len(), written);
        same(&whole, &workshop.files("tree"));
    };
    fs::remove_file(path("model-00003-of-00015.safetensors")).expect("removed");
    cut("model-00007-of-00015.safetensors");
    again(2);
    for name in ["config.json", "model.safetensors.index.json"] {
        fs::remove_file(path(name)).expect("removed");
        again(0);
        cut(name);
        again(0);
    }
    // Killed between the index and the end.
    fs::write(path(JOURNAL), "").expect("written");
    again(15);
}

/// Verification reads the files, and finds any byte that is not as it should be.
#[test]
fn every_byte_is_verified() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let name = "model-00004-of-00015.safetensors";
    let path = workshop.out.path().join("tree").join(name);
    let good = fs::read(&path).expect("a file");
    let start = 8 + u64::from_le_bytes(*good.first_chunk().expect("8 bytes")) as usize;
    for at in (start..good.len()).step_by(good.len() / 25).chain([start, good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, bad).expect("written");
        for verify in [VerifyMode::Read, VerifyMode::Full] {
            let mut options = RunOptions::default();
            options.verify = verify;
            let result = workshop.run("tree", Recipe::default(), &options);
            match result {
                Err(RepackError::Differs { file, what }) => {
                    assert_eq!(file, path, "{what}");
                }
                other => panic!("byte {at} with {verify:?}: {:?}", other.map(|o| o.proof)),
            }
        }
    }
    fs::write(&path, good).expect("written");
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    workshop.tree("tree", Recipe::default(), &options);
}

/// A finished tree that lost a shard gets it from the source that it was made from, or not at all.
#[test]
fn a_finished_tree_is_not_mended_from_another_source() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let tree = workshop.out.path().join("tree");
    // Outside of what the identity of a source samples.
    let matrix = "language_model.model.layers.5.block_sparse_moe.experts.3.w1.weight_packed";
    let (file, begin, _) = place(workshop.source.path(), matrix);
    let mut bytes = fs::read(&file).expect("a file");
    bytes[begin] ^= 1;
    fs::write(&file, &bytes).expect("written");
    fs::remove_file(tree.join("model-00002-of-00015.safetensors")).expect("removed");
    changed(&workshop, "model-00006-of-00015.safetensors");
    assert!(!tree.join("model.safetensors.index.json").exists());
    bytes[begin] ^= 1;
    fs::write(&file, bytes).expect("written");
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    workshop.tree("again", Recipe::default(), &RunOptions::default());
    same(&workshop.files("tree"), &workshop.files("again"));
}

/// Where the bytes of a tensor are: file, start, end.
fn place(dir: &std::path::Path, name: &str) -> (std::path::PathBuf, usize, usize) {
    let tree = open(dir);
    let tensor = tree.shards().iter().find(|t| t.name == name).unwrap_or_else(|| panic!("{name}"));
    let begin = tensor.begin as usize;
    (dir.join(&tree.shards().files()[tensor.shard].name), begin, begin + tensor.byte_len() as usize)
}

/// A matrix of zeros says nothing about its scale, and a scale that is no number makes it something else.
#[test]
fn the_scale_of_a_matrix_of_zeros_is_verified() {
    let workshop = Workshop::of("tiny-k31");
    let matrix = "language_model.model.layers.1.block_sparse_moe.experts.0.w2";
    let (file, begin, end) = place(workshop.source.path(), &format!("{matrix}.weight_packed"));
    let mut bytes = fs::read(&file).expect("a file");
    bytes[begin..end].fill(0);
    fs::write(&file, bytes).expect("written");
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    workshop.tree("tree", Recipe::default(), &options);

    let scale = format!("{matrix}.weight_global_scale");
    let (file, begin, end) = place(&workshop.out.path().join("tree"), &scale);
    let good = fs::read(&file).expect("a file");
    for wrong in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-45] {
        let mut bad = good.clone();
        bad[begin..end].copy_from_slice(&wrong.to_le_bytes());
        fs::write(&file, bad).expect("written");
        match workshop.run("tree", Recipe::default(), &options) {
            Err(RepackError::Differs { what, .. }) => assert!(what.contains(&scale), "{what}"),
            other => panic!("{wrong}: {:?}", other.map(|o| o.proof)),
        }
    }
}

fn changed(workshop: &Workshop, what: &str) {
    match workshop.run("tree", Recipe::default(), &RunOptions::default()) {
        Err(error @ RepackError::SourceChanged { .. }) => {
            assert!(error.to_string().contains(what), "{error}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a changed source was accepted"),
    }
}

#[test]
fn a_changed_source_is_refused() {
    let mut snapshot = Snapshot::of("tiny-k31");
    let mut workshop = Workshop::new(&snapshot);
    workshop.run("tree", Recipe::default(), &layers(0..5)).unwrap_or_else(|e| panic!("{e}"));
    let before = workshop.files("tree");

    let mut other = Snapshot::of("tiny-k31");
    other.add("new_tower.weight", "BF16", &[1], vec![0, 0]);
    workshop.source = other.write();
    changed(&workshop, "model-00003-of-000003.safetensors` had");

    let mut other = Snapshot::of("tiny-k31");
    other.text().insert("rms_norm_eps".into(), 1e-6.into());
    workshop.source = other.write();
    changed(&workshop, "`config.json` ");

    let norm = "language_model.model.layers.7.input_layernorm.weight";
    let mut other = Snapshot::of("tiny-k31");
    other.get(norm).bytes[0] ^= 1;
    workshop.source = other.write();
    changed(&workshop, "identity");

    // A weight that no sample covers: found because the file is newer, and only in shards that exist already.
    let packed = "language_model.model.layers.2.block_sparse_moe.experts.5.w1.weight_packed";
    snapshot.get(packed).bytes[100] ^= 1;
    workshop.source = snapshot.write();
    changed(&workshop, "made from other weights");
    same(&before, &workshop.files("tree"));
}

/// The same bytes with other times, as after a move to another disk.
#[test]
fn a_moved_source_is_compared_and_accepted() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    workshop.run("tree", Recipe::default(), &layers(0..5)).unwrap_or_else(|e| panic!("{e}"));
    for name in super::files(workshop.source.path()).keys() {
        let file = File::options().append(true).open(workshop.source.path().join(name)).expect("a file");
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).expect("a time");
    }
    let source = super::open(workshop.source.path());
    let repack = k3_format::repack::Repack::new(&source, Recipe::default()).unwrap_or_else(|e| panic!("{e}"));
    let mut phases = Vec::new();
    let outcome = repack.run(&workshop.out.path().join("tree"), &RunOptions::default(), &mut |progress| {
        if phases.last() != Some(&progress.phase) {
            phases.push(progress.phase);
        }
        assert!(progress.bytes_done <= progress.bytes_total);
    });
    let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(phases, [Phase::Checking, Phase::Writing]);
    assert_eq!(outcome.notes.len(), 1);
    same(&workshop.files("whole"), &workshop.files("tree"));
}
