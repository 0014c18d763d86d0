//! Trees that lost their notes: what is right is kept, what is not is made again, and nobody else's is touched.

use std::fs;
use std::path::PathBuf;

use k3_format::repack::{ExpertTarget, Naming, Recipe, RepackError, RunOptions, VerifyMode};

use super::{Workshop, flip, flip_last, of_layers, same};

const REPORT: &str = "repack.json";
const JOURNAL: &str = ".repack-journal";

fn shard(n: usize) -> String {
    format!("model-{n:05}-of-00015.safetensors")
}

/// Makes a tree, does something to it, and runs the same command again.
fn check(what: &str, written: usize, damage: impl Fn(&dyn Fn(&str) -> PathBuf)) {
    let workshop = Workshop::of("tiny-k31");
    let whole = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let before = workshop.files("tree");
    damage(&|name| workshop.out.path().join("tree").join(name));
    let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    assert_eq!((outcome.resumed, outcome.written.len()), (15 - written, written), "{what}");
    assert_eq!(outcome.report, whole.report, "{what}");
    same(&before, &workshop.files("tree"));
}

#[test]
fn a_finished_tree_without_its_report() {
    let remove = |path: PathBuf| fs::remove_file(path).expect("removed");
    let write = |path: PathBuf, text: &str| fs::write(path, text).expect("written");
    check("lost", 0, |path| remove(path(REPORT)));
    check("empty", 0, |path| write(path(REPORT), ""));
    check("something else", 0, |path| write(path(REPORT), "{\"recipe\": 7}"));
    check("cut", 0, |path| {
        let text = fs::read_to_string(path(REPORT)).expect("a file");
        write(path(REPORT), &text[..text.len() / 2]);
    });
    check("and with it the files beside the shards", 0, |path| {
        remove(path(REPORT));
        remove(path("model.safetensors.index.json"));
        remove(path("config.json"));
    });
    check("and a journal of nothing", 0, |path| {
        write(path(REPORT), "");
        write(path(JOURNAL), "nothing\n");
    });
    check("a journal of another release", 0, |path| write(path(JOURNAL), "{\"k3_repack\": 99}\n"));
    // What is wrong is found, whatever its length and wherever it is.
    check("and damaged shards", 4, |path| {
        remove(path(REPORT));
        flip_last(&path(&shard(4)));
        let bytes = fs::read(path(&shard(9))).expect("a file");
        fs::write(path(&shard(9)), &bytes[..bytes.len() - 1]).expect("written");
        fs::write(path(&shard(10)), [&bytes[..], b"x"].concat()).expect("written");
        remove(path(&shard(15)));
        write(path("model-00011-of-00015.safetensors.partial"), "half");
    });
    check("a header that is damaged", 1, |path| {
        remove(path(REPORT));
        flip(&path(&shard(3)), [8]);
    });
}

/// The same of a tree that was not finished.
#[test]
fn an_unfinished_tree_without_its_journal() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    workshop.part("tree", 0..4);
    let dir = workshop.out.path().join("tree");
    fs::remove_file(dir.join(JOURNAL)).expect("removed");
    flip_last(&dir.join(shard(2)));
    // A wrong shard that is not asked for is not kept either.
    let outcome = workshop.part("tree", 3..6);
    assert_eq!((outcome.resumed, outcome.written.len(), outcome.missing.len()), (5, 2, 8));
    assert!(outcome.missing.contains(&shard(2)) && !dir.join(shard(2)).exists());
    let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    assert_eq!((outcome.resumed, outcome.written.len()), (7, 8));
    same(&workshop.files("whole"), &workshop.files("tree"));
}

/// A line in the middle of the journal, and a shard whose note is right and whose bytes are not.
#[test]
fn a_journal_with_a_damaged_line() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    let mut options = of_layers(0..12);
    options.jobs = 1;
    workshop.run("tree", Recipe::default(), &options).unwrap_or_else(|e| panic!("{e}"));
    let journal = workshop.out.path().join("tree").join(JOURNAL);
    let text = fs::read(&journal).expect("a journal");
    let third = text.iter().enumerate().filter(|(_, b)| **b == b'\n').nth(2).expect("lines").0;
    flip(&journal, [third + 1]);
    flip_last(&workshop.out.path().join("tree").join(shard(8)));
    let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    assert_eq!((outcome.resumed, outcome.written.len()), (13, 2));
    same(&workshop.files("whole"), &workshop.files("tree"));
}

/// Without notes, only what this very command would write is written over.
#[test]
fn nobody_elses_tree() {
    let workshop = Workshop::of("tiny-k31");
    let made = Recipe::default();
    let dir = workshop.out.path().join("tree");
    workshop.tree("tree", made, &RunOptions::default());
    fs::remove_file(dir.join(REPORT)).expect("removed");
    let refused = |recipe: Recipe, wanted: &str| {
        let before = workshop.files("tree");
        let error = workshop.run("tree", recipe, &RunOptions::default()).expect_err("refused");
        assert!(error.to_string().contains(wanted), "{wanted}: {error}");
        same(&before, &workshop.files("tree"));
        error
    };
    for other in [made.names(Naming::ModelOpt), made.experts(ExpertTarget::Mxfp4)] {
        let error = refused(other, "repeat the arguments that the tree was made with");
        assert!(matches!(error, RepackError::OtherTree { .. }), "{error}");
    }
    fs::write(dir.join("notes.txt"), "mine").expect("written");
    refused(made, "its `notes.txt` is not what this command makes");
    fs::remove_file(dir.join("notes.txt")).expect("removed");
    // Names alone prove nothing.
    for n in 1..=15 {
        fs::write(dir.join(shard(n)), "mine").expect("written");
    }
    let error = refused(made, "no repack was begun there");
    assert!(matches!(error, RepackError::TargetNotEmpty { .. }), "{error}");
}

/// A finished tree that failed its verification is compared in full by the next run, and a source that gives something
/// else than what was noted is refused as ever.
#[test]
fn damage_is_told_from_a_changed_source() {
    let workshop = Workshop::of("tiny-k31");
    let whole = workshop.tree("whole", Recipe::default(), &RunOptions::default());
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let dir = workshop.out.path().join("tree");
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Read;
    flip_last(&dir.join(shard(6)));
    assert!(matches!(workshop.run("tree", Recipe::default(), &options), Err(RepackError::Differs(_))));
    // The source changes where no sample looks: neither the shard nor its note is what it gives.
    let matrix = "language_model.model.layers.5.block_sparse_moe.experts.3.w1.weight_packed";
    let (file, begin, _) = super::place(workshop.source.path(), matrix);
    flip(&file, [begin]);
    match workshop.run("tree", Recipe::default(), &options) {
        Err(error @ RepackError::SourceChanged { .. }) => {
            assert!(error.to_string().contains(&shard(6)), "{error}");
        }
        other => panic!("{:?}", other.map(|o| o.notes)),
    }
    assert!(dir.join(shard(6)).exists());
    flip(&file, [begin]);
    let outcome = workshop.tree("tree", Recipe::default(), &options);
    assert_eq!((outcome.resumed, outcome.written.len()), (14, 1));
    assert_eq!(outcome.report, whole.report);
    same(&workshop.files("whole"), &workshop.files("tree"));
}
