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

#[test]
fn repeated_keys() {
    let mut snapshot = Snapshot::of("dims-k31");
    snapshot.generation = Some(serde_json::json!({"eos_token_id": 2}));
    let dir = snapshot.write();
    let check = |file: &str, from: &str, to: &str, key: &str| {
        let path = dir.path().join(file);
        let good = fs::read_to_string(&path).expect("read");
        assert!(good.contains(from), "{good}");
        fs::write(&path, good.replacen(from, to, 1)).expect("write");
        let error = Checkpoint::open(dir.path(), &OpenOptions::default()).expect_err("a repeated key");
        assert!(
            matches!(&error, Error::RepeatedKey { key: k, file, .. } if k == key && *file == path),
            "{error}"
        );
        assert!(error.to_string().contains(key) && error.to_string().contains("twice"), "{error}");
        fs::write(&path, good).expect("write");
    };
    let eps = "\"rms_norm_eps\":";
    check("config.json", eps, "\"rms_norm_eps\":1e-6,\"rms_norm_eps\":", "text_config.rms_norm_eps");
    check(
        "config.json",
        eps,
        "\"use_cache\":true,\"use_cache\":true,\"rms_norm_eps\":",
        "text_config.use_cache",
    );
    check("config.json", "{", "{\"model_type\":\"kimi_k3\",", "model_type");
    check("generation_config.json", "{", "{\"eos_token_id\":[3],", "eos_token_id");
    Checkpoint::open(dir.path(), &OpenOptions::default()).expect("as it was");

    let names = dir.path().join("names.json");
    fs::write(&names, r#"{"query": "a", "query": "b"}"#).expect("write");
    assert!(matches!(IndexerNames::load(&names), Err(Error::RepeatedKey { .. })));
}

#[test]
fn keys_and_values_of_a_config_cannot_act_on_a_terminal() {
    let mut snapshot = Snapshot::of("dims-k31");
    snapshot.text().insert("\u{1b}[2Kkey\u{9b}".into(), 1.into());
    let shown: Vec<String> = snapshot.good().warnings().iter().map(ToString::to_string).collect();
    let shown = shown.join(" ");
    assert!(shown.contains(r"\u{1b}[2Kkey\u{9b}") && !shown.contains(char::is_control), "{shown:?}");
    snapshot.text().insert("hidden_act".into(), "\u{9b}2K\u{7f}".into());
    let error = snapshot.open().expect_err("another activation").to_string();
    assert!(error.contains(r"\u{9b}2K\u{7f}"), "{error:?}");
    assert!(!error.replace('\n', "").contains(char::is_control), "{error:?}");
}
