//! The memory plan as a function of what the machine has and the model needs.

use k3_experts::memory::{Bound, Limit, Machine};
use k3_experts::plan::{
    ExpertSizes, HIT_RATES, MemoryPlan, Needs, expected_hit_rate, parse_bytes, parse_rate,
};
use k3_experts::trace::{Geometry, RELEASED};

const GB: u64 = 1_000_000_000;
const SLOT: u64 = 17_563_648;
const SIZES: ExpertSizes = ExpertSizes { geometry: RELEASED, slot_bytes: SLOT, moving: 14 };

/// The released model with weights in INT4.
const NEEDS: Needs = Needs { pinned: 35 * GB, state: GB, activations: GB / 2 };

#[test]
fn experts_get_what_is_left() {
    let check = |ram: u64, experts: u64, missing: u64| {
        let plan = MemoryPlan::new(&Machine::with(ram * GB), NEEDS, SIZES, None);
        assert_eq!((plan.experts, plan.missing), (experts, missing), "{ram} GB: {plan}");
        if missing == 0 {
            assert_eq!(plan.total() + plan.reserve, plan.room);
        }
    };
    check(64, 64 * GB - 36 * GB - GB / 2 - 64 * GB / 20, 0);
    // From 86 GB on the reserve does not grow.
    check(128, 128 * GB - 36 * GB - GB / 2 - (4 << 30), 0);
    let least = 16 * SLOT;
    check(38, least, 38 * GB / 20 + least - 3 * GB / 2);
    check(16, least, 16 * GB / 20 + least + 36 * GB + GB / 2 - 16 * GB);
}

#[test]
fn no_more_than_all_experts() {
    let geometry = Geometry { layers: 2, experts: 8, per_token: 2 };
    let check = |moving: u64| {
        let sizes = ExpertSizes { geometry, slot_bytes: 1000, moving };
        let plan = MemoryPlan::new(&Machine::with(GB), Needs::default(), sizes, None);
        assert_eq!(plan.experts, (16 + moving) * 1000);
        assert_eq!(plan.expected_hit_rate(), Some(1.0));
    };
    check(14);
    check(256 * 4 + 8);
}

/// Groups of 2, 4 and 8 GiB on a machine of 64 GB, and a model of 1.5 GB beside its experts.
#[test]
fn a_group_bounds_the_plan() {
    let needs = Needs { pinned: GB, state: GB / 4, activations: GB / 4 };
    let check = |gib: u64, used: u64| {
        let mut machine = Machine::with(64 * GB);
        let bound = Bound::ControlGroup { version: 2, place: "/sys/fs/cgroup/a".into() };
        machine.limits.push(Limit { bound: bound.clone(), bytes: gib << 30, used });
        let plan = MemoryPlan::new(&machine, needs, SIZES, None);
        let room = (gib << 30) - used;
        assert_eq!(plan.experts, room - room / 20 - needs.total(), "{gib} GiB: {plan}");
        assert_eq!((plan.missing, &plan.bound_by), (0, &bound));
        assert!(plan.to_string().contains("  control group v2 /sys/fs/cgroup/a\n"), "{plan}");
        assert!(plan.total() <= gib << 30);
    };
    check(2, 0);
    check(4, 0);
    check(8, 0);
    check(8, 2 * GB);
}

#[test]
fn an_explicit_budget_is_kept_and_what_is_missing_is_told() {
    let plan = |asked| MemoryPlan::new(&Machine::with(64 * GB), NEEDS, SIZES, Some(asked));
    assert_eq!((plan(10 * GB).experts, plan(10 * GB).missing), (10 * GB, 0));
    let over = plan(40 * GB);
    assert_eq!(over.experts, 40 * GB);
    assert_eq!(over.missing, 36 * GB + GB / 2 + 64 * GB / 20 + 40 * GB - 64 * GB);
    assert!(over.to_string().contains("MISSING"), "{over}");
    // What is assumed is divided alike, and nobody asked for it.
    let mut assumed = MemoryPlan::assuming(&Machine::with(64 * GB), NEEDS, SIZES, 40 * GB);
    assert!(over.asked && !assumed.asked);
    assumed.asked = true;
    assert_eq!(assumed, over);
    // Nothing overflows.
    assert!(plan(u64::MAX).missing > u64::MAX / 2);
}

#[test]
fn the_table_has_every_figure() {
    let table = MemoryPlan::new(&Machine::with(64 * GB), NEEDS, SIZES, None).to_string();
    for expected in [
        "memory                    64.00 GB  as given",
        "  pinned weights          35.00 GB",
        "  sequence state           1.00 GB",
        "  activations            500.00 MB",
        "  reserve                  3.20 GB",
        "  experts                 24.30 GB  1,383 slots, 15.0 a layer, 0.94 of a token's working set, expected hit rate 0.35",
    ] {
        assert!(table.contains(expected), "{expected:?} in\n{table}");
    }
}

#[test]
fn hit_rates_lie_between_the_points() {
    for (capacity, rate) in HIT_RATES {
        assert_eq!(expected_hit_rate(RELEASED, capacity), Some(rate));
    }
    let check = |geometry, capacity: f64, expected: Option<f64>| {
        let found = expected_hit_rate(geometry, capacity);
        assert!(
            found.zip(expected).map_or(found == expected, |(a, b)| (a - b).abs() < 1e-12),
            "{capacity}: {found:?}"
        );
    };
    check(RELEASED, 0.375, Some(0.18));
    check(RELEASED, 32.0, Some(0.742 + 0.258 / 2.0));
    check(RELEASED, 1e9, Some(1.0));
    check(RELEASED, -1.0, Some(0.0));
    // Fewer layers are alike; other layers are not known.
    check(Geometry { layers: 3, ..RELEASED }, 1.0, Some(0.364));
    check(Geometry { experts: 96, ..RELEASED }, 1.0, None);
    check(Geometry { experts: 96, ..RELEASED }, 6.0, Some(1.0));
}

#[test]
fn bytes_have_units() {
    let check = |text: &str, expected: Option<u64>| assert_eq!(parse_bytes(text).ok(), expected, "{text}");
    check("17", Some(17));
    check("8GiB", Some(8 << 30));
    check("96 GiB", Some(96 << 30));
    check("20 GB", Some(20 * GB));
    check("7.1GB", Some(7_100_000_000));
    check("7GB/s", None);
    assert_eq!([parse_rate("7GB/s"), parse_rate("7 GB")], [Ok(7 * GB), Ok(7 * GB)]);
    check("", None);
    check("GB", None);
    check("1e9", None);
    check("1.2.3GB", None);
    check("-1", None);
    check("99999999TiB", None);
    check("5 apples", None);
}
