//! Any history of interruptions ends in the same tree, or in an error that says why not.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use k3_format::repack::{IoMode, Phase, Recipe, Repack, RepackError, RunOptions};

use super::snapshot::Snapshot;
use super::{Workshop, flip, of_layers, place, same};

const JOURNAL: &str = ".repack-journal";

#[test]
fn parts_add_up() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    for range in [7..13, 0..2] {
        let outcome = workshop.part("parts", range);
        assert!(outcome.report.is_none() && !outcome.missing.is_empty());
        let files = workshop.files("parts");
        assert!(!files.contains_key("model.safetensors.index.json") && files.contains_key(JOURNAL));
    }
    let outcome = workshop.part("parts", 2..7);
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
    workshop.part("part", 0..4);
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
        // What is not noted any more is compared, and found right.
        assert_eq!((outcome.resumed, outcome.written.len()), (6, 9), "cut at {cut}");
        let unnoted = 7 - ends.iter().filter(|&&end| end < cut).count().max(1);
        assert_eq!(outcome.notes.len(), usize::from(unnoted > 0), "cut at {cut}: {:?}", outcome.notes);
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
    again(0);
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
    flip(&file, [begin]);
    fs::remove_file(tree.join("model-00002-of-00015.safetensors")).expect("removed");
    changed(&workshop, "model-00006-of-00015.safetensors");
    assert!(!tree.join("model.safetensors.index.json").exists());
    flip(&file, [begin]);
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    workshop.tree("again", Recipe::default(), &RunOptions::default());
    same(&workshop.files("tree"), &workshop.files("again"));
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
    workshop.part("tree", 0..5);
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

/// Sets the times of all files of a folder.
fn touch(dir: &Path, seconds: u64) {
    for name in super::files(dir).keys() {
        let file = File::options().append(true).open(dir.join(name)).expect("a file");
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).expect("a time");
    }
}

/// The same bytes with other times, as after a move to another disk.
#[test]
fn a_moved_source_is_compared_and_accepted() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    workshop.part("tree", 0..5);
    touch(workshop.source.path(), 1_000_000_000);
    let source = super::open(workshop.source.path());
    let repack = Repack::new(&source, Recipe::default()).unwrap_or_else(|e| panic!("{e}"));
    // Once it was compared, it is not again.
    for (range, expected) in [
        (0..6, &[Phase::Checking, Phase::Writing][..]),
        (0..7, &[Phase::Writing]),
        (0..13, &[Phase::Writing]),
    ] {
        let mut phases = Vec::new();
        let outcome = repack.run(&workshop.out.path().join("tree"), &of_layers(range), &mut |progress| {
            if phases.last() != Some(&progress.phase) {
                phases.push(progress.phase);
            }
            assert!(progress.bytes_done <= progress.bytes_total);
        });
        let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(phases, expected);
        assert_eq!(outcome.notes.len(), expected.len() - 1);
    }
    same(&workshop.files("whole"), &workshop.files("tree"));
}

/// Runs while something happens to the source after the first bytes were written, and says what is refused.
fn meanwhile(workshop: &Workshop, mut something: impl FnMut(&Path)) -> String {
    let source = super::open(workshop.source.path());
    let repack = Repack::new(&source, Recipe::default()).unwrap_or_else(|e| panic!("{e}"));
    let (mut options, mut done) = (RunOptions::default(), false);
    // Past the page cache, each shard is opened once more, and a file that was replaced before that is an error then.
    options.io = IoMode::Cached;
    let result = repack.run(&workshop.out.path().join("tree"), &options, &mut |_| {
        if !std::mem::replace(&mut done, true) {
            something(workshop.source.path());
        }
    });
    assert!(!workshop.out.path().join("tree/model.safetensors.index.json").exists());
    match result {
        Err(error @ RepackError::SourceModified { .. }) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("finished"),
    }
}

/// Whoever writes to the source during a run gets no tree of two sources.
#[test]
fn a_source_that_is_written_to_meanwhile() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    let whole = workshop.files("whole");
    let check = |wanted: &str, something: &mut dyn FnMut(&Path)| {
        let text = meanwhile(&workshop, something);
        assert!(text.contains(wanted), "{wanted}: {text}");
        fs::remove_dir_all(workshop.out.path().join("tree")).expect("removed");
    };
    // Other times, for whatever reason.
    check("was written to or replaced", &mut |dir| touch(dir, 1_000_000_000));
    // Another file under the same name, with the same bytes and times.
    check("was written to or replaced", &mut |dir| {
        let (shard, other) = (dir.join("model-00002-of-000003.safetensors"), dir.join("copy"));
        fs::copy(&shard, &other).expect("copied");
        fs::rename(&other, &shard).expect("renamed");
        touch(dir, 1_000_000_000);
    });
    // Times that hide it.
    let norm = "language_model.model.layers.7.input_layernorm.weight";
    let (file, begin, _) = place(workshop.source.path(), norm);
    let mut flipped = |dir: &Path| {
        flip(&file, [begin]);
        touch(dir, 1_000_000_000);
    };
    check("its identity was", &mut flipped);
    flipped(workshop.source.path());
    // What stands beside the shards.
    let config = fs::read(workshop.source.path().join("config.json")).expect("a file");
    check("`config.json` had", &mut |dir| {
        fs::write(dir.join("config.json"), [&config[..], b" "].concat()).expect("written");
        touch(dir, 1_000_000_000);
    });
    fs::write(workshop.source.path().join("config.json"), &config).expect("written");
    touch(workshop.source.path(), 1_000_000_000);

    // Afterwards the same command compares what it wrote, and goes on.
    meanwhile(&workshop, |dir| touch(dir, 1_000_000_001));
    let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    assert_eq!((outcome.resumed, outcome.written.len()), (15, 0));
    same(&whole, &workshop.files("tree"));
}
