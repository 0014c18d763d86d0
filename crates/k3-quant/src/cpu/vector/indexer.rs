//! Scores of the Lightning Indexer in f32.

use super::{Lanes, ask};
use crate::cpu::LANES;

/// Columns of a dot that are summed before they join the total.
pub(in crate::cpu) const DOT_BLOCK: usize = 32;
/// Keys whose dots are worked out together, and where there are many registers.
const KEYS: usize = 4;
const MANY_KEYS: usize = 8;
/// Steps of so many keys after which keys are needed that are asked for.
const AHEAD: usize = 2;

/// Queries of one row for [`super::Vectors::index_scores`].
#[derive(Clone, Debug)]
pub struct IndexHeads {
    dim: usize,
    /// `[heads / LANES, dim]`, heads side by side, zeros behind the last.
    q: Vec<[f32; LANES]>,
    /// In the same order.
    weights: Vec<[f32; LANES]>,
    heads: usize,
}

impl IndexHeads {
    /// `q` is `[heads, dim]`, `weights` `[heads]`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn new(dim: usize, q: &[f32], weights: &[f32]) -> Self {
        assert_eq!(q.len(), weights.len() * dim);
        let mut lanes = vec![[0.0; LANES]; weights.len().div_ceil(LANES) * dim];
        for (h, q) in q.chunks_exact(dim.max(1)).enumerate() {
            let lanes = &mut lanes[h / LANES * dim..];
            lanes.iter_mut().zip(q).for_each(|(lanes, q)| lanes[h % LANES] = *q);
        }
        let mut padded = vec![[0.0; LANES]; weights.len().div_ceil(LANES)];
        padded.as_flattened_mut()[..weights.len()].copy_from_slice(weights);
        Self { dim, q: lanes, weights: padded, heads: weights.len() }
    }
}

#[inline(always)]
pub(super) fn index_scores<L: Lanes>(heads: &IndexHeads, keys: &[f32], out: &mut [f32]) {
    assert_eq!(keys.len(), out.len() * heads.dim);
    scores::<L>(heads, |i| &keys[i * heads.dim..][..heads.dim], out);
}

#[inline(always)]
pub(super) fn index_scores_at<L: Lanes>(
    heads: &IndexHeads,
    keys: &[f32],
    positions: &[u32],
    out: &mut [f32],
) {
    assert_eq!(positions.len(), out.len());
    scores::<L>(heads, |i| &keys[positions[i] as usize * heads.dim..][..heads.dim], out);
}

#[inline(always)]
fn scores<'a, L: Lanes>(heads: &IndexHeads, key: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    let done = if L::MANY { step_scores::<L, MANY_KEYS>(heads, &key, 0, out) } else { 0 };
    let done = step_scores::<L, KEYS>(heads, &key, done, out);
    step_scores::<L, 1>(heads, &key, done, out);
}

/// `K` keys at a time from key `first` on; where it ended.
#[inline(always)]
fn step_scores<'a, L: Lanes, const K: usize>(
    heads: &IndexHeads,
    key: &impl Fn(usize) -> &'a [f32],
    first: usize,
    out: &mut [f32],
) -> usize {
    let count = out.len();
    let (steps, rest) = out[first..].as_chunks_mut::<K>();
    for (step, out) in steps.iter_mut().enumerate() {
        let keys_from = |at: usize| std::array::from_fn(|i| key((at + i).min(count - 1)));
        let at = first + step * K;
        *out = keys_scores::<L, K>(heads, keys_from(at), keys_from(at + AHEAD * K));
    }
    let left = rest.len();
    count - left
}

#[inline(always)]
fn keys_scores<L: Lanes, const K: usize>(
    heads: &IndexHeads,
    keys: [&[f32]; K],
    mut ahead: [&[f32]; K],
) -> [f32; K] {
    let mut out = [0.0; K];
    if heads.dim == 0 {
        return out;
    }
    let mut left = heads.heads;
    for (q, weights) in heads.q.chunks(2 * heads.dim).zip(heads.weights.chunks(2)) {
        // Of heads that are not there nothing is added.
        if let [first, second] = weights {
            let (q, second_q) = q.split_at(heads.dim);
            add_relu_dots::<L, K, 2>([q, second_q], [first, second], left, keys, ahead, &mut out);
        } else if let [first] = weights {
            add_relu_dots::<L, K, 1>([q], [first], left, keys, ahead, &mut out);
        }
        left = left.saturating_sub(2 * LANES);
        // Once is enough.
        ahead = [&[]; K];
    }
    out
}

/// Of the heads, `left` are there. Keys `ahead` are asked for.
#[inline(always)]
fn add_relu_dots<L: Lanes, const K: usize, const V: usize>(
    q: [&[[f32; LANES]]; V],
    weights: [&[f32; LANES]; V],
    left: usize,
    keys: [&[f32]; K],
    ahead: [&[f32]; K],
    out: &mut [f32; K],
) {
    let mut dots = [[L::splat(0.0); V]; K];
    let (q_blocks, key_blocks) =
        (q.map(|q| q.as_chunks::<DOT_BLOCK>()), keys.map(|key| key.as_chunks::<DOT_BLOCK>()));
    let blocks = key_blocks[0].0.len();
    let (whole_q, whole_keys) = (q_blocks.map(|q| &q.0[..blocks]), key_blocks.map(|key| &key.0[..blocks]));
    let ahead = ahead.map(|key| key.as_chunks::<DOT_BLOCK>().0);
    for block in 0..blocks {
        ahead.iter().filter_map(|key| key.get(block)).for_each(|key| ask(key));
        let (q, keys) = (whole_q.map(|q| q[block].as_slice()), whole_keys.map(|key| key[block].as_slice()));
        add_block::<L, K, V>(DOT_BLOCK, q, keys, &mut dots);
    }
    let rest = key_blocks[0].1.len();
    if rest > 0 {
        add_block::<L, K, V>(rest, q_blocks.map(|q| q.1), key_blocks.map(|key| key.1), &mut dots);
    }
    let mut terms = [[[0.0; LANES]; V]; K];
    for k in 0..K {
        for v in 0..V {
            L::store(L::mul(L::load(weights[v]), L::relu(dots[k][v])), &mut terms[k][v]);
        }
    }
    for v in 0..V {
        let there = left.saturating_sub(v * LANES).min(LANES);
        if there == LANES {
            for h in 0..LANES {
                for k in 0..K {
                    out[k] += terms[k][v][h];
                }
            }
        } else {
            for h in 0..there {
                for k in 0..K {
                    out[k] += terms[k][v][h];
                }
            }
        }
    }
}

/// Adds the sums of `len` columns to `dots`.
#[inline(always)]
fn add_block<L: Lanes, const K: usize, const V: usize>(
    len: usize,
    q: [&[[f32; LANES]]; V],
    keys: [&[f32]; K],
    dots: &mut [[L::Lanes; V]; K],
) {
    let (q, keys) = (q.map(|q| &q[..len]), keys.map(|key| &key[..len]));
    let mut sums = [[L::splat(0.0); V]; K];
    for c in 0..len {
        // No closure: those are not compiled for the instruction set.
        let mut loaded = [L::splat(0.0); V];
        for v in 0..V {
            loaded[v] = L::load(&q[v][c]);
        }
        for k in 0..K {
            let key = L::splat(keys[k][c]);
            for v in 0..V {
                sums[k][v] = L::add_product(sums[k][v], loaded[v], key);
            }
        }
    }
    for k in 0..K {
        for v in 0..V {
            dots[k][v] = L::add(dots[k][v], sums[k][v]);
        }
    }
}
