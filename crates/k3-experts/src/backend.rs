//! Which store a run gets: chosen from the memory plan and a short measurement of the user's own files.

use std::fmt;
use std::sync::Arc;

use k3_format::Checkpoint;

use crate::memory::Bound;
use crate::plan::{MemoryPlan, gigabytes};
use crate::slab::{
    Buffered, Direct, DriveRate, ProbeOptions, Reader, SlabError, SlabOptions, drive_count, probe,
};
use crate::{ExpertError, ExpertStore, MappedStore, SlabStore};

/// How routed experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Mapped files: the page cache decides what stays.
    Mapped,
    /// Past the page cache, into slots of our own.
    Direct,
    /// Through the page cache, into slots of our own.
    Buffered,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapped => "mapped",
            Self::Direct => "direct",
            Self::Buffered => "buffered",
        })
    }
}

/// How to open a store.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreOptions {
    /// `None` chooses.
    pub backend: Option<Backend>,
    /// How experts are kept and read; the budget is the plan's.
    pub slab: SlabOptions,
    /// How to measure, each of direct and buffered reads twice; as many are in flight as `slab` says and the plan has
    /// room for.
    pub probe: ProbeOptions,
}

/// A store, and why it is this one.
pub struct OpenedStore {
    /// The store.
    pub store: Arc<dyn ExpertStore>,
    /// The same, if it has slots.
    pub slab: Option<Arc<SlabStore>>,
    /// How it reads.
    pub backend: Backend,
    /// In one line.
    pub description: String,
    /// Bytes of experts that were read to choose it.
    pub probed_bytes: u64,
}

impl fmt::Debug for OpenedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedStore").field("description", &self.description).finish_non_exhaustive()
    }
}

/// Why no store was opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The slots, or the files to fill them from.
    #[error(transparent)]
    Slab(#[from] SlabError),
    /// An expert that was read to measure.
    #[error("measuring how fast experts are read")]
    Probe(#[source] ExpertError),
}

/// What two ways to read gave.
#[derive(Clone, Debug)]
struct Measured {
    /// Each drive; what was in the way if it is none.
    direct: Result<Vec<DriveRate>, String>,
    buffered: Vec<DriveRate>,
}

/// Bytes a second of drives together.
fn total(rates: &[DriveRate]) -> f64 {
    rates.iter().map(DriveRate::rate).sum()
}

/// Buffered reads fill the page cache with what the slots hold already, and cost ten times the processor: they have to
/// be faster by this much.
const WORTH_BUFFERING: f64 = 1.15;

/// Whether files can be left to the page cache without measuring, and why: all of them fit in a quarter of the memory,
/// or all experts fit in what the plan leaves them. A limit on the address space rules mapping out, and so does a budget
/// that was asked for: the page cache would not keep to it.
fn mapped_at_once(plan: &MemoryPlan, file_bytes: u64, expert_bytes: u64) -> Option<String> {
    if plan.asked || plan.bound_by == Bound::AddressSpace {
        return None;
    }
    if file_bytes <= plan.room / 4 {
        return Some(format!("the checkpoint, {}, fits in a quarter of memory", gigabytes(file_bytes)));
    }
    let fits = expert_bytes <= plan.left();
    fits.then(|| {
        format!("all experts, {}, fit in the {} left", gigabytes(expert_bytes), gigabytes(plan.left()))
    })
}

impl Measured {
    fn choose(&self) -> Backend {
        match &self.direct {
            Ok(direct) if total(&self.buffered) < WORTH_BUFFERING * total(direct) => Backend::Direct,
            _ => Backend::Buffered,
        }
    }

    /// Rates of the drives in the way that was chosen.
    fn rates(&self) -> Vec<f64> {
        let rates = match (self.choose(), &self.direct) {
            (Backend::Direct, Ok(direct)) => direct,
            _ => &self.buffered,
        };
        rates.iter().map(DriveRate::rate).collect()
    }

    fn bytes(&self) -> u64 {
        let direct = self.direct.iter().flatten();
        direct.chain(&self.buffered).map(|drive| drive.bytes).sum()
    }
}

/// Opens the store that the options ask for, or the one that suits best. Touches no expert unless it has to measure.
///
/// # Errors
/// [`StoreError`].
pub fn open_store(
    checkpoint: &Arc<Checkpoint>,
    plan: &MemoryPlan,
    options: StoreOptions,
) -> Result<OpenedStore, StoreError> {
    options.slab.check()?;
    let files = checkpoint.shards().files().iter().map(|file| file.len).sum();
    let at_once = mapped_at_once(plan, files, checkpoint.experts().size_bytes());
    let (backend, measured) = match (options.backend, &at_once) {
        (Some(backend), _) => (backend, None),
        (None, Some(_)) => (Backend::Mapped, None),
        (None, None) => {
            let measured = measure(checkpoint, plan, &options)?;
            (measured.choose(), Some(measured))
        }
    };
    if backend == Backend::Mapped {
        let why = at_once.filter(|_| options.backend.is_none()).unwrap_or_else(|| "as asked".to_owned());
        return Ok(OpenedStore {
            store: Arc::new(MappedStore::new(checkpoint.clone())),
            slab: None,
            backend,
            description: format!("mapped: {why}"),
            probed_bytes: 0,
        });
    }
    let reader: Arc<dyn Reader> = match backend {
        Backend::Direct => Arc::new(Direct::new(checkpoint.clone())?),
        _ => Arc::new(Buffered::new(checkpoint.clone())?),
    };
    let rates = measured.as_ref().map(Measured::rates).unwrap_or_default();
    let slab = SlabOptions { budget_bytes: plan.experts, ..options.slab };
    let store = Arc::new(SlabStore::with_rates(checkpoint.clone(), &reader, slab, &rates)?);
    let how = measured.as_ref().map_or_else(
        || format!("{backend}, as asked"),
        |measured| describe(backend, measured, store.reads_in_flight()),
    );
    Ok(OpenedStore {
        description: format!(
            "{how}; {} = {}",
            gigabytes(plan.experts),
            plan.describe_slots(store.slots() as u64)
        ),
        store: store.clone(),
        slab: Some(store),
        backend,
        probed_bytes: measured.map_or(0, |measured| measured.bytes()),
    })
}

/// Reads experts in both ways, in turn and each time others, in no more memory than the plan has for them.
fn measure(
    checkpoint: &Arc<Checkpoint>,
    plan: &MemoryPlan,
    options: &StoreOptions,
) -> Result<Measured, StoreError> {
    let buffered = Buffered::new(checkpoint.clone())?;
    let reads_in_flight = in_flight(plan, drive_count(checkpoint)?, options.slab.reads_in_flight);
    let direct = Direct::new(checkpoint.clone()).map_err(|error| reason(&error));
    let probe_of = |reader: &dyn Reader, turn: u64| {
        // The seeds of one run and the next are far apart.
        let seed = options.probe.seed.wrapping_mul(16).wrapping_add(turn);
        probe(checkpoint, reader, ProbeOptions { reads_in_flight, seed, ..options.probe })
    };
    let mut found =
        Measured { direct: direct.as_ref().map(|_| Vec::new()).map_err(Clone::clone), buffered: Vec::new() };
    for turn in 0..2 {
        if let (Ok(reader), Ok(rates)) = (&direct, &mut found.direct) {
            add(rates, probe_of(reader, 2 * turn).map_err(StoreError::Probe)?);
        }
        add(&mut found.buffered, probe_of(&buffered, 2 * turn + 1).map_err(StoreError::Probe)?);
    }
    Ok(found)
}

/// Reads in flight on each of some drives: as many as asked for, if the budget has buffers for them.
fn in_flight(plan: &MemoryPlan, drives: usize, asked: usize) -> usize {
    let buffers = usize::try_from(plan.buffers()).unwrap_or(usize::MAX);
    asked.min(buffers / drives.max(1)).max(1)
}

fn add(all: &mut Vec<DriveRate>, more: Vec<DriveRate>) {
    if all.is_empty() {
        *all = more;
        return;
    }
    for (drive, more) in all.iter_mut().zip(more) {
        drive.bytes += more.bytes;
        drive.seconds += more.seconds;
    }
}

/// An error and its causes in one line.
fn reason(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn describe(backend: Backend, measured: &Measured, in_flight: &[usize]) -> String {
    let list = |items: Vec<String>| items.join(" + ");
    let rates = measured.rates();
    let rate: f64 = rates.iter().sum();
    let drives = if rates.len() > 1 {
        let each = list(rates.iter().map(|rate| format!("{:.2}", rate / 1e9)).collect());
        format!(" from {} drives ({each})", rates.len())
    } else {
        String::new()
    };
    let in_flight = list(in_flight.iter().map(usize::to_string).collect());
    let other = match (backend, &measured.direct) {
        (Backend::Direct, _) => format!("buffered {:.2}", total(&measured.buffered) / 1e9),
        (_, Ok(direct)) => format!("direct {:.2}", total(direct) / 1e9),
        (_, Err(reason)) => format!("direct reads are not possible: {reason}"),
    };
    let bytes = gigabytes(measured.bytes());
    format!(
        "{backend}, {:.2} GB/s{drives} at {in_flight} in flight ({other}; measured with {bytes})",
        rate / 1e9
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Limit, Machine};
    use crate::plan::{ExpertSizes, Needs};
    use crate::trace::RELEASED;

    const GB: u64 = 1_000_000_000;

    fn rates(each: &[f64]) -> Vec<DriveRate> {
        each.iter().map(|rate| DriveRate { bytes: (rate * 1e9) as u64, seconds: 1.0 }).collect()
    }

    #[test]
    fn the_faster_way_is_taken_and_direct_if_they_are_alike() {
        let check = |direct: Result<&[f64], &str>, buffered: &[f64], expected: Backend, words: &str| {
            let direct = direct.map(rates).map_err(str::to_owned);
            let measured = Measured { direct, buffered: rates(buffered) };
            assert_eq!(measured.choose(), expected, "{measured:?}");
            let description = describe(expected, &measured, &[9, 3][..buffered.len()]);
            assert!(description.contains(words), "{words:?} in {description}");
        };
        check(
            Ok(&[7.1]),
            &[3.0],
            Backend::Direct,
            "direct, 7.10 GB/s at 9 in flight (buffered 3.00; measured",
        );
        check(Ok(&[1.0]), &[1.1], Backend::Direct, "buffered 1.10");
        check(Ok(&[1.0]), &[1.5], Backend::Buffered, "buffered, 1.50 GB/s at 9 in flight (direct 1.00");
        check(
            Err("no such reads"),
            &[0.5],
            Backend::Buffered,
            "direct reads are not possible: no such reads",
        );
        let two = "direct, 4.00 GB/s from 2 drives (3.00 + 1.00) at 9 + 3 in flight";
        check(Ok(&[3.0, 1.0]), &[1.0, 1.0], Backend::Direct, two);
    }

    #[test]
    fn measuring_takes_no_more_memory_than_the_experts_get() {
        let sizes = ExpertSizes { geometry: RELEASED, slot_bytes: 17_563_648, moving: 14 };
        let check = |budget: u64, drives: usize, asked: usize, expected: usize| {
            let plan = MemoryPlan::new(&Machine::with(64 * GB), Needs::default(), sizes, Some(budget));
            assert_eq!(in_flight(&plan, drives, asked), expected, "{budget} {drives} {asked}");
        };
        check(8 * GB, 1, 6, 6);
        check(8 * GB, 2, 256, 227);
        check(sizes.least(), 1, 256, 16);
        check(sizes.least(), 4, 6, 4);
        check(0, 3, 6, 1);
    }

    #[test]
    fn what_fits_is_mapped() {
        let check = |room: u64, files: u64, experts: u64, expected: Option<&str>| {
            let needs = Needs { pinned: 10 * GB, ..Needs::default() };
            let sizes = ExpertSizes { geometry: RELEASED, slot_bytes: 17_563_648, moving: 14 };
            let asked = MemoryPlan::new(&Machine::with(room * GB), needs, sizes, Some(experts * GB));
            assert_eq!(mapped_at_once(&asked, files * GB, experts * GB), None, "a budget is a limit");
            let plan = MemoryPlan::new(&Machine::with(room * GB), needs, sizes, None);
            let mut narrow = Machine::with(room * GB);
            narrow.limits.push(Limit { bound: Bound::AddressSpace, bytes: room * GB - 1, used: 0 });
            let narrow = MemoryPlan::new(&narrow, needs, sizes, None);
            assert_eq!(mapped_at_once(&narrow, files * GB, experts * GB), None, "mappings count");
            let found = mapped_at_once(&plan, files * GB, experts * GB);
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            assert!(found.zip(expected).is_none_or(|(found, words)| found.contains(words)));
        };
        check(64, 16, 10, Some("quarter"));
        check(64, 17, 10, Some("all experts, 10.00 GB, fit in the 50.80 GB left"));
        check(64, 1560, 1450, None);
        check(2000, 1560, 1450, Some("all experts"));
    }
}
