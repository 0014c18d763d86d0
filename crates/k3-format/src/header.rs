//! One safetensors header: parsed into a lean table and checked completely (`docs/checkpoint.md` 5).
//!
//! The table keeps all names in one string and each tensor in a few words, because a checkpoint has half a
//! million of them; a map of owned strings costs ten times the memory.

mod parser;

use std::cmp::Ordering;

use hashbrown::hash_table::{Entry as Slot, HashTable};
use safetensors::Dtype;
use thiserror::Error;

/// The longest header that is read, in bytes; the limit of the safetensors format.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The longest tensor name, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = u16::MAX as usize;

/// The most dimensions a tensor may have.
pub(crate) const MAX_RANK: usize = 8;

/// What is wrong with a safetensors header, without the file it stands in.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The header is not UTF-8.
    #[error("the header is not UTF-8 after byte {valid_up_to}")]
    NotUtf8 {
        /// Bytes of the header that are.
        valid_up_to: usize,
    },
    /// The first byte of the header is not `{`.
    #[error("the header must begin with `{{`, it begins with {found}")]
    NoBrace {
        /// The first byte, or "nothing".
        found: String,
    },
    /// Not JSON, or not the JSON of a header.
    #[error("the header is not valid: {message}{}", after(.tensor.as_deref()))]
    Json {
        /// What the parser says, with the position.
        message: String,
        /// The last tensor whose name was read.
        tensor: Option<String>,
    },
    /// A key that must be unique occurs twice.
    #[error("the header has `{name}` twice")]
    DuplicateKey {
        /// The tensor, or `__metadata__`.
        name: String,
    },
    /// A tensor name is too long.
    #[error("a tensor name of {len} bytes; at most {MAX_NAME_BYTES} are accepted")]
    LongName {
        /// Its length in bytes.
        len: usize,
    },
    /// A tensor name has a character that acts on a terminal instead of showing.
    #[error(
        "the tensor name {name:?} has a control character; no model has such names: get the file again from the \
         model's publisher"
    )]
    ControlInName {
        /// The name.
        name: String,
    },
    /// A dtype that the safetensors format does not have.
    #[error("tensor `{tensor}` has the unknown dtype {dtype:?}")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// As it is written.
        dtype: String,
    },
    /// A tensor has too many dimensions.
    #[error("tensor `{tensor}` has more than {MAX_RANK} dimensions")]
    Rank {
        /// The tensor.
        tensor: String,
    },
    /// Shape and dtype give a size that does not fit 64 bits.
    #[error("tensor `{tensor}`: the size of {dtype} {shape:?} overflows")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor of a sub-byte dtype does not end on a byte.
    #[error("tensor `{tensor}`: {dtype} {shape:?} is not a whole number of bytes")]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The offsets span another number of bytes than shape and dtype need, or run backwards.
    #[error(
        "tensor `{tensor}`: {dtype} {shape:?} needs {expected} bytes, but its data_offsets are [{begin}, {end}]"
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that dtype and shape need.
        expected: u64,
        /// First offset.
        begin: u64,
        /// End offset.
        end: u64,
    },
    /// No tensor covers some bytes of the data section.
    #[error("no tensor covers bytes {begin}..{end} of the data section, before tensor `{tensor}`")]
    Hole {
        /// The tensor behind the hole.
        tensor: String,
        /// First byte of the hole, relative to the data section.
        begin: u64,
        /// End of the hole.
        end: u64,
    },
    /// Two tensors cover the same bytes.
    #[error("tensors `{first}` and `{second}` overlap at byte {at} of the data section")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// First shared byte, relative to the data section.
        at: u64,
    },
}

fn after(tensor: Option<&str>) -> String {
    tensor.map(|name| format!(" (at tensor `{name}`)")).unwrap_or_default()
}

/// One tensor of a [`Header`] or of a whole checkpoint: its name and shape stand in arenas beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) name_at: u32,
    pub(crate) dims_at: u32,
    pub(crate) name_len: u16,
    pub(crate) shard: u16,
    pub(crate) rank: u8,
    pub(crate) dtype: Dtype,
}

const _: () = assert!(size_of::<Entry>() <= 32);

impl Entry {
    pub(crate) fn name<'a>(&self, names: &'a str) -> &'a str {
        &names[self.name_at as usize..][..self.name_len as usize]
    }

    pub(crate) fn shape<'a>(&self, dims: &'a [u64]) -> &'a [u64] {
        &dims[self.dims_at as usize..][..self.rank as usize]
    }
}

/// All tensors of one header, in disk order.
#[derive(Debug, Default)]
pub(crate) struct Header {
    pub(crate) names: String,
    pub(crate) dims: Vec<u64>,
    /// Offsets are relative to the data section; `shard` is 0.
    pub(crate) entries: Vec<Entry>,
    /// Bytes of the data section.
    pub(crate) data_len: u64,
}

impl Header {
    /// Parses the JSON of a header (everything between the length and the data section) and checks all that can
    /// be checked without the file: sizes, tiling, repeated names.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, HeaderError> {
        let text =
            std::str::from_utf8(json).map_err(|e| HeaderError::NotUtf8 { valid_up_to: e.valid_up_to() })?;
        if !text.starts_with('{') {
            let found = text.chars().next().map_or_else(|| "nothing".to_owned(), |c| format!("{c:?}"));
            return Err(HeaderError::NoBrace { found });
        }
        let mut header = parser::parse(text)?;
        header.check()?;
        // All headers of a checkpoint are in memory at one time.
        header.names.shrink_to_fit();
        header.dims.shrink_to_fit();
        header.entries.shrink_to_fit();
        Ok(header)
    }

    pub(crate) fn name(&self, entry: &Entry) -> &str {
        entry.name(&self.names)
    }

    pub(crate) fn shape(&self, entry: &Entry) -> &[u64] {
        entry.shape(&self.dims)
    }

    fn check(&mut self) -> Result<(), HeaderError> {
        self.entries.sort_by_key(|e| (e.begin, e.end));
        let mut at = 0;
        for (i, entry) in self.entries.iter().enumerate() {
            self.check_size(entry)?;
            let tensor = || self.name(entry).to_owned();
            match entry.begin.cmp(&at) {
                Ordering::Greater => {
                    return Err(HeaderError::Hole { tensor: tensor(), begin: at, end: entry.begin });
                }
                Ordering::Less => {
                    // `at` is above 0, so a tensor came before; the one that ends there is the one before.
                    let first = self.name(&self.entries[i - 1]).to_owned();
                    return Err(HeaderError::Overlap { first, second: tensor(), at: entry.begin });
                }
                Ordering::Equal => at = entry.end,
            }
        }
        self.data_len = at;
        self.check_names()
    }

    fn check_size(&self, entry: &Entry) -> Result<(), HeaderError> {
        let (dtype, shape) = (entry.dtype, self.shape(entry));
        let tensor = || self.name(entry).to_owned();
        match tensor_bytes(dtype, shape) {
            None => Err(HeaderError::Overflow { tensor: tensor(), dtype, shape: shape.to_vec() }),
            Some(Err(PartialByte)) => {
                Err(HeaderError::PartialByte { tensor: tensor(), dtype, shape: shape.to_vec() })
            }
            Some(Ok(expected)) if entry.end.checked_sub(entry.begin) != Some(expected) => {
                Err(HeaderError::SizeMismatch {
                    tensor: tensor(),
                    dtype,
                    shape: shape.to_vec(),
                    expected,
                    begin: entry.begin,
                    end: entry.end,
                })
            }
            Some(Ok(_)) => Ok(()),
        }
    }

    fn check_names(&self) -> Result<(), HeaderError> {
        let hasher = hashbrown::DefaultHashBuilder::default();
        let hash = |name: &str| std::hash::BuildHasher::hash_one(&hasher, name);
        let mut seen = HashTable::<u32>::with_capacity(self.entries.len());
        for (i, entry) in self.entries.iter().enumerate() {
            let name = self.name(entry);
            let name_of = |&i: &u32| self.name(&self.entries[i as usize]);
            match seen.entry(hash(name), |other| name_of(other) == name, |other| hash(name_of(other))) {
                Slot::Occupied(_) => return Err(HeaderError::DuplicateKey { name: name.to_owned() }),
                Slot::Vacant(slot) => slot.insert(i as u32),
            };
        }
        Ok(())
    }
}

/// A sub-byte tensor that ends inside a byte.
#[derive(Debug)]
pub(crate) struct PartialByte;

/// Bytes of a tensor; `None` if the size overflows.
pub(crate) fn tensor_bytes(dtype: Dtype, shape: &[u64]) -> Option<Result<u64, PartialByte>> {
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    Some(if bits % 8 == 0 { Ok(bits / 8) } else { Err(PartialByte) })
}

#[cfg(test)]
mod tests;
