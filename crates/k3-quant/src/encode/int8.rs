//! One scale per row.

use half::bf16;

use super::{ROUND, RoundingError, widen};
use crate::cpu::InstructionSet;

/// The largest code that is used. -128 is left out, so that a matrix and its negative have negative codes.
const LARGEST: f32 = 127.0;

type Row = fn(&[bf16], &mut [u8], &mut RoundingError) -> bf16;

/// The function for an instruction set that this machine has.
pub(super) fn row(set: InstructionSet) -> Row {
    match set {
        InstructionSet::Portable => encode,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set` is an `Encoder`'s, which takes no set that this machine does not have; it names these features.
        InstructionSet::Avx2 => |values, codes, error| unsafe { encode_avx2(values, codes, error) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        InstructionSet::Avx512 => |values, codes, error| unsafe { encode_avx512(values, codes, error) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_avx2(values: &[bf16], codes: &mut [u8], error: &mut RoundingError) -> bf16 {
    encode(values, codes, error)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_avx512(values: &[bf16], codes: &mut [u8], error: &mut RoundingError) -> bf16 {
    encode(values, codes, error)
}

#[inline(always)]
#[allow(clippy::inline_always, reason = "compiled inside target-feature functions")]
fn encode(values: &[bf16], codes: &mut [u8], error: &mut RoundingError) -> bf16 {
    let largest = values.iter().fold(0, |max: u16, v| max.max(v.to_bits() & 0x7fff));
    let stored = scale(bf16::from_bits(largest));
    let s = widen(stored);
    for (code, v) in codes.iter_mut().zip(values) {
        // The quotient of two bf16 is never rounded onto a tie: its distance from one is over 2^-17 of it.
        let q = (widen(*v) / s + ROUND) - ROUND;
        *code = (q as i32) as u8;
    }
    let (values, codes) = (values.chunks(8), codes.chunks(8));
    error.add_values(values.zip(codes).map(|(values, codes)| {
        let mut pair = ([0.0; 8], [0.0; 8]);
        for (j, (v, c)) in values.iter().zip(codes).enumerate() {
            pair.0[j] = widen(*v);
            pair.1[j] = f32::from(*c as i8) * s;
        }
        pair
    }));
    stored
}

/// The lowest normal scale under which `largest` is no more than [`LARGEST`]; 1 for a row of zeros.
fn scale(largest: bf16) -> bf16 {
    if largest == bf16::ZERO {
        return bf16::ONE;
    }
    let quotient = bf16::from_f32(widen(largest) / LARGEST).max(bf16::MIN_POSITIVE);
    let too_low = |s: bf16| f64::from(widen(s)) * f64::from(LARGEST) < f64::from(widen(largest));
    let near = (quotient.to_bits() - 1).max(bf16::MIN_POSITIVE.to_bits());
    (near..=bf16::MAX.to_bits()).map(bf16::from_bits).find(|s| !too_low(*s)).unwrap_or(quotient)
}
