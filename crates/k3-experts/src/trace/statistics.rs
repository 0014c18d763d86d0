//! What is known of the released model's routing, measured on a trace.

use super::Trace;

/// Figures of a trace, averaged over layers and positions; NaN where it has not as many tokens. `docs/expert-store.md` 1 has
/// those of the released model.
#[derive(Clone, Debug)]
pub struct Statistics<'a> {
    trace: &'a Trace,
}

impl<'a> Statistics<'a> {
    /// Those of `trace`.
    pub fn new(trace: &'a Trace) -> Self {
        Self { trace }
    }

    /// Share of a token's experts that the token `lag` before used as well.
    pub fn reuse(&self, lag: usize) -> f64 {
        let by_rank: f64 = (0..self.trace.geometry().per_token).map(|r| self.reuse_of_rank(lag, r)).sum();
        by_rank / self.trace.geometry().per_token as f64
    }

    /// [`Statistics::reuse`] in one layer.
    pub fn reuse_in_layer(&self, lag: usize, layer: usize) -> f64 {
        let k = self.trace.geometry().per_token;
        let (mut hits, mut all) = (0, 0);
        for t in lag..self.trace.len() {
            let before = self.trace.routed(t - lag, layer);
            hits += self.trace.routed(t, layer).iter().filter(|id| before.contains(id)).count();
            all += k;
        }
        share(hits, all)
    }

    /// Share of the experts of gate rank `rank` (from 0) that are used again `lag` tokens later.
    pub fn reuse_of_rank(&self, lag: usize, rank: usize) -> f64 {
        let (mut hits, mut all) = (0, 0);
        for t in lag..self.trace.len() {
            for layer in 0..self.trace.geometry().layers {
                let id = self.trace.routed(t - lag, layer)[rank];
                hits += usize::from(self.trace.routed(t, layer).contains(&id));
                all += 1;
            }
        }
        share(hits, all)
    }

    /// Distinct experts of a layer in a window of so many tokens.
    pub fn distinct(&self, window: usize) -> f64 {
        self.windows(window, |counts| counts.iter().filter(|&&n| n > 0).count() as f64)
    }

    /// Picks in a window for each distinct expert: by how much a prefill of so many tokens reads less than its
    /// tokens one by one.
    pub fn dedup(&self, window: usize) -> f64 {
        (window * self.trace.geometry().per_token) as f64 / self.distinct(window)
    }

    /// Number of equally used experts with the same entropy as the picks of a window.
    pub fn effective(&self, window: usize) -> f64 {
        self.windows(window, |counts| {
            let all: u32 = counts.iter().sum();
            let entropy = |&n: &u32| {
                let p = f64::from(n) / f64::from(all);
                if n == 0 { 0.0 } else { -p * p.ln() }
            };
            counts.iter().map(entropy).sum::<f64>().exp()
        })
    }

    /// Share of the picks of a window that fall on its most used experts, as many as a token uses.
    pub fn top_mass(&self, window: usize) -> f64 {
        let k = self.trace.geometry().per_token;
        self.windows(window, |counts| {
            let mut sorted = counts.to_vec();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            share(sorted[..k].iter().sum::<u32>() as usize, window * k)
        })
    }

    /// Mean over layers and over windows that do not overlap, of their uses by expert.
    fn windows(&self, window: usize, figure: impl Fn(&[u32]) -> f64) -> f64 {
        let geometry = self.trace.geometry();
        let (mut sum, mut n) = (0.0, 0);
        for begin in (0..(self.trace.len() + 1).saturating_sub(window)).step_by(window.max(1)) {
            for layer in 0..geometry.layers {
                let mut counts = vec![0; geometry.experts];
                for t in begin..begin + window {
                    self.trace.routed(t, layer).iter().for_each(|&id| counts[id as usize] += 1);
                }
                sum += figure(&counts);
                n += 1;
            }
        }
        sum / f64::from(n)
    }
}

fn share(part: usize, all: usize) -> f64 {
    part as f64 / all as f64
}
