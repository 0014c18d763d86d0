//! Least squares over samples that keep coming.

/// What the weights are before anything was measured counts like samples whose squares sum to this in each feature.
const STRENGTH: f64 = 100.0;

/// Linear least squares. Old samples fade, and the weights stay near given ones where samples say nothing.
#[derive(Debug)]
pub(super) struct Regression<const N: usize> {
    /// Sums of products of two features; the lower triangle.
    products: [[f64; N]; N],
    /// Sums of products of a feature and what came.
    targets: [f64; N],
    prior: [f64; N],
}

impl<const N: usize> Regression<N> {
    /// With the weights before the first sample.
    pub(super) fn new(prior: [f64; N]) -> Self {
        Self { products: [[0.0; N]; N], targets: [0.0; N], prior }
    }

    /// Lets what was added so far count less.
    pub(super) fn fade(&mut self, left: f64) {
        self.products.as_flattened_mut().iter_mut().for_each(|sum| *sum *= left);
        self.targets.iter_mut().for_each(|sum| *sum *= left);
    }

    /// One sample, and whether what is to be predicted came.
    pub(super) fn add(&mut self, features: &[f32; N], came: bool, weight: f64) {
        // Most features of most samples are 0.
        let (mut present, mut count) = ([0; N], 0);
        for (at, _) in features.iter().enumerate().filter(|(_, feature)| **feature != 0.0) {
            present[count] = at;
            count += 1;
        }
        for (i, &row) in present[..count].iter().enumerate() {
            let weighted = weight * f64::from(features[row]);
            for &column in &present[..=i] {
                self.products[row][column] += weighted * f64::from(features[column]);
            }
            self.targets[row] += if came { weighted } else { 0.0 };
        }
    }

    /// The weights, by Cholesky's decomposition: the prior's share makes the matrix positive definite.
    pub(super) fn solve(&self) -> [f32; N] {
        let mut lower = self.products;
        let mut weights = self.targets;
        for row in 0..N {
            lower[row][row] += STRENGTH;
            weights[row] += STRENGTH * self.prior[row];
            for column in 0..=row {
                let known: f64 = (0..column).map(|i| lower[row][i] * lower[column][i]).sum();
                let rest = lower[row][column] - known;
                lower[row][column] =
                    if column == row { rest.max(1.0).sqrt() } else { rest / lower[column][column] };
            }
            let known: f64 = (0..row).map(|i| lower[row][i] * weights[i]).sum();
            weights[row] = (weights[row] - known) / lower[row][row];
        }
        for row in (0..N).rev() {
            let known: f64 = (row + 1..N).map(|i| lower[i][row] * weights[i]).sum();
            weights[row] = (weights[row] - known) / lower[row][row];
        }
        weights.map(|weight| weight as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of a line `y = a x0 + b x1 + c`, as shares of what came.
    fn samples(regression: &mut Regression<3>, [a, b, c]: [f64; 3]) {
        for (x0, x1) in (0..10).flat_map(|i| (0..10).map(move |j| (f64::from(i) / 10.0, f64::from(j) / 10.0)))
        {
            let share = a * x0 + b * x1 + c;
            let features = [x0 as f32, x1 as f32, 1.0];
            regression.add(&features, true, 1e8 * share);
            regression.add(&features, false, 1e8 * (1.0 - share));
        }
    }

    fn close(found: [f32; 3], expected: [f64; 3]) {
        let near =
            found.iter().zip(expected).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-4);
        assert!(near, "{found:?}, expected {expected:?}");
    }

    #[test]
    fn a_line_is_found() {
        let check = |line: [f64; 3]| {
            let mut regression = Regression::new([9.0, -9.0, 9.0]);
            samples(&mut regression, line);
            close(regression.solve(), line);
        };
        check([0.0, 0.0, 0.0]);
        check([0.5, 0.25, 0.1]);
        check([0.4, -0.3, 0.5]);
    }

    #[test]
    fn without_samples_the_prior_counts_and_old_samples_fade() {
        let mut regression = Regression::new([0.5, -0.25, 1.0]);
        close(regression.solve(), [0.5, -0.25, 1.0]);
        samples(&mut regression, [0.1, 0.2, 0.3]);
        regression.fade(1e-9);
        samples(&mut regression, [0.4, 0.1, 0.2]);
        close(regression.solve(), [0.4, 0.1, 0.2]);
        regression.fade(0.0);
        close(regression.solve(), [0.5, -0.25, 1.0]);
    }

    /// Two features that are always the same: only their sum is known, and the prior decides who gets how much.
    #[test]
    fn features_that_are_alike_share() {
        let mut regression = Regression::new([0.2, 0.0, 0.0]);
        for _ in 0..1000 {
            regression.add(&[1.0, 1.0, 0.0], true, 1e3);
            regression.add(&[0.0, 0.0, 1.0], false, 1e3);
        }
        close(regression.solve(), [0.6, 0.4, 0.0]);
    }
}
