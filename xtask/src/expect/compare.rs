//! Comparing what a run gave with what it should have given.

use std::fmt;

use k3_graph::select::argmax;

use super::{Axis, Entry, Expectations, Rows, Rule, Sizes, Tensor, Tensors, Values, layout};

/// One named comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// What was compared: a tensor, or what it says.
    pub name: String,
    /// What came of it.
    pub outcome: Outcome,
    /// The number behind it.
    pub found: Found,
    /// Where and what, if it failed or was skipped.
    pub note: String,
}

/// What came of a check. A skipped check is no passed check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Compared and good.
    Passed,
    /// Compared and not good.
    Failed,
    /// There was nothing to compare with.
    Skipped,
}

/// The number behind a check.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// Distance in relative L2; with layers, that of the worst of them.
    Distance {
        /// `|found - expected| / |expected|`
        relative_l2: f64,
        /// The same of the worst row, where every row is held to the bound.
        worst_row: Option<f64>,
        /// Largest absolute difference of two values.
        max_abs: f64,
        /// What `relative_l2` may be.
        bound: f64,
    },
    /// How many of how many are equal.
    Equal {
        /// Equal.
        equal: usize,
        /// Compared.
        of: usize,
    },
    /// No number.
    Nothing,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Distance { relative_l2, worst_row, max_abs, bound } => {
                write!(f, "rel-L2 {relative_l2:.1e}")?;
                if let Some(worst) = worst_row {
                    write!(f, ", at the worst position {worst:.1e}")?;
                }
                write!(f, " (bound {bound:.0e}), max-abs {max_abs:.1e}")
            }
            Self::Equal { equal, of } => write!(f, "{equal}/{of} equal"),
            Self::Nothing => Ok(()),
        }
    }
}

impl Check {
    /// A check that had nothing to compare with.
    pub fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Self { name: name.into(), outcome: Outcome::Skipped, found: Found::Nothing, note: why.into() }
    }

    /// A check that is good or not, with a note for the latter.
    pub fn of(name: impl Into<String>, good: bool, found: Found, note: impl Into<String>) -> Self {
        let (outcome, note) =
            if good { (Outcome::Passed, String::new()) } else { (Outcome::Failed, note.into()) };
        Self { name: name.into(), outcome, found, note }
    }
}

/// `|found - expected| / |expected|` in f64, and the largest absolute difference. Infinite if only the expected
/// values are all zero.
pub(crate) fn relative_l2(found: &[f32], expected: &[f32]) -> (f64, f64) {
    let (mut error, mut norm, mut max) = (0.0, 0.0, 0.0_f64);
    for (&f, &e) in found.iter().zip(expected) {
        let difference = f64::from(f) - f64::from(e);
        error += difference * difference;
        norm += f64::from(e) * f64::from(e);
        // `max` would lose a NaN.
        max = if difference.is_nan() { f64::NAN } else { max.max(difference.abs()) };
    }
    (if error == 0.0 { 0.0 } else { (error / norm).sqrt() }, max)
}

/// Whether a distance is larger than `bound`, as a NaN is.
pub(crate) fn exceeds(distance: f64, bound: f64) -> bool {
    distance.is_nan() || distance > bound
}

/// Compares every tensor that a model of these sizes can have: absent ones are skipped, all others must be as
/// expected. `bound` is for relative L2.
///
/// Greedy continuations are compared up to the first token that differs: after it, nothing is comparable.
pub fn compare(expected: &Expectations, found: &Tensors, sizes: &Sizes, bound: f64) -> Vec<Check> {
    let ids = |tensors: &Tensors| tensors.get("greedy_ids").and_then(|t| t.as_i32().map(<[i32]>::to_vec));
    let comparable = match (ids(&expected.tensors), ids(found)) {
        (Some(e), Some(f)) => e.iter().zip(&f).position(|(e, f)| e != f).map_or(e.len(), |i| i + 1),
        _ => sizes.continuation,
    };
    let mut checks = Vec::new();
    for mut entry in layout(sizes) {
        if !matches!(entry.rule, Rule::Close | Rule::CloseRows | Rule::Equal) {
            continue;
        }
        if entry.is_of_indexer() && sizes.ignore_indexer {
            checks.push(Check::skipped(entry.name, "the indexer is ignored (--ignore-indexer)"));
            continue;
        }
        if let Some(e) = expected.tensors.get(entry.name)
            && entry.admits(&e.shape)
        {
            entry.shape.clone_from(&e.shape);
        }
        let comparison = Comparison { entry: &entry, sizes, bound, comparable };
        match (expected.tensors.get(entry.name), found.get(entry.name)) {
            (None, _) => checks.push(Check::skipped(entry.name, "not in the expectations")),
            (Some(e), _) if e.shape.contains(&0) => {
                checks.push(Check::skipped(entry.name, "there is nothing in it to compare"));
            }
            (Some(e), Some(f)) => {
                checks.push(comparison.check(e, f));
                if entry.name == "logits" {
                    checks.extend(argmax_agreement(e, f, sizes));
                }
            }
            (Some(_), None) => {
                let note = "expected, but the run has no such tensor";
                checks.push(Check::of(entry.name, false, Found::Nothing, note));
            }
        }
    }
    let json_greedy = expected.json_greedy.as_ref().filter(|ids| !ids.is_empty());
    if let (Some(e), Some(f)) = (json_greedy, ids(found)) {
        let equal = e.iter().zip(&f).take_while(|(e, f)| e == f).count();
        let note = match (e.get(equal), f.get(equal)) {
            (Some(e), Some(f)) => format!("token {equal}: expected {e}, found {f}"),
            (e, _) => format!("token {equal}: expected {e:?}, the run stops there"),
        };
        let of = e.len();
        checks.push(Check::of("greedy (json)", equal == of, Found::Equal { equal, of }, note));
    }
    checks
}

fn argmax_agreement(expected: &Tensor, found: &Tensor, sizes: &Sizes) -> Option<Check> {
    let rows = |t| Some(Tensor::as_f32(t)?.chunks_exact(sizes.config.vocab_size).map(argmax));
    let pairs: Vec<_> = rows(expected)?.zip(rows(found)?).collect();
    let equal = pairs.iter().filter(|(e, f)| e == f).count();
    let note = pairs.iter().position(|(e, f)| e != f).map_or_else(String::new, |i| {
        let text = |id: Option<u32>| id.map_or_else(|| "none".to_owned(), |id| id.to_string());
        format!("position {i}: expected {}, found {}", text(pairs[i].0), text(pairs[i].1))
    });
    let of = pairs.len();
    Some(Check::of("logits argmax", equal == of, Found::Equal { equal, of }, note))
}

/// A place in a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Difference {
    /// Index on the entry's [`Axis`].
    pub(crate) at: usize,
    /// Index on its [`Rows`].
    pub(crate) row: usize,
    /// What is wrong there.
    pub(crate) text: String,
}

/// How one tensor is compared.
pub(crate) struct Comparison<'a> {
    pub(crate) entry: &'a Entry,
    pub(crate) sizes: &'a Sizes,
    pub(crate) bound: f64,
    /// Rows of a continuation that can be compared.
    pub(crate) comparable: usize,
}

impl Comparison<'_> {
    /// Slices on the axis, rows of a slice, elements of a row.
    fn dims(&self) -> (usize, usize, usize) {
        let shape = &self.entry.shape;
        let (slices, rest) = match self.entry.axis {
            Axis::None => (1, shape.as_slice()),
            _ => (shape[0], &shape[1..]),
        };
        let (rows, rest) = match self.entry.rows {
            Rows::Last => (1, rest),
            Rows::Prompt | Rows::Continuation => (rest[0], &rest[1..]),
        };
        (slices, rows, rest.iter().product())
    }

    fn compared_rows(&self) -> usize {
        let rows = self.dims().1;
        if self.entry.rows == Rows::Continuation { rows.min(self.comparable) } else { rows }
    }

    /// Where a row is, in words.
    pub(crate) fn place(&self, at: usize, row: usize) -> String {
        let layer = self.sizes.layers_on(self.entry.axis).get(at).map(|l| format!("layer {l}"));
        let row = match self.entry.rows {
            Rows::Last => None,
            Rows::Prompt => Some(format!("position {row}")),
            Rows::Continuation => Some(format!("token {row} after the prompt")),
        };
        layer.into_iter().chain(row).collect::<Vec<_>>().join(", ")
    }

    fn check(&self, expected: &Tensor, found: &Tensor) -> Check {
        let (slices, rows, width) = self.dims();
        let compared = self.compared_rows();
        match (&expected.values, &found.values) {
            (Values::F32(e), Values::F32(f)) => {
                let mut worst = (0.0, 0);
                let mut max_abs = 0.0_f64;
                for at in 0..slices {
                    let range = at * rows * width..(at * rows + compared) * width;
                    let (distance, max) = relative_l2(&f[range.clone()], &e[range]);
                    max_abs = if max.is_nan() { max } else { max_abs.max(max) };
                    if exceeds(distance, worst.0) && !worst.0.is_nan() {
                        worst = (distance, at);
                    }
                }
                let note = self.difference(expected, found, worst.1).map_or_else(String::new, |d| {
                    let place = self.place(d.at, d.row);
                    if compared == 1 { place } else { format!("{place}: {}", d.text) }
                });
                let worst_row = self.worst_row(f, e);
                let good = [Some(worst.0), worst_row].into_iter().flatten().all(|d| !exceeds(d, self.bound));
                let distance =
                    Found::Distance { relative_l2: worst.0, worst_row, max_abs, bound: self.bound };
                Check::of(self.entry.name, good, distance, note)
            }
            (Values::I32(e), Values::I32(f)) => {
                let same = |at: usize, row: usize| {
                    let start = (at * rows + row) * width;
                    e[start..start + width] == f[start..start + width]
                };
                let equal =
                    (0..slices).map(|at| (0..compared).filter(|&row| same(at, row)).count()).sum::<usize>();
                let note = (0..slices)
                    .find_map(|at| self.difference(expected, found, at))
                    .map(|d| format!("first at {}: {}", self.place(d.at, d.row), d.text));
                // A continuation that forked is not equal just because the rest is not compared.
                let of = slices * if self.entry.name == "greedy_ids" { rows } else { compared };
                Check::of(self.entry.name, equal == of, Found::Equal { equal, of }, note.unwrap_or_default())
            }
            _ => Check::of(self.entry.name, false, Found::Nothing, "the run has values of another type"),
        }
    }

    /// The largest distance of a row, where rows are held to the bound; NaN if there is one.
    fn worst_row(&self, found: &[f32], expected: &[f32]) -> Option<f64> {
        if self.entry.rule != Rule::CloseRows {
            return None;
        }
        let (slices, rows, width) = self.dims();
        let range = |at: usize, row: usize| (at * rows + row) * width..(at * rows + row + 1) * width;
        let all = (0..slices).flat_map(|at| (0..self.compared_rows()).map(move |row| range(at, row)));
        let distances = all.map(|range| relative_l2(&found[range.clone()], &expected[range]).0);
        Some(distances.fold(0.0, |worst, d| if exceeds(d, worst) && !worst.is_nan() { d } else { worst }))
    }

    /// The first row of slice `at` that is not as expected; none if the slice as a whole is within the bound, and,
    /// where that is asked for, every row.
    pub(crate) fn difference(&self, expected: &Tensor, found: &Tensor, at: usize) -> Option<Difference> {
        let (_, rows, width) = self.dims();
        let compared = self.compared_rows();
        let range = |row: usize| (at * rows + row) * width..(at * rows + row + 1) * width;
        let slice = at * rows * width..(at * rows + compared) * width;
        match (&expected.values, &found.values) {
            (Values::F32(e), Values::F32(f)) => {
                let whole = relative_l2(&f[slice.clone()], &e[slice]).0;
                let of_row = |row| relative_l2(&f[range(row)], &e[range(row)]).0;
                let first = || (0..compared).find(|&row| exceeds(of_row(row), self.bound));
                let row = match (exceeds(whole, self.bound), self.entry.rule) {
                    (true, _) => first().unwrap_or(0),
                    (false, Rule::CloseRows) => first()?,
                    (false, _) => return None,
                };
                let text = format!("rel-L2 {:.1e}, {whole:.1e} over all of them", of_row(row));
                let text = if compared == 1 { format!("rel-L2 {whole:.1e}") } else { text };
                Some(Difference { at, row, text })
            }
            (Values::I32(e), Values::I32(f)) => {
                let row = (0..compared).find(|&row| e[range(row)] != f[range(row)])?;
                Some(Difference { at, row, text: lists(&e[range(row)], &f[range(row)]) })
            }
            _ => None,
        }
    }
}

/// Two lists that differ, in words.
fn lists(expected: &[i32], found: &[i32]) -> String {
    if let ([e], [f]) = (expected, found) {
        return format!("expected {e}, found {f}");
    }
    let sorted = |list: &[i32]| {
        let mut list = list.to_vec();
        list.sort_unstable();
        list
    };
    let show = |list: &[i32]| {
        let real: Vec<String> = list.iter().filter(|&&v| v >= 0).map(i32::to_string).collect();
        if real.len() > 16 {
            format!("[{}, ...]", real[..16].join(", "))
        } else {
            format!("[{}]", real.join(", "))
        }
    };
    let order = if sorted(expected) == sorted(found) { "the same choice in another order: " } else { "" };
    format!("{order}expected {}, found {}", show(expected), show(found))
}
