//! Writes shards that are larger than memory, and their index.
//!
//! All tensors of a shard are declared first, since the header precedes the data; then the bytes are streamed in
//! the declared order. Unlike the writer of the safetensors crate this one keeps that order and aligns the data
//! section as direct reads need it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use safetensors::Dtype;

use crate::header::{Header, HeaderError, MAX_HEADER_BYTES, PartialByte, tensor_bytes};
use crate::index::{INDEX_FILE, is_plain_file_name};
use crate::new_file::NewFile;
use crate::shard_error::ShardError;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Dimensions, row-major.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// Its size in bytes.
    ///
    /// # Errors
    ///
    /// [`HeaderError::Overflow`] and [`HeaderError::PartialByte`].
    pub fn byte_len(&self) -> Result<u64, HeaderError> {
        let (tensor, dtype, shape) = (self.name.clone(), self.dtype, self.shape.clone());
        match tensor_bytes(dtype, &self.shape) {
            Some(Ok(len)) => Ok(len),
            Some(Err(PartialByte)) => Err(HeaderError::PartialByte { tensor, dtype, shape }),
            None => Err(HeaderError::Overflow { tensor, dtype, shape }),
        }
    }
}

/// Writes one shard from front to back.
///
/// The shard is built as `<name>.partial` and gets its name in [`ShardWriter::finish`]; a writer that is dropped
/// before leaves the partial file only. Nothing is ever written through a symbolic link.
#[derive(Debug)]
pub struct ShardWriter {
    file: NewFile,
    /// Name and bytes of each tensor, in order.
    tensors: Vec<(String, u64)>,
    /// The tensor that is being written.
    current: usize,
    /// Its bytes so far.
    written: u64,
    len: u64,
    hasher: Option<blake3::Hasher>,
}

/// What became of a shard that was written with [`ShardWriter::create_hashed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// Bytes of the file.
    pub(crate) len: u64,
    /// BLAKE3 of the file.
    pub(crate) hash: [u8; 32],
}

impl ShardWriter {
    /// Starts a shard that will hold `tensors` in this order, its data section at a multiple of `align` bytes
    /// (1: as it comes). `metadata` becomes `__metadata__`.
    ///
    /// # Errors
    ///
    /// [`ShardError::Declared`] if the declared tensors make no valid header (the rules of reading apply),
    /// [`ShardError::OutputIsLink`], [`ShardError::Io`].
    pub fn create(
        path: &Path,
        align: u64,
        tensors: &[TensorSpec],
        metadata: Option<&BTreeMap<String, String>>,
    ) -> Result<Self, ShardError> {
        Self::create_with(path, align, tensors, metadata, None)
    }

    /// The same, for [`ShardWriter::finish_hashed`]: a hash of the file is computed on the way, and room for the file
    /// is reserved at once. With `direct`, bytes go past the page cache.
    ///
    /// # Errors
    ///
    /// As [`ShardWriter::create`].
    pub(crate) fn create_hashed(
        path: &Path,
        align: u64,
        tensors: &[TensorSpec],
        metadata: Option<&BTreeMap<String, String>>,
        direct: bool,
    ) -> Result<Self, ShardError> {
        Self::create_with(path, align, tensors, metadata, Some(direct))
    }

    fn create_with(
        path: &Path,
        align: u64,
        tensors: &[TensorSpec],
        metadata: Option<&BTreeMap<String, String>>,
        hashed: Option<bool>,
    ) -> Result<Self, ShardError> {
        let PlannedHeader { bytes, sizes, len } = planned_header(path, align, tensors, metadata)?;
        let file = NewFile::create_with(path, hashed == Some(true))?;
        if hashed.is_some() {
            file.reserve(len)?;
        }
        let hasher = hashed.map(|_| blake3::Hasher::new());
        let mut writer = Self { file, tensors: sizes, current: 0, written: 0, len, hasher };
        writer.put(&bytes)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        self.file.write(bytes)
    }

    /// Writes the next tensor whole.
    ///
    /// # Errors
    ///
    /// [`ShardError::WriteLength`] if `bytes` is not exactly the next tensor, or the one before is unfinished;
    /// [`ShardError::WriteBeyondEnd`] if there is no next tensor; [`ShardError::Io`].
    pub fn write_tensor(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        self.check_room(bytes)?;
        if self.written + bytes.len() as u64 != self.tensors[self.current].1 || self.written != 0 {
            return Err(self.wrong_length(bytes.len() as u64));
        }
        self.put(bytes)?;
        self.current += 1;
        Ok(())
    }

    /// Writes the next bytes of the current tensor; when it is whole, the next one begins. Tensors without
    /// bytes are passed over.
    ///
    /// # Errors
    ///
    /// [`ShardError::WriteLength`] if `bytes` reach beyond the end of the current tensor,
    /// [`ShardError::WriteBeyondEnd`] if all tensors are whole, [`ShardError::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.skip_empty();
        self.check_room(bytes)?;
        let (more, size) = (bytes.len() as u64, self.tensors[self.current].1);
        if more > size - self.written {
            return Err(self.wrong_length(more));
        }
        self.put(bytes)?;
        self.advance(more);
        Ok(())
    }

    /// Writes the next bytes, of however many tensors.
    ///
    /// # Errors
    ///
    /// [`ShardError::WriteBeyondEnd`] if `bytes` reach beyond the end of the last tensor, [`ShardError::Io`].
    pub(crate) fn write_run(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        let mut rest = bytes.len() as u64;
        while rest > 0 {
            self.skip_empty();
            self.check_room(bytes)?;
            let more = rest.min(self.tensors[self.current].1 - self.written);
            self.advance(more);
            rest -= more;
        }
        self.put(bytes)
    }

    fn advance(&mut self, more: u64) {
        let size = self.tensors[self.current].1;
        self.written += more;
        if self.written == size {
            self.current += 1;
            self.written = 0;
        }
    }

    /// Completes the shard: all bytes are brought to the disk, then it gets its final name. Returns its length
    /// in bytes.
    ///
    /// # Errors
    ///
    /// [`ShardError::WriteLength`] if a tensor is not whole, [`ShardError::Io`].
    pub fn finish(self) -> Result<u64, ShardError> {
        Ok(self.finish_hashed()?.len)
    }

    /// The same, with the hash of the file; zeros if it was not made with [`ShardWriter::create_hashed`].
    ///
    /// # Errors
    ///
    /// As [`ShardWriter::finish`].
    pub(crate) fn finish_hashed(mut self) -> Result<Written, ShardError> {
        self.skip_empty();
        if self.current < self.tensors.len() {
            return Err(self.wrong_length(0));
        }
        self.file.commit()?;
        let hash = self.hasher.map_or([0; 32], |hasher| hasher.finalize().into());
        Ok(Written { len: self.len, hash })
    }

    fn skip_empty(&mut self) {
        while self.tensors.get(self.current).is_some_and(|(_, size)| *size == 0) {
            self.current += 1;
        }
    }

    fn check_room(&self, bytes: &[u8]) -> Result<(), ShardError> {
        if self.current < self.tensors.len() {
            return Ok(());
        }
        Err(ShardError::WriteBeyondEnd { path: self.file.path().to_owned(), got: bytes.len() as u64 })
    }

    fn wrong_length(&self, more: u64) -> ShardError {
        let (tensor, declared) = self.tensors[self.current].clone();
        let path = self.file.path().to_owned();
        ShardError::WriteLength { path, tensor, declared, got: self.written.saturating_add(more) }
    }
}

/// The bytes before the data section of a shard.
pub(crate) struct PlannedHeader {
    /// The length and the padded JSON.
    pub(crate) bytes: Vec<u8>,
    /// Name and bytes of each tensor.
    sizes: Vec<(String, u64)>,
    /// Bytes of the whole file.
    len: u64,
}

/// What a shard of these tensors begins with, as [`ShardWriter::create`] writes it.
pub(crate) fn planned_header(
    path: &Path,
    align: u64,
    tensors: &[TensorSpec],
    metadata: Option<&BTreeMap<String, String>>,
) -> Result<PlannedHeader, ShardError> {
    let declared = |problem| ShardError::Declared { path: path.to_owned(), problem };
    let unwritable = |message| ShardError::Unwritable { path: path.to_owned(), message };
    let mut sizes = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        sizes.push((tensor.name.clone(), tensor.byte_len().map_err(declared)?));
    }
    let mut json = header_json(tensors, &sizes, metadata).map_err(declared)?;
    let data_start = (8 + json.len() as u64).checked_next_multiple_of(align).unwrap_or(u64::MAX);
    if data_start - 8 > MAX_HEADER_BYTES {
        return Err(unwritable(format!(
            "its header, padded to a multiple of {align}, would have more than {MAX_HEADER_BYTES} bytes; \
             put fewer tensors into one shard"
        )));
    }
    json.extend(std::iter::repeat_n(' ', data_start as usize - 8 - json.len()));
    // Whatever reading refuses must not be written: repeated names, ranks, lengths.
    let header = Header::parse(json.as_bytes()).map_err(declared)?;
    let Some(len) = data_start.checked_add(header.data_len) else {
        return Err(unwritable("it would have more than 2^64 bytes".to_owned()));
    };
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    Ok(PlannedHeader { bytes, sizes, len })
}

fn header_json(
    tensors: &[TensorSpec],
    sizes: &[(String, u64)],
    metadata: Option<&BTreeMap<String, String>>,
) -> Result<String, HeaderError> {
    let mut json = String::from("{");
    let mut separator = "";
    if let Some(metadata) = metadata {
        let metadata: serde_json::Map<_, _> =
            metadata.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        let _ = write!(json, "\"__metadata__\":{}", serde_json::Value::Object(metadata));
        separator = ",";
    }
    let mut at = 0u64;
    for (TensorSpec { name, dtype, shape }, (_, size)) in tensors.iter().zip(sizes) {
        if name == "__metadata__" {
            return Err(HeaderError::DuplicateKey { name: name.clone() });
        }
        let end = at.checked_add(*size).ok_or_else(|| HeaderError::Overflow {
            tensor: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
        })?;
        let (name, shape) = (quoted(name), serde_json::Value::from(shape.as_slice()));
        let _ = write!(
            json,
            "{separator}{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{at},{end}]}}"
        );
        (at, separator) = (end, ",");
    }
    json.push('}');
    Ok(json)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes `model.safetensors.index.json` into `dir`, by rename: write it last, when all its shards are in place.
///
/// `weight_map` gives each tensor once with the file name of its shard; `total_size` is the number of tensor bytes
/// of all shards, without headers.
///
/// # Errors
///
/// [`ShardError::Unwritable`] for a shard that is not a plain file name, [`ShardError::OutputIsLink`],
/// [`ShardError::Io`].
pub fn write_index<N: AsRef<str>, S: AsRef<str>>(
    dir: &Path,
    weight_map: impl IntoIterator<Item = (N, S)>,
    total_size: u64,
) -> Result<(), ShardError> {
    let path = dir.join(INDEX_FILE);
    let mut file = NewFile::create(&path)?;
    index_text(&path, weight_map, total_size, &mut |piece| file.write(piece))?;
    file.commit()
}

/// Hands the text of the index `path` to `put`, piece by piece.
pub(crate) fn index_text<N: AsRef<str>, S: AsRef<str>>(
    path: &Path,
    weight_map: impl IntoIterator<Item = (N, S)>,
    total_size: u64,
    put: &mut dyn FnMut(&[u8]) -> Result<(), ShardError>,
) -> Result<(), ShardError> {
    put(format!("{{\n  \"metadata\": {{\"total_size\": {total_size}}},\n  \"weight_map\": {{").as_bytes())?;
    let mut separator = "";
    for (name, shard) in weight_map {
        let (name, shard) = (name.as_ref(), shard.as_ref());
        if !is_plain_file_name(shard) {
            let message = format!("the shard `{shard}` of tensor `{name}` is not a plain file name");
            return Err(ShardError::Unwritable { path: path.to_owned(), message });
        }
        put(format!("{separator}\n    {}: {}", quoted(name), quoted(shard)).as_bytes())?;
        separator = ",";
    }
    put(b"\n  }\n}\n")
}
