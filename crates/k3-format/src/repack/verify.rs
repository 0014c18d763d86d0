//! Verifying a result from its files: their hashes, and what they hold beside what the source does.

use std::sync::mpsc::Sender;

use serde::Serialize;

use crate::Checkpoint;
use crate::read::Buffer;
use crate::shard_error::ShardError;
use crate::shards::Shards;

use super::compare::Comparison;
use super::dense;
use super::differences::ShardDifferences;
use super::error::RepackError;
use super::parallel;
use super::plan::{Plan, ShardPlan};
use super::read::Reader;
use super::report::FileRecord;

/// What a verification compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
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

/// Bytes of one read.
pub(super) const PIECE: usize = 8 << 20;

/// What is verified.
pub(super) struct Verification<'a> {
    pub(super) source: &'a Checkpoint,
    pub(super) result: &'a Shards,
    pub(super) plan: &'a Plan,
    /// What the report of the tree says of its shards.
    pub(super) records: &'a [FileRecord],
    pub(super) direct: bool,
}

/// The most memory that verifying one shard takes.
pub(super) fn bytes_in_flight(plan: &Plan) -> u64 {
    2 * (plan.experts.len as u64 + 2 * PIECE as u64) + dense::bytes_in_flight(plan)
}

/// What was proved, and the shards of which the contrary was.
type Verified = (Proof, Vec<ShardDifferences>);

impl Verification<'_> {
    /// Compares the shards at the positions `which` of the plan with the source, and their hashes with those that they
    /// were written with, `jobs` shards at a time; `report` hears of bytes of the result that were compared.
    pub(super) fn compare(
        &self,
        which: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(u64),
    ) -> Result<Verified, RepackError> {
        let threads = dense::threads(jobs.min(which.len()));
        self.each(which, jobs, report, |shard, differences, events| {
            let Some(mut file) = self.file(shard, differences)? else { return Ok(Proof::default()) };
            let mut comparison = Comparison::new(self, &mut file, threads, differences, events)?;
            comparison.shard(shard)?;
            let mut proof = comparison.proof;
            proof.shards_hashed = self.hash_rest(shard, file, differences, &mut |_| {})?;
            Ok(proof)
        })
    }

    /// Compares the hashes of whole files with those that they were written with.
    pub(super) fn hash(
        &self,
        which: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(u64),
    ) -> Result<Verified, RepackError> {
        self.each(which, jobs, report, |shard, differences, events| {
            let Some(file) = self.file(shard, differences)? else { return Ok(Proof::default()) };
            let shards_hashed = self.hash_rest(shard, file, differences, &mut |bytes| {
                let _ = events.send(bytes);
            })?;
            Ok(Proof { shards_hashed, ..Proof::default() })
        })
    }

    fn each(
        &self,
        which: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(u64),
        work: impl Fn(&ShardPlan, &mut ShardDifferences, &Sender<u64>) -> Result<Proof, RepackError> + Sync,
    ) -> Result<Verified, RepackError> {
        let found = parallel::each(which, jobs, report, |shard, _, events| {
            let shard = &self.plan.shards[shard];
            let mut differences = ShardDifferences::new(&shard.name);
            work(shard, &mut differences, events).map(|proof| (proof, differences))
        })?;
        let mut sum = Proof { from_disk: self.direct, ..Proof::default() };
        found.iter().for_each(|(proof, _)| sum.add(proof));
        let differences = found.into_iter().map(|(_, differences)| differences);
        Ok((sum, differences.filter(|shard| shard.total > 0).collect()))
    }

    /// The file of a shard.
    fn file(
        &self,
        shard: &ShardPlan,
        differences: &mut ShardDifferences,
    ) -> Result<Option<HashedFile<'_>>, RepackError> {
        let at = self.result.files().iter().position(|file| file.name == shard.name);
        if at.is_none() {
            differences.note(|| "the index does not name it".to_owned());
        }
        Ok(at.map(|at| HashedFile::new(self.result, at, self.direct)).transpose()?)
    }

    /// Reads what of a shard was not hashed yet, and compares the hash; 1 if it is right.
    fn hash_rest(
        &self,
        shard: &ShardPlan,
        mut file: HashedFile<'_>,
        differences: &mut ShardDifferences,
        report: &mut dyn FnMut(u64),
    ) -> Result<usize, RepackError> {
        let len = file.len;
        file.hash_to(len, report)?;
        let hash = file.hasher.finalize().to_hex();
        let noted = self.records.iter().find(|record| record.name == shard.name);
        let noted = noted.map(|record| (record.len, record.blake3.as_str()));
        if noted == Some((len, hash.as_str())) {
            return Ok(1);
        }
        // Whatever differs makes the hash differ.
        if differences.total == 0 {
            let (noted_len, noted) = noted.unwrap_or((0, "none"));
            differences.note(|| {
                format!(
                    "it has {len} bytes and BLAKE3 {hash}; repack.json says that it was written with {noted_len} bytes and \
                     BLAKE3 {noted}"
                )
            });
        }
        Ok(0)
    }
}

/// A shard that is hashed as it is read: what is read in file order is read once.
pub(super) struct HashedFile<'a> {
    reader: Reader<'a>,
    pub(super) shard: usize,
    pub(super) len: u64,
    pub(super) data_start: u64,
    /// Bytes that were hashed.
    at: u64,
    hasher: blake3::Hasher,
    piece: Buffer,
}

impl<'a> HashedFile<'a> {
    fn new(shards: &'a Shards, shard: usize, direct: bool) -> Result<Self, ShardError> {
        let file = &shards.files()[shard];
        let piece = Buffer::zeroed(PIECE)
            .map_err(|e| ShardError::no_memory(&file.path, "a read buffer", PIECE as u64, e))?;
        let reader = Reader::new(shards, direct)?;
        let (len, data_start) = (file.len, file.data_start);
        Ok(Self { reader, shard, len, data_start, at: 0, hasher: blake3::Hasher::new(), piece })
    }

    /// Fills `buf` from offset `begin` on.
    pub(super) fn read(&mut self, begin: u64, buf: &mut [u8]) -> Result<(), ShardError> {
        self.reader.read(self.shard, begin, buf)?;
        if begin == self.at {
            self.hasher.update(buf);
            self.at += buf.len() as u64;
        }
        Ok(())
    }

    /// Hashes what comes before offset `end`; `report` hears of the bytes.
    pub(super) fn hash_to(&mut self, end: u64, report: &mut dyn FnMut(u64)) -> Result<(), ShardError> {
        while self.at < end {
            let n = (end - self.at).min(PIECE as u64);
            let piece = &mut self.piece.as_mut()[..n as usize];
            self.reader.read(self.shard, self.at, piece)?;
            self.hasher.update(piece);
            self.at += n;
            report(n);
        }
        Ok(())
    }
}
