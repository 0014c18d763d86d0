//! Where the time of a pass goes: a device that times each operation of another one.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_graph::device::{
    Conv, ExpertWork, InFlight, IndexQuery, KdaStep, MlaAttend, RouterRule, SequenceRows, SituCaps,
    StateTensor,
};
use k3_graph::{Device, DeviceError, Routing, Selection};
use k3_quant::Matrix;
use serde_json::{Value, json};

use super::limits::Limits;

/// What calls of one operation came to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    calls: u64,
    seconds: f64,
    /// Weights and state that had to be read, and state that had to be written.
    bytes: f64,
    /// Products that were added to something. Only those with weights and states count.
    products: f64,
}

/// What passes came to, by operation.
#[derive(Clone, Debug, Default)]
pub(super) struct Profile(BTreeMap<String, Entry>);

impl Profile {
    pub(super) fn bytes(&self) -> f64 {
        self.0.values().map(|entry| entry.bytes).sum()
    }

    pub(super) fn products(&self) -> f64 {
        self.0.values().map(|entry| entry.products).sum()
    }

    fn by_seconds(&self) -> Vec<(&str, Entry)> {
        let mut entries: Vec<(&str, Entry)> = self.0.iter().map(|(name, entry)| (&**name, *entry)).collect();
        entries.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        entries
    }

    /// One line an operation: milliseconds and share of `seconds`, and its rates as shares of the limits.
    pub(super) fn print(
        &self,
        passes: f64,
        seconds: f64,
        limits: &Limits,
        out: &mut impl Write,
    ) -> Result<()> {
        writeln!(
            out,
            "{:<28} {:>6} {:>9} {:>7} {:>9} {:>10}",
            "operation", "calls", "ms", "share", "of read", "of FMA"
        )?;
        for (name, entry) in self.by_seconds() {
            let of = |floor: f64| {
                if floor > 0.0 { format!("{:.0} %", 100.0 * floor / entry.seconds) } else { "-".to_owned() }
            };
            writeln!(
                out,
                "{name:<28} {:>6.0} {:>9.3} {:>5.1} % {:>9} {:>10}",
                entry.calls as f64 / passes,
                1e3 * entry.seconds / passes,
                100.0 * entry.seconds / passes / seconds,
                of(limits.reading(entry.bytes)),
                of(limits.adding(entry.products)),
            )?;
        }
        Ok(())
    }

    pub(super) fn json(&self, passes: f64) -> Value {
        let entries = self.by_seconds().into_iter().map(|(name, entry)| {
            json!({
                "operation": name,
                "calls": entry.calls as f64 / passes,
                "seconds": entry.seconds / passes,
                "bytes": entry.bytes / passes,
                "products": entry.products / passes,
            })
        });
        entries.collect()
    }
}

/// A device and what its operations took.
pub(super) struct Profiled<D> {
    inner: D,
    profile: Mutex<Profile>,
}

/// Activations with their number of rows.
pub(super) struct Act<A> {
    inner: A,
    rows: usize,
}

/// A weight matrix and how it is called in the profile.
pub(super) struct Linear<L> {
    inner: L,
    name: String,
    rows: usize,
    cols: usize,
    bytes: usize,
}

impl<D: Device> Profiled<D> {
    pub(super) fn new(inner: D) -> Self {
        Self { inner, profile: Mutex::default() }
    }

    /// What was counted since the last call.
    pub(super) fn take(&self) -> Profile {
        std::mem::take(&mut *self.profile.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn timed<T>(
        &self,
        name: &str,
        bytes: usize,
        products: usize,
        run: impl FnOnce(&D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let start = Instant::now();
        let result = run(&self.inner);
        let seconds = start.elapsed().as_secs_f64();
        let mut profile = self.profile.lock().unwrap_or_else(PoisonError::into_inner);
        if !profile.0.contains_key(name) {
            profile.0.insert(name.to_owned(), Entry::default());
        }
        if let Some(entry) = profile.0.get_mut(name) {
            entry.calls += 1;
            entry.seconds += seconds;
            entry.bytes += bytes as f64;
            entry.products += products as f64;
        }
        result
    }

    fn act(
        &self,
        name: &str,
        rows: usize,
        run: impl FnOnce(&D) -> Result<D::Act, DeviceError>,
    ) -> Result<Act<D::Act>, DeviceError> {
        Ok(Act { inner: self.timed(name, 0, 0, run)?, rows })
    }
}

/// The same operands for the device inside.
fn query<D: Device>(query: IndexQuery<'_, Profiled<D>>) -> IndexQuery<'_, D> {
    IndexQuery { config: query.config, q: &query.q.inner, weights: &query.weights.inner }
}

/// Keys that rows of a batch may see, all of them added up.
fn visible<S>(states: &[SequenceRows<'_, S>]) -> usize {
    let of = |s: &SequenceRows<'_, S>| s.rows.len() * s.position + s.rows.len() * (s.rows.len() + 1) / 2;
    states.iter().map(of).sum()
}

/// Keys that sequences have.
fn keys<S>(states: &[SequenceRows<'_, S>]) -> usize {
    states.iter().map(|s| s.position + s.rows.len()).sum()
}

impl<D: Device> Device for Profiled<D> {
    type Act = Act<D::Act>;
    type Linear = Linear<D::Linear>;
    type Vector = D::Vector;
    type KdaState = D::KdaState;
    type MlaState = D::MlaState;
    type Selection = D::Selection;

    const VALUE_BYTES: usize = D::VALUE_BYTES;

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn deviation(&self) -> Option<&'static str> {
        self.inner.deviation()
    }

    fn load_linear(&self, weight: Matrix) -> Result<Self::Linear, DeviceError> {
        let (rows, cols, bytes) = (weight.rows(), weight.cols(), weight.size_bytes());
        let name = format!("linear {weight:?}");
        Ok(Linear { inner: self.inner.load_linear(weight)?, name, rows, cols, bytes })
    }

    fn load_vector(&self, weight: &[f32]) -> Result<Self::Vector, DeviceError> {
        self.inner.load_vector(weight)
    }

    fn upload(&self, width: usize, values: &[f32]) -> Result<Self::Act, DeviceError> {
        self.act("upload", values.len().checked_div(width).unwrap_or(0), |d| d.upload(width, values))
    }

    fn download(&self, x: &Self::Act) -> Result<Vec<f32>, DeviceError> {
        self.timed("download", 0, 0, |d| d.download(&x.inner))
    }

    fn embed(&self, table: &Self::Linear, ids: &[u32]) -> Result<Self::Act, DeviceError> {
        let bytes = table.bytes / table.rows.max(1) * ids.len();
        let inner = self.timed("embed", bytes, 0, |d| d.embed(&table.inner, ids))?;
        Ok(Act { inner, rows: ids.len() })
    }

    fn linear(&self, w: &Self::Linear, x: &Self::Act) -> Result<Self::Act, DeviceError> {
        let inner =
            self.timed(&w.name, w.bytes, w.rows * w.cols * x.rows, |d| d.linear(&w.inner, &x.inner))?;
        Ok(Act { inner, rows: x.rows })
    }

    fn rms_norm(&self, x: &Self::Act, gain: &Self::Vector, eps: f64) -> Result<Self::Act, DeviceError> {
        self.act("rms_norm", x.rows, |d| d.rms_norm(&x.inner, gain, eps))
    }

    fn add(&self, acc: &mut Self::Act, y: &Self::Act) -> Result<(), DeviceError> {
        self.timed("add", 0, 0, |d| d.add(&mut acc.inner, &y.inner))
    }

    fn select_rows(&self, x: &Self::Act, rows: &[usize]) -> Result<Self::Act, DeviceError> {
        self.act("select_rows", rows.len(), |d| d.select_rows(&x.inner, rows))
    }

    fn situ_glu(&self, gate: &Self::Act, up: &Self::Act, caps: SituCaps) -> Result<Self::Act, DeviceError> {
        self.act("situ_glu", gate.rows, |d| d.situ_glu(&gate.inner, &up.inner, caps))
    }

    fn sigmoid_gate(&self, x: &Self::Act, gate: &Self::Act) -> Result<Self::Act, DeviceError> {
        self.act("sigmoid_gate", x.rows, |d| d.sigmoid_gate(&x.inner, &gate.inner))
    }

    fn attn_res_weights(
        &self,
        sources: &[&Self::Act],
        score: &Self::Vector,
        eps: f64,
    ) -> Result<Vec<f32>, DeviceError> {
        let sources: Vec<&D::Act> = sources.iter().map(|s| &s.inner).collect();
        self.timed("attn_res_weights", 0, 0, |d| d.attn_res_weights(&sources, score, eps))
    }

    fn attn_res_mix(
        &self,
        sources: &[&Self::Act],
        score: &Self::Vector,
        eps: f64,
    ) -> Result<Self::Act, DeviceError> {
        let rows = sources.first().map_or(0, |s| s.rows);
        let sources: Vec<&D::Act> = sources.iter().map(|s| &s.inner).collect();
        self.act("attn_res_mix", rows, |d| d.attn_res_mix(&sources, score, eps))
    }

    fn new_kda_state(&self, config: &KdaConfig) -> Result<Self::KdaState, DeviceError> {
        self.inner.new_kda_state(config)
    }

    fn short_conv(
        &self,
        x: &Self::Act,
        taps: &Self::Vector,
        which: Conv,
        states: &mut [SequenceRows<'_, Self::KdaState>],
    ) -> Result<Self::Act, DeviceError> {
        self.act("short_conv", x.rows, |d| d.short_conv(&x.inner, taps, which, states))
    }

    fn kda_step(
        &self,
        step: KdaStep<'_, Self>,
        states: &mut [SequenceRows<'_, Self::KdaState>],
    ) -> Result<Self::Act, DeviceError> {
        let rows = step.q.rows;
        let elements = step.config.num_heads * step.config.head_dim * step.config.head_dim;
        let step = KdaStep {
            config: step.config,
            q: &step.q.inner,
            k: &step.k.inner,
            v: &step.v.inner,
            decay: &step.decay.inner,
            beta: &step.beta.inner,
            a_log: step.a_log,
            dt_bias: step.dt_bias,
        };
        // Read once and written once; a decay, two reads and a write of every element.
        let (bytes, products) = (2 * 4 * elements * states.len(), 4 * elements * rows);
        let inner = self.timed("kda_step", bytes, products, |d| d.kda_step(step, states))?;
        Ok(Act { inner, rows })
    }

    fn gated_head_norm(
        &self,
        x: &Self::Act,
        gain: &Self::Vector,
        gate: &Self::Act,
        eps: f64,
    ) -> Result<Self::Act, DeviceError> {
        self.act("gated_head_norm", x.rows, |d| d.gated_head_norm(&x.inner, gain, &gate.inner, eps))
    }

    fn new_mla_state(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
    ) -> Result<Self::MlaState, DeviceError> {
        self.inner.new_mla_state(config, indexer)
    }

    fn mla_append(
        &self,
        kv: &Self::Act,
        latent_gain: &Self::Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, Self::MlaState>],
    ) -> Result<(), DeviceError> {
        self.timed("mla_append", 0, 0, |d| d.mla_append(&kv.inner, latent_gain, eps, states))
    }

    fn index_append(
        &self,
        k: &Self::Act,
        gain: &Self::Vector,
        bias: &Self::Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, Self::MlaState>],
    ) -> Result<(), DeviceError> {
        self.timed("index_append", 0, 0, |d| d.index_append(&k.inner, gain, bias, eps, states))
    }

    fn index_select(
        &self,
        q: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Self::Selection, DeviceError> {
        let width = q.config.n_heads * q.config.head_dim;
        let (bytes, products) = (keys(states) * q.config.head_dim * 4, visible(states) * width);
        self.timed("index_select", bytes, products, |d| d.index_select(query(q), states))
    }

    fn download_selection(&self, selection: &Self::Selection) -> Result<Selection, DeviceError> {
        self.inner.download_selection(selection)
    }

    fn lost_rows(&self, selection: &Self::Selection) -> Result<Vec<usize>, DeviceError> {
        self.inner.lost_rows(selection)
    }

    fn index_scores(
        &self,
        q: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        self.timed("index_scores", 0, 0, |d| d.index_scores(query(q), states))
    }

    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Self::Selection>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Self::Act, DeviceError> {
        let (c, rows) = (attend.config, attend.q.rows);
        let latent = c.kv_lora_rank + c.qk_rope_head_dim;
        let bytes = attend.kv_b.bytes + 4 * latent * keys(states);
        // A selection attends fewer keys than counted here.
        let products = attend.kv_b.rows * c.kv_lora_rank * rows
            + visible(states) * c.num_heads * (latent + c.kv_lora_rank);
        let attend = MlaAttend { config: c, q: &attend.q.inner, kv_b: &attend.kv_b.inner };
        let inner = self.timed("mla_attend", bytes, products, |d| d.mla_attend(attend, selection, states))?;
        Ok(Act { inner, rows })
    }

    fn route(
        &self,
        logits: &Self::Act,
        bias: &Self::Vector,
        rule: RouterRule,
    ) -> Result<Routing, DeviceError> {
        self.timed("route", 0, 0, |d| d.route(&logits.inner, bias, rule))
    }

    fn expert_outputs(&self, rows: usize, width: usize) -> Result<Self::Act, DeviceError> {
        self.act("expert_outputs", rows, |d| d.expert_outputs(rows, width))
    }

    fn experts_ffn(
        &self,
        experts: &[ExpertWork],
        z: &Self::Act,
        caps: SituCaps,
        out: &mut Self::Act,
    ) -> Result<Option<InFlight>, DeviceError> {
        let (mut bytes, mut products) = (0, 0);
        for (expert, uses) in experts {
            for matrix in [&expert.w1, &expert.w2, &expert.w3] {
                bytes += matrix.size_bytes();
                products += matrix.rows() * matrix.cols() * uses.len();
            }
        }
        self.timed("experts", bytes, products, |d| d.experts_ffn(experts, &z.inner, caps, &mut out.inner))
    }

    fn expert_sum(&self, outputs: &Self::Act, routing: &Routing) -> Result<Self::Act, DeviceError> {
        let rows = outputs.rows / routing.experts_per_token.max(1);
        self.act("expert_sum", rows, |d| d.expert_sum(&outputs.inner, routing))
    }

    fn copy_kda(&self, state: &Self::KdaState) -> Result<Self::KdaState, DeviceError> {
        self.inner.copy_kda(state)
    }

    fn copy_mla(&self, state: &Self::MlaState) -> Result<Self::MlaState, DeviceError> {
        self.inner.copy_mla(state)
    }

    fn export_kda(&self, state: &Self::KdaState) -> Result<Vec<StateTensor>, DeviceError> {
        self.inner.export_kda(state)
    }

    fn import_kda(&self, config: &KdaConfig, parts: &[StateTensor]) -> Result<Self::KdaState, DeviceError> {
        self.inner.import_kda(config, parts)
    }

    fn export_mla(&self, state: &Self::MlaState) -> Result<Vec<StateTensor>, DeviceError> {
        self.inner.export_mla(state)
    }

    fn import_mla(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<Self::MlaState, DeviceError> {
        self.inner.import_mla(config, indexer, tokens, parts)
    }
}
