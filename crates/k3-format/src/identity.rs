//! What tells one checkpoint from another.

use std::fmt;

use crate::names::IndexerNames;
use crate::shard_file::ShardFile;
use crate::shards::{Shards, TensorInfo};
use crate::{
    AttentionKind, Error, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, SpecialTokens, Variant,
};

/// Bytes of a large tensor that count.
const SAMPLE: u64 = 4096;

/// A hash over the variant and the checked [`ModelConfig`]; every shard's name, length and header; the names under
/// which the indexer tensors were found; the stored bytes of all small tensors: norms, `A_log`, `dt_bias`, router
/// biases, AttnRes vectors, and the global scales of NVFP4 experts; and 4 KiB from the middle of every matrix and
/// convolution outside the routed experts.
///
/// Of `config.json`, only what the engine computes with counts: neither layout and order of keys nor keys that are not
/// read. The directory and how its files are linked do not count. The bytes of routed experts do not count either,
/// nor those of larger tensors outside the samples, since reading them takes an hour: training that touched the
/// projections shows, single changed weights and changes to experts alone do not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId([u8; 32]);

impl CheckpointId {
    /// `values` is the hash of small tensors and samples.
    pub(crate) fn new(
        config: &ModelConfig,
        variant: Variant,
        files: &[ShardFile],
        indexer: Option<&IndexerNames>,
        values: blake3::Hash,
    ) -> Self {
        let mut hasher = blake3::Hasher::new();
        hash_text(&mut hasher, &variant.to_string());
        hash_config(&mut hasher, config);
        let mut files: Vec<&ShardFile> = files.iter().collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        hash_number(&mut hasher, files.len());
        for file in files {
            hash_text(&mut hasher, &file.name);
            hasher.update(&file.len.to_le_bytes());
            hasher.update(&file.header_hash);
        }
        // Another assignment of names to the five tensors is another function of the same bytes.
        for (_, name) in indexer.iter().flat_map(|names| names.all()) {
            hash_text(&mut hasher, name);
        }
        hasher.update(values.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointId({self})")
    }
}

/// Lengths go before contents, so that no two values hash alike by running into each other.
fn hash_text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Bytes of a tensor: the type counts, since BF16 and F32 bytes mean different numbers.
pub(crate) fn hash_tensor(hasher: &mut blake3::Hasher, tensor: &TensorInfo<'_>, bytes: &[u8]) {
    hash_text(hasher, tensor.name);
    hash_text(hasher, &tensor.dtype.to_string());
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// The bytes in the middle of a large tensor, or all of a smaller one.
pub(crate) fn hash_sample(
    hasher: &mut blake3::Hasher,
    tensor: &TensorInfo<'_>,
    shards: &Shards,
) -> Result<(), Error> {
    let len = tensor.byte_len().min(SAMPLE);
    let mut bytes = [0; SAMPLE as usize];
    let bytes = &mut bytes[..len as usize];
    shards.read_range(tensor.shard, tensor.begin + (tensor.byte_len() - len) / 2, bytes)?;
    hash_tensor(hasher, tensor, bytes);
    Ok(())
}

fn hash_number(hasher: &mut blake3::Hasher, number: usize) {
    hasher.update(&(number as u64).to_le_bytes());
}

/// Taken apart without `..`, so that a new field cannot be forgotten here.
fn hash_config(hasher: &mut blake3::Hasher, config: &ModelConfig) {
    let ModelConfig {
        hidden_size,
        vocab_size,
        rms_norm_eps,
        activation_situ_beta,
        activation_situ_linear_beta,
        attn_res_block_size,
        first_k_dense_replace,
        intermediate_size,
        max_position_embeddings,
        layers,
        kda,
        mla,
        moe,
        indexer,
        tokens,
    } = config;
    let KdaConfig { num_heads: kda_heads, head_dim, short_conv_kernel_size, gate_lower_bound } = kda;
    let MlaConfig { num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim } =
        mla;
    let MoeConfig {
        num_experts,
        num_experts_per_token,
        num_shared_experts,
        moe_intermediate_size,
        routed_expert_hidden_size,
        moe_renormalize,
        routed_scaling_factor,
    } = moe;
    let SpecialTokens { bos, eos, pad, media_placeholder } = tokens;
    for number in [
        hidden_size,
        vocab_size,
        attn_res_block_size,
        first_k_dense_replace,
        intermediate_size,
        max_position_embeddings,
        kda_heads,
        head_dim,
        short_conv_kernel_size,
        num_heads,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        num_experts,
        num_experts_per_token,
        num_shared_experts,
        moe_intermediate_size,
        routed_expert_hidden_size,
        &layers.len(),
    ] {
        hash_number(hasher, *number);
    }
    for number in [
        rms_norm_eps,
        activation_situ_beta,
        activation_situ_linear_beta,
        gate_lower_bound,
        routed_scaling_factor,
    ] {
        hasher.update(&number.to_le_bytes());
    }
    hasher.update(&[u8::from(*moe_renormalize)]);
    for layer in layers {
        hasher.update(&[u8::from(*layer == AttentionKind::FullAttention)]);
    }
    hasher.update(&[u8::from(indexer.is_some())]);
    if let Some(IndexerConfig { n_heads, head_dim, topk }) = indexer {
        for number in [n_heads, head_dim, topk] {
            hash_number(hasher, *number);
        }
    }
    for token in [bos, pad, media_placeholder] {
        // No id has all bits set, as u64.
        hash_number(hasher, token.map_or(usize::MAX, |id| id as usize));
    }
    hash_number(hasher, eos.len());
    for id in eos {
        hasher.update(&id.to_le_bytes());
    }
}
