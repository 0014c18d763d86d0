//! Routed experts on the host: all that are there, as one parallel region over (expert, weight rows).
//!
//! One expert of one token is 33 MFLOP, too little to start and end a region of many threads for. Every element is the
//! same dot product as in a product of its own, so how experts are grouped changes no bit.

use k3_experts::Expert;
use k3_quant::Matrix;
use k3_quant::cpu::{Activations, matmul_rows};
use rayon::prelude::*;

use super::Rows;
use crate::device::{ExpertUse, SituCaps};
use crate::scalar::situ_glu;

/// Weight rows of one task.
const TASK_ROWS: usize = 32;

/// An expert with its operands: first the rows of the latent that use it, then the inner values.
struct Work {
    expert: Expert,
    uses: Vec<ExpertUse>,
    gate_x: Activations,
    /// Where gate and up have formats that want different orders.
    up_x: Option<Activations>,
    /// By weight row: `[inner, uses]`, then `[latent, uses]`.
    y: Vec<f32>,
}

/// `w2 situ(w1 z, w3 z)` of every expert for its rows, each into its row of `out`.
pub(super) fn ffn(experts: Vec<(Expert, Vec<ExpertUse>)>, z: &Rows, caps: SituCaps, out: &mut Rows) {
    let mut works: Vec<Work> =
        experts.into_par_iter().map(|(expert, uses)| Work::new(expert, uses, z)).collect();

    // Gate and up together, so that neither is kept whole.
    let tasks: Vec<_> = works.iter_mut().flat_map(Work::inner_tasks).collect();
    tasks.into_par_iter().for_each(|task| task.inner(caps));

    works.par_iter_mut().for_each(Work::turn);
    let tasks: Vec<_> = works.iter_mut().flat_map(Work::outer_tasks).collect();
    tasks.into_par_iter().for_each(|task| matmul_rows(task.weight, task.first..task.end(), task.x, task.y));

    scatter(&works, out);
}

/// Some weight rows of an expert.
struct Task<'a> {
    weight: &'a Matrix,
    first: usize,
    n: usize,
    x: &'a Activations,
    /// The up projection and its operand, while the inner values are computed.
    up: (&'a Matrix, &'a Activations),
    y: &'a mut [f32],
}

impl Task<'_> {
    fn end(&self) -> usize {
        self.first + self.y.len() / self.n
    }

    fn inner(self, caps: SituCaps) {
        let rows = self.first..self.end();
        matmul_rows(self.weight, rows.clone(), self.x, self.y);
        let mut up = vec![0.0; self.y.len()];
        matmul_rows(self.up.0, rows, self.up.1, &mut up);
        for (g, u) in self.y.iter_mut().zip(&up) {
            *g = situ_glu(f64::from(*g), f64::from(*u), caps.beta, caps.linear_beta) as f32;
        }
    }
}

impl Work {
    fn new(expert: Expert, uses: Vec<ExpertUse>, z: &Rows) -> Self {
        let mut rows = Vec::with_capacity(uses.len() * z.width);
        uses.iter().for_each(|u| rows.extend_from_slice(z.row(u.row)));
        let activations = |m: &Matrix| Activations::new(m.format(), uses.len(), z.width, &rows);
        let gate_x = activations(&expert.w1);
        let up_x = (expert.w1.format() != expert.w3.format()).then(|| activations(&expert.w3));
        let y = vec![0.0; expert.w1.rows() * uses.len()];
        Self { expert, uses, gate_x, up_x, y }
    }

    fn inner_tasks(&mut self) -> impl Iterator<Item = Task<'_>> {
        let Self { expert, uses, gate_x, up_x, y } = self;
        let gate_x = &*gate_x;
        let up = (&expert.w3, up_x.as_ref().unwrap_or(gate_x));
        tasks(&expert.w1, uses.len(), gate_x, up, y)
    }

    /// The inner values become the operand.
    fn turn(&mut self) {
        let (n, inner) = (self.uses.len(), self.expert.w1.rows());
        let mut rows = std::mem::take(&mut self.y);
        if n > 1 {
            let by_weight_row = std::mem::replace(&mut rows, vec![0.0; n * inner]);
            for (i, row) in rows.chunks_exact_mut(inner).enumerate() {
                row.iter_mut().zip(by_weight_row[i..].iter().step_by(n)).for_each(|(y, v)| *y = *v);
            }
        }
        self.gate_x = Activations::new(self.expert.w2.format(), n, inner, &rows);
        self.up_x = None;
        drop(rows);
        self.y = vec![0.0; self.expert.w2.rows() * n];
    }

    fn outer_tasks(&mut self) -> impl Iterator<Item = Task<'_>> {
        let Self { expert, uses, gate_x, y, .. } = self;
        let gate_x = &*gate_x;
        tasks(&expert.w2, uses.len(), gate_x, (&expert.w2, gate_x), y)
    }
}

fn tasks<'a>(
    weight: &'a Matrix,
    n: usize,
    x: &'a Activations,
    up: (&'a Matrix, &'a Activations),
    y: &'a mut [f32],
) -> impl Iterator<Item = Task<'a>> {
    let blocks = y.chunks_mut(TASK_ROWS * n).enumerate();
    blocks.map(move |(block, y)| Task { weight, first: block * TASK_ROWS, n, x, up, y })
}

/// The results into their rows.
fn scatter(works: &[Work], out: &mut Rows) {
    let mut uses: Vec<(usize, &Work, usize)> = works
        .iter()
        .flat_map(|work| work.uses.iter().enumerate().map(move |(i, u)| (u.slot, work, i)))
        .collect();
    uses.sort_unstable_by_key(|(slot, ..)| *slot);
    let width = out.width;
    let mut rest = out.values.as_mut_slice();
    let mut at = 0;
    let mut rows = Vec::with_capacity(uses.len());
    for (slot, work, i) in uses {
        let (row, behind) = rest[(slot - at) * width..].split_at_mut(width);
        rows.push((row, work, i));
        (rest, at) = (behind, slot + 1);
    }
    rows.into_par_iter().for_each(|(row, work, i)| {
        let n = work.uses.len();
        row.iter_mut().zip(work.y[i..].iter().step_by(n)).for_each(|(o, y)| *o = *y);
    });
}
