//! Kimi Delta Attention, one token after the other (`docs/arithmetic.md` 5).

use super::Trap;
use super::num::{Matrix, Rows, add_scaled, dot, rms, scaled, sigma, silu, to_bf16};

const L2_EPS: f64 = 1e-6;
const GAIN_EPS: f64 = 1e-5;
/// Traps about what is carried from chunk to chunk act at these borders.
const CHUNK: usize = 7;

/// The weights of one KDA layer; `P = heads * dim`.
pub(crate) struct Kda {
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) lower_bound: f64,
    pub(crate) projections: [Matrix; 3],
    /// `[P, 4]` taps of q, k, v; tap 3 is the current token's.
    pub(crate) taps: [Vec<f64>; 3],
    /// As stored, padded with zeros to `dim`.
    pub(crate) a_log: Vec<f64>,
    pub(crate) dt_bias: Vec<f64>,
    pub(crate) f_a: Matrix,
    pub(crate) f_b: Matrix,
    pub(crate) beta: Matrix,
    pub(crate) gate: Matrix,
    pub(crate) o_norm: Vec<f64>,
    pub(crate) o_proj: Matrix,
}

/// What a layer gives back: outputs, and the state after the last token.
pub(crate) struct KdaOutcome {
    pub(crate) y: Rows,
    /// `[heads][key, value]`.
    pub(crate) state: Rows,
    /// q, k, v; the last three pre-convolution rows of each, oldest first.
    pub(crate) window: Vec<f64>,
}

impl Kda {
    pub(crate) fn run(&self, xs: &[Vec<f64>], trap: Trap) -> KdaOutcome {
        let raw: Vec<Rows> = self.projections.iter().map(|w| w.apply_rows(xs)).collect();
        let [mut q, mut k, v] = [0, 1, 2].map(|i| {
            if i == 2 && trap == Trap::ConvSkippedOnV {
                raw[i].clone()
            } else {
                convolve(&raw[i], &self.taps[i], trap)
            }
        });
        let scale = (self.dim as f64).powf(-0.5);
        let (q_scale, k_scale) = match trap {
            Trap::ScaleOnQAndK => (scale, scale),
            Trap::ScaleOnNeither => (1.0, 1.0),
            _ => (scale, 1.0),
        };
        for row in &mut q {
            l2_normalise(row, self.dim, q_scale, trap);
        }
        for row in &mut k {
            l2_normalise(row, self.dim, k_scale, trap);
        }
        let mut state = vec![vec![0.0; self.dim * self.dim]; self.heads];
        let gates = self.gate.apply_rows(xs);
        let mut outputs = Rows::new();
        for (t, x) in xs.iter().enumerate() {
            if trap == Trap::StateRestoredTransposed && t > 0 && t.is_multiple_of(CHUNK) {
                for head in &mut state {
                    transpose(head, self.dim);
                }
            }
            let alpha = self.decay(x, trap);
            let doubled = if trap == Trap::BetaDoubled { 2.0 } else { 1.0 };
            let beta: Vec<f64> = self.beta.apply(x).into_iter().map(|b| doubled * sigma(b)).collect();
            let mut o = Vec::new();
            for (h, state) in state.iter_mut().enumerate() {
                let head = h * self.dim..(h + 1) * self.dim;
                o.extend(step(
                    state,
                    &q[t][head.clone()],
                    &k[t][head.clone()],
                    &v[t][head.clone()],
                    &alpha[head],
                    beta[h],
                    trap,
                ));
            }
            outputs.push(self.gated(&o, &gates[t], trap));
        }
        let window = raw.iter().flat_map(|rows| rows[rows.len() - 3..].iter().flatten().copied()).collect();
        KdaOutcome { y: self.o_proj.apply_rows(&outputs), state, window }
    }

    /// alpha, `[P]`: per head and key channel.
    fn decay(&self, x: &[f64], trap: Trap) -> Vec<f64> {
        let mut bottleneck = self.f_a.apply(x);
        if trap == Trap::DecayBottleneckActivated {
            bottleneck = bottleneck.into_iter().map(silu).collect();
        }
        let z = self.f_b.apply(&bottleneck);
        (0..z.len())
            .map(|i| {
                let entry = if trap == Trap::ALogPerChannel { i % self.dim } else { i / self.dim };
                let a_log =
                    if trap == Trap::ALogInBf16 { to_bf16(self.a_log[entry]) } else { self.a_log[entry] };
                let bias =
                    if trap == Trap::DtBiasInBf16 { to_bf16(self.dt_bias[i]) } else { self.dt_bias[i] };
                let a = a_log.exp();
                let g = match trap {
                    Trap::SoftplusClampGate => (-a * (z[i] + bias).exp().ln_1p()).max(self.lower_bound),
                    Trap::DtBiasAfterALog => self.lower_bound * sigma(a * z[i] + bias),
                    _ => self.lower_bound * sigma(a * (z[i] + bias)),
                };
                g.exp()
            })
            .collect()
    }

    fn gated(&self, o: &[f64], gate: &[f64], trap: Trap) -> Vec<f64> {
        let gain: Vec<f64> =
            self.o_norm.iter().map(|w| if trap == Trap::ONormInBf16 { to_bf16(*w) } else { *w }).collect();
        let activation = if trap == Trap::OutputGateSilu { silu } else { sigma };
        let gate: Vec<f64> = gate.iter().map(|g| activation(*g)).collect();
        let normed = |o: &[f64]| -> Vec<f64> {
            if trap == Trap::ONormOverWholeWidth {
                rms(o, &gain.repeat(self.heads), GAIN_EPS)
            } else {
                o.chunks(self.dim).flat_map(|head| rms(head, &gain, GAIN_EPS)).collect()
            }
        };
        let times_gate = |o: &[f64]| -> Vec<f64> { o.iter().zip(&gate).map(|(v, g)| v * g).collect() };
        if trap == Trap::GateBeforeNorm { normed(&times_gate(o)) } else { times_gate(&normed(o)) }
    }
}

/// Per head of `dim` values: eps is added to the sum of squares.
pub(crate) fn l2_normalise(row: &mut [f64], dim: usize, scale: f64, trap: Trap) {
    let width = dim as f64;
    for head in row.chunks_mut(dim) {
        let sum = dot(head, head);
        let norm = match trap {
            Trap::L2MeanNotSum => (sum / width + L2_EPS).sqrt(),
            Trap::L2EpsOnMean => (sum + width * L2_EPS).sqrt(),
            _ => (sum + L2_EPS).sqrt(),
        };
        for v in head {
            *v *= scale / norm;
        }
    }
}

/// Depthwise causal convolution of four taps, then SiLU; inputs before the sequence are 0.
fn convolve(raw: &[Vec<f64>], taps: &[f64], trap: Trap) -> Rows {
    let mut out = Rows::new();
    for t in 0..raw.len() {
        let chunk_start = t / CHUNK * CHUNK;
        let mut sums = vec![0.0; raw[t].len()];
        for j in 0..4 {
            let Some(s) = (t + j).checked_sub(3) else { continue };
            let carried = s < chunk_start;
            let input = match trap {
                Trap::ConvWindowForgotten if carried => continue,
                Trap::ConvCarriesConvolved if carried => &out[s],
                _ => &raw[s],
            };
            let tap = if trap == Trap::ConvTapsReversed { 3 - j } else { j };
            for (c, sum) in sums.iter_mut().enumerate() {
                let weight = taps[c * 4 + tap];
                let weight = if trap == Trap::ConvTapsInBf16 { to_bf16(weight) } else { weight };
                *sum += weight * input[c];
            }
        }
        if trap != Trap::ConvWithoutSilu {
            sums = sums.into_iter().map(silu).collect();
        }
        out.push(sums);
    }
    out
}

/// One token of one head; `state` is `[key, value]`, q already scaled.
pub(crate) fn step(
    state: &mut [f64],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    alpha: &[f64],
    beta: f64,
    trap: Trap,
) -> Vec<f64> {
    let before_decay = if trap == Trap::UndecayedStateRead { Some(read(state, k)) } else { None };
    if trap != Trap::DecayAfterWrite {
        decay_state(state, alpha, trap);
    }
    let predicted = before_decay.unwrap_or_else(|| read(state, k));
    let early = if trap == Trap::OutputBeforeWrite { Some(read(state, q)) } else { None };
    let u: Vec<f64> = v.iter().zip(&predicted).map(|(v, p)| beta * (v - p)).collect();
    for (row, k) in state.chunks_mut(v.len()).zip(k) {
        add_scaled(row, *k, &u);
    }
    if trap == Trap::DecayAfterWrite {
        decay_state(state, alpha, trap);
    }
    early.unwrap_or_else(|| read(state, q))
}

fn decay_state(state: &mut [f64], alpha: &[f64], trap: Trap) {
    for (row, a) in state.chunks_mut(alpha.len()).zip(alpha) {
        for (s, of_value) in row.iter_mut().zip(alpha) {
            *s *= if trap == Trap::DecayOnValueAxis { of_value } else { a };
        }
    }
}

/// `S^T x`.
fn read(state: &[f64], x: &[f64]) -> Vec<f64> {
    let mut out = scaled(x, 0.0);
    for (row, x) in state.chunks(x.len()).zip(x) {
        add_scaled(&mut out, *x, row);
    }
    out
}

fn transpose(state: &mut [f64], dim: usize) {
    for i in 0..dim {
        for j in 0..i {
            state.swap(i * dim + j, j * dim + i);
        }
    }
}
