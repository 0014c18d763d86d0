//! Where the bytes of every routed expert are (`docs/checkpoint.md` 5, `docs/nvfp4.md` 7).

use std::ops::Range;

use bytes::Bytes;
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, ScaleFactor};

use crate::ModelConfig;
use crate::config::ExpertFormat;
use crate::error::Error;
use crate::names::layer_name;

/// What every tensor of a routed expert begins with, after the layer prefix; the expert's id and a dot follow.
pub(crate) const EXPERTS_PREFIX: &str = "block_sparse_moe.experts.";
/// The three matrices in disk order: gate, down, up.
pub(crate) const MATRICES: [&str; 3] = ["w1", "w2", "w3"];

/// The matrices of a routed expert.
#[derive(Clone, Debug)]
pub struct ExpertMatrices {
    /// Gate projection `[moe_intermediate_size, routed_expert_hidden_size]`.
    pub w1: Matrix,
    /// Down projection `[routed_expert_hidden_size, moe_intermediate_size]`.
    pub w2: Matrix,
    /// Up projection `[moe_intermediate_size, routed_expert_hidden_size]`.
    pub w3: Matrix,
}

/// How the bytes of an expert follow each other: w1 nibbles, w1 block scales, w2 nibbles, w2 block scales, w3
/// nibbles, w3 block scales, without gaps. The same for all experts of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// How the matrices are stored.
    pub format: ExpertFormat,
    /// Rows and columns of w1, w2, w3.
    pub shapes: [(usize, usize); 3],
    /// The six parts, as byte ranges of the run.
    pub parts: [Range<usize>; 6],
    /// Bytes of the run.
    pub len: usize,
}

impl ExpertLayout {
    /// The layout that a config and a format ask for.
    pub fn new(config: &ModelConfig, format: ExpertFormat) -> Self {
        let (inner, latent) = (config.moe.moe_intermediate_size, config.moe.routed_expert_hidden_size);
        let shapes = [(inner, latent), (latent, inner), (inner, latent)];
        let mut len = 0;
        let parts = std::array::from_fn(|part| {
            let (rows, cols) = shapes[part / 2];
            let bytes = if part % 2 == 0 { rows * (cols / 2) } else { rows * (cols / format.group_size()) };
            let begin = len;
            len += bytes;
            begin..len
        });
        Self { format, shapes, parts, len }
    }
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertLocation<'a> {
    /// In one piece.
    Run {
        /// Index into [`crate::Shards::files`].
        shard: usize,
        /// Absolute file offset.
        begin: u64,
    },
    /// In six pieces, in the order of [`ExpertLayout::parts`] and with their lengths.
    Scattered(&'a [PartLocation; 6]),
}

impl ExpertLocation<'_> {
    /// Where part number `part` of [`ExpertLayout::parts`] begins: index into [`crate::Shards::files`], and absolute file
    /// offset.
    ///
    /// # Panics
    /// If `part` is not below 6.
    pub fn part(&self, layout: &ExpertLayout, part: usize) -> (usize, u64) {
        match self {
            Self::Run { shard, begin } => (*shard, begin + layout.parts[part].start as u64),
            Self::Scattered(parts) => (parts[part].shard as usize, parts[part].begin),
        }
    }
}

/// Where a part of a scattered expert is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartLocation {
    /// Index into [`crate::Shards::files`].
    pub shard: u32,
    /// Absolute file offset.
    pub begin: u64,
}

/// A shard number that no shard has: the offset is an index into the scattered experts.
const SCATTERED: u32 = u32::MAX;

/// Every routed expert of a checkpoint, 16 bytes each.
#[derive(Debug)]
pub struct Experts {
    layout: ExpertLayout,
    first_layer: usize,
    per_layer: usize,
    slots: Vec<PartLocation>,
    scattered: Vec<[PartLocation; 6]>,
    /// As stored; empty for MXFP4.
    globals: Vec<[f32; 3]>,
}

impl Experts {
    pub(crate) fn new(
        config: &ModelConfig,
        layout: ExpertLayout,
        parts: impl Iterator<Item = [PartLocation; 6]>,
    ) -> Self {
        let mut scattered = Vec::new();
        let slots = parts
            .map(|parts| {
                if in_one_piece(&layout, &parts) {
                    return parts[0];
                }
                scattered.push(parts);
                PartLocation { shard: SCATTERED, begin: scattered.len() as u64 - 1 }
            })
            .collect();
        let (first_layer, per_layer) = (config.first_k_dense_replace, config.moe.num_experts);
        Self { layout, first_layer, per_layer, slots, scattered, globals: Vec::new() }
    }

    pub(crate) fn set_global_scales(&mut self, globals: Vec<[f32; 3]>) {
        self.globals = globals;
    }

    pub(crate) fn hash_global_scales(&self, hasher: &mut blake3::Hasher) {
        for scale in self.globals.iter().flatten() {
            hasher.update(&scale.to_le_bytes());
        }
    }

    /// How the bytes of each expert follow each other.
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// Experts in all layers together.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether the model has no routed experts.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Experts that are not in one piece.
    pub fn scattered(&self) -> usize {
        self.scattered.len()
    }

    /// Bytes of all experts, global scales included.
    pub fn size_bytes(&self) -> u64 {
        self.slots.len() as u64 * self.layout.len as u64 + self.globals.len() as u64 * 12
    }

    /// Where expert `expert` of layer `layer` (0-based) is.
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`].
    pub fn location(&self, layer: usize, expert: u32) -> Result<ExpertLocation<'_>, Error> {
        let slot = self.slots[self.index(layer, expert)?];
        Ok(if slot.shard == SCATTERED {
            ExpertLocation::Scattered(&self.scattered[slot.begin as usize])
        } else {
            ExpertLocation::Run { shard: slot.shard as usize, begin: slot.begin }
        })
    }

    /// The per-matrix scales of w1, w2, w3; `None` for MXFP4, which has none.
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`].
    pub fn global_scales(&self, layer: usize, expert: u32) -> Result<Option<[GlobalScale; 3]>, Error> {
        let index = self.index(layer, expert)?;
        Ok(self.globals.get(index).map(|stored| {
            stored.map(|g| match self.layout.format {
                ExpertFormat::Nvfp4ModelOpt => GlobalScale::Factor(ScaleFactor(g)),
                _ => GlobalScale::Divisor(ScaleDivisor(g)),
            })
        }))
    }

    /// The matrices over an expert's bytes in the order of [`ExpertLayout::parts`], without a copy.
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`], [`Error::ExpertBuffer`] if `run` is not [`ExpertLayout::len`] bytes.
    pub fn matrices(&self, layer: usize, expert: u32, run: &Bytes) -> Result<ExpertMatrices, Error> {
        self.check_buffer(layer, expert, run.len())?;
        self.matrices_of(layer, expert, self.layout.parts.clone().map(|part| run.slice(part)))
    }

    pub(crate) fn check_buffer(&self, layer: usize, expert: u32, found: usize) -> Result<(), Error> {
        let expected = self.layout.len;
        if found == expected { Ok(()) } else { Err(Error::ExpertBuffer { layer, expert, expected, found }) }
    }

    /// The matrices over an expert's six parts, in the order of [`ExpertLayout::parts`], without a copy.
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`], [`Error::Matrix`] if a part has another length than in [`ExpertLayout::parts`].
    pub fn matrices_of(&self, layer: usize, expert: u32, parts: [Bytes; 6]) -> Result<ExpertMatrices, Error> {
        let globals = self.global_scales(layer, expert)?;
        let [a, b, c, d, e, f] = parts;
        let matrix = |which: usize, packed: Bytes, scale: Bytes| {
            let (rows, cols) = self.layout.shapes[which];
            let made = match globals {
                Some(globals) => Matrix::nvfp4(rows, cols, packed, scale, globals[which]),
                None => Matrix::mxfp4(rows, cols, packed, scale),
            };
            made.map_err(|source| Error::Matrix { name: matrix_name(layer, expert as usize, which), source })
        };
        Ok(ExpertMatrices { w1: matrix(0, a, b)?, w2: matrix(1, c, d)?, w3: matrix(2, e, f)? })
    }

    fn index(&self, layer: usize, expert: u32) -> Result<usize, Error> {
        let unknown = || Error::NoSuchExpert { layer, expert };
        let row = layer.checked_sub(self.first_layer).ok_or_else(unknown)?;
        let index = row.checked_mul(self.per_layer).and_then(|n| n.checked_add(expert as usize));
        let index = index.filter(|&i| (expert as usize) < self.per_layer && i < self.slots.len());
        index.ok_or_else(unknown)
    }
}

fn in_one_piece(layout: &ExpertLayout, parts: &[PartLocation; 6]) -> bool {
    let first = parts[0];
    parts.iter().zip(&layout.parts).all(|(part, range)| {
        part.shard == first.shard && part.begin.checked_sub(first.begin) == Some(range.start as u64)
    })
}

/// `language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w1`
pub(crate) fn matrix_name(layer: usize, expert: usize, which: usize) -> String {
    layer_name(layer, &format!("{EXPERTS_PREFIX}{expert}.{}", MATRICES[which]))
}
