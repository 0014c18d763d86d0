//! Activations on the host.

use std::ops::Range;
use std::sync::OnceLock;

use k3_quant::WeightFormat;
use k3_quant::cpu::{Activations, Mode};

use super::threads::Threads;

/// Nanoseconds of one tile of row-wise work, about.
const TILE: usize = 15_000;

/// Activations `[rows, width]`.
#[derive(Debug)]
pub struct Rows {
    width: usize,
    values: Vec<f32>,
    /// The same as the products with the first matrix read them: several projections of one input are common.
    prepared: OnceLock<(WeightFormat, Activations)>,
}

impl Clone for Rows {
    fn clone(&self) -> Self {
        Self::new(self.width, self.values.clone())
    }
}

/// What [`Rows::prepared`] gives.
pub(super) enum Prepared<'a> {
    Kept(&'a Activations),
    Made(Activations),
}

impl std::ops::Deref for Prepared<'_> {
    type Target = Activations;
    fn deref(&self) -> &Activations {
        match self {
            Self::Kept(x) => x,
            Self::Made(x) => x,
        }
    }
}

impl Rows {
    pub(super) fn new(width: usize, values: Vec<f32>) -> Self {
        Self { width, values, prepared: OnceLock::new() }
    }

    pub(super) fn zeros(rows: usize, width: usize) -> Self {
        Self::new(width, vec![0.0; rows * width])
    }

    pub(super) fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Whoever changes values gets them from here: what was prepared is of the old ones.
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        self.prepared = OnceLock::new();
        &mut self.values
    }

    /// Rows behind the last.
    pub(super) fn extend(&mut self, values: &[f32]) {
        self.prepared = OnceLock::new();
        self.values.extend_from_slice(values);
    }

    pub(super) fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.width..(r + 1) * self.width]
    }

    pub(super) fn rows_mut(&mut self) -> std::slice::ChunksExactMut<'_, f32> {
        let width = self.width.max(1);
        self.values_mut().chunks_exact_mut(width)
    }

    pub(super) fn gather(&self, rows: impl ExactSizeIterator<Item = usize>) -> Self {
        // In one piece: a vector that grows is up to twice as large.
        let mut values = Vec::with_capacity(rows.len() * self.width);
        rows.for_each(|r| values.extend_from_slice(self.row(r)));
        Self::new(self.width, values)
    }

    /// For products with matrices of `format`. A device has one mode.
    pub(super) fn prepared(&self, mode: Mode, format: WeightFormat) -> Prepared<'_> {
        let make = || Activations::with_mode(mode, format, self.len(), self.width, &self.values);
        let (of, kept) = self.prepared.get_or_init(|| (format, make()));
        if *of == format { Prepared::Kept(kept) } else { Prepared::Made(make()) }
    }

    /// `rows` of `width`, each worked out from its index in about `nanoseconds`.
    pub(super) fn by_row(
        threads: &Threads,
        nanoseconds: usize,
        rows: usize,
        width: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Self {
        let mut out = Self::zeros(rows, width);
        if width > 0 {
            let tile = (TILE / nanoseconds.max(1)).max(1);
            let tiles = out.values.chunks_mut(tile * width).enumerate();
            threads.share(rows * nanoseconds, tiles, |(i, out)| {
                out.chunks_exact_mut(width).enumerate().for_each(|(r, out)| f(i * tile + r, out));
            });
        }
        out
    }

    /// `f` on pieces of a copy of `self` and of `other`, which has the same shape; `picoseconds` is what an element takes.
    pub(super) fn with_each(
        &self,
        threads: &Threads,
        picoseconds: usize,
        other: &Self,
        f: impl Fn(&mut [f32], &[f32]) + Sync,
    ) -> Self {
        let mut out = self.clone();
        let tile = TILE * 1000 / picoseconds.max(1);
        let nanoseconds = out.values.len() * picoseconds / 1000;
        let tiles = out.values.chunks_mut(tile).zip(other.values.chunks(tile));
        threads.share(nanoseconds, tiles, |(out, other)| f(out, other));
        out
    }
}

/// Strips of columns of some rows, from left to right: the columns, and their part of every row.
pub(super) struct Strips<'a, W> {
    rows: Vec<&'a mut [f32]>,
    width: W,
    first: usize,
}

impl<'a, W: Fn(usize) -> usize> Strips<'a, W> {
    /// Of rows of one width. `width` says of how many columns that are left the next strip has how many; not zero.
    pub(super) fn new(rows: impl IntoIterator<Item = &'a mut [f32]>, width: W) -> Self {
        Self { rows: rows.into_iter().collect(), width, first: 0 }
    }
}

impl<'a, W: Fn(usize) -> usize> Iterator for Strips<'a, W> {
    type Item = (Range<usize>, Vec<&'a mut [f32]>);

    fn next(&mut self) -> Option<Self::Item> {
        let left = self.rows.first()?.len();
        if left == 0 {
            return None;
        }
        let width = (self.width)(left).min(left);
        let parts = self.rows.iter_mut().filter_map(|row| row.split_off_mut(..width)).collect();
        let columns = self.first..self.first + width;
        self.first = columns.end;
        Some((columns, parts))
    }
}
