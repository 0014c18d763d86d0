//! Loops in which an exponential is. Every step is one IEEE operation on f64 without a branch, so that compilers turn
//! the loops into vector code and the bits are the same in any of it.

use super::Lanes;
use crate::cpu::LANES;

/// `1.5 * 2^52`: added to a small number and taken away again it rounds to an integer, which in between stands in the lowest
/// bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// The high part of ln 2, whose last bits are zero: its product with an exponent is exact.
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
/// What is left of ln 2.
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// `1 / n!` for 2..=9: the first term left out is 7e-12 of the result at most.
const TERMS: [f64; 8] = [
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5040.0,
    1.0 / 40_320.0,
    1.0 / 362_880.0,
];
/// Arguments beyond this are taken for it. Far behind anything that f32 can tell from 0 and infinity.
const LARGEST: f64 = 200.0;

/// `2^n` and `exp(r) - 1` with `exp(x) = 2^n exp(r)`, for `|x|` up to [`LARGEST`]. NaN gives NaN.
#[inline(always)]
fn exp_parts(x: f64) -> (f64, f64) {
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = TERMS[7];
    for term in [TERMS[6], TERMS[5], TERMS[4], TERMS[3], TERMS[2], TERMS[1], TERMS[0], 1.0] {
        sum = sum * r + term;
    }
    // The lowest bits of `shifted` are those of `n`: they move to the exponent, everything above them out.
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    (power, sum * r)
}

/// `x` within the bounds of [`exp_parts`]; NaN stays.
#[inline(always)]
fn bounded(x: f64) -> f64 {
    let x = if x > LARGEST { LARGEST } else { x };
    if x < -LARGEST { -LARGEST } else { x }
}

#[inline(always)]
fn exp(x: f64) -> f64 {
    let (power, rest) = exp_parts(bounded(x));
    power * rest + power
}

/// Also near zero to a relative 1e-11.
#[inline(always)]
fn exp_less_1(x: f64) -> f64 {
    let (power, rest) = exp_parts(bounded(x));
    power * rest + (power - 1.0)
}

#[inline(always)]
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
}

/// NaN unless `x` is finite.
#[inline(always)]
fn gate(x: f64) -> f64 {
    if x.abs() < f64::INFINITY { sigmoid(x) } else { f64::NAN }
}

#[inline(always)]
pub(super) fn convolve<L: Lanes>(taps: &[f32], inputs: &[&[f32]], out: &mut [f32]) {
    assert_eq!(taps.len(), inputs.len() * out.len());
    assert!(inputs.iter().all(|x| x.len() == out.len()));
    if let &[x0, x1, x2, x3] = inputs {
        let (taps, _) = taps.as_chunks::<4>();
        let inputs = x0.iter().zip(x1).zip(x2.iter().zip(x3));
        for ((out, t), ((x0, x1), (x2, x3))) in out.iter_mut().zip(taps).zip(inputs) {
            *out = 0.0 + t[0] * x0 + t[1] * x1 + t[2] * x2 + t[3] * x3;
        }
    } else {
        let kernel = inputs.len();
        for (c, out) in out.iter_mut().enumerate() {
            *out = inputs.iter().enumerate().fold(0.0, |sum, (j, x)| sum + taps[c * kernel + j] * x[c]);
        }
    }
    for out in out {
        let x = f64::from(*out);
        let s = sigmoid(x);
        // Minus infinity is an overflow and gives NaN, as it does with a sigmoid that reaches 0.
        let s = if x < -LARGEST { 0.0 } else { s };
        *out = (x * s) as f32;
    }
}

#[inline(always)]
pub(super) fn sigmoid_gate<L: Lanes>(x: &mut [f32], gates: &[f32]) {
    assert_eq!(x.len(), gates.len());
    for (x, g) in x.iter_mut().zip(gates) {
        *x *= gate(f64::from(*g)) as f32;
    }
}

#[inline(always)]
pub(super) fn situ_glu<L: Lanes>(gate: &mut [f32], up: &[f32], beta: f64, linear_beta: f64) {
    assert_eq!(gate.len(), up.len());
    let (from_gate, from_up, product) = (2.0 / beta, 2.0 / linear_beta, beta * linear_beta);
    for (gate, up) in gate.iter_mut().zip(up) {
        let (g, u) = (f64::from(*gate), f64::from(*up));
        // tanh x = (exp 2x - 1) / (exp 2x + 1), and one division for all three factors.
        let (a, b) = (exp_less_1(g * from_gate), exp_less_1(u * from_up));
        let y = product * (a * b) / ((a + 2.0) * (b + 2.0) * (1.0 + exp(-g)));
        let finite = (g.abs() < f64::INFINITY) & (u.abs() < f64::INFINITY);
        *gate = (if finite { y } else { f64::NAN }) as f32;
    }
}

#[inline(always)]
pub(super) fn decay<L: Lanes>(z: &[f32], bias: &[f32], rate: f64, lower_bound: f64, out: &mut [f32]) {
    assert!(z.len() == bias.len() && z.len() == out.len());
    for (out, (z, bias)) in out.iter_mut().zip(z.iter().zip(bias)) {
        *out = exp(lower_bound * gate(rate * (f64::from(*z) + f64::from(*bias)))) as f32;
    }
}

#[inline(always)]
pub(super) fn softmax<L: Lanes>(x: &mut [f32]) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (steps, rest) = x.as_chunks::<LANES>();
    for step in steps {
        for j in 0..LANES {
            largest[j] = if step[j] > largest[j] { step[j] } else { largest[j] };
        }
    }
    let max = rest.iter().chain(&largest).fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    for x in &mut *x {
        *x = exp(f64::from(*x - max)) as f32;
    }
    let mut sums = [0.0_f64; LANES];
    let (steps, rest) = x.as_chunks::<LANES>();
    for step in steps {
        for j in 0..LANES {
            sums[j] += f64::from(step[j]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x);
    }
    let scale = (1.0 / crate::cpu::tree::tree_sum(sums)) as f32;
    x.iter_mut().for_each(|x| *x *= scale);
}
