//! The best keys of a row without the f32 scores of all.
//!
//! 1. Scores in 8 bits of all keys.
//! 2. f32 scores of some more keys than are to be kept, the largest by those. The k-th of them is not above the k-th of all.
//! 3. f32 scores of every other key whose interval reaches that one. All others are below it.
//! 4. The selection among those.
//!
//! The keys of step 2 only have to be enough; how good they are decides how much is left for step 3. Where the intervals
//! tell little apart, all f32 scores are worked out after all.

use k3_quant::cpu::index::QueryCodes;

use super::{Cpu, IndexFilter, Row, TILE};
use crate::device::Selected;
use crate::select::{kth_largest, select_among};

/// Rows that share what is read of the keys' codes.
pub(super) const ROWS: usize = 4;
/// Keys that a row must see, as a multiple of those it keeps, and at least, for the filter to pay.
const BUDGETS: usize = 4;
const LEAST_KEYS: usize = 4096;
/// How much faster products in 8 bits are than in f32, about.
const FASTER: usize = 4;
/// Scores from which their distribution is read.
const SAMPLE: usize = 1 << 16;

/// Keys kept by rows of one sequence; `share` work on each of them among threads.
pub(super) fn select(device: &Cpu, rows: &[Row<'_>], share: bool, k: usize) -> Vec<Selected> {
    let filtered: Vec<Option<Filtered<'_>>> = rows.iter().map(|row| Filtered::new(device, row, k)).collect();
    let mut scores = approximate(device, &filtered, share);
    rows.iter()
        .zip(&filtered)
        .zip(&mut scores)
        .map(|((row, filtered), scores)| {
            if row.query.visible <= k {
                return Selected::All;
            }
            let scores = std::mem::take(scores);
            let selected = filtered.as_ref().and_then(|f| f.select(device, share, scores, k));
            selected.unwrap_or_else(|| row.select(device, share, k))
        })
        .collect()
}

/// Scores in 8 bits; none for rows that go without.
fn approximate(device: &Cpu, rows: &[Option<Filtered<'_>>], share: bool) -> Vec<Vec<f32>> {
    let mut scores: Vec<Vec<f32>> =
        rows.iter().map(|row| vec![0.0; row.as_ref().map_or(0, |f| f.row.query.visible)]).collect();
    let last = scores.iter().map(Vec::len).max().unwrap_or(0);
    let mut parts: Vec<_> = scores.iter_mut().map(|scores| scores.chunks_mut(TILE)).collect();
    // Every tile of keys goes with the scores of all rows that see some of it.
    let tiles = (0..last)
        .step_by(TILE)
        .map(|first| (first, parts.iter_mut().map(Iterator::next).collect::<Vec<Option<&mut [f32]>>>()));
    let products: usize = rows.iter().flatten().map(|f| f.row.query.nanoseconds(f.row.query.visible)).sum();
    let vectors = device.vectors;
    device.share_if(share, products / FASTER, tiles, |(first, scores)| {
        for (row, scores) in rows.iter().zip(scores) {
            if let (Some(f), Some(scores)) = (row, scores) {
                f.query.scores(vectors, &f.row.query.keys.codes, first, scores);
            }
        }
    });
    scores
}

/// A row of which most keys may be told apart.
struct Filtered<'a> {
    row: &'a Row<'a>,
    query: QueryCodes,
}

impl<'a> Filtered<'a> {
    /// `None` for rows that go without: they see too few keys, or there are no bounds.
    fn new(device: &Cpu, row: &'a Row<'a>, k: usize) -> Option<Self> {
        let enough = match device.index_filter {
            IndexFilter::WhereItPays => row.query.visible >= k.saturating_mul(BUDGETS).max(LEAST_KEYS),
            IndexFilter::Always => row.query.visible > k,
            IndexFilter::Never => false,
        };
        if !enough || k == 0 {
            return None;
        }
        let query = QueryCodes::new(device.vectors, row.query.keys.dim, row.query.q, row.query.weights)?;
        query.serve(&row.query.keys.codes).then_some(Self { row, query })
    }

    /// From the row's scores in 8 bits. `None` where too many keys are left.
    fn select(&self, device: &Cpu, share: bool, scores: Vec<f32>, k: usize) -> Option<Selected> {
        let most = match device.index_filter {
            IndexFilter::Always => scores.len(),
            _ => scores.len() / 2,
        };
        let promising = promising(&scores, k);
        if promising.len() > most {
            return None;
        }
        let promising_scores = self.row.scores_at(device, share, &promising);
        let theta = kth_largest(&promising_scores, k);
        let candidates = self.candidates(device, share, &scores, self.query.threshold(theta));
        if candidates.len() > most {
            return None;
        }
        drop(scores);
        let known = promising.iter().copied().zip(promising_scores);
        let mut missing = Vec::new();
        let mut known_at = known.clone().peekable();
        for &at in &candidates {
            while known_at.next_if(|(known, _)| *known < at).is_some() {}
            if known_at.next_if(|(known, _)| *known == at).is_none() {
                missing.push(at);
            }
        }
        let missing_scores = self.row.scores_at(device, share, &missing);
        let mut all: Vec<(u32, f32)> = known.chain(missing.into_iter().zip(missing_scores)).collect();
        all.sort_unstable_by_key(|(at, _)| *at);
        let (positions, scores): (Vec<u32>, Vec<f32>) = all.into_iter().unzip();
        Some(select_among(&positions, &scores, k).map_or(Selected::NonFinite, Selected::Keys))
    }

    fn candidates(&self, device: &Cpu, share: bool, scores: &[f32], threshold: f32) -> Vec<u32> {
        /// Keys of a tile.
        const MANY: usize = 16 * TILE;
        let mut parts = vec![Vec::new(); scores.len().div_ceil(MANY)];
        let tiles = scores.chunks(MANY).zip(&mut parts).enumerate();
        let (vectors, keys) = (device.vectors, &self.row.query.keys.codes);
        device.share_if(share, scores.len(), tiles, |(i, (scores, part))| {
            self.query.candidates(vectors, keys, i * MANY, scores, threshold, part);
        });
        parts.concat()
    }
}

/// At least `k` of more than `k` positions, ascending: those of the largest scores, as far as a sample tells, and some
/// more.
fn promising(scores: &[f32], k: usize) -> Vec<u32> {
    let above = |threshold: f32| -> Vec<u32> {
        let reach = scores.iter().zip(0..).filter(|(s, _)| **s >= threshold);
        reach.map(|(_, at)| at).collect()
    };
    let mut sample: Vec<f32> = scores.iter().copied().step_by((scores.len() / SAMPLE).max(1)).collect();
    let expected = k as f64 * sample.len() as f64 / scores.len() as f64;
    // Four standard deviations of how many of the best are in a sample.
    let rank = if sample.len() == scores.len() { k } else { (expected + 4.0 * expected.sqrt()) as usize + 1 };
    if rank <= sample.len() {
        let (_, threshold, _) = sample.select_nth_unstable_by(rank - 1, |a, b| b.total_cmp(a));
        let positions = above(*threshold);
        if positions.len() >= k {
            return positions;
        }
    }
    above(kth_largest(scores, k))
}

#[cfg(test)]
mod tests {
    use super::promising;

    #[test]
    fn enough_keys_look_promising() {
        let check = |scores: Vec<f32>, k: usize, most: usize| {
            let found = promising(&scores, k);
            assert!(found.is_sorted() && found.windows(2).all(|w| w[0] < w[1]));
            assert!((k..=most).contains(&found.len()), "{} of {} for {k}", found.len(), scores.len());
        };
        let mixed = |n: u32| (0..n).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 8) as f32).collect::<Vec<f32>>();
        check(mixed(100), 7, 7);
        check(mixed(100), 99, 99);
        check(vec![1.0; 100], 7, 100);
        check(mixed(400_000), 2048, 3000);
        // The sample sees none of the best, or nothing else.
        let stride = 400_000 / super::SAMPLE;
        let best = |at: usize| (0..400_000).map(move |i| f32::from(u8::from(i % stride == at)));
        check(best(1).collect(), 2048, 400_000);
        check(best(0).collect(), 80_000, 400_000);
        check((0..400_000).map(|i| if i < 3000 { 1e6 - i as f32 } else { 0.0 }).collect(), 2048, 400_000);
    }
}
