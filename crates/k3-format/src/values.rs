//! Float tensors as f32, by the dtype in their header (`docs/checkpoint.md` 4: never by expectation).

use safetensors::Dtype;

use crate::error::Error;
use crate::names::Extent;
use crate::shards::{Shards, TensorInfo};

/// All values of a BF16 or F32 tensor; `None` for other types.
pub(crate) fn read_vector(shards: &Shards, tensor: &TensorInfo<'_>) -> Result<Option<Vec<f32>>, Error> {
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16) {
        return Ok(None);
    }
    Ok(widen(tensor.dtype, &shards.read(tensor)?))
}

/// The values in the bytes of a BF16 or F32 tensor; `None` for other types.
pub(crate) fn widen(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::BF16 => {
            bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
        }
        _ => return None,
    })
}

/// Cuts the padding of a per-head vector, and says what is wrong with the values if anything is.
pub(crate) fn check_vector(values: &mut Vec<f32>, extent: Extent) -> Result<(), String> {
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        return Err(format!("value {at} is {}, which is not a finite number", values[at]));
    }
    let used = extent.elements();
    if let Some(at) = values.iter().skip(used).position(|v| *v != 0.0) {
        let at = used + at;
        return Err(format!("value {at} is {}, but all behind the first {used} must be zero", values[at]));
    }
    values.truncate(used);
    Ok(())
}

/// The first infinity or NaN in the bytes of a BF16 or F32 tensor, with its position in elements.
pub(crate) fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f32)> {
    const F32_EXPONENT: u32 = 0x7f80_0000;
    const BF16_EXPONENT: u16 = 0x7f80;
    match dtype {
        Dtype::F32 => {
            let values = bytes.as_chunks::<4>().0;
            let bad = |b: &[u8; 4]| u32::from_le_bytes(*b) & F32_EXPONENT == F32_EXPONENT;
            let at = first(values, |block| block.iter().fold(0, |any, b| any | u32::from(bad(b))) != 0, bad)?;
            Some((at, f32::from_le_bytes(values[at])))
        }
        Dtype::BF16 => {
            let values = bytes.as_chunks::<2>().0;
            let bad = |b: &[u8; 2]| u16::from_le_bytes(*b) & BF16_EXPONENT == BF16_EXPONENT;
            let at = first(values, |block| block.iter().fold(0, |any, b| any | u16::from(bad(b))) != 0, bad)?;
            Some((at, half::bf16::from_le_bytes(values[at]).to_f32()))
        }
        _ => None,
    }
}

/// Position of the first bad element. `any` looks at a whole block without a branch, which makes vector code of it;
/// it runs over every pinned weight of a model.
fn first<T>(values: &[T], any: impl Fn(&[T]) -> bool, bad: impl Fn(&T) -> bool) -> Option<usize> {
    const BLOCK: usize = 4096;
    let block = values.chunks(BLOCK).position(any)?;
    let begin = block * BLOCK;
    values[begin..].iter().position(bad).map(|at| begin + at)
}

#[cfg(test)]
mod tests;
