//! The plain device: f64, one loop after the other, written to be compared with `docs/arithmetic.md` line by line.

use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_quant::{Matrix, reference::matmul_f64};

use crate::device::{
    Conv, Device, DeviceError, ExpertWork, InFlight, IndexQuery, KdaStep, MlaAttend, RouterRule, Routing,
    Selected, Selection, SequenceRows, SituCaps, StateTensor, StateValues, take_parts,
};
use crate::scalar::{self, L2_NORM_EPS, kda_log_decay, relu, sigmoid, silu, situ_glu};

/// Computes in f64 and makes no attempt to be fast.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// Activations `[rows, width]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    width: usize,
    values: Vec<f64>,
}

impl Rows {
    fn new(width: usize, values: Vec<f64>) -> Self {
        Self { width, values }
    }
    fn zeros(rows: usize, width: usize) -> Self {
        Self { width, values: vec![0.0; rows * width] }
    }
    fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }
    fn row(&self, r: usize) -> &[f64] {
        &self.values[r * self.width..(r + 1) * self.width]
    }
    fn row_mut(&mut self, r: usize) -> &mut [f64] {
        &mut self.values[r * self.width..(r + 1) * self.width]
    }
    fn map2(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        let values = self.values.iter().zip(&other.values).map(|(a, b)| f(*a, *b)).collect();
        Self { width: self.width, values }
    }
}

/// State of a KDA layer.
#[derive(Clone, Debug)]
pub struct KdaState {
    /// Of q, k, v: `[taps - 1, width]`, oldest first.
    conv: [Vec<f64>; 3],
    /// `[heads, key, value]`
    s: Vec<f64>,
    shape: (usize, usize),
    taps: usize,
}

/// State of a full-attention layer. Each `[tokens, width]`.
#[derive(Clone, Debug)]
pub struct MlaState {
    latent: Rows,
    extra: Rows,
    /// Width 0 without an indexer.
    index_keys: Rows,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn mean_square(x: &[f64]) -> f64 {
    dot(x, x) / x.len() as f64
}

fn rms_norm(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (mean_square(x) + eps).sqrt();
    x.iter().zip(gain).map(|(x, g)| g * x * scale).collect()
}

fn softmax(scores: &mut [f64]) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

impl Reference {
    fn attn_res_row(sources: &[&Rows], row: usize, score: &[f64], eps: f64) -> Vec<f64> {
        let mut weights: Vec<f64> =
            sources.iter().map(|v| dot(v.row(row), score) / (mean_square(v.row(row)) + eps).sqrt()).collect();
        softmax(&mut weights);
        weights
    }

    /// Scores of row `r` over positions `0..keys`.
    fn index_row(query: IndexQuery<'_, Self>, r: usize, keys: usize, state: &MlaState) -> Vec<f64> {
        let d = query.config.head_dim;
        let heads = query.q.row(r).chunks_exact(d).zip(query.weights.row(r));
        (0..keys)
            .map(|s| heads.clone().map(|(q, w)| w * relu(dot(q, state.index_keys.row(s)))).sum())
            .collect()
    }

    /// `f` for every row, with the state of its sequence and the number of keys it may see.
    fn causal<T>(
        states: &[SequenceRows<'_, MlaState>],
        mut f: impl FnMut(usize, usize, &MlaState) -> T,
    ) -> Vec<T> {
        let mut out = Vec::new();
        for s in states {
            for (i, row) in s.rows.clone().enumerate() {
                out.push(f(row, s.position + i + 1, s.state));
            }
        }
        out
    }
}

impl Device for Reference {
    type Act = Rows;
    type Linear = Matrix;
    type Vector = Vec<f64>;
    type KdaState = KdaState;
    type MlaState = MlaState;
    type Selection = Selection;
    const VALUE_BYTES: usize = 8;

    fn kind(&self) -> &'static str {
        "reference-f64"
    }

    fn deviation(&self) -> Option<&'static str> {
        None
    }

    fn load_linear(&self, weight: Matrix) -> Result<Matrix, DeviceError> {
        Ok(weight)
    }

    fn load_vector(&self, weight: &[f32]) -> Result<Vec<f64>, DeviceError> {
        Ok(weight.iter().map(|&w| f64::from(w)).collect())
    }

    fn upload(&self, width: usize, values: &[f32]) -> Result<Rows, DeviceError> {
        Ok(Rows::new(width, values.iter().map(|&v| f64::from(v)).collect()))
    }

    fn download(&self, x: &Rows) -> Result<Vec<f32>, DeviceError> {
        Ok(x.values.iter().map(|&v| v as f32).collect())
    }

    fn embed(&self, table: &Matrix, ids: &[u32]) -> Result<Rows, DeviceError> {
        let mut x = Rows::zeros(ids.len(), table.cols());
        for (r, &id) in ids.iter().enumerate() {
            table.row(id as usize).decode_f64(x.row_mut(r));
        }
        Ok(x)
    }

    fn linear(&self, weight: &Matrix, x: &Rows) -> Result<Rows, DeviceError> {
        let mut y = Rows::zeros(x.len(), weight.rows());
        matmul_f64(weight, x.len(), &x.values, &mut y.values);
        Ok(y)
    }

    fn rms_norm(&self, x: &Rows, gain: &Vec<f64>, eps: f64) -> Result<Rows, DeviceError> {
        Ok(Rows::new(x.width, x.values.chunks_exact(x.width).flat_map(|x| rms_norm(x, gain, eps)).collect()))
    }

    fn add(&self, acc: &mut Rows, y: &Rows) -> Result<(), DeviceError> {
        acc.values.iter_mut().zip(&y.values).for_each(|(a, y)| *a += y);
        Ok(())
    }

    fn select_rows(&self, x: &Rows, rows: &[usize]) -> Result<Rows, DeviceError> {
        Ok(Rows::new(x.width, rows.iter().flat_map(|&r| x.row(r)).copied().collect()))
    }

    fn situ_glu(&self, gate: &Rows, up: &Rows, caps: SituCaps) -> Result<Rows, DeviceError> {
        Ok(gate.map2(up, |g, u| situ_glu(g, u, caps.beta, caps.linear_beta)))
    }

    fn sigmoid_gate(&self, x: &Rows, gate: &Rows) -> Result<Rows, DeviceError> {
        Ok(x.map2(gate, |x, g| x * scalar::gate(g)))
    }

    fn attn_res_weights(
        &self,
        sources: &[&Rows],
        score: &Vec<f64>,
        eps: f64,
    ) -> Result<Vec<f32>, DeviceError> {
        let rows = 0..sources[0].len();
        Ok(rows.flat_map(|r| Self::attn_res_row(sources, r, score, eps)).map(|w| w as f32).collect())
    }

    fn attn_res_mix(&self, sources: &[&Rows], score: &Vec<f64>, eps: f64) -> Result<Rows, DeviceError> {
        let mut out = Rows::zeros(sources[0].len(), sources[0].width);
        for r in 0..out.len() {
            for (w, v) in Self::attn_res_row(sources, r, score, eps).iter().zip(sources) {
                out.row_mut(r).iter_mut().zip(v.row(r)).for_each(|(o, v)| *o += w * v);
            }
        }
        Ok(out)
    }

    fn new_kda_state(&self, config: &KdaConfig) -> Result<KdaState, DeviceError> {
        let (h, d, taps) = (config.num_heads, config.head_dim, config.short_conv_kernel_size);
        let window = vec![0.0; (taps - 1) * h * d];
        let conv = [window.clone(), window.clone(), window];
        Ok(KdaState { conv, s: vec![0.0; h * d * d], shape: (h, d), taps })
    }

    fn short_conv(
        &self,
        x: &Rows,
        taps: &Vec<f64>,
        which: Conv,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Result<Rows, DeviceError> {
        let kernel = taps.len() / x.width;
        let mut y = Rows::zeros(x.len(), x.width);
        for s in states {
            let window = &mut s.state.conv[which as usize];
            for r in s.rows.clone() {
                window.extend_from_slice(x.row(r));
                for (c, y) in y.row_mut(r).iter_mut().enumerate() {
                    let sum: f64 = (0..kernel).map(|j| taps[c * kernel + j] * window[j * x.width + c]).sum();
                    *y = silu(sum);
                }
                window.drain(..x.width);
            }
        }
        Ok(y)
    }

    fn kda_step(
        &self,
        step: KdaStep<'_, Self>,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Result<Rows, DeviceError> {
        let (heads, d) = (step.config.num_heads, step.config.head_dim);
        let normalised = |x: &[f64], scale: f64| -> Vec<f64> {
            let norm = (dot(x, x) + L2_NORM_EPS).sqrt();
            x.iter().map(|x| x / norm * scale).collect()
        };
        let mut out = Rows::zeros(step.q.len(), heads * d);
        for s in states {
            for r in s.rows.clone() {
                for h in 0..heads {
                    let head = h * d..(h + 1) * d;
                    let q = normalised(&step.q.row(r)[head.clone()], (d as f64).powf(-0.5));
                    let k = normalised(&step.k.row(r)[head.clone()], 1.0);
                    let v = &step.v.row(r)[head.clone()];
                    let beta = scalar::gate(step.beta.row(r)[h]);
                    // Row i of the state is key channel i.
                    let state = &mut s.state.s[h * d * d..(h + 1) * d * d];
                    for (i, row) in state.chunks_exact_mut(d).enumerate() {
                        let z = step.decay.row(r)[h * d + i] + step.dt_bias[h * d + i];
                        let alpha = kda_log_decay(z, step.a_log[h].exp(), step.config.gate_lower_bound).exp();
                        row.iter_mut().for_each(|s| *s *= alpha);
                    }
                    let mut read = vec![0.0; d];
                    for (row, k) in state.chunks_exact(d).zip(&k) {
                        read.iter_mut().zip(row).for_each(|(r, s)| *r += s * k);
                    }
                    let u: Vec<f64> = v.iter().zip(&read).map(|(v, read)| beta * (v - read)).collect();
                    for (row, k) in state.chunks_exact_mut(d).zip(&k) {
                        row.iter_mut().zip(&u).for_each(|(s, u)| *s += k * u);
                    }
                    let out = &mut out.row_mut(r)[head];
                    for (row, q) in state.chunks_exact(d).zip(&q) {
                        out.iter_mut().zip(row).for_each(|(o, s)| *o += s * q);
                    }
                }
            }
        }
        Ok(out)
    }

    fn gated_head_norm(&self, x: &Rows, gain: &Vec<f64>, gate: &Rows, eps: f64) -> Result<Rows, DeviceError> {
        let values = x.values.chunks_exact(gain.len()).flat_map(|head| rms_norm(head, gain, eps)).collect();
        self.sigmoid_gate(&Rows::new(x.width, values), gate)
    }

    fn new_mla_state(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
    ) -> Result<MlaState, DeviceError> {
        let empty = |width| Rows::new(width, Vec::new());
        Ok(MlaState {
            latent: empty(config.kv_lora_rank),
            extra: empty(config.qk_rope_head_dim),
            index_keys: empty(indexer.map_or(0, |i| i.head_dim)),
        })
    }

    fn mla_append(
        &self,
        kv: &Rows,
        latent_gain: &Vec<f64>,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Result<(), DeviceError> {
        for s in states {
            for r in s.rows.clone() {
                let (latent, extra) = kv.row(r).split_at(latent_gain.len());
                s.state.latent.values.extend(rms_norm(latent, latent_gain, eps));
                s.state.extra.values.extend_from_slice(extra);
            }
        }
        Ok(())
    }

    fn index_append(
        &self,
        k: &Rows,
        gain: &Vec<f64>,
        bias: &Vec<f64>,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Result<(), DeviceError> {
        for s in states {
            for r in s.rows.clone() {
                let y = k.row(r);
                let mean = y.iter().sum::<f64>() / y.len() as f64;
                let variance = y.iter().map(|y| (y - mean).powi(2)).sum::<f64>() / y.len() as f64;
                let scale = 1.0 / (variance + eps).sqrt();
                let normed = y.iter().zip(gain).zip(bias).map(|((y, g), b)| (y - mean) * scale * g + b);
                s.state.index_keys.values.extend(normed);
            }
        }
        Ok(())
    }

    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Selection, DeviceError> {
        let k = query.config.topk;
        let rows = Self::causal(states, |r, keys, state| {
            if keys <= k {
                return Selected::All;
            }
            let scores = Self::index_row(query, r, keys, state);
            Selected::by_score(&scores, k)
        });
        Ok(Selection { rows })
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
        Ok(Self::causal(states, |r, keys, state| {
            Self::index_row(query, r, keys, state).iter().map(|&s| s as f32).collect()
        }))
    }

    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Selection>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Result<Rows, DeviceError> {
        let c = attend.config;
        let (nope, rank) = (c.qk_nope_head_dim, c.kv_lora_rank);
        let scale = (c.qk_head_dim() as f64).powf(-0.5);
        let mut kv_b = Rows::zeros(attend.kv_b.rows(), rank);
        for r in 0..attend.kv_b.rows() {
            attend.kv_b.row(r).decode_f64(kv_b.row_mut(r));
        }
        let out = Self::causal(states, |row, keys, state| {
            let Some(positions) = selection.map_or(&Selected::All, |s| &s.rows[row]).ascending(keys) else {
                return vec![f64::NAN; c.output_size()];
            };
            let mut out = Vec::with_capacity(c.output_size());
            for (h, q) in attend.q.row(row).chunks_exact(c.qk_head_dim()).enumerate() {
                let b = h * (nope + c.v_head_dim);
                let mut ql = vec![0.0; rank];
                for (i, q) in q[..nope].iter().enumerate() {
                    ql.iter_mut().zip(kv_b.row(b + i)).for_each(|(l, w)| *l += w * q);
                }
                let mut p: Vec<f64> = positions
                    .iter()
                    .map(|&s| (dot(&ql, state.latent.row(s)) + dot(&q[nope..], state.extra.row(s))) * scale)
                    .collect();
                softmax(&mut p);
                let mut a = vec![0.0; rank];
                for (p, &s) in p.iter().zip(&positions) {
                    a.iter_mut().zip(state.latent.row(s)).for_each(|(a, c)| *a += p * c);
                }
                out.extend((0..c.v_head_dim).map(|i| dot(kv_b.row(b + nope + i), &a)));
            }
            out
        });
        Ok(Rows::new(c.output_size(), out.concat()))
    }

    fn route(&self, logits: &Rows, bias: &Vec<f64>, rule: RouterRule) -> Result<Routing, DeviceError> {
        let mut routing = Routing::with_rows(rule.experts_per_token, logits.len());
        for r in 0..logits.len() {
            let s: Vec<f64> = logits.row(r).iter().map(|&l| sigmoid(l)).collect();
            let biased: Vec<f64> = s.iter().zip(bias).map(|(s, b)| s + b).collect();
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
        for (expert, uses) in experts {
            for u in uses {
                let z = self.select_rows(z, &[u.row])?;
                let (gate, up) = (self.linear(&expert.w1, &z)?, self.linear(&expert.w3, &z)?);
                let inner = self.situ_glu(&gate, &up, caps)?;
                out.row_mut(u.slot).copy_from_slice(&self.linear(&expert.w2, &inner)?.values);
            }
        }
        Ok(None)
    }

    fn expert_sum(&self, outputs: &Rows, routing: &Routing) -> Result<Rows, DeviceError> {
        let k = routing.experts_per_token;
        let mut sum = Rows::zeros(outputs.len() / k, outputs.width);
        for (slot, &w) in routing.weights.iter().enumerate() {
            sum.row_mut(slot / k).iter_mut().zip(outputs.row(slot)).for_each(|(y, f)| *y += w * f);
        }
        Ok(sum)
    }

    fn copy_kda(&self, state: &KdaState) -> Result<KdaState, DeviceError> {
        Ok(state.clone())
    }

    fn copy_mla(&self, state: &MlaState) -> Result<MlaState, DeviceError> {
        Ok(state.clone())
    }

    fn export_kda(&self, state: &KdaState) -> Result<Vec<StateTensor>, DeviceError> {
        let (h, d) = state.shape;
        Ok(vec![
            StateTensor {
                name: "conv",
                shape: vec![3, state.taps - 1, h * d],
                values: StateValues::F64(state.conv.concat()),
            },
            StateTensor { name: "state", shape: vec![h, d, d], values: StateValues::F64(state.s.clone()) },
        ])
    }

    fn import_kda(&self, config: &KdaConfig, parts: &[StateTensor]) -> Result<KdaState, DeviceError> {
        let (h, d, taps) = (config.num_heads, config.head_dim, config.short_conv_kernel_size);
        let [conv, s] = take_parts(parts, [("conv", &[3, taps - 1, h * d]), ("state", &[h, d, d])])?;
        let window = (taps - 1) * h * d;
        let third = |i: usize| conv[i * window..(i + 1) * window].to_vec();
        let conv = [third(0), third(1), third(2)];
        Ok(KdaState { conv, s, shape: (h, d), taps })
    }

    fn export_mla(&self, state: &MlaState) -> Result<Vec<StateTensor>, DeviceError> {
        let part = |name, rows: &Rows, tokens| StateTensor {
            name,
            shape: vec![tokens, rows.width],
            values: StateValues::F64(rows.values.clone()),
        };
        let tokens = state.latent.len();
        Ok(vec![
            part("latent", &state.latent, tokens),
            part("extra_key", &state.extra, tokens),
            part("index_key", &state.index_keys, tokens),
        ])
    }

    fn import_mla(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<MlaState, DeviceError> {
        let widths = [config.kv_lora_rank, config.qk_rope_head_dim, indexer.map_or(0, |i| i.head_dim)];
        let [latent, extra, index_keys] = take_parts(
            parts,
            [
                ("latent", &[tokens, widths[0]]),
                ("extra_key", &[tokens, widths[1]]),
                ("index_key", &[tokens, widths[2]]),
            ],
        )?;
        Ok(MlaState {
            latent: Rows::new(widths[0], latent),
            extra: Rows::new(widths[1], extra),
            index_keys: Rows::new(widths[2], index_keys),
        })
    }
}
