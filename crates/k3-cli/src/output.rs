//! Stdout and stderr of a run that takes long: neither may end it with a panic.

use std::fmt::Arguments;
use std::io::{self, Write as _, stderr, stdout};
use std::ops::ControlFlow;

/// Stdout, until it cannot be written any more.
#[derive(Debug, Default)]
pub(crate) struct Output {
    failed: Option<io::Error>,
}

impl Output {
    /// Writes at once. Breaks when there is no one to write for.
    pub(crate) fn say(&mut self, text: Arguments<'_>) -> ControlFlow<()> {
        if self.failed.is_none() {
            let mut out = stdout().lock();
            self.failed = out.write_fmt(text).and_then(|()| out.flush()).err();
        }
        if self.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Whether there is no one to write for any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.failed.is_some()
    }

    /// The error that ended it. A reader that has seen enough is none.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self.failed {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

/// Writes to stderr; if no one listens, nothing happens.
pub(crate) fn tell(text: Arguments<'_>) {
    let mut err = stderr().lock();
    let _ = err.write_fmt(text).and_then(|()| err.flush());
}
