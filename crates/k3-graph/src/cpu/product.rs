//! Products with weights: linear layers, and routed experts.

use std::ops::Range;

use k3_experts::Expert;
use k3_quant::Matrix;
use k3_quant::cpu::vector::Vectors;
use k3_quant::cpu::{Activations, Mode, matmul_rows};

use super::rows::{Prepared, Rows, Strips};
use super::threads::Threads;
use crate::device::{ExpertUse, SituCaps};

/// Nanoseconds of one tile, about: much longer than it takes to hand one out, much shorter than a product of a layer.
const TILE: usize = 10_000;
/// Bytes of weights that one thread reads in a nanosecond, about. Only the size of tiles depends on it.
const BYTES: usize = 18;
/// Products that one thread adds in a nanosecond, about.
const PRODUCTS: usize = 50;
/// Picoseconds to prepare one value for products, about.
const PREPARATION: usize = 1000;
/// Weight rows of a tile are a multiple of this, for the blocks of the kernels.
const ROWS: usize = 32;
/// The most of them, with many rows of activations: their products are put in order from the second-level cache.
const MOST_ROWS: usize = 512;
/// Rows of activations up to which reading weights takes longer than anything else. Each tile begins with some that come
/// late, so tiles are large then,
const READING: usize = 4;
/// as long as there are so many of them left for each thread, and smaller towards the end.
const PORTIONS: usize = 4;
/// Rows of experts that are worked on together, at most: their inner values are in memory at once. With more, an expert is
/// the work of one thread where there are enough of them.
const MANY_USES: usize = 256;

/// Nanoseconds that a product of `weight` with `n` rows takes, about.
fn nanoseconds(weight: &Matrix, n: usize) -> usize {
    weight.size_bytes() / BYTES + weight.rows() * weight.cols() * n / PRODUCTS
}

/// Of weight rows that are left, those of the next tile, where `behind` nanoseconds of work are left behind them.
fn tile_rows(threads: usize, weight: &Matrix, n: usize, behind: usize) -> impl Fn(usize) -> usize + use<> {
    let a_row = (nanoseconds(weight, n) / weight.rows().max(1)).max(1);
    move |left| {
        if n > READING {
            return (TILE / a_row).next_multiple_of(ROWS).clamp(ROWS, MOST_ROWS);
        }
        let portion = (left * a_row + behind) / (PORTIONS * threads);
        (portion.max(TILE) / a_row).next_multiple_of(ROWS).max(ROWS)
    }
}

/// `Y = X W^T`
pub(super) fn linear(threads: &Threads, mode: Mode, weight: &Matrix, x: &Rows) -> Rows {
    let n = x.len();
    let mut y = Rows::zeros(n, weight.rows());
    if n > 0 {
        let x = x.prepared(mode, weight.format());
        let tiles = Strips::new(y.rows_mut(), tile_rows(threads.count(), weight, n, 0));
        threads.share_with(nanoseconds(weight, n), tiles, Vec::new, |buffer, (rows, y)| {
            product(weight, rows, &x, buffer, y);
        });
    }
    y
}

/// Columns `rows` of every row of `X W^T`.
fn product(weight: &Matrix, rows: Range<usize>, x: &Activations, buffer: &mut Vec<f32>, y: Vec<&mut [f32]>) {
    let mut y = y;
    if let [y] = &mut y[..] {
        return matmul_rows(weight, rows, x, y);
    }
    // Kernels give all products of a weight row side by side.
    matmul_rows(weight, rows.clone(), x, sized(buffer, rows.len() * x.rows()));
    turn(buffer, y);
}

/// `rows [n, m]` from `by_weight_row [m, n]`.
fn turn(by_weight_row: &[f32], rows: Vec<&mut [f32]>) {
    let n = rows.len();
    for (i, row) in rows.into_iter().enumerate() {
        row.iter_mut().zip(by_weight_row[i..].iter().step_by(n)).for_each(|(y, v)| *y = *v);
    }
}

/// The first `len` values, whatever they are.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(len, 0.0);
    buffer
}

/// Room for one thread's tiles.
#[derive(Default)]
struct Buffers {
    gate: Vec<f32>,
    up: Vec<f32>,
    out: Vec<f32>,
}

/// An expert at work on its rows of `z`.
struct Job<'a> {
    expert: &'a Expert,
    uses: &'a [ExpertUse],
    /// A row for each use.
    out: Vec<&'a mut [f32]>,
}

impl Job<'_> {
    fn inner_nanoseconds(&self) -> usize {
        let n = self.uses.len();
        nanoseconds(&self.expert.w1, n) + nanoseconds(&self.expert.w3, n)
    }

    fn outer_nanoseconds(&self) -> usize {
        nanoseconds(&self.expert.w2, self.uses.len())
    }
}

/// `w2 situ(w1 z, w3 z)` of several experts, each into its rows of `out`.
pub(super) fn experts(
    threads: &Threads,
    vectors: Vectors,
    mode: Mode,
    experts: &[(Expert, Vec<ExpertUse>)],
    z: &Rows,
    caps: SituCaps,
    out: &mut Rows,
) {
    let jobs = jobs(experts, out);
    let uses: usize = jobs.iter().map(|job| job.uses.len()).sum();
    if uses >= MANY_USES && jobs.len() >= 2 * threads.count() {
        // Nobody waits for others in the middle of an expert.
        let total = jobs.iter().map(|job| job.inner_nanoseconds() + job.outer_nanoseconds()).sum();
        return threads.share_with(total, jobs.into_iter(), Buffers::default, |buffers, job| {
            let x = Inputs::new(mode, job.expert, z, job.uses);
            let mut inner = Rows::zeros(job.uses.len(), job.expert.w1.rows());
            gate_up(vectors, job.expert, 0..inner.width(), &x, caps, buffers, inner.rows_mut().collect());
            let (w2, inner) = (&job.expert.w2, inner.prepared(mode, job.expert.w2.format()));
            product(w2, 0..w2.rows(), &inner, &mut buffers.out, job.out);
        });
    }

    let mut jobs = jobs.into_iter().peekable();
    while let Some(job) = jobs.next() {
        let mut uses = job.uses.len();
        let mut some = vec![job];
        while let Some(job) = jobs.next_if(|job| uses + job.uses.len() <= MANY_USES) {
            uses += job.uses.len();
            some.push(job);
        }
        together(threads, vectors, mode, some, z, caps);
    }
}

/// Some experts as tiles of weight rows: first the inner values of all of them, then their outputs.
fn together(threads: &Threads, vectors: Vectors, mode: Mode, jobs: Vec<Job<'_>>, z: &Rows, caps: SituCaps) {
    let (total, behind) = left_behind(jobs.iter().map(Job::inner_nanoseconds));
    let inputs: Vec<Inputs<'_>> = jobs.iter().map(|job| Inputs::new(mode, job.expert, z, job.uses)).collect();
    let mut inners: Vec<Rows> =
        jobs.iter().map(|job| Rows::zeros(job.uses.len(), job.expert.w1.rows())).collect();
    let tiles =
        jobs.iter().zip(&inputs).zip(&mut inners).zip(behind).flat_map(|(((job, x), inner), behind)| {
            // Rows of `w3` take as long.
            let rows = tile_rows(threads.count(), &job.expert.w1, job.uses.len(), behind / 2);
            let strips = Strips::new(inner.rows_mut(), rows);
            strips.map(move |(rows, inner)| (job.expert, x, rows, inner))
        });
    threads.share_with(total, tiles, Buffers::default, |buffers, (expert, x, rows, inner)| {
        gate_up(vectors, expert, rows, x, caps, buffers, inner);
    });

    // All of them first: a thread that found another preparing what it needs would sleep.
    let values: usize = inners.iter().map(|inner| inner.values().len()).sum();
    let each = jobs.iter().zip(&inners);
    threads.share(values * PREPARATION / 1000, each, |(job, inner)| {
        inner.prepared(mode, job.expert.w2.format());
    });
    let (total, behind) = left_behind(jobs.iter().map(Job::outer_nanoseconds));
    let tiles = jobs.into_iter().zip(&inners).zip(behind).flat_map(|((job, inner), behind)| {
        let rows = tile_rows(threads.count(), &job.expert.w2, job.uses.len(), behind);
        let strips = Strips::new(job.out, rows);
        strips.map(move |(rows, out)| (&job.expert.w2, inner, rows, out))
    });
    threads.share_with(total, tiles, Vec::new, |buffer, (w2, inner, rows, out)| {
        product(w2, rows, &inner.prepared(mode, w2.format()), buffer, out);
    });
}

/// The sum of all, and behind each of them what is left.
fn left_behind(nanoseconds: impl Iterator<Item = usize> + Clone) -> (usize, Vec<usize>) {
    let total = nanoseconds.clone().sum();
    let mut left = total;
    (
        total,
        nanoseconds
            .map(|each| {
                left -= each;
                left
            })
            .collect(),
    )
}

/// The experts, each with the rows of `out` that it is to fill.
fn jobs<'a>(experts: &'a [(Expert, Vec<ExpertUse>)], out: &'a mut Rows) -> Vec<Job<'a>> {
    let width = out.width();
    let uses = experts
        .iter()
        .enumerate()
        .flat_map(|(job, (_, uses))| uses.iter().enumerate().map(move |(i, u)| (u.slot, job, i)));
    let mut slots: Vec<(usize, usize, usize)> = uses.collect();
    slots.sort_unstable();
    let mut rows: Vec<Vec<Option<&mut [f32]>>> =
        experts.iter().map(|(_, uses)| uses.iter().map(|_| None).collect()).collect();
    let (mut rest, mut first) = (out.values_mut(), 0);
    for (slot, job, i) in slots {
        let (row, behind) = rest[(slot - first) * width..].split_at_mut(width);
        rows[job][i] = Some(row);
        (rest, first) = (behind, slot + 1);
    }
    let jobs = experts.iter().zip(rows);
    jobs.map(|((expert, uses), rows)| Job { expert, uses, out: rows.into_iter().flatten().collect() })
        .collect()
}

/// The rows of `z` that an expert is used for.
struct Inputs<'a> {
    of_gate: Prepared<'a>,
    /// `None`: those of the gate, whose matrix has the same format.
    of_up: Option<Activations>,
}

impl<'a> Inputs<'a> {
    fn new(mode: Mode, expert: &Expert, z: &'a Rows, uses: &[ExpertUse]) -> Self {
        let (gate, up) = (expert.w1.format(), expert.w3.format());
        if gate == up && uses.iter().map(|u| u.row).eq(0..z.len()) {
            return Self { of_gate: z.prepared(mode, gate), of_up: None };
        }
        let rows = z.gather(uses.iter().map(|u| u.row));
        let prepared = |format| Activations::with_mode(mode, format, rows.len(), rows.width(), rows.values());
        Self { of_gate: Prepared::Made(prepared(gate)), of_up: (gate != up).then(|| prepared(up)) }
    }
}

/// Columns `rows` of `situ(w1 x, w3 x)`.
fn gate_up(
    vectors: Vectors,
    expert: &Expert,
    rows: Range<usize>,
    x: &Inputs<'_>,
    caps: SituCaps,
    buffers: &mut Buffers,
    mut inner: Vec<&mut [f32]>,
) {
    let (x, up_x) = (&*x.of_gate, x.of_up.as_ref().unwrap_or(&x.of_gate));
    let len = rows.len() * x.rows();
    let (gate, up) = (sized(&mut buffers.gate, len), sized(&mut buffers.up, len));
    matmul_rows(&expert.w3, rows.clone(), up_x, up);
    if let [inner] = &mut inner[..] {
        matmul_rows(&expert.w1, rows, x, inner);
        return vectors.situ_glu(inner, up, caps.beta, caps.linear_beta);
    }
    matmul_rows(&expert.w1, rows, x, gate);
    vectors.situ_glu(gate, up, caps.beta, caps.linear_beta);
    turn(gate, inner);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_take_every_row_and_shrink() {
        for (rows, cols) in [(1, 1), (33, 64), (5000, 16), (3072, 512)] {
            let weight = Matrix::bf16(rows, cols, vec![0; rows * cols * 2].into()).unwrap();
            for (threads, n, behind) in [(1, 1, 0), (2, 4, 0), (2, 1, 1 << 30), (1024, 1, 0), (2, 5, 1 << 30)]
            {
                let width = tile_rows(threads, &weight, n, behind);
                let mut y = Rows::zeros(n, rows);
                let strips = Strips::new(y.rows_mut(), &width);
                let tiles: Vec<Range<usize>> = strips.map(|(rows, _)| rows).collect();
                let case =
                    format!("[{rows}, {cols}], {threads} threads, {n} rows, {behind} behind: {tiles:?}");
                assert!(tiles.iter().flat_map(Clone::clone).eq(0..rows), "{case}");
                assert!(tiles.is_sorted_by(|one, next| one.len() >= next.len()), "{case}");
                assert!(tiles.iter().all(|tile| tile.start.is_multiple_of(ROWS)), "{case}");
                assert!(n <= READING || tiles.iter().all(|tile| tile.len() <= MOST_ROWS), "{case}");
            }
        }
    }
}
