//! Experts as they come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::Shared;
use super::pool::Filled;
use super::reader::SlotReadError;
use super::ticket::{Delivery, Key, Ticket};
use crate::{Arrive, Expert, ExpertError};

/// How long to wait before looking whether something else has to happen first.
const PATIENCE: Duration = Duration::from_millis(2);

/// What a fetch has still to hand over.
pub(super) struct Pending<'a> {
    shared: &'a Shared,
    /// Errors that are known already.
    pub(super) ready: VecDeque<Result<Expert, ExpertError>>,
    /// In memory already.
    pub(super) hits: VecDeque<(Key, Arc<Filled>)>,
    /// Deliveries to come.
    pub(super) waiting: usize,
    pub(super) abandoned: Arc<AtomicBool>,
    /// What is read for this request alone.
    pub(super) bypassing: Vec<Arc<Ticket>>,
    receiver: Receiver<Delivery>,
    /// From the request to the last expert.
    pub(super) span: tracing::Span,
}

impl<'a> Pending<'a> {
    pub(super) fn new(shared: &'a Shared, receiver: Receiver<Delivery>, span: tracing::Span) -> Self {
        Self {
            shared,
            ready: VecDeque::new(),
            hits: VecDeque::new(),
            waiting: 0,
            abandoned: Arc::default(),
            bypassing: Vec::new(),
            receiver,
            span,
        }
    }

    fn wait(&self) -> Result<Delivery, RecvTimeoutError> {
        if let Ok(delivery) = self.receiver.try_recv() {
            return Ok(delivery);
        }
        // Reads may be waiting for the buffers of work that is complete by now. One that is only slow needs none.
        let reclaim = || while self.shared.pool.has_parked() && self.shared.reclaim() {};
        reclaim();
        let begin = Instant::now();
        let _waiting = tracing::debug_span!(parent: &self.span, "wait").entered();
        let delivery = loop {
            match self.receiver.recv_timeout(PATIENCE) {
                Err(RecvTimeoutError::Timeout) => {
                    reclaim();
                    // Work in flight ends by itself, and its buffers come back; those of a caller may not.
                    if self.shared.pool.is_idle() && !self.shared.awaits_work_in_flight() {
                        if let Ok(delivery) = self.receiver.try_recv() {
                            break Ok(delivery);
                        }
                        // What somebody waits for comes before what nobody has asked for.
                        if !self.shared.give_up_guesses()
                            && let Some((ticket, error)) = self.shared.pool.relieve()
                        {
                            self.shared.finish(&ticket, Err(error));
                        }
                    }
                }
                delivery => break delivery,
            }
        };
        self.shared.wait_ns.fetch_add(begin.elapsed().as_nanos() as u64, Relaxed);
        delivery
    }
}

impl Pending<'_> {
    /// What is in memory, hits first.
    fn here(&mut self) -> Option<Result<Expert, ExpertError>> {
        if let Some((key, filled)) = self.hits.pop_front() {
            return Some(self.shared.lease(key, &filled));
        }
        self.ready.pop_front()
    }

    fn open(&self, (key, result): Delivery) -> Result<Expert, ExpertError> {
        match result {
            Ok(filled) => self.shared.lease(key, &filled),
            Err(error) => Err(key.unreadable(error)),
        }
    }
}

impl Iterator for Pending<'_> {
    type Item = Result<Expert, ExpertError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(here) = self.here() {
            return Some(here);
        }
        self.waiting = self.waiting.checked_sub(1)?;
        let Ok(delivery) = self.wait() else {
            self.waiting = 0;
            return Some(Err(ExpertError::Stopped { source: Box::new(SlotReadError::Closed) }));
        };
        Some(self.open(delivery))
    }
}

impl Arrive for Pending<'_> {
    fn next_ready(&mut self) -> Option<Self::Item> {
        if let Some(here) = self.here() {
            return Some(here);
        }
        let delivery = self.receiver.try_recv().ok()?;
        self.waiting -= 1;
        Some(self.open(delivery))
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.abandoned.store(true, Relaxed);
        if self.waiting > 0 {
            for ticket in &self.bypassing {
                self.shared.give_up(self.shared.drives.take(ticket));
            }
        }
    }
}
