//! States of layers on the host, in the precision of the device that computed them.

use std::fmt;

use super::DeviceError;

/// A part of a layer's state on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct StateTensor {
    /// `conv`, `state`, `latent`, `extra_key` or `index_key`.
    pub name: &'static str,
    /// `conv [3, taps - 1, width]` oldest first; `state [heads, key, value]`; the others `[tokens, width]`.
    pub shape: Vec<usize>,
    /// The values in the device's precision.
    pub values: StateValues,
}

/// Values of a [`StateTensor`].
#[derive(Clone, PartialEq)]
pub enum StateValues {
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
}

impl fmt::Debug for StateValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32(v) => write!(f, "F32[{}]", v.len()),
            Self::F64(v) => write!(f, "F64[{}]", v.len()),
        }
    }
}

impl StateValues {
    /// Rounded to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F64(v) => v.iter().map(|&v| v as f32).collect(),
        }
    }
}

/// A precision that state values come in.
pub trait StateFloat: Sized + Clone {
    /// Name of the type, as in safetensors.
    const NAME: &'static str;
    /// The values, if they are of this type.
    fn of(values: &StateValues) -> Option<&[Self]>;
}

impl StateFloat for f32 {
    const NAME: &'static str = "F32";
    fn of(values: &StateValues) -> Option<&[Self]> {
        match values {
            StateValues::F32(v) => Some(v),
            StateValues::F64(_) => None,
        }
    }
}

impl StateFloat for f64 {
    const NAME: &'static str = "F64";
    fn of(values: &StateValues) -> Option<&[Self]> {
        match values {
            StateValues::F64(v) => Some(v),
            StateValues::F32(_) => None,
        }
    }
}

/// `None` if the product overflows: shapes come from files.
fn element_count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))
}

/// The values of exactly these parts, after a check of names, order, shapes, lengths and precision.
pub fn take_parts<T: StateFloat, const N: usize>(
    parts: &[StateTensor],
    expected: [(&'static str, &[usize]); N],
) -> Result<[Vec<T>; N], DeviceError> {
    let names = |names: &mut dyn Iterator<Item = &'static str>| names.collect::<Vec<_>>().join(", ");
    if !parts.iter().map(|p| p.name).eq(expected.iter().map(|e| e.0)) {
        return Err(DeviceError::State {
            name: "(all)",
            expected: names(&mut expected.iter().map(|e| e.0)),
            found: names(&mut parts.iter().map(|p| p.name)),
        });
    }
    let mut out = [const { Vec::new() }; N];
    for ((part, (name, shape)), out) in parts.iter().zip(expected).zip(&mut out) {
        match T::of(&part.values) {
            Some(values) if part.shape == shape && element_count(shape) == Some(values.len()) => {
                *out = values.to_vec();
            }
            _ => {
                return Err(DeviceError::State {
                    name,
                    expected: format!("{} {shape:?}", T::NAME),
                    found: format!("{:?} {:?}", part.values, part.shape),
                });
            }
        }
    }
    Ok(out)
}
