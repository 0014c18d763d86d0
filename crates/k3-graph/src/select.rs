//! Selections with a total order: the indexer's keys and the router's experts.
//!
//! Both are defined on values, not on bit patterns: `-0.0` equals `+0.0`. NaN has no place in an order, and an
//! infinity is an overflow: either makes the selection fail rather than depend on how it was computed.

use std::cmp::Ordering;

/// A floating-point type that scores come in.
pub trait Score: Copy + PartialOrd {
    /// Whether this is neither NaN nor infinite.
    fn is_finite(self) -> bool;
}

impl Score for f32 {
    fn is_finite(self) -> bool {
        self.is_finite()
    }
}

impl Score for f64 {
    fn is_finite(self) -> bool {
        self.is_finite()
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
    let mut sorted = scores.to_vec();
    let (_, &mut theta, _) = sorted.select_nth_unstable_by(k - 1, |a, b| descending(*a, *b));
    let positions = |wanted: fn(&T, &T) -> bool| {
        scores.iter().enumerate().filter(move |(_, s)| wanted(s, &theta)).map(|(i, _)| i as u32)
    };
    let mut selected: Vec<u32> = positions(|s, theta| s > theta).collect();
    let places = k - selected.len();
    selected.extend(positions(|s, theta| s == theta).take(places));
    Some(selected)
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
