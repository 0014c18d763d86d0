//! Quantized matrices outside the routed experts: how they are stored, found and read (`docs/dense-formats.md` 2).
//!
//! What a matrix is stored as follows from the names, dtypes and shapes of its tensors, as with routed experts.

use std::fmt;

use bytes::Bytes;
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, ScaleFactor, Scales, WeightFormat};
use safetensors::Dtype;

use crate::LoadMode;
use crate::error::{Error, TensorErrors, TensorProblem, describe};
use crate::expert_survey::scale_fault;
use crate::identity::{hash_sample, hash_tensor};
use crate::shards::{Shards, TensorInfo};
use crate::writer::TensorSpec;

/// How a quantized matrix outside the routed experts is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearFormat {
    /// NVFP4 of compressed-tensors: `weight_packed` U8, `weight_scale` F8_E4M3, `weight_global_scale` (a divisor).
    Nvfp4CompressedTensors,
    /// NVFP4 of ModelOpt: `weight` U8, `weight_scale` F8_E4M3, `weight_scale_2` (a factor).
    Nvfp4ModelOpt,
    /// INT8 of compressed-tensors' `int-quantized`: `weight` I8, `weight_scale` BF16 or F32.
    Int8,
    /// INT4 of compressed-tensors' `pack-quantized`: `weight_packed` I32, `weight_scale` BF16 or F32, `weight_shape`.
    Int4,
}

impl fmt::Display for LinearFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4CompressedTensors => "NVFP4 (compressed-tensors)",
            Self::Nvfp4ModelOpt => "NVFP4 (ModelOpt)",
            Self::Int8 => "INT8",
            Self::Int4 => "INT4",
        })
    }
}

/// The tensors that quantized matrices may have beside or in place of `weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Packed,
    Scale,
    Divisor,
    Factor,
    Shape,
}

impl Part {
    const ALL: [Self; 5] = [Self::Packed, Self::Scale, Self::Divisor, Self::Factor, Self::Shape];

    fn name(self) -> &'static str {
        match self {
            Self::Packed => "weight_packed",
            Self::Scale => "weight_scale",
            Self::Divisor => "weight_global_scale",
            Self::Factor => "weight_scale_2",
            Self::Shape => "weight_shape",
        }
    }
}

/// Module and part of the name of a part.
pub(crate) fn split_part(name: &str) -> Option<(&str, Part)> {
    let (module, last) = name.rsplit_once('.')?;
    Some((module, Part::ALL.into_iter().find(|part| part.name() == last)?))
}

/// The parts that were found of one matrix.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parts<'a>([Option<TensorInfo<'a>>; 5]);

impl<'a> Parts<'a> {
    pub(crate) fn set(&mut self, part: Part, tensor: TensorInfo<'a>) {
        self.0[part as usize] = Some(tensor);
    }

    fn get(&self, part: Part) -> Option<TensorInfo<'a>> {
        self.0[part as usize]
    }

    /// All that were found.
    pub(crate) fn iter(&self) -> impl Iterator<Item = TensorInfo<'a>> {
        self.0.into_iter().flatten()
    }
}

/// A quantized matrix that was found whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StoredLinear {
    pub(crate) format: LinearFormat,
    /// NVFP4's scale of the matrix, as stored.
    global: f32,
    /// Bytes of all its tensors.
    pub(crate) bytes: u64,
}

impl LinearFormat {
    /// The format of the matrix in memory.
    pub fn weight_format(self) -> WeightFormat {
        match self {
            Self::Nvfp4CompressedTensors | Self::Nvfp4ModelOpt => WeightFormat::Nvfp4,
            Self::Int8 => WeightFormat::Int8,
            Self::Int4 => WeightFormat::Int4,
        }
    }

    /// The tensors of a matrix `[rows, cols]` of the module `module`: codes, scales, and what else belongs to it.
    pub fn tensors(self, module: &str, rows: usize, cols: usize) -> Vec<TensorSpec> {
        let spec = |part: &str, dtype: Dtype, shape: &[usize]| TensorSpec {
            name: format!("{module}.{part}"),
            dtype,
            shape: shape.iter().map(|&n| n as u64).collect(),
        };
        let scale = Part::Scale.name();
        match self {
            Self::Nvfp4CompressedTensors => vec![
                spec(Part::Packed.name(), Dtype::U8, &[rows, cols / 2]),
                spec(scale, Dtype::F8_E4M3, &[rows, cols / k3_quant::NV_BLOCK]),
                spec(Part::Divisor.name(), Dtype::F32, &[1]),
            ],
            Self::Nvfp4ModelOpt => vec![
                spec("weight", Dtype::U8, &[rows, cols / 2]),
                spec(scale, Dtype::F8_E4M3, &[rows, cols / k3_quant::NV_BLOCK]),
                spec(Part::Factor.name(), Dtype::F32, &[]),
            ],
            Self::Int8 => {
                vec![spec("weight", Dtype::I8, &[rows, cols]), spec(scale, Dtype::BF16, &[rows, 1])]
            }
            Self::Int4 => vec![
                spec(Part::Packed.name(), Dtype::I32, &[rows, cols / 8]),
                spec(scale, Dtype::BF16, &[rows, cols / k3_quant::INT4_GROUP]),
                spec(Part::Shape.name(), Dtype::I64, &[2]),
            ],
        }
    }

    /// Other dtypes and shapes that are read in the place of those of [`LinearFormat::tensors`].
    fn accepts(self, wanted: &TensorSpec, found: &TensorInfo<'_>) -> bool {
        let (dtype, shape) = match wanted.dtype {
            // A scale of the matrix: with or without a dimension.
            Dtype::F32 => (found.dtype == Dtype::F32, found.shape.is_empty() || found.shape == [1]),
            Dtype::BF16 => {
                let flat = self == Self::Int8 && found.shape == &wanted.shape[..1];
                (matches!(found.dtype, Dtype::BF16 | Dtype::F32), flat || found.shape == wanted.shape)
            }
            dtype => (found.dtype == dtype, found.shape == wanted.shape),
        };
        dtype && shape
    }
}

/// Looks at the tensors of the module `module`, a matrix `[rows, cols]`, of which at least one is not that of a plain
/// matrix. `None` if `errors` says what is wrong.
pub(crate) fn find(
    module: &str,
    (rows, cols): (usize, usize),
    weight: Option<&TensorInfo<'_>>,
    parts: &Parts<'_>,
    shards: &Shards,
    errors: &mut TensorErrors,
    hasher: &mut blake3::Hasher,
) -> Result<Option<StoredLinear>, Error> {
    let before = errors.total;
    let packed = parts.get(Part::Packed);
    let format = match (packed.map(|t| t.dtype), weight.map(|t| t.dtype)) {
        (Some(Dtype::U8), _) => LinearFormat::Nvfp4CompressedTensors,
        (Some(Dtype::I32), _) => LinearFormat::Int4,
        (None, Some(Dtype::U8)) => LinearFormat::Nvfp4ModelOpt,
        (None, Some(Dtype::I8)) => LinearFormat::Int8,
        (Some(_), _) => {
            errors.push(|| TensorProblem::Dtype {
                name: format!("{module}.{}", Part::Packed.name()),
                expected: format!("U8 [{rows}, {}] (NVFP4) or I32 [{rows}, {}] (INT4)", cols / 2, cols / 8),
                found: packed.map_or_else(String::new, |t| describe(&t)),
            });
            return Ok(None);
        }
        (None, plain) => {
            for part in parts.iter() {
                errors.push(|| match plain {
                    Some(dtype) => {
                        TensorProblem::Surplus { name: part.name.to_owned(), format: dtype.to_string() }
                    }
                    None => TensorProblem::Missing {
                        name: format!("{module}.weight"),
                        expected: format!("or {module}.weight_packed, to which {} belongs", part.name),
                    },
                });
            }
            return Ok(None);
        }
    };
    let block = format.weight_format().column_block();
    if !cols.is_multiple_of(block) {
        errors.push(|| TensorProblem::Shape {
            name: format!("{module}.{}", if packed.is_some() { "weight_packed" } else { "weight" }),
            expected: format!("a matrix of columns in multiples of {block}, as {format} has them"),
            found: format!("[{rows}, {cols}]"),
        });
        return Ok(None);
    }
    let wanted = format.tensors(module, rows, cols);
    let found = |spec: &TensorSpec| {
        let part = split_part(&spec.name);
        part.map_or(weight.copied(), |(_, part)| parts.get(part))
    };
    let (mut bytes, mut global) = (0, 1.0);
    for spec in &wanted {
        let Some(tensor) = found(spec) else {
            errors.push(|| TensorProblem::Missing {
                name: spec.name.clone(),
                expected: format!("{} {:?}, for a matrix stored as {format}", spec.dtype, spec.shape),
            });
            continue;
        };
        if !format.accepts(spec, &tensor) {
            errors.push(|| TensorProblem::Dtype {
                name: spec.name.clone(),
                expected: format!("{} {:?}, for a matrix stored as {format}", spec.dtype, spec.shape),
                found: describe(&tensor),
            });
            continue;
        }
        bytes += tensor.byte_len();
        match spec.dtype {
            Dtype::F32 | Dtype::I64 => {
                let stored = shards.read(&tensor)?;
                let what = if spec.dtype == Dtype::F32 {
                    global = f32_of(&stored);
                    scale_fault(format == LinearFormat::Nvfp4ModelOpt, global)
                } else {
                    shape_fault(&stored, rows, cols)
                };
                if let Some(what) = what {
                    errors.push(|| TensorProblem::Value { name: spec.name.clone(), what });
                }
                hash_tensor(hasher, &tensor, &stored);
            }
            _ => hash_sample(hasher, &tensor, shards)?,
        }
    }
    let belongs = |name: &str| wanted.iter().any(|spec| spec.name == name);
    for tensor in parts.iter().chain(weight.copied()).filter(|t| !belongs(t.name)) {
        errors.push(|| TensorProblem::Surplus { name: tensor.name.to_owned(), format: format.to_string() });
    }
    Ok((errors.total == before).then_some(StoredLinear { format, global, bytes }))
}

fn f32_of(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(f32::NAN, |b| f32::from_le_bytes(*b))
}

fn shape_fault(bytes: &[u8], rows: usize, cols: usize) -> Option<String> {
    let found: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let right = found == [rows as i64, cols as i64];
    (!right).then(|| format!("it says {found:?}, but the matrix is [{rows}, {cols}]"))
}

/// Reads a matrix that [`find`] has found.
pub(crate) fn load(
    shards: &Shards,
    mode: LoadMode,
    module: &str,
    (rows, cols): (usize, usize),
    stored: &StoredLinear,
) -> Result<Matrix, Error> {
    let mut tensors = [None; 2];
    let mut bytes = [Bytes::new(), Bytes::new()];
    let specs = stored.format.tensors(module, rows, cols);
    for ((spec, tensor), bytes) in specs.iter().zip(&mut tensors).zip(&mut bytes) {
        // It was there when the checkpoint was opened, of which this is a part.
        let Some(found) = shards.get(&spec.name) else { continue };
        *bytes = match mode {
            LoadMode::Read => shards.read(&found)?,
            LoadMode::Map => shards.map(&found)?,
        };
        *tensor = Some(found);
    }
    let [_, scale] = tensors;
    let [codes, scales] = bytes;
    // Codes are all numbers; scales may be anything, and what sigmoid or tanh make of it looks like a number.
    if let Some(scale) = scale.filter(|_| mode == LoadMode::Read)
        && let Some((at, value)) = bad_scale(scale.dtype, &scales)
    {
        let width = scale.shape.get(1).map_or(1, |&n| n as usize).max(1);
        return Err(Error::BadScale {
            name: scale.name.to_owned(),
            file: shards.files()[scale.shard].path.clone(),
            row: at / width,
            column: at % width,
            value,
        });
    }
    let typed = |scales| match scale.map(|t| t.dtype) {
        Some(Dtype::F32) => Scales::F32(scales),
        _ => Scales::Bf16(scales),
    };
    let matrix = match stored.format {
        LinearFormat::Nvfp4CompressedTensors => {
            Matrix::nvfp4(rows, cols, codes, scales, GlobalScale::Divisor(ScaleDivisor(stored.global)))
        }
        LinearFormat::Nvfp4ModelOpt => {
            Matrix::nvfp4(rows, cols, codes, scales, GlobalScale::Factor(ScaleFactor(stored.global)))
        }
        LinearFormat::Int8 => Matrix::int8(rows, cols, codes, typed(scales)),
        LinearFormat::Int4 => Matrix::int4(rows, cols, codes, typed(scales)),
    };
    matrix.map_err(|source| Error::Matrix { name: format!("{module}.weight"), source })
}

/// The first scale that is NaN, infinite or negative, and its position.
fn bad_scale(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f32)> {
    // In each type what is bad is all from the bits of its first such value on.
    let first = |bad: Option<usize>, value: &dyn Fn(usize) -> f32| bad.map(|at| (at, value(at)));
    match dtype {
        Dtype::F8_E4M3 => {
            first(bytes.iter().position(|&b| b >= 0x7f), &|at| k3_quant::E4M3(bytes[at]).to_f32())
        }
        Dtype::BF16 => {
            let values = bytes.as_chunks::<2>().0;
            let bad = values.iter().position(|b| u16::from_le_bytes(*b) >= half::bf16::INFINITY.to_bits());
            first(bad, &|at| half::bf16::from_le_bytes(values[at]).to_f32())
        }
        _ => {
            let values = bytes.as_chunks::<4>().0;
            let bad = values.iter().position(|b| u32::from_le_bytes(*b) >= f32::INFINITY.to_bits());
            first(bad, &|at| f32::from_le_bytes(values[at]))
        }
    }
}
