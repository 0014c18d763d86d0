//! How partial sums are added up.

use std::ops::AddAssign;

use super::LANES;

/// The sum of 16 lanes: halves are added until one is left.
#[inline(always)]
pub(super) fn tree_sum<T: AddAssign + Copy>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            let other = lanes[j + width];
            lanes[j] += other;
        }
        width /= 2;
    }
    lanes[0]
}
