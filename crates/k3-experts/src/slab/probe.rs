//! How fast a checkpoint's drives give whole experts, measured in about a second.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use k3_format::Checkpoint;

use super::drives::STACK_BYTES;
use super::place::{Place, Places};
use super::pool::aligned;
use super::reader::{Reader, SlotReadError, count, drives_of, read_full};
use super::ticket::Key;
use crate::{ExpertError, ExpertId};

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct ProbeOptions {
    /// Reads in flight on each drive.
    pub reads_in_flight: usize,
    /// No read begins later than this.
    pub time: Duration,
    /// No read of a drive begins after so many bytes of it.
    pub most_bytes: u64,
    /// Which experts: the same number gives the same ones, which drives may have cached.
    pub seed: u64,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { reads_in_flight: 6, time: Duration::from_millis(250), most_bytes: 4 << 30, seed: 0 }
    }
}

/// What a drive gave.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriveRate {
    /// Bytes read.
    pub bytes: u64,
    /// From the first read to the end of the last.
    pub seconds: f64,
}

impl DriveRate {
    /// Bytes a second; 0 of a drive without experts.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds } else { 0.0 }
    }
}

/// Experts of one drive that are measured at most.
const MOST_READS: usize = 1024;

/// Reads whole experts at random places of all drives at once, with as many reads in flight as a store has, and none of
/// them twice. Of what is read, the page cache is emptied before, as far as the system allows it, and after.
///
/// # Errors
/// [`ExpertError`] for an expert that cannot be read.
pub fn probe(
    checkpoint: &Checkpoint,
    reader: &dyn Reader,
    options: ProbeOptions,
) -> Result<Vec<DriveRate>, ExpertError> {
    let places = Places::new(checkpoint, reader.alignment());
    let drives = sample(checkpoint, reader, &places, options.seed)?;
    let flying = options.reads_in_flight.max(1);
    // Their memory is touched before the clock starts.
    let no_memory = |key: &Key| key.unreadable(SlotReadError::NoMemory { bytes: places.slot_bytes() });
    let mut buffers = Vec::new();
    for drive in drives.iter().filter(|drive| !drive.reads.is_empty()) {
        for _ in 0..flying {
            let buffer = aligned(places.slot_bytes(), reader.alignment().max(1));
            buffers.push((drive, buffer.ok_or_else(|| no_memory(&drive.reads[0].0))?));
        }
    }
    let begin = Instant::now();
    let failed = AtomicBool::new(false);
    let work = |drive: &Drive, buffer: &mut [u8]| -> Result<(), ExpertError> {
        loop {
            let bytes = drive.bytes.load(Relaxed);
            // Each drive gives at least one.
            let enough = bytes > 0 && (bytes >= options.most_bytes || begin.elapsed() >= options.time);
            if enough || failed.load(Relaxed) {
                return Ok(());
            }
            let Some((key, place)) = drive.reads.get(drive.next.fetch_add(1, Relaxed)) else { return Ok(()) };
            let fail = |error: SlotReadError| {
                failed.store(true, Relaxed);
                key.unreadable(error)
            };
            forget(reader, place);
            let mut at = 0;
            for segment in &place.segments {
                let slot = &mut buffer[at..at + segment.len];
                read_full(reader, segment.shard, slot, segment.offset, segment.needed).map_err(fail)?;
                at += segment.len;
            }
            drive.bytes.fetch_add(at as u64, Relaxed);
            drive.nanos.fetch_max(begin.elapsed().as_nanos() as u64, Relaxed);
        }
    };
    let results = thread::scope(|scope| {
        let (work, failed) = (&work, &failed);
        let mut threads = Vec::new();
        for (drive, buffer) in &mut buffers {
            let spawned = thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || work(drive, &mut buffer[..]));
            threads.push(spawned.map_err(|source| {
                failed.store(true, Relaxed);
                ExpertError::Stopped { source: Box::new(source) }
            }));
        }
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>, ExpertError>| {
            thread?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect::<Vec<Result<(), ExpertError>>>()
    });
    for drive in &drives {
        drive.reads.iter().take(drive.next.load(Relaxed)).for_each(|(_, place)| forget(reader, place));
    }
    results.into_iter().collect::<Result<(), _>>()?;
    let rate = |drive: &Drive| DriveRate {
        bytes: drive.bytes.load(Relaxed),
        seconds: Duration::from_nanos(drive.nanos.load(Relaxed)).as_secs_f64(),
    };
    Ok(drives.iter().map(rate).collect())
}

/// What is read of a drive, and how far that is.
#[derive(Default)]
struct Drive {
    reads: Vec<(Key, Place)>,
    next: AtomicUsize,
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// Random experts of each drive.
fn sample(
    checkpoint: &Checkpoint,
    reader: &dyn Reader,
    places: &Places,
    seed: u64,
) -> Result<Vec<Drive>, ExpertError> {
    let config = checkpoint.config();
    let (first, experts) = (config.first_k_dense_replace, config.moe.num_experts);
    let mut keys: Vec<u32> = (0..checkpoint.experts().len() as u32).collect();
    let of_shard = drives_of(checkpoint, reader);
    let mut drives: Vec<Drive> = (0..count(&of_shard)).map(|_| Drive::default()).collect();
    let mut random = seed;
    for at in 0..keys.len() {
        if drives.iter().all(|drive| drive.reads.len() == MOST_READS) {
            break;
        }
        random = mixed(random);
        let rest = keys.len() - at;
        keys.swap(at, at + (random % rest as u64) as usize);
        let expert = keys[at] as usize;
        let key = Key { layer: first + expert / experts, id: (expert % experts) as ExpertId };
        let place = places.of(checkpoint, key)?;
        let drive = &mut drives[place.segments.first().map_or(0, |segment| of_shard[segment.shard])];
        if drive.reads.len() < MOST_READS {
            drive.reads.push((key, place));
        }
    }
    Ok(drives)
}

fn forget(reader: &dyn Reader, place: &Place) {
    place.segments.iter().for_each(|segment| reader.forget(segment.shard, segment.offset, segment.len));
}

/// `SplitMix64`
fn mixed(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
