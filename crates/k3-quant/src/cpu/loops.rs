//! Which inner loops an instruction set runs.

use crate::{E4M3, E8M0, ScaleRow};

/// The inner loops of one instruction set. All give the same bits.
pub(super) trait Loops {
    fn dot_f32(w: &[f32], x: &[f32]) -> f32;
    fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32;
    fn dot_int8(w: &[i8], x: &[f32]) -> f32;
    fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32;
    fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32;
    fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32;
    fn decode_codes(packed: &[u8], values: &mut [f32]);
    fn decode_ints(packed: &[u8], values: &mut [f32]);
}

/// The plain loops, compiled for an instruction set. Each is a function of its own: inlined into the large one around
/// them, compilers do not turn them into vector code.
macro_rules! compiled_loops {
    ($module:ident $(, $attribute:meta)?) => {
        mod $module {
            use super::super::plain;
            use crate::{E4M3, E8M0, ScaleRow};

            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
                plain::dot_f32(w, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
                plain::dot_blocks(codes, scales, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_int8(w: &[i8], x: &[f32]) -> f32 {
                plain::dot_int8(w, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
                plain::dot_mxfp4(packed, scale, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32 {
                plain::dot_nvfp4(packed, scale, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32 {
                plain::dot_int4(packed, scale, x)
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn decode_codes(packed: &[u8], values: &mut [f32]) {
                plain::decode_codes(packed, values);
            }
            $(#[$attribute])?
            #[inline(never)]
            pub(super) fn decode_ints(packed: &[u8], values: &mut [f32]) {
                plain::decode_ints(packed, values);
            }
        }
    };
}

compiled_loops!(portable);
#[cfg(target_arch = "x86_64")]
compiled_loops!(avx2, target_feature(enable = "avx2"));
#[cfg(target_arch = "x86_64")]
use super::avx512;

pub(super) struct Portable;

impl Loops for Portable {
    fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
        portable::dot_f32(w, x)
    }
    fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
        portable::dot_blocks(codes, scales, x)
    }
    fn dot_int8(w: &[i8], x: &[f32]) -> f32 {
        portable::dot_int8(w, x)
    }
    fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
        portable::dot_mxfp4(packed, scale, x)
    }
    fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32 {
        portable::dot_nvfp4(packed, scale, x)
    }
    fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32 {
        portable::dot_int4(packed, scale, x)
    }
    fn decode_codes(packed: &[u8], values: &mut [f32]) {
        portable::decode_codes(packed, values);
    }
    fn decode_ints(packed: &[u8], values: &mut [f32]) {
        portable::decode_ints(packed, values);
    }
}

/// Loops that need an instruction set. Only the function of that set names the type, so whoever calls has it.
#[cfg(target_arch = "x86_64")]
macro_rules! loops_of {
    ($type:ident, $module:ident) => {
        pub(super) struct $type;

        impl Loops for $type {
            #[inline(always)]
            fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
                // SAFETY: called under the function that is compiled for this instruction set, where it was found.
                unsafe { $module::dot_f32(w, x) }
            }
            #[inline(always)]
            fn dot_blocks(codes: &[f32], scales: &[[f32; 2]], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_blocks(codes, scales, x) }
            }
            #[inline(always)]
            fn dot_int8(w: &[i8], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_int8(w, x) }
            }
            #[inline(always)]
            fn dot_mxfp4(packed: &[u8], scale: &[E8M0], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_mxfp4(packed, scale, x) }
            }
            #[inline(always)]
            fn dot_nvfp4(packed: &[u8], scale: &[E4M3], x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_nvfp4(packed, scale, x) }
            }
            #[inline(always)]
            fn dot_int4(packed: &[u8], scale: ScaleRow<'_>, x: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $module::dot_int4(packed, scale, x) }
            }
            #[inline(always)]
            fn decode_codes(packed: &[u8], values: &mut [f32]) {
                // SAFETY: as above.
                unsafe { $module::decode_codes(packed, values) }
            }
            #[inline(always)]
            fn decode_ints(packed: &[u8], values: &mut [f32]) {
                // SAFETY: as above.
                unsafe { $module::decode_ints(packed, values) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
loops_of!(Avx2, avx2);
#[cfg(target_arch = "x86_64")]
loops_of!(Avx512, avx512);
