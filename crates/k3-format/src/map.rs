//! Mapping a shard: the only `unsafe` of this crate.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::MmapOptions;

/// Maps the first `len` bytes of `file` for reading. The mapping lives as long as the last slice of the result.
#[allow(unsafe_code, reason = "a mapping is a promise about the file that only the user can keep")]
pub(crate) fn map(file: &File, len: usize) -> io::Result<Bytes> {
    // SAFETY: the mapping is read-only, so this process cannot write through it; but it is shared with the file
    // (MAP_SHARED), so what other file handles write to the file in place shows in it, and a truncation takes its
    // pages away. Soundness needs that neither happens while a slice lives. Nothing here can enforce that: it is the
    // promise that the documentation of `Shards::map`, `Checkpoint::expert` and `LoadMode::Map` asks for. It holds
    // for published checkpoints, which tools replace by rename (the mapped file stays as it is), and our own
    // `NewFile` never writes to an existing file. (MAP_PRIVATE would not help: whether writes to the file show in
    // untouched pages is unspecified, and truncation ends the process all the same.)
    // The length is compared with the file's before each use (`Shards::map_range`), which catches files that were
    // changed before, not those that change later.
    let mapping = unsafe { MmapOptions::new().len(len).map(file)? };
    Ok(Bytes::from_owner(mapping))
}
