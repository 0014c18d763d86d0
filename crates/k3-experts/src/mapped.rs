//! The simplest backend: experts are slices of mapped shards, and the page cache decides what stays.

mod hints;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use k3_format::Checkpoint;

use crate::{
    Arrivals, Completion, Counters, Expert, ExpertError, ExpertId, ExpertRequest, ExpertStore, Ready,
    Retirement,
};

use hints::{Hints, major_faults};

/// Experts that are read ahead of the one handed over. A drive is busy with 4 to 8 of them in flight.
const READ_AHEAD: usize = 8;

/// Hands out experts as slices of the mapped shards, without a copy.
///
/// The kernel is told of the next few experts of a request, so that it reads ahead of the arithmetic and not
/// ahead of the memory: a prefill chunk can ask for a whole layer, which is more than many machines have. It is not told
/// again of what it was told before while memory keeps everything. Which experts were in the page cache the kernel does
/// not say: [`Counters::hits`] and [`Counters::misses`] stay 0.
#[derive(Debug)]
pub struct MappedStore {
    checkpoint: Arc<Checkpoint>,
    requested: AtomicU64,
    bytes: AtomicU64,
    retirement: Mutex<Retirement<Expert>>,
    hints: Hints,
}

impl MappedStore {
    /// A store over the experts of `checkpoint`. Touches none of them.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        Self {
            checkpoint,
            requested: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            retirement: Mutex::default(),
            hints: Hints::new(major_faults),
        }
    }

    fn expert(&self, layer: usize, id: ExpertId) -> Result<Expert, ExpertError> {
        let found = self.checkpoint.expert(layer, id).map_err(|source| ExpertError::Read {
            layer,
            expert: id,
            source: Box::new(source),
        })?;
        let expert = Expert { id, w1: found.w1, w2: found.w2, w3: found.w3 };
        let bytes = [&expert.w1, &expert.w2, &expert.w3].iter().map(|m| m.size_bytes() as u64).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(expert)
    }
}

impl ExpertStore for MappedStore {
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a> {
        let ids = request.experts.to_vec();
        let asked: Vec<_> = request.checked(&self.checkpoint).collect();
        self.requested.fetch_add(ids.len() as u64, Ordering::Relaxed);
        let layer = request.layer;
        let hinted = self.hints.of(layer, &ids);
        let hint = move |id, is_hinted| {
            if is_hinted {
                self.checkpoint.will_need_expert(layer, id);
            }
        };
        ids.iter().zip(&hinted).take(READ_AHEAD).for_each(|(&id, &is_hinted)| hint(id, is_hinted));
        Box::new(Ready(asked.into_iter().enumerate().map(move |(i, asked)| {
            if let Some(&ahead) = ids.get(i + READ_AHEAD) {
                hint(ahead, hinted[i + READ_AHEAD]);
            }
            self.expert(layer, asked?)
        })))
    }

    fn prefetch(&self, layer: usize, experts: &[ExpertId]) {
        for &id in experts {
            self.checkpoint.will_need_expert(layer, id);
        }
    }

    fn retire(&self, expert: Expert, after: Box<dyn Completion>) {
        let mut retirement = self.retirement.lock().unwrap_or_else(PoisonError::into_inner);
        retirement.push(expert, after);
        // As many leave as come, as far as they are complete.
        let _ = (retirement.reclaim(), retirement.reclaim());
    }

    fn counters(&self) -> Counters {
        Counters {
            requested: self.requested.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            ..Counters::default()
        }
    }
}
