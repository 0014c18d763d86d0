//! Named tensors, in memory and in a safetensors file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use k3_format::{ShardWriter, TensorSpec};
use safetensors::{Dtype, SafeTensors};

/// Data starts at a multiple of this many bytes.
const DATA_ALIGNMENT: u64 = 8;

/// Values converted at a time when a file is written.
const BLOCK: usize = 1 << 16;

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

    /// Passes the values, as stored, to `sink` block by block.
    fn blocks<E>(&self, mut sink: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        fn pass<T: Copy, E>(
            values: &[T],
            bytes: impl Fn(T) -> [u8; 4],
            sink: &mut impl FnMut(&[u8]) -> Result<(), E>,
        ) -> Result<(), E> {
            let mut block = Vec::with_capacity(4 * BLOCK.min(values.len()));
            for values in values.chunks(BLOCK) {
                block.clear();
                block.extend(values.iter().flat_map(|&value| bytes(value)));
                sink(&block)?;
            }
            Ok(())
        }
        match &self.values {
            Values::F32(values) => pass(values, f32::to_le_bytes, &mut sink),
            Values::I32(values) => pass(values, i32::to_le_bytes, &mut sink),
        }
    }
}

/// Reads every tensor of a safetensors file of F32 and I32 tensors.
pub fn read_tensors(path: &Path) -> Result<Tensors> {
    let reading = || format!("reading the tensors of {}", path.display());
    // A pipe or a device would be read for ever.
    let is_file = fs::metadata(path).with_context(reading)?.is_file();
    ensure!(is_file, "{} is not a regular file: tensors are read from a .safetensors file", path.display());
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
/// With `replace`, a file of that name is replaced; otherwise it is an error. Nothing is written through a link.
pub fn write_tensors(path: &Path, tensors: &Tensors, made_by: &str, replace: bool) -> Result<()> {
    refuse_existing(path, replace)?;
    let spec = |(name, tensor): (&String, &Tensor)| TensorSpec {
        name: name.clone(),
        dtype: tensor.dtype(),
        shape: tensor.shape.iter().map(|&size| size as u64).collect(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let metadata = BTreeMap::from([("made_by".to_owned(), made_by.to_owned())]);
    let mut file = ShardWriter::create(path, DATA_ALIGNMENT, &specs, Some(&metadata))?;
    for tensor in tensors.values() {
        tensor.blocks(|block| file.write(block))?;
    }
    file.finish()?;
    Ok(())
}

/// An error if `path` is taken, unless it is a file to `replace`. Links are refused, whatever they lead to, and so are
/// pipes and devices. The same holds for the unfinished file that a write makes first.
pub(crate) fn refuse_existing(path: &Path, replace: bool) -> Result<()> {
    refuse_name(path, replace)?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    refuse_name(Path::new(&partial), true)
}

fn refuse_name(path: &Path, replace: bool) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => bail!("{} is a directory: give the name of a file", path.display()),
        Ok(found) if found.is_symlink() => {
            bail!("{} is a symbolic link, which is not followed: give another name", path.display())
        }
        Ok(found) if !found.is_file() => {
            bail!("{} is not a regular file: give another name", path.display())
        }
        Ok(_) if !replace => {
            bail!("{} exists: give another name, or --force to replace it", path.display())
        }
        _ => Ok(()),
    }
}
