//! Mapping a shard: the only `unsafe` of this crate.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::MmapOptions;

/// Maps the first `len` bytes of `file` for reading. The mapping lives as long as the last slice of the result.
#[allow(unsafe_code, reason = "a mapping is a promise about the file that only the user can keep")]
pub(crate) fn map(file: &File, len: usize) -> io::Result<Bytes> {
    // SAFETY: the mapping is read-only and private to this process' reading; what it needs is that nobody writes
    // to or truncates the file meanwhile. Checkpoint files are published once and never modified: tools replace
    // them by rename, which leaves the mapped file as it is, and our own writer never writes to an existing file.
    // The length is compared with the file's before each use ([`crate::Shards::map_range`]). Whoever truncates a
    // mapped checkpoint under a running engine gets a bus error, as with every program that maps files; the
    // documentation of `Shards::map` says so, and `Shards::read` does without.
    let mapping = unsafe { MmapOptions::new().len(len).map(file)? };
    Ok(Bytes::from_owner(mapping))
}
