//! Named tensors, in memory and in a safetensors file.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// A tensor of the two types that expectations come in.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Dimensions, row-major.
    pub shape: Vec<usize>,
    /// As many as the shape says.
    pub values: Values,
}

/// Values of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Anything that was computed.
    F32(Vec<f32>),
    /// Token ids, positions, layer and expert numbers.
    I32(Vec<i32>),
}

impl Tensor {
    /// A tensor of computed values.
    ///
    /// # Panics
    /// If there are not as many values as the shape says.
    pub fn f32(shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), values.len(), "shape {shape:?}");
        Self { shape, values: Values::F32(values) }
    }

    /// A tensor of numbers that count or name something.
    ///
    /// # Panics
    /// If there are not as many values as the shape says.
    pub fn i32(shape: impl Into<Vec<usize>>, values: Vec<i32>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), values.len(), "shape {shape:?}");
        Self { shape, values: Values::I32(values) }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        match self.values {
            Values::F32(_) => Dtype::F32,
            Values::I32(_) => Dtype::I32,
        }
    }

    /// The values if they are F32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.values {
            Values::F32(values) => Some(values),
            Values::I32(_) => None,
        }
    }

    /// The values if they are I32.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.values {
            Values::I32(values) => Some(values),
            Values::F32(_) => None,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match &self.values {
            Values::F32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::I32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }
}

/// Reads every tensor of a safetensors file of F32 and I32 tensors.
pub fn read_tensors(path: &Path) -> Result<Tensors> {
    let reading = || format!("reading the tensors of {}", path.display());
    let bytes = fs::read(path).with_context(reading)?;
    let file = SafeTensors::deserialize(&bytes).with_context(reading)?;
    file.iter()
        .map(|(name, view)| {
            let (words, rest) = view.data().as_chunks::<4>();
            ensure!(rest.is_empty(), "{}: tensor `{name}` is not made of 4-byte values", path.display());
            let values = match view.dtype() {
                Dtype::F32 => Values::F32(words.iter().map(|w| f32::from_le_bytes(*w)).collect()),
                Dtype::I32 => Values::I32(words.iter().map(|w| i32::from_le_bytes(*w)).collect()),
                other => bail!(
                    "{}: tensor `{name}`: expected F32 or I32 (docs/vectors.md), found {other:?}",
                    path.display()
                ),
            };
            Ok((name.to_owned(), Tensor { shape: view.shape().to_vec(), values }))
        })
        .collect()
}

/// Writes a new safetensors file: complete under its name, or not at all. `made_by` goes into its metadata.
///
/// With `replace`, a file (or link) of that name is replaced; otherwise it is an error.
pub fn write_tensors(path: &Path, tensors: &Tensors, made_by: &str, replace: bool) -> Result<()> {
    refuse_existing(path, replace)?;
    let bytes: Vec<(&str, Dtype, &[usize], Vec<u8>)> =
        tensors.iter().map(|(name, t)| (name.as_str(), t.dtype(), t.shape.as_slice(), t.bytes())).collect();
    let views = bytes
        .iter()
        .map(|(name, dtype, shape, data)| Ok((*name, TensorView::new(*dtype, shape.to_vec(), data)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let metadata = HashMap::from([("made_by".to_owned(), made_by.to_owned())]);
    let file = safetensors::serialize(views, Some(metadata))?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let written = fs::write(partial, file).and_then(|()| fs::rename(partial, path));
    if written.is_err() {
        let _ = fs::remove_file(partial);
    }
    written.with_context(|| format!("writing {}", path.display()))
}

/// An error if `path` is taken, be it by a dangling link.
pub(crate) fn refuse_existing(path: &Path, replace: bool) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => bail!("{} is a directory: give the name of a file", path.display()),
        Ok(_) if !replace => {
            bail!("{} exists: give another name, or --force to replace it", path.display())
        }
        _ => Ok(()),
    }
}
