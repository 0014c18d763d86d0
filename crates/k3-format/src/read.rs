//! Positioned reads to the full length (`read` of the system may stop earlier, and does above 2 GiB).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;

// Offsets and lengths of a checkpoint exceed 32 bits; they are cast to usize after they were checked.
const _: () = assert!(usize::BITS == 64, "a 64-bit system is needed");

/// The most bytes that one read of Linux returns, whatever is asked: 2^31 - 4096.
pub(crate) const MAX_READ_BYTES: usize = (1 << 31) - 4096;

/// Alignment of what [`read_aligned`] returns, in bytes: a cache line, and the widest vector register.
pub(crate) const ALIGN: usize = 64;

/// A file, or what a test puts in its place.
pub(crate) trait ReadAt {
    /// As `pread`: may return fewer bytes than asked, 0 at the end.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buf, offset)
    }
}

/// Why [`read_full`] failed.
#[derive(Debug)]
pub(crate) enum ReadFailure {
    /// The file ended after this many bytes.
    Short { got: u64 },
    /// The system's answer.
    Io(io::Error),
}

/// Fills `buf` from `offset` on, in reads of at most `cap` bytes.
pub(crate) fn read_full(
    file: &impl ReadAt,
    cap: usize,
    offset: u64,
    buf: &mut [u8],
) -> Result<(), ReadFailure> {
    let mut done = 0;
    while done < buf.len() {
        let end = buf.len().min(done.saturating_add(cap));
        match file.read_at(&mut buf[done..end], offset + done as u64) {
            Ok(0) => return Err(ReadFailure::Short { got: done as u64 }),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(ReadFailure::Io(e)),
        }
    }
    Ok(())
}

/// [`read_full`] into new memory that begins at a multiple of [`ALIGN`].
pub(crate) fn read_aligned(
    file: &impl ReadAt,
    cap: usize,
    offset: u64,
    len: usize,
) -> Result<Bytes, ReadFailure> {
    if len == 0 {
        return Ok(Bytes::new());
    }
    // Zeroed memory of this size comes from the system untouched; a safe aligned vector does not exist.
    let mut buf = vec![0; len + ALIGN - 1];
    let start = buf.as_ptr().align_offset(ALIGN);
    read_full(file, cap, offset, &mut buf[start..start + len])?;
    Ok(Bytes::from(buf).slice(start..start + len))
}

#[cfg(test)]
mod tests;
