//! The oracle's own parts against the operator vectors, so that the judge is known to be right.

#[allow(dead_code, reason = "each test binary uses its part of the oracle")]
mod oracle;

use oracle::ops::{self, Deviation};
use oracle::trap::{Step, Trap};

/// The vectors are f64 results stored as f32.
const STORED_AS_F32: f64 = 1e-7;

fn check(operator: fn(Trap) -> Deviation) {
    let deviation = operator(Trap::None);
    assert!(deviation.compared > 0, "no vector was compared");
    assert!(deviation.relative < STORED_AS_F32, "{deviation:?}");
    assert_eq!(deviation.wrong, 0, "{deviation:?}");
}

#[test]
fn attnres() {
    check(ops::attnres);
}

#[test]
fn indexer() {
    check(ops::indexer);
}

#[test]
fn kda_long() {
    check(ops::kda_long);
}

#[test]
fn mxfp4_decode() {
    check(ops::mxfp4_decode);
}

#[test]
fn situ() {
    check(ops::situ);
}

#[test]
fn topk_select() {
    check(ops::topk_select);
}

#[test]
fn closed_forms() {
    check(|trap| ops::closed_form(Step::L2Norm, trap));
    check(|trap| ops::closed_form(Step::IndexKeyNorm, trap));
    check(|trap| ops::closed_form(Step::RouterBias, trap));
    check(|trap| ops::closed_form(Step::RouterTies, trap));
    check(|trap| ops::closed_form(Step::RoutedScaling, trap));
}
