//! A shard of an earlier run of which nothing is known: compared with the bytes that it should have.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::direct::{DIRECT_BYTES, direct_flag, read_direct};
use crate::read::{Buffer, MAX_READ_BYTES, read_full};
use crate::shard_error::ShardError;
use crate::writer::Written;

use super::error::RepackError;

/// Takes the place of the writer of a shard, and writes nothing.
pub(super) struct Existing {
    file: File,
    /// For whole aligned blocks, past the page cache.
    bounce: Option<Buffer>,
    found: Buffer,
    at: u64,
    len: u64,
    is_same: bool,
    hasher: blake3::Hasher,
}

impl Existing {
    /// Opens a regular file; no link is followed.
    pub(super) fn open(path: &Path, direct: bool) -> Result<Self, RepackError> {
        let flag = if direct { direct_flag().map_err(ShardError::io("open", path))? } else { 0 };
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flag | rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(path)
            .map_err(ShardError::io("open", path))?;
        let len = file.metadata().map_err(ShardError::io("open", path))?.len();
        let buffer = || {
            Buffer::zeroed(DIRECT_BYTES)
                .map_err(|e| ShardError::no_memory(path, "a read buffer", DIRECT_BYTES as u64, e))
        };
        let bounce = if direct { Some(buffer()?) } else { None };
        let found = buffer()?;
        Ok(Self { file, bounce, found, at: 0, len, is_same: true, hasher: blake3::Hasher::new() })
    }

    /// The next bytes that there should be. What cannot be read is not the same.
    pub(super) fn put(&mut self, wanted: &[u8]) {
        self.hasher.update(wanted);
        for wanted in wanted.chunks(DIRECT_BYTES) {
            if self.is_same {
                let found = &mut self.found.as_mut()[..wanted.len()];
                let read = match &mut self.bounce {
                    Some(bounce) => read_direct(&self.file, bounce.as_mut(), self.at, found),
                    None => read_full(&self.file, MAX_READ_BYTES, self.at, found),
                };
                self.is_same = read.is_ok() && found == wanted;
            }
            self.at += wanted.len() as u64;
        }
    }

    /// Length and hash of what there should be, and whether that is what is there.
    pub(super) fn finish(self) -> (Written, bool) {
        let written = Written { len: self.at, hash: self.hasher.finalize().into() };
        (written, self.is_same && self.at == self.len)
    }
}
