//! Comparing a result with its source, from the files (`docs/nvfp4.md` 4 and 9).
//!
//! Nothing here is shared with the conversion: tensors are found by name in the headers of both, and scales are compared
//! as the numbers that they stand for.

use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::Sender;

use k3_quant::{E2M1, E4M3, E8M0};

use crate::experts::{MATRICES, matrix_name};
use crate::shards::TensorInfo;
use crate::writer::TensorSpec;
use crate::{ExpertFormat, LinearFormat};

use super::dense::Quantizer;
use super::differences::ShardDifferences;
use super::error::RepackError;
use super::plan::ShardPlan;
use super::read::Reader;
use super::verify::{HashedFile, PIECE, Proof, Verification};

/// Bytes of codes that one scale of the source covers.
const BLOCK: usize = k3_quant::MX_BLOCK / 2;

/// The comparison of one shard.
pub(super) struct Comparison<'a, 'f> {
    of: &'a Verification<'a>,
    threads: usize,
    events: &'f Sender<u64>,
    source: Reader<'a>,
    result: &'f mut HashedFile<'a>,
    a: Vec<u8>,
    b: Vec<u8>,
    /// By the stored scale of a matrix: for each E8M0 byte the E4M3 byte of the same value, if there is one.
    tables: HashMap<u32, Box<[Option<u8>; 256]>>,
    differences: &'f mut ShardDifferences,
    pub(super) proof: Proof,
}

/// A matrix of a routed expert.
#[derive(Clone, Copy)]
struct Matrix {
    layer: usize,
    expert: usize,
    which: usize,
}

impl Matrix {
    fn name(self, part: &str) -> String {
        format!("{}.{part}", matrix_name(self.layer, self.expert, self.which))
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, expert, which } = *self;
        let name = matrix_name(layer, expert, which);
        write!(f, "{name} (layer {layer}, expert {expert}, matrix {})", MATRICES[which])
    }
}

impl<'a, 'f> Comparison<'a, 'f> {
    pub(super) fn new(
        of: &'a Verification<'a>,
        result: &'f mut HashedFile<'a>,
        threads: usize,
        differences: &'f mut ShardDifferences,
        events: &'f Sender<u64>,
    ) -> Result<Self, RepackError> {
        Ok(Self {
            of,
            threads,
            events,
            source: Reader::new(of.source.shards(), of.direct)?,
            result,
            a: Vec::new(),
            b: Vec::new(),
            tables: HashMap::new(),
            differences,
            proof: Proof { shards_compared: 1, ..Proof::default() },
        })
    }

    /// A tensor of the result, whose type and place [`Comparison::is_complete`] has checked.
    fn result_tensor(&self, name: &str) -> Result<TensorInfo<'a>, RepackError> {
        self.of.result.get(name).ok_or_else(|| RepackError::NoTensor { name: name.to_owned() })
    }

    pub(super) fn shard(&mut self, shard: &ShardPlan) -> Result<(), RepackError> {
        let data_start = self.result.data_start;
        self.result.hash_to(data_start, &mut |_| {})?;
        if !self.is_complete(shard) {
            return Ok(());
        }
        if let Some(layer) = shard.layer.filter(|_| shard.has_experts) {
            for expert in 0..self.of.plan.experts_per_layer {
                self.expert(layer, expert)?;
            }
        }
        for dense in &shard.dense {
            let source = self.of.source.shards().get(&dense.source);
            let source = source.ok_or_else(|| RepackError::NoTensor { name: dense.source.clone() })?;
            match dense.format.linear(self.of.plan.recipe.names) {
                None => self.same_bytes(&source)?,
                Some(format) => self.same_rounding(&source, format, &dense.outputs)?,
            }
        }
        Ok(())
    }

    /// Whether there is every tensor that there should be, of the right type and size, and no other. Otherwise nothing
    /// else is compared.
    fn is_complete(&mut self, shard: &ShardPlan) -> bool {
        for spec in self.of.plan.specs(shard) {
            let TensorSpec { name, dtype, shape } = &spec;
            match self.of.result.get(name) {
                None => self.differences.note(|| format!("`{name}` is missing")),
                Some(found) if found.shard != self.result.shard => {
                    self.differences.note(|| format!("`{name}` is in another file"));
                }
                Some(found) if found.dtype != *dtype || found.shape != shape.as_slice() => {
                    let (is, has) = (found.dtype, found.shape);
                    self.differences
                        .note(|| format!("`{name}` should be {dtype} {shape:?} and is {is} {has:?}"));
                }
                Some(_) => {}
            }
        }
        let there = self.of.result.files()[self.result.shard].tensors.len();
        if there != shard.tensors {
            self.differences.note(|| format!("it has {there} tensors, should have {}", shard.tensors));
        }
        self.differences.total == 0
    }

    fn expert(&mut self, layer: usize, expert: usize) -> Result<(), RepackError> {
        let experts = self.of.source.experts();
        let layout = experts.layout();
        let place = experts.location(layer, expert as u32)?;
        let mut globals = [None; 3];
        for which in 0..MATRICES.len() {
            let matrix = Matrix { layer, expert, which };
            let (packed, global) = match self.of.plan.experts.format {
                ExpertFormat::Mxfp4 => ("weight_packed", None),
                ExpertFormat::Nvfp4CompressedTensors => ("weight_packed", Some("weight_global_scale")),
                ExpertFormat::Nvfp4ModelOpt => ("weight", Some("weight_scale_2")),
            };
            let (part, cols) = (2 * which, layout.shapes[which].1);
            self.read_both(place.part(layout, part), layout.parts[part].len(), &matrix.name(packed))?;
            self.codes(matrix, cols);
            let codes = std::mem::take(&mut self.a);
            let part = part + 1;
            self.read_both(place.part(layout, part), layout.parts[part].len(), &matrix.name("weight_scale"))?;
            match global {
                None => self.scales(matrix, cols, &codes, None),
                Some(global) => {
                    globals[which] = self.global(&matrix.name(global))?;
                    if globals[which].is_some() {
                        self.scales(matrix, cols, &codes, globals[which]);
                    }
                }
            }
            self.a = codes;
        }
        if globals[0] != globals[2] {
            let matrix = Matrix { layer, expert, which: 0 };
            self.differences.note(|| format!("{matrix}: its scale is not that of w3 of the same expert"));
        }
        if self.of.plan.experts.format == ExpertFormat::Nvfp4ModelOpt {
            for which in 0..MATRICES.len() {
                let name = Matrix { layer, expert, which }.name("input_scale");
                if let Some(bits) = self.global(&name)?.filter(|bits| *bits != 1f32.to_bits()) {
                    self.differences.note(|| format!("`{name}` is {}, should be 1", f32::from_bits(bits)));
                }
            }
        }
        Ok(())
    }

    /// Reads bytes of the source into `a`, and a tensor of the result into `b`.
    fn read_both(&mut self, (shard, begin): (usize, u64), len: usize, name: &str) -> Result<(), RepackError> {
        let tensor = self.result_tensor(name)?;
        self.a.resize(len, 0);
        self.source.read(shard, begin, &mut self.a)?;
        self.b.resize(tensor.byte_len() as usize, 0);
        self.result.read(tensor.begin, &mut self.b)?;
        let _ = self.events.send(tensor.byte_len());
        Ok(())
    }

    /// Compares the codes in `a` and `b`.
    fn codes(&mut self, matrix: Matrix, cols: usize) {
        let Self { a, b, differences, proof, .. } = self;
        proof.matrices += 1;
        proof.codes += 2 * a.len() as u64;
        if a == b {
            return;
        }
        for (at, (wanted, found)) in a.iter().zip(b.iter()).enumerate().filter(|(_, (a, b))| a != b) {
            let (row, col) = (at / (cols / 2), 2 * (at % (cols / 2)));
            differences.note(|| {
                format!(
                    "{matrix}: row {row}, columns {col} and {}: codes {found:#04x}, the source's are {wanted:#04x}",
                    col + 1
                )
            });
        }
    }

    /// The bits of an F32 scalar of the result; `None`, and a difference, if it is no scale.
    fn global(&mut self, name: &str) -> Result<Option<u32>, RepackError> {
        let tensor = self.result_tensor(name)?;
        let mut bytes = [0; 4];
        self.result.read(tensor.begin, &mut bytes)?;
        let value = f32::from_le_bytes(bytes);
        // Blocks of zeros would hide any other: zero times NaN is no zero.
        if value > 0.0 && value.is_normal() {
            return Ok(Some(value.to_bits()));
        }
        self.differences
            .note(|| format!("`{name}` is {value:e}, and the scale of a matrix is a normal number above 0"));
        Ok(None)
    }

    /// Compares the source's E8M0 scales in `a` with the result's in `b`.
    fn scales(&mut self, matrix: Matrix, cols: usize, codes: &[u8], global: Option<u32>) {
        let Self { a, b, differences, proof, tables, of, .. } = self;
        let (blocks, _) = codes.as_chunks::<BLOCK>();
        let (per_row, each) = (cols / k3_quant::MX_BLOCK, b.len() / a.len().max(1));
        let mut wrong = |block: usize, what: &str| {
            let (row, at) = (block / per_row, block % per_row);
            let (e, found) = (a[block], &b[block * each..(block + 1) * each]);
            differences
                .note(|| format!("{matrix}: row {row}, block {at}: e = {e}, scale {found:02x?}: {what}"));
        };
        let counts = match global {
            None => equal_bytes(blocks, a, b, &mut wrong),
            Some(bits) => {
                let is_factor = of.plan.experts.format == ExpertFormat::Nvfp4ModelOpt;
                let table = || equal_scales(f32::from_bits(bits), is_factor);
                equal_values(blocks, a, b, tables.entry(bits).or_insert_with(table), &mut wrong)
            }
        };
        proof.live_blocks += counts.live;
        proof.zero_blocks += counts.zero;
        proof.zero_blocks_with_other_scale += counts.other;
    }

    /// Compares a tensor that is to be the source's.
    fn same_bytes(&mut self, source: &TensorInfo<'_>) -> Result<(), RepackError> {
        let mut expected = Expected { tensor: self.result_tensor(source.name)?, at: 0, what: "the source's" };
        while expected.at < source.byte_len() {
            let n = (source.byte_len() - expected.at).min(PIECE as u64) as usize;
            self.a.resize(n, 0);
            self.source.read(source.shard, source.begin + expected.at, &mut self.a)?;
            expected.compare(self.result, &self.a, &mut self.b, self.differences)?;
            let _ = self.events.send(n as u64);
        }
        self.proof.dense_tensors += 1;
        self.proof.dense_bytes += source.byte_len();
        Ok(())
    }

    /// Compares the tensors of a matrix with what quantizing the source's gives now. The rules of rounding are those of
    /// the conversion; what is proved is that this was done to the source's numbers, and that the file holds it.
    fn same_rounding(
        &mut self,
        source: &TensorInfo<'_>,
        format: LinearFormat,
        outputs: &[TensorSpec],
    ) -> Result<(), RepackError> {
        let mut quantizer = Quantizer::new(*source, format, self.threads, &mut self.source)?;
        let of_all = quantizer.of_all(format);
        let mut parts = Vec::new();
        for spec in outputs {
            let what = "what quantizing the source's gives";
            parts.push(Expected { tensor: self.result_tensor(&spec.name)?, at: 0, what });
        }
        let mut parts = parts.into_iter();
        let Self { source, result, b, differences, events, .. } = self;
        if !of_all.is_empty()
            && let Some(mut expected) = parts.next()
        {
            expected.compare(result, &of_all, b, differences)?;
        }
        let (Some(mut codes), Some(mut scales)) = (parts.next(), parts.next()) else { return Ok(()) };
        let (found, _) = quantizer.encode(source, &mut |bytes| {
            let _ = events.send(bytes.len() as u64);
            codes.compare(result, bytes, b, differences)
        })?;
        let _ = events.send(found.len() as u64);
        scales.compare(result, &found, b, differences)?;
        self.proof.quantized_tensors += 1;
        Ok(())
    }
}

/// A tensor of the result, compared from its beginning on.
struct Expected<'a> {
    tensor: TensorInfo<'a>,
    at: u64,
    /// What it should be.
    what: &'static str,
}

impl Expected<'_> {
    /// Compares the next bytes, whole elements.
    fn compare(
        &mut self,
        result: &mut HashedFile<'_>,
        wanted: &[u8],
        found: &mut Vec<u8>,
        differences: &mut ShardDifferences,
    ) -> Result<(), RepackError> {
        found.resize(wanted.len(), 0);
        result.read(self.tensor.begin + self.at, found)?;
        if *found != wanted {
            let width = (self.tensor.dtype.bitsize() / 8).max(1);
            let elements = wanted.chunks(width).zip(found.chunks(width)).enumerate();
            for (i, (wanted, found)) in elements.filter(|(_, (a, b))| a != b) {
                let byte = self.at + (i * width) as u64;
                let (name, what) = (self.tensor.name, self.what);
                let place = coordinates(self.tensor.shape, byte / width as u64);
                differences.note(|| {
                    format!("`{name}` at {place} (byte {byte}): {found:02x?} is not {what}, {wanted:02x?}")
                });
            }
        }
        self.at += wanted.len() as u64;
        Ok(())
    }
}

/// Where element number `element` of a tensor of this shape is, from 0.
fn coordinates(shape: &[u64], mut element: u64) -> String {
    let mut place = vec![0; shape.len()];
    for (at, &size) in place.iter_mut().zip(shape).rev() {
        (*at, element) = (element % size.max(1), element / size.max(1));
    }
    format!("{place:?}")
}

/// Blocks whose scales are right.
#[derive(Default)]
struct Counts {
    live: u64,
    zero: u64,
    /// Blocks of zeros with another scale than the source's.
    other: u64,
}

/// MXFP4 on both sides.
fn equal_bytes(
    blocks: &[[u8; BLOCK]],
    source: &[u8],
    result: &[u8],
    wrong: &mut dyn FnMut(usize, &str),
) -> Counts {
    let mut counts = Counts::default();
    for (block, (codes, (&e, &found))) in blocks.iter().zip(source.iter().zip(result)).enumerate() {
        if e == 255 {
            wrong(block, "NaN");
        } else if e != found {
            wrong(block, "not the source's");
        } else {
            *(if is_live(codes) { &mut counts.live } else { &mut counts.zero }) += 1;
        }
    }
    counts
}

/// E8M0 in the source, pairs of E4M3 in the result.
fn equal_values(
    blocks: &[[u8; BLOCK]],
    source: &[u8],
    result: &[u8],
    table: &[Option<u8>; 256],
    wrong: &mut dyn FnMut(usize, &str),
) -> Counts {
    let (pairs, _) = result.as_chunks::<2>();
    let mut counts = Counts::default();
    for (block, (codes, (&e, pair))) in blocks.iter().zip(source.iter().zip(pairs)).enumerate() {
        let equal = table[usize::from(e)].is_some_and(|s| *pair == [s; 2]);
        if is_live(codes) {
            if equal {
                counts.live += 1;
            } else {
                wrong(block, "not the value of the source's");
            }
        } else if e == 255 || pair.iter().any(|&s| s & 0x80 != 0 || !E4M3(s).to_f32().is_finite()) {
            wrong(block, "NaN or negative");
        } else {
            counts.zero += 1;
            counts.other += u64::from(!equal);
        }
    }
    counts
}

/// Whether a block has a code that is not zero.
fn is_live(codes: &[u8]) -> bool {
    codes.iter().any(|&byte| !E2M1::even(byte).is_zero() || !E2M1::odd(byte).is_zero())
}

/// For each E8M0 byte the E4M3 byte that gives the same number with this matrix scale, found by trying all. Products
/// and quotients of these numbers are exact in f64.
fn equal_scales(global: f32, is_factor: bool) -> Box<[Option<u8>; 256]> {
    let mut table = Box::new([None; 256]);
    for (e, entry) in table.iter_mut().enumerate() {
        let wanted = f64::from(E8M0(e as u8).to_f32());
        let value = |s: u8| {
            let (s, global) = (f64::from(E4M3(s).to_f32()), f64::from(global));
            if is_factor { s * global } else { s / global }
        };
        *entry = (0..0x80).find(|&s| value(s) == wanted);
    }
    table
}
