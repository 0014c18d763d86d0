//! A reply on its way to a person or a pipe.

use std::io::{IsTerminal as _, stderr};
use std::ops::ControlFlow;

use k3_xtml::Event;

use crate::output::{Output, tell};
use crate::parse::event_json;

/// How a reply is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// For a person: `-> NAME ARGUMENTS` for a call.
    Talk,
    /// Content as it is, and a line of JSON for a call.
    Plain,
    /// A line of JSON for every event.
    Events,
}

/// A reply on its way. Reasoning goes to stderr, dimly on a terminal, and everything else to stdout; each begins on a line
/// of its own.
pub(crate) struct Show<'a> {
    out: &'a mut Output,
    style: Style,
    /// Reasoning is being written.
    is_dim: bool,
    /// There is reasoning without the line break after it.
    thought: bool,
    /// There is content without the line break after it.
    line_open: bool,
}

impl<'a> Show<'a> {
    pub(crate) fn new(out: &'a mut Output, style: Style) -> Self {
        Self { out, style, is_dim: false, thought: false, line_open: false }
    }

    /// Writes at once. Breaks when there is no one to write for.
    pub(crate) fn event(&mut self, event: &Event) -> ControlFlow<()> {
        if self.style == Style::Events {
            return self.out.say(format_args!("{}\n", event_json(event)));
        }
        match event {
            Event::ReasoningDelta(text) => {
                let dim = if std::mem::replace(&mut self.is_dim, true) { "" } else { dim().0 };
                self.thought = true;
                tell(format_args!("{dim}{text}"));
                ControlFlow::Continue(())
            }
            Event::ContentDelta(text) => {
                self.end_thought();
                self.line_open = !text.ends_with('\n');
                self.out.say(format_args!("{text}"))
            }
            Event::ToolCall(call) => {
                self.end();
                match self.style {
                    Style::Talk => self.out.say(format_args!("-> {} {}\n", call.name, call.arguments)),
                    Style::Plain | Style::Events => self.out.say(format_args!("{}\n", event_json(event))),
                }
            }
            Event::Error(_) | Event::Finish(_) => ControlFlow::Continue(()),
        }
    }

    fn end_thought(&mut self) {
        if std::mem::take(&mut self.thought) {
            tell(format_args!("{}\n", dim().1));
            self.is_dim = false;
        }
    }

    /// Ends what was begun.
    pub(crate) fn end(&mut self) {
        self.end_thought();
        if std::mem::take(&mut self.line_open) {
            let _ = self.out.say(format_args!("\n"));
        }
    }
}

/// How to write dimly on stderr, and how to end it; nothing where stderr is no terminal or colours are not wanted.
pub(crate) fn dim() -> (&'static str, &'static str) {
    let wanted = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    if wanted { ("\x1b[2m", "\x1b[0m") } else { ("", "") }
}
