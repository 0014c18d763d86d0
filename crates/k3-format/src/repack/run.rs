//! Carrying out a plan, in as many calls as it takes.

use std::fs;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::shard_file;
use crate::small_file::read_small;
use crate::{Checkpoint, Shards};

use super::REPORT_FILE;
use super::call::Call;
use super::error::RepackError;
use super::estimate::{self, Estimate};
use super::extras::Extras;
use super::finish;
use super::journal::{Begun, Journal};
use super::pipeline::{self, Candidate};
use super::plan::{Plan, ShardPlan};
use super::recipe::Recipe;
use super::report::{FileRecord, Outcome, Report};
use super::source_id::{SourceId, Stamp};
use super::target::{self, Outputs, State};

/// How files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoMode {
    /// Past the page cache where both file systems can, else through it.
    #[default]
    Auto,
    /// Through the page cache.
    Cached,
    /// Past the page cache, or not at all.
    Direct,
}

/// What is read again when the tree is whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum VerifyMode {
    /// Nothing but the headers.
    #[default]
    None,
    /// Every byte of the result: its hashes are those it was written with.
    Read,
    /// Every byte of the result and of the source: they hold the same codes, values and dense weights.
    Full,
}

/// What does not change the result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunOptions {
    /// Write only the shards of these layers (0-based) and those of no layer; the tree is finished by the run after
    /// which none is missing.
    pub layers: Option<Range<usize>>,
    /// Shards in flight; 0: one for each core.
    pub jobs: usize,
    /// The most bytes of memory for buffers; fewer shards are in flight if it asks for that. The tables of tensor names
    /// come on top: 0.2 GB for the published model.
    pub memory: u64,
    /// How files are read and written.
    pub io: IoMode,
    /// What is read again at the end.
    pub verify: VerifyMode,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { layers: None, jobs: 4, memory: 512 << 20, io: IoMode::Auto, verify: VerifyMode::None }
    }
}

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Writing shards.
    Writing,
    /// Comparing shards of an earlier run with the source: its files have other times now, or notes are lost.
    Checking,
    /// Verifying the finished tree.
    Verifying,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the result that were written or read in this phase.
    pub bytes_done: u64,
    /// Bytes of this phase.
    pub bytes_total: u64,
    /// Shards that are complete, those of earlier runs included.
    pub shards_done: usize,
    /// Shards of the tree.
    pub shards: usize,
}

/// A source and what is to become of it.
pub struct Repack<'a> {
    pub(super) source: &'a Checkpoint,
    pub(super) plan: Plan,
    pub(super) extras: Extras,
    pub(super) id: SourceId,
}

/// What a run finds in its target, and what it does with it.
pub(super) struct Division {
    /// Shards that are complete.
    pub(super) trusted: Vec<FileRecord>,
    /// Shards that are there, but of which nothing is known, or only that they were right for a source that may have
    /// changed.
    pub(super) compare: Vec<Candidate>,
    /// Shards to be made, by their positions in the plan.
    pub(super) make: Vec<usize>,
}

impl<'a> Repack<'a> {
    /// Plans a repack: reads the small files and samples of the source, and writes nothing.
    ///
    /// # Errors
    /// [`RepackError::SourceFormat`] for experts that are not MXFP4, and all that reading can bring.
    pub fn new(source: &'a Checkpoint, recipe: Recipe) -> Result<Self, RepackError> {
        let plan = Plan::new(source, recipe)?;
        let extras = Extras::new(source, &plan)?;
        let id = SourceId::of(source, &extras)?;
        Ok(Self { source, plan, extras, id })
    }

    /// What comes out.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What a user should hear of the source before the run.
    pub fn notes(&self) -> &[String] {
        &self.extras.notes
    }

    /// What is read, written and free, and how long it may take at rates that are measured now, in about a second.
    /// Nothing is left on the disk.
    ///
    /// # Errors
    /// As [`Repack::run`] before its first write, but for [`RepackError::NoSpace`]: see [`Estimate::fits`].
    pub fn estimate(&self, dir: &Path, options: &RunOptions) -> Result<Estimate, RepackError> {
        let state = self.state(dir)?;
        let selected = self.selected(options)?;
        let each = pipeline::bytes_in_flight(&self.plan);
        let jobs = Self::jobs(options, each)?;
        let mut estimate = Estimate {
            jobs,
            buffer_bytes: jobs as u64 * each,
            free_bytes: target::free_bytes(dir)?,
            ..Estimate::default()
        };
        if state == State::Finished
            && let Some(whole) = self.whole(dir)?
        {
            // Nothing is asked of the place: it may be read-only, or full.
            estimate.complete = whole.shards.len();
            estimate.direct = Self::reads_directly(&[self.source.shards()], options.io)?;
            return Ok(estimate);
        }
        let (records, times) = match state {
            State::Fresh => (Vec::new(), None),
            State::Finished | State::Lost => (self.earlier(dir)?, None),
            State::Begun => {
                let Journal { begun, records, .. } = Journal::open(dir)?;
                match begun {
                    Some(begun) => {
                        self.check_begun(dir, &begun)?;
                        (records, Some(begun.times))
                    }
                    None => (self.earlier(dir)?, None),
                }
            }
        };
        target::check_writable(dir)?;
        let trusted =
            times.is_some_and(|then| Stamp::of(self.source).is_ok_and(|now| Stamp::times(&now) == then));
        let division = self.divide(dir, &selected, &records, trusted);
        let sum = |positions: &mut dyn Iterator<Item = usize>, of: fn(&ShardPlan) -> u64| -> u64 {
            positions.map(|i| of(&self.plan.shards[i])).sum()
        };
        let compared = || division.compare.iter().map(|candidate| candidate.shard);
        let made = || division.make.iter().copied();
        estimate.read_bytes = sum(&mut made(), |shard| shard.read_bytes)
            + sum(&mut compared(), |shard| shard.read_bytes + shard.file_bytes);
        estimate.write_bytes = sum(&mut made(), |shard| shard.file_bytes);
        (estimate.shards, estimate.compared) = (division.make.len(), division.compare.len());
        estimate.complete = division.trusted.len();
        estimate.needed_bytes = self.needed(&division);
        estimate.free_bytes += target::leftover_bytes(dir, &self.plan.shards);
        estimate.direct = self.direct(dir, options.io)?;
        if estimate.shards + estimate.compared > 0 {
            estimate.measure(self.source, dir)?;
        }
        Ok(estimate)
    }

    /// Writes what is not there yet of the tree `dir`, and finishes the tree if no shard is missing then. A finished
    /// tree is opened and, if asked for, verified; that needs no writing.
    ///
    /// # Errors
    /// Before the first write: a target that is the source, a link, another tree or in use; a source or recipe other
    /// than the one that the tree was begun with; too little space. Later: matrices that cannot be converted without
    /// loss ([`RepackError::Refused`]), a source that is written to meanwhile, and everything that the system says.
    /// Complete shards stay, whatever the error. In the end: a tree that fails its verification
    /// ([`RepackError::Differs`]) or does not open, which loses its index.
    pub fn run(
        &self,
        dir: &Path,
        options: &RunOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Outcome, RepackError> {
        let state = self.state(dir)?;
        let selected = self.selected(options)?;
        let jobs = Self::jobs(options, pipeline::bytes_in_flight(&self.plan))?;
        Call { repack: self, dir, options, selected, jobs, report, outcome: Outcome::default() }.run(state)
    }

    fn outputs(&self) -> Outputs<'_> {
        Outputs { plan: &self.plan, extras: &self.extras }
    }

    fn state(&self, dir: &Path) -> Result<State, RepackError> {
        target::check(dir, self.source.dir(), &self.outputs())
    }

    pub(super) fn report(&self, shards: Vec<FileRecord>) -> Result<Report, RepackError> {
        finish::report(&self.plan, &self.id, shards, &self.extras)
    }

    fn selected(&self, options: &RunOptions) -> Result<Vec<usize>, RepackError> {
        if let Some(Range { start: begin, end }) = options.layers.clone() {
            let layers = self.source.config().num_hidden_layers();
            if begin >= end || end > layers {
                return Err(RepackError::Layers { begin, end, layers });
            }
        }
        Ok(self.plan.selected(options.layers.as_ref()))
    }

    /// What is to be done where an earlier run left `records`; `trusted` if the source has not changed since.
    pub(super) fn divide(
        &self,
        dir: &Path,
        selected: &[usize],
        records: &[FileRecord],
        trusted: bool,
    ) -> Division {
        let complete = if trusted { self.completed(dir, records.to_vec()) } else { Vec::new() };
        let mut division = Division { trusted: complete, compare: Vec::new(), make: Vec::new() };
        for (i, shard) in self.plan.shards.iter().enumerate() {
            let noted = |records: &[FileRecord]| records.iter().find(|r| r.name == shard.name).cloned();
            if noted(&division.trusted).is_some() {
                continue;
            }
            // A link may lead to another tree's file.
            if fs::symlink_metadata(dir.join(&shard.name)).is_ok_and(|m| m.is_file()) {
                division.compare.push(Candidate { shard: i, record: noted(records) });
            } else if selected.contains(&i) {
                division.make.push(i);
            }
        }
        division
    }

    /// Shards in flight within the budget, if each takes `each` bytes.
    pub(super) fn jobs(options: &RunOptions, each: u64) -> Result<usize, RepackError> {
        let fit = options.memory / each;
        if fit == 0 {
            return Err(RepackError::Budget { budget: options.memory, needed: each });
        }
        let jobs = match options.jobs {
            0 => std::thread::available_parallelism().map_or(1, NonZero::get),
            jobs => jobs,
        };
        Ok(jobs.min(fit as usize))
    }

    /// Whether files go past the page cache.
    pub(super) fn direct(&self, dir: &Path, mode: IoMode) -> Result<bool, RepackError> {
        let place = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
        Self::choose(mode, || {
            estimate::can_read_directly(self.source.shards())?;
            estimate::can_write_directly(target::existing(&place))
        })
    }

    /// Whether all these files are read past the page cache.
    pub(super) fn reads_directly(files: &[&Shards], mode: IoMode) -> Result<bool, RepackError> {
        Self::choose(mode, || files.iter().try_for_each(|files| estimate::can_read_directly(files)))
    }

    fn choose(
        mode: IoMode,
        possible: impl FnOnce() -> Result<(), (PathBuf, io::Error)>,
    ) -> Result<bool, RepackError> {
        if mode == IoMode::Cached {
            return Ok(false);
        }
        match possible() {
            Ok(()) => Ok(true),
            Err(_) if mode == IoMode::Auto => Ok(false),
            Err((path, source)) => Err(RepackError::NoDirect { path, source }),
        }
    }

    /// Bytes that must be free.
    fn needed(&self, division: &Division) -> u64 {
        /// Index and header copies of the small files, with room to spare.
        const BESIDE: u64 = 1 << 20;
        let Division { trusted, compare, make } = division;
        let shards: u64 = make.iter().map(|&i| self.plan.shards[i].file_bytes).sum();
        let index: u64 = self.plan.shards.iter().map(|shard| shard.file_bytes - shard.data_bytes).sum();
        let extras: u64 = self.extras.outputs.iter().map(|extra| extra.len).sum();
        let finishes = make.len() + trusted.len() + compare.len() == self.plan.shards.len();
        shards + BESIDE + if finishes { index + extras } else { 0 }
    }

    pub(super) fn check_space(&self, dir: &Path, division: &Division) -> Result<(), RepackError> {
        target::check_writable(dir)?;
        let needed = self.needed(division);
        let free = target::free_bytes(dir)? + target::leftover_bytes(dir, &self.plan.shards);
        if needed > free {
            return Err(RepackError::NoSpace { dir: dir.to_owned(), needed, free });
        }
        Ok(())
    }

    pub(super) fn check_begun(&self, dir: &Path, begun: &Begun) -> Result<(), RepackError> {
        let (found, wanted) = (&begun.recipe, self.plan.recipe.to_string());
        if *found != wanted {
            return Err(RepackError::OtherRecipe { dir: dir.to_owned(), found: found.clone(), wanted });
        }
        match begun.source.difference(&self.id) {
            Some(what) => Err(RepackError::SourceChanged { dir: dir.to_owned(), what }),
            None => Ok(()),
        }
    }

    /// The finished tree in `dir`, if all of it is there and everything but the data of the shards is as it should be.
    pub(super) fn whole(&self, dir: &Path) -> Result<Option<Report>, RepackError> {
        let Some(records) = self.finished(dir)? else { return Ok(None) };
        let completed = self.completed(dir, records);
        if completed.len() < self.plan.shards.len() {
            return Ok(None);
        }
        let report = self.report(completed)?;
        Ok(finish::is_whole(dir, &report)?.then_some(report))
    }

    /// What is known of the shards in `dir`, which has no journal that can be read: nothing, if the report is lost, too.
    /// Then what is there must at least look like a part of this tree.
    pub(super) fn earlier(&self, dir: &Path) -> Result<Vec<FileRecord>, RepackError> {
        match self.finished(dir)? {
            Some(records) => Ok(records),
            None => self.outputs().check_own(dir).map(|()| Vec::new()),
        }
    }

    /// What the report of a finished tree says of its shards, if the tree is one of this source and recipe. `None` if
    /// there is no report, or it is damaged.
    fn finished(&self, dir: &Path) -> Result<Option<Vec<FileRecord>>, RepackError> {
        #[derive(Deserialize)]
        struct Finished {
            recipe: String,
            source: SourceId,
            shards: Vec<FileRecord>,
        }
        let path = dir.join(REPORT_FILE);
        if !fs::symlink_metadata(&path).is_ok_and(|m| m.is_file()) {
            return Ok(None);
        }
        let Ok(finished) = serde_json::from_slice::<Finished>(&read_small(&path)?) else { return Ok(None) };
        self.check_begun(dir, &Begun::new(finished.recipe, finished.source, Vec::new()))?;
        Ok(Some(finished.shards))
    }

    /// Those of `records` whose shards are there in full length with a good header, in the order of the plan.
    pub(super) fn completed(&self, dir: &Path, records: Vec<FileRecord>) -> Vec<FileRecord> {
        let is_there = |record: &FileRecord| {
            // A link may lead to another tree's file.
            fs::symlink_metadata(dir.join(&record.name)).is_ok_and(|m| m.is_file())
                && shard_file::open(dir, &record.name).is_ok_and(|(file, _)| file.len == record.len)
        };
        let is_planned = |record: &FileRecord| self.plan.shards.iter().any(|shard| shard.name == record.name);
        let mut found: Vec<FileRecord> =
            records.into_iter().filter(|record| is_planned(record) && is_there(record)).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        found
    }
}
