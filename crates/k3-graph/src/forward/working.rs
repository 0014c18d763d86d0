//! How much memory a pass needs while it runs.

use k3_format::{AttentionKind, ModelConfig};

use super::LogitsWanted;
use crate::device::ranks_told;

/// Columns to which the kernels round a row of activations up.
const STEP: usize = 32;

/// Bytes that a pass of several tokens keeps at its peak for each of them, on a device with activations of
/// `value_bytes` ([`crate::Device::VALUE_BYTES`]): a function of the config alone, so that a prompt can be cut before
/// anything runs.
///
/// Counted are, of the sublayer that needs the most (`docs/architecture.md`, "Working memory"):
///
/// * the snapshots of the depth sum that there are by then, the sum, and the sublayer's input;
/// * KDA: q, k, v, the decay and the output, which exists by head first;
/// * full attention: the latent and full query, what the indexer selects, the output by row and as one matrix;
/// * the dense MLP and the shared experts: gate, up and their product;
/// * routed experts: the routing, the latent, the outputs of all experts of a token, which are summed in rank order
///   when the last has come, and the inner values of the experts at work;
/// * for [`LogitsWanted::All`] the logits, twice.
///
/// Every product also needs its operand in the order in which kernels read it, and its result by weight row.
///
/// Not counted is what does not grow with the number of tokens (scratch of a thread, 8 weight rows), and what stays: the
/// state of the sequence, and logits that were handed over.
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
        // The rows are picked out of snapshots and sum, and mixed, normed and multiplied.
        let sources = config.num_hidden_layers().div_ceil(block) + 1;
        most = most.max(2 * sources * e + 2 * e + product(config.vocab_size, e));
    }
    most as u64 * value_bytes as u64
}

/// A product at work, its result included: the operand in the order of the kernels, the result by weight row and by row.
fn product(out: usize, input: usize) -> usize {
    input.next_multiple_of(STEP) + 2 * out
}

fn kda(config: &ModelConfig) -> usize {
    let (e, p, d) = (config.hidden_size, config.kda.projection_size(), config.kda.head_dim);
    // A convolution reads its input behind the window of the sequence, as one row of rows.
    let v = 2 * p + product(p, e).max(3 * p);
    let decay = 3 * p + d + product(p, d);
    let step = 4 * p + config.kda.num_heads + 2 * p;
    let gate = p + product(p, e);
    let norm = 4 * p;
    let out = p + product(e, p);
    v.max(decay).max(step).max(gate).max(norm).max(out)
}

fn mla(config: &ModelConfig) -> usize {
    let (e, c) = (config.hidden_size, &config.mla);
    let (q, o) = (c.num_heads * c.qk_head_dim(), c.output_size());
    let query = c.q_lora_rank + product(q, c.q_lora_rank);
    let held = c.q_lora_rank + q;
    // Selected positions are 4 bytes each, which is a value at least.
    let (index, selected) = config
        .indexer
        .as_ref()
        .map_or((0, 0), |i| (product(i.n_heads * i.head_dim, c.q_lora_rank) + i.n_heads + i.topk, i.topk));
    let attend = held + selected + 2 * o;
    let gate = o + product(o, e);
    let out = o + product(e, o);
    query.max(held + index).max(attend).max(gate).max(3 * o).max(out)
}

fn gated_mlp(config: &ModelConfig, inner: usize) -> usize {
    let e = config.hidden_size;
    (inner + product(inner, e)).max(3 * inner).max(inner + product(e, inner))
}

fn moe(config: &ModelConfig, value_bytes: usize) -> usize {
    let (e, c) = (config.hidden_size, &config.moe);
    let (k, latent, inner) = (c.num_experts_per_token, c.routed_expert_hidden_size, c.moe_intermediate_size);
    let ranks = ranks_told(k, c.num_experts);
    // Ids, weights and runners-up of the routing; what goes to the store, and for each expert the rows that use it.
    let routing = (12 * k + 4 * (ranks - k) + 8 + 4 * ranks + 32 * k).div_ceil(value_bytes);
    let router = product(c.num_experts, e) + routing;
    let shared = routing + gated_mlp(config, c.shared_intermediate_size());
    let to_latent = routing + e + product(latent, e);
    let held = routing + e + latent + k * latent;
    // An expert that all rows use: its operand, the inner values by weight row, by row and in the order of the kernels.
    let expert =
        latent.next_multiple_of(STEP) + (2 * inner + inner.next_multiple_of(STEP)).max(latent + inner);
    let from_latent = e + latent + product(e, latent);
    router.max(shared).max(to_latent).max(held + expert).max(held + 2 * latent).max(from_latent)
}
