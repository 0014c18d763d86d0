//! Activations in the order and the number format in which the kernels read them.

use std::fmt;
use std::str::FromStr;

use super::{LANES, STEP};
use crate::WeightFormat;

/// How activations enter a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// As f32. Weights are exact, products are exact, sums are rounded.
    #[default]
    Exact,
    /// For matrices of 4 and 8 bits: rounded to 8-bit integers, 32 columns to a scale. For others as
    /// [`Mode::Exact`].
    ///
    /// With `s` the scale of a group, the largest magnitude in it divided by 127, each activation of it moves by at most
    /// `s / 2`, and so a result by at most the sum over groups of `s / 2` times the magnitudes of the row's weights in it.
    /// A group without a magnitude of `127 * 2^-126` counts as zeros. One with an infinity or a NaN makes its row NaN.
    Int8,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
        })
    }
}

/// A name that is no [`Mode`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no arithmetic {0:?}: expected exact or int8")]
pub struct UnknownMode(String);

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<Self, UnknownMode> {
        match name {
            "exact" => Ok(Self::Exact),
            "int8" => Ok(Self::Int8),
            _ => Err(UnknownMode(name.to_owned())),
        }
    }
}

/// Columns that share a scale of activations in [`Mode::Int8`].
pub const ACTIVATION_GROUP: usize = 32;

/// Activations `[n, cols]` as the kernels of one weight format read them.
#[derive(Debug)]
pub struct Activations {
    n: usize,
    cols: usize,
    pub(super) values: Values,
}

/// What the kernels see of [`Activations`].
#[derive(Debug)]
pub(super) enum Values {
    Exact(Order, Blocked<Lanes>),
    Int8(IntOrder, Blocked<Ints>),
}

/// The order of f32 columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// As they come.
    Natural,
    /// Within 32 columns the 16 even ones, then the 16 odd ones, as nibbles and pairs of bf16 come.
    EvenOdd,
}

impl Order {
    pub(super) fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::F32 | WeightFormat::Int8 => Self::Natural,
            WeightFormat::Bf16 | WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Int4 => {
                Self::EvenOdd
            }
        }
    }
}

/// The order of integer columns, and what weights are raised by so that none is negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntOrder {
    /// 64 columns a block, weights raised by 128.
    Int8,
    /// 128 columns a block, even and odd ones apart, doubled weights raised by 12.
    E2m1,
    /// 128 columns a block, even and odd ones apart, weights raised by 8.
    Int4,
}

impl IntOrder {
    /// `None` for formats that have no kernels on integers.
    pub(super) fn of(format: WeightFormat) -> Option<Self> {
        match format {
            WeightFormat::F32 | WeightFormat::Bf16 => None,
            WeightFormat::Int8 => Some(Self::Int8),
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Some(Self::E2m1),
            WeightFormat::Int4 => Some(Self::Int4),
        }
    }

    /// Columns of one [`Ints`].
    pub(super) fn columns(self) -> usize {
        match self {
            Self::Int8 => 64,
            Self::E2m1 | Self::Int4 => 128,
        }
    }

    fn raise(self) -> i32 {
        match self {
            Self::Int8 => 128,
            Self::E2m1 => 12,
            Self::Int4 => 8,
        }
    }
}

/// One value for each of 16 partial sums, in a cache line of its own.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub(super) [f32; LANES]);

/// The activations of one block of columns as integers.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Ints {
    /// Four columns for each of 16 integer sums.
    pub(super) first: [i8; 64],
    /// Four more, or zeros.
    pub(super) second: [i8; 64],
    /// Takes back what weights are raised by: what the integer sums start with.
    pub(super) start: [i32; LANES],
    /// The scale of the group that a lane is in.
    pub(super) scale: [f32; LANES],
}

/// What a row is made of.
pub(super) trait Unit: Copy {
    /// Units of a row that are used together: few enough for the rows of a tile to stay in the first-level cache.
    const BLOCK: usize;
    /// No columns.
    const ZERO: Self;
}

impl Unit for Lanes {
    /// 512 columns.
    const BLOCK: usize = 32;
    const ZERO: Self = Self([0.0; LANES]);
}

impl Unit for Ints {
    const BLOCK: usize = 8;
    const ZERO: Self = Self { first: [0; 64], second: [0; 64], start: [0; LANES], scale: [0.0; LANES] };
}

/// `n` rows of units. Those of one block come row after row, then those of the next block.
#[derive(Debug)]
pub(super) struct Blocked<U> {
    pub(super) n: usize,
    units: usize,
    data: Vec<U>,
}

impl<U: Unit> Blocked<U> {
    fn zeros(n: usize, units: usize) -> Self {
        Self { n, units, data: vec![U::ZERO; n * units] }
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.units.div_ceil(U::BLOCK)
    }

    /// Units of a row in block `b`.
    pub(super) fn width(&self, b: usize) -> usize {
        U::BLOCK.min(self.units - b * U::BLOCK)
    }

    /// The units of rows `first..first + count` in block `b`: `[count, width(b)]`.
    pub(super) fn block(&self, b: usize, first: usize, count: usize) -> &[U] {
        let start = b * U::BLOCK * self.n + first * self.width(b);
        &self.data[start..start + count * self.width(b)]
    }

    /// `count` units of row `row`, all in one block, from unit `at` on.
    fn at(&mut self, row: usize, at: usize, count: usize) -> &mut [U] {
        let b = at / U::BLOCK;
        let start = b * U::BLOCK * self.n + row * self.width(b) + at % U::BLOCK;
        &mut self.data[start..start + count]
    }
}

impl Activations {
    /// Prepares `n` rows of `cols` for products with matrices of `format` in [`Mode::Exact`].
    ///
    /// # Panics
    /// If `x` does not hold `n * cols` values.
    pub fn new(format: WeightFormat, n: usize, cols: usize, x: &[f32]) -> Self {
        Self::with_mode(Mode::Exact, format, n, cols, x)
    }

    /// Prepares `n` rows of `cols` for products with matrices of `format`. In [`Mode::Int8`] they also serve any other
    /// format of 4-bit floats (MXFP4, NVFP4), in [`Mode::Exact`] any format of the same order of columns (F32 and INT8; the
    /// others).
    ///
    /// # Panics
    /// If `x` does not hold `n * cols` values.
    pub fn with_mode(mode: Mode, format: WeightFormat, n: usize, cols: usize, x: &[f32]) -> Self {
        assert_eq!(x.len(), n * cols);
        let values = match (mode, IntOrder::of(format)) {
            (Mode::Int8, Some(order)) => Values::Int8(order, integers(order, n, cols, x)),
            _ => Values::Exact(Order::of(format), floats(Order::of(format), n, cols, x)),
        };
        Self { n, cols, values }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// What the activations were rounded to: never [`Mode::Int8`] for formats without kernels on integers.
    pub fn mode(&self) -> Mode {
        match self.values {
            Values::Exact(..) => Mode::Exact,
            Values::Int8(..) => Mode::Int8,
        }
    }

    /// Whether products with `format` can be taken.
    pub(super) fn serve(&self, format: WeightFormat) -> bool {
        match self.values {
            Values::Exact(order, _) => order == Order::of(format),
            Values::Int8(order, _) => Some(order) == IntOrder::of(format),
        }
    }
}

fn floats(order: Order, n: usize, cols: usize, x: &[f32]) -> Blocked<Lanes> {
    let mut out = Blocked::zeros(n, cols.div_ceil(STEP) * 2);
    if cols == 0 {
        return out;
    }
    for (row, x) in x.chunks_exact(cols).enumerate() {
        for (step, x) in x.chunks(STEP).enumerate() {
            let [a, b] = out.at(row, 2 * step, 2) else { unreachable!("two units were asked for") };
            let mut whole = [0.0; STEP];
            let x = if let Ok(x) = x.try_into() {
                x
            } else {
                whole[..x.len()].copy_from_slice(x);
                &whole
            };
            (a.0, b.0) = match order {
                Order::Natural => natural(x),
                Order::EvenOdd => even_odd(x),
            };
        }
    }
    out
}

fn natural(x: &[f32; STEP]) -> ([f32; LANES], [f32; LANES]) {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    a.copy_from_slice(&x[..LANES]);
    b.copy_from_slice(&x[LANES..]);
    (a, b)
}

fn even_odd(x: &[f32; STEP]) -> ([f32; LANES], [f32; LANES]) {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    for j in 0..LANES {
        a[j] = x[2 * j];
        b[j] = x[2 * j + 1];
    }
    (a, b)
}

fn integers(order: IntOrder, n: usize, cols: usize, x: &[f32]) -> Blocked<Ints> {
    let columns = order.columns();
    let mut out = Blocked::zeros(n, cols.div_ceil(columns));
    if cols == 0 {
        return out;
    }
    for (row, x) in x.chunks_exact(cols).enumerate() {
        for (at, x) in x.chunks(columns).enumerate() {
            let [block] = out.at(row, at, 1) else { unreachable!("one unit was asked for") };
            for (g, x) in x.chunks(ACTIVATION_GROUP).enumerate() {
                let mut group = [0.0; ACTIVATION_GROUP];
                group[..x.len()].copy_from_slice(x);
                let (codes, scale) = quantize(&group);
                // A lane has as many columns as 16 lanes have blocks.
                let (width, lanes) = (columns / LANES, ACTIVATION_GROUP * LANES / columns);
                for j in 0..lanes {
                    let sum: i32 = codes[j * width..(j + 1) * width].iter().map(|c| i32::from(*c)).sum();
                    block.start[g * lanes + j] = -order.raise() * sum;
                    block.scale[g * lanes + j] = scale;
                }
                match order {
                    IntOrder::Int8 => {
                        block.first[g * ACTIVATION_GROUP..][..ACTIVATION_GROUP].copy_from_slice(&codes);
                    }
                    IntOrder::E2m1 | IntOrder::Int4 => {
                        const HALF: usize = ACTIVATION_GROUP / 2;
                        for j in 0..HALF {
                            block.first[g * HALF + j] = codes[2 * j];
                            block.second[g * HALF + j] = codes[2 * j + 1];
                        }
                    }
                }
            }
        }
    }
    out
}

/// Integers of at most 127 in magnitude, rounded to nearest, ties to even, and their scale.
fn quantize(x: &[f32; ACTIVATION_GROUP]) -> ([i8; ACTIVATION_GROUP], f32) {
    /// Added to a number below 2^22 it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let largest = x.iter().fold(0, |max: u32, v| max.max(v.to_bits() & 0x7fff_ffff));
    let mut codes = [0; ACTIVATION_GROUP];
    if largest >= f32::INFINITY.to_bits() {
        return (codes, f32::NAN);
    }
    let scale = f32::from_bits(largest) / 127.0;
    if scale < f32::MIN_POSITIVE {
        return (codes, 0.0);
    }
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (x / scale + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8;
    }
    (codes, scale)
}
