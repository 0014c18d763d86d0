//! Threads that read: a queue for each drive, so that none waits for another.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use bytes::BytesMut;

use super::Shared;
use super::pool::Filled;
use super::reader::{Reader, SlotReadError, read_full};
use super::ticket::{Ended, Ticket};

/// Whether somebody waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Somebody does.
    Demand,
    /// Somebody may: it is read when nothing else is to be.
    Guess,
}

/// A piece of an expert to be read.
pub(super) struct Job {
    ticket: Arc<Ticket>,
    number: usize,
    chunk: BytesMut,
    segment: usize,
    begin: usize,
}

/// The queues.
pub(super) struct Drives {
    reader: Arc<dyn Reader>,
    queues: Vec<Queue>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    demands: VecDeque<Job>,
    guesses: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs();
        loop {
            if jobs.closed {
                return None;
            }
            if let Some(job) = jobs.demands.pop_front() {
                return Some(job);
            }
            if let Some(job) = jobs.guesses.pop_front() {
                return Some(job);
            }
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drives {
    pub(super) fn new(reader: Arc<dyn Reader>, shards: usize) -> Self {
        let drives = (0..shards).map(|shard| reader.drive(shard) + 1).max().unwrap_or(1);
        Self { reader, queues: (0..drives).map(|_| Queue::default()).collect() }
    }

    /// Number of drives.
    pub(super) fn len(&self) -> usize {
        self.queues.len()
    }

    /// Starts `threads` on each drive. They end when the drives are closed.
    pub(super) fn start(shared: &Arc<Shared>, threads: usize) -> io::Result<()> {
        for drive in 0..shared.drives.len() {
            for _ in 0..threads {
                let (drives, shared) = (shared.drives.clone(), Arc::downgrade(shared));
                thread::Builder::new()
                    .name(format!("experts-{drive}"))
                    .spawn(move || drives.work(drive, &shared))?;
            }
        }
        Ok(())
    }

    fn work(&self, drive: usize, shared: &Weak<Shared>) {
        while let Some(mut job) = self.queues[drive].next() {
            let segment = &job.ticket.place.segments[job.segment];
            let needed = segment.needed.saturating_sub(job.begin).min(job.chunk.len());
            let offset = segment.offset + job.begin as u64;
            let result = read_full(&*self.reader, segment.shard, &mut job.chunk, offset, needed);
            let Some(shared) = shared.upgrade() else { return };
            let Ended::Now(buffer, error) = job.ticket.put(job.number, job.chunk, result) else { continue };
            let filled = Filled::new(buffer, shared.pool.clone());
            shared.finish(&job.ticket, error.map_or(Ok(filled), Err));
            // Only now: who sees that nothing is being read also sees what has come.
            shared.pool.ended();
        }
    }

    /// Puts the reads of a ticket into the queues.
    pub(super) fn issue(&self, ticket: &Arc<Ticket>, buffer: BytesMut) {
        for (number, chunk, segment, begin) in ticket.cut(buffer, self.reader.alignment()) {
            let queue = &self.queues[self.reader.drive(ticket.place.segments[segment].shard)];
            let job = Job { ticket: ticket.clone(), number, chunk, segment, begin };
            let mut jobs = queue.jobs();
            match ticket.urgency {
                Urgency::Demand => jobs.demands.push_back(job),
                Urgency::Guess => jobs.guesses.push_back(job),
            }
            drop(jobs);
            queue.more.notify_one();
        }
    }

    /// Somebody asked for what was a guess.
    pub(super) fn hurry(&self, ticket: &Arc<Ticket>) {
        if ticket.urgency == Urgency::Demand {
            return;
        }
        for queue in &self.queues {
            let mut jobs = queue.jobs();
            let all = std::mem::take(&mut jobs.guesses);
            let (asked, rest) = all.into_iter().partition(|job| Arc::ptr_eq(&job.ticket, ticket));
            jobs.guesses = rest;
            let asked: VecDeque<Job> = asked;
            jobs.demands.extend(asked);
        }
    }

    /// Ends the threads after what they are reading.
    pub(super) fn close(&self) {
        for queue in &self.queues {
            let mut jobs = queue.jobs();
            jobs.closed = true;
            let left: Vec<Job> = jobs.demands.drain(..).collect();
            jobs.guesses.clear();
            drop(jobs);
            queue.more.notify_all();
            left.iter().for_each(|job| job.ticket.complete(&Err(SlotReadError::Closed)));
        }
    }
}
