//! Carrying out a plan, in as many calls as it takes.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use serde::Deserialize;

use crate::index::INDEX_FILE;
use crate::shard_file;
use crate::small_file::read_small;
use crate::{Checkpoint, ShardError, Shards};

use super::REPORT_FILE;
use super::error::RepackError;
use super::estimate::{self, Estimate};
use super::extras::Extras;
use super::finish;
use super::journal::{Begun, Journal};
use super::pipeline::{self, Event, Work};
use super::plan::Plan;
use super::recipe::Recipe;
use super::report::{FileRecord, Outcome, Report};
use super::source_id::{SourceId, times};
use super::target::{self, State};
use super::verify::{self, Proof, Verification};

/// How files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Shards in flight.
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
    /// Comparing shards of an earlier run with a source whose files have other times now.
    Checking,
    /// Verifying the finished tree.
    Verifying,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    source: &'a Checkpoint,
    plan: Plan,
    extras: Extras,
    id: SourceId,
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

    /// What is read, written and free, and how long it may take at rates that are measured now, in about a second.
    /// Nothing is left on the disk.
    ///
    /// # Errors
    /// As [`Repack::run`] before its first write, but for [`RepackError::NoSpace`].
    pub fn estimate(&self, dir: &Path, options: &RunOptions) -> Result<Estimate, RepackError> {
        let state = target::check(dir, self.source.dir())?;
        let selected = self.selected(options)?;
        let completed = match state {
            State::Fresh => Vec::new(),
            State::Begun => self.completed(dir, Journal::open(dir)?.records),
            State::Finished => self.completed(dir, self.finished(dir)?),
        };
        let todo = self.todo(&selected, &completed);
        let jobs = self.jobs(options, pipeline::bytes_in_flight(&self.plan))?;
        let direct = self.direct(dir, options.io)?;
        estimate::measure(self.source, &self.plan, dir, &todo, completed.len(), jobs, direct)
    }

    /// Writes what is not there yet of the tree `dir`, and finishes the tree if no shard is missing then.
    ///
    /// # Errors
    /// Before the first write: a target that is the source, a link, another tree or in use; a source or recipe other
    /// than the one that the tree was begun with; too little space. Later: matrices that cannot be converted without
    /// loss ([`RepackError::Refused`]), and everything that the system says. Complete shards stay, whatever the error.
    pub fn run(
        &self,
        dir: &Path,
        options: &RunOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Outcome, RepackError> {
        let state = target::check(dir, self.source.dir())?;
        let selected = self.selected(options)?;
        let jobs = self.jobs(options, pipeline::bytes_in_flight(&self.plan))?;
        let mut outcome = Outcome {
            report: None,
            written: Vec::new(),
            resumed: 0,
            missing: Vec::new(),
            bytes_read: 0,
            bytes_written: 0,
            proof: None,
            notes: Vec::new(),
        };
        let mut earlier = Vec::new();
        if state == State::Finished {
            earlier = self.finished(dir)?;
            let completed = self.completed(dir, earlier.clone());
            if completed.len() == self.plan.shards.len() {
                let whole = self.report(completed)?;
                if finish::is_whole(dir, &whole)? {
                    outcome.resumed = whole.shards.len();
                    outcome.proof = self.verify(dir, &whole.shards, options, report)?;
                    outcome.report = Some(whole);
                    return Ok(outcome);
                }
            }
            outcome
                .notes
                .push("parts of the finished tree are missing or damaged, and are made again".to_owned());
        } else if state == State::Fresh {
            self.check_space(dir, &selected, &[])?;
            fs::create_dir_all(dir).map_err(RepackError::io("create", dir))?;
        }
        let direct = self.direct(dir, options.io)?;
        let mut journal = Journal::open(dir)?;
        let times = times(self.source)?;
        let recipe = self.plan.recipe.to_string();
        if let Some(begun) = journal.begun.clone() {
            self.check_begun(dir, &begun)?;
        } else {
            // A finished tree does not say how old its source was: its shards are compared below.
            let known = if earlier.is_empty() { times.clone() } else { Vec::new() };
            journal.begin(Begun::new(recipe, self.id.clone(), known))?;
            for record in self.completed(dir, earlier) {
                journal.complete(record)?;
            }
        }
        target::remove_leftovers(dir, &self.plan.shards)?;
        // A tree with an index is whole, and this one is not, or not known to be.
        match fs::remove_file(dir.join(INDEX_FILE)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(RepackError::io("remove", &dir.join(INDEX_FILE))(e));
            }
            _ => {}
        }
        let completed = self.completed(dir, journal.records.clone());
        if journal.begun.as_ref().is_some_and(|begun| begun.times != times) && !completed.is_empty() {
            outcome.notes.push(format!(
                "files of the source may be newer than the {} complete shards, so these were compared with it",
                completed.len()
            ));
            self.check_completed(dir, &completed, options, direct, report)?;
        }
        let todo = self.todo(&selected, &completed);
        self.check_space(dir, &todo, &completed)?;
        outcome.resumed = completed.len();
        let journal = self.write(dir, &todo, jobs, direct, journal, completed.len(), &mut outcome, report)?;
        let completed = self.completed(dir, journal.records.clone());
        let is_complete = |name: &str| completed.iter().any(|record| record.name == name);
        let missing = self.plan.shards.iter().filter(|shard| !is_complete(&shard.name));
        outcome.missing = missing.map(|shard| shard.name.clone()).collect();
        if !outcome.missing.is_empty() {
            return Ok(outcome);
        }
        let whole = self.report(completed)?;
        finish::write(dir, &self.plan, &self.extras, &whole)?;
        finish::open(dir, self.source)?;
        journal.remove()?;
        outcome.proof = self.verify(dir, &whole.shards, options, report)?;
        outcome.report = Some(whole);
        Ok(outcome)
    }

    fn report(&self, shards: Vec<FileRecord>) -> Result<Report, RepackError> {
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

    fn todo(&self, selected: &[usize], completed: &[FileRecord]) -> Vec<usize> {
        let is_complete = |i: &usize| completed.iter().any(|record| record.name == self.plan.shards[*i].name);
        selected.iter().copied().filter(|i| !is_complete(i)).collect()
    }

    /// Shards in flight within the budget.
    #[allow(clippy::unused_self, reason = "a rule of the run")]
    fn jobs(&self, options: &RunOptions, each: u64) -> Result<usize, RepackError> {
        let fit = options.memory / each;
        if fit == 0 {
            return Err(RepackError::Budget { budget: options.memory, needed: each });
        }
        Ok(options.jobs.clamp(1, fit as usize))
    }

    /// Whether files go past the page cache.
    fn direct(&self, dir: &Path, mode: IoMode) -> Result<bool, RepackError> {
        if mode == IoMode::Cached {
            return Ok(false);
        }
        let place = std::path::absolute(dir).map_err(RepackError::io("resolve", dir))?;
        let possible = estimate::can_read_directly(self.source)
            .and_then(|()| estimate::can_write_directly(target::existing(&place)));
        match possible {
            Ok(()) => Ok(true),
            Err(_) if mode == IoMode::Auto => Ok(false),
            Err((path, source)) => Err(RepackError::NoDirect { path, source }),
        }
    }

    fn check_space(&self, dir: &Path, todo: &[usize], completed: &[FileRecord]) -> Result<(), RepackError> {
        /// Index and header copies of the small files, with room to spare.
        const BESIDE: u64 = 1 << 20;
        let shards: u64 = todo.iter().map(|&i| self.plan.shards[i].file_bytes).sum();
        let index: u64 = self.plan.shards.iter().map(|shard| shard.file_bytes - shard.data_bytes).sum();
        let extras: u64 = self.extras.outputs.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let finishes = todo.len() + completed.len() == self.plan.shards.len();
        let needed = shards + BESIDE + if finishes { index + extras } else { 0 };
        let free = target::free_bytes(dir)? + target::leftover_bytes(dir, &self.plan.shards);
        if needed > free {
            return Err(RepackError::NoSpace { dir: dir.to_owned(), needed, free });
        }
        Ok(())
    }

    fn check_begun(&self, dir: &Path, begun: &Begun) -> Result<(), RepackError> {
        let (found, wanted) = (&begun.recipe, self.plan.recipe.to_string());
        if *found != wanted {
            return Err(RepackError::OtherRecipe { dir: dir.to_owned(), found: found.clone(), wanted });
        }
        match begun.source.difference(&self.id) {
            Some(what) => Err(RepackError::SourceChanged { dir: dir.to_owned(), what }),
            None => Ok(()),
        }
    }

    /// What the report of a finished tree says of its shards, if the tree is one of this source and recipe.
    fn finished(&self, dir: &Path) -> Result<Vec<FileRecord>, RepackError> {
        #[derive(Deserialize)]
        struct Finished {
            recipe: String,
            source: SourceId,
            shards: Vec<FileRecord>,
        }
        let path = dir.join(REPORT_FILE);
        let invalid =
            |e: serde_json::Error| RepackError::Journal { path: path.clone(), message: e.to_string() };
        let finished: Finished = serde_json::from_slice(&read_small(&path)?).map_err(invalid)?;
        self.check_begun(dir, &Begun::new(finished.recipe, finished.source, Vec::new()))?;
        Ok(finished.shards)
    }

    /// Those of `records` whose shards are there in full length with a good header, in the order of the plan.
    fn completed(&self, dir: &Path, records: Vec<FileRecord>) -> Vec<FileRecord> {
        let is_there = |record: &FileRecord| {
            // A link may lead to another tree's file.
            fs::symlink_metadata(dir.join(&record.name)).is_ok_and(|m| m.is_file())
                && shard_file::open(dir, &record.name).is_ok_and(|(file, _)| file.len == record.len)
        };
        let mut found: Vec<FileRecord> = records.into_iter().filter(is_there).collect();
        found.retain(|record| self.plan.shards.iter().any(|shard| shard.name == record.name));
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    fn positions(&self, records: &[FileRecord]) -> Vec<usize> {
        let has = |name: &str| records.iter().any(|record| record.name == name);
        (0..self.plan.shards.len()).filter(|&i| has(&self.plan.shards[i].name)).collect()
    }

    /// Compares complete shards with a source that may have changed.
    fn check_completed(
        &self,
        dir: &Path,
        completed: &[FileRecord],
        options: &RunOptions,
        direct: bool,
        report: &mut dyn FnMut(Progress),
    ) -> Result<(), RepackError> {
        let names: Vec<String> = completed.iter().map(|record| record.name.clone()).collect();
        let result = Shards::open_files(dir, &names)?;
        let verification = Verification { source: self.source, result: &result, plan: &self.plan, direct };
        let which = self.positions(completed);
        let jobs = self.jobs(options, verify::bytes_in_flight(&self.plan))?;
        let mut shown = self.shown(Phase::Checking, &which, completed.len(), report);
        match verification.compare(&which, jobs, &mut shown) {
            Ok(_) => Ok(()),
            Err(RepackError::Differs { file, what }) => {
                let what = format!("{} was made from other weights, or is damaged: {what}", file.display());
                Err(RepackError::SourceChanged { dir: dir.to_owned(), what })
            }
            Err(error) => Err(error),
        }
    }

    /// Turns numbers of bytes into progress of a phase that goes over the shards `which`.
    fn shown<'r>(
        &self,
        phase: Phase,
        which: &[usize],
        shards_done: usize,
        report: &'r mut dyn FnMut(Progress),
    ) -> impl FnMut(u64) + use<'r> {
        let bytes_total = which.iter().map(|&i| self.plan.shards[i].data_bytes).sum();
        let shards = self.plan.shards.len();
        let mut bytes_done = 0;
        move |bytes| {
            bytes_done += bytes;
            report(Progress { phase, bytes_done, bytes_total, shards_done, shards });
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one call, to keep `run` readable")]
    fn write(
        &self,
        dir: &Path,
        todo: &[usize],
        jobs: usize,
        direct: bool,
        journal: Journal,
        mut shards_done: usize,
        outcome: &mut Outcome,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Journal, RepackError> {
        let work = Work { source: self.source, plan: &self.plan, dir, direct, journal: Mutex::new(journal) };
        let bytes_total = todo.iter().map(|&i| self.plan.shards[i].data_bytes).sum();
        let (mut bytes_done, shards) = (0, self.plan.shards.len());
        let written = work.run(todo, jobs, &mut |event| {
            match event {
                Event::Written(bytes) => bytes_done += bytes,
                Event::Complete => shards_done += 1,
            }
            report(Progress { phase: Phase::Writing, bytes_done, bytes_total, shards_done, shards });
        });
        outcome.written = written.map_err(|error| self.explain(error, todo, bytes_done, shards_done))?;
        outcome.bytes_written = outcome.written.iter().map(|record| record.len).sum();
        outcome.bytes_read = todo.iter().map(|&i| self.plan.shards[i].read_bytes).sum();
        Ok(work.journal.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Says of a full disk what it means.
    fn explain(&self, error: RepackError, todo: &[usize], done: u64, completed: usize) -> RepackError {
        let full = |e: &io::Error| {
            use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
            matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge)
        };
        let total: u64 = todo.iter().map(|&i| self.plan.shards[i].file_bytes).sum();
        let (path, source) = match error {
            RepackError::Shard(ShardError::Io { doing: "write", path, cause }) if full(&cause) => {
                (path, cause)
            }
            RepackError::Io { doing: "write", path, source } if full(&source) => (path, source),
            other => return other,
        };
        let (shards, needed) = (self.plan.shards.len(), total.saturating_sub(done));
        RepackError::Full { path, completed, shards, needed, source }
    }

    fn verify(
        &self,
        dir: &Path,
        records: &[FileRecord],
        options: &RunOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Option<Proof>, RepackError> {
        if options.verify == VerifyMode::None {
            return Ok(None);
        }
        let result = Shards::open(dir)?;
        let direct = self.direct(dir, options.io)?;
        let verification = Verification { source: self.source, result: &result, plan: &self.plan, direct };
        let which = self.positions(records);
        let jobs = self.jobs(options, verify::bytes_in_flight(&self.plan))?;
        let mut shown = self.shown(Phase::Verifying, &which, records.len(), report);
        if options.verify == VerifyMode::Read {
            return verification.hash(&which, records, jobs, &mut shown).map(Some);
        }
        verification.compare(&which, jobs, &mut shown).map(Some)
    }
}
