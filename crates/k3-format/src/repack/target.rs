//! Where a tree may be written: never through a link, never into the source.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use crate::new_file::PARTIAL;
use crate::printable::printable;

use super::REPORT_FILE;
use super::error::RepackError;
use super::journal::JOURNAL_FILE;
use super::plan::ShardPlan;

/// What is at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing, or an empty directory.
    Fresh,
    /// An unfinished repack.
    Begun,
    /// A finished one.
    Finished,
}

/// Checks that `dir` may be written to when `source` is read. Nothing is made or changed.
pub(super) fn check(dir: &Path, source: &Path) -> Result<State, RepackError> {
    let target = |what: &str| RepackError::Target { dir: dir.to_owned(), what: what.to_owned() };
    // With a slash or a dot at its end, a path to a link would be followed.
    let plain: PathBuf = dir.components().collect();
    match fs::symlink_metadata(&plain) {
        Ok(metadata) if metadata.is_symlink() => {
            return Err(RepackError::TargetIsLink { dir: dir.to_owned() });
        }
        Ok(metadata) if !metadata.is_dir() => return Err(target("it is not a directory")),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(RepackError::io("look at", dir)(e)),
    }
    let resolved = resolve(dir)?;
    let source_dir = source.canonicalize().map_err(RepackError::io("resolve", source))?;
    if resolved.starts_with(&source_dir) {
        return Err(RepackError::TargetInSource { dir: dir.to_owned(), source_dir: source.to_owned() });
    }
    for item in fs::read_dir(source).map_err(RepackError::io("list", source))? {
        let path = item.map_err(RepackError::io("list", source))?.path();
        // Where a link leads, if it is one; a dangling one is no business of the target.
        if let Ok(real) = path.canonicalize()
            && real.is_file()
            && real.starts_with(&resolved)
        {
            return Err(RepackError::TargetHoldsSource { dir: dir.to_owned(), file: path });
        }
    }
    state(dir)
}

fn state(dir: &Path) -> Result<State, RepackError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(State::Fresh),
        Err(e) => return Err(RepackError::io("list", dir)(e)),
    };
    let names = entries.map(|item| item.map(|item| item.file_name())).collect::<io::Result<Vec<_>>>();
    let names = names.map_err(RepackError::io("list", dir))?;
    if names.iter().any(|name| name == JOURNAL_FILE) {
        return Ok(State::Begun);
    }
    if names.iter().any(|name| name == REPORT_FILE) {
        return Ok(State::Finished);
    }
    match names.iter().min() {
        None => Ok(State::Fresh),
        // An empty file system has this.
        Some(name) if names.len() == 1 && name == "lost+found" => Ok(State::Fresh),
        Some(name) => Err(RepackError::TargetNotEmpty {
            dir: dir.to_owned(),
            found: printable(&name.to_string_lossy()).into_owned(),
        }),
    }
}

/// The path without links, of a directory that need not exist.
fn resolve(dir: &Path) -> Result<PathBuf, RepackError> {
    let absolute = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
    let existing = existing(&absolute);
    let real = existing.canonicalize().map_err(RepackError::io("resolve", existing))?;
    let rest = absolute.strip_prefix(existing).unwrap_or(Path::new(""));
    if rest.components().any(|part| !matches!(part, Component::Normal(_))) {
        let what = "its path leads up out of a directory that does not exist".to_owned();
        return Err(RepackError::Target { dir: dir.to_owned(), what });
    }
    Ok(real.join(rest))
}

/// `path`, or the directory above that exists.
pub(super) fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| fs::symlink_metadata(path).is_ok()).unwrap_or(Path::new("/"))
}

/// Free bytes of the file system of `dir`, which need not exist but must be writable.
pub(super) fn free_bytes(dir: &Path) -> Result<u64, RepackError> {
    let absolute = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
    let place = existing(&absolute);
    let stat = rustix::fs::statvfs(place)
        .map_err(|e| RepackError::io("ask for the free space of", place)(e.into()))?;
    if stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        let what = "it is on a read-only file system".to_owned();
        return Err(RepackError::Target { dir: dir.to_owned(), what });
    }
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Unfinished files of these shards in `dir`, which an earlier run left, with the bytes that they take.
fn leftovers<'a>(dir: &'a Path, shards: &'a [ShardPlan]) -> impl Iterator<Item = (PathBuf, u64)> + 'a {
    shards.iter().filter_map(move |shard| {
        let path = dir.join(format!("{}{PARTIAL}", shard.name));
        let metadata = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
        Some((path, metadata.blocks() * 512))
    })
}

/// Bytes that the next run will free.
pub(super) fn leftover_bytes(dir: &Path, shards: &[ShardPlan]) -> u64 {
    leftovers(dir, shards).map(|(_, bytes)| bytes).sum()
}

/// Removes them. Who holds the lock of the journal is the only one who makes such files.
pub(super) fn remove_leftovers(dir: &Path, shards: &[ShardPlan]) -> Result<(), RepackError> {
    leftovers(dir, shards).try_for_each(|(path, _)| {
        fs::remove_file(&path).map_err(RepackError::io("remove the unfinished", &path))
    })
}
