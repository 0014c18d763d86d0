//! The plain products: one loop a row, in column order. Everything faster is tested against these.

use crate::Matrix;

/// `Y = X W^T` in f64: `x` is `[n, cols]`, `y` is `[n, rows]`, both row-major. The weights are exact (see
/// [`crate::Row::decode_f64`]).
///
/// # Panics
/// If the lengths do not fit.
pub fn matmul_f64(w: &Matrix, n: usize, x: &[f64], y: &mut [f64]) {
    assert_eq!((x.len(), y.len()), (n * w.cols(), n * w.rows()));
    let mut row = vec![0.0; w.cols()];
    for r in 0..w.rows() {
        w.row(r).decode_f64(&mut row);
        for i in 0..n {
            y[i * w.rows() + r] = row.iter().zip(&x[i * w.cols()..]).map(|(w, x)| w * x).sum();
        }
    }
}
