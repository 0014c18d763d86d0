//! `model.safetensors.index.json`, which says what shard holds which tensor.
//!
//! It is 60 MB of text for this model, so it is walked twice and never turned into a map: the first walk collects
//! the shards, the second compares each entry with the shards' own headers. In between, when the headers are parsed,
//! the text is not kept; the second reading comes from the page cache.

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::{Component, Path, PathBuf};

use hashbrown::HashMap;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::content::Content;
use crate::printable::is_printable;
use crate::shard_error::ShardError;
use crate::shard_file::open_regular;

/// Name of the index file.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The longest index that is read: 16 times that of the model.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The most shards: their number takes 16 bits in memory.
const MAX_SHARDS: usize = u16::MAX as usize;

/// An opened index.
pub(crate) struct Index {
    pub(crate) path: PathBuf,
    file: File,
    len: u64,
}

impl Index {
    pub(crate) fn open(path: PathBuf) -> Result<Self, ShardError> {
        let (file, len) = open_regular(&path)?;
        let index = Self { path, file, len };
        if len > MAX_INDEX_BYTES {
            return Err(index.invalid(&format!("it has {len} bytes, at most {MAX_INDEX_BYTES} are read")));
        }
        Ok(index)
    }

    fn text(&self) -> Result<String, ShardError> {
        let mut file = &self.file;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(self.len as usize)
            .map_err(|e| ShardError::no_memory(&self.path, "the index", self.len, e.into()))?;
        file.rewind()
            .and_then(|()| file.take(MAX_INDEX_BYTES).read_to_end(&mut bytes))
            .map_err(ShardError::io("read", &self.path))?;
        if bytes.trim_ascii_start().first() != Some(&b'{') {
            let (path, content) = (self.path.clone(), Content::recognise(&bytes));
            return Err(ShardError::WrongContent { path, expected: "the index of a checkpoint", content });
        }
        String::from_utf8(bytes).map_err(|e| {
            self.invalid(&format!("it is not UTF-8 after byte {}", e.utf8_error().valid_up_to()))
        })
    }

    /// The distinct shards, sorted by name, each with the number of its tensors.
    pub(crate) fn shards(&self) -> Result<Vec<(String, usize)>, ShardError> {
        let mut counts = HashMap::<String, usize>::new();
        let mut bad = None;
        self.walk(|name, shard| {
            if !is_printable(name) {
                Err(format!("the tensor name {name:?} has a control character; download the index again"))
            } else if let Some(count) = counts.get_mut(shard) {
                *count += 1;
                Ok(())
            } else if !is_plain_file_name(shard) {
                bad = Some(shard.to_owned());
                Err("a shard must be a plain file name".to_owned())
            } else if counts.len() == MAX_SHARDS {
                Err(format!("more than {MAX_SHARDS} shards"))
            } else {
                counts.insert(shard.to_owned(), 1);
                Ok(())
            }
        })
        .map_err(|e| match bad {
            Some(shard) => ShardError::ShardName { path: self.path.clone(), shard },
            None => e,
        })?;
        if counts.is_empty() {
            return Err(self.invalid("its weight_map names no tensor"));
        }
        let mut shards: Vec<_> = counts.into_iter().collect();
        shards.sort_unstable();
        Ok(shards)
    }

    /// Calls `entry` with the name and the shard of each tensor, in the order of the file, until it fails.
    pub(crate) fn walk(&self, entry: impl FnMut(&str, &str) -> Result<(), String>) -> Result<(), ShardError> {
        let text = self.text()?;
        let mut json = serde_json::Deserializer::from_str(&text);
        let top = Top { entry };
        json.deserialize_map(top).and_then(|()| json.end()).map_err(|e| self.invalid(&e.to_string()))
    }

    fn invalid(&self, message: &str) -> ShardError {
        ShardError::Index { path: self.path.clone(), message: message.to_owned() }
    }
}

/// Whether `name` stays in the directory that it is joined to.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains('\\')
        && is_printable(name)
}

struct Top<F> {
    entry: F,
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> Visitor<'de> for Top<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the key `weight_map`")
    }

    fn visit_map<M: MapAccess<'de>>(mut self, mut map: M) -> Result<(), M::Error> {
        let mut seen = false;
        while let Some(key) = map.next_key::<TopKey>()? {
            match key {
                TopKey::WeightMap if seen => return Err(M::Error::duplicate_field("weight_map")),
                TopKey::WeightMap => {
                    seen = true;
                    map.next_value_seed(WeightMap { entry: &mut self.entry })?;
                }
                TopKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if seen { Ok(()) } else { Err(M::Error::missing_field("weight_map")) }
    }
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum TopKey {
    WeightMap,
    #[serde(other)]
    Other,
}

struct WeightMap<'f, F> {
    entry: &'f mut F,
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> DeserializeSeed<'de> for WeightMap<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), String>> Visitor<'de> for WeightMap<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`weight_map` to map tensor names to shard file names")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        let mut name = String::new();
        while map
            .next_key_seed(Text(|key: &str| {
                name.clear();
                name.push_str(key);
                Ok(())
            }))?
            .is_some()
        {
            map.next_value_seed(Text(|shard: &str| (self.entry)(&name, shard)))?;
        }
        Ok(())
    }
}

/// Lends a string of the file to a function, whether it had escapes or not.
struct Text<F>(F);

impl<'de, F: FnOnce(&str) -> Result<(), String>> DeserializeSeed<'de> for Text<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_str(self)
    }
}

impl<F: FnOnce(&str) -> Result<(), String>> Visitor<'_> for Text<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        (self.0)(text).map_err(E::custom)
    }
}
