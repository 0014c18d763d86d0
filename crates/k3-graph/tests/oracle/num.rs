//! The arithmetic every part shares, in f64 (`docs/arithmetic.md` 1, 4).

/// One vector per token.
pub(crate) type Rows = Vec<Vec<f64>>;

/// A row-major `[out, in]` weight; `y = W x`.
#[derive(Clone)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f64>,
}

impl Matrix {
    pub(crate) fn row(&self, r: usize) -> &[f64] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    pub(crate) fn apply(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.cols, "input width of a [{}, {}] weight", self.rows, self.cols);
        (0..self.rows).map(|r| dot(self.row(r), x)).collect()
    }

    pub(crate) fn apply_rows(&self, xs: &[Vec<f64>]) -> Rows {
        xs.iter().map(|x| self.apply(x)).collect()
    }
}

/// Eight running sums: the order is of no account in f64, the speed is.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (a_blocks, a_rest) = a.as_chunks::<8>();
    let (b_blocks, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f64>() + rest
}

pub(crate) fn add_to(sum: &mut [f64], x: &[f64]) {
    assert_eq!(sum.len(), x.len());
    for (s, v) in sum.iter_mut().zip(x) {
        *s += v;
    }
}

pub(crate) fn add_scaled(sum: &mut [f64], factor: f64, x: &[f64]) {
    assert_eq!(sum.len(), x.len());
    for (s, v) in sum.iter_mut().zip(x) {
        *s += factor * v;
    }
}

pub(crate) fn scaled(x: &[f64], factor: f64) -> Vec<f64> {
    x.iter().map(|v| v * factor).collect()
}

pub(crate) fn mean_square(x: &[f64]) -> f64 {
    dot(x, x) / x.len() as f64
}

/// RMSNorm: eps inside the root, mean of squares.
pub(crate) fn rms(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    assert_eq!(x.len(), gain.len(), "width of a norm gain");
    let inverse = 1.0 / (mean_square(x) + eps).sqrt();
    x.iter().zip(gain).map(|(v, w)| w * v * inverse).collect()
}

pub(crate) fn rms_no_gain(x: &[f64], eps: f64) -> Vec<f64> {
    scaled(x, 1.0 / (mean_square(x) + eps).sqrt())
}

pub(crate) fn sigma(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn silu(x: f64) -> f64 {
    x * sigma(x)
}

pub(crate) fn softmax(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = x.iter().map(|v| (v - largest).exp()).collect();
    let total: f64 = exps.iter().sum();
    scaled(&exps, 1.0 / total)
}

/// Rounds to the nearest bf16, ties to even (by way of f32, as stored tensors are f32).
pub(crate) fn to_bf16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    f64::from(f32::from_bits(rounded))
}

/// The plain rotary embedding nothing in this model has: base 10000, pairs `(i, i + d/2)`.
pub(crate) fn rotate(x: &mut [f64], position: usize) {
    let half = x.len() / 2;
    for i in 0..half {
        let angle = position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = (x[i], x[i + half]);
        x[i] = a * cos - b * sin;
        x[i + half] = a * sin + b * cos;
    }
}

/// `|actual - expected| / |expected|`, both as flat sequences of equal length.
pub(crate) fn relative_l2<'a>(
    actual: impl IntoIterator<Item = &'a f64>,
    expected: impl IntoIterator<Item = &'a f64>,
) -> f64 {
    let (mut actual, mut expected) = (actual.into_iter(), expected.into_iter());
    let (mut error, mut norm) = (0.0, 0.0);
    loop {
        match (actual.next(), expected.next()) {
            (Some(a), Some(e)) => {
                error += (a - e) * (a - e);
                norm += e * e;
            }
            (None, None) => break,
            (a, e) => panic!("sequences of different length: {a:?} against {e:?}"),
        }
    }
    // A NaN anywhere is as far away as can be.
    if error.is_nan() { f64::INFINITY } else { (error / norm).sqrt() }
}
