//! What rounding to a format cost.

/// Sums over the values that were encoded. Those of blocks of rows can be added; the last bits of sums depend on the
/// order of additions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoundingError {
    /// Sum of squared differences.
    pub squared_error: f64,
    /// Sum of squared values.
    pub squared_norm: f64,
    /// Largest difference.
    pub largest: f64,
}

impl RoundingError {
    /// `|W' - W| / |W|`; 0 for a matrix of zeros.
    pub fn relative_l2(&self) -> f64 {
        if self.squared_norm == 0.0 { 0.0 } else { (self.squared_error / self.squared_norm).sqrt() }
    }

    /// Adds another part of the matrix, or another matrix.
    pub fn add(&mut self, other: &Self) {
        self.squared_error += other.squared_error;
        self.squared_norm += other.squared_norm;
        self.largest = self.largest.max(other.largest);
    }

    /// Adds values and what became of them, in a fixed order that compilers turn into vector code.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "compiled inside target-feature functions")]
    pub(super) fn add_values(&mut self, pairs: impl Iterator<Item = ([f32; 8], [f32; 8])>) {
        let (mut error, mut norm, mut largest) = ([0.0; 8], [0.0; 8], [0.0; 8]);
        for (value, rounded) in pairs {
            for j in 0..8 {
                // Exact: both have few bits, near each other.
                let difference = f64::from(value[j]) - f64::from(rounded[j]);
                error[j] += difference * difference;
                norm[j] += f64::from(value[j]) * f64::from(value[j]);
                let magnitude = difference.abs();
                largest[j] = if magnitude > largest[j] { magnitude } else { largest[j] };
            }
        }
        self.squared_error += error.iter().sum::<f64>();
        self.squared_norm += norm.iter().sum::<f64>();
        self.largest = largest.iter().fold(self.largest, |a: f64, b| a.max(*b));
    }
}
