//! What a user should hear once about a checkpoint that opens.

use std::fmt;

use crate::indexer::IndexerResolution;

/// Something about a checkpoint that is not wrong, but worth a line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// Keys of `text_config` that the engine does not know.
    UnknownConfigKeys(Vec<String>),
    /// The config quantizes activations, too; this engine keeps them as they are.
    ActivationsNotQuantized,
    /// The config lists a module as not quantized whose tensors are. The tensors decide.
    IgnoredModuleIsQuantized {
        /// A tensor of the module.
        tensor: String,
        /// The entry of the ignore list.
        entry: String,
    },
    /// The config names modules as quantized whose tensors are not. The tensors decide.
    ListedModulesAreNotQuantized {
        /// How many.
        count: usize,
        /// A tensor of the first of them.
        tensor: String,
        /// The entry that names it.
        entry: String,
    },
    /// A pattern of modules in the config cannot be judged. The tensors decide anyway.
    IgnorePattern {
        /// The entry of the list.
        entry: String,
        /// Why not.
        why: String,
    },
    /// Tensors stored as BF16 that the release has as F32.
    NarrowerThanRelease(Vec<String>),
    /// Tensors that are known and that text generation does not need.
    Skipped {
        /// `vision_tower.*` and `mm_projector.*`
        vision: usize,
        /// `input_scale` and `input_global_scale` of routed experts.
        activation_scales: usize,
        /// `k_scale` and `v_scale` of attention.
        cache_scales: usize,
    },
    /// Tensors that are neither known nor part of the language model.
    UnknownTensors {
        /// How many.
        count: usize,
        /// The first of them.
        first: Vec<String>,
    },
    /// The tensors of these many experts are not back to back: each takes six reads instead of one.
    ScatteredExperts(usize),
    /// The indexer tensors have other names than the table.
    IndexerNames(IndexerResolution),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownConfigKeys(keys) => {
                write!(f, "config.json has keys that this engine does not know: {}", keys.join(", "))
            }
            Self::ActivationsNotQuantized => f.write_str(
                "the config also quantizes activations; this engine keeps them in floating point, which is more exact",
            ),
            Self::IgnoredModuleIsQuantized { tensor, entry } => {
                write!(f, "{tensor} is quantized although the config lists {entry:?} as not quantized")
            }
            Self::ListedModulesAreNotQuantized { count, tensor, entry } => write!(
                f,
                "{count} matrices are not quantized although the config says so, {tensor} by {entry}"
            ),
            Self::IgnorePattern { entry, why } => write!(
                f,
                "the config lists modules as {entry:?}, which is no pattern that can be judged ({why}); the tensors \
                 decide what is quantized"
            ),
            Self::NarrowerThanRelease(names) => {
                write!(f, "{} tensors are BF16 where the release has F32: {}", names.len(), names.join(", "))
            }
            Self::Skipped { vision, activation_scales, cache_scales } => {
                let kinds = [("vision tensors", vision), ("activation scales", activation_scales), ("cache scales", cache_scales)];
                let found = kinds.iter().filter(|(_, count)| **count > 0).map(|(kind, count)| format!("{count} {kind}"));
                write!(f, "not needed for text and skipped: {}", found.collect::<Vec<_>>().join(", "))
            }
            Self::UnknownTensors { count, first } => {
                let more = if *count > first.len() { ", ..." } else { "" };
                write!(f, "{count} unknown tensors outside the language model: {}{more}", first.join(", "))
            }
            Self::ScatteredExperts(count) => {
                write!(f, "{count} experts are not stored in one piece; each takes six reads instead of one")
            }
            Self::IndexerNames(resolution) => write!(f, "{resolution}"),
        }
    }
}
