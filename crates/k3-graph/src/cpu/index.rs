//! The Lightning Indexer on the host.
//!
//! Scores are those in f32. Where a row sees many more keys than it keeps, most keys are told apart from the best by scores
//! in 8 bits with bounds of their error ([`k3_quant::cpu::index`]), and f32 scores are worked out for the others alone:
//! [`filter`]. What is selected is the same, bit for bit.

mod filter;

use std::sync::OnceLock;

use k3_quant::cpu::index::KeyCodes;
use k3_quant::cpu::vector::IndexHeads;

use super::{Cpu, Rows, mla::MlaState};
use crate::device::{IndexQuery, Selected, Selection, SequenceRows};

/// Keys of one tile: as many as a second-level cache holds with ease.
const TILE: usize = 1024;
/// Products that one thread adds in a nanosecond, about.
const PRODUCTS: usize = 30;
/// Rows are shared among threads as they are if there are so many a thread; of fewer each is shared for itself.
const ROWS_PER_THREAD: usize = 4;

/// Which selections go by scores in 8 bits first. It changes no result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexFilter {
    /// Those of rows that see so many keys that it saves time.
    #[default]
    WhereItPays,
    /// All that can.
    Always,
    /// None.
    Never,
}

/// Bytes of an indexer's key of width `dim` in a state: in f32, and in 8 bits with what belongs to it.
pub const fn index_key_bytes(dim: usize) -> usize {
    dim * size_of::<f32>() + KeyCodes::bytes_per_key(dim)
}

/// Bytes of a thread that selects of `keys`, at most unless keys are made to lie close together: the scores of rows that go
/// together, and the keys of one of them that look promising, which may be all, in a list that grows.
pub(super) fn score_bytes(keys: usize) -> u64 {
    (keys as u64).saturating_mul(((filter::ROWS + 3) * size_of::<f32>()) as u64)
}

/// Keys of a sequence, in f32 and in 8 bits.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    dim: usize,
    /// `[keys, dim]`
    values: Vec<f32>,
    codes: KeyCodes,
}

impl Keys {
    /// None, of `dim` each. Keys of width 0 are those of a model without an indexer.
    pub(super) fn new(dim: usize) -> Self {
        Self { dim, values: Vec::new(), codes: KeyCodes::new(dim) }
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    pub(super) fn push(&mut self, key: &[f32]) {
        self.values.extend_from_slice(key);
        self.codes.push(key);
    }

    /// `[keys, dim]`
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }
}

/// A row of queries with the keys that it may see.
#[derive(Clone, Copy)]
struct Query<'a> {
    /// `[heads, dim]`
    q: &'a [f32],
    weights: &'a [f32],
    visible: usize,
    keys: &'a Keys,
}

/// One at work.
struct Row<'a> {
    query: Query<'a>,
    /// Made for rows that score, and gone with them: as large as the queries.
    heads: OnceLock<IndexHeads>,
}

impl Query<'_> {
    /// What the scores of `keys` take.
    fn nanoseconds(&self, keys: usize) -> usize {
        keys * self.q.len() / PRODUCTS
    }
}

impl<'a> Row<'a> {
    fn new(query: &Query<'a>) -> Self {
        Self { query: *query, heads: OnceLock::new() }
    }

    fn heads(&self) -> &IndexHeads {
        let Query { q, weights, keys, .. } = self.query;
        self.heads.get_or_init(|| IndexHeads::new(keys.dim, q, weights))
    }

    /// `sum_h w_h relu(q_h . k_s)` for the positions that it sees; heads summed in order, no constant factors. `share`: among
    /// threads.
    fn scores(&self, device: &Cpu, share: bool) -> Vec<f32> {
        let (Query { visible, keys, .. }, heads) = (self.query, self.heads());
        let mut scores = vec![0.0; visible];
        let tiles = scores.chunks_mut(TILE).zip(keys.values[..visible * keys.dim].chunks(TILE * keys.dim));
        device.share_if(share, self.query.nanoseconds(visible), tiles, |(scores, keys)| {
            device.vectors.index_scores(heads, keys, scores);
        });
        scores
    }

    /// Those of some positions.
    fn scores_at(&self, device: &Cpu, share: bool, positions: &[u32]) -> Vec<f32> {
        /// Positions of a tile.
        const FEW: usize = 128;
        let (keys, heads) = (self.query.keys, self.heads());
        let mut scores = vec![0.0; positions.len()];
        let tiles = scores.chunks_mut(FEW).zip(positions.chunks(FEW));
        device.share_if(share, self.query.nanoseconds(positions.len()), tiles, |(scores, positions)| {
            device.vectors.index_scores_at(heads, &keys.values, positions, scores);
        });
        scores
    }

    /// By the f32 scores of all that it sees.
    fn select(&self, device: &Cpu, share: bool, k: usize) -> Selected {
        Selected::by_score(&self.scores(device, share), k)
    }
}

impl Cpu {
    /// `work` on every tile, by several threads if `share`.
    fn share_if<T: Send>(
        &self,
        share: bool,
        nanoseconds: usize,
        tiles: impl Iterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        if share { self.threads.share(nanoseconds, tiles, work) } else { tiles.for_each(work) }
    }
}

fn queries<'a>(query: IndexQuery<'a, Cpu>, states: &'a [SequenceRows<'_, MlaState>]) -> Vec<Query<'a>> {
    let row = |s: &'a SequenceRows<'_, MlaState>, r: usize| Query {
        q: query.q.row(r),
        weights: query.weights.row(r),
        visible: s.position + r - s.rows.start + 1,
        keys: s.state.index_keys(),
    };
    states.iter().flat_map(|s| s.rows.clone().map(move |r| row(s, r))).collect()
}

/// `f` for every group of rows, and whether its work is to be shared among threads. At most `group` rows of one sequence
/// are together. The results are in order.
fn by_group<T: Send>(
    device: &Cpu,
    rows: &[Query<'_>],
    group: usize,
    f: impl Fn(&[Row<'_>], bool) -> Vec<T> + Sync,
) -> Vec<T> {
    let threads = device.threads.count();
    let share_rows = rows.len() >= ROWS_PER_THREAD * threads;
    let group = if share_rows { group.min(rows.len() / (ROWS_PER_THREAD * threads)) } else { group };
    let groups: Vec<&[Query<'_>]> = rows
        .chunk_by(|a, b| std::ptr::eq(a.keys, b.keys))
        .flat_map(|rows| rows.chunks(group.max(1)))
        .collect();
    let mut results: Vec<Vec<T>> = groups.iter().map(|_| Vec::new()).collect();
    let nanoseconds = rows.iter().map(|row| row.nanoseconds(row.visible)).sum();
    let tiles = groups.into_iter().zip(&mut results);
    device.share_if(share_rows, nanoseconds, tiles, |(rows, results)| {
        let rows: Vec<Row<'_>> = rows.iter().map(Row::new).collect();
        *results = f(&rows, !share_rows);
    });
    results.into_iter().flatten().collect()
}

pub(super) fn scores(
    device: &Cpu,
    query: IndexQuery<'_, Cpu>,
    states: &[SequenceRows<'_, MlaState>],
) -> Vec<Vec<f32>> {
    by_group(device, &queries(query, states), 1, |rows, share| {
        rows.iter().map(|row| row.scores(device, share)).collect()
    })
}

/// `docs/arithmetic.md` 7.2.
pub(super) fn select(
    device: &Cpu,
    query: IndexQuery<'_, Cpu>,
    states: &[SequenceRows<'_, MlaState>],
) -> Selection {
    let k = query.config.topk;
    let rows = by_group(device, &queries(query, states), filter::ROWS, |rows, share| {
        filter::select(device, rows, share, k)
    });
    Selection { rows }
}

/// LayerNorm with biased variance (`docs/arithmetic.md` 7.1), appended to the keys.
pub(super) fn append(
    k: &Rows,
    gain: &[f32],
    bias: &[f32],
    eps: f64,
    states: &mut [SequenceRows<'_, MlaState>],
) {
    let mut normed = vec![0.0; gain.len()];
    for s in states {
        for r in s.rows.clone() {
            let y = k.row(r);
            let n = y.len() as f64;
            let mean = y.iter().map(|&y| f64::from(y)).sum::<f64>() / n;
            let variance = y.iter().map(|&y| (f64::from(y) - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (variance + eps).sqrt();
            for (normed, (&y, (&g, &b))) in normed.iter_mut().zip(y.iter().zip(gain.iter().zip(bias))) {
                *normed = ((f64::from(y) - mean) * scale * f64::from(g) + f64::from(b)) as f32;
            }
            s.state.index_keys_mut().push(&normed);
        }
    }
}
