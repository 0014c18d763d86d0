//! The least recently used expert of the layer leaves, unless the layer is using it.

use super::{Policy, Verdict, Visit, spread};
use crate::ExpertId;

/// Slots per layer, batch-aware. For comparison.
#[derive(Debug)]
pub struct LayerLru {
    slots: usize,
    clock: u64,
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    slots: usize,
    /// With the time of their last use.
    residents: Vec<(ExpertId, u64)>,
}

impl LayerLru {
    /// `slots` spread over `layers`.
    pub fn new(slots: usize, layers: usize) -> Self {
        let layers = spread(slots, layers).map(|slots| Layer { slots, residents: Vec::new() }).collect();
        Self { slots, clock: 0, layers }
    }
}

impl Policy for LayerLru {
    fn visit(&mut self, visit: Visit<'_>, verdicts: &mut Vec<Verdict>) {
        verdicts.clear();
        let layer = &mut self.layers[visit.layer];
        // Of a set that is used together the best rank counts as the most recent.
        let newest = self.clock + visit.experts.len() as u64;
        self.clock = newest;
        for (rank, &id) in visit.experts.iter().enumerate() {
            let found = layer.residents.iter_mut().find(|(resident, _)| *resident == id);
            verdicts.push(if found.is_some() { Verdict::Hit } else { Verdict::Bypassed });
            if let Some((_, used)) = found {
                *used = newest - rank as u64;
            }
        }
        let begin = newest - visit.experts.len() as u64;
        for (rank, (&id, verdict)) in visit.experts.iter().zip(verdicts).enumerate() {
            if *verdict == Verdict::Hit {
                continue;
            }
            let used = newest - rank as u64;
            if layer.residents.len() < layer.slots {
                layer.residents.push((id, used));
                *verdict = Verdict::Admitted { evicted: None };
                continue;
            }
            let oldest = layer.residents.iter_mut().min_by_key(|(_, used)| *used);
            match oldest {
                Some(slot) if slot.1 <= begin => {
                    *verdict = Verdict::Admitted { evicted: Some((visit.layer, slot.0)) };
                    *slot = (id, used);
                }
                // Only members remain.
                _ => break,
            }
        }
    }

    fn forget(&mut self, layer: usize, expert: ExpertId) {
        self.layers[layer].residents.retain(|&(id, _)| id != expert);
    }

    fn admit_free(&mut self, layer: usize, expert: ExpertId) -> bool {
        let layer = &mut self.layers[layer];
        let is_new = layer.residents.iter().all(|(id, _)| *id != expert);
        let admitted = is_new && layer.residents.len() < layer.slots;
        if admitted {
            layer.residents.push((expert, 0));
        }
        admitted
    }

    fn slots(&self) -> usize {
        self.slots
    }
}
