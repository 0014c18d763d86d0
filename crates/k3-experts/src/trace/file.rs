//! Recorded traces as files.
//!
//! A header line of text, `k3-routing 1 LAYERS EXPERTS PER_TOKEN RANKS` and a line feed, then for each token and
//! each layer (those with experts, in order) its RANKS expert ids, best rank first, as little-endian u16. The first
//! PER_TOKEN of them were used. Tokens follow each other to the end of the file, so a run that is interrupted leaves a
//! trace that can be read up to its last whole token.

use std::io::{self, BufRead, Read, Write};

use super::{Geometry, Trace};
use crate::ExpertId;

/// What every such file begins with.
pub const MAGIC: &[u8] = b"k3-routing ";
/// Most layers and most experts of a layer: nothing larger than what an id has room for.
const MAX: usize = 1 << 16;
/// Most experts of all layers, 200 times those of the released models: what is allocated for a token is bounded by it.
const MOST_EXPERTS: usize = 1 << 24;

/// Why a routing trace was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFileError {
    /// The system's answer.
    #[error("reading a routing trace")]
    Io(#[from] io::Error),
    /// The first line is something else.
    #[error(
        "a routing trace begins with `k3-routing 1 LAYERS EXPERTS PER_TOKEN RANKS`, each between 1 and 65536, \
         LAYERS * EXPERTS at most 16777216 and PER_TOKEN <= RANKS <= EXPERTS; found {found:?}"
    )]
    Header {
        /// The beginning of the file.
        found: String,
    },
    /// An id is too large.
    #[error("token {token} of the routing trace names expert {found}, and a layer has {experts}")]
    Id {
        /// From 0.
        token: usize,
        /// The id.
        found: u16,
        /// Experts of a layer.
        experts: usize,
    },
    /// An id is in a choice twice.
    #[error("token {token} of the routing trace names expert {expert} twice in one layer")]
    Twice {
        /// From 0.
        token: usize,
        /// The id.
        expert: u16,
    },
}

/// How a trace becomes bytes: for a run that is written token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    geometry: Geometry,
    ranks: usize,
}

impl Format {
    /// Whether a trace of this geometry can be written: layers, experts and experts a token are 1 to 65536, those of all
    /// layers at most 2^24, and a token uses no more than there are.
    pub fn has_room(geometry: Geometry) -> bool {
        let Geometry { layers, experts, per_token } = geometry;
        let sizes = [layers, experts, per_token];
        sizes.iter().all(|n| (1..=MAX).contains(n))
            && layers * experts <= MOST_EXPERTS
            && per_token <= experts
    }

    /// For tokens with `ranks` experts a layer.
    ///
    /// # Panics
    /// If there is no room ([`Format::has_room`]), or `ranks` is smaller than what a token uses or larger than a layer.
    pub fn new(geometry: Geometry, ranks: usize) -> Self {
        assert!(Self::has_room(geometry), "{geometry:?} does not fit the format");
        assert!((geometry.per_token..=geometry.experts).contains(&ranks), "{ranks} ranks of {geometry:?}");
        Self { geometry, ranks }
    }

    /// Experts of a choice.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The first line, with its line feed.
    pub fn header(&self) -> String {
        let Geometry { layers, experts, per_token } = self.geometry;
        format!("k3-routing 1 {layers} {experts} {per_token} {}\n", self.ranks)
    }

    /// Choices of whole tokens `[tokens, layers, ranks]`.
    pub fn encode(&self, choices: impl IntoIterator<Item = ExpertId>) -> Vec<u8> {
        choices.into_iter().flat_map(|id| (id as u16).to_le_bytes()).collect()
    }
}

impl Trace {
    /// Writes all tokens.
    ///
    /// # Errors
    /// What writing gives.
    ///
    /// # Panics
    /// If the geometry does not fit the format ([`Format::has_room`]).
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        let format = Format::new(self.geometry, self.ranks);
        out.write_all(format.header().as_bytes())?;
        out.write_all(&format.encode(self.ids.iter().copied()))
    }

    /// Reads a trace. What follows the last whole token is ignored.
    ///
    /// # Errors
    /// [`TraceFileError`].
    pub fn read(mut file: impl BufRead) -> Result<Self, TraceFileError> {
        let mut line = Vec::new();
        file.by_ref().take(80).read_until(b'\n', &mut line)?;
        let (geometry, ranks) = header(&line)
            .ok_or_else(|| TraceFileError::Header { found: String::from_utf8_lossy(&line).into_owned() })?;
        let mut trace = Self::new(geometry, ranks);
        let mut bytes = vec![0; geometry.layers * ranks * 2];
        let mut choices: Vec<ExpertId> = Vec::with_capacity(geometry.layers * ranks);
        // The choice in which each expert was named last, all choices counted from 1.
        let (mut choice, mut named) = (0_u64, vec![0; geometry.experts]);
        loop {
            match file.read_exact(&mut bytes) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(trace),
                Err(e) => return Err(e.into()),
            }
            choices.clear();
            for (at, id) in bytes.as_chunks().0.iter().enumerate() {
                let found = u16::from_le_bytes(*id);
                choice += u64::from(at % ranks == 0);
                let Some(last) = named.get_mut(usize::from(found)) else {
                    return Err(TraceFileError::Id { token: trace.len(), found, experts: geometry.experts });
                };
                if std::mem::replace(last, choice) == choice {
                    return Err(TraceFileError::Twice { token: trace.len(), expert: found });
                }
                choices.push(found.into());
            }
            trace.push(&choices);
        }
    }
}

fn header(line: &[u8]) -> Option<(Geometry, usize)> {
    let text = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let numbers = text.strip_prefix("k3-routing 1 ")?.split(' ').map(str::parse::<usize>);
    let numbers = numbers.collect::<Result<Vec<_>, _>>().ok()?;
    let [layers, experts, per_token, ranks] = numbers[..] else { return None };
    let geometry = Geometry { layers, experts, per_token };
    let ordered = per_token <= ranks && ranks <= experts;
    (Format::has_room(geometry) && ordered).then_some((geometry, ranks))
}
