//! Gated MLA in the absorbed form on the host, the same for prefill and decode.
//!
//! `docs/arithmetic.md` 6 for some rows at a time, shared among threads by heads. A tile takes its heads through three steps:
//! queries times key weights; scores, softmax and weighted latents for queries that see the same keys; latents times value
//! weights. Weights are read once for all rows of a step, and latents once for all queries that attend together.

use std::ops::Range;

use k3_format::{IndexerConfig, MlaConfig};
use k3_quant::cpu::vector::Vectors;
use k3_quant::{Matrix, Row as StoredRow, bf16};

use super::index::Keys;
use super::rows::{Rows, Strips};
use super::{Cpu, rms_norm};
use crate::device::{
    DeviceError, MlaAttend, Selected, Selection, SequenceRows, StateTensor, StateValues, take_parts,
};

/// Keys whose weighted latents are summed before they join the total, by place among the attended keys.
const KEY_BLOCK: usize = 64;
/// Rows of a step: their absorbed queries are in memory at once.
const STEP_ROWS: usize = 32;
/// Heads of a tile, at most.
const TILE_HEADS: usize = 8;
/// Scores of one head for several rows that attend together, at most.
const GROUP_SCORES: usize = 1 << 22;
/// Products that one thread adds in a nanosecond, about.
const PRODUCTS: usize = 20;

/// Heads of a row that attend together: as many as leave every thread some tiles, and four or eight if it can be, since
/// products take four queries together.
fn heads_together(heads: usize, threads: usize) -> usize {
    let few = (heads / (2 * threads)).clamp(1, TILE_HEADS);
    if few > 4 { few / 4 * 4 } else { few }
}

/// Bytes of each of so many threads that attends `keys`: the scores of what attends together.
pub(super) fn score_bytes(keys: usize, heads: usize, threads: usize) -> u64 {
    let one_row = heads_together(heads, threads).saturating_mul(keys);
    let several_rows = GROUP_SCORES.min(STEP_ROWS.saturating_mul(keys));
    (one_row.max(several_rows) as u64).saturating_mul(size_of::<f32>() as u64)
}

/// State of a full-attention layer.
#[derive(Clone, Debug)]
pub struct MlaState {
    /// `[tokens, kv_lora]`
    latent: Rows,
    /// `[tokens, extra]`
    extra: Rows,
    index_keys: Keys,
}

impl MlaState {
    pub(super) fn new(config: &MlaConfig, indexer: Option<&IndexerConfig>) -> Self {
        Self {
            latent: Rows::new(config.kv_lora_rank, Vec::new()),
            extra: Rows::new(config.qk_rope_head_dim, Vec::new()),
            index_keys: Keys::new(indexer.map_or(0, |i| i.head_dim)),
        }
    }

    pub(super) fn index_keys(&self) -> &Keys {
        &self.index_keys
    }

    pub(super) fn index_keys_mut(&mut self) -> &mut Keys {
        &mut self.index_keys
    }

    pub(super) fn export(&self) -> Vec<StateTensor> {
        let tokens = self.latent.len();
        let part = |name, width, values| StateTensor {
            name,
            shape: vec![tokens, width],
            values: StateValues::F32(values),
        };
        vec![
            part("latent", self.latent.width(), self.latent.values().to_vec()),
            part("extra_key", self.extra.width(), self.extra.values().to_vec()),
            part("index_key", self.index_keys.dim(), self.index_keys.values().to_vec()),
        ]
    }

    pub(super) fn import(
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<Self, DeviceError> {
        let mut state = Self::new(config, indexer);
        let dim = state.index_keys.dim();
        let [latent, extra, index_keys] = take_parts(
            parts,
            [
                ("latent", &[tokens, state.latent.width()]),
                ("extra_key", &[tokens, state.extra.width()]),
                ("index_key", &[tokens, dim]),
            ],
        )?;
        state.latent.extend(&latent);
        state.extra.extend(&extra);
        for key in index_keys.chunks_exact(dim.max(1)) {
            state.index_keys.push(key);
        }
        Ok(state)
    }
}

/// `docs/arithmetic.md` 6: the norm covers the latent only, the extra key stays raw.
pub(super) fn append(
    vectors: Vectors,
    kv: &Rows,
    gain: &[f32],
    eps: f64,
    states: &mut [SequenceRows<'_, MlaState>],
) {
    let mut normed = vec![0.0; gain.len()];
    for s in states {
        for r in s.rows.clone() {
            let (latent, extra) = kv.row(r).split_at(gain.len());
            rms_norm(vectors, latent, gain, eps, &mut normed);
            s.state.latent.extend(&normed);
            s.state.extra.extend(extra);
        }
    }
}

/// A row of the batch.
struct Row<'a> {
    /// Which.
    r: usize,
    state: &'a MlaState,
    /// Positions that it may see.
    visible: usize,
    /// Those that it attends, ascending; `None`: all.
    positions: Option<Vec<usize>>,
    /// Whether it attends nothing and comes out as NaN.
    lost: bool,
}

impl<'a> Row<'a> {
    fn new(r: usize, visible: usize, state: &'a MlaState, selected: &Selected) -> Self {
        let (positions, lost) = match selected {
            Selected::All => (None, false),
            Selected::Keys(_) => (selected.ascending(visible), false),
            Selected::NonFinite => (None, true),
        };
        Self { r, state, visible, positions, lost }
    }

    fn keys(&self) -> usize {
        self.positions.as_ref().map_or(self.visible, Vec::len)
    }

    /// Whether both attend all positions of one sequence.
    fn goes_with(&self, other: &Self) -> bool {
        let all = |row: &Self| row.positions.is_none() && !row.lost;
        all(self) && all(other) && std::ptr::eq(self.state, other.state)
    }

    /// Rows `keys` among those attended of `cache`.
    fn cached<'c>(&self, cache: &'c Rows, keys: Range<usize>, out: &mut Vec<&'c [f32]>) {
        out.clear();
        match &self.positions {
            Some(positions) => out.extend(positions[keys].iter().map(|&p| cache.row(p))),
            None => out.extend(keys.map(|p| cache.row(p))),
        }
    }
}

/// `docs/arithmetic.md` 6, absorbed.
pub(super) fn attend(
    device: &Cpu,
    args: &MlaAttend<'_, Cpu>,
    selection: Option<&Selection>,
    states: &[SequenceRows<'_, MlaState>],
) -> Rows {
    let mut out = Rows::zeros(args.q.len(), args.config.output_size());
    let mut outputs: Vec<Option<&mut [f32]>> = out.rows_mut().map(Some).collect();
    let row = |s: &SequenceRows<'_, MlaState>, r: usize| (r, s.position + r - s.rows.start + 1);
    let mut rows = states.iter().flat_map(|s| {
        s.rows.clone().map(move |r| {
            let (r, visible) = row(s, r);
            Row::new(r, visible, s.state, selection.map_or(&Selected::All, |s| &s.rows[r]))
        })
    });
    loop {
        let rows: Vec<Row<'_>> = rows.by_ref().take(STEP_ROWS).collect();
        if rows.is_empty() {
            return out;
        }
        let outputs = rows.iter().filter_map(|row| outputs[row.r].take()).collect();
        Step { device, args, rows: &rows }.run(outputs);
    }
}

/// Some rows at work.
struct Step<'a> {
    device: &'a Cpu,
    args: &'a MlaAttend<'a, Cpu>,
    rows: &'a [Row<'a>],
}

/// Room for one thread's tiles.
#[derive(Default)]
struct Buffers {
    /// Decoded weights, and the part of queries or outputs that goes with them.
    weights: Vec<f32>,
    block: Vec<f32>,
    queries: Vec<f32>,
    latents: Vec<f32>,
    attention: Attention,
}

/// Room for queries that attend together.
#[derive(Default)]
struct Attention {
    latent_queries: Vec<f32>,
    extra_queries: Vec<f32>,
    scores: Vec<f32>,
    block: Vec<f32>,
    extra_block: Vec<f32>,
    sums: Vec<f32>,
    totals: Vec<f64>,
}

/// `len` zeros.
fn zeros<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    /// The next row sees a key more: room for some of them, and not for twice as many.
    const ROOM: usize = 1 << 12;
    buffer.clear();
    if buffer.capacity() < len {
        // The old one goes first: of a long context each has megabytes.
        *buffer = Vec::new();
        buffer.reserve_exact(len.next_multiple_of(ROOM));
    }
    buffer.resize(len, T::default());
    buffer
}

impl Step<'_> {
    fn run(&self, mut outputs: Vec<&mut [f32]>) {
        let (c, n) = (self.args.config, self.rows.len());
        let weights = (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank * (n + 2);
        let keys: usize = self.rows.iter().map(Row::keys).sum();
        let cached = keys * (2 * c.kv_lora_rank + c.qk_rope_head_dim);
        let nanoseconds = c.num_heads * (weights + cached) / PRODUCTS;

        let few = heads_together(c.num_heads, self.device.threads.count());
        let groups = self.groups(few);
        // Where many rows read a key once for all of them, a head needs no others beside it.
        let heads = if groups.iter().all(|rows| rows.len() >= few) { 1 } else { few };
        let tiles = Strips::new(outputs.iter_mut().map(|out| &mut **out), move |_| heads * c.v_head_dim);
        self.device.threads.share_with(nanoseconds, tiles, Buffers::default, |buffers, (columns, out)| {
            self.tile(columns.start / c.v_head_dim..columns.end / c.v_head_dim, &groups, buffers, out);
        });
        for (row, out) in self.rows.iter().zip(outputs) {
            if row.lost {
                out.fill(f32::NAN);
            }
        }
    }

    /// Places in [`Step::rows`] of those that attend together: `few` at least that see the same keys, or one. Rows that attend
    /// nothing are in none.
    fn groups(&self, few: usize) -> Vec<Range<usize>> {
        let mut groups = Vec::new();
        let mut row = 0;
        while row < self.rows.len() {
            let most = (GROUP_SCORES / self.rows[row].keys().max(1)).clamp(1, STEP_ROWS);
            let all = self.rows[row..].iter().take(most);
            let same = all.take_while(|r| self.rows[row].goes_with(r)).count();
            let group = row..row + if same >= few { same } else { 1 };
            row = group.end;
            if !self.rows[group.start].lost {
                groups.push(group);
            }
        }
        groups
    }

    /// All of some heads; `outputs` has their columns of every row.
    fn tile(
        &self,
        heads: Range<usize>,
        groups: &[Range<usize>],
        buffers: &mut Buffers,
        mut outputs: Vec<&mut [f32]>,
    ) {
        let Buffers { weights, block, queries, latents, attention } = buffers;
        let (c, n) = (self.args.config, self.rows.len());
        let a_head = n * c.kv_lora_rank;
        // Both `[heads, rows, kv_lora]`.
        let queries = zeros(queries, heads.len() * a_head);
        for (h, queries) in heads.clone().zip(queries.chunks_exact_mut(a_head)) {
            self.absorb(h, weights, block, queries);
        }
        let latents = zeros(latents, heads.len() * a_head);
        for rows in groups {
            let together = if rows.len() > 1 { 1 } else { heads.len() };
            let parts = queries.chunks(together * a_head).zip(latents.chunks_mut(together * a_head));
            for (first, (queries, latents)) in heads.clone().step_by(together).zip(parts) {
                self.attend(rows.clone(), first..first + together, queries, attention, latents);
            }
        }
        for (h, latents) in heads.zip(latents.chunks_exact(a_head)) {
            let outputs = outputs.iter_mut().filter_map(|out| out.split_off_mut(..c.v_head_dim));
            self.expand(h, latents, weights, block, outputs);
        }
    }

    fn query(&self, row: usize, h: usize) -> &[f32] {
        let width = self.args.config.qk_head_dim();
        &self.args.q.row(self.rows[row].r)[h * width..(h + 1) * width]
    }

    /// The queries of head `h` times its key weights: `[rows, kv_lora]`, zeros at first.
    fn absorb(&self, h: usize, weights: &mut Vec<f32>, block: &mut Vec<f32>, out: &mut [f32]) {
        let (c, vectors) = (self.args.config, self.device.vectors);
        let first = h * (c.qk_nope_head_dim + c.v_head_dim);
        block.clear();
        (0..self.rows.len())
            .for_each(|row| block.extend_from_slice(&self.query(row, h)[..c.qk_nope_head_dim]));
        match weight_rows(self.args.kv_b, first..first + c.qk_nope_head_dim, weights) {
            WeightRows::Bf16(keys) => vectors.add_weight_products(block, &keys, out),
            WeightRows::F32(keys) => vectors.add_products(block, &keys, out),
        }
    }

    /// The latents of head `h`, `[rows, kv_lora]`, times its value weights.
    fn expand<'o>(
        &self,
        h: usize,
        latents: &[f32],
        weights: &mut Vec<f32>,
        block: &mut Vec<f32>,
        out: impl Iterator<Item = &'o mut [f32]>,
    ) {
        let (c, vectors) = (self.args.config, self.device.vectors);
        let first = h * (c.qk_nope_head_dim + c.v_head_dim) + c.qk_nope_head_dim;
        let block = zeros(block, self.rows.len() * c.v_head_dim);
        match weight_rows(self.args.kv_b, first..first + c.v_head_dim, weights) {
            WeightRows::Bf16(values) => vectors.weight_dots(c.kv_lora_rank, latents, &values, block),
            WeightRows::F32(values) => vectors.dots(c.kv_lora_rank, latents, &values, block),
        }
        out.zip(block.chunks_exact(c.v_head_dim)).for_each(|(out, block)| out.copy_from_slice(block));
    }

    /// `rows` attend with `heads`, whose `queries` and `latents` are `[heads, all rows, kv_lora]`.
    fn attend(
        &self,
        rows: Range<usize>,
        heads: Range<usize>,
        queries: &[f32],
        buffers: &mut Attention,
        latents: &mut [f32],
    ) {
        let (c, n) = (self.args.config, self.rows.len());
        let (rank, extra) = (c.kv_lora_rank, c.qk_rope_head_dim);
        let scale = (1.0 / (c.qk_head_dim() as f64).sqrt()) as f32;
        let vectors = self.device.vectors;
        // Places of the queries, by row and head.
        let places: Vec<usize> =
            rows.clone().flat_map(|row| (0..heads.len()).map(move |h| h * n + row)).collect();
        let m = places.len();

        let (latent_queries, extra_queries) = (&mut buffers.latent_queries, &mut buffers.extra_queries);
        latent_queries.clear();
        extra_queries.clear();
        places.iter().for_each(|at| latent_queries.extend_from_slice(&queries[at * rank..][..rank]));
        for row in rows.clone() {
            for h in heads.clone() {
                extra_queries.extend_from_slice(&self.query(row, h)[c.qk_nope_head_dim..]);
            }
        }
        let (heads, rows) = (heads.len(), &self.rows[rows]);
        // Rows that go together are in order of position: the last sees all that any sees.
        let Some(last) = rows.last() else { return };
        let keys = last.keys();

        // `[m, keys]`
        let scores = zeros(&mut buffers.scores, m * keys);
        let mut cached = Vec::with_capacity(KEY_BLOCK);
        for first in (0..keys).step_by(KEY_BLOCK) {
            let block = first..keys.min(first + KEY_BLOCK);
            let len = block.len();
            last.cached(&last.state.latent, block.clone(), &mut cached);
            let latent_scores = zeros(&mut buffers.block, m * len);
            vectors.dots(rank, latent_queries, &cached, latent_scores);
            last.cached(&last.state.extra, block.clone(), &mut cached);
            let extra_scores = zeros(&mut buffers.extra_block, m * len);
            vectors.dots(extra, extra_queries, &cached, extra_scores);
            for (i, scores) in scores.chunks_exact_mut(keys).enumerate() {
                let at = i * len..(i + 1) * len;
                let both = latent_scores[at.clone()].iter().zip(&extra_scores[at]);
                scores[block.clone()].iter_mut().zip(both).for_each(|(s, (l, e))| *s = (l + e) * scale);
            }
        }
        for (i, scores) in scores.chunks_exact_mut(keys).enumerate() {
            vectors.softmax(&mut scores[..rows[i / heads].keys()]);
        }

        let totals = zeros(&mut buffers.totals, m * rank);
        for first in (0..keys).step_by(KEY_BLOCK) {
            let block = first..keys.min(first + KEY_BLOCK);
            last.cached(&last.state.latent, block.clone(), &mut cached);
            let mut i = 0;
            while i < m {
                // A row that sees a part of the block is on its own; the others of the task see all of it.
                let seen = rows[i / heads].keys().clamp(block.start, block.end) - block.start;
                let together = if seen == block.len() { m - i } else { heads };
                let weights = &mut buffers.block;
                weights.clear();
                for scores in scores[i * keys..].chunks_exact(keys).take(together) {
                    weights.extend_from_slice(&scores[first..first + seen]);
                }
                let sums = zeros(&mut buffers.sums, together * rank);
                vectors.add_products(weights, &cached[..seen], sums);
                if seen > 0 {
                    let totals = &mut totals[i * rank..(i + together) * rank];
                    totals.iter_mut().zip(sums).for_each(|(t, s)| *t += f64::from(*s));
                }
                i += together;
            }
        }
        for (at, totals) in places.into_iter().zip(totals.chunks_exact(rank)) {
            latents[at * rank..][..rank].iter_mut().zip(totals).for_each(|(l, t)| *l = *t as f32);
        }
    }
}

/// Rows of a matrix, as the products take them.
enum WeightRows<'a> {
    Bf16(Vec<&'a [bf16]>),
    F32(Vec<&'a [f32]>),
}

/// Some rows of `weight`; those of other formats than BF16 are decoded into `buffer`.
fn weight_rows<'a>(weight: &'a Matrix, rows: Range<usize>, buffer: &'a mut Vec<f32>) -> WeightRows<'a> {
    let stored = rows.clone().map(|r| match weight.row(r) {
        StoredRow::Bf16(row) => Some(row),
        _ => None,
    });
    if let Some(rows) = stored.collect() {
        return WeightRows::Bf16(rows);
    }
    let width = weight.cols();
    buffer.resize(rows.len() * width, 0.0);
    rows.zip(buffer.chunks_exact_mut(width)).for_each(|(r, out)| weight.row(r).decode_f32(out));
    WeightRows::F32(buffer.chunks_exact(width).collect())
}
