//! How much memory a pass needs while it runs.

use k3_format::{AttentionKind, ModelConfig};

use super::LogitsWanted;
use crate::device::ranks_told;

/// Columns to which the kernels round a row of activations up.
const STEP: usize = 32;
/// What a row costs whatever its width, in values: where it begins, for those who work on parts of it, and its place
/// among the scores of the rows that are attended at once.
const HANDLES: usize = 96;

/// Bytes that a pass of several tokens keeps at its peak for each of them, on a device with activations of
/// `value_bytes` ([`crate::Device::VALUE_BYTES`]): a function of the config alone, so that a prompt can be cut before
/// anything runs.
///
/// Counted are, of the sublayer that needs the most (`docs/architecture.md`, "Working memory"):
///
/// * the snapshots of the depth sum that there are by then, the sum, and the sublayer's input;
/// * KDA: q, k, v, the decay and the output;
/// * full attention: the latent and full query, what the indexer selects, the output and its gate;
/// * the dense MLP and the shared experts: gate, up and their product;
/// * routed experts: the routing, the latent, the outputs of all experts of a token, which are summed in rank order
///   when the last has come, and the inner values of the experts at work;
/// * for [`LogitsWanted::All`] the logits, twice;
/// * the operands of products in the order in which kernels read them, which stay as long as the operand.
///
/// Not counted is what does not grow with the number of tokens (steps of 32 rows in full attention, and the scores of a
/// context, [`crate::Device::score_bytes`]), and what stays: the state of the sequence, and logits that were handed over.
pub fn working_bytes_per_token(config: &ModelConfig, value_bytes: usize, logits: LogitsWanted) -> u64 {
    let layers = 0..config.num_hidden_layers();
    let block = config.attn_res_block_size.max(1);
    let e = config.hidden_size;
    let values = layers.map(|l| {
        // Before the push of a boundary layer, and after it. The running sum and the sublayer's input are among them.
        let before = l.div_ceil(block) + 2;
        let after = l / block + 3;
        let attention = match config.layers[l] {
            AttentionKind::Kda => kda(config),
            AttentionKind::FullAttention => mla(config),
        };
        let mlp = if config.is_moe(l) {
            moe(config, value_bytes)
        } else {
            gated_mlp(config, config.intermediate_size)
        };
        (before * e + attention).max(after * e + mlp)
    });
    let mut most = values.max().unwrap_or(0);
    if logits == LogitsWanted::All {
        // The rows are picked out of snapshots and sum, and mixed, normed and multiplied; logits are copied for the caller.
        let sources = config.num_hidden_layers().div_ceil(block) + 1;
        most = most.max(2 * sources * e + e + prepared(e) + 2 * config.vocab_size);
    }
    (most + HANDLES) as u64 * value_bytes as u64
}

/// An operand of `width` as kernels read it.
fn prepared(width: usize) -> usize {
    width.next_multiple_of(STEP)
}

fn kda(config: &ModelConfig) -> usize {
    let (e, p, d) = (config.hidden_size, config.kda.projection_size(), config.kda.head_dim);
    let decay = 4 * p + d + prepared(d);
    // Q, k, v and the decay with the output.
    let step = 5 * p + config.kda.num_heads;
    let out = p + prepared(p) + e;
    prepared(e) + decay.max(step).max(out)
}

fn mla(config: &ModelConfig) -> usize {
    let (e, c) = (config.hidden_size, &config.mla);
    let (q, o) = (c.num_heads * c.qk_head_dim(), c.output_size());
    let held = c.q_lora_rank + prepared(c.q_lora_rank) + q;
    // Selected positions are 4 bytes each, which is a value at least.
    let (index, selected) =
        config.indexer.as_ref().map_or((0, 0), |i| (i.n_heads * i.head_dim + i.n_heads + i.topk, i.topk));
    let attend = held + selected + o;
    let out = o + prepared(o) + e;
    prepared(e) + (held + index).max(attend).max(3 * o).max(out)
}

fn gated_mlp(config: &ModelConfig, inner: usize) -> usize {
    let e = config.hidden_size;
    prepared(e) + (3 * inner).max(inner + prepared(inner) + e)
}

fn moe(config: &ModelConfig, value_bytes: usize) -> usize {
    let (e, c) = (config.hidden_size, &config.moe);
    let (k, latent, inner) = (c.num_experts_per_token, c.routed_expert_hidden_size, c.moe_intermediate_size);
    let ranks = ranks_told(k, c.num_experts);
    // Ids, weights and runners-up of the routing; what goes to the store, and for each expert the rows that use it.
    let routing = (12 * k + 4 * (ranks - k) + 8 + 4 * ranks + 32 * k).div_ceil(value_bytes);
    let router = prepared(e) + c.num_experts + routing;
    let shared = routing + gated_mlp(config, c.shared_intermediate_size());
    let held = routing + prepared(e) + e + latent + prepared(latent) + k * latent;
    // An expert that all rows use: its operand, gate and up and their product, the product as an operand with the result.
    let expert = prepared(latent) + (3 * inner).max(inner + prepared(inner) + latent);
    let from_latent = prepared(e) + e + latent + prepared(latent) + e;
    router.max(shared).max(held + expert).max(held + 2 * latent).max(from_latent)
}
