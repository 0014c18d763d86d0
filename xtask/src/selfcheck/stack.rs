//! Which expectations a run of the first layers alone (`--layers`) can be held to.

use anyhow::Result;

use crate::expect::{Check, Expectations, Found, Sizes};

/// Where expectations come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Of the snapshot's folder: they are of the snapshot.
    Snapshot,
    /// Of `--expect`: they are of what the person who named them says.
    Named,
}

/// Whether not all layers of the model run.
pub(super) fn is_truncated(sizes: &Sizes) -> bool {
    sizes.layers < sizes.config.num_hidden_layers()
}

/// Whether expectations are of the layers that run, and not of the whole model.
///
/// # Errors
/// They are of neither.
pub(super) fn applies(expected: &Expectations, running: &Sizes, source: Source) -> Result<bool> {
    if !is_truncated(running) {
        return expected.validate(running).map(|_| true);
    }
    let whole = Sizes { layers: running.config.num_hidden_layers(), ..running.clone() };
    match (expected.validate(running), expected.validate(&whole)) {
        (Ok(_), Err(_)) => Ok(true),
        // Nothing in them says of how many layers they are.
        (Ok(_), Ok(_)) => Ok(source == Source::Named),
        (Err(_), Ok(_)) => Ok(false),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Expectations of the whole model: skipped, or failed if they were asked for.
pub(super) fn left_out(name: &str, what: &str, sizes: &Sizes, source: Source) -> Check {
    let ran = sizes.layers;
    let note = format!(
        "{}, or pass --expect with results of {ran} layers (cargo xtask trace --layers {ran})",
        of_all_layers(what, sizes)
    );
    match source {
        Source::Snapshot => Check::skipped(name, note),
        Source::Named => Check::of(name, false, Found::Nothing, note),
    }
}

/// Why something that the whole model should do is not looked at.
pub(super) fn of_all_layers(what: &str, sizes: &Sizes) -> String {
    format!(
        "{what} of all {} layers, and --layers {1} runs the first {1} only: run without --layers",
        sizes.config.num_hidden_layers(),
        sizes.layers
    )
}
