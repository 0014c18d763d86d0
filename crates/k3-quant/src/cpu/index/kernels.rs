//! The loops, for every instruction set. Integer dots are exact; what is done in floating point is done in one order, a rounding
//! for every operation.

use super::query::{HEADS, QueryCodes};
use super::{GROUP, KEY_BLOCK};
use crate::cpu::InstructionSet;

/// Codes of one group of columns, of all keys of a block.
type Codes = [u8; KEY_BLOCK * GROUP];

/// What the interval of some keys is made of.
#[derive(Clone, Copy)]
pub(super) struct Bounds<'a> {
    pub(super) scores: &'a [f32],
    pub(super) errors: &'a [f32],
    pub(super) norms: &'a [f32],
    pub(super) slack: [f32; 3],
}

/// Half the width of an interval.
#[inline(always)]
pub(super) fn slack(slack: [f32; 3], error: f32, norm: f32) -> f32 {
    slack[0] * error + slack[1] * norm + slack[2]
}

/// Runs `$body` compiled for `$set`, which this machine has.
macro_rules! compiled_for {
    ($set:expr, $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $name($($argument),*)
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $name($($argument),*)
            }
            match $set {
                // SAFETY: the caller asks for an instruction set that was found.
                InstructionSet::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                InstructionSet::Avx2 => unsafe { avx2($($argument),*) },
                InstructionSet::Portable => $name($($argument),*),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let InstructionSet::Portable = $set;
            $name($($argument),*)
        }
    }};
}

pub(super) fn candidates(
    set: InstructionSet,
    keys: Bounds<'_>,
    threshold: f32,
    first: usize,
    out: &mut Vec<u32>,
) {
    compiled_for!(set, find(keys: Bounds<'_>, threshold: f32, first: usize, out: &mut Vec<u32>));
}

#[inline(always)]
fn find(keys: Bounds<'_>, threshold: f32, first: usize, out: &mut Vec<u32>) {
    let blocks =
        keys.scores.chunks(KEY_BLOCK).zip(keys.errors.chunks(KEY_BLOCK)).zip(keys.norms.chunks(KEY_BLOCK));
    for (block, ((scores, errors), norms)) in blocks.enumerate() {
        let upper = |i: usize| scores[i] + slack(keys.slack, errors[i], norms[i]);
        let any = scores
            .iter()
            .zip(errors.iter().zip(norms))
            .fold(false, |any, (s, (e, n))| any | (s + slack(keys.slack, *e, *n) >= threshold));
        if any {
            let reach = (0..scores.len()).filter(|&i| upper(i) >= threshold);
            out.extend(reach.map(|i| (first + block * KEY_BLOCK + i) as u32));
        }
    }
}

/// The sum of those `m_i . m_j` of `rows [heads, dim]` that are positive.
pub(super) fn positive_products(set: InstructionSet, dim: usize, rows: &[f64]) -> f64 {
    compiled_for!(set, add_positive(dim: usize, rows: &[f64]) -> f64)
}

#[inline(always)]
fn add_positive(dim: usize, rows: &[f64]) -> f64 {
    /// Partial sums of a dot.
    const LANES: usize = 16;
    let dot = |a: &[f64], b: &[f64]| {
        let mut sums = [0.0; LANES];
        let ((a, last_a), (b, last_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for i in 0..LANES {
                sums[i] += a[i] * b[i];
            }
        }
        for (sum, (a, b)) in sums.iter_mut().zip(last_a.iter().zip(last_b)) {
            *sum += a * b;
        }
        sums.iter().sum::<f64>()
    };
    let mut total = 0.0;
    for (i, a) in rows.chunks_exact(dim).enumerate() {
        let others = rows[(i + 1) * dim..].chunks_exact(dim);
        total += dot(a, a) + 2.0 * others.map(|b| dot(a, b).max(0.0)).sum::<f64>();
    }
    total
}

pub(super) fn scores(set: InstructionSet, query: &QueryCodes, codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let (codes, _) = codes.as_chunks();
    match set {
        InstructionSet::Portable => by_block(query, codes, scales, out, block),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller asks for an instruction set that was found.
        InstructionSet::Avx2 => unsafe { x86::scores_avx2(query, codes, scales, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        InstructionSet::Avx512 => unsafe { x86::scores_avx512(query, codes, scales, out) },
    }
}

/// `block` gives `sum_h factor_h relu(dot_h)` for the keys of one.
#[inline(always)]
fn by_block(
    query: &QueryCodes,
    codes: &[Codes],
    scales: &[f32],
    out: &mut [f32],
    block: impl Fn(&QueryCodes, &[Codes]) -> [f32; KEY_BLOCK],
) {
    let blocks = codes.chunks_exact(query.groups());
    for (codes, (scales, out)) in blocks.zip(scales.chunks(KEY_BLOCK).zip(out.chunks_mut(KEY_BLOCK))) {
        let sums = block(query, codes);
        out.iter_mut().zip(scales.iter().zip(sums)).for_each(|(out, (scale, sum))| *out = sum * scale);
    }
}

fn block(query: &QueryCodes, codes: &[Codes]) -> [f32; KEY_BLOCK] {
    let mut out = [0.0; KEY_BLOCK];
    let words = query.words.chunks_exact(codes.len());
    for (words, (starts, factors)) in words.zip(query.starts.iter().zip(&query.factors)) {
        for h in 0..HEADS {
            let mut dots = [starts[h]; KEY_BLOCK];
            for (codes, words) in codes.iter().zip(words) {
                let q = words[h].to_le_bytes().map(|q| i32::from(q.cast_signed()));
                let (codes, _) = codes.as_chunks::<GROUP>();
                for (dot, k) in dots.iter_mut().zip(codes) {
                    let [a, b, c, d] = k.map(i32::from);
                    *dot += a * q[0] + b * q[1] + c * q[2] + d * q[3];
                }
            }
            for (out, dot) in out.iter_mut().zip(dots) {
                *out += factors[h] * dot.max(0) as f32;
            }
        }
    }
    out
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::wildcard_imports, reason = "the names of intrinsics say where they come from")]

    use std::arch::x86_64::*;

    use super::{Codes, HEADS, KEY_BLOCK, QueryCodes, by_block};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn scores_avx512(query: &QueryCodes, codes: &[Codes], scales: &[f32], out: &mut [f32]) {
        by_block(query, codes, scales, out, |query, codes| block_avx512(query, codes));
    }

    /// 16 keys a register, two of them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn block_avx512(query: &QueryCodes, codes: &[Codes]) -> [f32; KEY_BLOCK] {
        let mut sums = [_mm512_setzero_ps(); 2];
        let words = query.words.chunks_exact(codes.len());
        for (words, (starts, factors)) in words.zip(query.starts.iter().zip(&query.factors)) {
            let mut dots = starts.map(|start| [_mm512_set1_epi32(start); 2]);
            for (codes, words) in codes.iter().zip(words) {
                let keys = codes.as_ptr();
                // SAFETY: twice 64 bytes are there to be read; the loads ask for no alignment.
                let keys =
                    unsafe { [_mm512_loadu_si512(keys.cast()), _mm512_loadu_si512(keys.add(64).cast())] };
                for h in 0..HEADS {
                    let q = _mm512_set1_epi32(words[h]);
                    dots[h] = [
                        _mm512_dpbusd_epi32(dots[h][0], keys[0], q),
                        _mm512_dpbusd_epi32(dots[h][1], keys[1], q),
                    ];
                }
            }
            for h in 0..HEADS {
                let factor = _mm512_set1_ps(factors[h]);
                for (sum, dot) in sums.iter_mut().zip(dots[h]) {
                    let positive = _mm512_cvtepi32_ps(_mm512_max_epi32(dot, _mm512_setzero_si512()));
                    *sum = _mm512_add_ps(*sum, _mm512_mul_ps(factor, positive));
                }
            }
        }
        let mut out = [0.0; KEY_BLOCK];
        // SAFETY: twice 16 floats are there to be written; the stores ask for no alignment.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
            _mm512_storeu_ps(out.as_mut_ptr().add(16), sums[1]);
        }
        out
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn scores_avx2(query: &QueryCodes, codes: &[Codes], scales: &[f32], out: &mut [f32]) {
        by_block(query, codes, scales, out, |query, codes| {
            let mut out = [0.0; KEY_BLOCK];
            for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                half_avx2(query, codes, 64 * i, out);
            }
            out
        });
    }

    /// 8 keys a register, two of them, from byte `at` of the codes on. Columns are multiplied in 16 bits, even ones and odd ones.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn half_avx2(query: &QueryCodes, codes: &[Codes], at: usize, out: &mut [f32; 16]) {
        /// Heads whose sums fit the registers.
        const FEW: usize = 4;
        assert!(at <= 64);
        let mut sums = [_mm256_setzero_ps(); 2];
        let pairs = query.pairs.chunks_exact(codes.len());
        for (pairs, (starts, factors)) in pairs.zip(query.starts.iter().zip(&query.factors)) {
            for first in (0..HEADS).step_by(FEW) {
                let mut dots = [0, 1, 2, 3].map(|h| [_mm256_set1_epi32(starts[first + h]); 2]);
                for (codes, pairs) in codes.iter().zip(pairs) {
                    // SAFETY: 64 of the 128 bytes are from `at` on; the loads ask for no alignment.
                    let keys = unsafe {
                        let keys = codes.as_ptr().add(at);
                        [_mm256_loadu_si256(keys.cast()), _mm256_loadu_si256(keys.add(32).cast())]
                    };
                    let even = keys.map(|k| _mm256_and_si256(k, _mm256_set1_epi16(0xff)));
                    let odd = keys.map(|k| _mm256_srli_epi16::<8>(k));
                    for (h, dots) in dots.iter_mut().enumerate() {
                        let [a, b] = pairs[first + h].map(|q| _mm256_set1_epi32(q));
                        for (dot, (even, odd)) in dots.iter_mut().zip(even.into_iter().zip(odd)) {
                            let sum = _mm256_add_epi32(_mm256_madd_epi16(even, a), _mm256_madd_epi16(odd, b));
                            *dot = _mm256_add_epi32(*dot, sum);
                        }
                    }
                }
                for (h, dots) in dots.into_iter().enumerate() {
                    let factor = _mm256_set1_ps(factors[first + h]);
                    for (sum, dot) in sums.iter_mut().zip(dots) {
                        let positive = _mm256_cvtepi32_ps(_mm256_max_epi32(dot, _mm256_setzero_si256()));
                        *sum = _mm256_add_ps(*sum, _mm256_mul_ps(factor, positive));
                    }
                }
            }
        }
        // SAFETY: twice 8 floats are there to be written; the stores ask for no alignment.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), sums[1]);
        }
    }
}
