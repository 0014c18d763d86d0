//! Gated MLA in the absorbed form on the host, the same for prefill and decode.
//!
//! `docs/arithmetic.md` 6 in three steps for some rows at a time, each shared among threads: the queries of a head times its
//! key weights; scores, softmax and weighted latents for queries that see the same keys; the latents of a head times its
//! value weights. Weights are decoded once for all rows of a step, and latents are read once for all queries of a task.

use std::ops::Range;

use k3_format::{IndexerConfig, MlaConfig};
use k3_quant::cpu::vector::Vectors;
use k3_quant::{Matrix, Row as WeightRow};

use super::index::Keys;
use super::rows::{Rows, Strips};
use super::{Cpu, rms_norm};
use crate::device::{
    DeviceError, MlaAttend, Selected, Selection, SequenceRows, StateTensor, StateValues, take_parts,
};

/// Keys whose weighted latents are summed before they join the total, by place among the attended keys.
const KEY_BLOCK: usize = 64;
/// Rows whose absorbed queries are in memory at once.
const STEP_ROWS: usize = 32;
/// Rows of one head that attend together.
const TASK_ROWS: usize = 32;
/// Heads of one row that attend together.
const TASK_HEADS: usize = 8;
/// Scores of a task with several rows, at most.
const TASK_SCORES: usize = 1 << 22;
/// Weight rows that are decoded together: with a row of results they stay in the first-level cache.
const WEIGHT_ROWS: usize = 12;
/// Products that one thread adds in a nanosecond, about.
const PRODUCTS: usize = 20;

/// Heads of one row that attend together: as many as leave every thread some tasks.
fn heads_together(heads: usize, threads: usize) -> usize {
    (heads / (2 * threads)).clamp(1, TASK_HEADS)
}

/// Bytes of each of so many threads that attends `keys`: the scores of a task.
pub(super) fn score_bytes(keys: usize, heads: usize, threads: usize) -> u64 {
    let one_row = heads_together(heads, threads).saturating_mul(keys);
    let several_rows = TASK_SCORES.min(TASK_ROWS.saturating_mul(keys));
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

/// Queries that see the same keys.
struct Task<'a> {
    /// Places in [`Step::rows`].
    rows: Range<usize>,
    heads: Range<usize>,
    /// A latent `[kv_lora]` for each of them, by row and head.
    out: Vec<&'a mut [f32]>,
}

/// Room for one thread's tasks.
#[derive(Default)]
struct Buffers {
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
        let rank = c.kv_lora_rank;
        let weights = c.num_heads * rank * (n + 2) / PRODUCTS;

        // `[heads, rows, kv_lora]`
        let mut queries = vec![0.0; c.num_heads * n * rank];
        let tiles = queries.chunks_exact_mut(n * rank).enumerate();
        let own = || (Vec::new(), Vec::new());
        self.device.threads.share_with(weights * c.qk_nope_head_dim, tiles, own, |(weights, q), (h, out)| {
            self.absorb(h, weights, q, out);
        });

        let mut latents = vec![0.0; c.num_heads * n * rank];
        let tasks = self.tasks(&mut latents);
        let keys: usize = self.rows.iter().map(Row::keys).sum();
        let nanoseconds = keys * c.num_heads * (2 * rank + c.qk_rope_head_dim) / PRODUCTS;
        self.device.threads.share_with(nanoseconds, tasks.into_iter(), Buffers::default, |buffers, task| {
            self.task(&queries, buffers, task);
        });

        let strips = Strips::new(outputs.iter_mut().map(|out| &mut **out), |_| c.v_head_dim);
        let tiles = latents.chunks_exact(n * rank).enumerate().zip(strips);
        self.device.threads.share_with(
            weights * c.v_head_dim,
            tiles,
            own,
            |(weights, out), ((h, latents), (_, rows))| {
                self.expand(h, latents, weights, out, rows);
            },
        );
        for (row, out) in self.rows.iter().zip(outputs) {
            if row.lost {
                out.fill(f32::NAN);
            }
        }
    }

    fn query(&self, row: usize, h: usize) -> &[f32] {
        let width = self.args.config.qk_head_dim();
        &self.args.q.row(self.rows[row].r)[h * width..(h + 1) * width]
    }

    /// The queries of head `h` times its key weights: `[rows, kv_lora]`, zeros at first.
    fn absorb(&self, h: usize, weights: &mut Vec<f32>, q: &mut Vec<f32>, out: &mut [f32]) {
        let (c, vectors) = (self.args.config, self.device.vectors);
        let first = h * (c.qk_nope_head_dim + c.v_head_dim);
        for keys in blocks(first..first + c.qk_nope_head_dim) {
            let dims = keys.start - first..keys.end - first;
            q.clear();
            (0..self.rows.len()).for_each(|row| q.extend_from_slice(&self.query(row, h)[dims.clone()]));
            vectors.add_products(q, &decoded(vectors, self.args.kv_b, keys, weights), out);
        }
    }

    /// The latents of head `h`, `[rows, kv_lora]`, times its value weights.
    fn expand(
        &self,
        h: usize,
        latents: &[f32],
        weights: &mut Vec<f32>,
        block: &mut Vec<f32>,
        mut out: Vec<&mut [f32]>,
    ) {
        let (c, vectors) = (self.args.config, self.device.vectors);
        let first = h * (c.qk_nope_head_dim + c.v_head_dim) + c.qk_nope_head_dim;
        for values in blocks(first..first + c.v_head_dim) {
            let dims = values.start - first..values.end - first;
            let block = zeros(block, out.len() * dims.len());
            let values = decoded(vectors, self.args.kv_b, values, weights);
            vectors.dots(c.kv_lora_rank, latents, &values, block);
            for (out, block) in out.iter_mut().zip(block.chunks_exact(dims.len())) {
                out[dims.clone()].copy_from_slice(block);
            }
        }
    }

    /// `latents` is `[heads, rows, kv_lora]`.
    fn tasks<'l>(&self, latents: &'l mut [f32]) -> Vec<Task<'l>> {
        let (heads, n) = (self.args.config.num_heads, self.rows.len());
        let mut latents: Vec<Option<&mut [f32]>> =
            latents.chunks_exact_mut(self.args.config.kv_lora_rank).map(Some).collect();
        let mut task = |rows: Range<usize>, heads: Range<usize>| {
            let queries = rows.clone().flat_map(|row| heads.clone().map(move |h| h * n + row));
            let out = queries.filter_map(|at| latents[at].take()).collect();
            Task { rows, heads, out }
        };
        let few_heads = heads_together(heads, self.device.threads.count());
        let mut tasks = Vec::new();
        let mut row = 0;
        while row < n {
            let most = (TASK_SCORES / self.rows[row].keys().max(1)).clamp(1, TASK_ROWS);
            let together =
                self.rows[row..].iter().take(most).take_while(|r| self.rows[row].goes_with(r)).count();
            let (rows, heads_together) =
                if together >= few_heads { (row..row + together, 1) } else { (row..row + 1, few_heads) };
            row = rows.end;
            if !self.rows[rows.start].lost {
                let heads = (0..heads).step_by(heads_together).map(|h| h..heads.min(h + heads_together));
                tasks.extend(heads.map(|heads| task(rows.clone(), heads)));
            }
        }
        tasks
    }

    fn task(&self, queries: &[f32], buffers: &mut Buffers, task: Task<'_>) {
        let (c, n) = (self.args.config, self.rows.len());
        let (rank, extra) = (c.kv_lora_rank, c.qk_rope_head_dim);
        let scale = (1.0 / (c.qk_head_dim() as f64).sqrt()) as f32;
        let vectors = self.device.vectors;
        let (heads, m) = (task.heads.len(), task.out.len());
        let rows = &self.rows[task.rows.clone()];
        // Rows that go together are in order of position: the last sees all that any sees.
        let Some(last) = rows.last() else { return };
        let keys = last.keys();

        let (latent_queries, extra_queries) = (&mut buffers.latent_queries, &mut buffers.extra_queries);
        latent_queries.clear();
        extra_queries.clear();
        for row in task.rows.clone() {
            for h in task.heads.clone() {
                latent_queries.extend_from_slice(&queries[(h * n + row) * rank..][..rank]);
                extra_queries.extend_from_slice(&self.query(row, h)[c.qk_nope_head_dim..]);
            }
        }

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
        for (out, totals) in task.out.into_iter().zip(totals.chunks_exact(rank)) {
            out.iter_mut().zip(totals).for_each(|(o, t)| *o = *t as f32);
        }
    }
}

/// `rows` in pieces of [`WEIGHT_ROWS`].
fn blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    rows.clone().step_by(WEIGHT_ROWS).map(move |first| first..rows.end.min(first + WEIGHT_ROWS))
}

/// Rows of `weight`, decoded into `buffer`.
fn decoded<'b>(
    vectors: Vectors,
    weight: &Matrix,
    rows: Range<usize>,
    buffer: &'b mut Vec<f32>,
) -> Vec<&'b [f32]> {
    let width = weight.cols();
    buffer.resize(rows.len() * width, 0.0);
    for (r, out) in rows.zip(buffer.chunks_exact_mut(width)) {
        match weight.row(r) {
            WeightRow::Bf16(row) => vectors.widen(row, out),
            row => row.decode_f32(out),
        }
    }
    buffer.chunks_exact(width).collect()
}
