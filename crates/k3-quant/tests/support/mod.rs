//! Matrices of every format, and their products by every set of kernels.

mod lcg;

use std::ops::Range;

use k3_quant::cpu::{Activations, InstructionSet, Mode, matmul_rows_with};
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, Scales, WeightFormat, bf16};

pub(crate) use lcg::Lcg;

pub(crate) const FORMATS: [WeightFormat; 6] = [
    WeightFormat::F32,
    WeightFormat::Bf16,
    WeightFormat::Int8,
    WeightFormat::Mxfp4,
    WeightFormat::Nvfp4,
    WeightFormat::Int4,
];

pub(crate) const MODES: [Mode; 2] = [Mode::Exact, Mode::Int8];

impl Lcg {
    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

pub(crate) fn matrix(format: WeightFormat, rows: usize, cols: usize, rng: &mut Lcg) -> Matrix {
    match format {
        WeightFormat::F32 => {
            let data: Vec<u8> = (0..rows * cols).flat_map(|_| rng.unit().to_le_bytes()).collect();
            Matrix::f32(rows, cols, data.into())
        }
        WeightFormat::Bf16 => {
            let data: Vec<u8> =
                (0..rows * cols).flat_map(|_| bf16::from_f32(rng.unit()).to_le_bytes()).collect();
            Matrix::bf16(rows, cols, data.into())
        }
        WeightFormat::Mxfp4 => {
            let scale: Vec<u8> = (0..rows * cols / 32).map(|_| 118 + (rng.next() % 6) as u8).collect();
            Matrix::mxfp4(rows, cols, rng.bytes(rows * cols / 2).into(), scale.into())
        }
        WeightFormat::Nvfp4 => {
            // Any finite non-negative scale, subnormals included, and a global scale that is no power of two.
            let scale: Vec<u8> = (0..rows * cols / 16).map(|_| (rng.next() % 0x7f) as u8).collect();
            let global = GlobalScale::Divisor(ScaleDivisor(2688.0 / 0.37));
            Matrix::nvfp4(rows, cols, rng.bytes(rows * cols / 2).into(), scale.into(), global)
        }
        WeightFormat::Int8 => {
            let scale: Vec<u8> = (0..rows).flat_map(|_| (1e-3 * rng.unit()).to_le_bytes()).collect();
            Matrix::int8(rows, cols, rng.bytes(rows * cols).into(), Scales::F32(scale.into()))
        }
        WeightFormat::Int4 => {
            let scale: Vec<u8> =
                (0..rows * cols / 64).flat_map(|_| bf16::from_f32(rng.unit()).to_le_bytes()).collect();
            Matrix::int4(rows, cols, rng.bytes(rows * cols / 2).into(), Scales::Bf16(scale.into()))
        }
        _ => unreachable!("no other format"),
    }
    .unwrap()
}

/// Rows `rows` of the product with the `n` rows of `x`, `[n, rows.len()]`.
pub(crate) fn product(
    set: InstructionSet,
    mode: Mode,
    w: &Matrix,
    rows: Range<usize>,
    n: usize,
    x: &[f32],
) -> Vec<f32> {
    let x = Activations::with_mode(mode, w.format(), n, w.cols(), x);
    let count = rows.len();
    let mut by_row = vec![f32::NAN; count * n];
    matmul_rows_with(set, w, rows, &x, &mut by_row);
    let mut y = vec![0.0; count * n];
    for (r, by_row) in by_row.chunks(n.max(1)).enumerate() {
        for (i, v) in by_row.iter().enumerate() {
            y[i * count + r] = *v;
        }
    }
    y
}

/// For comparisons bit for bit. Which of its bits a NaN has is left to the machine.
pub(crate) fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|y| if y.is_nan() { f32::NAN.to_bits() } else { y.to_bits() }).collect()
}

/// `W x` in f64, and the sum of magnitudes behind each element.
pub(crate) fn in_f64(w: &Matrix, n: usize, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (rows, cols) = (w.rows(), w.cols());
    let (mut sums, mut magnitudes) = (vec![0.0; n * rows], vec![0.0; n * rows]);
    let mut row = vec![0.0; cols];
    for r in 0..rows {
        w.row(r).decode_f64(&mut row);
        for i in 0..n {
            let products = row.iter().zip(&x[i * cols..]).map(|(w, x)| w * x);
            sums[i * rows + r] = products.clone().sum();
            magnitudes[i * rows + r] = products.map(f64::abs).sum();
        }
    }
    (sums, magnitudes)
}
