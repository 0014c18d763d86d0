//! Files that appear whole or not at all.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use k3_format::{NewFile, ShardError};
use tempfile::TempDir;

struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn create(&self) -> Result<NewFile, ShardError> {
        NewFile::create(&self.path("out"))
    }

    fn write(&self, text: &str) {
        let mut file = self.create().unwrap();
        file.write(text.as_bytes()).unwrap();
        file.commit().unwrap();
    }

    /// What `out` holds, and that there is nothing else.
    fn check(&self, text: &str) {
        assert_eq!(fs::read_to_string(self.path("out")).unwrap(), text);
        assert_eq!(fs::read_dir(self.0.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_file_appears_when_it_is_whole() {
    let dir = Dir::new();
    let mut file = dir.create().unwrap();
    assert_eq!(file.path(), dir.path("out"));
    for piece in ["a", "", "bc"] {
        file.write(piece.as_bytes()).unwrap();
        assert!(!dir.path("out").exists());
    }
    file.commit().unwrap();
    dir.check("abc");
    // Who has the old file open keeps it.
    let old = fs::File::open(dir.path("out")).unwrap();
    dir.write("second");
    dir.check("second");
    assert_eq!(std::io::read_to_string(old).unwrap(), "abc");
}

#[test]
fn what_an_ended_run_left_is_replaced() {
    let dir = Dir::new();
    fs::write(dir.path("out.partial"), "half of something much longer").unwrap();
    dir.write("whole");
    dir.check("whole");
    // Dropped, and dropped again.
    for _ in 0..2 {
        let mut file = dir.create().unwrap();
        file.write(b"ha").unwrap();
        drop(file);
        assert_eq!(fs::read(dir.path("out.partial")).unwrap(), b"ha");
        assert_eq!(fs::read(dir.path("out")).unwrap(), b"whole");
    }
    dir.write("again");
    dir.check("again");
}

#[test]
fn two_writers_do_not_mix() {
    let dir = Dir::new();
    let mut first = dir.create().unwrap();
    first.write(b"first").unwrap();
    for _ in 0..2 {
        match dir.create() {
            Err(ShardError::OutputIsBusy { partial }) => assert_eq!(partial, dir.path("out.partial")),
            other => panic!("{other:?}"),
        }
    }
    first.write(b" and only").unwrap();
    first.commit().unwrap();
    dir.check("first and only");
    dir.write("then the second");
    dir.check("then the second");
}

#[test]
fn of_many_writers_at_once_each_file_is_one_writers() {
    let dir = Dir::new();
    let whole = |writer: u8| vec![writer; 10_000];
    let written: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|writer| {
                let dir = &dir;
                scope.spawn(move || {
                    let mut written = 0;
                    for _ in 0..50 {
                        let result = dir.create().and_then(|mut file| {
                            for byte in whole(writer).chunks(3000) {
                                file.write(byte)?;
                            }
                            file.commit()
                        });
                        match result {
                            Ok(()) => written += 1,
                            Err(ShardError::OutputIsBusy { .. }) => {}
                            Err(other) => panic!("{other:?}"),
                        }
                        if let Ok(found) = fs::read(dir.path("out")) {
                            assert_eq!(found, whole(found[0]));
                        }
                    }
                    written
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(written > 0);
    dir.write("after");
    dir.check("after");
}

#[test]
fn a_partial_file_that_was_taken_away_is_not_published() {
    let dir = Dir::new();
    let file = dir.create().unwrap();
    fs::remove_file(dir.path("out.partial")).unwrap();
    fs::write(dir.path("out.partial"), "of somebody without locks").unwrap();
    assert!(matches!(file.commit(), Err(ShardError::OutputIsBusy { .. })));
    assert!(!dir.path("out").exists());
    let file = dir.create().unwrap();
    fs::remove_file(dir.path("out.partial")).unwrap();
    assert!(matches!(file.commit(), Err(ShardError::OutputIsBusy { .. })));
}

#[test]
fn only_regular_files_are_replaced() {
    for name in ["out", "out.partial"] {
        for target in ["sacred", "gone"] {
            let dir = Dir::new();
            fs::write(dir.path("sacred"), "sacred").unwrap();
            symlink(target, dir.path(name)).unwrap();
            match dir.create() {
                Err(ShardError::OutputIsLink { path }) => assert_eq!(path, dir.path(name)),
                other => panic!("{name} -> {target}: {other:?}"),
            }
            assert_eq!(fs::read(dir.path("sacred")).unwrap(), b"sacred");
            assert!(dir.path(name).is_symlink() && !dir.path("gone").exists());
        }
        let dir = Dir::new();
        fs::create_dir(dir.path(name)).unwrap();
        match dir.create() {
            Err(ShardError::Unwritable { path, .. }) => assert_eq!(path, dir.path(name)),
            other => panic!("{name}: {other:?}"),
        }
        let dir = Dir::new();
        let (mode, kind) = (rustix::fs::Mode::RWXU, rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, dir.path(name), kind, mode, 0).unwrap();
        assert!(matches!(dir.create(), Err(ShardError::Unwritable { .. })), "{name}");
    }
    // A link that appears while the file is written.
    let dir = Dir::new();
    fs::write(dir.path("sacred"), "sacred").unwrap();
    let file = dir.create().unwrap();
    symlink("sacred", dir.path("out")).unwrap();
    assert!(matches!(file.commit(), Err(ShardError::OutputIsLink { .. })));
    assert_eq!(fs::read(dir.path("sacred")).unwrap(), b"sacred");
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let dir = Dir::new();
    let error = NewFile::create(&dir.path("no/such/out")).unwrap_err();
    assert!(error.to_string().contains("no/such/out.partial"), "{error}");
    let cause = std::error::Error::source(&error).expect("the system's answer").to_string();
    assert!(!error.to_string().contains(&cause), "{error}");
    assert!(matches!(NewFile::create(&dir.path("..")), Err(ShardError::Unwritable { .. })));
}

#[test]
fn a_file_of_another_kind_is_not_replaced() {
    let dir = Dir::new();
    let replace = || NewFile::replacing(&dir.path("out"), b"magic ");
    let check = |text: &str, is_kept: bool| {
        fs::write(dir.path("out"), text).unwrap();
        let refused = matches!(replace(), Err(ShardError::Unwritable { .. }));
        assert_eq!(refused, is_kept, "{text:?}");
    };
    replace().unwrap();
    check("", false);
    check("magic and more", false);
    check("magic", true);
    check("{}", true);
    assert_eq!(fs::read(dir.path("out")).unwrap(), b"{}");
}
