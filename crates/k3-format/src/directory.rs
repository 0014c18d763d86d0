//! What lies in the directory of a checkpoint, and what is said of one that is none.

use std::fs;
use std::io;
use std::path::Path;

use crate::index::{INDEX_FILE, Index};
use crate::new_file::PARTIAL;
use crate::printable::printable;
use crate::shard_error::{AbsentShard, ShardError};
use crate::shard_file::dangling_target;

/// The file of a checkpoint that needs no index.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";

/// Whether `dir` is a directory.
pub(crate) fn check_directory(dir: &Path) -> Result<(), ShardError> {
    match fs::metadata(dir) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(ShardError::NotADirectory { path: dir.to_owned() }),
        Err(cause) => Err(match dangling_target(dir, &cause) {
            Some(target) => ShardError::DanglingLink { link: dir.to_owned(), target },
            None if cause.kind() == io::ErrorKind::NotFound => {
                ShardError::NoDirectory { dir: dir.to_owned() }
            }
            None => ShardError::io("open", dir)(cause),
        }),
    }
}

/// `None`: there is no index, but a single file that needs none.
pub(crate) fn find_index(dir: &Path) -> Result<Option<Index>, ShardError> {
    let path = dir.join(INDEX_FILE);
    if is_there(&path) {
        Index::open(path).map(Some)
    } else if is_there(&dir.join(SINGLE_FILE)) {
        Ok(None)
    } else {
        Err(ShardError::NoIndex { dir: dir.to_owned(), hint: hint(dir)? })
    }
}

/// Whether the directory has the name at all, be it a dangling link.
fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Names of what lies in `dir`, sorted.
fn list(dir: &Path) -> Result<Vec<String>, ShardError> {
    let mut names = Vec::new();
    for item in fs::read_dir(dir).map_err(ShardError::io("list", dir))? {
        let item = item.map_err(ShardError::io("list", dir))?;
        names.push(printable(&item.file_name().to_string_lossy()).into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// `2 .safetensors files and a.json, b.txt`
pub(crate) fn inventory(dir: &Path) -> Result<String, ShardError> {
    /// Names that help to recognise a directory.
    const NAMED: usize = 8;
    let names = list(dir)?;
    let (shards, others): (Vec<_>, Vec<_>) = names.iter().partition(|name| name.ends_with(".safetensors"));
    let mut found = vec![format!("{} .safetensors file(s)", shards.len())];
    found.extend(others.iter().take(NAMED).map(|name| (*name).clone()));
    if others.len() > NAMED {
        found.push(format!("and {} more", others.len() - NAMED));
    }
    Ok(found.join(", "))
}

/// What a directory without index holds, and what to do about it.
fn hint(dir: &Path) -> Result<String, ShardError> {
    let names = list(dir)?;
    let count = |end: &str| names.iter().filter(|name| name.ends_with(end)).count();
    let (shards, gguf, torch) =
        (count(".safetensors"), count(".gguf"), count(".bin") + count(".pt") + count(".pth"));
    let partial = count(PARTIAL);
    Ok(if partial > 0 {
        format!(
            "it holds {partial} unfinished file(s) *{PARTIAL} and {shards} finished .safetensors file(s): the program \
             that wrote it was interrupted or is still running; let it finish or run it again, since the index is \
             written last"
        )
    } else if shards > 0 {
        format!(
            "it holds {shards} .safetensors file(s): download model.safetensors.index.json of the same release into it"
        )
    } else if gguf > 0 {
        format!("it holds {gguf} GGUF file(s), which are not read: get the safetensors release of the model")
    } else if torch > 0 {
        format!(
            "it holds {torch} PyTorch file(s), which are not read: get the safetensors release of the model"
        )
    } else if names.iter().any(|name| name == "snapshots") {
        "it is the cache folder of a repository: give the folder of one revision, below its `snapshots`"
            .to_owned()
    } else if names.is_empty() {
        "it is empty: download the checkpoint into it".to_owned()
    } else {
        format!(
            "it holds {} other file(s): give the directory that the checkpoint was downloaded to",
            names.len()
        )
    })
}

/// All shards that an index with `counts` tensors in each names, or which of them are absent.
pub(crate) fn check_presence(dir: &Path, counts: &[(String, usize)]) -> Result<(), ShardError> {
    let mut absent = Vec::new();
    let mut tensors_found = 0;
    for (name, count) in counts {
        let path = dir.join(name);
        match fs::metadata(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                absent.push(AbsentShard { name: name.clone(), dangling: dangling_target(&path, &cause) });
            }
            // Any other trouble comes up, with its own words, when the shard is opened.
            _ => tensors_found += count,
        }
    }
    if absent.is_empty() {
        return Ok(());
    }
    let tensors = counts.iter().map(|(_, count)| count).sum();
    Err(ShardError::AbsentShards {
        dir: dir.to_owned(),
        absent,
        shards: counts.len(),
        tensors_found,
        tensors,
    })
}
