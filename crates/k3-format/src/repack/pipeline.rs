//! Several shards in flight, each with a thread that reads and converts and one that hashes and writes.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use crate::read::Buffer;
use crate::shard_error::ShardError;
use crate::writer::{ShardWriter, TensorSpec, Written};
use crate::{Checkpoint, TensorInfo};

use super::dense;
use super::error::{Refusals, RepackError};
use super::existing::Existing;
use super::expert::LayerExperts;
use super::journal::Journal;
use super::parallel::{self, locked};
use super::plan::{DATA_ALIGN, Plan, ShardPlan, metadata};
use super::read::Reader;
use super::report::{Exponents, FileRecord, MatrixRounding, hex};
use super::sink::{Piece, Sink};
use super::target;

/// Buffers of a shard in flight: one being filled, one being written, one between.
const BUFFERS: u64 = 3;
/// The smallest buffer.
const MIN_BUFFER: usize = 4 << 20;
/// Memory of a shard in flight beside its buffers: two of direct transfers, and the header.
const BESIDE: u64 = 16 << 20;

/// Bytes of a buffer: an expert is made in one piece.
fn buffer_bytes(plan: &Plan) -> usize {
    plan.experts.len.max(MIN_BUFFER).next_multiple_of(DATA_ALIGN as usize)
}

/// The most memory that one shard in flight takes.
pub(super) fn bytes_in_flight(plan: &Plan) -> u64 {
    // Block scales of an expert and their marks are kept twice over, in a sixteenth of its size each.
    let scratch = plan.experts.len as u64 / 8;
    BUFFERS * buffer_bytes(plan) as u64 + scratch + BESIDE + dense::bytes_in_flight(plan)
}

/// What happens while shards are made.
pub(super) enum Event {
    /// So many bytes more were written or compared.
    Written(u64),
    /// A shard is complete.
    Complete,
}

/// What all threads share.
pub(super) struct Work<'a> {
    pub(super) source: &'a Checkpoint,
    pub(super) plan: &'a Plan,
    pub(super) dir: &'a Path,
    pub(super) direct: bool,
    pub(super) journal: Mutex<Journal>,
}

/// What was seen while a shard was made.
struct Made {
    exponents: Option<Exponents>,
    rounding: Vec<MatrixRounding>,
}

/// A shard that is there and of which nothing can be trusted, by its position in the plan, and what an earlier run noted
/// of it.
pub(super) struct Candidate {
    pub(super) shard: usize,
    pub(super) record: Option<FileRecord>,
}

/// What became of a [`Candidate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is what the source gives, byte for byte, and is noted now.
    Right,
    /// It is not.
    Wrong,
    /// It is not, and neither was it when it was noted: the source has changed.
    OtherSource,
}

/// Where the bytes of a shard go.
enum Output {
    /// Into a new file.
    New(ShardWriter),
    /// Nowhere: they are compared with a file.
    There(Existing),
}

impl Output {
    fn put(&mut self, bytes: &[u8]) -> Result<(), RepackError> {
        match self {
            Self::New(writer) => writer.write_run(bytes)?,
            Self::There(file) => file.put(bytes),
        }
        Ok(())
    }

    /// What the shard is, and whether the file has it.
    fn finish(self) -> Result<(Written, bool), RepackError> {
        match self {
            Self::New(writer) => Ok((writer.finish_hashed()?, true)),
            Self::There(file) => Ok(file.finish()),
        }
    }
}

impl Work<'_> {
    /// Makes the shards at the positions `todo` of the plan, `jobs` at a time. A shard that is refused does not stop
    /// the others; any other trouble does.
    pub(super) fn run(
        &self,
        todo: &[usize],
        jobs: usize,
        report: &mut dyn FnMut(Event),
    ) -> Result<Vec<FileRecord>, RepackError> {
        let threads = dense::threads(jobs.min(todo.len()));
        let made = parallel::each(todo, jobs, report, |shard, stop, events| {
            match self.shard(&self.plan.shards[shard], threads, stop, events) {
                Err(RepackError::Refused(refusals)) => Ok(Err(refusals)),
                made => made.map(Ok),
            }
        })?;
        let (mut done, mut refusals) = (Vec::new(), Refusals::default());
        for made in made {
            match made {
                Ok(record) => done.push(record),
                Err(refused) => refusals.extend(refused),
            }
        }
        if refusals.total == 0 {
            return Ok(done);
        }
        let exponents = done.into_iter().filter_map(|record| record.exponents).collect();
        refusals.extend(Refusals { exponents, ..Refusals::default() });
        Err(refusals.into())
    }

    /// Compares shards that are there with what the source gives, `jobs` at a time.
    pub(super) fn compare(
        &self,
        candidates: &[Candidate],
        jobs: usize,
        report: &mut dyn FnMut(Event),
    ) -> Result<Vec<Verdict>, RepackError> {
        let candidates: Vec<&Candidate> = candidates.iter().collect();
        let threads = dense::threads(jobs.min(candidates.len()));
        parallel::each(&candidates, jobs, report, |candidate, stop, events| {
            self.candidate(candidate, threads, stop, events)
        })
    }

    fn candidate(
        &self,
        candidate: &Candidate,
        threads: usize,
        stop: &AtomicBool,
        events: &Sender<Event>,
    ) -> Result<Verdict, RepackError> {
        let shard = &self.plan.shards[candidate.shard];
        let path = self.dir.join(&shard.name);
        let mut there = Existing::open(&path, self.direct)?;
        there.put(&self.plan.header(&path, shard)?);
        let noted = candidate.record.as_ref();
        let (record, is_same) = match self.stream(shard, Output::There(there), threads, stop, events) {
            // Whoever noted the shard had a source from which it could be made.
            Err(RepackError::Refused(_)) => {
                return Ok(if noted.is_some() { Verdict::OtherSource } else { Verdict::Wrong });
            }
            found => found?,
        };
        if is_same {
            if noted != Some(&record) {
                locked(&self.journal).complete(record)?;
            }
            return Ok(Verdict::Right);
        }
        let is_noted = noted.is_none_or(|noted| noted.blake3 == record.blake3);
        Ok(if is_noted { Verdict::Wrong } else { Verdict::OtherSource })
    }

    /// Makes one shard, from its partial file to its line in the journal.
    fn shard(
        &self,
        shard: &ShardPlan,
        threads: usize,
        stop: &AtomicBool,
        events: &Sender<Event>,
    ) -> Result<FileRecord, RepackError> {
        let path = self.dir.join(&shard.name);
        let specs: Vec<TensorSpec> = self.plan.specs(shard).collect();
        let writer = ShardWriter::create_hashed(&path, DATA_ALIGN, &specs, Some(&metadata()), self.direct)?;
        drop(specs);
        let made = self.stream(shard, Output::New(writer), threads, stop, events);
        if matches!(made, Err(RepackError::Refused(_))) {
            // Nobody goes on with it, and it may be large. Who holds the lock of the journal is the only one who has it.
            target::remove_leftovers(self.dir, std::slice::from_ref(shard))?;
        }
        let (record, _) = made?;
        locked(&self.journal).complete(record.clone())?;
        let _ = events.send(Event::Complete);
        Ok(record)
    }

    /// Makes the bytes of a shard's data and hands them to `output`, with a thread for each. Says what the shard is, and
    /// whether the file has it.
    fn stream(
        &self,
        shard: &ShardPlan,
        output: Output,
        threads: usize,
        stop: &AtomicBool,
        events: &Sender<Event>,
    ) -> Result<(FileRecord, bool), RepackError> {
        let path = self.dir.join(&shard.name);
        let mut reader = Reader::new(self.source.shards(), self.direct)?;
        let capacity = buffer_bytes(self.plan);
        let (full, to_write) = mpsc::sync_channel(BUFFERS as usize);
        let (used, empty) = mpsc::channel();
        for _ in 0..BUFFERS {
            let buffer = Buffer::zeroed(capacity)
                .map_err(|e| ShardError::no_memory(&path, "a buffer", capacity as u64, e))?;
            // The other end is in this function.
            let _ = used.send(buffer);
        }
        let (made, (written, is_there)) = std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(output, to_write, used, events));
            let made = self.make(shard, threads, &mut reader, Sink::new(full, empty, capacity), stop);
            let written = writing.join().unwrap_or(Err(RepackError::WriterEnded));
            match (made, written) {
                (Ok(made), Ok(Some(written))) => Ok((made, written)),
                // Without a writer nothing is made; its own error tells why.
                (Err(RepackError::WriterEnded) | Ok(_), Err(error)) | (Err(error), _) => Err(error),
                (Ok(_), Ok(None)) => Err(RepackError::WriterEnded),
            }
        })?;
        let record = FileRecord {
            name: shard.name.clone(),
            len: written.len,
            blake3: hex(&written.hash),
            exponents: made.exponents,
            rounding: made.rounding,
        };
        Ok((record, is_there))
    }

    /// Makes the bytes of a shard, in file order.
    fn make(
        &self,
        shard: &ShardPlan,
        threads: usize,
        reader: &mut Reader<'_>,
        mut sink: Sink,
        stop: &AtomicBool,
    ) -> Result<Made, RepackError> {
        let go_on = || if stop.load(Ordering::Relaxed) { Err(RepackError::WriterEnded) } else { Ok(()) };
        let mut experts = None;
        if let Some(layer) = shard.layer.filter(|_| shard.has_experts) {
            let mut layer = LayerExperts::new(self.source, self.plan, layer);
            for expert in 0..self.plan.experts_per_layer {
                go_on()?;
                sink.fill(self.plan.experts.len, |run| layer.convert(expert, reader, run))?;
                if layer.refusals.total > 0 {
                    // The rest is only looked at, so that all refusals are known at once.
                    sink.discard();
                }
            }
            experts = Some(layer);
        }
        if let Some(layer) = &mut experts
            && layer.refusals.total > 0
        {
            let mut refusals = std::mem::take(&mut layer.refusals);
            refusals.exponents.push(std::mem::take(&mut layer.exponents));
            return Err(refusals.into());
        }
        let mut rounding = Vec::new();
        for tensor in &shard.dense {
            go_on()?;
            let format = tensor.format.linear(self.plan.recipe.names);
            let error = dense::stream(&self.tensor(&tensor.source)?, format, threads, reader, &mut sink)?;
            rounding.extend(error.map(|error| MatrixRounding::new(&tensor.source, &error)));
        }
        if let Some(layer) = &experts {
            sink.write(&layer.beside(self.plan.recipe.names))?;
        }
        sink.finish()?;
        Ok(Made { exponents: experts.map(|layer| layer.exponents), rounding })
    }

    fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, RepackError> {
        self.source.shards().get(name).ok_or_else(|| RepackError::NoTensor { name: name.to_owned() })
    }
}

/// Hands on what comes; `None` if it ends before the shard is whole.
#[allow(
    clippy::needless_pass_by_value,
    reason = "when this ends its channels must, or the other end would wait"
)]
fn write(
    mut output: Output,
    pieces: Receiver<Piece>,
    used: Sender<Buffer>,
    events: &Sender<Event>,
) -> Result<Option<(Written, bool)>, RepackError> {
    for piece in pieces {
        match piece {
            Piece::Bytes { mut buffer, len } => {
                output.put(&buffer.as_mut()[..len])?;
                let _ = events.send(Event::Written(len as u64));
                // Who makes the bytes may be through already.
                let _ = used.send(buffer);
            }
            Piece::End => return Ok(Some(output.finish()?)),
        }
    }
    Ok(None)
}
