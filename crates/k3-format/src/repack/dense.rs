//! Tensors outside the routed experts: what each becomes, and how its bytes are made.

use crate::Role;
use crate::shards::TensorInfo;
use crate::writer::TensorSpec;

use super::DenseFormat;
use super::error::RepackError;
use super::read::Reader;
use super::sink::Sink;

/// The format that a tensor gets when `wanted` is asked for. `role` is what the tensor is for, `None` for one that the
/// language model does not have (vision, unknown).
///
/// Only the large projections are ever quantized. Norms, router, convolutions, decay parameters, the low-rank gates of
/// KDA, AttnRes vectors, the indexer and the embedding stay as they are, and so does everything stored as F32.
pub fn dense_format(role: Option<Role>, tensor: &TensorInfo<'_>, wanted: DenseFormat) -> DenseFormat {
    if role.is_some_and(is_large_projection) && tensor.dtype == safetensors::Dtype::BF16 {
        wanted
    } else {
        DenseFormat::Bf16
    }
}

/// Whether a tensor of this role may be quantized.
fn is_large_projection(role: Role) -> bool {
    matches!(
        role,
        Role::LmHead
            | Role::GProj
            | Role::OProj
            | Role::QProj
            | Role::KProj
            | Role::VProj
            | Role::QAProj
            | Role::QBProj
            | Role::KvAProjWithMqa
            | Role::KvBProj
            | Role::MlpGateProj
            | Role::MlpUpProj
            | Role::MlpDownProj
            | Role::RoutedExpertDownProj
            | Role::RoutedExpertUpProj
            | Role::SharedGateProj
            | Role::SharedUpProj
            | Role::SharedDownProj
    )
}

/// The tensors that `tensor` becomes, in the order in which [`stream`] makes their bytes.
pub(super) fn outputs(tensor: &TensorInfo<'_>, format: DenseFormat) -> Vec<TensorSpec> {
    match format {
        DenseFormat::Bf16 => {
            let (name, dtype, shape) = (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec());
            vec![TensorSpec { name, dtype, shape }]
        }
    }
}

/// Makes the bytes of [`outputs`], one after another and without gaps.
///
/// The tensor may be read in any order and more than once, in pieces: what this uses of memory must not grow with it.
pub(super) fn stream(
    tensor: &TensorInfo<'_>,
    format: DenseFormat,
    reader: &mut Reader<'_>,
    sink: &mut Sink,
) -> Result<(), RepackError> {
    match format {
        DenseFormat::Bf16 => {
            let mut at = tensor.begin;
            while at < tensor.end {
                let len = (tensor.end - at).min(sink.capacity() as u64);
                sink.fill(len as usize, |out| Ok(reader.read(tensor.shard, at, out)?))?;
                at += len;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::TABLE;

    /// The roles that are never quantized, as `docs/repack.md` lists them.
    const KEPT: [Role; 26] = [
        Role::EmbedTokens,
        Role::Norm,
        Role::OutputAttnResNorm,
        Role::OutputAttnResProj,
        Role::InputLayernorm,
        Role::PostAttentionLayernorm,
        Role::SelfAttentionResNorm,
        Role::SelfAttentionResProj,
        Role::MlpResNorm,
        Role::MlpResProj,
        Role::QConv1d,
        Role::KConv1d,
        Role::VConv1d,
        Role::ALog,
        Role::DtBias,
        Role::FAProj,
        Role::FBProj,
        Role::BProj,
        Role::ONorm,
        Role::QALayernorm,
        Role::KvALayernorm,
        Role::IndexerWqB,
        Role::IndexerWk,
        Role::IndexerWeightsProj,
        Role::RouterGate,
        Role::RouterBias,
    ];

    #[test]
    fn what_may_be_quantized() {
        for entry in TABLE {
            let vector = matches!(
                entry.role,
                Role::IndexerKNormWeight | Role::IndexerKNormBias | Role::RoutedExpertNorm
            );
            let kept = vector || KEPT.contains(&entry.role);
            assert_eq!(is_large_projection(entry.role), !kept, "{:?}", entry.role);
        }
    }
}
