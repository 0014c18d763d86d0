//! The 256 control slots after the ranks, `docs/checkpoint.md` 8.

use std::path::Path;

use hashbrown::HashMap;

use crate::{Error, error::ControlProblem, files::NamedControl};

/// Slots after the ranks, whether named or not.
pub(crate) const SLOTS: usize = 256;

/// Spellings and ids of the control tokens.
pub(crate) struct Controls {
    /// Id of the first slot: the number of ranks.
    first: u32,
    slots: Vec<Slot>,
    ids: HashMap<String, u32>,
}

struct Slot {
    spelling: String,
    special: bool,
}

impl Controls {
    /// Puts the named ones into their slots; slot `i` without a name is spelled `<|reserved_token_{i}|>`.
    pub(crate) fn new(path: &Path, first: u32, named: Vec<NamedControl>) -> Result<Self, Error> {
        let error = |id, problem| Error::Control { path: path.to_owned(), id, problem };
        let last = first + SLOTS as u32 - 1;
        let mut slots: Vec<Option<Slot>> = (0..SLOTS).map(|_| None).collect();
        for NamedControl { id, spelling, special } in named {
            if !(first..=last).contains(&id) {
                return Err(error(id, ControlProblem::OutOfRange { first, last }));
            }
            if spelling.is_empty() {
                return Err(error(id, ControlProblem::EmptySpelling));
            }
            let slot = &mut slots[(id - first) as usize];
            if slot.is_some() {
                return Err(error(id, ControlProblem::DuplicateId));
            }
            *slot = Some(Slot { spelling, special });
        }
        let slots: Vec<Slot> = (first..)
            .zip(slots)
            .map(|(id, slot)| {
                slot.unwrap_or_else(|| Slot { spelling: format!("<|reserved_token_{id}|>"), special: true })
            })
            .collect();
        let mut ids = HashMap::with_capacity(SLOTS);
        for (id, slot) in (first..).zip(&slots) {
            if let Some(other) = ids.insert(slot.spelling.clone(), id) {
                let spelling = slot.spelling.clone();
                return Err(error(id, ControlProblem::DuplicateSpelling { spelling, other }));
            }
        }
        Ok(Self { first, slots, ids })
    }

    pub(crate) fn id(&self, spelling: &str) -> Option<u32> {
        self.ids.get(spelling).copied()
    }

    pub(crate) fn spelling(&self, id: u32) -> Option<&str> {
        self.slot(id).map(|slot| slot.spelling.as_str())
    }

    /// Whether the checkpoint flags it "special"; slots without a name are.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.slot(id).is_some_and(|slot| slot.special)
    }

    fn slot(&self, id: u32) -> Option<&Slot> {
        self.slots.get(id.checked_sub(self.first)? as usize)
    }
}
