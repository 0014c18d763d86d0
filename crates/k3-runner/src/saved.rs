//! Sequences in files: a safetensors file that any tool can look into, sealed by a checksum over every byte.
//!
//! Tensors `token_ids`, and per layer `layers.{l}.conv | state` or `layers.{l}.latent | extra_key | index_key`, in
//! the precision of the device. Metadata: format version, checkpoint identity, device, position, and the BLAKE3
//! hash of the whole file with the hash's own digits as zeros.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use k3_format::{NewFile, ShardError, Variant};
use k3_graph::device::{StateTensor, StateValues};
use k3_graph::{Device, ExportedState, StateError};
use safetensors::{Dtype, SafeTensors, View};

use crate::{Engine, Sequence};

const FORMAT: &str = "k3-sequence-state-1";
/// Key of [`k3_graph::ModelOptions::routed_top_p`], and its value where every expert is used.
const ROUTED_TOP_P: &str = "routed top-p";
const OFF: &str = "off";
const NO_CHECKSUM: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// Names of state tensors; files hold no others.
const PARTS: [&str; 5] = ["conv", "state", "latent", "extra_key", "index_key"];

/// Why a state was not saved or not restored. A refused file changes nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedStateError {
    /// The file system.
    #[error("{action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To which file.
        path: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// The file could not be written whole. What had its name is still there.
    #[error("writing the state {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<ShardError>,
    },
    /// Not a file of this kind.
    #[error("{} is not a saved sequence state ({reason})", path.display())]
    NotAState {
        /// The file.
        path: PathBuf,
        /// What is missing or wrong.
        reason: String,
    },
    /// A byte changed.
    #[error("{} is damaged: its checksum is {found}, its content has {computed}", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// As stored.
        found: String,
        /// Over the bytes that are there.
        computed: String,
    },
    /// Made with other weights, or with other settings of them.
    #[error("{} was saved with {what} {found}, this is {expected}", path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// Of this engine.
        expected: String,
        /// Of the file.
        found: String,
    },
    /// The state itself.
    #[error("the state in {}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why it does not fit.
        #[source]
        source: StateError,
    },
}

/// A tensor on its way into a file.
struct Part {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Part {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl<D: Device> Engine<D> {
    /// Writes `sequence` to `path`: complete under a temporary name first, then renamed, and never through a link.
    pub fn save(&self, sequence: &Sequence<D>, path: impl AsRef<Path>) -> Result<(), SavedStateError> {
        let path = path.as_ref();
        let exported = sequence
            .state
            .export(self.model().device())
            .map_err(|source| SavedStateError::State { path: path.into(), source })?;
        let mut bytes = self.encode(&exported, &sequence.tokens).map_err(|e| {
            let source = io::Error::other(e);
            SavedStateError::Io { action: "encoding", path: path.into(), source }
        })?;
        let at = find(&bytes, NO_CHECKSUM.as_bytes()).expect("the header holds the empty checksum");
        let hash = blake3::hash(&bytes).to_hex();
        bytes[at..at + NO_CHECKSUM.len()].copy_from_slice(hash.as_bytes());

        let write = || {
            let mut file = NewFile::create(path)?;
            file.write(&bytes)?;
            file.commit()
        };
        write().map_err(|source| SavedStateError::Write { path: path.into(), source: Box::new(source) })
    }

    /// A sequence that [`Engine::save`] wrote with the same checkpoint, device kind and settings: it continues with
    /// the same bits. Anything else is refused.
    pub fn restore(&self, path: impl AsRef<Path>) -> Result<Sequence<D>, SavedStateError> {
        let path = path.as_ref();
        let io = |source| SavedStateError::Io { action: "reading", path: path.into(), source };
        let not = |reason: String| SavedStateError::NotAState { path: path.into(), reason };
        // A pipe or a device would be read for ever.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(not("it is no regular file".into()));
        }
        let bytes = fs::read(path).map_err(io)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| not(e.to_string()))?;
        let metadata = header.metadata().as_ref().ok_or_else(|| not("it has no metadata".into()))?;
        let field = |key: &str| metadata.get(key).ok_or_else(|| not(format!("no `{key}` in its metadata")));
        if field("format")? != FORMAT {
            return Err(not(format!("format `{}`, expected `{FORMAT}`", field("format")?)));
        }
        verify(path, &bytes, field("checksum")?)?;
        for (key, expected) in self.identity() {
            // Files from before there was such a setting were made without it.
            let found = if key == ROUTED_TOP_P {
                metadata.get(key).map_or(OFF, String::as_str)
            } else {
                field(key)?.as_str()
            };
            if found != expected {
                let (path, found) = (path.into(), found.to_owned());
                return Err(SavedStateError::Mismatch { path, what: key, expected, found });
            }
        }
        let position = field("position")?.parse().map_err(|_| not("its position is no number".into()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| not(e.to_string()))?;
        let (exported, tokens) =
            decode(&file, position, self.model().num_layers(), self.model().device().kind()).map_err(not)?;
        let state = self
            .model()
            .import_state(&exported)
            .map_err(|source| SavedStateError::State { path: path.into(), source })?;
        Ok(Sequence { state, tokens })
    }

    /// What a state must share with the engine that continues it.
    fn identity(&self) -> [(&'static str, String); 6] {
        let attends = match self.model().attends_as() {
            Variant::K3 => "every key",
            Variant::K31 => "the indexer's selection",
        };
        [
            ("checkpoint", self.checkpoint().identity().to_string()),
            ("device", self.model().device().kind().to_owned()),
            ("arithmetic", k3_graph::ARITHMETIC.to_string()),
            ("layers", self.model().num_layers().to_string()),
            ("attention to", attends.to_owned()),
            (ROUTED_TOP_P, self.model().routed_top_p().map_or(OFF.to_owned(), |p| p.to_string())),
        ]
    }

    fn encode(&self, state: &ExportedState, tokens: &[u32]) -> Result<Vec<u8>, safetensors::SafeTensorError> {
        let mut metadata: HashMap<String, String> =
            self.identity().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        metadata.insert("format".into(), FORMAT.into());
        metadata.insert("position".into(), state.position.to_string());
        metadata.insert("checksum".into(), NO_CHECKSUM.into());
        let ids = bytemuck::cast_slice(tokens).to_vec();
        let mut parts =
            vec![("token_ids".to_owned(), Part { dtype: Dtype::U32, shape: vec![tokens.len()], bytes: ids })];
        for (l, layer) in state.layers.iter().enumerate() {
            for part in layer {
                let (dtype, bytes) = match &part.values {
                    StateValues::F32(v) => (Dtype::F32, bytemuck::cast_slice(v).to_vec()),
                    StateValues::F64(v) => (Dtype::F64, bytemuck::cast_slice(v).to_vec()),
                };
                parts.push((
                    format!("layers.{l}.{}", part.name),
                    Part { dtype, shape: part.shape.clone(), bytes },
                ));
            }
        }
        safetensors::serialize(parts.iter().map(|(name, part)| (name, part)), Some(metadata))
    }
}

/// Refuses bytes whose hash, taken with zeros in place of `stored`, is not `stored`.
fn verify(path: &Path, bytes: &[u8], stored: &str) -> Result<(), SavedStateError> {
    let not = |reason: &str| SavedStateError::NotAState { path: path.into(), reason: reason.into() };
    if stored.len() != NO_CHECKSUM.len() {
        return Err(not("its checksum has another length"));
    }
    let at = find(bytes, stored.as_bytes()).ok_or_else(|| not("its checksum is escaped"))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes[..at]).update(NO_CHECKSUM.as_bytes()).update(&bytes[at + stored.len()..]);
    let computed = hasher.finalize().to_hex();
    if computed.as_str() == stored {
        Ok(())
    } else {
        let (path, found, computed) = (path.into(), stored.to_owned(), computed.to_string());
        Err(SavedStateError::Checksum { path, found, computed })
    }
}

/// The state in a file whose checksum holds; layers and parts in the order in which devices export them.
fn decode(
    file: &SafeTensors<'_>,
    position: usize,
    layers: usize,
    device: &str,
) -> Result<(ExportedState, Vec<u32>), String> {
    let ids = file.tensor("token_ids").map_err(|e| e.to_string())?;
    if ids.dtype() != Dtype::U32 || ids.data().len() != position.saturating_mul(4) {
        return Err(format!("{position} token ids expected, found {:?} {:?}", ids.dtype(), ids.shape()));
    }
    let tokens = numbers(ids.data(), u32::from_le_bytes);
    let mut parts: Vec<Vec<StateTensor>> = Vec::new();
    for l in 0..layers {
        let mut layer = Vec::new();
        for name in PARTS {
            let Ok(t) = file.tensor(&format!("layers.{l}.{name}")) else { continue };
            let values = match t.dtype() {
                Dtype::F32 => StateValues::F32(numbers(t.data(), f32::from_le_bytes)),
                Dtype::F64 => StateValues::F64(numbers(t.data(), f64::from_le_bytes)),
                other => return Err(format!("layers.{l}.{name} is {other:?}")),
            };
            layer.push(StateTensor { name, shape: t.shape().to_vec(), values });
        }
        parts.push(layer);
    }
    Ok((ExportedState { device: device.to_owned(), position, layers: parts }, tokens))
}

fn numbers<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|c| f(*c)).collect()
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}
