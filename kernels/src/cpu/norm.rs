//! Step 0, in the order of operations that the kernels have too, so that host and device round alike.

use crate::view::{Dtype, rounded};

/// `x / sqrt(sum x^2 + 1e-6)`, rounded to the elements' type. Each half of the row is summed in order with fused multiply-adds,
/// then the two sums are added.
#[inline(always)]
pub(crate) fn normalise(row: &mut [f32], dtype: Dtype) {
    let (low, high) = row.split_at(row.len() / 2);
    let mut sums = [0.0_f32; 2];
    for (low, high) in low.iter().zip(high) {
        sums[0] = low.mul_add(*low, sums[0]);
        sums[1] = high.mul_add(*high, sums[1]);
    }
    let inverse = 1.0 / (sums[0] + sums[1] + 1e-6).sqrt();
    row.iter_mut().for_each(|x| *x = rounded(*x * inverse, dtype));
}
