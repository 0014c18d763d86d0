//! The scalar functions of the model, in f64. Devices narrow the result.

/// Added to the sum of squares in KDA's L2 norm of q and k (`docs/arithmetic.md` 5.2).
pub const L2_NORM_EPS: f64 = 1e-6;

/// Epsilon of `q_a_layernorm` and `kv_a_layernorm`. The vendor builds these two norms without passing an epsilon, so
/// they take the class default and not `rms_norm_eps`; several other engines use 1e-5 (`docs/arithmetic.md` 4).
pub const LORA_NORM_EPS: f64 = 1e-6;

/// Epsilon of the indexer's LayerNorm. Uncertain: no modelling code of K3.1 is public; this is the value of
/// DeepSeek-V3.2's indexer, which K3.1's is described after (`docs/arithmetic.md` 7.1).
pub const INDEX_NORM_EPS: f64 = 1e-6;

/// Added to the sum of router weights before dividing by it (`docs/arithmetic.md` 8.2).
pub const ROUTER_SUM_EPS: f64 = 1e-20;

/// `max(x, 0)`. Unlike [`f64::max`] it hands NaN on.
#[inline]
pub fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

/// `1 / (1 + exp(-x))`
#[inline]
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`
#[inline]
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// `sigmoid(x)` of a gate that must be a number: one that overflowed would open or close without a trace, and gives NaN
/// instead.
#[inline]
pub fn gate(x: f64) -> f64 {
    if x.is_finite() { sigmoid(x) } else { f64::NAN }
}

/// SiTU-GLU: `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`. The sigmoid sees the uncapped
/// gate (`docs/arithmetic.md` 8.1). Its caps would hide an operand that overflowed, so that gives NaN.
#[inline]
pub fn situ_glu(gate: f64, up: f64, beta: f64, linear_beta: f64) -> f64 {
    if !(gate.is_finite() && up.is_finite()) {
        return f64::NAN;
    }
    beta * (gate / beta).tanh() * sigmoid(gate) * (linear_beta * (up / linear_beta).tanh())
}

/// KDA's log decay `lower_bound * sigmoid(rate * z)`, in `(lower_bound, 0)`, with `rate = exp(A_log)`: one scalar a head,
/// never one a channel (`docs/arithmetic.md` 5.3). NaN if `z` overflowed, as [`gate`].
#[inline]
pub fn kda_log_decay(z: f64, rate: f64, lower_bound: f64) -> f64 {
    lower_bound * gate(rate * z)
}

/// Weights of the selected experts from their unbiased scores, in rank order (`docs/arithmetic.md` 8.2).
pub fn router_weights(scores: &[f64], renormalize: bool, scaling_factor: f64) -> Vec<f64> {
    let sum: f64 = scores.iter().sum::<f64>() + ROUTER_SUM_EPS;
    let divisor = if renormalize && scores.len() > 1 { sum } else { 1.0 };
    scores.iter().map(|s| s / divisor * scaling_factor).collect()
}

/// Routed top-p (`docs/arithmetic.md` 8.2): of the selected experts, in rank order, the first whose scores sum to the
/// share `p` of the sum of all, at least one. Their weights are scaled so that they sum to what all summed to; the
/// weights behind are 0. Returns how many are kept. `p >= 1` keeps all and changes nothing.
pub fn keep_top_p(weights: &mut [f64], scores: &[f64], p: f64) -> usize {
    let of_all: f64 = scores.iter().sum();
    let mut of_kept = 0.0;
    let mut kept = 0;
    while kept < scores.len() && (kept == 0 || p >= 1.0 || of_kept < p * of_all) {
        of_kept += scores[kept];
        kept += 1;
    }
    // Experts without any score, as far as a sigmoid underflows, have nothing to be scaled.
    if kept < scores.len() && of_kept > 0.0 {
        weights[..kept].iter_mut().for_each(|w| *w *= of_all / of_kept);
        weights[kept..].fill(0.0);
        return kept;
    }
    scores.len()
}
