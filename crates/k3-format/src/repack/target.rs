//! Where a tree may be written: never through a link, never into the source.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use crate::index::INDEX_FILE;
use crate::new_file::{PARTIAL, regular};
use crate::printable::printable;
use crate::shard_file;

use super::REPORT_FILE;
use super::error::RepackError;
use super::extras::Extras;
use super::journal::JOURNAL_FILE;
use super::plan::{Plan, ShardPlan};

/// What is at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing, or an empty directory.
    Fresh,
    /// An unfinished repack.
    Begun,
    /// A finished one.
    Finished,
    /// Shards without notes of a repack, and nothing but files that it might have written.
    Lost,
}

/// Checks that `dir` may be written to when `source` is read. Nothing is made or changed.
pub(super) fn check(dir: &Path, source: &Path, outputs: &Outputs<'_>) -> Result<State, RepackError> {
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
    let names = list(dir)?;
    let state = state(dir, &names, outputs)?;
    // Now, and not when its turn comes to be written: an index that was removed by then would be lost for nothing.
    for name in names.iter().filter(|name| *name == JOURNAL_FILE || outputs.has(name)) {
        regular(&dir.join(name))?;
    }
    Ok(state)
}

fn state(dir: &Path, names: &[OsString], outputs: &Outputs<'_>) -> Result<State, RepackError> {
    if names.iter().any(|name| name == JOURNAL_FILE) {
        return Ok(State::Begun);
    }
    if names.iter().any(|name| name == REPORT_FILE) {
        return Ok(State::Finished);
    }
    // An empty file system has this.
    let others: Vec<&OsString> = names.iter().filter(|name| *name != "lost+found").collect();
    if others.is_empty() {
        return Ok(State::Fresh);
    }
    let has_shards = others.iter().any(|name| outputs.shard(name).is_some());
    match others.iter().find(|name| !outputs.has(name)) {
        None if has_shards => Ok(State::Lost),
        Some(other) if has_shards => Err(other_tree(dir, other)),
        found => Err(not_empty(dir, found.unwrap_or(&others[0]))),
    }
}

/// Names in `dir`, in order; none if it does not exist.
fn list(dir: &Path) -> Result<Vec<OsString>, RepackError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(RepackError::io("list", dir)(e)),
    };
    let names = entries.map(|item| item.map(|item| item.file_name())).collect::<io::Result<Vec<_>>>();
    let mut names = names.map_err(RepackError::io("list", dir))?;
    names.sort_unstable();
    Ok(names)
}

fn not_empty(dir: &Path, found: &OsStr) -> RepackError {
    let found = printable(&found.to_string_lossy()).into_owned();
    RepackError::TargetNotEmpty { dir: dir.to_owned(), found }
}

fn other_tree(dir: &Path, file: &OsStr) -> RepackError {
    let file = printable(&file.to_string_lossy()).into_owned();
    RepackError::OtherTree { dir: dir.to_owned(), file }
}

/// The files that a repack writes.
pub(super) struct Outputs<'a> {
    pub(super) plan: &'a Plan,
    pub(super) extras: &'a Extras,
}

impl Outputs<'_> {
    /// Whether a file of this name, finished or not, is one of them.
    fn has(&self, name: &OsStr) -> bool {
        let Some(name) = name.to_str() else { return false };
        let name = name.strip_suffix(PARTIAL).unwrap_or(name);
        name == REPORT_FILE
            || name == INDEX_FILE
            || self.extras.outputs.iter().any(|extra| extra.name == name)
            || self.shard(OsStr::new(name)).is_some()
    }

    fn shard(&self, name: &OsStr) -> Option<&ShardPlan> {
        self.plan.shards.iter().find(|shard| name == shard.name.as_str())
    }

    /// Checks that `dir`, which has no notes of an earlier run that can be read, holds a part of the tree that this plan
    /// makes, and nothing else. What makes that sure are the headers of the shards; whether their data is right is another
    /// question.
    pub(super) fn check_own(&self, dir: &Path) -> Result<(), RepackError> {
        let (mut own, mut others) = (0, None);
        let names = list(dir)?;
        let has_shards = names.iter().any(|name| self.shard(name).is_some());
        for name in names {
            if name == JOURNAL_FILE || name == "lost+found" {
                continue;
            }
            if !self.has(&name) {
                return Err(if has_shards { other_tree(dir, &name) } else { not_empty(dir, &name) });
            }
            if name.as_encoded_bytes().ends_with(PARTIAL.as_bytes()) {
                continue;
            }
            let path = dir.join(&name);
            let is_file = fs::symlink_metadata(&path).is_ok_and(|m| m.is_file());
            match self.shard(&name).filter(|_| is_file) {
                Some(shard) => match shard_file::open(dir, &shard.name) {
                    Ok((file, _)) if file.header_hash == self.plan.header_hash(&path, shard)? => own += 1,
                    Ok(_) => return Err(other_tree(dir, &name)),
                    // Damaged: it is made anew, if the others say that it may be.
                    Err(_) => others = Some(name),
                },
                None => others = Some(name),
            }
        }
        match others {
            Some(found) if own == 0 => Err(not_empty(dir, &found)),
            _ => Ok(()),
        }
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

/// Free bytes of the file system of `dir`, which need not exist.
pub(super) fn free_bytes(dir: &Path) -> Result<u64, RepackError> {
    let stat = statvfs(dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// An error if the file system of `dir`, which need not exist, is mounted for reading only.
pub(super) fn check_writable(dir: &Path) -> Result<(), RepackError> {
    if statvfs(dir)?.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        let what = "it is on a read-only file system".to_owned();
        return Err(RepackError::Target { dir: dir.to_owned(), what });
    }
    Ok(())
}

fn statvfs(dir: &Path) -> Result<rustix::fs::StatVfs, RepackError> {
    let absolute = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
    let place = existing(&absolute);
    rustix::fs::statvfs(place).map_err(|e| RepackError::io("ask for the free space of", place)(e.into()))
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
