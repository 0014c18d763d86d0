//! The host device: f32 activations, weights in their stored format, rayon over rows, heads or weight rows.
//!
//! Every element of a result is computed by one task in one fixed order, so threads and batch change nothing.
//! Dot products have the reduction shape of [`k3_quant::cpu`]; exponentials are taken in f64 and rounded once.

mod experts;
mod kda;
mod mla;

use k3_experts::Expert;
use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_quant::Matrix;
use k3_quant::cpu::{Activations, dot_f32, matmul_rows, square_sum};
use rayon::prelude::*;

use crate::device::{
    Conv, Device, DeviceError, ExpertUse, IndexQuery, KdaStep, MlaAttend, RouterRule, Routing, Selection,
    SequenceRows, SituCaps, StateTensor,
};
use crate::scalar::{self, sigmoid, situ_glu};

use kda::KdaState;
use mla::MlaState;

/// Weight rows of one task of a product: large enough to pay for a task, small enough to balance.
const WEIGHT_ROWS: usize = 32;
/// Elements of one task of an element-wise operation.
const ELEMENTS: usize = 4096;

/// The most threads of a [`Cpu`]; more than any machine has cores for.
pub const MAX_THREADS: usize = 1024;

/// The host device.
pub struct Cpu {
    pool: rayon::ThreadPool,
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu({} threads)", self.pool.current_num_threads())
    }
}

impl Cpu {
    /// A device with `threads` threads of its own; 0 takes one a core.
    ///
    /// # Errors
    /// If there are more than [`MAX_THREADS`], or they cannot be started.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        if threads > MAX_THREADS {
            return Err(DeviceError::Failed {
                device: "cpu",
                operation: "starting threads",
                reason: format!("{threads} threads asked for, at most {MAX_THREADS} are started"),
            });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("k3-cpu-{i}"))
            .build()
            .map_err(|e| DeviceError::Failed {
                device: "cpu",
                operation: "starting threads",
                reason: e.to_string(),
            })?;
        Ok(Self { pool })
    }

    /// Threads at work.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

/// Activations `[rows, width]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    width: usize,
    values: Vec<f32>,
}

impl Rows {
    fn zeros(rows: usize, width: usize) -> Self {
        Self { width, values: vec![0.0; rows * width] }
    }

    fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.width..(r + 1) * self.width]
    }

    /// A matrix of the same number of rows, each computed from its index.
    fn by_row(rows: usize, width: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) -> Self {
        let mut out = Self::zeros(rows, width);
        out.values.par_chunks_exact_mut(width.max(1)).enumerate().for_each(|(r, out)| f(r, out));
        out
    }

    fn map2(&self, other: &Self, f: impl Fn(f32, f32) -> f32 + Sync + Send) -> Self {
        let mut out = Self::zeros(self.len(), self.width);
        out.values
            .par_chunks_mut(ELEMENTS)
            .zip(self.values.par_chunks(ELEMENTS).zip(other.values.par_chunks(ELEMENTS)))
            .for_each(|(out, (a, b))| {
                out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b));
            });
        out
    }
}

/// `Y = X W^T`
fn linear(weight: &Matrix, x: &Rows) -> Rows {
    let (n, out) = (x.len(), weight.rows());
    let mut y = Rows::zeros(n, out);
    if n == 0 {
        return y;
    }
    let x = Activations::new(weight.format(), n, x.width, &x.values);
    // By weight row first, as tasks own it, and turned around after.
    let mut by_weight_row = if n == 1 { std::mem::take(&mut y.values) } else { vec![0.0; n * out] };
    by_weight_row.par_chunks_mut(WEIGHT_ROWS * n).enumerate().for_each(|(block, y)| {
        let first = block * WEIGHT_ROWS;
        matmul_rows(weight, first..first + y.len() / n, &x, y);
    });
    if n == 1 {
        y.values = by_weight_row;
    } else {
        y.values.par_chunks_exact_mut(out).enumerate().for_each(|(i, y)| {
            y.iter_mut().zip(by_weight_row[i..].iter().step_by(n)).for_each(|(y, v)| *y = *v);
        });
    }
    y
}

/// `1 / sqrt(mean(x^2) + eps)`. In f64: a square that overflows f32 would turn the row into zeros.
fn inverse_rms(x: &[f32], eps: f64) -> f64 {
    1.0 / (square_sum(x) / x.len() as f64 + eps).sqrt()
}

fn rms_norm(x: &[f32], gain: &[f32], eps: f64, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    // Beyond f32's range in either direction the product is taken in f64.
    if (f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX)).contains(&scale) {
        let scale = scale as f32;
        out.iter_mut().zip(x.iter().zip(gain)).for_each(|(o, (x, g))| *o = g * (x * scale));
    } else {
        out.iter_mut()
            .zip(x.iter().zip(gain))
            .for_each(|(o, (x, g))| *o = g * (f64::from(*x) * scale) as f32);
    }
}

/// Softmax in place; the sum is taken in order, in f64.
fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for s in scores.iter_mut() {
        *s = f64::from(*s - max).exp() as f32;
        sum += f64::from(*s);
    }
    let scale = (1.0 / sum) as f32;
    scores.iter_mut().for_each(|s| *s *= scale);
}

fn attn_res_row(sources: &[&Rows], row: usize, score: &[f32], eps: f64) -> Vec<f32> {
    let mut weights: Vec<f32> = sources
        .iter()
        .map(|v| (f64::from(dot_f32(v.row(row), score)) * inverse_rms(v.row(row), eps)) as f32)
        .collect();
    softmax(&mut weights);
    weights
}

fn situ(gate: &Rows, up: &Rows, caps: SituCaps) -> Rows {
    gate.map2(up, |g, u| situ_glu(f64::from(g), f64::from(u), caps.beta, caps.linear_beta) as f32)
}

fn gather(x: &Rows, rows: &[usize]) -> Rows {
    // In one piece: a vector that grows is up to twice as large.
    let mut values = Vec::with_capacity(rows.len() * x.width);
    rows.iter().for_each(|&r| values.extend_from_slice(x.row(r)));
    Rows { width: x.width, values }
}

impl Device for Cpu {
    type Act = Rows;
    type Linear = Matrix;
    type Vector = Vec<f32>;
    type KdaState = KdaState;
    type MlaState = MlaState;
    type Selection = Selection;

    fn kind(&self) -> &'static str {
        "cpu-f32"
    }

    fn load_linear(&self, weight: Matrix) -> Result<Matrix, DeviceError> {
        Ok(weight)
    }

    fn load_vector(&self, weight: &[f32]) -> Result<Vec<f32>, DeviceError> {
        Ok(weight.to_vec())
    }

    fn upload(&self, width: usize, values: &[f32]) -> Result<Rows, DeviceError> {
        Ok(Rows { width, values: values.to_vec() })
    }

    fn download(&self, x: &Rows) -> Result<Vec<f32>, DeviceError> {
        Ok(x.values.clone())
    }

    fn embed(&self, table: &Matrix, ids: &[u32]) -> Result<Rows, DeviceError> {
        let mut x = Rows::zeros(ids.len(), table.cols());
        for (&id, x) in ids.iter().zip(x.values.chunks_exact_mut(table.cols())) {
            table.row(id as usize).decode_f32(x);
        }
        Ok(x)
    }

    fn linear(&self, weight: &Matrix, x: &Rows) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| linear(weight, x)))
    }

    fn rms_norm(&self, x: &Rows, gain: &Vec<f32>, eps: f64) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| Rows::by_row(x.len(), x.width, |r, out| rms_norm(x.row(r), gain, eps, out))))
    }

    fn add(&self, acc: &mut Rows, y: &Rows) -> Result<(), DeviceError> {
        acc.values.iter_mut().zip(&y.values).for_each(|(a, y)| *a += y);
        Ok(())
    }

    fn select_rows(&self, x: &Rows, rows: &[usize]) -> Result<Rows, DeviceError> {
        Ok(gather(x, rows))
    }

    fn situ_glu(&self, gate: &Rows, up: &Rows, caps: SituCaps) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| situ(gate, up, caps)))
    }

    fn sigmoid_gate(&self, x: &Rows, gate: &Rows) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| x.map2(gate, |x, g| x * scalar::gate(f64::from(g)) as f32)))
    }

    fn attn_res_weights(
        &self,
        sources: &[&Rows],
        score: &Vec<f32>,
        eps: f64,
    ) -> Result<Vec<f32>, DeviceError> {
        Ok((0..sources[0].len()).flat_map(|r| attn_res_row(sources, r, score, eps)).collect())
    }

    fn attn_res_mix(&self, sources: &[&Rows], score: &Vec<f32>, eps: f64) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| {
            Rows::by_row(sources[0].len(), sources[0].width, |r, out| {
                for (w, v) in attn_res_row(sources, r, score, eps).iter().zip(sources) {
                    out.iter_mut().zip(v.row(r)).for_each(|(o, v)| *o += w * v);
                }
            })
        }))
    }

    fn new_kda_state(&self, config: &KdaConfig) -> Result<KdaState, DeviceError> {
        Ok(KdaState::new(config))
    }

    fn short_conv(
        &self,
        x: &Rows,
        taps: &Vec<f32>,
        which: Conv,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| kda::short_conv(x, taps, which, states)))
    }

    fn kda_step(
        &self,
        step: KdaStep<'_, Self>,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| kda::step(&step, states)))
    }

    fn gated_head_norm(&self, x: &Rows, gain: &Vec<f32>, gate: &Rows, eps: f64) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| {
            let normed = Rows::by_row(x.len(), x.width, |r, out| {
                let heads = x.row(r).chunks_exact(gain.len()).zip(out.chunks_exact_mut(gain.len()));
                heads.for_each(|(x, out)| rms_norm(x, gain, eps, out));
            });
            normed.map2(gate, |x, g| x * scalar::gate(f64::from(g)) as f32)
        }))
    }

    fn new_mla_state(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
    ) -> Result<MlaState, DeviceError> {
        Ok(MlaState::new(config, indexer))
    }

    fn mla_append(
        &self,
        kv: &Rows,
        latent_gain: &Vec<f32>,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Result<(), DeviceError> {
        mla::append(kv, latent_gain, eps, states);
        Ok(())
    }

    fn index_append(
        &self,
        k: &Rows,
        gain: &Vec<f32>,
        bias: &Vec<f32>,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Result<(), DeviceError> {
        mla::index_append(k, gain, bias, eps, states);
        Ok(())
    }

    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Selection, DeviceError> {
        Ok(self.pool.install(|| mla::index_select(query, states)))
    }

    fn download_selection(&self, selection: &Selection) -> Result<Selection, DeviceError> {
        Ok(selection.clone())
    }

    fn lost_rows(&self, selection: &Selection) -> Result<Vec<usize>, DeviceError> {
        Ok(selection.lost_rows())
    }

    fn index_scores(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        Ok(self.pool.install(|| mla::index_scores(query, states)))
    }

    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Selection>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Rows, DeviceError> {
        Ok(self.pool.install(|| mla::attend(&attend, selection, states)))
    }

    fn route(&self, logits: &Rows, bias: &Vec<f32>, rule: RouterRule) -> Result<Routing, DeviceError> {
        let mut routing = Routing::with_rows(rule.experts_per_token, logits.len());
        for r in 0..logits.len() {
            let s: Vec<f32> = logits.row(r).iter().map(|&l| sigmoid(f64::from(l)) as f32).collect();
            let biased: Vec<f32> = s.iter().zip(bias).map(|(s, b)| s + b).collect();
            routing.push_scores(logits.row(r), &s, &biased, rule);
        }
        Ok(routing)
    }

    fn expert_outputs(&self, rows: usize, width: usize) -> Result<Rows, DeviceError> {
        Ok(Rows::zeros(rows, width))
    }

    fn expert_ffn(
        &self,
        expert: Expert,
        z: &Rows,
        uses: &[ExpertUse],
        caps: SituCaps,
        out: &mut Rows,
    ) -> Result<(), DeviceError> {
        self.experts_ffn(vec![(expert, uses.to_vec())], z, caps, out)
    }

    fn experts_ffn(
        &self,
        experts: Vec<(Expert, Vec<ExpertUse>)>,
        z: &Rows,
        caps: SituCaps,
        out: &mut Rows,
    ) -> Result<(), DeviceError> {
        self.pool.install(|| experts::ffn(experts, z, caps, out));
        Ok(())
    }

    fn expert_sum(&self, outputs: &Rows, routing: &Routing) -> Result<Rows, DeviceError> {
        let k = routing.experts_per_token;
        Ok(self.pool.install(|| {
            Rows::by_row(outputs.len() / k, outputs.width, |r, out| {
                for slot in r * k..(r + 1) * k {
                    let w = routing.weights[slot] as f32;
                    out.iter_mut().zip(outputs.row(slot)).for_each(|(y, f)| *y += w * f);
                }
            })
        }))
    }

    fn export_kda(&self, state: &KdaState) -> Result<Vec<StateTensor>, DeviceError> {
        Ok(state.export())
    }

    fn import_kda(&self, config: &KdaConfig, parts: &[StateTensor]) -> Result<KdaState, DeviceError> {
        KdaState::import(config, parts)
    }

    fn export_mla(&self, state: &MlaState) -> Result<Vec<StateTensor>, DeviceError> {
        Ok(state.export())
    }

    fn import_mla(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<MlaState, DeviceError> {
        MlaState::import(config, indexer, tokens, parts)
    }
}
