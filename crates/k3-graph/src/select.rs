//! Selections with a total order: the indexer's keys and the router's experts.
//!
//! Both are defined on values, not on bit patterns: `-0.0` equals `+0.0`. NaN has no place in an order, and an
//! infinity is an overflow: either makes the selection fail rather than depend on how it was computed.

use std::cmp::Ordering;

/// A floating-point type that scores come in.
pub trait Score: Copy + PartialOrd {
    /// Whether this is neither NaN nor infinite.
    fn is_finite(self) -> bool;

    /// The highest bits of an integer that is larger for larger finite values, and equal for `-0.0` and `+0.0`: below
    /// 2^13.
    fn bucket(self) -> usize;
}

/// What [`Score::bucket`] is below.
const BUCKETS: usize = 1 << BUCKET_BITS;
/// Sign, exponent and some bits of the mantissa of an f32.
const BUCKET_BITS: u32 = 13;

impl Score for f32 {
    fn is_finite(self) -> bool {
        self.is_finite()
    }

    #[inline]
    fn bucket(self) -> usize {
        // The sum turns -0.0 into +0.0.
        let bits = (self + 0.0).to_bits();
        let ordered = bits ^ (((bits as i32) >> 31) as u32 | 1 << 31);
        (ordered >> (32 - BUCKET_BITS)) as usize
    }
}

impl Score for f64 {
    fn is_finite(self) -> bool {
        self.is_finite()
    }

    #[inline]
    fn bucket(self) -> usize {
        let bits = (self + 0.0).to_bits();
        let ordered = bits ^ (((bits as i64) >> 63) as u64 | 1 << 63);
        (ordered >> (64 - BUCKET_BITS)) as usize
    }
}

/// Larger first. Equal for `-0.0` and `+0.0`; never called on NaN.
fn descending<T: Score>(a: T, b: T) -> Ordering {
    b.partial_cmp(&a).unwrap_or(Ordering::Equal)
}

/// The `k` best positions of `scores` in the indexer's order (`docs/arithmetic.md` 7.2): with `theta` the k-th
/// largest score, first all positions above `theta`, ascending, then those equal to `theta`, lowest first. With at
/// most `k` scores, all positions ascending. `None` if a score is not finite.
pub fn select_keys<T: Score>(scores: &[T], k: usize) -> Option<Vec<u32>> {
    if !scores.iter().all(|s| s.is_finite()) {
        return None;
    }
    if scores.len() <= k {
        return Some((0..scores.len() as u32).collect());
    }
    if k == 0 {
        return Some(Vec::new());
    }
    Some(best(scores.iter().copied().zip(0..), kth_largest(scores, k), k))
}

/// What [`select_keys`] gives for more than `k` positions of which only `positions` can be among the best: ascending
/// ones with their scores, at least `k`, of which there is at least 1.
pub(crate) fn select_among<T: Score>(positions: &[u32], scores: &[T], k: usize) -> Option<Vec<u32>> {
    if !scores.iter().all(|s| s.is_finite()) {
        return None;
    }
    let scored = scores.iter().copied().zip(positions.iter().copied());
    Some(best(scored, kth_largest(scores, k), k))
}

/// The best `k` of ascending positions, of which the k-th largest score is `theta`.
fn best<T: Score>(scored: impl Iterator<Item = (T, u32)>, theta: T, k: usize) -> Vec<u32> {
    let mut selected = Vec::with_capacity(k);
    let mut equal = Vec::new();
    for (score, at) in scored {
        if score > theta {
            selected.push(at);
        } else if score == theta && equal.len() < k {
            equal.push(at);
        }
    }
    equal.truncate(k - selected.len());
    selected.append(&mut equal);
    selected
}

/// The `k`-th largest, counting equal ones, of at least `k` finite scores, of which `k` is at least 1. In time
/// proportional to their number: a count of leading bits leaves few to compare.
pub(crate) fn kth_largest<T: Score>(scores: &[T], k: usize) -> T {
    let mut counts = vec![0_usize; BUCKETS];
    scores.iter().for_each(|s| counts[s.bucket()] += 1);
    // Scores above the bucket that has the k-th.
    let mut above = 0;
    let mut bucket = BUCKETS - 1;
    while above + counts[bucket] < k {
        above += counts[bucket];
        bucket -= 1;
    }
    let mut near: Vec<T> = Vec::with_capacity(counts[bucket]);
    near.extend(scores.iter().filter(|s| s.bucket() == bucket));
    *near.select_nth_unstable_by(k - above - 1, |a, b| descending(*a, *b)).1
}

/// The `k` largest of `biased`, descending, the lower id first among equals (`docs/arithmetic.md` 8.2). `None` if a
/// value is not finite.
///
/// # Panics
/// If there are fewer than `k` values.
pub fn select_experts<T: Score>(biased: &[T], k: usize) -> Option<Vec<u32>> {
    assert!(k <= biased.len());
    if !biased.iter().all(|s| s.is_finite()) {
        return None;
    }
    let order = |a: &u32, b: &u32| descending(biased[*a as usize], biased[*b as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..biased.len() as u32).collect();
    if k < ids.len() && k > 0 {
        ids.select_nth_unstable_by(k - 1, order);
    }
    ids.truncate(k);
    ids.sort_unstable_by(order);
    Some(ids)
}

/// The id of the largest value, the lowest id among equals. NaN never wins; an empty slice gives `None`.
pub fn argmax(values: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &v) in values.iter().enumerate() {
        if !v.is_nan() && best.is_none_or(|(_, b)| v > b) {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i as u32)
}
