//! Transfers past the page cache (`O_DIRECT`), so that terabytes that are read or written once do not push out what
//! other programs keep there.

use std::fs::File;
use std::io::{self, Write};

use crate::read::{Buffer, ReadAt, ReadFailure};

/// What direct transfers are aligned to: the largest block of common drives.
pub(crate) const DIRECT_ALIGN: usize = 4096;
/// Bytes of one direct transfer through a buffer of ours.
pub(crate) const DIRECT_BYTES: usize = 4 << 20;

/// The flag for opening, where the system has one.
#[cfg_attr(target_os = "linux", allow(clippy::unnecessary_wraps, reason = "other systems have none"))]
pub(crate) fn direct_flag() -> io::Result<i32> {
    #[cfg(target_os = "linux")]
    return Ok(rustix::fs::OFlags::DIRECT.bits() as i32);
    #[cfg(not(target_os = "linux"))]
    return Err(io::ErrorKind::Unsupported.into());
}

/// Reads whole aligned blocks into `bounce` and copies what is wanted. Direct reads may be short without an error, and
/// the last block of a file is.
pub(crate) fn read_direct(
    file: &impl ReadAt,
    bounce: &mut [u8],
    begin: u64,
    buf: &mut [u8],
) -> Result<(), ReadFailure> {
    let align = DIRECT_ALIGN as u64;
    let mut done = 0;
    while done < buf.len() {
        let at = begin + done as u64;
        let block = at - at % align;
        let skip = (at - block) as usize;
        let want = bounce.len().min((skip + buf.len() - done).next_multiple_of(DIRECT_ALIGN));
        let got = match file.read_at(&mut bounce[..want], block) {
            Ok(got) => got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(ReadFailure::Io(e)),
        };
        let n = got.saturating_sub(skip).min(buf.len() - done);
        if n == 0 {
            return Err(ReadFailure::Short { got: done as u64 });
        }
        buf[done..done + n].copy_from_slice(&bounce[skip..skip + n]);
        done += n;
    }
    Ok(())
}

/// Writes a file from front to back in whole aligned blocks; only its end goes through the page cache.
pub(crate) struct DirectOut {
    file: File,
    /// The beginning of the next blocks.
    buffer: Buffer,
    filled: usize,
}

impl DirectOut {
    /// Over a file that was opened with [`direct_flag`] and is empty.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        Ok(Self { file, buffer: Buffer::zeroed(DIRECT_BYTES)?, filled: 0 })
    }

    pub(crate) fn get_ref(&self) -> &File {
        &self.file
    }

    /// Writes what is still buffered. Nothing can be written after it.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        let filled = std::mem::take(&mut self.filled);
        let (blocks, rest) = self.buffer.as_mut()[..filled].split_at(filled - filled % DIRECT_ALIGN);
        self.file.write_all(blocks)?;
        if rest.is_empty() {
            return Ok(());
        }
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
            let flags = fcntl_getfl(&self.file)?;
            fcntl_setfl(&self.file, flags & !OFlags::DIRECT)?;
        }
        self.file.write_all(rest)
    }
}

impl Write for DirectOut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Whole blocks that lie as the system wants them need no copy.
        let aligned = bytes.as_ptr().align_offset(DIRECT_ALIGN) == 0;
        if self.filled == 0 && aligned && bytes.len() >= DIRECT_ALIGN {
            return self.file.write(&bytes[..bytes.len() - bytes.len() % DIRECT_ALIGN]);
        }
        let room = &mut self.buffer.as_mut()[self.filled..];
        let n = bytes.len().min(room.len());
        room[..n].copy_from_slice(&bytes[..n]);
        self.filled += n;
        if self.filled == DIRECT_BYTES {
            self.filled = 0;
            self.file.write_all(self.buffer.as_mut())?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for DirectOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectOut")
            .field("file", &self.file)
            .field("filled", &self.filled)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
