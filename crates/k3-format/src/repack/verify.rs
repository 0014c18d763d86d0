//! Comparing a result with its source, from the files (`docs/nvfp4.md` 4 and 9).
//!
//! Nothing here is shared with the conversion: tensors are found by name in the headers of both, and scales are compared
//! as the numbers that they stand for.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};

use k3_quant::{E2M1, E4M3, E8M0};
use serde::Serialize;

use crate::experts::{ExpertLocation, MATRICES, matrix_name};
use crate::shards::{Shards, TensorInfo};
use crate::writer::TensorSpec;
use crate::{Checkpoint, ExpertFormat, LinearFormat};

use super::dense::{self, Quantizer};
use super::error::RepackError;
use super::pipeline::locked;
use super::plan::{Plan, ShardPlan};
use super::read::Reader;
use super::report::FileRecord;

/// What a verification compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// Shards that were read again and had the BLAKE3 that they were written with.
    pub shards_hashed: usize,
    /// Shards that were compared with the source.
    pub shards_compared: usize,
    /// Matrices of routed experts whose codes are the source's, byte for byte.
    pub matrices: u64,
    /// 4-bit codes in them.
    pub codes: u64,
    /// Live blocks, whose scales give the same values as the source's.
    pub live_blocks: u64,
    /// Blocks of zeros: their values are zero whatever the scale.
    pub zero_blocks: u64,
    /// Of these, blocks whose scale is not the value of the source's.
    pub zero_blocks_with_other_scale: u64,
    /// Other tensors that are the source's, byte for byte.
    pub dense_tensors: u64,
    /// Their bytes.
    pub dense_bytes: u64,
    /// Matrices that are, byte for byte, what quantizing the source's gives.
    pub quantized_tensors: u64,
    /// Whether the files were read past the page cache. Otherwise what was read may have come from memory.
    pub from_disk: bool,
}

impl Proof {
    fn add(&mut self, other: &Self) {
        self.shards_hashed += other.shards_hashed;
        self.shards_compared += other.shards_compared;
        self.matrices += other.matrices;
        self.codes += other.codes;
        self.live_blocks += other.live_blocks;
        self.zero_blocks += other.zero_blocks;
        self.zero_blocks_with_other_scale += other.zero_blocks_with_other_scale;
        self.dense_tensors += other.dense_tensors;
        self.dense_bytes += other.dense_bytes;
        self.quantized_tensors += other.quantized_tensors;
    }
}

/// Bytes of codes that one scale of the source covers.
const BLOCK: usize = k3_quant::MX_BLOCK / 2;
/// Bytes of one read of a dense tensor.
const PIECE: usize = 8 << 20;

/// What is compared with what.
pub(super) struct Verification<'a> {
    pub(super) source: &'a Checkpoint,
    pub(super) result: &'a Shards,
    pub(super) plan: &'a Plan,
    pub(super) direct: bool,
}

/// The most memory that verifying one shard takes.
pub(super) fn bytes_in_flight(plan: &Plan) -> u64 {
    2 * (plan.experts.len as u64 + 2 * PIECE as u64) + dense::bytes_in_flight(plan)
}

impl Verification<'_> {
    /// Compares the shards at the positions `which` of the plan, `jobs` at a time; `report` hears of bytes of the result
    /// that were compared.
    pub(super) fn compare(
        &self,
        which: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(u64),
    ) -> Result<Proof, RepackError> {
        let threads = dense::threads(jobs.min(which.len()));
        self.each(which, jobs, report, |shard, events| {
            let mut comparison = Comparison::new(self, shard, threads, events)?;
            comparison.shard(shard)?;
            Ok(comparison.proof)
        })
    }

    /// Compares the hashes of whole files with those that they were written with.
    pub(super) fn hash(
        &self,
        which: &[usize],
        records: &[FileRecord],
        jobs: usize,
        report: &mut dyn FnMut(u64),
    ) -> Result<Proof, RepackError> {
        self.each(which, jobs, report, |shard, events| {
            let at = self.result.files().iter().position(|file| file.name == shard.name);
            let record = records.iter().find(|record| record.name == shard.name);
            let (Some(at), Some(record)) = (at, record) else {
                return Err(self.differs(&shard.name, "it is not there".to_owned()));
            };
            let mut reader = Reader::new(self.result, self.direct)?;
            let mut hasher = blake3::Hasher::new();
            let mut piece = vec![0; PIECE];
            let len = self.result.files()[at].len;
            let mut offset = 0;
            while offset < len {
                let n = (len - offset).min(PIECE as u64) as usize;
                reader.read(at, offset, &mut piece[..n])?;
                hasher.update(&piece[..n]);
                offset += n as u64;
                let _ = events.send(n as u64);
            }
            let found = hasher.finalize().to_hex();
            if record.len != len || record.blake3 != found.as_str() {
                let what = format!(
                    "it was written with {} bytes and BLAKE3 {}, found {len} and {found}",
                    record.len, record.blake3
                );
                return Err(self.differs(&shard.name, what));
            }
            Ok(Proof { shards_hashed: 1, ..Proof::default() })
        })
    }

    fn each(
        &self,
        which: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(u64),
        work: impl Fn(&ShardPlan, &Sender<u64>) -> Result<Proof, RepackError> + Sync,
    ) -> Result<Proof, RepackError> {
        let (events, heard) = mpsc::channel();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let outcome = Mutex::new(Ok(Proof { from_disk: self.direct, ..Proof::default() }));
        std::thread::scope(|scope| {
            for _ in 0..jobs.min(which.len()) {
                let (events, work) = (events.clone(), &work);
                let (next, stop, outcome) = (&next, &stop, &outcome);
                scope.spawn(move || {
                    while let Some(&shard) = which.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let found = work(&self.plan.shards[shard], &events);
                        let mut outcome = locked(outcome);
                        match (found, &mut *outcome) {
                            (Ok(found), Ok(sum)) => sum.add(&found),
                            (Err(error), Ok(_)) => {
                                stop.store(true, Ordering::Relaxed);
                                *outcome = Err(error);
                            }
                            (_, Err(_)) => {}
                        }
                    }
                });
            }
            drop(events);
            heard.into_iter().for_each(report);
        });
        outcome.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn differs(&self, shard: &str, what: String) -> RepackError {
        RepackError::Differs { file: self.result.dir().join(shard), what }
    }
}

/// The comparison of one shard.
struct Comparison<'a> {
    of: &'a Verification<'a>,
    file: &'a Path,
    threads: usize,
    events: &'a Sender<u64>,
    source: Reader<'a>,
    result: Reader<'a>,
    a: Vec<u8>,
    b: Vec<u8>,
    /// By the stored scale of a matrix: for each E8M0 byte the E4M3 byte of the same value, if there is one.
    tables: HashMap<u32, Box<[Option<u8>; 256]>>,
    proof: Proof,
}

impl<'a> Comparison<'a> {
    fn new(
        of: &'a Verification<'a>,
        shard: &ShardPlan,
        threads: usize,
        events: &'a Sender<u64>,
    ) -> Result<Self, RepackError> {
        let file = of.result.files().iter().find(|file| file.name == shard.name);
        let file = file.ok_or_else(|| of.differs(&shard.name, "it is not there".to_owned()))?;
        Ok(Self {
            of,
            file: &file.path,
            threads,
            events,
            source: Reader::new(of.source.shards(), of.direct)?,
            result: Reader::new(of.result, of.direct)?,
            a: Vec::new(),
            b: Vec::new(),
            tables: HashMap::new(),
            proof: Proof { shards_compared: 1, ..Proof::default() },
        })
    }

    fn differs(&self, what: String) -> RepackError {
        RepackError::Differs { file: self.file.to_owned(), what }
    }

    /// A tensor of the result, which must lie in this shard.
    fn result_tensor(&self, name: &str) -> Result<TensorInfo<'a>, RepackError> {
        let tensor = self.of.result.get(name).ok_or_else(|| self.differs(format!("`{name}` is missing")))?;
        if self.of.result.files()[tensor.shard].path != self.file {
            return Err(self.differs(format!("`{name}` is in another file")));
        }
        Ok(tensor)
    }

    fn shard(&mut self, shard: &ShardPlan) -> Result<(), RepackError> {
        // Every tensor that there should be, of the right type and size, and no other.
        for spec in self.of.plan.specs(shard) {
            let found = self.result_tensor(&spec.name)?;
            if found.dtype != spec.dtype || found.shape != spec.shape {
                let what = format!(
                    "`{}` should be {} {:?} and is {} {:?}",
                    spec.name, spec.dtype, spec.shape, found.dtype, found.shape
                );
                return Err(self.differs(what));
            }
        }
        let there = self.of.result.files().iter().find(|file| file.path == self.file);
        let there = there.map_or(0, |file| file.tensors.len());
        if there != shard.tensors {
            return Err(self.differs(format!("it has {there} tensors, should have {}", shard.tensors)));
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

    fn expert(&mut self, layer: usize, expert: usize) -> Result<(), RepackError> {
        let experts = self.of.source.experts();
        let parts = experts.layout().parts.clone();
        let place = experts.location(layer, expert as u32)?;
        let source = |part: usize| match place {
            ExpertLocation::Run { shard, begin } => (shard, begin + parts[part].start as u64),
            ExpertLocation::Scattered(places) => (places[part].shard as usize, places[part].begin),
        };
        let mut globals = [None; 3];
        for which in 0..MATRICES.len() {
            let module = matrix_name(layer, expert, which);
            let (packed, global) = match self.of.plan.experts.format {
                ExpertFormat::Mxfp4 => ("weight_packed", None),
                ExpertFormat::Nvfp4CompressedTensors => ("weight_packed", Some("weight_global_scale")),
                ExpertFormat::Nvfp4ModelOpt => ("weight", Some("weight_scale_2")),
            };
            let ((shard, begin), len) = (source(2 * which), parts[2 * which].len());
            self.read_both((shard, begin, len), &format!("{module}.{packed}"))?;
            if let Some(at) = first_difference(&self.a, &self.b) {
                return Err(self.differs(format!("byte {at} of the codes of `{module}` is not the source's")));
            }
            self.proof.matrices += 1;
            self.proof.codes += 2 * self.a.len() as u64;
            let codes = std::mem::take(&mut self.a);
            let ((shard, begin), len) = (source(2 * which + 1), parts[2 * which + 1].len());
            self.read_both((shard, begin, len), &format!("{module}.weight_scale"))?;
            if let Some(suffix) = global {
                globals[which] = Some(self.global(&format!("{module}.{suffix}"))?);
            }
            self.scales(&module, &codes, globals[which])?;
            self.a = codes;
        }
        if globals[0] != globals[2] {
            let module = matrix_name(layer, expert, 0);
            return Err(
                self.differs(format!("`{module}` and w3 of the same expert have different matrix scales"))
            );
        }
        if self.of.plan.experts.format == ExpertFormat::Nvfp4ModelOpt {
            for which in 0..MATRICES.len() {
                let name = format!("{}.input_scale", matrix_name(layer, expert, which));
                let bits = self.global(&name)?;
                if bits != 1f32.to_bits() {
                    return Err(self.differs(format!("`{name}` is {}, should be 1", f32::from_bits(bits))));
                }
            }
        }
        Ok(())
    }

    /// Reads bytes of the source into `a`, and a tensor of the result into `b`.
    fn read_both(&mut self, (shard, begin, len): (usize, u64, usize), name: &str) -> Result<(), RepackError> {
        let tensor = self.result_tensor(name)?;
        self.a.resize(len, 0);
        self.source.read(shard, begin, &mut self.a)?;
        self.b.resize(tensor.byte_len() as usize, 0);
        self.result.read(tensor.shard, tensor.begin, &mut self.b)?;
        let _ = self.events.send(tensor.byte_len());
        Ok(())
    }

    /// The bits of an F32 scalar of the result.
    fn global(&mut self, name: &str) -> Result<u32, RepackError> {
        let tensor = self.result_tensor(name)?;
        let mut bytes = [0; 4];
        self.result.read(tensor.shard, tensor.begin, &mut bytes)?;
        let value = f32::from_le_bytes(bytes);
        // Blocks of zeros would hide any other: zero times NaN is no zero.
        if !(value > 0.0 && value.is_normal()) {
            return Err(self.differs(format!(
                "`{name}` is {value:e}, and the scale of a matrix is a normal number above 0"
            )));
        }
        Ok(value.to_bits())
    }

    /// Compares the source's E8M0 scales in `a` with the result's in `b`.
    fn scales(&mut self, module: &str, codes: &[u8], global: Option<u32>) -> Result<(), RepackError> {
        let (blocks, _) = codes.as_chunks::<BLOCK>();
        let counts = match global {
            None => equal_bytes(blocks, &self.a, &self.b),
            Some(bits) => {
                let is_factor = self.of.plan.experts.format == ExpertFormat::Nvfp4ModelOpt;
                let table = || equal_scales(f32::from_bits(bits), is_factor);
                equal_values(blocks, &self.a, &self.b, self.tables.entry(bits).or_insert_with(table))
            }
        };
        match counts {
            Ok((live, zero, other)) => {
                self.proof.live_blocks += live;
                self.proof.zero_blocks += zero;
                self.proof.zero_blocks_with_other_scale += other;
                Ok(())
            }
            Err((block, what)) => {
                let each = self.b.len() / self.a.len();
                let (e, found) = (self.a[block], &self.b[block * each..(block + 1) * each]);
                Err(self.differs(format!("block {block} of `{module}`: e = {e}, scale {found:02x?}: {what}")))
            }
        }
    }

    /// Compares a tensor that is to be the source's.
    fn same_bytes(&mut self, source: &TensorInfo<'_>) -> Result<(), RepackError> {
        let result = self.result_tensor(source.name)?;
        let mut at = 0;
        while at < source.byte_len() {
            let n = (source.byte_len() - at).min(PIECE as u64) as usize;
            self.a.resize(n, 0);
            self.b.resize(n, 0);
            self.source.read(source.shard, source.begin + at, &mut self.a)?;
            self.result.read(result.shard, result.begin + at, &mut self.b)?;
            if let Some(i) = first_difference(&self.a, &self.b) {
                let byte = at + i as u64;
                return Err(self.differs(format!("byte {byte} of `{}` is not the source's", source.name)));
            }
            at += n as u64;
            let _ = self.events.send(n as u64);
        }
        self.proof.dense_tensors += 1;
        self.proof.dense_bytes += source.byte_len();
        Ok(())
    }
}

impl Comparison<'_> {
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
        let mut parts = outputs.iter();
        if !of_all.is_empty()
            && let Some(spec) = parts.next()
        {
            Expected::of(self.result_tensor(&spec.name)?).compare(&mut self.result, &of_all, self.file)?;
        }
        let (Some(codes), Some(scales)) = (parts.next(), parts.next()) else { return Ok(()) };
        let mut codes = Expected::of(self.result_tensor(&codes.name)?);
        let mut scales = Expected::of(self.result_tensor(&scales.name)?);
        let (result, file, events) = (&mut self.result, self.file, self.events);
        let (found, _) = quantizer.encode(&mut self.source, &mut |bytes| {
            let _ = events.send(bytes.len() as u64);
            codes.compare(result, bytes, file)
        })?;
        let _ = self.events.send(found.len() as u64);
        scales.compare(&mut self.result, &found, self.file)?;
        self.proof.quantized_tensors += 1;
        Ok(())
    }
}

/// A tensor of the result, compared from its beginning on.
struct Expected<'a> {
    tensor: TensorInfo<'a>,
    at: u64,
    found: Vec<u8>,
}

impl<'a> Expected<'a> {
    fn of(tensor: TensorInfo<'a>) -> Self {
        Self { tensor, at: 0, found: Vec::new() }
    }

    fn compare(&mut self, result: &mut Reader<'_>, wanted: &[u8], file: &Path) -> Result<(), RepackError> {
        self.found.resize(wanted.len(), 0);
        result.read(self.tensor.shard, self.tensor.begin + self.at, &mut self.found)?;
        if let Some(i) = first_difference(wanted, &self.found) {
            let what = format!(
                "byte {} of `{}` is not what quantizing the source's matrix gives",
                self.at + i as u64,
                self.tensor.name
            );
            return Err(RepackError::Differs { file: file.to_owned(), what });
        }
        self.at += wanted.len() as u64;
        Ok(())
    }
}

/// Live blocks, zero blocks, and those of them with another scale; or the first wrong block and what is wrong.
type Counts = Result<(u64, u64, u64), (usize, &'static str)>;

/// MXFP4 on both sides.
fn equal_bytes(blocks: &[[u8; BLOCK]], source: &[u8], result: &[u8]) -> Counts {
    let (mut live, mut zero) = (0, 0);
    for (block, (codes, (&e, &found))) in blocks.iter().zip(source.iter().zip(result)).enumerate() {
        if e == 255 {
            return Err((block, "NaN"));
        }
        if e != found {
            return Err((block, "not the source's"));
        }
        *(if is_live(codes) { &mut live } else { &mut zero }) += 1;
    }
    Ok((live, zero, 0))
}

/// E8M0 in the source, pairs of E4M3 in the result.
fn equal_values(blocks: &[[u8; BLOCK]], source: &[u8], result: &[u8], table: &[Option<u8>; 256]) -> Counts {
    let (pairs, _) = result.as_chunks::<2>();
    let (mut live, mut zero, mut other) = (0, 0, 0);
    for (block, (codes, (&e, pair))) in blocks.iter().zip(source.iter().zip(pairs)).enumerate() {
        let equal = table[usize::from(e)].is_some_and(|s| *pair == [s; 2]);
        if is_live(codes) {
            if !equal {
                return Err((block, "not the value of the source's"));
            }
            live += 1;
        } else {
            if e == 255 || pair.iter().any(|&s| s & 0x80 != 0 || !E4M3(s).to_f32().is_finite()) {
                return Err((block, "NaN or negative"));
            }
            zero += 1;
            other += u64::from(!equal);
        }
    }
    Ok((live, zero, other))
}

/// Whether a block has a code that is not zero.
fn is_live(codes: &[u8]) -> bool {
    codes.iter().any(|&byte| !E2M1::even(byte).is_zero() || !E2M1::odd(byte).is_zero())
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    Some(a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len())))
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
