//! Several shards in flight, each with a thread that reads and converts and one that hashes and writes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

use crate::read::Buffer;
use crate::shard_error::ShardError;
use crate::writer::{ShardWriter, TensorSpec, Written};
use crate::{Checkpoint, TensorInfo};

use super::dense;
use super::error::{Refusals, RepackError};
use super::expert::LayerExperts;
use super::journal::Journal;
use super::plan::{DATA_ALIGN, Plan, ShardPlan};
use super::read::Reader;
use super::report::{FileRecord, LayerExponents, MatrixRounding, hex};
use super::sink::{Piece, Sink};

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
    /// So many bytes more were written.
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
    exponents: Option<LayerExponents>,
    rounding: Vec<MatrixRounding>,
}

/// Everything that went wrong, of which a run reports the first that is not a refusal.
#[derive(Default)]
struct Trouble {
    refusals: Refusals,
    error: Option<RepackError>,
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
        let (events, heard) = mpsc::channel();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let trouble = Mutex::new(Trouble::default());
        let done = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let jobs = jobs.min(todo.len());
            let threads = dense::threads(jobs);
            for _ in 0..jobs {
                let events = events.clone();
                let (next, stop, trouble, done) = (&next, &stop, &trouble, &done);
                scope.spawn(move || {
                    while let Some(&shard) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        match self.shard(&self.plan.shards[shard], threads, stop, &events) {
                            Ok(record) => locked(done).push(record),
                            Err(RepackError::Refused(refusals)) => locked(trouble).refusals.extend(refusals),
                            Err(error) => {
                                stop.store(true, Ordering::Relaxed);
                                let mut trouble = locked(trouble);
                                // Shards that were stopped say so only.
                                if trouble.error.is_none()
                                    || matches!(trouble.error, Some(RepackError::WriterEnded))
                                {
                                    trouble.error = Some(error);
                                }
                                return;
                            }
                        }
                    }
                });
            }
            drop(events);
            heard.into_iter().for_each(report);
        });
        let trouble = trouble.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = trouble.error {
            return Err(error);
        }
        if trouble.refusals.total > 0 {
            return Err(trouble.refusals.into());
        }
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(done)
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
        // Loaders of PyTorch models ask for it.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let writer = ShardWriter::create_hashed(&path, DATA_ALIGN, &specs, Some(&metadata), self.direct)?;
        drop(specs);
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
        let (made, written) = std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(writer, to_write, used, events));
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
        locked(&self.journal).complete(record.clone())?;
        let _ = events.send(Event::Complete);
        Ok(record)
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
            return Err(std::mem::take(&mut layer.refusals).into());
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

/// Writes what comes; `None` if it ends before the shard is whole.
#[allow(
    clippy::needless_pass_by_value,
    reason = "when this ends its channels must, or the other end would wait"
)]
fn write(
    mut writer: ShardWriter,
    pieces: Receiver<Piece>,
    used: Sender<Buffer>,
    events: &Sender<Event>,
) -> Result<Option<Written>, RepackError> {
    for piece in pieces {
        match piece {
            Piece::Bytes { mut buffer, len } => {
                writer.write_run(&buffer.as_mut()[..len])?;
                let _ = events.send(Event::Written(len as u64));
                // Who makes the bytes may be through already.
                let _ = used.send(buffer);
            }
            Piece::End => return Ok(Some(writer.finish_hashed()?)),
        }
    }
    Ok(None)
}

/// No thread panics while it holds one of these locks; what they guard is whole at any moment.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
