//! What was used in earlier runs, kept in a file: a new run begins to read it while nothing else is to be read.
//!
//! The file: `K3USAGE1`, the checkpoint's identity (32 bytes), layers and experts (u32), tokens (f64), a count for
//! each expert of each layer (f32), all little-endian, and the BLAKE3 hash of everything before it.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use k3_format::{CheckpointId, NewFile, ShardError};

use crate::ExpertId;
use crate::trace::Geometry;

const MAGIC: &[u8; 8] = b"K3USAGE1";
/// Tokens after which a use counts half.
const HALF_LIFE: f64 = 10_000.0;
/// Bytes of a file at most: 16 times what the released models need.
const MOST_BYTES: u64 = 8 << 20;

/// How often each expert was used.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    layers: usize,
    experts: usize,
    /// Tokens that were counted; older ones count less.
    tokens: f64,
    /// `[layers, experts]`
    counts: Vec<f32>,
}

/// Why a file of uses is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// The system's answer.
    #[error("{what} the uses of experts in {path}")]
    Io {
        /// `reading` or `writing`.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// It could not be written.
    #[error("writing the uses of experts to {path}")]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Box<ShardError>,
    },
    /// It is a file of another kind, which is not replaced.
    #[error("{path} is no file of uses of experts, and is left as it is: name another")]
    Foreign {
        /// Which file.
        path: PathBuf,
    },
    /// It is of another checkpoint, and is not replaced.
    #[error("{path} holds uses of another checkpoint's experts, and is left as it is: name another file")]
    OtherCheckpoint {
        /// Which file.
        path: PathBuf,
    },
    /// It was damaged.
    #[error("{path} does not hold uses of this checkpoint's experts: {problem}")]
    Content {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl Usage {
    /// Nothing was used yet.
    pub fn new(geometry: Geometry) -> Self {
        let Geometry { layers, experts, .. } = geometry;
        Self { layers, experts, tokens: 0.0, counts: vec![0.0; layers * experts] }
    }

    /// Layers with experts.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Tokens that were counted; older ones count less.
    pub fn tokens(&self) -> f64 {
        self.tokens
    }

    /// Uses of the experts of a layer, counted among the layers with experts.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> &[f32] {
        &self.counts[layer * self.experts..(layer + 1) * self.experts]
    }

    /// Notes what tokens used in a layer.
    ///
    /// # Panics
    /// If there is no such layer or expert.
    pub fn count(&mut self, layer: usize, experts: impl Iterator<Item = ExpertId>, tokens: usize) {
        // Every token passes every layer.
        self.tokens += if layer == 0 { tokens as f64 } else { 0.0 };
        let counts = &mut self.counts[layer * self.experts..(layer + 1) * self.experts];
        experts.for_each(|id| counts[id as usize] += 1.0);
    }

    /// Adds what came after it.
    ///
    /// # Panics
    /// If the two are of different models.
    pub fn add(&mut self, later: &Usage) {
        assert_eq!((self.layers, self.experts), (later.layers, later.experts), "uses of one model");
        let left = 0.5_f64.powf(later.tokens / HALF_LIFE);
        self.tokens = self.tokens * left + later.tokens;
        for (count, later) in self.counts.iter_mut().zip(&later.counts) {
            *count = (f64::from(*count) * left) as f32 + later;
        }
    }

    /// All experts that were used, the most used of every layer first, then the second of every layer, and so on.
    pub fn ranked(&self) -> Vec<(usize, ExpertId)> {
        let mut ranked = Vec::new();
        for layer in 0..self.layers {
            let counts = self.layer(layer);
            let mut ids: Vec<ExpertId> =
                (0..self.experts as ExpertId).filter(|&id| counts[id as usize] > 0.0).collect();
            ids.sort_by(|&a, &b| counts[b as usize].total_cmp(&counts[a as usize]));
            ranked.extend(ids.into_iter().enumerate().map(|(rank, id)| (rank, layer, id)));
        }
        ranked.sort_by_key(|&(rank, layer, _)| (rank, layer));
        ranked.into_iter().map(|(_, layer, id)| (layer, id)).collect()
    }

    /// Reads `path`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`UsageError`] if it is damaged or of another checkpoint.
    pub fn load(path: &Path, identity: CheckpointId, geometry: Geometry) -> Result<Option<Self>, UsageError> {
        let failed = |source| UsageError::Io { what: "reading", path: path.to_owned(), source };
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            // To open a pipe would wait for who writes it.
            Ok(metadata) if !metadata.is_file() => return Err(UsageError::Foreign { path: path.to_owned() }),
            metadata => _ = metadata.map_err(failed)?,
        }
        let file = File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        if !bytes.is_empty() && !bytes.starts_with(MAGIC) {
            return Err(UsageError::Foreign { path: path.to_owned() });
        }
        let refused = |problem: &str| UsageError::Content { path: path.to_owned(), problem: problem.into() };
        let found = Self::parse(&bytes, identity, geometry).map_err(|problem| refused(&problem))?;
        found.map(Some).ok_or_else(|| UsageError::OtherCheckpoint { path: path.to_owned() })
    }

    /// `None` if they are of another checkpoint.
    fn parse(bytes: &[u8], identity: CheckpointId, geometry: Geometry) -> Result<Option<Self>, String> {
        let (content, hash) = bytes.split_last_chunk::<32>().ok_or("it is too short")?;
        if !content.starts_with(MAGIC) {
            return Err("it begins with other bytes".into());
        }
        if blake3::hash(content).as_bytes() != hash {
            return Err("its checksum is wrong".into());
        }
        let mut usage = Self::new(geometry);
        let head = usage.head(identity);
        let (Some(found), Some(rest)) = (content.get(..head.len()), content.get(head.len()..)) else {
            return Err("it is too short".into());
        };
        if found != head {
            return Ok(None);
        }
        let expected = 8 + 4 * usage.counts.len();
        let (tokens, counts) = rest
            .split_first_chunk()
            .filter(|_| rest.len() == expected)
            .ok_or_else(|| format!("{} bytes of counts, expected {expected}", rest.len()))?;
        usage.tokens = f64::from_le_bytes(*tokens);
        for (count, stored) in usage.counts.iter_mut().zip(counts.as_chunks().0) {
            *count = f32::from_le_bytes(*stored);
        }
        let is_count = |n: f64| n.is_finite() && n >= 0.0;
        if !is_count(usage.tokens) || !usage.counts.iter().all(|&n| is_count(n.into())) {
            return Err("a count is negative or no number".into());
        }
        Ok(Some(usage))
    }

    fn head(&self, identity: CheckpointId) -> Vec<u8> {
        let sizes = [self.layers as u32, self.experts as u32].map(u32::to_le_bytes);
        [MAGIC, identity.as_bytes().as_slice(), &sizes.concat()].concat()
    }

    /// Writes `path`, which is replaced as a whole or not at all, and only if it is empty or such a file of this checkpoint.
    /// Folders on the way are made.
    ///
    /// # Errors
    /// [`UsageError`].
    pub fn save(&self, path: &Path, identity: CheckpointId) -> Result<(), UsageError> {
        let failed = |source| UsageError::Io { what: "writing", path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let geometry = Geometry { layers: self.layers, experts: self.experts, per_token: 1 };
        match Self::load(path, identity, geometry) {
            Ok(_) | Err(UsageError::Content { .. }) => {}
            Err(error) => return Err(error),
        }
        let mut bytes = self.head(identity);
        bytes.extend(self.tokens.to_le_bytes());
        bytes.extend(self.counts.iter().flat_map(|count| count.to_le_bytes()));
        bytes.extend(blake3::hash(&bytes).as_bytes());
        let write = || {
            let mut file = NewFile::create(path)?;
            file.write(&bytes)?;
            file.commit()
        };
        write().map_err(|source| UsageError::Write { path: path.to_owned(), source: Box::new(source) })
    }
}
