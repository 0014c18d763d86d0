//! Lines on stdout, whose reader may have gone.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes a line of a command whose work is a file, and which therefore goes on when nobody reads stdout any more.
pub(crate) fn say(line: Arguments) -> Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("writing to stdout"),
    }
}

/// Whether a command ended because nobody reads its output any more, as `| head` does: nothing to report.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let broken = |e: &std::io::Error| e.kind() == ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(broken))
}
