//! What this machine could do at most, for measurements to be compared with.

use super::InstructionSet;

/// Reads all bytes, as words, through the widest registers, and asks for what is `ahead` bytes further on, if that is
/// given.
pub fn read(bytes: &[u8], ahead: Option<usize>) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::widest() == InstructionSet::Avx512 {
        // SAFETY: AVX-512 has been found.
        return unsafe {
            match ahead {
                Some(ahead) => x86::read::<true>(bytes, ahead),
                None => x86::read::<false>(bytes, 0),
            }
        };
    }
    let _ = ahead;
    let (lines, _) = bytes.as_chunks::<64>();
    let mut sums = [0_u64; 8];
    for line in lines {
        let (words, _) = line.as_chunks::<8>();
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum ^= u64::from_le_bytes(*word);
        }
    }
    sums.iter().fold(0, |a, b| a ^ b)
}

/// `rounds` times as many independent fused multiply-adds as keep the widest registers busy; the floating-point operations
/// that were done, and a number that depends on them.
pub fn multiply_add(rounds: usize) -> (f64, f32) {
    #[cfg(target_arch = "x86_64")]
    match InstructionSet::widest() {
        // SAFETY: AVX-512 has been found.
        InstructionSet::Avx512 => return unsafe { x86::multiply_add_avx512(rounds) },
        // SAFETY: AVX2 and FMA have been found.
        InstructionSet::Avx2 => return unsafe { x86::multiply_add_avx2(rounds) },
        InstructionSet::Portable => {}
    }
    chains::<8>(rounds)
}

/// Chains of one register each, if compilers turn the loops into vector code.
#[inline(always)]
fn chains<const WIDTH: usize>(rounds: usize) -> (f64, f32) {
    /// More chains than a multiply-add takes cycles, on machines with two a cycle.
    const CHAINS: usize = 12;
    let mut sums = [[1.0_f32; WIDTH]; CHAINS];
    let (a, b) = (std::hint::black_box(0.5_f32), std::hint::black_box(0.5_f32));
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in sum {
                *lane = lane.mul_add(a, b);
            }
        }
    }
    let operations = 2.0 * rounds as f64 * (CHAINS * WIDTH) as f64;
    (operations, sums.iter().flatten().sum())
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn read<const FETCH: bool>(bytes: &[u8], ahead: usize) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 4];
        for lines in bytes.as_chunks::<256>().0 {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = lines.as_ptr().wrapping_add(64 * i);
                if FETCH {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead).cast());
                }
                // SAFETY: 64 bytes are there to be read; the load asks for no alignment.
                *sum = _mm512_xor_si512(*sum, unsafe { _mm512_loadu_si512(at.cast()) });
            }
        }
        let [a, b, c, d] = sums;
        let all = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
        _mm512_reduce_or_epi64(all) as u64
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_add_avx512(rounds: usize) -> (f64, f32) {
        let mut sums = [_mm512_set1_ps(1.0); 12];
        let half = _mm512_set1_ps(std::hint::black_box(0.5));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, half, half);
            }
        }
        let all = sums.into_iter().fold(_mm512_setzero_ps(), |a, b| _mm512_add_ps(a, b));
        (2.0 * rounds as f64 * (12 * 16) as f64, _mm512_reduce_add_ps(all))
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn multiply_add_avx2(rounds: usize) -> (f64, f32) {
        super::chains::<8>(rounds)
    }
}
