//! Holding a model to many short prompts (`docs/vectors.md` 6).

use anyhow::{Context, Result, ensure};
use k3_graph::Device;
use k3_runner::Engine;

use super::stack::{self, Source};
use crate::expect::{
    Check, Expectations, Found, Injection, Outcome, Sizes, Wanted, align, compare, exceeds, fits_context,
    record,
};
use crate::progress::Progress;

/// The folder of them in a checkpoint's folder.
pub(crate) const FOLDER: &str = "goldens";

/// How far what is computed may be from what is expected, in relative L2. Trained weights do not amplify rounding as
/// random ones do: float32 against float64 was measured at a tenth of this.
pub(crate) const BOUND: f64 = 1e-5;

/// A prompt with what is expected of it, known to fit the model.
pub(super) struct Golden {
    name: String,
    expected: Expectations,
    prompt: Vec<u32>,
    sizes: Sizes,
}

/// Checks every golden against the model; names that mean nothing are added to `unknown`. Those of more layers than run
/// are left out.
pub(super) fn ready(
    goldens: Vec<(String, Expectations)>,
    model: &Sizes,
    source: Source,
    unknown: &mut Vec<String>,
) -> Result<Vec<Golden>> {
    let mut ready = Vec::with_capacity(goldens.len());
    for (name, expected) in goldens {
        let prompt = expected.prompt(model.config.vocab_size)?;
        let sizes = Sizes { tokens: prompt.len(), continuation: expected.continuation(), ..model.clone() };
        fits_context(&sizes).with_context(|| expected.files_text())?;
        if !stack::applies(&expected, &sizes, source)? {
            continue;
        }
        for name in expected.validate(&sizes)? {
            if !unknown.contains(&name) {
                unknown.push(name);
            }
        }
        ready.push(Golden { name, expected, prompt, sizes });
    }
    Ok(ready)
}

/// Runs every golden. One check for each tensor that any of them expects, over all that do.
pub(super) fn check<D: Device>(engine: &Engine<D>, goldens: &[Golden]) -> Result<Vec<Check>> {
    let mut progress = Progress::steps("goldens", goldens.len());
    let mut all: Vec<(Check, Vec<String>)> = Vec::new();
    for golden in goldens {
        let Golden { name, expected, prompt, sizes } = golden;
        let run = record(engine, prompt, sizes, Wanted::default(), Injection::default(), &mut || {})?;
        let (found, _) = align(&expected.tensors, run.tensors);
        let mut compared = compare(expected, &found, sizes, BOUND);
        compared.retain(|check| check.outcome != Outcome::Skipped || !check.note.starts_with("not in"));
        ensure!(
            compared.iter().any(|check| check.outcome != Outcome::Skipped),
            "{}: there is nothing in it that can be compared (docs/vectors.md lists the tensors)",
            expected.files_text()
        );
        for check in compared {
            let failed = (check.outcome == Outcome::Failed).then(|| format!("{name}: {}", check.note));
            match all.iter_mut().find(|(known, _)| known.name == check.name) {
                Some((known, notes)) => {
                    known.found = worse(&known.found, &check.found);
                    notes.extend(failed);
                }
                None => all.push((check, failed.into_iter().collect())),
            }
        }
        progress.step();
    }
    let total = |(check, notes): (Check, Vec<String>)| {
        let name = format!("{FOLDER} {}", check.name);
        if check.outcome == Outcome::Skipped {
            Check::skipped(name, check.note)
        } else {
            Check::of(name, notes.is_empty(), check.found, notes.join("; "))
        }
    };
    Ok(all.into_iter().map(total).collect())
}

/// Two findings of one sort as one: the larger distance, or the sum of what is equal.
fn worse(a: &Found, b: &Found) -> Found {
    let larger = |a: f64, b: f64| if exceeds(b, a) && !a.is_nan() { b } else { a };
    match (a, b) {
        (
            &Found::Distance { relative_l2, worst_row, max_abs, bound },
            &Found::Distance { relative_l2: other, worst_row: row, max_abs: max, .. },
        ) => Found::Distance {
            relative_l2: larger(relative_l2, other),
            worst_row: worst_row.zip(row).map(|(a, b)| larger(a, b)),
            max_abs: larger(max_abs, max),
            bound,
        },
        (&Found::Equal { equal, of }, &Found::Equal { equal: e, of: o }) => {
            Found::Equal { equal: equal + e, of: of + o }
        }
        _ => a.clone(),
    }
}
