//! What a repacked tree is to be: everything that decides its bytes.

use std::fmt;

use k3_quant::WeightFormat;

use crate::{ExpertFormat, LinearFormat};

/// How the routed experts are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertTarget {
    /// NVFP4: the same 4-bit codes, scales rewritten without loss (`docs/nvfp4.md` 1).
    #[default]
    Nvfp4,
    /// MXFP4 as it is, in id order and aligned.
    Mxfp4,
}

impl fmt::Display for ExpertTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
        })
    }
}

/// Whose tensor names and config an NVFP4 tree carries (`docs/nvfp4.md` 7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Naming {
    /// compressed-tensors: `weight_packed`, `weight_global_scale` (a divisor). For vLLM.
    #[default]
    CompressedTensors,
    /// NVIDIA ModelOpt: `weight`, `weight_scale_2` (a factor), `input_scale`. For SGLang.
    ModelOpt,
}

impl fmt::Display for Naming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::ModelOpt => "modelopt",
        })
    }
}

/// How a tensor outside the routed experts is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DenseFormat {
    /// As it is stored: BF16 stays BF16, F32 stays F32.
    #[default]
    Bf16,
    /// NVFP4: 4.5 bits a weight.
    Nvfp4,
    /// 8-bit integers with a scale per row.
    Int8,
    /// 4-bit integers with a scale per 64 columns: 4.25 bits a weight.
    Int4,
}

impl DenseFormat {
    /// The format of quantized matrices; `None` if nothing is quantized.
    pub fn weight_format(self) -> Option<WeightFormat> {
        match self {
            Self::Bf16 => None,
            Self::Nvfp4 => Some(WeightFormat::Nvfp4),
            Self::Int8 => Some(WeightFormat::Int8),
            Self::Int4 => Some(WeightFormat::Int4),
        }
    }

    /// How quantized matrices are stored under these names; `None` if nothing is quantized.
    pub fn linear(self, names: Naming) -> Option<LinearFormat> {
        match (self, names) {
            (Self::Bf16, _) => None,
            (Self::Nvfp4, Naming::CompressedTensors) => Some(LinearFormat::Nvfp4CompressedTensors),
            (Self::Nvfp4, Naming::ModelOpt) => Some(LinearFormat::Nvfp4ModelOpt),
            (Self::Int8, _) => Some(LinearFormat::Int8),
            (Self::Int4, _) => Some(LinearFormat::Int4),
        }
    }
}

impl fmt::Display for DenseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Nvfp4 => "nvfp4",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// Everything that decides the bytes of a repacked tree, beside its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recipe {
    /// Format of the routed experts.
    pub experts: ExpertTarget,
    /// Names of NVFP4 experts. MXFP4 has one set of names, those of compressed-tensors.
    pub names: Naming,
    /// Format of the large matrices outside the routed experts; the small and the sensitive ones stay as they are
    /// ([`Role::is_quantized_on_request`](crate::Role::is_quantized_on_request)).
    pub dense: DenseFormat,
    /// Leave out `vision_tower.*` and `mm_projector.*`.
    pub text_only: bool,
}

impl Recipe {
    /// The same, with experts in this format.
    #[must_use]
    pub fn experts(mut self, experts: ExpertTarget) -> Self {
        self.experts = experts;
        self
    }

    /// The same, with these names.
    #[must_use]
    pub fn names(mut self, names: Naming) -> Self {
        self.names = names;
        self
    }

    /// The same, with other matrices in this format.
    #[must_use]
    pub fn dense(mut self, dense: DenseFormat) -> Self {
        self.dense = dense;
        self
    }

    /// The same, with or without vision.
    #[must_use]
    pub fn text_only(mut self, text_only: bool) -> Self {
        self.text_only = text_only;
        self
    }

    /// How the result's routed experts are stored.
    pub fn expert_format(&self) -> ExpertFormat {
        match (self.experts, self.names) {
            (ExpertTarget::Mxfp4, _) => ExpertFormat::Mxfp4,
            (ExpertTarget::Nvfp4, Naming::CompressedTensors) => ExpertFormat::Nvfp4CompressedTensors,
            (ExpertTarget::Nvfp4, Naming::ModelOpt) => ExpertFormat::Nvfp4ModelOpt,
        }
    }
}

impl fmt::Display for Recipe {
    /// As command line arguments.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--experts {}", self.experts)?;
        if self.experts == ExpertTarget::Nvfp4 {
            write!(f, " --names {}", self.names)?;
        }
        write!(f, " --dense {}", self.dense)?;
        if self.text_only {
            f.write_str(" --text-only")?;
        }
        Ok(())
    }
}
