//! Tensors outside the routed experts: what each becomes, and how its bytes are made (`docs/dense-formats.md`).

use std::num::NonZero;

use k3_quant::bf16;
use k3_quant::encode::{Encoder, OutOfRange, RoundingError, largest_magnitude};

use crate::shards::TensorInfo;
use crate::writer::TensorSpec;
use crate::{LinearFormat, Role};

use super::error::RepackError;
use super::plan::{DensePlan, Plan};
use super::read::Reader;
use super::sink::Sink;
use super::{DenseFormat, Naming};

/// Bytes of rows that are quantized at a time; at least one row.
const BLOCK: usize = 4 << 20;

/// The format that a tensor gets when `wanted` is asked for. `role` is what the tensor is for, `None` for one that the
/// language model does not have (vision, unknown).
///
/// Only the large projections are ever quantized ([`Role::is_quantized_on_request`]), and of them those whose rows are
/// whole blocks. What is stored as F32 stays so.
pub(super) fn dense_format(role: Option<Role>, tensor: &TensorInfo<'_>, wanted: DenseFormat) -> DenseFormat {
    let block = wanted.weight_format().map_or(1, |format| format.column_block() as u64);
    let fits = matches!(tensor.shape, [rows, cols] if *rows > 0 && *cols > 0 && cols % block == 0);
    if role.is_some_and(Role::is_quantized_on_request) && tensor.dtype == safetensors::Dtype::BF16 && fits {
        wanted
    } else {
        DenseFormat::Bf16
    }
}

/// The module of a matrix: its name without `.weight`.
pub(super) fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// The tensors that `tensor` becomes, in the order in which [`stream`] makes their bytes: of a quantized matrix first
/// what belongs to all of it, whose elements are the largest, then codes, then scales.
pub(super) fn outputs(tensor: &TensorInfo<'_>, format: DenseFormat, naming: Naming) -> Vec<TensorSpec> {
    let [rows, cols] = tensor.shape.try_into().unwrap_or([0, 0]);
    let Some(linear) = format.linear(naming) else {
        let (name, dtype, shape) = (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec());
        return vec![TensorSpec { name, dtype, shape }];
    };
    let mut specs = linear.tensors(module(tensor.name), rows as usize, cols as usize);
    let of_all = specs.split_off(2);
    of_all.into_iter().chain(specs).collect()
}

/// How the parts of a matrix that is being quantized take turns.
pub(super) struct Quantizer<'a> {
    tensor: TensorInfo<'a>,
    encoder: Encoder,
    rows: usize,
    cols: usize,
    threads: usize,
    /// Rows of a block, as stored.
    block: Vec<u8>,
    values: Vec<bf16>,
}

impl<'a> Quantizer<'a> {
    /// Looks at the whole matrix first, if the format asks for that.
    pub(super) fn new(
        tensor: TensorInfo<'a>,
        format: LinearFormat,
        threads: usize,
        reader: &mut Reader<'_>,
    ) -> Result<Self, RepackError> {
        let [rows, cols] = tensor.shape.try_into().unwrap_or([0, 0]).map(|n| n as usize);
        let encoder = match format {
            LinearFormat::Int8 => Encoder::int8(),
            LinearFormat::Int4 => Encoder::int4(),
            LinearFormat::Nvfp4CompressedTensors | LinearFormat::Nvfp4ModelOpt => Encoder::nvfp4(0.0),
        };
        let (block, values) = (Vec::new(), Vec::new());
        let mut this = Self { tensor, encoder, rows, cols, threads, block, values };
        if this.encoder.factor().is_some() {
            let mut largest = 0.0_f32;
            let mut first = 0;
            while first < this.rows {
                let rows = this.read(first, reader)?;
                let found = largest_magnitude(first, this.cols, &this.values).map_err(|e| this.refuse(e))?;
                largest = largest.max(found);
                first += rows;
            }
            this.encoder = Encoder::nvfp4(largest);
        }
        Ok(this)
    }

    /// The bytes of what belongs to the whole matrix.
    pub(super) fn of_all(&self, format: LinearFormat) -> Vec<u8> {
        match (format, self.encoder.factor()) {
            (LinearFormat::Nvfp4ModelOpt, Some(factor)) => factor.0.to_le_bytes().into(),
            // Of a power of two, exactly.
            (_, Some(factor)) => (1.0 / factor.0).to_le_bytes().into(),
            (LinearFormat::Int4, None) => {
                [self.rows, self.cols].iter().flat_map(|n| (*n as u64).to_le_bytes()).collect()
            }
            (_, None) => Vec::new(),
        }
    }

    /// Hands the codes to `take`, block by block, and returns all scales.
    pub(super) fn encode(
        &mut self,
        reader: &mut Reader<'_>,
        take: &mut dyn FnMut(&[u8]) -> Result<(), RepackError>,
    ) -> Result<(Vec<u8>, RoundingError), RepackError> {
        let (code_bytes, scale_bytes) =
            (self.encoder.code_bytes(self.cols), self.encoder.scale_bytes(self.cols));
        let mut scales = vec![0; self.rows * scale_bytes];
        let mut codes = Vec::new();
        let mut error = RoundingError::default();
        let mut first = 0;
        while first < self.rows {
            let rows = self.read(first, reader)?;
            codes.resize(rows * code_bytes, 0);
            let here = &mut scales[first * scale_bytes..(first + rows) * scale_bytes];
            self.encode_block(first, &mut codes, here, &mut error).map_err(|e| self.refuse(e))?;
            take(&codes)?;
            first += rows;
        }
        Ok((scales, error))
    }

    /// Rows in parallel; their errors are summed in their order.
    fn encode_block(
        &self,
        first: usize,
        codes: &mut [u8],
        scales: &mut [u8],
        error: &mut RoundingError,
    ) -> Result<(), OutOfRange> {
        let (encoder, cols) = (self.encoder, self.cols);
        let rows = self.values.len() / cols;
        let mut each = vec![Ok(RoundingError::default()); rows];
        let share = rows.div_ceil(self.threads.max(1)).max(1);
        std::thread::scope(|scope| {
            let values = self.values.chunks(share * cols);
            let codes = codes.chunks_mut(share * encoder.code_bytes(cols));
            let scales = scales.chunks_mut(share * encoder.scale_bytes(cols));
            let parts = values.zip(codes).zip(scales).zip(each.chunks_mut(share)).enumerate();
            let mut work = parts.map(|(part, (((values, codes), scales), each))| {
                move || {
                    let rows = values.chunks(cols).zip(codes.chunks_mut(encoder.code_bytes(cols)));
                    let rows = rows.zip(scales.chunks_mut(encoder.scale_bytes(cols))).zip(each);
                    for (r, (((values, codes), scales), each)) in rows.enumerate() {
                        *each = encoder.encode(first + part * share + r, cols, values, codes, scales);
                    }
                }
            });
            let own = work.next();
            for other in work {
                scope.spawn(other);
            }
            if let Some(own) = own {
                own();
            }
        });
        for row in each {
            error.add(&row?);
        }
        Ok(())
    }

    /// Reads the block that begins with row `first`, and says how many rows it has.
    fn read(&mut self, first: usize, reader: &mut Reader<'_>) -> Result<usize, RepackError> {
        let row = self.cols * size_of::<bf16>();
        let rows = (BLOCK / row).max(1).min(self.rows - first);
        self.block.resize(rows * row, 0);
        reader.read(self.tensor.shard, self.tensor.begin + (first * row) as u64, &mut self.block)?;
        self.values.clear();
        self.values.extend(self.block.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)));
        Ok(rows)
    }

    fn refuse(&self, source: OutOfRange) -> RepackError {
        RepackError::NotAWeight { name: self.tensor.name.to_owned(), source }
    }
}

/// Threads that quantize a shard, when so many are in flight.
pub(super) fn threads(jobs: usize) -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).div_ceil(jobs.max(1))
}

/// Memory that quantizing takes beside the buffers: a block in three forms, its codes, and all scales of a matrix.
pub(super) fn bytes_in_flight(plan: &Plan) -> u64 {
    let scales = |dense: &DensePlan| dense.outputs.last().map_or(0, |spec| spec.byte_len().unwrap_or(0));
    let largest = plan.quantized().0.into_iter().map(scales).max();
    largest.map_or(0, |scales| 4 * BLOCK as u64 + scales)
}

/// Makes the bytes of [`outputs`], one after another and without gaps, and says what rounding cost.
pub(super) fn stream(
    tensor: &TensorInfo<'_>,
    format: Option<LinearFormat>,
    threads: usize,
    reader: &mut Reader<'_>,
    sink: &mut Sink,
) -> Result<Option<RoundingError>, RepackError> {
    let Some(format) = format else {
        let mut at = tensor.begin;
        while at < tensor.end {
            let len = (tensor.end - at).min(sink.capacity() as u64);
            sink.fill(len as usize, |out| Ok(reader.read(tensor.shard, at, out)?))?;
            at += len;
        }
        return Ok(None);
    };
    let mut quantizer = Quantizer::new(*tensor, format, threads, reader)?;
    sink.write(&quantizer.of_all(format))?;
    let (scales, error) = quantizer.encode(reader, &mut |codes| sink.write(codes))?;
    sink.write(&scales)?;
    Ok(Some(error))
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;

    #[test]
    fn what_is_quantized() {
        let check = |role, dtype, shape: &[u64], wanted, expected| {
            let tensor = TensorInfo { name: "x.weight", dtype, shape, shard: 0, begin: 0, end: 0 };
            assert_eq!(dense_format(role, &tensor, wanted), expected, "{role:?} {dtype} {shape:?}");
        };
        use DenseFormat::{Bf16, Int4, Int8, Nvfp4};
        for wanted in [Nvfp4, Int8, Int4] {
            check(Some(Role::QProj), Dtype::BF16, &[3, 64], wanted, wanted);
            check(Some(Role::QProj), Dtype::F32, &[3, 64], wanted, Bf16);
            check(Some(Role::RouterGate), Dtype::BF16, &[3, 64], wanted, Bf16);
            check(Some(Role::LmHead), Dtype::BF16, &[3, 64], wanted, Bf16);
            check(None, Dtype::BF16, &[3, 64], wanted, Bf16);
        }
        check(Some(Role::OProj), Dtype::BF16, &[3, 96], Int4, Bf16);
        check(Some(Role::OProj), Dtype::BF16, &[3, 96], Nvfp4, Nvfp4);
        check(Some(Role::OProj), Dtype::BF16, &[3, 72], Nvfp4, Bf16);
        check(Some(Role::OProj), Dtype::BF16, &[3, 71], Int8, Int8);
    }
}
