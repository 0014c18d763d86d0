//! The Lightning Indexer on the host.

use k3_quant::cpu::vector::{IndexHeads, KEY_LANES};

use super::{Cpu, Rows, mla::MlaState};
use crate::device::{IndexQuery, Selected, Selection, SequenceRows};

/// Blocks of keys of one tile: as many as a second-level cache holds with ease.
const BLOCKS: usize = 32;
/// Products that one thread adds in a nanosecond, about.
const PRODUCTS: usize = 30;

/// Keys of a sequence, [`KEY_LANES`] of them side by side: `[blocks, dim, KEY_LANES]`, zeros behind the last.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    dim: usize,
    len: usize,
    values: Vec<f32>,
}

impl Keys {
    /// None, of `dim` each. Keys of width 0 are those of a model without an indexer.
    pub(super) fn new(dim: usize) -> Self {
        Self { dim, len: 0, values: Vec::new() }
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    pub(super) fn push(&mut self, key: impl Iterator<Item = f32>) {
        let (block, lane) = (self.len / KEY_LANES, self.len % KEY_LANES);
        self.values.resize((block + 1) * self.dim * KEY_LANES, 0.0);
        let place = self.values[block * self.dim * KEY_LANES..].iter_mut().skip(lane).step_by(KEY_LANES);
        place.zip(key).for_each(|(value, key)| *value = key);
        self.len += 1;
    }

    /// `[keys, dim]`
    pub(super) fn to_rows(&self) -> Vec<f32> {
        let key = |i: usize| {
            let block = self.values[i / KEY_LANES * self.dim * KEY_LANES..].iter();
            block.skip(i % KEY_LANES).step_by(KEY_LANES).take(self.dim)
        };
        (0..self.len).flat_map(key).copied().collect()
    }
}

/// A row of queries with the keys that it may see.
struct Row<'a> {
    heads: IndexHeads<'a>,
    visible: usize,
    keys: &'a Keys,
}

impl Row<'_> {
    fn nanoseconds(&self) -> usize {
        self.visible * self.heads.q.len() / PRODUCTS
    }

    /// `sum_h w_h relu(q_h . k_s)` for the positions that it sees; heads summed in order, no constant factors. The last block
    /// may hold keys of later tokens, whose scores are cut off. `share`: among threads.
    fn scores(&self, device: &Cpu, share: bool) -> Vec<f32> {
        let blocks = self.visible.div_ceil(KEY_LANES);
        let mut scores = vec![0.0; blocks * KEY_LANES];
        let keys = &self.keys.values[..blocks * self.keys.dim * KEY_LANES];
        let tiles =
            scores.chunks_mut(BLOCKS * KEY_LANES).zip(keys.chunks(BLOCKS * self.keys.dim * KEY_LANES));
        let score = |(scores, keys): (&mut [f32], &[f32])| {
            device.vectors.index_scores(self.heads, keys, scores);
        };
        if share {
            device.threads.share(self.nanoseconds(), tiles, score);
        } else {
            tiles.for_each(score);
        }
        scores.truncate(self.visible);
        scores
    }
}

/// `f` for every row, and whether its work is to be shared among threads.
fn rows<'a, T: Send>(
    device: &Cpu,
    query: IndexQuery<'a, Cpu>,
    states: &'a [SequenceRows<'_, MlaState>],
    f: impl Fn(&Row<'_>, bool) -> T + Sync,
) -> Vec<T> {
    let row = |s: &'a SequenceRows<'_, MlaState>, r: usize| Row {
        heads: IndexHeads { dim: query.config.head_dim, q: query.q.row(r), weights: query.weights.row(r) },
        visible: s.position + r - s.rows.start + 1,
        keys: s.state.index_keys(),
    };
    let rows: Vec<Row<'_>> = states.iter().flat_map(|s| s.rows.clone().map(move |r| row(s, r))).collect();
    let mut results: Vec<Option<T>> = rows.iter().map(|_| None).collect();
    let tiles = rows.iter().zip(&mut results);
    // Many rows are shared as they are; of a few each is shared for itself.
    if rows.len() >= 4 * device.threads.count() {
        let nanoseconds = rows.iter().map(Row::nanoseconds).sum();
        device.threads.share(nanoseconds, tiles, |(row, result)| *result = Some(f(row, false)));
    } else {
        tiles.for_each(|(row, result)| *result = Some(f(row, true)));
    }
    results.into_iter().flatten().collect()
}

pub(super) fn scores(
    device: &Cpu,
    query: IndexQuery<'_, Cpu>,
    states: &[SequenceRows<'_, MlaState>],
) -> Vec<Vec<f32>> {
    rows(device, query, states, |row, share| row.scores(device, share))
}

/// `docs/arithmetic.md` 7.2.
pub(super) fn select(
    device: &Cpu,
    query: IndexQuery<'_, Cpu>,
    states: &[SequenceRows<'_, MlaState>],
) -> Selection {
    let k = query.config.topk;
    let rows = rows(device, query, states, |row, share| {
        if row.visible <= k { Selected::All } else { Selected::by_score(&row.scores(device, share), k) }
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
    for s in states {
        for r in s.rows.clone() {
            let y = k.row(r);
            let n = y.len() as f64;
            let mean = y.iter().map(|&y| f64::from(y)).sum::<f64>() / n;
            let variance = y.iter().map(|&y| (f64::from(y) - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (variance + eps).sqrt();
            let normed = y
                .iter()
                .zip(gain.iter().zip(bias))
                .map(|(&y, (&g, &b))| ((f64::from(y) - mean) * scale * f64::from(g) + f64::from(b)) as f32);
            s.state.index_keys_mut().push(normed);
        }
    }
}
