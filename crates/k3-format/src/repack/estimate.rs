//! How long a repack may take: short transfers of the same kind, measured before it starts.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::direct::{DIRECT_ALIGN, direct_flag};
use crate::read::Buffer;
use crate::{Checkpoint, Shards};

use super::error::RepackError;
use super::read::{Reader, open_direct};
use super::target;

/// The longest that a rate is measured.
const LONGEST: Duration = Duration::from_millis(500);
/// The most bytes that are moved to measure a rate.
const MOST: u64 = 256 << 20;
/// Bytes of one transfer.
const PIECE: usize = 8 << 20;

/// What a run would do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Bytes to be read: of the source, and of shards that are compared with it.
    pub read_bytes: u64,
    /// Bytes to be written, at most.
    pub write_bytes: u64,
    /// Bytes that must be free for that; 0 if nothing is to be written.
    pub needed_bytes: u64,
    /// Free bytes on the target's file system.
    pub free_bytes: u64,
    /// Shards to be written.
    pub shards: usize,
    /// Shards that are complete already.
    pub complete: usize,
    /// Shards that are there and are compared with the source first: those that are not right are written, too.
    pub compared: usize,
    /// Shards in flight.
    pub jobs: usize,
    /// The most memory for buffers.
    pub buffer_bytes: u64,
    /// Whether files go past the page cache.
    pub direct: bool,
    /// Bytes a second read just now from the source, one request at a time.
    pub read_rate: Option<f64>,
    /// Bytes a second written just now to the target's file system and brought to the disk.
    pub write_rate: Option<f64>,
    /// Seconds at these rates; `None` if one could not be measured.
    pub seconds: Option<f64>,
}

impl Estimate {
    /// Whether there is room for the result.
    pub fn fits(&self) -> bool {
        self.needed_bytes <= self.free_bytes
    }

    /// Measures the rates.
    pub(super) fn measure(&mut self, source: &Checkpoint, dir: &Path) -> Result<(), RepackError> {
        let absolute = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
        let place = target::existing(&absolute);
        self.read_rate = measure_reading(source, self.direct);
        self.write_rate = measure_writing(place, self.direct);
        let device = |path: &Path| std::fs::metadata(path).map(|m| m.dev()).ok();
        let one_device = source.shards().files().iter().any(|file| device(&file.path) == device(place));
        self.seconds = self.read_rate.zip(self.write_rate).map(|(read, write)| {
            let (reading, writing) = (self.read_bytes as f64 / read, self.write_bytes as f64 / write);
            if one_device { reading + writing } else { reading.max(writing) }
        });
        Ok(())
    }
}

/// The middle of the longest shard.
fn measure_reading(source: &Checkpoint, direct: bool) -> Option<f64> {
    let files = source.shards().files();
    let at = (0..files.len()).max_by_key(|&i| files[i].len)?;
    let mut reader = Reader::new(source.shards(), direct).ok()?;
    let mut piece = Buffer::zeroed(PIECE).ok()?;
    let (mut offset, mut done, start) = (files[at].len / 2, 0, Instant::now());
    while done < MOST && offset < files[at].len && start.elapsed() < LONGEST {
        let n = (files[at].len - offset).min(PIECE as u64) as usize;
        reader.read(at, offset, &mut piece.as_mut()[..n]).ok()?;
        offset += n as u64;
        done += n as u64;
    }
    rate(done, start)
}

/// A file without a name, which the system removes whatever happens.
fn measure_writing(place: &Path, direct: bool) -> Option<f64> {
    let mut piece = Buffer::zeroed(PIECE).ok()?;
    // Not zeros, which some file systems do not write.
    for (i, byte) in piece.as_mut().iter_mut().enumerate() {
        *byte = (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3];
    }
    let mut file = unnamed(place, direct).ok()?;
    let (mut done, start) = (0, Instant::now());
    while done < MOST && start.elapsed() < LONGEST {
        file.write_all(piece.as_mut()).ok()?;
        done += PIECE as u64;
    }
    file.sync_data().ok()?;
    rate(done, start)
}

fn rate(bytes: u64, start: Instant) -> Option<f64> {
    let seconds = start.elapsed().as_secs_f64();
    (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds)
}

#[cfg(target_os = "linux")]
fn unnamed(place: &Path, direct: bool) -> io::Result<std::fs::File> {
    let mut flags = rustix::fs::OFlags::TMPFILE.bits() as i32;
    if direct {
        flags |= direct_flag()?;
    }
    OpenOptions::new().write(true).custom_flags(flags).open(place)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Path, _: bool) -> io::Result<std::fs::File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether these files can be read past the page cache; if not, where and why.
pub(super) fn can_read_directly(shards: &Shards) -> Result<(), (PathBuf, io::Error)> {
    // One of each file system.
    let mut seen = Vec::new();
    for file in shards.files() {
        let failed = |e| (file.path.clone(), e);
        let device = std::fs::metadata(&file.path).map_err(failed)?.dev();
        if seen.contains(&device) {
            continue;
        }
        seen.push(device);
        let open = open_direct(&file.path).map_err(|e| failed(io::Error::other(e)))?;
        let mut buffer = Buffer::zeroed(1 << 20).map_err(failed)?;
        open.read_at(&mut buffer.as_mut()[..DIRECT_ALIGN], 0).map_err(failed)?;
    }
    Ok(())
}

/// Whether files in `place` can be written past the page cache.
pub(super) fn can_write_directly(place: &Path) -> Result<(), (PathBuf, io::Error)> {
    let failed = |e| (place.to_owned(), e);
    let mut file = unnamed(place, true).map_err(failed)?;
    let mut buffer = Buffer::zeroed(1 << 20).map_err(failed)?;
    file.write_all(&buffer.as_mut()[..DIRECT_ALIGN]).map_err(failed)
}
