//! Sums over activations, compiled for the target's baseline: products and sums are separate operations.

use super::{LANES, STEP};

/// A dot product of activations in one fixed order: 32 columns at a time into two rows of 16 partial sums, and a tree over
/// those.
#[inline]
pub fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
    debug_assert_eq!(w.len(), x.len());
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    let (steps, rest) = w.as_chunks::<STEP>();
    let (x_steps, x_rest) = x.as_chunks::<STEP>();
    for (w, x) in steps.iter().zip(x_steps) {
        for j in 0..LANES {
            low[j] += w[j] * x[j];
            high[j] += w[LANES + j] * x[LANES + j];
        }
    }
    for (j, (w, x)) in rest.iter().zip(x_rest).enumerate() {
        let lane = if j < LANES { &mut low[j] } else { &mut high[j - LANES] };
        *lane += w * x;
    }
    for j in 0..LANES {
        low[j] += high[j];
    }
    tree_sum(low)
}

/// The sum of squares in f64, where no f32 overflows, in one fixed order.
pub fn square_sum(x: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let (steps, rest) = x.as_chunks::<LANES>();
    for x in steps {
        for j in 0..LANES {
            sums[j] += f64::from(x[j]) * f64::from(x[j]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x) * f64::from(*x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            sums[j] += sums[j + width];
        }
        width /= 2;
    }
    sums[0]
}

/// The sum of 16 lanes: halves are added until one is left.
#[inline(always)]
pub(super) fn tree_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}
