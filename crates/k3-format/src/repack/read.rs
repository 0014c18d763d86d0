//! Reading a source: through the page cache, or past it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::direct::{DIRECT_BYTES, direct_flag, read_direct};
use crate::read::Buffer;
use crate::shard_error::ShardError;
use crate::shard_file::{ShardFile, read_error};
use crate::shards::Shards;

/// Reads any bytes of a checkpoint's shards.
pub(super) struct Reader<'a> {
    shards: &'a Shards,
    direct: Option<Direct>,
}

/// Files opened past the page cache, and memory for whole aligned blocks.
struct Direct {
    files: Vec<Option<File>>,
    bounce: Buffer,
}

impl<'a> Reader<'a> {
    /// A reader through the page cache or, with `direct`, past it.
    pub(super) fn new(shards: &'a Shards, direct: bool) -> Result<Self, ShardError> {
        let direct = if direct {
            let bounce = Buffer::zeroed(DIRECT_BYTES)
                .map_err(|e| ShardError::no_memory(shards.dir(), "a read buffer", DIRECT_BYTES as u64, e))?;
            Some(Direct { files: shards.files().iter().map(|_| None).collect(), bounce })
        } else {
            None
        };
        Ok(Self { shards, direct })
    }

    /// Fills `buf` from offset `begin` of shard number `shard` on.
    pub(super) fn read(&mut self, shard: usize, begin: u64, buf: &mut [u8]) -> Result<(), ShardError> {
        let Some(direct) = &mut self.direct else { return self.shards.read_range(shard, begin, buf) };
        let shards = self.shards.files().len();
        let file = self.shards.files().get(shard).ok_or(ShardError::NoSuchShard { shard, shards })?;
        let end = begin.saturating_add(buf.len() as u64);
        if end > file.len {
            return Err(ShardError::OutOfRange { path: file.path.clone(), begin, end, len: file.len });
        }
        let open = match &mut direct.files[shard] {
            Some(open) => open,
            none => none.insert(reopen(file)?),
        };
        read_direct(open, direct.bounce.as_mut(), begin, buf)
            .map_err(|e| read_error(&file.path, "a range", begin, buf.len(), e))
    }
}

/// Opens a shard once more, past the page cache; it must still be the same file.
fn reopen(file: &ShardFile) -> Result<File, ShardError> {
    let direct = open_direct(&file.path)?;
    let metadata = |file: &File, path| file.metadata().map_err(ShardError::io("open", path));
    let (now, then) = (metadata(&direct, &file.path)?, metadata(&file.file, &file.path)?);
    if (now.dev(), now.ino(), now.len()) == (then.dev(), then.ino(), file.len) {
        return Ok(direct);
    }
    Err(ShardError::Changed { path: file.path.clone(), opened: file.len, now: now.len() })
}

/// Opens a file for reading past the page cache.
pub(super) fn open_direct(path: &Path) -> Result<File, ShardError> {
    direct_flag()
        .and_then(|flag| OpenOptions::new().read(true).custom_flags(flag).open(path))
        .map_err(ShardError::io("open for direct transfers", path))
}
