//! Walks over the JSON of a header and fills the table; the checks of numbers are the table's own.

use std::fmt;

use safetensors::Dtype;
use serde::Deserialize as _;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor,
    value,
};

use super::{Entry, Header, HeaderError, MAX_RANK};
use crate::printable::is_printable;

const METADATA: &str = "__metadata__";

/// The tensors of a header in the order of the text, none of their numbers checked.
pub(super) fn parse(text: &str) -> Result<Header, HeaderError> {
    let mut parser = Parser::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = json.deserialize_map(&mut parser).and_then(|()| json.end());
    if let Some(problem) = parser.problem {
        return Err(problem);
    }
    match outcome {
        Ok(()) => Ok(parser.header),
        Err(e) => {
            let tensor = (parser.last_len != 0).then(|| parser.tensor());
            Err(HeaderError::Json { message: e.to_string(), tensor })
        }
    }
}

/// Collects a header while serde walks over it. A rule that serde does not know is kept in `problem`, because
/// serde's own errors are text only.
#[derive(Default)]
struct Parser {
    header: Header,
    /// Length of the name read last, which is the end of `names`.
    last_len: usize,
    metadata_seen: bool,
    problem: Option<HeaderError>,
}

impl Parser {
    fn fail<E: serde::de::Error>(&mut self, problem: HeaderError) -> E {
        let error = E::custom(&problem);
        self.problem = Some(problem);
        error
    }

    fn tensor(&self) -> String {
        let names = &self.header.names;
        names[names.len() - self.last_len..].to_owned()
    }
}

impl<'de> Visitor<'de> for &mut Parser {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a safetensors header, an object of tensors by name")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(key) = map.next_key_seed(Key(&mut *self))? {
            match key {
                KeyKind::Metadata => map.next_value_seed(StringMap)?,
                KeyKind::Tensor { name_at, name_len } => {
                    let mut entry = map.next_value_seed(TensorValue(&mut *self))?;
                    (entry.name_at, entry.name_len) = (name_at, name_len);
                    self.header.entries.push(entry);
                }
            }
        }
        Ok(())
    }
}

enum KeyKind {
    Metadata,
    Tensor { name_at: u32, name_len: u16 },
}

struct Key<'p>(&'p mut Parser);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = KeyKind;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<KeyKind, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = KeyKind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor name")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<KeyKind, E> {
        if name == METADATA {
            if std::mem::replace(&mut self.0.metadata_seen, true) {
                return Err(self.0.fail(HeaderError::DuplicateKey { name: name.to_owned() }));
            }
            return Ok(KeyKind::Metadata);
        }
        if !is_printable(name) {
            return Err(self.0.fail(HeaderError::ControlInName { name: name.to_owned() }));
        }
        let names = &mut self.0.header.names;
        let (Ok(name_len), Ok(name_at)) = (u16::try_from(name.len()), u32::try_from(names.len())) else {
            return Err(self.0.fail(HeaderError::LongName { len: name.len() }));
        };
        names.push_str(name);
        self.0.last_len = name.len();
        Ok(KeyKind::Tensor { name_at, name_len })
    }
}

/// `__metadata__`: must map strings to strings, and is not kept.
struct StringMap;

impl<'de> DeserializeSeed<'de> for StringMap {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringMap {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`__metadata__` to map strings to strings")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while map.next_entry::<String, String>()?.is_some() {}
        Ok(())
    }
}

struct TensorValue<'p>(&'p mut Parser);

impl<'de> DeserializeSeed<'de> for TensorValue<'_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Entry, D::Error> {
        d.deserialize_map(self)
    }
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for TensorValue<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor with dtype, shape and data_offsets")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Entry, M::Error> {
        let (mut dtype, mut dims, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<Field>()? {
            match field {
                Field::Dtype => once(&mut dtype, "dtype", map.next_value_seed(DtypeValue(&mut *self.0))?)?,
                Field::Shape => once(&mut dims, "shape", map.next_value_seed(Shape(&mut *self.0))?)?,
                Field::DataOffsets => once(&mut offsets, "data_offsets", map.next_value::<(u64, u64)>()?)?,
                Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let missing = M::Error::missing_field;
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let (dims_at, rank) = dims.ok_or_else(|| missing("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(Entry { begin, end, name_at: 0, dims_at, name_len: 0, shard: 0, rank, dtype })
    }
}

fn once<T, E: serde::de::Error>(field: &mut Option<T>, name: &'static str, value: T) -> Result<(), E> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(name)),
    }
}

struct DtypeValue<'p>(&'p mut Parser);

impl<'de> DeserializeSeed<'de> for DtypeValue<'_> {
    type Value = Dtype;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Dtype, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for DtypeValue<'_> {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a dtype as a string")
    }

    fn visit_str<E: serde::de::Error>(self, dtype: &str) -> Result<Dtype, E> {
        let known: value::StrDeserializer<'_, value::Error> = dtype.into_deserializer();
        Dtype::deserialize(known).map_err(|_| {
            let tensor = self.0.tensor();
            self.0.fail(HeaderError::UnknownDtype { tensor, dtype: dtype.to_owned() })
        })
    }
}

struct Shape<'p>(&'p mut Parser);

impl<'de> DeserializeSeed<'de> for Shape<'_> {
    type Value = (u32, u8);

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(u32, u8), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Shape<'_> {
    type Value = (u32, u8);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a shape, a list of non-negative integers")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<(u32, u8), S::Error> {
        // A header of MAX_HEADER_BYTES has fewer than 2^32 numbers.
        let at = self.0.header.dims.len();
        while let Some(dim) = seq.next_element::<u64>()? {
            if self.0.header.dims.len() - at == MAX_RANK {
                let tensor = self.0.tensor();
                return Err(self.0.fail(HeaderError::Rank { tensor }));
            }
            self.0.header.dims.push(dim);
        }
        Ok((at as u32, (self.0.header.dims.len() - at) as u8))
    }
}
