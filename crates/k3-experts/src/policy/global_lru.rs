//! The least recently used expert of all layers leaves.

use std::collections::{BTreeMap, HashMap};

use super::{Policy, Verdict, Visit};
use crate::ExpertId;

/// One list for all layers. For comparison: below the working set of one token it hits nothing, by construction.
#[derive(Debug)]
pub struct GlobalLru {
    slots: usize,
    clock: u64,
    used: HashMap<(usize, ExpertId), u64>,
    by_age: BTreeMap<u64, (usize, ExpertId)>,
}

impl GlobalLru {
    /// With so many slots.
    pub fn new(slots: usize) -> Self {
        Self { slots, clock: 0, used: HashMap::new(), by_age: BTreeMap::new() }
    }
}

impl Policy for GlobalLru {
    fn visit(&mut self, visit: Visit<'_>, verdicts: &mut Vec<Verdict>) {
        verdicts.clear();
        for &id in visit.experts {
            let key = (visit.layer, id);
            self.clock += 1;
            if let Some(used) = self.used.get_mut(&key) {
                self.by_age.remove(used);
                *used = self.clock;
                self.by_age.insert(self.clock, key);
                verdicts.push(Verdict::Hit);
                continue;
            }
            if self.slots == 0 {
                verdicts.push(Verdict::Bypassed);
                continue;
            }
            let full = self.used.len() == self.slots;
            let evicted = if full { self.by_age.pop_first().map(|(_, oldest)| oldest) } else { None };
            if let Some(oldest) = evicted {
                self.used.remove(&oldest);
            }
            self.used.insert(key, self.clock);
            self.by_age.insert(self.clock, key);
            verdicts.push(Verdict::Admitted { evicted });
        }
    }

    fn forget(&mut self, layer: usize, expert: ExpertId) {
        if let Some(used) = self.used.remove(&(layer, expert)) {
            self.by_age.remove(&used);
        }
    }

    fn slots(&self) -> usize {
        self.slots
    }
}
