//! Where a tree may be written, and where not: before the first write.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use k3_format::repack::{ExpertTarget, Recipe, RepackError, RunOptions};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{Workshop, files, of_layers, run, same};

fn attempt(source: &Path, target: &Path) -> RepackError {
    match run(source, target, Recipe::default(), &RunOptions::default()) {
        Err(error) => error,
        Ok(_) => panic!("{} was written", target.display()),
    }
}

#[test]
fn never_into_the_source() {
    let workshop = Workshop::of("tiny-k31");
    let source = workshop.source.path();
    let out = |name: &str| workshop.out.path().join(name);
    let before = files(source);
    symlink(source, out("to source")).expect("linked");
    symlink(out("nowhere"), out("dangling")).expect("linked");
    fs::create_dir(out("real")).expect("made");
    symlink(out("real"), out("to real")).expect("linked");
    let inside = |path: PathBuf| {
        assert!(matches!(attempt(source, &path), RepackError::TargetInSource { .. }), "{path:?}");
    };
    inside(source.to_owned());
    inside(source.join("below/deep"));
    inside(out("to source").join("below"));
    inside(source.join("../").join(source.file_name().expect("a name")));
    for link in ["to source", "dangling", "to real"] {
        assert!(matches!(attempt(source, &out(link)), RepackError::TargetIsLink { .. }), "{link}");
    }
    assert!(matches!(attempt(source, &out("new/../../x")), RepackError::Target { .. }));
    // A folder above the source.
    let above = source.parent().expect("a parent");
    assert!(matches!(attempt(source, above), RepackError::TargetHoldsSource { .. }));
    same(&before, &files(source));
    assert!(!out("nowhere").exists() && files(&out("real")).is_empty());
}

/// The folder of blobs that a source's links lead to.
#[test]
fn never_into_the_store_behind_the_links() {
    let workshop = Workshop::of("tiny-k31");
    let links = tempfile::tempdir().expect("a directory");
    for name in files(workshop.source.path()).keys() {
        symlink(workshop.source.path().join(name), links.path().join(name)).expect("linked");
    }
    let before = files(workshop.source.path());
    let error = attempt(links.path(), workshop.source.path());
    assert!(matches!(error, RepackError::TargetHoldsSource { .. }), "{error}");
    // A folder of links to them is somebody's tree, too.
    let other = workshop.out.path().join("other");
    fs::create_dir(&other).expect("made");
    symlink(workshop.source.path().join("config.json"), other.join("config.json")).expect("linked");
    let error = attempt(links.path(), &other);
    assert!(matches!(error, RepackError::TargetNotEmpty { .. }), "{error}");
    same(&before, &files(workshop.source.path()));
}

#[test]
fn never_over_something_else() {
    let workshop = Workshop::of("tiny-k31");
    let out = |name: &str| workshop.out.path().join(name);
    fs::write(out("file"), "").expect("written");
    assert!(matches!(attempt(workshop.source.path(), &out("file")), RepackError::Target { .. }));
    fs::create_dir(out("full")).expect("made");
    fs::write(out("full/model.safetensors"), "mine").expect("written");
    let error = attempt(workshop.source.path(), &out("full"));
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(files(&out("full")).len(), 1);

    // A shard's name that is a link in an unfinished tree.
    let victim = out("victim");
    fs::write(&victim, "mine").expect("written");
    workshop.tree("whole", Recipe::default(), &RunOptions::default());
    workshop.part("part", 0..3);
    symlink(&victim, out("part/model-00009-of-00015.safetensors")).expect("linked");
    let error = attempt(workshop.source.path(), &out("part"));
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert_eq!(fs::read(&victim).expect("a file"), b"mine");
    fs::remove_file(out("part/model-00009-of-00015.safetensors")).expect("removed");
    workshop.tree("part", Recipe::default(), &RunOptions::default());
    same(&workshop.files("whole"), &workshop.files("part"));

    // A link is one, however its path ends.
    symlink(out("whole"), out("alias")).expect("linked");
    for path in ["alias", "alias/", "alias/."] {
        let error = attempt(workshop.source.path(), &out(path));
        assert!(matches!(error, RepackError::TargetIsLink { .. }), "{path}: {error}");
    }

    // The journal itself.
    fs::create_dir(out("linked")).expect("made");
    symlink(&victim, out("linked/.repack-journal")).expect("linked");
    let error = attempt(workshop.source.path(), &out("linked"));
    assert!(error.to_string().contains("remove the link"), "{error}");
    fs::remove_file(out("linked/.repack-journal")).expect("removed");
    fs::hard_link(&victim, out("linked/.repack-journal")).expect("linked");
    let error = attempt(workshop.source.path(), &out("linked"));
    assert!(error.to_string().contains("another name elsewhere"), "{error}");
    assert_eq!(fs::read(&victim).expect("a file"), b"mine");
}

/// What stands in the way of an output is said before anything is touched, of a finished tree its index included.
#[test]
fn things_that_are_no_files() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let (tree, whole) = (workshop.out.path().join("tree"), workshop.files("tree"));
    let check = |name: &str, put: &dyn Fn(&Path), wanted: &str| {
        let (path, aside) = (tree.join(name), workshop.out.path().join("aside"));
        if whole.contains_key(name) {
            fs::rename(&path, &aside).expect("moved");
        }
        put(&path);
        let error = attempt(workshop.source.path(), &tree);
        assert!(error.to_string().contains(wanted), "{name}: {error}");
        assert!(tree.join("model.safetensors.index.json").exists(), "{name}");
        fs::remove_file(&path).expect("removed");
        if aside.exists() {
            fs::rename(&aside, &path).expect("moved");
        }
        same(&whole, &workshop.files("tree"));
    };
    let aside = workshop.out.path().join("aside");
    let link = |path: &Path| symlink(&aside, path).expect("linked");
    let pipe = |path: &Path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).expect("made");
    for name in ["model-00003-of-00015.safetensors", "config.json", "repack.json"] {
        check(name, &link, "symbolic link");
        check(name, &pipe, "not a file");
    }
    // To read from it would wait for ever.
    check(".repack-journal", &pipe, "not a file");
}

#[test]
fn one_run_at_a_time_and_one_recipe() {
    let workshop = Workshop::of("tiny-k31");
    workshop.part("tree", 0..3);
    let target = workshop.out.path().join("tree");
    let before = files(&target);
    let lock = File::open(target.join(".repack-journal")).expect("a journal");
    lock.lock().expect("locked");
    assert!(matches!(attempt(workshop.source.path(), &target), RepackError::TargetBusy { .. }));
    drop(lock);
    for recipe in [Recipe::default().experts(ExpertTarget::Mxfp4), Recipe::default().text_only(true)] {
        match workshop.run("tree", recipe, &of_layers(0..3)) {
            Err(error @ RepackError::OtherRecipe { .. }) => {
                assert!(
                    error.to_string().contains("--experts nvfp4 --names compressed-tensors --dense bf16,"),
                    "{error}"
                );
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("written"),
        }
    }
    same(&before, &files(&target));
}

#[test]
fn budgets_and_layers() {
    let workshop = Workshop::of("tiny-k31");
    let mut options = RunOptions::default();
    options.memory = 1 << 20;
    let error = workshop.run("tree", Recipe::default(), &options);
    assert!(matches!(error, Err(RepackError::Budget { budget: 1_048_576, .. })));
    options = RunOptions::default();
    for (begin, end) in [(0, 14), (13, 14), (3, 3)] {
        options.layers = Some(begin..end);
        let error = workshop.run("tree", Recipe::default(), &options);
        assert!(matches!(error, Err(RepackError::Layers { layers: 13, .. })), "{begin}..{end}");
    }
    assert!(!workshop.out.path().join("tree").exists());
}
