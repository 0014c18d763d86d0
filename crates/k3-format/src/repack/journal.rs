//! The notes of an unfinished repack: what it was begun from, and which shards are complete. It lies in the target until
//! the tree is whole, and its lock keeps a second run out.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::shard_error::ShardError;

use super::error::RepackError;
use super::report::FileRecord;
use super::source_id::SourceId;

/// Name of the file. It begins with a dot: no loader takes it for a part of the model.
pub(super) const JOURNAL_FILE: &str = ".repack-journal";

/// The version of the notes that this program writes and reads.
const VERSION: u32 = 1;

/// The most bytes of notes that are read; those of 93 layers have less than 1 MB. What comes later counts as lost.
const MAX_BYTES: u64 = 64 << 20;

/// When each shard of a source was last written, by name.
pub(super) type Times = Vec<(String, i64, i64)>;

/// The first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Begun {
    k3_repack: u32,
    /// As arguments.
    pub(super) recipe: String,
    pub(super) source: SourceId,
    /// Of the source's shards when the complete shards were made from it or compared with it; empty if unknown.
    pub(super) times: Times,
}

/// A line that takes the place of the first one's times.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Renewed {
    times: Times,
}

impl Begun {
    pub(super) fn new(recipe: String, source: SourceId, times: Times) -> Self {
        Self { k3_repack: VERSION, recipe, source, times }
    }
}

/// An opened and locked journal.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
    /// `None` of a new journal, and of one whose first line is damaged or was written by another release.
    pub(super) begun: Option<Begun>,
    /// One record a shard; of two, the later one holds.
    pub(super) records: Vec<FileRecord>,
}

impl Journal {
    /// Opens the journal of `dir`, or makes an empty one, and locks it.
    pub(super) fn open(dir: &Path) -> Result<Self, RepackError> {
        let path = dir.join(JOURNAL_FILE);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            // A link of this name may lead anywhere.
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(RepackError::io("create", &path))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(RepackError::TargetBusy { dir: dir.to_owned() }),
            // A file system without locks cannot tell; each output is locked as well.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        // Whoever had the lock before may have finished and removed the file.
        let here = file.metadata().map_err(RepackError::io("look at", &path))?;
        let there = fs::symlink_metadata(&path);
        if !there.is_ok_and(|there| (there.dev(), there.ino()) == (here.dev(), here.ino())) {
            return Err(RepackError::TargetBusy { dir: dir.to_owned() });
        }
        if here.nlink() > 1 {
            // Unlike all other outputs it is not written beside its place and renamed.
            let message = "it has another name elsewhere (a hard link), and the file there would be changed, too: remove \
                           one of the two names, or put a copy in its place"
                .to_owned();
            return Err(ShardError::Unwritable { path, message }.into());
        }
        let mut text = Vec::new();
        (&file).take(MAX_BYTES).read_to_end(&mut text).map_err(RepackError::io("read", &path))?;
        let mut journal = Self { path, file, len: 0, begun: None, records: Vec::new() };
        journal.parse(&text);
        Ok(journal)
    }

    /// Takes whole lines only: the last one may be cut by the end of its run. With a line that cannot be read the notes
    /// end; shards that come later in them are compared with the source.
    fn parse(&mut self, text: &[u8]) {
        for line in text.split_inclusive(|&b| b == b'\n') {
            let Some(json) = line.strip_suffix(b"\n") else { break };
            if let Some(begun) = &mut self.begun {
                if let Ok(record) = serde_json::from_slice(json) {
                    self.put(record);
                } else if let Ok(Renewed { times }) = serde_json::from_slice(json) {
                    begun.times = times;
                } else {
                    break;
                }
            } else {
                match serde_json::from_slice::<Begun>(json) {
                    Ok(begun) if begun.k3_repack == VERSION => self.begun = Some(begun),
                    _ => break,
                }
            }
            self.len += line.len() as u64;
        }
    }

    fn put(&mut self, record: FileRecord) {
        self.records.retain(|r| r.name != record.name);
        self.records.push(record);
    }

    /// Notes what the tree is made from.
    pub(super) fn begin(&mut self, begun: Begun) -> Result<(), RepackError> {
        self.append(&begun)?;
        self.begun = Some(begun);
        Ok(())
    }

    /// Notes a shard that has its name and is on the disk.
    pub(super) fn complete(&mut self, record: FileRecord) -> Result<(), RepackError> {
        self.append(&record)?;
        self.put(record);
        Ok(())
    }

    /// Notes that all shards that are noted were compared with a source of these times.
    pub(super) fn renew(&mut self, times: Times) -> Result<(), RepackError> {
        self.append(&Renewed { times: times.clone() })?;
        if let Some(begun) = &mut self.begun {
            begun.times = times;
        }
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), RepackError> {
        let failed = RepackError::io("write", &self.path);
        let mut write = || -> io::Result<u64> {
            let mut line = serde_json::to_vec(line)?;
            line.push(b'\n');
            // Over the rest of a line that was cut.
            self.file.set_len(self.len)?;
            self.file.seek(SeekFrom::Start(self.len))?;
            self.file.write_all(&line)?;
            self.file.sync_data()?;
            Ok(line.len() as u64)
        };
        self.len += write().map_err(failed)?;
        Ok(())
    }

    /// Removes the journal of a tree that is whole.
    pub(super) fn remove(self) -> Result<(), RepackError> {
        fs::remove_file(&self.path).map_err(RepackError::io("remove", &self.path))
    }
}
