//! One call: what is there is judged, what is missing is made, and what is whole is finished and verified.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::index::INDEX_FILE;
use crate::{Checkpoint, Error, ShardError, Shards};

use super::differences::{Differences, IndexFate, ShardDifferences};
use super::error::{Refusals, RepackError};
use super::extras::Extras;
use super::finish;
use super::journal::{Begun, Journal, Times};
use super::parallel::locked;
use super::pipeline::{Event, Verdict, Work};
use super::plan::Plan;
use super::report::{Exponents, FileRecord, Outcome, Report};
use super::run::{Division, Phase, Progress, Repack, RunOptions, VerifyMode};
use super::source_id::{SourceId, Stamp};
use super::target::{self, State};
use super::verify::{self, Proof, Verification};

/// A call of [`Repack::run`].
pub(super) struct Call<'c, 's> {
    pub(super) repack: &'c Repack<'s>,
    pub(super) dir: &'c Path,
    pub(super) options: &'c RunOptions,
    /// Shards that may be written, by their positions in the plan.
    pub(super) selected: Vec<usize>,
    /// Shards in flight.
    pub(super) jobs: usize,
    pub(super) report: &'c mut dyn FnMut(Progress),
    pub(super) outcome: Outcome,
}

impl Call<'_, '_> {
    pub(super) fn run(mut self, state: State) -> Result<Outcome, RepackError> {
        let (repack, dir) = (self.repack, self.dir);
        if state == State::Finished {
            if let Some(whole) = repack.whole(dir)? {
                self.outcome.resumed = whole.shards.len();
                return self.conclude(whole);
            }
            let note = "parts of the finished tree are missing or damaged, and are made again";
            self.outcome.notes.push(note.to_owned());
        } else if state == State::Fresh {
            let all = Division {
                trusted: Vec::new(),
                compare: Vec::new(),
                make: std::mem::take(&mut self.selected),
            };
            repack.check_space(dir, &all)?;
            self.selected = all.make;
            fs::create_dir_all(dir).map_err(RepackError::io("create", dir))?;
        }
        let direct = repack.direct(dir, self.options.io)?;
        let stamps = Stamp::of(repack.source)?;
        let times = Stamp::times(&stamps);
        let journal = self.begin(state, &times)?;
        target::remove_leftovers(dir, &repack.plan.shards)?;
        // A tree with an index is whole, and this one is not, or not known to be.
        match fs::remove_file(dir.join(INDEX_FILE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(RepackError::io("remove", &dir.join(INDEX_FILE))(e));
            }
            _ => {}
        }
        let is_newest = journal.begun.as_ref().is_some_and(|begun| begun.times == times);
        let mut division = repack.divide(dir, &self.selected, &journal.records, is_newest);
        repack.check_space(dir, &division)?;
        let journal = Mutex::new(journal);
        let work = Work { source: repack.source, plan: &repack.plan, dir, direct, journal };
        self.compare(&work, &mut division, is_newest)?;
        if !is_newest {
            locked(&work.journal).renew(times)?;
        }
        repack.check_space(dir, &division)?;
        self.write(&work, &division)?;
        self.check_source(&stamps)?;

        let journal = work.journal.into_inner().unwrap_or_else(PoisonError::into_inner);
        let completed = repack.completed(dir, journal.records.clone());
        let is_complete = |name: &str| completed.iter().any(|record| record.name == name);
        let missing = repack.plan.shards.iter().filter(|shard| !is_complete(&shard.name));
        self.outcome.missing = missing.map(|shard| shard.name.clone()).collect();
        if !self.outcome.missing.is_empty() {
            self.outcome.exponents = exponents(&completed);
            return Ok(self.outcome);
        }
        let whole = repack.report(completed)?;
        finish::write(dir, &repack.plan, &repack.extras, &whole)
            .map_err(|error| self.explain(error, &[], &[]))?;
        journal.remove()?;
        self.conclude(whole)
    }

    /// Opens the journal, and begins it if there is none that can be used.
    fn begin(&self, state: State, times: &Times) -> Result<Journal, RepackError> {
        let (repack, dir) = (self.repack, self.dir);
        // Before anything is written into a directory that may be somebody else's.
        let earlier = match state {
            State::Finished | State::Lost => Some(repack.earlier(dir)?),
            State::Fresh | State::Begun => None,
        };
        let mut journal = Journal::open(dir)?;
        if let Some(begun) = &journal.begun {
            repack.check_begun(dir, begun)?;
            return Ok(journal);
        }
        let earlier = earlier.map_or_else(|| repack.earlier(dir), Ok)?;
        // A finished tree does not say how old its source was: its shards are compared.
        let known = if earlier.is_empty() { times.clone() } else { Vec::new() };
        journal.begin(Begun::new(repack.plan.recipe.to_string(), repack.id.clone(), known))?;
        for record in earlier {
            journal.complete(record)?;
        }
        Ok(journal)
    }

    /// Compares what is there and not trusted with the source. What is right is complete then; what is wrong is removed,
    /// and made again if it is selected.
    fn compare(
        &mut self,
        work: &Work<'_>,
        division: &mut Division,
        is_newest: bool,
    ) -> Result<(), RepackError> {
        let shards = &self.repack.plan.shards;
        let candidates = std::mem::take(&mut division.compare);
        self.outcome.resumed = division.trusted.len();
        if candidates.is_empty() {
            return Ok(());
        }
        let which: Vec<usize> = candidates.iter().map(|candidate| candidate.shard).collect();
        let done = division.trusted.len();
        let verdicts = {
            let mut shown = shown(self.report, &self.repack.plan, Phase::Checking, &which, done);
            work.compare(&candidates, self.jobs, &mut |event| {
                if let Event::Written(bytes) = event {
                    shown(bytes);
                }
            })?
        };
        let having = |verdict| {
            let which = which.iter().zip(&verdicts);
            which.filter(move |(_, v)| **v == verdict).map(|(&shard, _)| shard).collect::<Vec<usize>>()
        };
        let changed = having(Verdict::OtherSource);
        if let Some(&first) = changed.first() {
            let file = self.dir.join(&shards[first].name);
            let more = match changed.len() - 1 {
                0 => String::new(),
                more => format!(" and {more} more shards"),
            };
            let what = format!(
                "{}{more} was made from other weights (or is damaged, and so is what was noted of it: if the source is \
                 right as it is now, remove that file)",
                file.display()
            );
            return Err(RepackError::SourceChanged { dir: self.dir.to_owned(), what });
        }
        let (right, wrong) = (having(Verdict::Right), having(Verdict::Wrong));
        for &shard in &wrong {
            // What was noted of it holds for its name and length, so it must not stay.
            let path = self.dir.join(&shards[shard].name);
            fs::remove_file(&path).map_err(RepackError::io("remove the damaged", &path))?;
        }
        let why = if is_newest { "nothing is noted of them" } else { "the source may have changed since" };
        self.outcome.notes.push(format!(
            "{} shards of an earlier run were compared with the source, because {why}: {} are right, {} are made again",
            which.len(),
            right.len(),
            wrong.len()
        ));
        let journal = locked(&work.journal);
        division.trusted = self.repack.completed(self.dir, journal.records.clone());
        division.make.extend(wrong.into_iter().filter(|shard| self.selected.contains(shard)));
        division.make.sort_unstable();
        self.outcome.resumed = division.trusted.len();
        Ok(())
    }

    /// Makes what is to be made.
    fn write(&mut self, work: &Work<'_>, division: &Division) -> Result<(), RepackError> {
        let Division { make, trusted, .. } = division;
        let shards = &self.repack.plan.shards;
        let bytes_total = make.iter().map(|&i| shards[i].data_bytes).sum();
        let (mut bytes_done, mut shards_done) = (0, trusted.len());
        let written = work.run(make, self.jobs, &mut |event| {
            match event {
                Event::Written(bytes) => bytes_done += bytes,
                Event::Complete => shards_done += 1,
            }
            let phase = Phase::Writing;
            (self.report)(Progress { phase, bytes_done, bytes_total, shards_done, shards: shards.len() });
        });
        self.outcome.written = written.map_err(|error| {
            let records = locked(&work.journal).records.clone();
            self.explain(error, make, &self.repack.completed(self.dir, records))
        })?;
        self.outcome.bytes_written = self.outcome.written.iter().map(|record| record.len).sum();
        self.outcome.bytes_read = make.iter().map(|&i| shards[i].read_bytes).sum();
        Ok(())
    }

    /// Says of a full disk what it means, and of refusals which layers were read.
    fn explain(&self, error: RepackError, make: &[usize], completed: &[FileRecord]) -> RepackError {
        let full = |e: &io::Error| {
            use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
            matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge)
        };
        let (path, source) = match error {
            RepackError::Shard(ShardError::Io { doing: "write", path, cause }) if full(&cause) => {
                (path, cause)
            }
            RepackError::Io { doing: "write", path, source } if full(&source) => (path, source),
            RepackError::Refused(mut refusals) => {
                let known = |layer| refusals.exponents.iter().any(|e| e.layer == layer);
                let mut earlier = exponents(completed);
                earlier.retain(|e| !known(e.layer));
                refusals.extend(Refusals { exponents: earlier, ..Refusals::default() });
                return refusals.into();
            }
            other => return other,
        };
        let shards = &self.repack.plan.shards;
        let is_complete = |name: &str| completed.iter().any(|record| record.name == name);
        let missing = make.iter().map(|&i| &shards[i]).filter(|shard| !is_complete(&shard.name));
        let needed: u64 = missing.map(|shard| shard.file_bytes).sum();
        let needed = needed.saturating_sub(target::leftover_bytes(self.dir, shards));
        let completed = if make.is_empty() { shards.len() } else { completed.len() };
        RepackError::Full { path, completed, shards: shards.len(), needed, source }
    }

    /// Looks at the source once more. What was read while somebody wrote to it is neither the old nor the new one.
    fn check_source(&self, then: &[Stamp]) -> Result<(), RepackError> {
        let repack = self.repack;
        let modified = |what| RepackError::SourceModified { dir: self.dir.to_owned(), what };
        if let Some(what) = Stamp::difference(then, &Stamp::of(repack.source)?) {
            return Err(modified(what));
        }
        let now = Checkpoint::open(repack.source.dir(), &finish::open_options(repack.source))?;
        let id = SourceId::of(&now, &Extras::new(&now, &repack.plan)?)?;
        repack.id.difference(&id).map_or(Ok(()), |what| Err(modified(what)))
    }

    /// Verifies a whole tree as far as that is asked for, and opens it.
    fn conclude(mut self, whole: Report) -> Result<Outcome, RepackError> {
        self.outcome.exponents = exponents(&whole.shards);
        let verified = self.verify(&whole)?;
        self.outcome.report = Some(whole);
        if let Some((proof, shards)) = verified {
            if !shards.is_empty() {
                let (dir, index) = (self.dir.to_owned(), IndexFate::remove(self.dir));
                return Err(Box::new(Differences { dir, shards, index, outcome: self.outcome }).into());
            }
            self.outcome.proof = Some(proof);
        }
        finish::open(self.dir, self.repack.source)?;
        Ok(self.outcome)
    }

    fn verify(&mut self, whole: &Report) -> Result<Option<(Proof, Vec<ShardDifferences>)>, RepackError> {
        let (repack, options) = (self.repack, self.options);
        if options.verify == VerifyMode::None {
            return Ok(None);
        }
        let is_full = options.verify == VerifyMode::Full;
        let result =
            Shards::open(self.dir).map_err(|error| finish::not_opened(self.dir, Error::Shards(error)))?;
        let files: &[&Shards] = if is_full { &[repack.source.shards(), &result] } else { &[&result] };
        let direct = Repack::reads_directly(files, options.io)?;
        let (source, plan, records) = (repack.source, &repack.plan, whole.shards.as_slice());
        let verification = Verification { source, result: &result, plan, records, direct };
        let jobs = Repack::jobs(options, verify::bytes_in_flight(plan))?;
        let which: Vec<usize> = (0..plan.shards.len()).collect();
        let mut shown = shown(self.report, plan, Phase::Verifying, &which, which.len());
        if is_full {
            verification.compare(&which, jobs, &mut shown).map(Some)
        } else {
            verification.hash(&which, jobs, &mut shown).map(Some)
        }
    }
}

/// Turns numbers of bytes into progress of a phase that goes over the shards `which`.
fn shown<'r>(
    report: &'r mut dyn FnMut(Progress),
    plan: &Plan,
    phase: Phase,
    which: &[usize],
    shards_done: usize,
) -> impl FnMut(u64) + use<'r> {
    let bytes_total = which.iter().map(|&i| plan.shards[i].data_bytes).sum();
    let shards = plan.shards.len();
    let mut bytes_done = 0;
    move |bytes| {
        bytes_done += bytes;
        report(Progress { phase, bytes_done, bytes_total, shards_done, shards });
    }
}

/// Of every layer with experts, by layer.
fn exponents(records: &[FileRecord]) -> Vec<Exponents> {
    records.iter().filter_map(|record| record.exponents.clone()).collect()
}
