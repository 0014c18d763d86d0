//! The Lightning Indexer of K3.1 (`docs/arithmetic.md` 7).

use super::Trap;
use super::num::{Matrix, Rows, add_scaled, dot, rms, rotate, scaled, sigma, softmax, to_bf16};

const LAYER_NORM_EPS: f64 = 1e-6;

/// The five tensors of one layer, and the budget.
pub(crate) struct Indexer {
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) topk: usize,
    pub(crate) wq_b: Matrix,
    pub(crate) wk: Matrix,
    pub(crate) k_norm: Vec<f64>,
    pub(crate) k_norm_bias: Vec<f64>,
    pub(crate) weights: Matrix,
}

/// Keys, scores and selections of a sequence.
pub(crate) struct IndexTrace {
    /// `heads^-0.5 * dim^-0.5`, for reports alone.
    pub(crate) factor: f64,
    pub(crate) keys: Rows,
    /// Row t covers positions `0..=t`, without the two constant scale factors.
    pub(crate) scores: Rows,
    /// Per token one set; one per indexer head only in the trap that selects per head.
    pub(crate) selected: Vec<Vec<Vec<usize>>>,
}

impl IndexTrace {
    pub(crate) fn reported_scores(&self) -> Rows {
        self.scores.iter().map(|row| scaled(row, self.factor)).collect()
    }

    pub(crate) fn positions(&self, t: usize, head: usize, heads: usize) -> &Vec<usize> {
        let sets = &self.selected[t];
        &sets[head * sets.len() / heads]
    }
}

impl Indexer {
    /// `xs` is the normed input, `cq` the normed q-LoRA rows; `latent` and `queries` (of the
    /// attention heads) are read by traps alone.
    pub(crate) fn select(
        &self,
        xs: &[Vec<f64>],
        cq: &[Vec<f64>],
        latent: &[Vec<f64>],
        queries: &[Rows],
        trap: Trap,
    ) -> IndexTrace {
        let narrow = |w: &Matrix| if trap == Trap::IndexerQuantized { through_int8(w) } else { w.clone() };
        let (wq_b, wk) = (narrow(&self.wq_b), narrow(&self.wk));
        let mut keys: Rows = if trap == Trap::IndexKeyFromLatent {
            latent.iter().map(|c| self.normalised(&c[..self.dim], trap)).collect()
        } else {
            xs.iter().map(|x| self.normalised(&wk.apply(x), trap)).collect()
        };
        if trap == Trap::IndexerRotated {
            for (s, key) in keys.iter_mut().enumerate() {
                rotate(&mut key[..self.dim / 2], s);
            }
        }
        let factor = ((self.heads * self.dim) as f64).powf(-0.5);
        let mut trace = IndexTrace { factor, keys: Rows::new(), scores: Rows::new(), selected: Vec::new() };
        for (t, x) in xs.iter().enumerate() {
            let mut q = wq_b.apply(&cq[t]);
            if trap == Trap::IndexQueryFromQb {
                let heads = &queries[t];
                q = (0..self.heads).flat_map(|h| heads[h % heads.len()][..self.dim].to_vec()).collect();
            }
            if trap == Trap::IndexerRotated {
                for head in q.chunks_mut(self.dim) {
                    rotate(&mut head[..self.dim / 2], t);
                }
            }
            let w = self.weights.apply(x);
            let w = match trap {
                Trap::IndexWeightsSoftmax => softmax(&w),
                Trap::IndexWeightsSigmoid => w.into_iter().map(sigma).collect(),
                _ => w,
            };
            let cached = |s: usize| trap != Trap::IndexKeysNotCachedWhileDormant || s >= self.topk;
            let per_head: Vec<Vec<f64>> = (0..=t)
                .map(|s| {
                    let dots =
                        q.chunks(self.dim).map(|head| if cached(s) { dot(head, &keys[s]) } else { 0.0 });
                    dots.zip(&w)
                        .map(|(d, w)| if trap == Trap::ReluAfterHeadSum { w * d } else { w * d.max(0.0) })
                        .collect()
                })
                .collect();
            let scores: Vec<f64> = per_head
                .iter()
                .map(|heads| {
                    let sum: f64 = heads.iter().sum();
                    match trap {
                        Trap::ReluAfterHeadSum => sum.max(0.0),
                        Trap::IndexScoresAbsolute => sum.abs(),
                        Trap::IndexScoresInBf16 => to_bf16(sum),
                        _ => sum,
                    }
                })
                .collect();
            trace.selected.push(if trap == Trap::IndexSelectionPerHead {
                let of_head = |h: usize| per_head.iter().map(|heads| heads[h]).collect::<Vec<f64>>();
                (0..self.heads).map(|h| top_k(&of_head(h), self.topk, trap)).collect()
            } else {
                vec![top_k(&scores, self.topk, trap)]
            });
            trace.scores.push(scores);
        }
        trace.keys = keys;
        trace
    }

    fn normalised(&self, y: &[f64], trap: Trap) -> Vec<f64> {
        layer_norm(y, &self.k_norm, &self.k_norm_bias, trap)
    }
}

/// LayerNorm with gain and bias, biased variance.
pub(crate) fn layer_norm(y: &[f64], gain: &[f64], bias: &[f64], trap: Trap) -> Vec<f64> {
    let eps = if trap == Trap::IndexNormEps1e5 { 1e-5 } else { LAYER_NORM_EPS };
    let width = y.len() as f64;
    let mean = if trap == Trap::IndexKeyRmsNorm { 0.0 } else { y.iter().sum::<f64>() / width };
    let centred: Vec<f64> = y.iter().map(|v| v - mean).collect();
    let mut out = rms(&centred, gain, eps);
    if trap != Trap::IndexKeyNormWithoutBias {
        add_scaled(&mut out, 1.0, bias);
    }
    out
}

/// The positions kept, in the order they are emitted: above the k-th score ascending, then ties
/// from the lowest position.
pub(crate) fn top_k(scores: &[f64], k: usize, trap: Trap) -> Vec<usize> {
    if scores.len() <= k {
        return (0..scores.len()).collect();
    }
    // The trap orders bit patterns, so that +0.0 stands above -0.0.
    let order = |a: f64, b: f64| {
        if trap == Trap::SelectionByBitPattern {
            a.total_cmp(&b)
        } else {
            a.partial_cmp(&b).expect("scores are finite")
        }
    };
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| order(*b, *a));
    let theta = sorted[k - 1];
    let mut kept: Vec<usize> = (0..scores.len()).filter(|&s| order(scores[s], theta).is_gt()).collect();
    let mut tied: Vec<usize> = (0..scores.len()).filter(|&s| order(scores[s], theta).is_eq()).collect();
    if trap == Trap::TiesToLatest {
        tied.reverse();
    }
    if trap != Trap::EmitAllAtLeastTheta {
        tied.truncate(k - kept.len());
    }
    kept.extend(tied);
    kept
}

/// A symmetric int8 round trip with one scale a row.
fn through_int8(w: &Matrix) -> Matrix {
    let mut out = w.clone();
    for row in out.data.chunks_mut(w.cols) {
        let step = row.iter().fold(0.0, |m: f64, v| m.max(v.abs())) / 127.0;
        if step > 0.0 {
            for v in row {
                *v = (*v / step).round() * step;
            }
        }
    }
    out
}
