//! One plan for all memory, made before anything large is allocated.

use std::fmt;

use crate::memory::{Bound, Machine};
use crate::trace::{Geometry, RELEASED};

/// What a run needs beside routed experts, in bytes. Mapped weights count like those that were read: if the page
/// cache gives them up, every token reads them again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Weights outside the routed experts.
    pub pinned: u64,
    /// States of all sequences at their full length.
    pub state: u64,
    /// What is computed at once.
    pub activations: u64,
}

impl Needs {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.pinned.saturating_add(self.state).saturating_add(self.activations)
    }
}

/// The routed experts of a model, as a store keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    /// Layers, experts of a layer, experts of a token.
    pub geometry: Geometry,
    /// Bytes of one in memory.
    pub slot_bytes: u64,
    /// Those on their way at most ([`crate::SlabOptions::moving`]), for which a store has room beside all that stay.
    pub moving: u64,
}

impl ExpertSizes {
    /// Bytes of the smallest store that finishes any prompt: what one token uses of a layer.
    pub fn least(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.geometry.per_token as u64)
    }

    /// Bytes of the largest store that has a use for them: all experts, and those on their way.
    pub fn most(&self) -> u64 {
        let all = (self.geometry.layers * self.geometry.experts) as u64;
        self.slot_bytes.saturating_mul(all.saturating_add(self.moving))
    }

    /// Bytes of the experts that one token uses.
    pub fn working_set(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.geometry.working_set() as u64)
    }
}

/// Share of the room that is left to what nobody counts: the program, the allocator, threads, other programs.
const RESERVE_SHARE: u64 = 20;
/// Bytes of that, at least and at most.
const RESERVE: std::ops::RangeInclusive<u64> = 4 << 20..=4 << 30;

/// Who gets how much.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Bytes that there are for all of it.
    pub room: u64,
    /// What bounds them.
    pub bound_by: Bound,
    /// What comes first.
    pub needs: Needs,
    /// Left alone.
    pub reserve: u64,
    /// The expert store's budget.
    pub experts: u64,
    /// Whether the budget was asked for, and not taken from what is left.
    pub asked: bool,
    /// What the budget is for.
    pub sizes: ExpertSizes,
    /// Bytes that are not there: the plan would not fit.
    pub missing: u64,
}

impl MemoryPlan {
    /// Gives the experts what the needs and the reserve leave, or what was asked for. `missing` tells whether there is
    /// as much.
    pub fn new(machine: &Machine, needs: Needs, sizes: ExpertSizes, asked: Option<u64>) -> Self {
        Self::divide(machine, needs, sizes, asked, asked.is_some())
    }

    /// Gives the experts so many bytes though nobody asked for them: where it is not known what the machine has.
    pub fn assuming(machine: &Machine, needs: Needs, sizes: ExpertSizes, experts: u64) -> Self {
        Self::divide(machine, needs, sizes, Some(experts), false)
    }

    fn divide(machine: &Machine, needs: Needs, sizes: ExpertSizes, budget: Option<u64>, asked: bool) -> Self {
        let (room, bound_by) = machine.room();
        let reserve = (room / RESERVE_SHARE).clamp(*RESERVE.start(), *RESERVE.end());
        let first = needs.total().saturating_add(reserve);
        let left = room.saturating_sub(first);
        let experts = budget.unwrap_or_else(|| left.min(sizes.most()).max(sizes.least()));
        let missing = first.saturating_add(experts).saturating_sub(room);
        Self { room, bound_by: bound_by.clone(), needs, reserve, experts, asked, sizes, missing }
    }

    /// Bytes of everything but the reserve: what a run takes at its peak, beside what it had when the plan was made.
    pub fn total(&self) -> u64 {
        self.needs.total().saturating_add(self.experts)
    }

    /// Bytes that the needs and the reserve leave.
    pub fn left(&self) -> u64 {
        self.room.saturating_sub(self.needs.total()).saturating_sub(self.reserve)
    }

    /// Experts that the budget has room for, and no more than there are.
    pub fn slots(&self) -> u64 {
        let Geometry { layers, experts, .. } = self.sizes.geometry;
        self.buffers().min((layers * experts) as u64)
    }

    /// Buffers that the budget has room for, for experts that stay and for those on their way.
    pub(crate) fn buffers(&self) -> u64 {
        self.experts / self.sizes.slot_bytes.max(1)
    }

    /// Slots of a layer.
    pub fn slots_per_layer(&self) -> f64 {
        self.slots() as f64 / self.sizes.geometry.layers.max(1) as f64
    }

    /// The budget in working sets: 1 is what one token uses.
    pub fn working_sets(&self) -> f64 {
        self.slots() as f64 / self.sizes.geometry.working_set().max(1) as f64
    }

    /// Share of a token's experts that will be found in memory; `None` if nothing is known of such a model.
    pub fn expected_hit_rate(&self) -> Option<f64> {
        expected_hit_rate(self.sizes.geometry, self.working_sets())
    }

    /// A store of so many slots in words: `1,145 slots, ...`.
    pub fn describe_slots(&self, slots: u64) -> String {
        let geometry = self.sizes.geometry;
        let of_token = slots as f64 / geometry.working_set().max(1) as f64;
        let a_layer = slots as f64 / geometry.layers.max(1) as f64;
        let hits = expected_hit_rate(geometry, of_token)
            .map_or_else(String::new, |rate| format!(", expected hit rate {rate:.2}"));
        let slots = grouped(slots);
        format!("{slots} slots, {a_layer:.1} a layer, {of_token:.2} of a token's working set{hits}")
    }

    /// The memory table, with what the experts' bytes are used for in these words.
    pub fn table(&self, experts: &str) -> String {
        let mut rows = format!("{:<22}{:>12}  {}\n", "memory", gigabytes(self.room), self.bound_by);
        let mut row = |name: &str, bytes: u64, words: &str| {
            let row = format!("  {name:<20}{:>12}  {words}", gigabytes(bytes));
            rows.extend([row.trim_end(), "\n"]);
        };
        row("pinned weights", self.needs.pinned, "");
        row("sequence state", self.needs.state, "");
        row("activations", self.needs.activations, "");
        row("reserve", self.reserve, "");
        row("experts", self.experts, experts);
        if self.missing > 0 {
            row("MISSING", self.missing, "");
        }
        rows
    }
}

/// The memory table.
impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(&self.describe_slots(self.slots())))
    }
}

/// Hit rates of [`crate::policy::Retention`] by capacity in working sets, on varied text (`docs/expert-store.md` 3).
pub const HIT_RATES: [(f64, f64); 10] = [
    (0.0, 0.0),
    (0.25, 0.132),
    (0.5, 0.228),
    (1.0, 0.364),
    (1.5, 0.447),
    (2.0, 0.499),
    (4.0, 0.616),
    (5.33, 0.667),
    (8.0, 0.742),
    // Everything.
    (56.0, 1.0),
];

/// What a store of `working_sets` will find in memory, between the points of [`HIT_RATES`]. Known for layers of 896
/// experts of which a token uses 16, whatever their number; for others only if everything fits.
pub fn expected_hit_rate(geometry: Geometry, working_sets: f64) -> Option<f64> {
    if working_sets * geometry.per_token as f64 >= geometry.experts as f64 {
        return Some(1.0);
    }
    if (geometry.experts, geometry.per_token) != (RELEASED.experts, RELEASED.per_token) {
        return None;
    }
    let after = HIT_RATES.iter().position(|(capacity, _)| *capacity > working_sets)?;
    let [(x0, y0), (x1, y1)] = [HIT_RATES[after.saturating_sub(1)], HIT_RATES[after.max(1)]];
    Some(y0 + (y1 - y0) * (working_sets.max(0.0) - x0) / (x1 - x0))
}

/// In decimal units, as drives are sold.
pub fn gigabytes(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    match units.iter().find(|(_, size)| bytes as f64 >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", bytes as f64 / size),
        None => format!("{bytes} bytes"),
    }
}

/// Bytes a second as people write them: `7GB/s`, or only `7GB`.
///
/// # Errors
/// What was expected instead.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    parse_bytes(text.strip_suffix("/s").unwrap_or(text))
}

/// Bytes as people write them: `17`, `8GiB`, `7.1 GB`.
///
/// # Errors
/// What was expected instead.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim());
    let number: f64 = number
        .parse()
        .map_err(|_| format!("expected a number without sign or exponent, as in 8GiB, found {text:?}"))?;
    let scale = match unit {
        "" | "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        "GiB" => 1_073_741_824.0,
        "TiB" => 1_099_511_627_776.0,
        _ => {
            return Err(format!(
                "expected kB, MB, GB, TB, KiB, MiB, GiB or TiB after the number, found {unit:?}"
            ));
        }
    };
    let bytes = number * scale;
    if bytes < 1e18 { Ok(bytes as u64) } else { Err("more bytes than any machine has".to_owned()) }
}

/// `1,145`
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
