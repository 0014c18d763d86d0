//! The host device: f32 activations, weights in their stored format, work shared among threads by rows, heads or weight
//! rows.
//!
//! Every element of a result is computed by one thread in one fixed order, so threads and batch change nothing.
//! Sums have the shapes of [`k3_quant::cpu`]; exponentials are taken in f64 and rounded once.

mod index;
mod kda;
mod mla;
mod product;
mod rows;
mod threads;
mod topology;

use std::ops::Range;

use k3_format::{IndexerConfig, KdaConfig, MlaConfig, ModelConfig};
use k3_quant::Matrix;
use k3_quant::cpu::Mode;
use k3_quant::cpu::vector::Vectors;

use crate::device::{
    Conv, Device, DeviceError, ExpertWork, InFlight, IndexQuery, KdaStep, MlaAttend, RouterRule, Routing,
    Selection, SequenceRows, SituCaps, StateTensor,
};
use crate::scalar::sigmoid;

pub use index::{IndexFilter, index_key_bytes};
use kda::KdaState;
use mla::MlaState;
use rows::Rows;
use threads::Threads;

/// The most threads of a [`Cpu`]; more than any machine has cores for.
pub const MAX_THREADS: usize = 1024;

/// Picoseconds of one element where there is an exponential, about.
const EXPONENTIAL: usize = 1500;
/// The same for SiTU-GLU, with three of them.
const SITU: usize = 4000;
/// Elements of a norm or a sum that one thread handles in a nanosecond, about.
const ELEMENTS: usize = 4;

/// The host device.
pub struct Cpu {
    threads: Threads,
    vectors: Vectors,
    mode: Mode,
    index_filter: IndexFilter,
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu({} threads)", self.threads())
    }
}

impl Cpu {
    /// A device with `threads` threads, the calling one included; 0 takes one a physical core.
    ///
    /// # Errors
    /// If there are more than [`MAX_THREADS`], or they cannot be started.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        let failed = |reason| DeviceError::Failed { device: "cpu", operation: "starting threads", reason };
        if threads > MAX_THREADS {
            return Err(failed(format!("{threads} threads asked for, at most {MAX_THREADS} are started")));
        }
        let threads = Threads::new(threads).map_err(|e| failed(e.to_string()))?;
        Ok(Self {
            threads,
            vectors: Vectors::default(),
            mode: Mode::Exact,
            index_filter: IndexFilter::default(),
        })
    }

    /// The device with another arithmetic of products: [`Mode::Int8`] rounds activations to 8-bit integers where weights
    /// have 4 or 8 bits, which is faster, and is not what the model was trained with.
    #[must_use]
    pub fn with_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// For tests and measurements: which selections of the indexer go by scores in 8 bits first. It changes no result.
    #[doc(hidden)]
    #[must_use]
    pub fn with_index_filter(mut self, filter: IndexFilter) -> Self {
        self.index_filter = filter;
        self
    }

    /// For tests: also work that is too little to be worth it is shared among the threads.
    #[doc(hidden)]
    #[must_use]
    pub fn sharing_everything(mut self) -> Self {
        self.threads.share_everything();
        self
    }

    /// Threads at work.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }
}

/// `1 / sqrt(mean(x^2) + eps)`. In f64: a square that overflows f32 would turn the row into zeros.
fn inverse_rms(vectors: Vectors, x: &[f32], eps: f64) -> f64 {
    1.0 / (vectors.square_sum(x) / x.len() as f64 + eps).sqrt()
}

fn rms_norm(vectors: Vectors, x: &[f32], gain: &[f32], eps: f64, out: &mut [f32]) {
    let scale = inverse_rms(vectors, x, eps);
    // Beyond f32's range in either direction the product is taken in f64.
    if (f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX)).contains(&scale) {
        vectors.scale(x, gain, scale as f32, out);
    } else {
        out.iter_mut()
            .zip(x.iter().zip(gain))
            .for_each(|(o, (x, g))| *o = g * (f64::from(*x) * scale) as f32);
    }
}

fn attn_res_row(vectors: Vectors, sources: &[&Rows], row: usize, score: &[f32], eps: f64) -> Vec<f32> {
    let score = |v: &&Rows| {
        let v = v.row(row);
        (f64::from(vectors.dot(v, score)) * inverse_rms(vectors, v, eps)) as f32
    };
    let mut weights: Vec<f32> = sources.iter().map(score).collect();
    vectors.softmax(&mut weights);
    weights
}

/// The rows `range` out of all; those of one sequence.
fn take_rows<'a>(rows: &mut [Option<&'a mut [f32]>], range: Range<usize>) -> Vec<&'a mut [f32]> {
    rows[range].iter_mut().filter_map(Option::take).collect()
}

impl Device for Cpu {
    type Act = Rows;
    type Linear = Matrix;
    type Vector = Vec<f32>;
    type KdaState = KdaState;
    type MlaState = MlaState;
    type Selection = Selection;

    fn kind(&self) -> &'static str {
        match self.mode {
            Mode::Exact => "cpu-f32",
            Mode::Int8 => "cpu-int8",
        }
    }

    fn deviation(&self) -> Option<&'static str> {
        (self.mode == Mode::Int8).then_some("int8 activations")
    }

    fn score_bytes(&self, config: &ModelConfig, context: usize) -> u64 {
        let selected = config.indexer.as_ref().map(|indexer| indexer.topk).filter(|topk| *topk < context);
        let attended = |keys| mla::score_bytes(keys, config.mla.num_heads, self.threads());
        // One after the other.
        let bytes = match selected {
            Some(topk) => index::score_bytes(context).max(attended(topk)),
            None => attended(context),
        };
        bytes.saturating_mul(self.threads() as u64)
    }

    fn load_linear(&self, weight: Matrix) -> Result<Matrix, DeviceError> {
        Ok(weight)
    }

    fn load_vector(&self, weight: &[f32]) -> Result<Vec<f32>, DeviceError> {
        Ok(weight.to_vec())
    }

    fn upload(&self, width: usize, values: &[f32]) -> Result<Rows, DeviceError> {
        Ok(Rows::new(width, values.to_vec()))
    }

    fn download(&self, x: &Rows) -> Result<Vec<f32>, DeviceError> {
        Ok(x.values().to_vec())
    }

    fn embed(&self, table: &Matrix, ids: &[u32]) -> Result<Rows, DeviceError> {
        let mut x = Rows::zeros(ids.len(), table.cols());
        for (&id, x) in ids.iter().zip(x.rows_mut()) {
            table.row(id as usize).decode_f32(x);
        }
        Ok(x)
    }

    fn linear(&self, weight: &Matrix, x: &Rows) -> Result<Rows, DeviceError> {
        Ok(product::linear(&self.threads, self.mode, weight, x))
    }

    fn rms_norm(&self, x: &Rows, gain: &Vec<f32>, eps: f64) -> Result<Rows, DeviceError> {
        Ok(Rows::by_row(&self.threads, x.width() / ELEMENTS, x.len(), x.width(), |r, out| {
            rms_norm(self.vectors, x.row(r), gain, eps, out);
        }))
    }

    fn add(&self, acc: &mut Rows, y: &Rows) -> Result<(), DeviceError> {
        self.vectors.add(y.values(), acc.values_mut());
        Ok(())
    }

    fn select_rows(&self, x: &Rows, rows: &[usize]) -> Result<Rows, DeviceError> {
        Ok(x.gather(rows.iter().copied()))
    }

    fn situ_glu(&self, gate: &Rows, up: &Rows, caps: SituCaps) -> Result<Rows, DeviceError> {
        Ok(gate.with_each(&self.threads, SITU, up, |gate, up| {
            self.vectors.situ_glu(gate, up, caps.beta, caps.linear_beta);
        }))
    }

    fn sigmoid_gate(&self, x: &Rows, gate: &Rows) -> Result<Rows, DeviceError> {
        Ok(x.with_each(&self.threads, EXPONENTIAL, gate, |x, gate| self.vectors.sigmoid_gate(x, gate)))
    }

    fn attn_res_weights(
        &self,
        sources: &[&Rows],
        score: &Vec<f32>,
        eps: f64,
    ) -> Result<Vec<f32>, DeviceError> {
        let rows = 0..sources[0].len();
        Ok(rows.flat_map(|r| attn_res_row(self.vectors, sources, r, score, eps)).collect())
    }

    fn attn_res_mix(&self, sources: &[&Rows], score: &Vec<f32>, eps: f64) -> Result<Rows, DeviceError> {
        let (rows, width) = (sources[0].len(), sources[0].width());
        let nanoseconds = sources.len() * width / ELEMENTS;
        Ok(Rows::by_row(&self.threads, nanoseconds, rows, width, |r, out| {
            for (w, v) in attn_res_row(self.vectors, sources, r, score, eps).iter().zip(sources) {
                self.vectors.add_scaled(*w, v.row(r), out);
            }
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
        Ok(kda::short_conv(self, x, taps, which, states))
    }

    fn kda_step(
        &self,
        step: KdaStep<'_, Self>,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Result<Rows, DeviceError> {
        Ok(kda::step(self, &step, states))
    }

    fn gated_head_norm(&self, x: &Rows, gain: &Vec<f32>, gate: &Rows, eps: f64) -> Result<Rows, DeviceError> {
        let nanoseconds = x.width() * EXPONENTIAL / 1000;
        Ok(Rows::by_row(&self.threads, nanoseconds, x.len(), x.width(), |r, out| {
            let heads = x.row(r).chunks_exact(gain.len()).zip(out.chunks_exact_mut(gain.len()));
            heads.for_each(|(x, out)| rms_norm(self.vectors, x, gain, eps, out));
            self.vectors.sigmoid_gate(out, gate.row(r));
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
        mla::append(self.vectors, kv, latent_gain, eps, states);
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
        index::append(k, gain, bias, eps, states);
        Ok(())
    }

    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Selection, DeviceError> {
        Ok(index::select(self, query, states))
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
        Ok(index::scores(self, query, states))
    }

    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Selection>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Rows, DeviceError> {
        Ok(mla::attend(self, &attend, selection, states))
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

    fn experts_ffn(
        &self,
        experts: &[ExpertWork],
        z: &Rows,
        caps: SituCaps,
        out: &mut Rows,
    ) -> Result<Option<InFlight>, DeviceError> {
        product::experts(&self.threads, self.vectors, self.mode, experts, z, caps, out);
        Ok(None)
    }

    fn expert_sum(&self, outputs: &Rows, routing: &Routing) -> Result<Rows, DeviceError> {
        let k = routing.experts_per_token;
        let (rows, width) = (outputs.len() / k, outputs.width());
        Ok(Rows::by_row(&self.threads, k * width / ELEMENTS, rows, width, |r, out| {
            for slot in r * k..(r + 1) * k {
                self.vectors.add_scaled(routing.weights[slot] as f32, outputs.row(slot), out);
            }
        }))
    }

    fn copy_kda(&self, state: &KdaState) -> Result<KdaState, DeviceError> {
        Ok(state.clone())
    }

    fn copy_mla(&self, state: &MlaState) -> Result<MlaState, DeviceError> {
        Ok(state.clone())
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
