//! Gated MLA in the absorbed form, and the Lightning Indexer, on the host.

use k3_format::{IndexerConfig, MlaConfig};
use k3_quant::cpu::dot_f32;
use rayon::prelude::*;

use super::{Cpu, Rows, rms_norm, softmax};
use crate::device::{
    DeviceError, IndexQuery, MlaAttend, Selected, Selection, SequenceRows, StateTensor, StateValues,
    take_parts,
};

/// Keys whose weighted latents are summed before they join the total, by place among the attended keys.
const KEY_BLOCK: usize = 64;

/// State of a full-attention layer.
#[derive(Clone, Debug)]
pub struct MlaState {
    /// `[tokens, kv_lora]`
    latent: Rows,
    /// `[tokens, extra]`
    extra: Rows,
    /// `[tokens, head_dim]`; width 0 without an indexer.
    index_keys: Rows,
}

impl MlaState {
    pub(super) fn new(config: &MlaConfig, indexer: Option<&IndexerConfig>) -> Self {
        let empty = |width| Rows { width, values: Vec::new() };
        Self {
            latent: empty(config.kv_lora_rank),
            extra: empty(config.qk_rope_head_dim),
            index_keys: empty(indexer.map_or(0, |i| i.head_dim)),
        }
    }

    pub(super) fn export(&self) -> Vec<StateTensor> {
        let tokens = self.latent.len();
        let part = |name, rows: &Rows| StateTensor {
            name,
            shape: vec![tokens, rows.width],
            values: StateValues::F32(rows.values.clone()),
        };
        vec![
            part("latent", &self.latent),
            part("extra_key", &self.extra),
            part("index_key", &self.index_keys),
        ]
    }

    pub(super) fn import(
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<Self, DeviceError> {
        let mut state = Self::new(config, indexer);
        let [latent, extra, index_keys] = take_parts(
            parts,
            [
                ("latent", &[tokens, state.latent.width]),
                ("extra_key", &[tokens, state.extra.width]),
                ("index_key", &[tokens, state.index_keys.width]),
            ],
        )?;
        (state.latent.values, state.extra.values, state.index_keys.values) = (latent, extra, index_keys);
        Ok(state)
    }
}

/// `docs/arithmetic.md` 6: the norm covers the latent only, the extra key stays raw.
pub(super) fn append(kv: &Rows, gain: &[f32], eps: f64, states: &mut [SequenceRows<'_, MlaState>]) {
    let mut normed = vec![0.0; gain.len()];
    for s in states {
        for r in s.rows.clone() {
            let (latent, extra) = kv.row(r).split_at(gain.len());
            rms_norm(latent, gain, eps, &mut normed);
            s.state.latent.values.extend_from_slice(&normed);
            s.state.extra.values.extend_from_slice(extra);
        }
    }
}

/// LayerNorm with biased variance (`docs/arithmetic.md` 7.1).
pub(super) fn index_append(
    k: &Rows,
    gain: &[f32],
    bias: &[f32],
    eps: f64,
    states: &mut [SequenceRows<'_, MlaState>],
) {
    for s in states {
        for r in s.rows.clone() {
            let y = k.row(r);
            let n = y.len() as f64;
            let mean = y.iter().map(|&y| f64::from(y)).sum::<f64>() / n;
            let variance = y.iter().map(|&y| (f64::from(y) - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (variance + eps).sqrt();
            s.state.index_keys.values.extend(
                y.iter().zip(gain.iter().zip(bias)).map(|(&y, (&g, &b))| {
                    ((f64::from(y) - mean) * scale * f64::from(g) + f64::from(b)) as f32
                }),
            );
        }
    }
}

/// `f` for every row: its index, the number of keys it may see, and its sequence's state.
fn causal<T: Send>(
    states: &[SequenceRows<'_, MlaState>],
    f: impl Fn(usize, usize, &MlaState) -> T + Sync,
) -> Vec<T> {
    let rows: Vec<(usize, usize, &MlaState)> = states
        .iter()
        .flat_map(|s| s.rows.clone().enumerate().map(|(i, r)| (r, s.position + i + 1, &*s.state)))
        .collect();
    rows.into_par_iter().map(|(r, keys, state)| f(r, keys, state)).collect()
}

/// `sum_h w_h relu(q_h . k_s)` for positions `0..keys`; heads summed in order, no constant factors.
fn index_row(query: IndexQuery<'_, Cpu>, r: usize, keys: usize, state: &MlaState) -> Vec<f32> {
    let d = query.config.head_dim;
    let (q, weights) = (query.q.row(r), query.weights.row(r));
    let keys = state.index_keys.values[..keys * d].par_chunks_exact(d);
    keys.with_min_len(256)
        .map(|key| {
            let heads = q.chunks_exact(d).zip(weights);
            // Not `max`: it would turn a NaN into 0 and hide it.
            let relu = |x: f32| if x < 0.0 { 0.0 } else { x };
            heads.fold(0.0, |sum, (q, w)| sum + w * relu(dot_f32(q, key)))
        })
        .collect()
}

pub(super) fn index_scores(
    query: IndexQuery<'_, Cpu>,
    states: &[SequenceRows<'_, MlaState>],
) -> Vec<Vec<f32>> {
    causal(states, |r, keys, state| index_row(query, r, keys, state))
}

/// `docs/arithmetic.md` 7.2.
pub(super) fn index_select(query: IndexQuery<'_, Cpu>, states: &[SequenceRows<'_, MlaState>]) -> Selection {
    let k = query.config.topk;
    let rows = causal(states, |r, keys, state| {
        if keys <= k {
            return Selected::All;
        }
        let scores = index_row(query, r, keys, state);
        Selected::by_score(&scores, k)
    });
    Selection { rows }
}

/// `docs/arithmetic.md` 6, absorbed. One task a row and head.
pub(super) fn attend(
    args: &MlaAttend<'_, Cpu>,
    selection: Option<&Selection>,
    states: &[SequenceRows<'_, MlaState>],
) -> Rows {
    let c = args.config;
    let rows = causal(states, |r, keys, state| {
        let Some(positions) = selection.map_or(&Selected::All, |s| &s.rows[r]).ascending(keys) else {
            return vec![f32::NAN; c.output_size()];
        };
        let mut out = vec![0.0; c.output_size()];
        out.par_chunks_exact_mut(c.v_head_dim)
            .enumerate()
            .for_each(|(h, out)| attend_head(args, h, r, &positions, state, out));
        out
    });
    Rows { width: c.output_size(), values: rows.concat() }
}

fn attend_head(
    args: &MlaAttend<'_, Cpu>,
    h: usize,
    r: usize,
    positions: &[usize],
    state: &MlaState,
    out: &mut [f32],
) {
    let c = args.config;
    let (nope, rank) = (c.qk_nope_head_dim, c.kv_lora_rank);
    let scale = (1.0 / (c.qk_head_dim() as f64).sqrt()) as f32;
    let q = &args.q.row(r)[h * c.qk_head_dim()..(h + 1) * c.qk_head_dim()];
    let first = h * (nope + c.v_head_dim);

    let mut weight_row = vec![0.0; rank];
    let mut ql = vec![0.0; rank];
    for (i, q) in q[..nope].iter().enumerate() {
        args.kv_b.row(first + i).decode_f32(&mut weight_row);
        ql.iter_mut().zip(&weight_row).for_each(|(l, w)| *l += w * q);
    }
    let score =
        |&s: &usize| (dot_f32(&ql, state.latent.row(s)) + dot_f32(&q[nope..], state.extra.row(s))) * scale;
    let mut p: Vec<f32> = positions.iter().map(score).collect();
    softmax(&mut p);

    let mut total = vec![0.0_f64; rank];
    let mut block = vec![0.0; rank];
    for (p, positions) in p.chunks(KEY_BLOCK).zip(positions.chunks(KEY_BLOCK)) {
        block.fill(0.0);
        for (p, &s) in p.iter().zip(positions) {
            block.iter_mut().zip(state.latent.row(s)).for_each(|(b, c)| *b += p * c);
        }
        total.iter_mut().zip(&block).for_each(|(t, b)| *t += f64::from(*b));
    }
    let a: Vec<f32> = total.iter().map(|&t| t as f32).collect();
    for (i, out) in out.iter_mut().enumerate() {
        args.kv_b.row(first + nope + i).decode_f32(&mut weight_row);
        *out = dot_f32(&weight_row, &a);
    }
}
