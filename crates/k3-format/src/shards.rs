//! All shards of a checkpoint: found, diagnosed, indexed by tensor name, read and mapped.

use std::fmt;
use std::hash::BuildHasher as _;
#[cfg(target_os = "linux")]
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use hashbrown::hash_table::{Entry as Slot, HashTable};
use safetensors::Dtype;

use crate::directory::{SINGLE_FILE, check_directory, check_presence, find_index};
use crate::header::{Entry, Header};
use crate::index::Index;
use crate::map::map;
use crate::read::{MAX_READ_BYTES, read_aligned, read_full};
use crate::shard_error::ShardError;
use crate::shard_file::{self, ShardFile, read_error};

/// Headers read at the same time. More than cores, because a header on a network volume is mostly waiting.
const HEADER_READERS: usize = 8;

/// A tensor: what it is and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Full name, as the checkpoint has it.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Dimensions, row-major.
    pub shape: &'a [u64],
    /// Position of its shard in [`Shards::files`].
    pub shard: usize,
    /// Offset of its first byte in the file.
    pub begin: u64,
    /// Offset after its last byte in the file.
    pub end: u64,
}

impl TensorInfo<'_> {
    /// Its size in bytes.
    pub fn byte_len(&self) -> u64 {
        self.end - self.begin
    }
}

/// The opened shards of a checkpoint (`docs/checkpoint.md` 5).
///
/// Every header is checked, index and headers are compared both ways, and each file has the length that its
/// header declares. All files stay open, so that a checkpoint that is moved or deleted meanwhile stays readable.
/// Half a million tensors take about 70 MB.
pub struct Shards {
    dir: PathBuf,
    files: Vec<ShardFile>,
    names: String,
    dims: Vec<u64>,
    entries: Vec<Entry>,
    by_name: HashTable<u32>,
    hasher: hashbrown::DefaultHashBuilder,
    /// The most bytes of one system call; tests set it to a few.
    pub(crate) read_cap: usize,
}

impl Shards {
    /// Opens the checkpoint in `dir`: the shards that `model.safetensors.index.json` names or, without that file,
    /// the single `model.safetensors`.
    ///
    /// # Errors
    ///
    /// Absent shards come first, all in one error. Then each shard is checked; if several are unusable, all are
    /// reported. Then the index is compared with the headers.
    pub fn open(dir: &Path) -> Result<Self, ShardError> {
        check_directory(dir)?;
        let index = find_index(dir)?;
        let names = match &index {
            None => vec![SINGLE_FILE.to_owned()],
            Some(index) => {
                let counts = index.shards()?;
                check_presence(dir, &counts)?;
                counts.into_iter().map(|(name, _)| name).collect()
            }
        };
        let shards = Self::open_files(dir, &names)?;
        if let Some(index) = index {
            shards.compare(&index)?;
        }
        Ok(shards)
    }

    /// Opens these files of `dir`, whatever an index says.
    pub(crate) fn open_files(dir: &Path, names: &[String]) -> Result<Self, ShardError> {
        let mut shards = Self {
            dir: dir.to_owned(),
            files: Vec::with_capacity(names.len()),
            names: String::new(),
            dims: Vec::new(),
            entries: Vec::new(),
            by_name: HashTable::new(),
            hasher: hashbrown::DefaultHashBuilder::default(),
            read_cap: MAX_READ_BYTES,
        };
        let opened = open_all(dir, names)?;
        // Grown by doubling, the arenas would set the peak of an open.
        let total = |of: fn(&Header) -> usize| opened.iter().map(|(_, header)| of(header)).sum();
        shards.names.reserve_exact(total(|header| header.names.len()));
        shards.dims.reserve_exact(total(|header| header.dims.len()));
        shards.entries.reserve_exact(total(|header| header.entries.len()));
        for (file, header) in opened {
            shards.add(file, &header)?;
        }
        Ok(shards)
    }

    /// The directory, as it was given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The shards, sorted by name.
    pub fn files(&self) -> &[ShardFile] {
        &self.files
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.position(name).map(|i| self.info(&self.entries[i]))
    }

    /// All tensors: shard by shard, in each by offset.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> + Clone {
        self.entries.iter().map(|entry| self.info(entry))
    }

    /// Reads a tensor into new memory, aligned to 64 bytes.
    ///
    /// # Errors
    ///
    /// [`ShardError::ShortRead`] if the file was cut since it was opened, [`ShardError::NoMemory`] if the tensor does
    /// not fit into memory, [`ShardError::Io`] if the system fails.
    pub fn read(&self, tensor: &TensorInfo<'_>) -> Result<Bytes, ShardError> {
        let file = self.checked(tensor.shard, tensor.begin, tensor.end)?;
        let len = tensor.byte_len() as usize;
        read_aligned(&file.file, self.read_cap, tensor.begin, len)
            .map_err(|e| read_error(&file.path, &format!("tensor `{}`", tensor.name), tensor.begin, len, e))
    }

    /// Fills `buf` from offset `begin` of a file on, whatever tensors lie there.
    ///
    /// # Errors
    ///
    /// As [`Shards::read`], and [`ShardError::OutOfRange`] beyond the end of the file.
    pub fn read_range(&self, shard: usize, begin: u64, buf: &mut [u8]) -> Result<(), ShardError> {
        let file = self.checked(shard, begin, begin.saturating_add(buf.len() as u64))?;
        read_full(&file.file, self.read_cap, begin, buf)
            .map_err(|e| read_error(&file.path, "a range", begin, buf.len(), e))
    }

    /// A tensor as part of its mapped shard. It begins at any address: published shards are not even aligned to
    /// their elements.
    ///
    /// A shard is mapped once, at first use, and stays so while it or a result of this is in use. The caller promises
    /// that meanwhile no process truncates the file or writes to it in place (replacing it by rename is fine):
    /// touching a page that is gone ends the process, and bytes that change under a reader are undefined behaviour.
    /// [`Shards::read`] gives an error instead, and needs no promise.
    ///
    /// # Errors
    ///
    /// [`ShardError::Changed`] if the file has another length than when it was opened, [`ShardError::Io`].
    pub fn map(&self, tensor: &TensorInfo<'_>) -> Result<Bytes, ShardError> {
        self.map_range(tensor.shard, tensor.begin, tensor.end)
    }

    /// Bytes `begin..end` of a file, as [`Shards::map`].
    ///
    /// # Errors
    ///
    /// As [`Shards::map`], and [`ShardError::OutOfRange`] beyond the end of the file.
    pub fn map_range(&self, shard: usize, begin: u64, end: u64) -> Result<Bytes, ShardError> {
        let file = self.checked(shard, begin, end)?;
        let now = file.file.metadata().map_err(ShardError::io("map", &file.path))?.len();
        if now != file.len {
            return Err(ShardError::Changed { path: file.path.clone(), opened: file.len, now });
        }
        let mapping = if let Some(mapping) = file.mapping.get() {
            mapping
        } else {
            let mapping = map(&file.file, file.len as usize).map_err(ShardError::io("map", &file.path))?;
            // Two threads may map at the same time; one mapping stays.
            file.mapping.get_or_init(|| mapping)
        };
        Ok(mapping.slice(begin as usize..end as usize))
    }

    /// Tells the kernel that bytes `begin..end` of a file will be read soon, so that it starts now. A hint: it
    /// reads nothing itself, and where it is not understood nothing happens.
    pub fn will_need(&self, shard: usize, begin: u64, end: u64) {
        #[cfg(target_os = "linux")]
        if let (Ok(file), Some(len)) =
            (self.checked(shard, begin, end), NonZeroU64::new(end.saturating_sub(begin)))
        {
            let _ = rustix::fs::fadvise(&file.file, begin, Some(len), rustix::fs::Advice::WillNeed);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (shard, begin, end);
    }

    /// Tells the kernel that what it has of these bytes in its page cache is not needed. A hint, as
    /// [`Shards::will_need`]; pages that another process has mapped or that are only partly in the range stay.
    pub fn forget(&self, shard: usize, begin: u64, len: u64) {
        #[cfg(target_os = "linux")]
        if let (Some(file), Some(len)) = (self.files.get(shard), NonZeroU64::new(len)) {
            let _ = rustix::fs::fadvise(&file.file, begin, Some(len), rustix::fs::Advice::DontNeed);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (shard, begin, len);
    }

    fn checked(&self, shard: usize, begin: u64, end: u64) -> Result<&ShardFile, ShardError> {
        let shards = self.files.len();
        let file = self.files.get(shard).ok_or(ShardError::NoSuchShard { shard, shards })?;
        if begin > end || end > file.len {
            return Err(ShardError::OutOfRange { path: file.path.clone(), begin, end, len: file.len });
        }
        Ok(file)
    }

    fn info(&self, entry: &Entry) -> TensorInfo<'_> {
        TensorInfo {
            name: self.name(entry),
            dtype: entry.dtype,
            shape: entry.shape(&self.dims),
            shard: entry.shard as usize,
            begin: entry.begin,
            end: entry.end,
        }
    }

    fn name(&self, entry: &Entry) -> &str {
        entry.name(&self.names)
    }

    fn position(&self, name: &str) -> Option<usize> {
        let is = |&i: &u32| self.name(&self.entries[i as usize]) == name;
        self.by_name.find(self.hasher.hash_one(name), is).map(|&i| i as usize)
    }

    /// Takes over the tensors of the next shard.
    fn add(&mut self, mut file: ShardFile, header: &Header) -> Result<(), ShardError> {
        let too_large = |what: &str| ShardError::TooLarge { dir: self.dir.clone(), what: what.to_owned() };
        let fits = |have: usize, more: usize| u32::try_from(have + more).is_ok();
        if !fits(self.names.len(), header.names.len()) {
            return Err(too_large("its tensor names have more than 2^32 bytes"));
        }
        if !fits(self.dims.len(), header.dims.len()) || !fits(self.entries.len(), header.entries.len()) {
            return Err(too_large("more than 2^32 tensors or dimensions"));
        }
        let (first, names_at, dims_at) = (self.entries.len(), self.names.len(), self.dims.len());
        self.names.push_str(&header.names);
        self.dims.extend_from_slice(&header.dims);
        self.entries.extend(header.entries.iter().map(|entry| Entry {
            // No overflow: the end of the data section was found to be the length of the file.
            begin: file.data_start + entry.begin,
            end: file.data_start + entry.end,
            name_at: names_at as u32 + entry.name_at,
            dims_at: dims_at as u32 + entry.dims_at,
            shard: self.files.len() as u16,
            ..*entry
        }));
        file.tensors = first..self.entries.len();
        for i in first..self.entries.len() {
            let (names, entries, hasher) = (&self.names, &self.entries, &self.hasher);
            let name_of = |i: u32| entries[i as usize].name(names);
            let name = name_of(i as u32);
            let slot = self.by_name.entry(
                hasher.hash_one(name),
                |&other| name_of(other) == name,
                |&other| hasher.hash_one(name_of(other)),
            );
            match slot {
                Slot::Vacant(slot) => {
                    slot.insert(i as u32);
                }
                Slot::Occupied(slot) => {
                    let first = self.entries[*slot.get() as usize].shard as usize;
                    return Err(ShardError::DuplicateTensor {
                        tensor: name.to_owned(),
                        first: self.files[first].path.clone(),
                        second: file.path,
                    });
                }
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// Compares the index with the headers, both ways.
    fn compare(&self, index: &Index) -> Result<(), ShardError> {
        let mut named = vec![false; self.entries.len()];
        let mut misplaced = 0;
        let mut first_misplaced = None;
        index.walk(|name, shard| {
            let position = self.position(name);
            let found_in = position.map(|i| &self.files[self.entries[i].shard as usize].name);
            if found_in.is_none_or(|found| found != shard) {
                misplaced += 1;
                first_misplaced.get_or_insert_with(|| (name.to_owned(), shard.to_owned(), found_in.cloned()));
            }
            match position.map(|i| std::mem::replace(&mut named[i], true)) {
                Some(true) => Err(format!("it has the tensor `{name}` twice")),
                _ => Ok(()),
            }
        })?;
        let path = || index.path.clone();
        if let Some((tensor, shard, found_in)) = first_misplaced {
            return Err(ShardError::NotInShard { path: path(), count: misplaced, tensor, shard, found_in });
        }
        if let Some(i) = named.iter().position(|named| !named) {
            let entry = &self.entries[i];
            return Err(ShardError::NotInIndex {
                path: path(),
                count: named.iter().filter(|named| !**named).count(),
                tensor: self.name(entry).to_owned(),
                shard: self.files[entry.shard as usize].name.clone(),
            });
        }
        Ok(())
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shards")
            .field("dir", &self.dir)
            .field("files", &self.files.len())
            .field("tensors", &self.entries.len())
            .finish_non_exhaustive()
    }
}

/// Opens all shards, a few at a time; the result is in the order of `names`.
fn open_all(dir: &Path, names: &[String]) -> Result<Vec<(ShardFile, Header)>, ShardError> {
    let next = AtomicUsize::new(0);
    let opened = Mutex::new(Vec::with_capacity(names.len()));
    std::thread::scope(|scope| {
        for _ in 0..HEADER_READERS.min(names.len()) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(name) = names.get(i) else { return };
                    let shard = shard_file::open(dir, name);
                    opened.lock().expect("no thread panics while it holds the lock").push((i, shard));
                }
            });
        }
    });
    let mut opened = opened.into_inner().expect("no thread panics while it holds the lock");
    opened.sort_unstable_by_key(|(i, _)| *i);
    let mut errors = Vec::new();
    let mut shards = Vec::with_capacity(names.len());
    for (_, shard) in opened {
        match shard {
            Ok(shard) => shards.push(shard),
            Err(e) => errors.push(e),
        }
    }
    match errors.len() {
        0 => Ok(shards),
        1 => Err(errors.remove(0)),
        _ => Err(ShardError::Several(errors)),
    }
}

#[cfg(test)]
mod tests;
