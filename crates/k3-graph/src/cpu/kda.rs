//! Kimi Delta Attention on the host. Prefill runs the same recurrence as decode, so chunks change no bit.

use k3_format::KdaConfig;
use k3_quant::cpu::square_sum;
use rayon::prelude::*;

use super::{Cpu, Rows};
use crate::device::{Conv, DeviceError, KdaStep, SequenceRows, StateTensor, StateValues, take_parts};
use crate::scalar::{L2_NORM_EPS, gate, kda_log_decay, silu};

/// State of a KDA layer.
#[derive(Clone, Debug)]
pub struct KdaState {
    heads: usize,
    dim: usize,
    /// Of q, k, v: the last inputs of the convolution `[taps - 1, heads * dim]`, oldest first.
    conv: [Vec<f32>; 3],
    /// `[heads, key, value]`
    s: Vec<f32>,
}

impl KdaState {
    pub(super) fn new(config: &KdaConfig) -> Self {
        let (heads, dim) = (config.num_heads, config.head_dim);
        let window = vec![0.0; (config.short_conv_kernel_size - 1) * heads * dim];
        let conv = [window.clone(), window.clone(), window];
        Self { heads, dim, conv, s: vec![0.0; heads * dim * dim] }
    }

    pub(super) fn export(&self) -> Vec<StateTensor> {
        let width = self.heads * self.dim;
        vec![
            StateTensor {
                name: "conv",
                shape: vec![3, self.conv[0].len() / width, width],
                values: StateValues::F32(self.conv.concat()),
            },
            StateTensor {
                name: "state",
                shape: vec![self.heads, self.dim, self.dim],
                values: StateValues::F32(self.s.clone()),
            },
        ]
    }

    pub(super) fn import(config: &KdaConfig, parts: &[StateTensor]) -> Result<Self, DeviceError> {
        let (heads, dim) = (config.num_heads, config.head_dim);
        let (window, width) = (config.short_conv_kernel_size - 1, heads * dim);
        let [conv, s] = take_parts(parts, [("conv", &[3, window, width]), ("state", &[heads, dim, dim])])?;
        let third = |i: usize| conv[i * window * width..(i + 1) * window * width].to_vec();
        Ok(Self { heads, dim, conv: [third(0), third(1), third(2)], s })
    }
}

/// `docs/arithmetic.md` 5.1, after the projection.
pub(super) fn short_conv(
    x: &Rows,
    taps: &[f32],
    which: Conv,
    states: &mut [SequenceRows<'_, KdaState>],
) -> Rows {
    let width = x.width;
    let kernel = taps.len() / width;
    let mut y = Rows::zeros(x.len(), width);
    for s in states {
        let rows = s.rows.start * width..s.rows.end * width;
        let window = &mut s.state.conv[which as usize];
        // Row t of the output reads rows t .. t + kernel of window and input together.
        let mut input = std::mem::take(window);
        input.extend_from_slice(&x.values[rows.clone()]);
        y.values[rows].par_chunks_exact_mut(width).enumerate().for_each(|(t, y)| {
            for (c, y) in y.iter_mut().enumerate() {
                let mut sum = 0.0;
                for (j, tap) in taps[c * kernel..(c + 1) * kernel].iter().enumerate() {
                    sum += tap * input[(t + j) * width + c];
                }
                *y = silu(f64::from(sum)) as f32;
            }
        });
        input.drain(..s.rows.len() * width);
        *window = input;
    }
    y
}

/// `docs/arithmetic.md` 5.2 to 5.5. One task a sequence and head.
pub(super) fn step(args: &KdaStep<'_, Cpu>, states: &mut [SequenceRows<'_, KdaState>]) -> Rows {
    let (heads, dim) = (args.config.num_heads, args.config.head_dim);
    let mut out = Rows::zeros(args.q.len(), heads * dim);
    for s in states {
        let rows = s.rows.clone();
        let by_head: Vec<Vec<f32>> = s
            .state
            .s
            .par_chunks_exact_mut(dim * dim)
            .enumerate()
            .map(|(h, state)| {
                let mut out = vec![0.0; rows.len() * dim];
                let mut head = Head::new(args, h);
                for (r, out) in rows.clone().zip(out.chunks_exact_mut(dim)) {
                    head.step(r, state, out);
                }
                out
            })
            .collect();
        for (h, values) in by_head.iter().enumerate() {
            for (r, values) in rows.clone().zip(values.chunks_exact(dim)) {
                let at = r * heads * dim + h * dim;
                out.values[at..at + dim].copy_from_slice(values);
            }
        }
    }
    out
}

/// One head at work, with room for the vectors of a token.
struct Head<'a> {
    args: &'a KdaStep<'a, Cpu>,
    h: usize,
    /// `exp(A_log)`
    rate: f64,
    q: Vec<f32>,
    k: Vec<f32>,
    /// What the state holds for `k`, then the update `beta (v - read)`.
    u: Vec<f32>,
}

impl<'a> Head<'a> {
    fn new(args: &'a KdaStep<'a, Cpu>, h: usize) -> Self {
        let zeros = || vec![0.0; args.config.head_dim];
        Self { args, h, rate: f64::from(args.a_log[h]).exp(), q: zeros(), k: zeros(), u: zeros() }
    }

    /// Token `r`: `state` is `[key, value]`, `out` has one value a value channel and is zero.
    fn step(&mut self, r: usize, state: &mut [f32], out: &mut [f32]) {
        let Self { args, h, rate, q, k, u } = self;
        let (h, dim) = (*h, args.config.head_dim);
        let head = h * dim..(h + 1) * dim;
        normalise(&args.q.row(r)[head.clone()], 1.0 / (dim as f64).sqrt(), q);
        normalise(&args.k.row(r)[head.clone()], 1.0, k);
        let beta = gate(f64::from(args.beta.row(r)[h])) as f32;
        let decay = args.decay.row(r)[head.clone()].iter().zip(&args.dt_bias[head.clone()]);
        let rate = *rate;

        u.fill(0.0);
        for ((s, k), (z, bias)) in state.chunks_exact_mut(dim).zip(k.iter()).zip(decay) {
            let z = f64::from(*z) + f64::from(*bias);
            let alpha = kda_log_decay(z, rate, args.config.gate_lower_bound).exp() as f32;
            for (s, u) in s.iter_mut().zip(u.iter_mut()) {
                *s *= alpha;
                *u += *s * k;
            }
        }
        u.iter_mut().zip(&args.v.row(r)[head]).for_each(|(u, v)| *u = beta * (v - *u));
        for (s, (k, q)) in state.chunks_exact_mut(dim).zip(k.iter().zip(q.iter())) {
            for ((s, u), out) in s.iter_mut().zip(u.iter()).zip(out.iter_mut()) {
                *s += k * u;
                *out += *s * q;
            }
        }
    }
}

/// `x / sqrt(sum(x^2) + eps) * scale`
fn normalise(x: &[f32], scale: f64, out: &mut [f32]) {
    let factor = (scale / (square_sum(x) + L2_NORM_EPS).sqrt()) as f32;
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
}
