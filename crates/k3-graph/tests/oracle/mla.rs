//! Gated MLA without positions, expanded form (`docs/arithmetic.md` 6).

use super::Trap;
use super::indexer::{IndexTrace, Indexer};
use super::num::{Matrix, Rows, add_scaled, dot, rms, rms_no_gain, rotate, scaled, sigma, softmax};

/// Hard-coded in the published model, unlike every other RMSNorm's.
const LORA_NORM_EPS: f64 = 1e-6;
const CONFIG_EPS: f64 = 1e-5;

/// The weights of one full-attention layer.
pub(crate) struct Mla {
    pub(crate) heads: usize,
    pub(crate) nope: usize,
    pub(crate) extra: usize,
    pub(crate) value: usize,
    pub(crate) latent: usize,
    pub(crate) q_a: Matrix,
    pub(crate) q_a_norm: Vec<f64>,
    pub(crate) q_b: Matrix,
    pub(crate) kv_a: Matrix,
    pub(crate) kv_a_norm: Vec<f64>,
    pub(crate) kv_b: Matrix,
    pub(crate) gate: Matrix,
    pub(crate) o_proj: Matrix,
    /// K3.1 only.
    pub(crate) indexer: Option<Indexer>,
}

/// What a layer gives back: outputs, and what its cache would hold.
pub(crate) struct MlaOutcome {
    pub(crate) y: Rows,
    pub(crate) latent: Rows,
    pub(crate) extra_key: Rows,
    pub(crate) index: Option<IndexTrace>,
}

impl Mla {
    pub(crate) fn run(&self, xs: &[Vec<f64>], trap: Trap) -> MlaOutcome {
        let eps = if trap == Trap::LoraNormEpsFromConfig { CONFIG_EPS } else { LORA_NORM_EPS };
        let q_lora = self.q_a.apply_rows(xs);
        let cq: Rows = q_lora.iter().map(|q| rms(q, &self.q_a_norm, eps)).collect();
        let q = self.q_b.apply_rows(&cq);
        let (latent, extra_key): (Rows, Rows) =
            self.kv_a.apply_rows(xs).iter().map(|kv| self.split_kv(kv, eps, trap)).unzip();
        let queries: Vec<Rows> = q.iter().enumerate().map(|(t, q)| self.split_q(q, t, trap)).collect();
        let (keys, values): (Vec<Rows>, Vec<Rows>) =
            latent.iter().map(|c| self.split_kv_b(&self.kv_b.apply(c), trap)).unzip();
        let rotated: Rows = extra_key
            .iter()
            .enumerate()
            .map(|(s, r)| {
                let mut r = r.clone();
                if trap == Trap::ExtraDimsRotated {
                    rotate(&mut r, s);
                }
                r
            })
            .collect();
        let index = self.indexer.as_ref().map(|indexer| {
            let source = if trap == Trap::IndexQueryFromRawLora { &q_lora } else { &cq };
            indexer.select(xs, source, &latent, &queries, trap)
        });

        let scale = self.scale(trap);
        let gates = self.gate.apply_rows(xs);
        let mut outputs = Rows::new();
        for t in 0..xs.len() {
            let everything: Vec<usize> = (0..=t).collect();
            let mut o = Vec::new();
            for h in 0..self.heads {
                let positions = match &index {
                    Some(index) if trap != Trap::IndexerIgnored => index.positions(t, h, self.heads),
                    _ => &everything,
                };
                let q = &queries[t][h];
                let scores: Vec<f64> = positions
                    .iter()
                    .map(|&s| {
                        let nope = dot(&q[..self.nope], &keys[s][h]);
                        let extra = dot(&q[self.nope..], &rotated[s]);
                        scale * if trap == Trap::ExtraDimsDropped { nope } else { nope + extra }
                    })
                    .collect();
                let mut head = vec![0.0; self.value];
                for (&s, p) in positions.iter().zip(softmax(&scores)) {
                    add_scaled(&mut head, p, &values[s][h]);
                }
                if trap == Trap::NormBeforeMlaGate {
                    head = rms_no_gain(&head, CONFIG_EPS);
                }
                o.extend(head);
            }
            outputs.push(o.iter().zip(&gates[t]).map(|(o, g)| o * sigma(*g)).collect());
        }
        MlaOutcome { y: self.o_proj.apply_rows(&outputs), latent, extra_key, index }
    }

    fn scale(&self, trap: Trap) -> f64 {
        let plain = ((self.nope + self.extra) as f64).powf(-0.5);
        match trap {
            Trap::ScaleOfNopeDims => (self.nope as f64).powf(-0.5),
            // DeepSeek's mscale for a factor of 40, squared as its code applies it.
            Trap::YarnMscale => plain * (0.1 * 40f64.ln() + 1.0).powi(2),
            _ => plain,
        }
    }

    fn split_kv(&self, kv: &[f64], eps: f64, trap: Trap) -> (Vec<f64>, Vec<f64>) {
        let (c, r) = kv.split_at(self.latent);
        if trap == Trap::NormOverLatentAndExtra {
            let all = rms_no_gain(kv, eps);
            let (c, r) = all.split_at(self.latent);
            (c.iter().zip(&self.kv_a_norm).map(|(v, w)| v * w).collect(), r.to_vec())
        } else {
            (rms(c, &self.kv_a_norm, eps), r.to_vec())
        }
    }

    /// Per head: the nope dims, then the extra dims.
    fn split_q(&self, q: &[f64], t: usize, trap: Trap) -> Rows {
        let width = self.nope + self.extra;
        (0..self.heads)
            .map(|h| {
                let mut head = if trap == Trap::QbSplitNopeThenExtra {
                    let extra_start = self.heads * self.nope + h * self.extra;
                    [&q[h * self.nope..][..self.nope], &q[extra_start..][..self.extra]].concat()
                } else {
                    q[h * width..][..width].to_vec()
                };
                if trap == Trap::ExtraDimsRotated {
                    rotate(&mut head[self.nope..], t);
                }
                head
            })
            .collect()
    }

    /// Per head: the key rows, then the value rows.
    fn split_kv_b(&self, kv: &[f64], trap: Trap) -> (Rows, Rows) {
        let width = self.nope + self.value;
        (0..self.heads)
            .map(|h| {
                let (key, value) = if trap == Trap::KvbSplitKeysThenValues {
                    (h * self.nope, self.heads * self.nope + h * self.value)
                } else {
                    (h * width, h * width + self.nope)
                };
                (scaled(&kv[key..][..self.nope], 1.0), scaled(&kv[value..][..self.value], 1.0))
            })
            .unzip()
    }
}
