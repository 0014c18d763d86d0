//! Holding a model to the dialogues that it comes with (`docs/vectors.md` 6).

use anyhow::{Context, Result};
use k3_graph::Device;
use k3_graph::select::argmax;
use k3_runner::{Engine, Sequence};

use crate::expect::{Check, Dialogue, Found, exceeds, relative_l2};
use crate::progress::Progress;

/// How far the logits of a dialogue may be from the expected ones, in relative L2. Trained weights do not amplify
/// rounding as random ones do: float32 against float64 was measured at a tenth of this.
pub(super) const BOUND: f64 = 1e-5;

/// Runs every dialogue: one check of all logits, one of all continuations.
pub(super) fn check<D: Device>(engine: &Engine<D>, dialogues: &[Dialogue]) -> Result<Vec<Check>> {
    let mut progress = Progress::steps("dialogues", dialogues.len());
    let (mut worst, mut max_abs, mut far) = (0.0_f64, 0.0_f64, Vec::new());
    let (mut equal, mut of, mut forked) = (0, 0, Vec::new());
    for dialogue in dialogues {
        let mut sequence = engine.new_sequence()?;
        let row = engine.prefill(&mut sequence, &dialogue.prompt)?.values;
        if let Some(expected) = &dialogue.logits {
            let (distance, max) = relative_l2(&row, expected);
            if exceeds(distance, worst) && !worst.is_nan() {
                worst = distance;
            }
            max_abs = if max.is_nan() { max } else { max_abs.max(max) };
            if exceeds(distance, BOUND) {
                far.push(format!("{}: {distance:.1e}", dialogue.name));
            }
        }
        if !dialogue.greedy.is_empty() {
            of += 1;
            match fork(engine, &mut sequence, row, &dialogue.greedy)? {
                None => equal += 1,
                Some((at, found)) => forked.push(format!(
                    "{}: token {at}: expected {}, found {found}",
                    dialogue.name, dialogue.greedy[at]
                )),
            }
        }
        progress.step();
    }
    let mut checks = Vec::new();
    if dialogues.iter().any(|d| d.logits.is_some()) {
        let distance = Found::Distance { relative_l2: worst, worst_row: None, max_abs, bound: BOUND };
        checks.push(Check::of("dialogue logits", far.is_empty(), distance, far.join(", ")));
    }
    if of > 0 {
        checks.push(Check::of("dialogue greedy", equal == of, Found::Equal { equal, of }, forked.join(", ")));
    }
    Ok(checks)
}

/// Where the greedy continuation after `row` leaves the expected one, and with what.
fn fork<D: Device>(
    engine: &Engine<D>,
    sequence: &mut Sequence<D>,
    mut row: Vec<f32>,
    expected: &[u32],
) -> Result<Option<(usize, u32)>> {
    for (at, &id) in expected.iter().enumerate() {
        let found = argmax(&row).context("logits are numbers")?;
        if found != id {
            return Ok(Some((at, found)));
        }
        if at + 1 < expected.len() {
            row = engine.decode(sequence, id)?.values;
        }
    }
    Ok(None)
}
