//! The loops around the kernels: which weight rows and which activations are multiplied when.

use std::ops::Range;

use super::activations::{Blocked, Lanes, Unit};
use super::tree::tree_sum;
use crate::{Matrix, MatrixData, Scales, WeightFormat};

/// Weight rows that meet the same blocks of activations: those of [`TOKENS`] rows stay in the second-level cache, with all
/// partial sums.
const ROWS: usize = 32;
/// Weight rows whose blocks are decoded together: they stay in the first-level cache.
const PANEL: usize = 8;
/// [`Kernel::direct`] is called for a multiple of so many weight rows.
const FEW: usize = 8;
/// Rows of activations that meet a decoded block.
const TOKENS: usize = 96;

/// The inner loops of one instruction set and one mode. All sets give the same bits.
pub(super) trait Kernel {
    /// A unit of activations.
    type X: Unit;
    /// The weights that meet it.
    type W: Unit;
    /// Rows of activations up to which weights go to registers from their stored form.
    const DIRECT: usize;
    /// The most weight rows that [`Self::direct`] is called for, which are a multiple of [`FEW`].
    const MANY: usize;

    /// The unscaled products of `rows` with all of `x`, of which there are at most [`Self::DIRECT`] rows: `out` is
    /// `[rows, n]`. False if a row has scales that only [`Self::decode`] can read.
    fn direct(w: &Matrix, rows: Range<usize>, x: &Blocked<Self::X>, out: &mut [f32]) -> bool;

    /// Block `block` of a row.
    fn decode(w: &Matrix, row: usize, block: usize, out: &mut [Self::W]);

    /// Adds the products of a block: `w` is `[rows, width]`, `x` `[n, width]`, `lanes` `[rows, n]`.
    fn multiply(format: WeightFormat, width: usize, w: &[Self::W], x: &[Self::X], lanes: &mut [Lanes]);

    /// The sums of lanes.
    fn sum(lanes: &[Lanes], out: &mut [f32]) {
        out.iter_mut().zip(lanes).for_each(|(out, lanes)| *out = tree_sum(lanes.0));
    }

    /// Multiplies the finished sums of `rows` by what their whole row has in common: `out` is `[rows, n]`.
    fn rescale(w: &Matrix, rows: Range<usize>, out: &mut [f32]);
}

/// `out = W[rows] X^T`, `[rows.len(), n]`.
pub(super) fn product<K: Kernel>(w: &Matrix, rows: Range<usize>, x: &Blocked<K::X>, out: &mut [f32]) {
    let n = x.n;
    if n == 0 {
        return;
    }
    let mut buffers = Buffers { panel: Vec::new(), lanes: Vec::new(), sums: Vec::new() };
    let direct = n <= K::DIRECT;
    let (mut first, mut rest) = (rows.start, out);
    while first < rows.end {
        let left = rows.end - first;
        let count = if direct && left >= FEW { K::MANY.min(left / FEW * FEW) } else { ROWS.min(left) };
        let (out, behind) = rest.split_at_mut(count * n);
        let rows = first..first + count;
        if !direct || count < FEW || !K::direct(w, rows.clone(), x, out) {
            for token in (0..n).step_by(TOKENS) {
                buffers.product::<K>(w, rows.clone(), x, token..n.min(token + TOKENS), out);
            }
        }
        K::rescale(w, rows, out);
        (first, rest) = (first + count, behind);
    }
}

/// Memory that products of many rows need.
struct Buffers<W> {
    /// A block of columns of some weight rows.
    panel: Vec<W>,
    /// Partial sums of weight rows and rows of activations.
    lanes: Vec<Lanes>,
    sums: Vec<f32>,
}

impl<W: Unit> Buffers<W> {
    fn product<K: Kernel<W = W>>(
        &mut self,
        w: &Matrix,
        rows: Range<usize>,
        x: &Blocked<K::X>,
        tokens: Range<usize>,
        out: &mut [f32],
    ) {
        let n = tokens.len();
        self.lanes.clear();
        self.lanes.resize(rows.len() * n, Lanes::ZERO);
        for block in 0..x.blocks() {
            let width = x.width(block);
            let x = x.block(block, tokens.start, n);
            for (first, lanes) in rows.clone().step_by(PANEL).zip(self.lanes.chunks_mut(PANEL * n)) {
                self.panel.resize(lanes.len() / n * width, W::ZERO);
                for (r, panel) in (first..).zip(self.panel.chunks_exact_mut(width)) {
                    K::decode(w, r, block, panel);
                }
                K::multiply(w.format(), width, &self.panel, x, lanes);
            }
        }
        self.sums.resize(self.lanes.len(), 0.0);
        K::sum(&self.lanes, &mut self.sums);
        for (out, sums) in out.chunks_exact_mut(x.n).zip(self.sums.chunks_exact(n)) {
            out[tokens.clone()].copy_from_slice(sums);
        }
    }
}

/// [`Kernel::rescale`] of exact products.
pub(super) fn rescale_exact(w: &Matrix, rows: Range<usize>, out: &mut [f32]) {
    match w.data() {
        MatrixData::F32(_) | MatrixData::Bf16(_) => {}
        MatrixData::Mxfp4 { .. } | MatrixData::Int4 { .. } => out.iter_mut().for_each(|y| *y *= FOLDED),
        MatrixData::Nvfp4 { global, .. } => out.iter_mut().for_each(|y| *y = global.apply(*y)),
        MatrixData::Int8 { scale, .. } => scale_rows(scale, rows, out),
    }
}

/// Multiplies each of `rows` by its scale.
pub(super) fn scale_rows(scale: &Scales, rows: Range<usize>, out: &mut [f32]) {
    let n = out.len() / rows.len().max(1);
    for (r, out) in rows.zip(out.chunks_exact_mut(n.max(1))) {
        let scale = scale.row(r, 1).get(0);
        out.iter_mut().for_each(|y| *y *= scale);
    }
}

/// Block scales of MXFP4 and INT4 are divided by this before they meet their codes, which reach 8, so that no weight
/// overflows; all of MXFP4's stay exact. The sum is multiplied by it.
pub(super) const FOLDED: f32 = 8.0;
