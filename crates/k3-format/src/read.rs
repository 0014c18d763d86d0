//! Positioned reads to the full length (`read` of the system may stop earlier, and does above 2 GiB).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

// Offsets and lengths of a checkpoint exceed 32 bits; they are cast to usize after they were checked.
const _: () = assert!(usize::BITS == 64, "a 64-bit system is needed");

/// The most bytes that one read of Linux returns, whatever is asked: 2^31 - 4096.
pub(crate) const MAX_READ_BYTES: usize = (1 << 31) - 4096;

/// Alignment of a [`Buffer`], in bytes: a cache line, and the widest vector register.
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
    /// There is no memory for the bytes.
    Memory(io::Error),
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

/// Zeroed memory that begins at a multiple of [`ALIGN`]. To have too little of it is an error and not the end of the
/// process, as it is with `vec![0; len]`.
pub(crate) enum Buffer {
    /// A part of a vector.
    Small { vec: Vec<u8>, start: usize, len: usize },
    /// Pages of its own, which the system zeroes as they are touched.
    Large(MmapMut),
}

impl Buffer {
    /// From here on whole pages waste little and clearing them beforehand would cost a pass over the memory.
    const LARGE: usize = 1 << 20;

    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        if len >= Self::LARGE {
            // A vector has at most this size; beyond it pointers cannot be subtracted.
            isize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
            let pages = MmapMut::map_anon(len)?;
            // Fewer and larger ones, where the kernel has them to give.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(Advice::HugePage);
            return Ok(Self::Large(pages));
        }
        let mut vec = Vec::new();
        vec.try_reserve_exact(len + ALIGN - 1)?;
        vec.resize(len + ALIGN - 1, 0);
        let start = vec.as_ptr().align_offset(ALIGN);
        Ok(Self::Small { vec, start, len })
    }

    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small { vec, start, len } => &mut vec[*start..*start + *len],
            Self::Large(pages) => pages,
        }
    }

    pub(crate) fn freeze(self) -> Bytes {
        match self {
            Self::Small { vec, start, len } => Bytes::from(vec).slice(start..start + len),
            Self::Large(pages) => Bytes::from_owner(pages),
        }
    }
}

/// [`read_full`] into new memory that begins at a multiple of [`ALIGN`].
pub(crate) fn read_aligned(
    file: &impl ReadAt,
    cap: usize,
    offset: u64,
    len: usize,
) -> Result<Bytes, ReadFailure> {
    let mut buffer = Buffer::zeroed(len).map_err(ReadFailure::Memory)?;
    read_full(file, cap, offset, buffer.as_mut())?;
    Ok(buffer.freeze())
}

#[cfg(test)]
mod tests;
