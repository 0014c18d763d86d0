//! Which expert store, how large, and what it remembers of earlier runs.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Result, bail};
use clap::ValueEnum;
use k3_experts::backend::{Backend, OpenedStore, StoreError, StoreOptions, open_store};
use k3_experts::memory::{Machine, rss};
pub(crate) use k3_experts::plan::parse_bytes;
use k3_experts::plan::{ExpertSizes, MemoryPlan, Needs, gigabytes};
use k3_experts::slab::{Direct, SlabError, drive_count, slot_bytes};
use k3_experts::usage::{Usage, UsageError};
use k3_experts::{ExpertStore, SlabOptions, SlabStore};
use k3_format::{Checkpoint, ShardError};
use k3_runner::memory::expert_sizes;

use crate::output::tell;

/// Bytes for experts on a machine that does not say what memory it has.
const UNKNOWN_MACHINE: u64 = 8 << 30;

/// Options of the expert store.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// How routed experts are read; no result depends on it. `auto` takes what a second of reading shows to be fastest,
    /// or the page cache where it holds everything
    #[arg(long, value_enum, default_value_t = StoreName::Auto)]
    store: StoreName,
    /// Bytes of memory for experts, as in 8GiB or 20GB. `auto` takes what the weights, the sequence and the computation
    /// leave of the machine's memory and of the limits that are set. A number rules the mapped store out, where the system
    /// decides, unless that is asked for
    #[arg(long, value_name = "BYTES", default_value = "auto", allow_hyphen_values = true)]
    expert_budget: Budget,
    /// Reads in flight on each drive; for direct and buffered stores [default: 6]
    #[arg(long, value_name = "READS", value_parser = reads_in_flight, allow_hyphen_values = true)]
    reads_in_flight: Option<usize>,
    /// Which experts were used, of all runs: read at the start, written at the end; `none` keeps nothing. For direct and
    /// buffered stores [default: $XDG_CACHE_HOME/k3/IDENTITY.usage]
    #[arg(long, value_name = "FILE")]
    usage: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StoreName {
    /// Whichever suits the machine and the files
    Auto,
    /// Mapped files: the system's page cache decides what stays
    Mapped,
    /// Read past the page cache into slots of our own
    Direct,
    /// Read through the page cache into slots of our own
    Buffered,
}

/// `--expert-budget`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Budget {
    Auto,
    Bytes(u64),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = || parse_bytes(text).map_err(|error| format!("neither auto nor bytes: {error}"));
        if text == "auto" { Ok(Self::Auto) } else { bytes().map(Self::Bytes) }
    }
}

/// `--reads-in-flight`
fn reads_in_flight(text: &str) -> Result<usize, String> {
    let number = text
        .parse()
        .map_err(|_| format!("expected a number from 1 to {}, as in 6", SlabOptions::MOST_READS_IN_FLIGHT))?;
    let options = SlabOptions { reads_in_flight: number, ..SlabOptions::default() };
    options.check().map(|()| number).map_err(|error| error.to_string())
}

/// A store that is open, and the plan that it is part of.
#[derive(Debug)]
pub(crate) struct Opened {
    chosen: OpenedStore,
    pub(crate) plan: MemoryPlan,
    /// Bytes that the program had when the plan was made.
    pub(crate) before: Option<u64>,
    /// Options that were given and that this store has no use for.
    pub(crate) unused: Vec<&'static str>,
    /// Dropped at the end of a run, which writes it.
    usage: Option<UsageFile>,
}

impl StoreArgs {
    /// Plans the memory and opens the store, saying what is odd.
    pub(crate) fn open(&self, checkpoint: &Arc<Checkpoint>, needs: Needs) -> Result<Opened> {
        let backend = match self.store {
            StoreName::Auto => None,
            StoreName::Mapped => Some(Backend::Mapped),
            StoreName::Direct => Some(Backend::Direct),
            StoreName::Buffered => Some(Backend::Buffered),
        };
        let before = rss();
        let mut slab = SlabOptions::default();
        slab.reads_in_flight = self.reads_in_flight.unwrap_or(slab.reads_in_flight);
        let plan = self.plan(checkpoint, needs, slab.moving(drive_count(checkpoint)?));
        if plan.missing > 0 {
            let missing = gigabytes(plan.missing);
            let leftover = gigabytes(plan.left());
            match (self.expert_budget, backend) {
                (Budget::Bytes(asked), _) if plan.left() >= plan.sizes.least() => tell(format_args!(
                    "note: --expert-budget {} is {missing} more than there is: {leftover} are left beside what else is \
                     needed, and the system may end the program or swap\n{plan}",
                    gigabytes(asked)
                )),
                (Budget::Bytes(_), _) | (_, Some(Backend::Mapped)) => tell(format_args!(
                    "note: {missing} of memory are missing: the system may end the program or read weights again and \
                     again\n{plan}"
                )),
                (Budget::Auto, _) => bail!(
                    "{missing} of memory are missing to run this checkpoint:\n{plan}\
                     smaller weights outside the experts need less (`cargo xtask repack --dense int4`), and so does a \
                     shorter context or prompt chunk; --expert-budget {} runs anyway",
                    plan.sizes.least()
                ),
            }
        }
        let mut options = StoreOptions { backend, slab, ..StoreOptions::default() };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        options.probe.seed = now.map_or(0, |now| now.as_nanos() as u64);
        let opened = open_store(checkpoint, &plan, options).map_err(|error| {
            let what = match (&error, backend) {
                (StoreError::Slab(SlabError::Budget { .. }), _) => {
                    "--expert-budget: name a larger one, or leave it out".to_owned()
                }
                (_, Some(Backend::Direct)) => "reading past the page cache; try --store buffered".to_owned(),
                _ => format!("opening the experts of {}", checkpoint.dir().display()),
            };
            anyhow::Error::new(error).context(what)
        })?;
        let usage = match &opened.slab {
            Some(store) => self.usage_file(checkpoint, store, &plan)?,
            None => None,
        };
        let unused = if opened.slab.is_some() { Vec::new() } else { self.for_slots() };
        Ok(Opened { chosen: opened, plan, before, unused, usage })
    }

    /// The file of uses that was named.
    pub(crate) fn usage(&self) -> Option<&Path> {
        self.usage.as_deref().filter(|file| *file != Path::new("none"))
    }

    /// What was asked of a store with slots.
    fn for_slots(&self) -> Vec<&'static str> {
        let given = [
            ("--expert-budget", self.expert_budget != Budget::Auto),
            ("--reads-in-flight", self.reads_in_flight.is_some()),
            ("--usage", self.usage().is_some()),
        ];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name).collect()
    }

    fn plan(&self, checkpoint: &Checkpoint, needs: Needs, moving: usize) -> MemoryPlan {
        // Slots for direct reads are the larger ones.
        let sizes = expert_sizes(checkpoint.config(), slot_bytes(checkpoint, Direct::ALIGN), moving);
        let asked = match self.expert_budget {
            Budget::Auto => None,
            Budget::Bytes(bytes) => Some(bytes),
        };
        match Machine::read() {
            Ok(machine) => MemoryPlan::new(&machine, needs, sizes, asked),
            Err(error) => {
                tell(format_args!("note: how much memory there is is not known here ({error})\n"));
                plan_blindly(needs, sizes, asked)
            }
        }
    }

    fn usage_file(
        &self,
        checkpoint: &Checkpoint,
        store: &Arc<SlabStore>,
        plan: &MemoryPlan,
    ) -> Result<Option<UsageFile>> {
        let path = match (self.usage(), cache_folder()) {
            (Some(path), _) => path.to_owned(),
            (None, Some(folder)) if self.usage.is_none() => {
                folder.join("k3").join(format!("{}.usage", checkpoint.identity()))
            }
            _ => return Ok(None),
        };
        let geometry = plan.sizes.geometry;
        let earlier = match Usage::load(&path, checkpoint.identity(), geometry) {
            Err(error @ UsageError::Content { .. }) => {
                tell(format_args!("note: {:#}; it will be replaced\n", anyhow::Error::from(error)));
                None
            }
            Err(error) if self.usage.is_some() => return Err(error.into()),
            Err(error) => {
                tell(format_args!("note: {:#}; this run is not noted\n", anyhow::Error::from(error)));
                return Ok(None);
            }
            Ok(earlier) => earlier,
        };
        let earlier = earlier.unwrap_or_else(|| Usage::new(geometry));
        let identity = checkpoint.identity();
        if self.usage.is_some() {
            // A place that was named and cannot be written is known now, not after hours.
            match earlier.save(&path, identity) {
                Err(UsageError::Write { source, .. })
                    if matches!(*source, ShardError::OutputIsBusy { .. }) => {}
                saved => saved?,
            }
        }
        Ok(Some(UsageFile { store: store.clone(), path, identity, earlier }))
    }
}

impl Opened {
    pub(crate) fn store(&self) -> Arc<dyn ExpertStore> {
        self.chosen.store.clone()
    }

    /// Begins to read what earlier runs used. Call it when the other weights are there.
    pub(crate) fn warm(&self) {
        if let Some(usage) = &self.usage {
            usage.store.warm(&usage.earlier);
        }
    }

    /// The memory table, with the slots that the store has.
    pub(crate) fn table(&self) -> String {
        match &self.chosen.slab {
            Some(store) => {
                let slots = self.plan.describe_slots(store.slots() as u64);
                self.plan.table(&slots)
            }
            None => self.plan.table("left to the page cache"),
        }
    }

    /// Whether experts are left to the page cache.
    pub(crate) fn is_mapped(&self) -> bool {
        self.chosen.backend == Backend::Mapped
    }

    /// One line about the store.
    pub(crate) fn description(&self) -> &str {
        &self.chosen.description
    }
}

/// The plan for a machine that does not say what memory it has: there is enough for what was asked.
fn plan_blindly(needs: Needs, sizes: ExpertSizes, asked: Option<u64>) -> MemoryPlan {
    let experts = asked.unwrap_or(UNKNOWN_MACHINE);
    let machine = Machine::with(needs.total().saturating_add(experts).saturating_add(UNKNOWN_MACHINE));
    match asked {
        Some(_) => MemoryPlan::new(&machine, needs, sizes, asked),
        None => MemoryPlan::assuming(&machine, needs, sizes, experts),
    }
}

/// The folder for what can be made again.
fn cache_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))
}

/// Uses of experts, written when it is dropped.
struct UsageFile {
    store: Arc<SlabStore>,
    path: PathBuf,
    identity: k3_format::CheckpointId,
    earlier: Usage,
}

impl std::fmt::Debug for UsageFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UsageFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for UsageFile {
    fn drop(&mut self) {
        let now = self.store.usage();
        if now.tokens() == 0.0 {
            return;
        }
        self.earlier.add(&now);
        if let Err(error) = self.earlier.save(&self.path, self.identity) {
            tell(format_args!("note: {:#}\n", anyhow::Error::from(error)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The help names it.
    #[test]
    fn six_reads_are_in_flight() {
        assert_eq!(SlabOptions::default().reads_in_flight, 6);
    }

    #[test]
    fn a_budget_is_bytes_or_auto() {
        let check = |text: &str, expected: Option<Budget>| {
            assert_eq!(Budget::from_str(text).ok(), expected, "{text}");
        };
        check("auto", Some(Budget::Auto));
        check("8GiB", Some(Budget::Bytes(8 << 30)));
        check("Auto", None);
        check("-1GB", None);
        check("", None);
    }

    #[test]
    fn a_machine_that_tells_nothing_has_enough() {
        let geometry = k3_experts::trace::Geometry { layers: 2, experts: 8, per_token: 2 };
        let sizes = ExpertSizes { geometry, slot_bytes: 1 << 20, moving: 14 };
        let check = |asked: Option<u64>, experts: u64| {
            let plan = plan_blindly(Needs::default(), sizes, asked);
            let found = (plan.experts, plan.asked, plan.missing);
            assert_eq!(found, (experts, asked.is_some(), 0));
        };
        check(None, UNKNOWN_MACHINE);
        check(Some(1 << 30), 1 << 30);
    }
}
