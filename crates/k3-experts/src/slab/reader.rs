//! Ways to read a shard.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use k3_format::Checkpoint;

use super::SlabError;
use super::pool::aligned;

/// Reads the shards of a checkpoint. Several threads read at the same time. A read that panics is one that failed
/// ([`SlotReadError::Panicked`]); [`Reader::drive`] and [`Reader::alignment`] are asked when a store is made, and never again.
pub trait Reader: Send + Sync + fmt::Debug {
    /// As `pread`: may return fewer bytes than `buf` has room for, 0 at the end of the file, and
    /// [`io::ErrorKind::Interrupted`]. Is asked for multiples of [`Reader::alignment`], and after a short read for the
    /// rest, wherever it begins.
    ///
    /// # Errors
    /// The system's answer.
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// What offset, length and address of a read should be multiples of: a power of two.
    fn alignment(&self) -> usize {
        1
    }

    /// Which drive a shard is on, from 0 without gaps. Each has its own queue.
    fn drive(&self, _shard: usize) -> usize {
        0
    }

    /// Drops from the page cache what it has of a range, where reads go through it.
    fn forget(&self, _shard: usize, _offset: u64, _len: usize) {}

    /// Where a shard is, for messages.
    fn path(&self, shard: usize) -> PathBuf;
}

/// Why an expert was not read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotReadError {
    /// The file ended: it was cut since it was opened.
    #[error(
        "{path} ends too early: {wanted} bytes from offset {offset} were expected, {got} came; was it changed?"
    )]
    Short {
        /// Which file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes read.
        got: usize,
    },
    /// The system's answer.
    #[error("reading {wanted} bytes from offset {offset} of {path}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// The system's answer.
        #[source]
        source: Arc<io::Error>,
    },
    /// The reader panicked.
    #[error("the reader panicked at {wanted} bytes from offset {offset} of shard {shard}: {message}")]
    Panicked {
        /// Which file, counted as [`Reader::read_at`] does.
        shard: usize,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// What it said.
        message: String,
    },
    /// There is no memory for a slot.
    #[error("no memory for a slot of {bytes} bytes; a smaller expert budget needs less")]
    NoMemory {
        /// Bytes of a slot.
        bytes: usize,
    },
    /// Nobody wanted it any more.
    #[error("the read was given up because nobody waited for it any more")]
    Abandoned,
    /// The store was closed.
    #[error("the expert store was closed before the expert was read")]
    Closed,
}

/// Reads `buf` from `offset` on, at least its first `needed` bytes. What the reader does wrong ends here: the thread has
/// others to serve, and somebody waits for this one.
pub(super) fn read_full(
    reader: &dyn Reader,
    shard: usize,
    buf: &mut [u8],
    offset: u64,
    needed: usize,
) -> Result<(), SlotReadError> {
    // Nothing is shared but the bytes, which nobody sees after an error.
    let read = || read_or_fail(reader, shard, buf, offset, needed);
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        let message = text.unwrap_or_else(|| "it gave no message".to_owned());
        Err(SlotReadError::Panicked { shard, offset, wanted: needed, message })
    })
}

fn read_or_fail(
    reader: &dyn Reader,
    shard: usize,
    buf: &mut [u8],
    offset: u64,
    needed: usize,
) -> Result<(), SlotReadError> {
    let mut got = 0;
    while got < needed {
        let room = buf.len() - got;
        let failed = |source: io::Error| {
            let (path, source) = (reader.path(shard), Arc::new(source));
            Err(SlotReadError::Io { path, offset, wanted: needed, source })
        };
        match reader.read_at(shard, &mut buf[got..], offset + got as u64) {
            Ok(0) => {
                return Err(SlotReadError::Short { path: reader.path(shard), offset, wanted: needed, got });
            }
            // The bytes that it cannot have read would be taken for weights.
            Ok(n) if n > room => {
                return failed(io::Error::other(format!(
                    "the reader says that it read {n} bytes into room for {room}"
                )));
            }
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return failed(e),
        }
    }
    Ok(())
}

/// Through the page cache.
#[derive(Debug)]
pub struct Buffered {
    checkpoint: Arc<Checkpoint>,
    drives: Vec<usize>,
}

impl Buffered {
    /// The shards of `checkpoint`.
    ///
    /// # Errors
    /// [`SlabError::Open`].
    pub fn new(checkpoint: Arc<Checkpoint>) -> Result<Self, SlabError> {
        let drives = drives(&checkpoint)?;
        Ok(Self { checkpoint, drives })
    }
}

impl Reader for Buffered {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.checkpoint.shards().files()[shard].read_at(buf, offset)
    }

    fn drive(&self, shard: usize) -> usize {
        self.drives[shard]
    }

    fn forget(&self, shard: usize, offset: u64, len: usize) {
        self.checkpoint.shards().forget(shard, offset, len as u64);
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.checkpoint.shards().files()[shard].path.clone()
    }
}

/// Past the page cache (`O_DIRECT`).
#[derive(Debug)]
pub struct Direct {
    buffered: Buffered,
    files: Vec<File>,
}

impl Direct {
    /// What every drive and file system that is in use can align to.
    pub const ALIGN: usize = 4096;

    /// Opens the shards of `checkpoint` once more, and reads the first bytes of one on each drive: some file systems
    /// open files so and do not read them.
    ///
    /// # Errors
    /// [`SlabError::Open`] for the first that is gone, or on a file system without such reads.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Result<Self, SlabError> {
        let failed = |shard: &k3_format::ShardFile| {
            let path = shard.path.clone();
            move |source| SlabError::Open { path, source }
        };
        let buffered = Buffered::new(checkpoint)?;
        let mut files = Vec::new();
        let mut block = aligned(Self::ALIGN, Self::ALIGN).unwrap_or_default();
        for (at, shard) in buffered.checkpoint.shards().files().iter().enumerate() {
            let file = shard.open_direct().map_err(failed(shard))?;
            if !buffered.drives[..at].contains(&buffered.drives[at]) {
                FileExt::read_at(&file, &mut block, 0).map_err(failed(shard))?;
            }
            files.push(file);
        }
        Ok(Self { buffered, files })
    }
}

impl Reader for Direct {
    fn read_at(&self, shard: usize, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let aligned = |n: usize| n.is_multiple_of(Self::ALIGN);
        if !(aligned(offset as usize) && aligned(buf.len()) && aligned(buf.as_ptr().addr())) {
            // The rest of a short read.
            return self.buffered.read_at(shard, buf, offset);
        }
        match self.files[shard].read_at(buf, offset) {
            // A file system that wants more alignment than this.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => self.buffered.read_at(shard, buf, offset),
            result => result,
        }
    }

    fn alignment(&self) -> usize {
        Self::ALIGN
    }

    fn drive(&self, shard: usize) -> usize {
        self.buffered.drive(shard)
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.buffered.path(shard)
    }
}

/// The drive of each shard, as a reader tells it.
pub(super) fn drives_of(checkpoint: &Checkpoint, reader: &dyn Reader) -> Vec<usize> {
    (0..checkpoint.shards().files().len()).map(|shard| reader.drive(shard)).collect()
}

/// How many drives these are.
pub(super) fn count(drives: &[usize]) -> usize {
    drives.iter().max().map_or(1, |last| last + 1)
}

/// Drives that the shards of `checkpoint` are on.
///
/// # Errors
/// [`SlabError::Open`].
pub fn drive_count(checkpoint: &Checkpoint) -> Result<usize, SlabError> {
    drives(checkpoint).map(|drives| count(&drives))
}

/// The drive of each shard, numbered in order of appearance.
fn drives(checkpoint: &Checkpoint) -> Result<Vec<usize>, SlabError> {
    let mut devices = Vec::new();
    let mut drives = Vec::new();
    for shard in checkpoint.shards().files() {
        let device = shard.device().map_err(|source| SlabError::Open { path: shard.path.clone(), source })?;
        let known = devices.iter().position(|&d| d == device);
        drives.push(known.unwrap_or(devices.len()));
        if known.is_none() {
            devices.push(device);
        }
    }
    Ok(drives)
}
