//! Output files that appear whole or not at all: written beside their place, renamed into it.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::direct::{DirectOut, direct_flag};
use crate::shard_error::ShardError;

/// Appended to the name of an output until it is whole.
pub(crate) const PARTIAL: &str = ".partial";

const BUFFER_BYTES: usize = 1 << 20;

/// A file that appears under its name when it is whole, and never before: it is written as `<path>.partial`, brought
/// to the disk, and renamed by [`NewFile::commit`]. A file that had the name stays until then, and for whoever has it
/// open or mapped.
///
/// Dropped before `commit`, or killed, it leaves `<path>.partial`, which the next [`NewFile::create`] replaces. Two
/// writers of one name never mix: the partial file is locked, and the second writer is refused. Nothing is written
/// through a symbolic link, because what a link points to may be another checkpoint's.
///
/// ```no_run
/// # fn main() -> Result<(), k3_format::ShardError> {
/// let mut file = k3_format::NewFile::create("state.safetensors".as_ref())?;
/// file.write(b"...")?;
/// file.commit()
/// # }
/// ```
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    out: Out,
}

/// How bytes get into the file.
#[derive(Debug)]
enum Out {
    Cached(BufWriter<File>),
    Direct(DirectOut),
}

impl NewFile {
    /// Starts the file `path`; its directory must exist. The partial file of an earlier run that ended is replaced.
    ///
    /// # Errors
    ///
    /// [`ShardError::OutputIsLink`] for a symbolic link and [`ShardError::Unwritable`] for anything else that is not
    /// a file, at `path` or at `<path>.partial`; [`ShardError::OutputIsBusy`] while another writer has the same
    /// name; [`ShardError::Io`].
    pub fn create(path: &Path) -> Result<Self, ShardError> {
        Self::create_with(path, false)
    }

    /// [`NewFile::create`], unless a file of another kind has the name ([`check_replaceable`]).
    ///
    /// # Errors
    ///
    /// As [`NewFile::create`], and [`ShardError::Unwritable`] for that file.
    pub fn replacing(path: &Path, magic: &[u8]) -> Result<Self, ShardError> {
        regular(path)?;
        check_replaceable(path, magic)?;
        Self::create(path)
    }

    /// [`NewFile::create`]; with `direct`, bytes go past the page cache.
    pub(crate) fn create_with(path: &Path, direct: bool) -> Result<Self, ShardError> {
        regular(path)?;
        let Some(name) = path.file_name() else {
            return Err(ShardError::Unwritable {
                path: path.to_owned(),
                message: "the path has no file name".into(),
            });
        };
        let mut partial_name = OsString::from(name);
        partial_name.push(PARTIAL);
        let partial = path.with_file_name(partial_name);
        // Held until the new file is locked, so that there is no moment at which a third writer could take over.
        let _leftover = remove_leftover(&partial)?;
        // `create_new` also fails, rather than follow it, if a link appears meanwhile.
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let flag = if direct { direct_flag().map(|flag| _ = options.custom_flags(flag)) } else { Ok(()) };
        let file = flag.and_then(|()| options.open(&partial)).map_err(|e| {
            if e.kind() == io::ErrorKind::AlreadyExists {
                return ShardError::OutputIsBusy { partial: partial.clone() };
            }
            ShardError::io("create", &partial)(e)
        })?;
        lock(&file, &partial)?;
        let out = if direct {
            Out::Direct(DirectOut::new(file).map_err(ShardError::io("write", &partial))?)
        } else {
            Out::Cached(BufWriter::with_capacity(BUFFER_BYTES, file))
        };
        Ok(Self { path: path.to_owned(), partial, out })
    }

    /// Asks the file system for room for `len` bytes, so that a full disk is known at once and the file is in few
    /// pieces. Where it has no such call nothing happens.
    ///
    /// # Errors
    ///
    /// [`ShardError::Io`].
    pub(crate) fn reserve(&self, len: u64) -> Result<(), ShardError> {
        #[cfg(target_os = "linux")]
        {
            let done = rustix::fs::fallocate(self.file(), rustix::fs::FallocateFlags::empty(), 0, len);
            match done.map_err(io::Error::from) {
                Err(e) if matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput) => {}
                done => done.map_err(ShardError::io("write", &self.partial))?,
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = len;
        Ok(())
    }

    fn file(&self) -> &File {
        match &self.out {
            Out::Cached(out) => out.get_ref(),
            Out::Direct(out) => out.get_ref(),
        }
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends all of `bytes`.
    ///
    /// # Errors
    ///
    /// [`ShardError::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        let done = match &mut self.out {
            Out::Cached(out) => out.write_all(bytes),
            Out::Direct(out) => out.write_all(bytes),
        };
        done.map_err(ShardError::io("write", &self.partial))
    }

    /// Brings all bytes to the disk (`fsync`), gives the file its name, and brings the name to the disk (`fsync` of
    /// the directory), so that after a power cut there is the file of before or this one.
    ///
    /// # Errors
    ///
    /// [`ShardError::OutputIsLink`] or [`ShardError::Unwritable`] if a link or another thing took the name meanwhile,
    /// [`ShardError::OutputIsBusy`] if somebody replaced the partial file, [`ShardError::Io`]. Only the error of
    /// synchronizing the directory comes after the rename.
    pub fn commit(mut self) -> Result<(), ShardError> {
        let done = match &mut self.out {
            Out::Cached(out) => out.flush(),
            Out::Direct(out) => out.finish(),
        };
        done.map_err(ShardError::io("write", &self.partial))?;
        let file = self.file();
        file.sync_all().map_err(ShardError::io("write", &self.partial))?;
        regular(&self.path)?;
        // Where the file system has no locks another writer may have replaced it: never publish that one's half.
        if !is_at(file, &self.partial)? {
            return Err(ShardError::OutputIsBusy { partial: self.partial });
        }
        // A rename replaces a name; it never writes through a link.
        fs::rename(&self.partial, &self.path).map_err(ShardError::io("rename into place", &self.path))?;
        let dir = match self.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        match File::open(dir).and_then(|dir| dir.sync_all()) {
            // Some network file systems have no such call; there the server keeps the name.
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
            result => result.map_err(ShardError::io("synchronize", dir)),
        }
    }
}

/// Whether a file that has the name may be replaced: it is empty, or begins with what all of its kind begin with. A slip in the
/// name of an output should cost nobody a file.
///
/// # Errors
///
/// [`ShardError::Unwritable`] for a file of another kind, [`ShardError::Io`] for one that cannot be read. Of what is no file,
/// or not there, whoever creates it says what is wrong.
pub fn check_replaceable(path: &Path, magic: &[u8]) -> Result<(), ShardError> {
    if !fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return Ok(());
    }
    let mut begin = Vec::new();
    let read = |file: File| file.take(magic.len() as u64).read_to_end(&mut begin);
    File::open(path).and_then(read).map_err(ShardError::io("read", path))?;
    if begin.is_empty() || begin == magic {
        return Ok(());
    }
    Err(ShardError::Unwritable {
        path: path.to_owned(),
        message: "a file of another kind has this name, and is left as it is; name another".into(),
    })
}

/// Removes the partial file of a run that ended, and returns it, locked.
fn remove_leftover(partial: &Path) -> Result<Option<File>, ShardError> {
    if regular(partial)?.is_none() {
        return Ok(None);
    }
    let leftover = match File::open(partial) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ShardError::io("open the unfinished", partial)(e)),
    };
    // Only who holds the lock of the file that has the name may take the name from it.
    lock(&leftover, partial)?;
    if !is_at(&leftover, partial)? {
        return Err(ShardError::OutputIsBusy { partial: partial.to_owned() });
    }
    fs::remove_file(partial).map_err(ShardError::io("remove the unfinished", partial))?;
    Ok(Some(leftover))
}

/// Takes the lock that says that somebody writes; the system drops it with the file, also of a process that was
/// killed. A file system without locks cannot tell: then `create_new` and the check before the rename remain.
fn lock(file: &File, partial: &Path) -> Result<(), ShardError> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(ShardError::OutputIsBusy { partial: partial.to_owned() }),
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Whether `file` is what has the name `path`.
fn is_at(file: &File, path: &Path) -> Result<bool, ShardError> {
    let failed = ShardError::io("check", path);
    let id = |metadata: &Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(own), Ok(there)) => Ok(id(&own) == id(&there)),
        (Ok(_), Err(e)) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        (Err(e), _) | (_, Err(e)) => Err(failed(e)),
    }
}

/// What has the name `path`, if anything has: a regular file, or it is refused.
pub(crate) fn regular(path: &Path) -> Result<Option<Metadata>, ShardError> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => Err(ShardError::OutputIsLink { path: path.to_owned() }),
        Ok(metadata) if !metadata.is_file() => Err(ShardError::Unwritable {
            path: path.to_owned(),
            message: "something that is not a file has this name; remove it or choose another directory"
                .into(),
        }),
        Ok(metadata) => Ok(Some(metadata)),
        // Whatever else is wrong with the place comes up, with its own words, when the file is created.
        Err(_) => Ok(None),
    }
}
