//! Output files that appear whole or not at all: written beside their place, renamed into it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use crate::shard_error::ShardError;

/// Appended to the name of an output until it is whole.
const PARTIAL: &str = ".partial";

const BUFFER_BYTES: usize = 1 << 20;

/// A file under construction at `<path>.partial`. Dropped before [`NewFile::commit`], that is all it leaves.
#[derive(Debug)]
pub(crate) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    out: BufWriter<File>,
}

impl NewFile {
    /// Starts a file. A partial one of an earlier run is removed; a link at either place is never followed.
    pub(crate) fn create(path: &Path) -> Result<Self, ShardError> {
        refuse_link(path)?;
        let Some(name) = path.file_name() else {
            return Err(ShardError::Unwritable {
                path: path.to_owned(),
                message: "the path has no file name".into(),
            });
        };
        let mut partial_name = OsString::from(name);
        partial_name.push(PARTIAL);
        let partial = path.with_file_name(partial_name);
        match fs::remove_file(&partial) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(ShardError::io("remove the unfinished", &partial)(e));
            }
            _ => {}
        }
        // `create_new` also fails, rather than follow it, if a link appears meanwhile.
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&partial)
            .map_err(ShardError::io("create", &partial))?;
        Ok(Self { path: path.to_owned(), partial, out: BufWriter::with_capacity(BUFFER_BYTES, file) })
    }

    /// The final path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        self.out.write_all(bytes).map_err(ShardError::io("write", &self.partial))
    }

    /// Brings all bytes to the disk and gives the file its name.
    pub(crate) fn commit(mut self) -> Result<(), ShardError> {
        self.out.flush().map_err(ShardError::io("write", &self.partial))?;
        self.out.get_ref().sync_all().map_err(ShardError::io("write", &self.partial))?;
        refuse_link(&self.path)?;
        // A rename replaces a name; it never writes through a link.
        fs::rename(&self.partial, &self.path).map_err(ShardError::io("rename into place", &self.path))?;
        // The new name itself must survive a power cut.
        let dir = match self.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(ShardError::io("synchronize", dir))
    }
}

fn refuse_link(path: &Path) -> Result<(), ShardError> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => Err(ShardError::OutputIsLink { path: path.to_owned() }),
        Ok(metadata) if !metadata.is_file() => Err(ShardError::Unwritable {
            path: path.to_owned(),
            message: "something that is not a file has this name; remove it or choose another directory"
                .into(),
        }),
        _ => Ok(()),
    }
}
