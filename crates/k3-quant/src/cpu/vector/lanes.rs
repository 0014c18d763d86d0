//! 16 floats, in the registers of an instruction set.

use half::bf16;

use crate::cpu::LANES;
use crate::cpu::plain::widen;
use crate::cpu::tree::tree_sum;

/// What the small products are written in. Every operation is that of IEEE 754 on each lane.
pub(in crate::cpu) trait Lanes {
    type Lanes: Copy;
    /// Whether some two dozen of these fit the registers.
    const MANY: bool = false;
    fn splat(x: f32) -> Self::Lanes;
    fn load(x: &[f32; LANES]) -> Self::Lanes;
    fn widen(x: &[bf16; LANES]) -> Self::Lanes;
    fn store(x: Self::Lanes, out: &mut [f32; LANES]);
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// 0 for what is below; NaN stays.
    fn relu(x: Self::Lanes) -> Self::Lanes;
    /// The sum of all, as [`tree_sum`].
    fn sum(x: Self::Lanes) -> f32;

    /// `sum + a * b`, rounded twice.
    #[inline(always)]
    fn add_product(sum: Self::Lanes, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        Self::add(sum, Self::mul(a, b))
    }
}

/// The target's baseline, as compilers see it.
pub(super) struct Portable;

impl Lanes for Portable {
    type Lanes = [f32; LANES];
    #[inline(always)]
    fn splat(x: f32) -> [f32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    fn load(x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }
    #[inline(always)]
    fn widen(x: &[bf16; LANES]) -> [f32; LANES] {
        x.map(widen)
    }
    #[inline(always)]
    fn store(x: [f32; LANES], out: &mut [f32; LANES]) {
        *out = x;
    }
    #[inline(always)]
    fn add(mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        for i in 0..LANES {
            a[i] += b[i];
        }
        a
    }
    #[inline(always)]
    fn mul(mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        for i in 0..LANES {
            a[i] *= b[i];
        }
        a
    }
    #[inline(always)]
    fn relu(x: [f32; LANES]) -> [f32; LANES] {
        // Not `max`: it would turn a NaN into 0 and hide it.
        x.map(|x| if x < 0.0 { 0.0 } else { x })
    }
    #[inline(always)]
    fn sum(x: [f32; LANES]) -> f32 {
        tree_sum(x)
    }
}

#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) use x86::{Avx2, Avx512};

/// Only [`super::Vectors`] names these types, in functions that are compiled for the instruction set and are called
/// where it was found.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128, _mm_movehdup_ps,
        _mm_movehl_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps, _mm256_mul_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm512_add_ps,
        _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_extractf32x8_ps,
        _mm512_loadu_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
        _mm512_storeu_ps,
    };

    use super::{LANES, Lanes, bf16};

    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        type Lanes = [__m256; 2];
        #[inline(always)]
        fn splat(x: f32) -> [__m256; 2] {
            // SAFETY: AVX2 has been found, see the module.
            let x = unsafe { _mm256_set1_ps(x) };
            [x, x]
        }
        #[inline(always)]
        fn load(x: &[f32; LANES]) -> [__m256; 2] {
            let x = x.as_ptr();
            // SAFETY: AVX2 has been found; 16 floats are there to be read, at any alignment.
            unsafe { [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(LANES / 2))] }
        }
        #[inline(always)]
        fn widen(x: &[bf16; LANES]) -> [__m256; 2] {
            let x = x.as_ptr();
            // SAFETY: AVX2 has been found; twice 16 bytes are there to be read, at any alignment.
            unsafe {
                let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.cast()));
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.add(LANES / 2).cast()));
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ]
            }
        }
        #[inline(always)]
        fn store(x: [__m256; 2], out: &mut [f32; LANES]) {
            let out = out.as_mut_ptr();
            // SAFETY: AVX2 has been found; 16 floats are there to be written, at any alignment.
            unsafe {
                _mm256_storeu_ps(out, x[0]);
                _mm256_storeu_ps(out.add(LANES / 2), x[1]);
            }
        }
        #[inline(always)]
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: AVX2 has been found, see the module.
            unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: AVX2 has been found, see the module.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn relu(x: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: AVX2 has been found, see the module. Of NaN and zeros the second operand is taken.
            unsafe {
                let zero = _mm256_setzero_ps();
                [_mm256_max_ps(zero, x[0]), _mm256_max_ps(zero, x[1])]
            }
        }
        #[inline(always)]
        fn sum(x: [__m256; 2]) -> f32 {
            // SAFETY: AVX2 has been found, see the module.
            unsafe {
                let x = _mm256_add_ps(x[0], x[1]);
                let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
            }
        }
    }

    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        type Lanes = __m512;
        const MANY: bool = true;
        #[inline(always)]
        fn splat(x: f32) -> __m512 {
            // SAFETY: AVX-512 F has been found, see the module.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(x: &[f32; LANES]) -> __m512 {
            // SAFETY: AVX-512 F has been found; 16 floats are there to be read, at any alignment.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn widen(x: &[bf16; LANES]) -> __m512 {
            // SAFETY: AVX-512 F has been found; 32 bytes are there to be read, at any alignment.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
        #[inline(always)]
        fn store(x: __m512, out: &mut [f32; LANES]) {
            // SAFETY: AVX-512 F has been found; 16 floats are there to be written, at any alignment.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
        }
        #[inline(always)]
        fn add(a: __m512, b: __m512) -> __m512 {
            // SAFETY: AVX-512 F has been found, see the module.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn mul(a: __m512, b: __m512) -> __m512 {
            // SAFETY: AVX-512 F has been found, see the module.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn relu(x: __m512) -> __m512 {
            // SAFETY: AVX-512 F has been found, see the module. Of NaN and zeros the second operand is taken.
            unsafe { _mm512_max_ps(_mm512_setzero_ps(), x) }
        }
        #[inline(always)]
        fn sum(x: __m512) -> f32 {
            // SAFETY: AVX-512 F and DQ have been found, see the module.
            Avx2::sum(unsafe { [_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)] })
        }
    }
}
