//! Small files that are not what their name says.

use std::error::Error as _;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;

use k3_format::{Checkpoint, Error, IndexerNames, OpenOptions, ShardError};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::snapshot::Snapshot;

fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).expect("a FIFO");
}

/// `read` reads the file `path`, which does not exist yet.
fn check(path: &Path, read: &dyn Fn() -> Result<(), Error>) {
    let refused = || {
        let error = read().expect_err("not a file");
        let text = error.to_string();
        assert!(text.contains(&*path.to_string_lossy()), "{text}");
        if let Some(cause) = error.source() {
            assert!(!text.contains(&cause.to_string()), "{text}");
        }
        error
    };
    symlink("../blobs/gone", path).expect("link");
    match refused() {
        Error::Shards(ShardError::DanglingLink { link, target }) => {
            assert_eq!((link.as_path(), target.as_path()), (path, Path::new("../blobs/gone")));
        }
        other => panic!("{other:?}"),
    }
    fs::remove_file(path).expect("remove");

    fs::create_dir(path).expect("a directory");
    assert!(matches!(refused(), Error::Shards(ShardError::NotAFile { .. })));
    fs::remove_dir(path).expect("remove");

    fifo(path);
    assert!(matches!(refused(), Error::Shards(ShardError::NotAFile { .. })));
    fs::remove_file(path).expect("remove");

    symlink("/dev/zero", path).expect("link");
    assert!(matches!(refused(), Error::Shards(ShardError::NotAFile { .. })));
    fs::remove_file(path).expect("remove");

    symlink(path, path).expect("a link to itself");
    assert!(matches!(refused(), Error::ReadFile { .. }));
    fs::remove_file(path).expect("remove");

    fs::File::create(path).and_then(|file| file.set_len((64 << 20) + 1)).expect("a sparse file");
    match refused() {
        Error::ReadFile { source, .. } => {
            assert_eq!(source.kind(), ErrorKind::FileTooLarge);
            assert!(source.to_string().contains("67108865 bytes, at most 67108864"), "{source}");
        }
        other => panic!("{other:?}"),
    }
    fs::remove_file(path).expect("remove");
}

#[test]
fn config_and_generation_config() {
    let dir = Snapshot::of("dims-k31").write();
    let open = || Checkpoint::open(dir.path(), &OpenOptions::default()).map(drop);
    check(&dir.path().join("generation_config.json"), &open);
    open().expect("needs no generation config");
    let config = dir.path().join("config.json");
    fs::remove_file(&config).expect("remove");
    check(&config, &open);
}

#[test]
fn indexer_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("names.json");
    let load = || IndexerNames::load(&path).map(drop);
    check(&path, &load);
    assert!(matches!(load(), Err(Error::ReadFile { source, .. }) if source.kind() == ErrorKind::NotFound));
    fs::write(&path, "{}").expect("write");
    assert_eq!(IndexerNames::load(&path).expect("all by default"), IndexerNames::default());
    // A link to a file is as good as the file.
    symlink("names.json", dir.path().join("link.json")).expect("link");
    IndexerNames::load(&dir.path().join("link.json")).expect("follows the link");
}
