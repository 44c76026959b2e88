//! The number that the chunk form is computed in: fp32, and fp64 where tests compare the form itself with the recurrence.

use std::ops::{Add, AddAssign, Mul, Neg, Sub};

pub(crate) trait Real:
    Copy
    + Send
    + Sync
    + Default
    + PartialOrd
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + AddAssign
{
    const ZERO: Self;

    /// `a * b + c`, rounded once if `FMA`.
    fn multiply_add<const FMA: bool>(a: Self, b: Self, c: Self) -> Self;

    /// `e^x`.
    fn exp<const FMA: bool>(self) -> Self;
}

impl Real for f64 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn multiply_add<const FMA: bool>(a: Self, b: Self, c: Self) -> Self {
        if FMA { a.mul_add(b, c) } else { a * b + c }
    }

    fn exp<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn multiply_add<const FMA: bool>(a: Self, b: Self, c: Self) -> Self {
        if FMA { a.mul_add(b, c) } else { a * b + c }
    }

    /// Within 2 units in the last place, by Cephes' polynomial. Unlike the library's it is compiled into vectors, and gives the
    /// same bits with every C library. NaN stays NaN.
    #[inline(always)]
    fn exp<const FMA: bool>(self) -> Self {
        const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        /// Adding it leaves the nearest integer in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let x = if self < -150.0 { -150.0 } else { self };
        let x = if x > 150.0 { 150.0 } else { x };
        let shifted = Self::multiply_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
        let power = shifted - ROUND;
        let rest = Self::multiply_add::<FMA>(power, -0.693_359_4, x);
        let rest = Self::multiply_add::<FMA>(power, 2.121_944_4e-4, rest);
        let mut sum = POLYNOMIAL[0];
        for coefficient in &POLYNOMIAL[1..] {
            sum = Self::multiply_add::<FMA>(sum, rest, *coefficient);
        }
        let value = Self::multiply_add::<FMA>(sum, rest * rest, rest) + 1.0;
        // 2^power in two factors, so that results may be denormal or infinite.
        let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
        let half = power >> 1;
        value * two_to(half) * two_to(power - half)
    }
}

/// `2^power` for powers of normal numbers.
#[inline(always)]
fn two_to(power: i32) -> f32 {
    f32::from_bits((power.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        for step in 0..=2_000_000 {
            let x = -87.0 + step as f32 * (175.0 / 2_000_000.0);
            let exact = f64::from(x).exp();
            for given in [Real::exp::<true>(x), Real::exp::<false>(x)] {
                let unit = f64::from(f32::from_bits(given.to_bits() + 1)) - f64::from(given);
                worst = worst.max((f64::from(given) - exact).abs() / unit);
            }
        }
        assert!(worst < 2.0, "{worst} units");
    }

    #[test]
    fn exp_at_its_ends() {
        let exp = |x: f32| Real::exp::<true>(x);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!([exp(-200.0), exp(-4096.0), exp(f32::NEG_INFINITY)], [0.0; 3]);
        assert_eq!([exp(89.0), exp(f32::INFINITY)], [f32::INFINITY; 2]);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-90.0) > 0.0, "denormal");
    }
}
