//! Kimi Delta Attention on the host. Prefill runs the same recurrence as decode, so chunks change no bit.

use k3_format::KdaConfig;
use k3_quant::cpu::vector::{DeltaToken, VALUE_LANES, Vectors};

use super::rows::{Rows, Strips};
use super::{Cpu, take_rows};
use crate::device::{Conv, DeviceError, KdaStep, SequenceRows, StateTensor, StateValues, take_parts};
use crate::scalar::{L2_NORM_EPS, gate};

/// Channels of one tile of a convolution.
const CHANNELS: usize = 256;
/// Nanoseconds of a convolution for one channel of one token, about.
const CONV_NANOSECONDS: usize = 2;
/// Tokens whose vectors are worked out before the state is read: it is read once for all of them.
const TOKENS: usize = 64;
/// Elements of a state that one thread reads, changes and writes in a nanosecond, about.
const ELEMENTS: usize = 5;

/// State of a KDA layer.
#[derive(Clone, Debug)]
pub struct KdaState {
    heads: usize,
    dim: usize,
    /// Of q, k, v: the last inputs of the convolution `[taps - 1, heads * dim]`, oldest first.
    conv: [Vec<f32>; 3],
    /// `[heads, blocks of value channels, key, VALUE_LANES]`: a block stays in the first-level cache for many tokens.
    s: Vec<f32>,
}

impl KdaState {
    pub(super) fn new(config: &KdaConfig) -> Self {
        let (heads, dim) = (config.num_heads, config.head_dim);
        let window = vec![0.0; (config.short_conv_kernel_size - 1) * heads * dim];
        let conv = [window.clone(), window.clone(), window];
        Self { heads, dim, conv, s: vec![0.0; heads * head_len(dim)] }
    }

    pub(super) fn export(&self) -> Vec<StateTensor> {
        let (dim, width) = (self.dim, self.heads * self.dim);
        let mut s = vec![0.0; width * dim];
        for (out, head) in s.chunks_exact_mut(dim * dim).zip(self.s.chunks_exact(head_len(dim))) {
            for (block, rows) in head.chunks_exact(dim * VALUE_LANES).enumerate() {
                for (out, row) in out.chunks_exact_mut(dim).zip(rows.chunks_exact(VALUE_LANES)) {
                    let out = &mut out[block * VALUE_LANES..];
                    out.iter_mut().zip(row).for_each(|(out, s)| *out = *s);
                }
            }
        }
        vec![
            StateTensor {
                name: "conv",
                shape: vec![3, self.conv[0].len() / width, width],
                values: StateValues::F32(self.conv.concat()),
            },
            StateTensor { name: "state", shape: vec![self.heads, dim, dim], values: StateValues::F32(s) },
        ]
    }

    pub(super) fn import(config: &KdaConfig, parts: &[StateTensor]) -> Result<Self, DeviceError> {
        let (heads, dim) = (config.num_heads, config.head_dim);
        let (window, width) = (config.short_conv_kernel_size - 1, heads * dim);
        let [conv, s] = take_parts(parts, [("conv", &[3, window, width]), ("state", &[heads, dim, dim])])?;
        let third = |i: usize| conv[i * window * width..(i + 1) * window * width].to_vec();
        let mut state = Self::new(config);
        state.conv = [third(0), third(1), third(2)];
        for (head, values) in state.s.chunks_exact_mut(head_len(dim)).zip(s.chunks_exact(dim * dim)) {
            for (block, rows) in head.chunks_exact_mut(dim * VALUE_LANES).enumerate() {
                for (row, values) in rows.chunks_exact_mut(VALUE_LANES).zip(values.chunks_exact(dim)) {
                    row.iter_mut().zip(&values[block * VALUE_LANES..]).for_each(|(s, v)| *s = *v);
                }
            }
        }
        Ok(state)
    }
}

/// Floats of a head in [`KdaState`].
fn head_len(dim: usize) -> usize {
    dim * dim.next_multiple_of(VALUE_LANES)
}

/// `docs/arithmetic.md` 5.1, after the projection.
pub(super) fn short_conv(
    device: &Cpu,
    x: &Rows,
    taps: &[f32],
    which: Conv,
    states: &mut [SequenceRows<'_, KdaState>],
) -> Rows {
    let width = x.width();
    let kernel = taps.len() / width;
    let mut y = Rows::zeros(x.len(), width);
    let mut outputs = y.rows_mut().map(Some).collect::<Vec<_>>();
    // Row t of a sequence's output reads rows t .. t + kernel of its window and input together.
    let inputs: Vec<Vec<&[f32]>> = states
        .iter()
        .map(|s| {
            let window = s.state.conv[which as usize].chunks_exact(width);
            window.chain(s.rows.clone().map(|r| x.row(r))).collect()
        })
        .collect();
    let tiles = states.iter().zip(&inputs).flat_map(|(s, inputs)| {
        let outputs = take_rows(&mut outputs, s.rows.clone());
        Strips::new(outputs, |_| CHANNELS).map(move |(channels, outputs)| (inputs, channels, outputs))
    });
    let nanoseconds = x.values().len() * CONV_NANOSECONDS;
    device.threads.share_with(nanoseconds, tiles, Vec::new, |columns, (inputs, channels, outputs)| {
        let taps = &taps[channels.start * kernel..channels.end * kernel];
        for (inputs, out) in inputs.windows(kernel).zip(outputs) {
            columns.clear();
            columns.extend(inputs.iter().map(|x| &x[channels.clone()]));
            device.vectors.convolve(taps, columns, out);
        }
    });
    let windows: Vec<Vec<f32>> =
        inputs.iter().map(|inputs| inputs[inputs.len() + 1 - kernel..].concat()).collect();
    for (s, window) in states.iter_mut().zip(windows) {
        s.state.conv[which as usize] = window;
    }
    y
}

/// `docs/arithmetic.md` 5.2 to 5.5. One task a sequence and head.
pub(super) fn step(device: &Cpu, args: &KdaStep<'_, Cpu>, states: &mut [SequenceRows<'_, KdaState>]) -> Rows {
    let (heads, dim) = (args.config.num_heads, args.config.head_dim);
    let mut out = Rows::zeros(args.q.len(), heads * dim);
    let mut outputs = out.rows_mut().map(Some).collect::<Vec<_>>();
    let tiles = states.iter_mut().flat_map(|s| {
        let outputs = take_rows(&mut outputs, s.rows.clone());
        let first = s.rows.start;
        let heads = s.state.s.chunks_exact_mut(head_len(dim)).enumerate();
        heads
            .zip(Strips::new(outputs, move |_| dim))
            .map(move |((h, state), (_, out))| (first, h, state, out))
    });
    let nanoseconds = args.q.len() * heads * dim * dim / ELEMENTS;
    let own = || Tokens::new(TOKENS.min(args.q.len()), dim);
    device.threads.share_with(nanoseconds, tiles, own, |tokens, (first, h, state, mut out)| {
        for (chunk, out) in out.chunks_mut(TOKENS).enumerate() {
            tokens.run(device.vectors, args, first + chunk * TOKENS, h, state, out);
        }
    });
    out
}

/// The vectors of some tokens of one head.
struct Tokens {
    /// All `[tokens, dim]`.
    alpha: Vec<f32>,
    k: Vec<f32>,
    q: Vec<f32>,
    beta: Vec<f32>,
}

impl Tokens {
    /// Room for `tokens`.
    fn new(tokens: usize, dim: usize) -> Self {
        let zeros = || vec![0.0; tokens * dim];
        Self { alpha: zeros(), k: zeros(), q: zeros(), beta: vec![0.0; tokens] }
    }

    /// Rows `first..` of head `h`, one for each of `out`.
    fn run(
        &mut self,
        vectors: Vectors,
        args: &KdaStep<'_, Cpu>,
        first: usize,
        h: usize,
        state: &mut [f32],
        out: &mut [&mut [f32]],
    ) {
        let dim = args.config.head_dim;
        let head = h * dim..(h + 1) * dim;
        let rate = f64::from(args.a_log[h]).exp();
        for t in 0..out.len() {
            let (r, at) = (first + t, t * dim..(t + 1) * dim);
            normalise(
                vectors,
                &args.q.row(r)[head.clone()],
                1.0 / (dim as f64).sqrt(),
                &mut self.q[at.clone()],
            );
            normalise(vectors, &args.k.row(r)[head.clone()], 1.0, &mut self.k[at.clone()]);
            let (z, bias) = (&args.decay.row(r)[head.clone()], &args.dt_bias[head.clone()]);
            vectors.decay(z, bias, rate, args.config.gate_lower_bound, &mut self.alpha[at]);
            self.beta[t] = gate(f64::from(args.beta.row(r)[h])) as f32;
        }
        for (block, state) in state.chunks_exact_mut(dim * VALUE_LANES).enumerate() {
            let values = block * VALUE_LANES..dim.min((block + 1) * VALUE_LANES);
            for (t, out) in out.iter_mut().enumerate() {
                let at = t * dim..(t + 1) * dim;
                let token = DeltaToken {
                    alpha: &self.alpha[at.clone()],
                    k: &self.k[at.clone()],
                    q: &self.q[at],
                    beta: self.beta[t],
                    v: &args.v.row(first + t)[head.clone()][values.clone()],
                };
                vectors.delta_rule(token, state, &mut out[values.clone()]);
            }
        }
    }
}

/// `x / sqrt(sum(x^2) + eps) * scale`
fn normalise(vectors: Vectors, x: &[f32], scale: f64, out: &mut [f32]) {
    let factor = (scale / (vectors.square_sum(x) + L2_NORM_EPS).sqrt()) as f32;
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
}
