//! Threads that read: a queue for each drive, so that none waits for another.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;

use super::balance::{order, shares};
use super::pool::Filled;
use super::reader::{Reader, SlotReadError, count, read_full};
use super::ticket::{Ended, Ticket};
use super::{DriveCounters, Shared};

/// Reads in flight on a drive for what nobody asked for: a demand that comes waits for little.
const WARMING: usize = 2;
/// Bytes that a drive has read before its own rate counts instead of one that was measured before.
const KNOWN_BYTES: u64 = 1 << 30;

/// Bytes of a reading thread's stack. It holds no buffer.
pub(super) const STACK_BYTES: usize = 256 << 10;

/// Whether somebody waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Somebody does.
    Demand,
    /// Somebody may: it is read when nothing else is to be.
    Guess,
    /// It was used in an earlier run: it is read when there is nothing to guess either.
    Warm,
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
    /// What its reads should be multiples of.
    align: usize,
    /// The drive of each shard.
    of_shard: Vec<usize>,
    queues: Vec<Queue>,
    /// Bytes a second of each drive, or any numbers in their proportion.
    rates: Vec<f64>,
    /// Reads in flight of each.
    shares: Vec<usize>,
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
    warm: VecDeque<Job>,
    closed: bool,
    /// Being read, and of those the ones that nobody asked for.
    reading: usize,
    warming: usize,
    /// When it began to read, if it does.
    since: Option<Instant>,
    counters: DriveCounters,
}

impl Jobs {
    /// The most urgent, and whether it is one that nobody asked for.
    fn pop(&mut self) -> Option<(Job, bool)> {
        let urgent = self.demands.pop_front().or_else(|| self.guesses.pop_front());
        let (job, is_warm) = match urgent {
            Some(job) => (job, false),
            None if self.warming < WARMING => (self.warm.pop_front()?, true),
            None => return None,
        };
        job.ticket.begin();
        self.reading += 1;
        self.warming += usize::from(is_warm);
        self.since.get_or_insert_with(Instant::now);
        self.counters.reads += 1;
        self.counters.depth_sum += self.reading as u64;
        self.counters.depth_max = self.counters.depth_max.max(self.reading as u64);
        Some((job, is_warm))
    }

    fn ended(&mut self, bytes: usize, is_warm: bool) {
        self.reading -= 1;
        self.warming -= usize::from(is_warm);
        self.counters.bytes += bytes as u64;
        if self.reading == 0
            && let Some(since) = self.since.take()
        {
            self.counters.busy_ns += since.elapsed().as_nanos() as u64;
        }
    }

    fn counters(&self) -> DriveCounters {
        let now = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        DriveCounters { busy_ns: self.counters.busy_ns + now.as_nanos() as u64, ..self.counters }
    }
}

impl Queue {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(Job, bool)> {
        let mut jobs = self.jobs();
        loop {
            if jobs.closed {
                return None;
            }
            if let Some(next) = jobs.pop() {
                return Some(next);
            }
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drives {
    /// The drives of a reader, of which each shard is on one, with `each` reads in flight on average. `rates` were
    /// measured; without them all are taken for equal.
    pub(super) fn new(reader: Arc<dyn Reader>, of_shard: Vec<usize>, rates: &[f64], each: usize) -> Self {
        let drives = count(&of_shard);
        let known = rates.len() == drives && rates.iter().all(|rate| rate.is_finite() && *rate > 0.0);
        let rates = if known { rates.to_vec() } else { vec![1.0; drives] };
        let (shares, align) = (shares(&rates, each), reader.alignment().max(1));
        let queues = (0..drives).map(|_| Queue::default()).collect();
        Self { reader, align, of_shard, queues, rates, shares }
    }

    /// Number of drives.
    pub(super) fn len(&self) -> usize {
        self.queues.len()
    }

    /// Reads in flight on each drive.
    pub(super) fn shares(&self) -> &[usize] {
        &self.shares
    }

    /// What each drive has read.
    pub(super) fn counters(&self) -> Vec<DriveCounters> {
        self.queues.iter().map(|queue| queue.jobs().counters()).collect()
    }

    /// Starts the threads of each drive. They end when the drives are closed.
    pub(super) fn start(shared: &Arc<Shared>) -> io::Result<()> {
        for (drive, &threads) in shared.drives.shares.iter().enumerate() {
            for _ in 0..threads {
                let (drives, shared) = (shared.drives.clone(), Arc::downgrade(shared));
                thread::Builder::new()
                    .name(format!("experts-{drive}"))
                    .stack_size(STACK_BYTES)
                    .spawn(move || drives.work(drive, &shared))?;
            }
        }
        Ok(())
    }

    fn work(&self, drive: usize, shared: &Weak<Shared>) {
        let queue = &self.queues[drive];
        while let Some((mut job, is_warm)) = queue.next() {
            let segment = &job.ticket.place.segments[job.segment];
            let needed = segment.needed.saturating_sub(job.begin).min(job.chunk.len());
            let offset = segment.offset + job.begin as u64;
            let bytes = job.chunk.len();
            let key = job.ticket.key;
            let span = tracing::debug_span!("read", layer = key.layer, expert = key.id, drive, bytes);
            let result =
                span.in_scope(|| read_full(&*self.reader, segment.shard, &mut job.chunk, offset, needed));
            drop(span);
            queue.jobs().ended(bytes, is_warm);
            let Some(shared) = shared.upgrade() else { return };
            let Ended::Now(buffer, error) = job.ticket.put(job.number, job.chunk, result) else { continue };
            let filled = Filled::new(buffer, shared.pool.clone());
            shared.finish(&job.ticket, error.map_or(Ok(filled), Err));
            // Only now: who sees that nothing is being read also sees what has come.
            shared.pool.ended();
            shared.warm_more();
        }
    }

    /// Issues the reads of a layer so that drives end together. The fewer are left of a drive, the more pieces each
    /// has: it has enough to do until the last.
    pub(super) fn issue_all(&self, tickets: Vec<Arc<Ticket>>, mut issue: impl FnMut(Arc<Ticket>)) {
        let drive = |ticket: &Ticket| ticket.place.segments.first().map_or(0, |s| self.of_shard[s.shard]);
        let reads: Vec<_> = tickets.iter().map(|t| (drive(t), t.place.bytes() as u64)).collect();
        let order = if self.len() == 1 { (0..tickets.len()).collect() } else { order(&reads, &self.rates()) };
        let mut left = vec![0_usize; self.len()];
        reads.iter().for_each(|&(drive, _)| left[drive] += 1);
        let mut tickets: Vec<Option<Arc<Ticket>>> = tickets.into_iter().map(Some).collect();
        for at in order {
            let Some(ticket) = tickets[at].take() else { continue };
            let drive = reads[at].0;
            ticket.set_pieces(self.shares[drive].div_ceil(left[drive].max(1)));
            left[drive] -= 1;
            issue(ticket);
        }
    }

    /// Bytes a second of each drive: what it did so far, when all have done enough.
    fn rates(&self) -> Vec<f64> {
        let done = self.counters();
        if done.iter().all(|drive| drive.bytes >= KNOWN_BYTES) {
            return done.iter().map(DriveCounters::rate).collect();
        }
        self.rates.clone()
    }

    /// Puts the reads of a ticket into the queues.
    pub(super) fn issue(&self, ticket: &Arc<Ticket>, buffer: BytesMut) {
        for (number, chunk, segment, begin) in ticket.cut(buffer, self.align) {
            let queue = &self.queues[self.of_shard[ticket.place.segments[segment].shard]];
            let job = Job { ticket: ticket.clone(), number, chunk, segment, begin };
            let mut jobs = queue.jobs();
            match ticket.urgency {
                Urgency::Demand => jobs.demands.push_back(job),
                Urgency::Guess => jobs.guesses.push_back(job),
                Urgency::Warm => jobs.warm.push_back(job),
            }
            drop(jobs);
            queue.more.notify_one();
        }
    }

    /// Takes what no thread has begun to read of a ticket out of the queues. If nothing of it has begun by then
    /// ([`Ticket::has_begun`]), nothing ever will.
    pub(super) fn take(&self, ticket: &Arc<Ticket>) -> Vec<Job> {
        let mut taken = Vec::new();
        for queue in &self.queues {
            let mut jobs = queue.jobs();
            let Jobs { demands, guesses, warm, .. } = &mut *jobs;
            for waiting in [demands, guesses, warm] {
                if waiting.iter().any(|job| Arc::ptr_eq(&job.ticket, ticket)) {
                    let (of_it, rest): (VecDeque<Job>, _) =
                        waiting.drain(..).partition(|job| Arc::ptr_eq(&job.ticket, ticket));
                    taken.extend(of_it);
                    *waiting = rest;
                }
            }
        }
        taken
    }

    /// Puts back what was taken, as what somebody asks for.
    pub(super) fn demand(&self, taken: Vec<Job>) {
        for job in taken {
            let queue = &self.queues[self.of_shard[job.ticket.place.segments[job.segment].shard]];
            queue.jobs().demands.push_back(job);
            queue.more.notify_one();
        }
    }

    /// Gives up what was taken. Returns its bytes, and the buffer unless other pieces are still being read.
    pub(super) fn give_up(taken: Vec<Job>) -> (usize, Option<BytesMut>) {
        let (mut bytes, mut buffer) = (0, None);
        for Job { ticket, number, chunk, .. } in taken {
            bytes += chunk.len();
            if let Ended::Now(whole, _) = ticket.put(number, chunk, Err(SlotReadError::Abandoned)) {
                buffer = Some(whole);
            }
        }
        (bytes, buffer)
    }

    /// Ends the threads after what they are reading.
    pub(super) fn close(&self) {
        for queue in &self.queues {
            let mut jobs = queue.jobs();
            jobs.closed = true;
            let left: Vec<Job> = jobs.demands.drain(..).collect();
            jobs.guesses.clear();
            jobs.warm.clear();
            drop(jobs);
            queue.more.notify_all();
            left.iter().for_each(|job| job.ticket.complete(&Err(SlotReadError::Closed)));
        }
    }
}
