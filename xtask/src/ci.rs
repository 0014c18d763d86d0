//! Everything that must hold before a change lands, in one list.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Run what must hold before a change lands: formatting, lints, tests, docs, selfcheck
///
/// Steps are ordinary cargo commands, printed before they run. The first that fails ends it.
#[derive(clap::Args)]
pub struct Args {
    /// Only what takes a minute when the rest is built: formatting, lints, and the rules of docs/architecture.md
    #[arg(long)]
    quick: bool,
}

/// A cargo command, with the variables that it needs.
#[derive(Debug)]
pub struct Step {
    /// Name and value.
    pub variables: &'static [(&'static str, &'static str)],
    /// What follows `cargo`.
    pub arguments: &'static str,
}

/// What `cargo xtask ci` runs, in this order.
pub const STEPS: &[Step] = &[
    step("fmt --all --check"),
    step("clippy --workspace --all-targets --locked -- -D warnings"),
    step("test --workspace --locked"),
    Step {
        variables: &[("RUSTDOCFLAGS", "-D warnings")],
        arguments: "doc --workspace --no-deps --all-features --locked",
    },
    step("xtask selfcheck"),
];

/// What `cargo xtask ci --quick` runs.
const QUICK: &[Step] = &[
    step("fmt --all --check"),
    step("clippy --workspace --all-targets --locked -- -D warnings"),
    step("test --package xtask --test architecture --locked"),
];

const fn step(arguments: &'static str) -> Step {
    Step { variables: &[], arguments }
}

impl std::fmt::Display for Step {
    /// As one would type it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, value) in self.variables {
            write!(f, "{name}='{value}' ")?;
        }
        write!(f, "cargo {}", self.arguments)
    }
}

/// Runs the steps.
///
/// # Errors
/// If a step fails or cannot be started, with its command and how it ended.
pub fn run(args: &Args) -> Result<()> {
    run_all(if args.quick { QUICK } else { STEPS })
}

fn run_all(steps: &[Step]) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (done, step) in steps.iter().enumerate() {
        writeln!(io::stdout(), "\n==> {step}")?;
        let mut command = Command::new("cargo");
        command.args(step.arguments.split(' ')).envs(step.variables.iter().copied()).current_dir(&root);
        let status = command.status().with_context(|| format!("starting `{step}`"))?;
        if !status.success() {
            bail!("step {} of {} failed with {status}: `{step}`", done + 1, steps.len());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{run_all, step};

    #[test]
    fn the_first_step_that_fails_ends_it() {
        let steps = [step("--version"), step("no-such-command"), step("no-other-either")];
        let error = run_all(&steps).unwrap_err().to_string();
        assert_eq!(error, "step 2 of 3 failed with exit status: 101: `cargo no-such-command`");
    }
}
