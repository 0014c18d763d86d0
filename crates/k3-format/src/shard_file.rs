//! One shard: opened, diagnosed, its header parsed.

use std::cmp::Ordering;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytes::Bytes;

use crate::content::{Content, PROBE_BYTES};
use crate::header::{Header, MAX_HEADER_BYTES};
use crate::read::{MAX_READ_BYTES, ReadFailure, read_full};
use crate::shard_error::ShardError;

/// A file of a checkpoint. It stays open as long as its [`crate::Shards`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardFile {
    /// File name, as the index has it.
    pub name: String,
    /// The directory of the checkpoint joined with the name; links are not resolved.
    pub path: PathBuf,
    /// Length of the file in bytes, which is the end of its last tensor.
    pub len: u64,
    /// Offset of the data section: 8 + length of the header.
    pub data_start: u64,
    /// BLAKE3 of the header's JSON with its padding, without the 8 length bytes.
    pub header_hash: [u8; 32],
    /// Its tensors, by their position in [`crate::Shards::iter`].
    pub tensors: Range<usize>,
    pub(crate) file: File,
    pub(crate) mapping: OnceLock<Bytes>,
}

impl ShardFile {
    /// One read of the open file, as `pread`: may return fewer bytes than `buf` has room for, 0 at the end.
    ///
    /// # Errors
    /// The system's answer, also when it was interrupted.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&self.file, buf, offset)
    }

    /// The device that the file lies on. Files on different ones can be read at the same time at full speed.
    ///
    /// # Errors
    /// The system's answer.
    pub fn device(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.dev())
    }

    /// Opens the same file once more, for reads that bypass the page cache: their offset, length and address must be
    /// multiples of the file system's block.
    ///
    /// # Errors
    /// The system's answer: [`io::ErrorKind::InvalidInput`] or [`io::ErrorKind::Unsupported`] where there are no such
    /// reads, [`io::ErrorKind::NotFound`] if the file is gone, or another one has its name.
    pub fn open_direct(&self) -> io::Result<File> {
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::fs::OpenOptionsExt as _;
            let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
            let direct = File::options().read(true).custom_flags(flags).open(&self.path)?;
            let (found, expected) = (direct.metadata()?, self.file.metadata()?);
            if (found.dev(), found.ino()) != (expected.dev(), expected.ino()) {
                return Err(io::Error::new(io::ErrorKind::NotFound, "another file has taken its name"));
            }
            Ok(direct)
        }
        #[cfg(not(target_os = "linux"))]
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Opens and checks one shard. `tensors` of the result is still empty.
pub(crate) fn open(dir: &Path, name: &str) -> Result<(ShardFile, Header), ShardError> {
    let path = dir.join(name);
    let (file, len) = open_regular(&path)?;
    let (json, data_start) = read_header(&path, &file, len)?;
    let header =
        Header::parse(&json).map_err(|problem| ShardError::Header { path: path.clone(), problem })?;
    check_length(&path, len, data_start, &header)?;
    let shard = ShardFile {
        name: name.to_owned(),
        path,
        len,
        data_start,
        header_hash: blake3::hash(&json).into(),
        tensors: 0..0,
        file,
        mapping: OnceLock::new(),
    };
    Ok((shard, header))
}

/// Opens a regular file or a link to one, and tells its length.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), ShardError> {
    // Before opening: to open a pipe would wait for its other end.
    let metadata = fs::metadata(path).map_err(|cause| match dangling_target(path, &cause) {
        Some(target) => ShardError::DanglingLink { link: path.to_owned(), target },
        None => ShardError::io("open", path)(cause),
    })?;
    if !metadata.is_file() {
        return Err(ShardError::NotAFile { path: path.to_owned() });
    }
    let file = File::open(path).map_err(ShardError::io("open", path))?;
    let metadata = file.metadata().map_err(ShardError::io("open", path))?;
    if !metadata.is_file() {
        return Err(ShardError::NotAFile { path: path.to_owned() });
    }
    Ok((file, metadata.len()))
}

/// The target of the link at `path`, if following it failed because there is nothing.
pub(crate) fn dangling_target(path: &Path, cause: &io::Error) -> Option<PathBuf> {
    (cause.kind() == io::ErrorKind::NotFound).then(|| fs::read_link(path).ok()).flatten()
}

/// The JSON of the header and the offset of the data section. Nothing is allocated before the length that the
/// file states was compared with its real length.
fn read_header(path: &Path, file: &File, len: u64) -> Result<(Vec<u8>, u64), ShardError> {
    let read = |offset: u64, buf: &mut [u8]| {
        read_full(file, MAX_READ_BYTES, offset, buf)
            .map_err(|e| read_error(path, "the header", offset, buf.len(), e))
    };
    let mut probe = [0; PROBE_BYTES];
    let probe = &mut probe[..len.min(PROBE_BYTES as u64) as usize];
    read(0, probe)?;
    let wrong = |content| ShardError::WrongContent {
        path: path.to_owned(),
        expected: "a safetensors shard",
        content,
    };
    let Some((n, rest)) = probe.split_first_chunk() else {
        return Err(wrong(Content::recognise(probe)));
    };
    let n = u64::from_le_bytes(*n);
    // Text never gets past this: its 8th byte is above 0, so as a length it exceeds any limit.
    if n == 0 || n > MAX_HEADER_BYTES || rest.first().is_some_and(|&b| b != b'{') {
        return Err(wrong(Content::recognise(probe)));
    }
    let data_start = 8 + n;
    if data_start > len {
        return Err(ShardError::Truncated {
            path: path.to_owned(),
            declared: data_start,
            found: len,
            tensor: None,
        });
    }
    let mut json = vec![0; n as usize];
    read(8, &mut json)?;
    Ok((json, data_start))
}

fn check_length(path: &Path, found: u64, data_start: u64, header: &Header) -> Result<(), ShardError> {
    // A header can declare any number; what saturates is longer than any file.
    let declared = data_start.saturating_add(header.data_len);
    let path = path.to_owned();
    match found.cmp(&declared) {
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(ShardError::TrailingBytes { path, declared, found }),
        Ordering::Less => {
            // Entries are in disk order, so their ends ascend.
            let first = header.entries.partition_point(|e| e.end <= found - data_start);
            let tensor = header.entries.get(first).map(|e| header.name(e).to_owned());
            Err(ShardError::Truncated { path, declared, found, tensor })
        }
    }
}

/// `what` is what was read.
pub(crate) fn read_error(
    path: &Path,
    what: &str,
    offset: u64,
    wanted: usize,
    failure: ReadFailure,
) -> ShardError {
    match failure {
        ReadFailure::Memory(source) => ShardError::no_memory(path, what, wanted as u64, source),
        ReadFailure::Short { got } => {
            ShardError::ShortRead { path: path.to_owned(), offset, wanted: wanted as u64, got }
        }
        ReadFailure::Io(cause) => ShardError::io("read", path)(cause),
    }
}
