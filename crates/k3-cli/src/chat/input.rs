//! Lines of a person or of a pipe, and what they mean.

use std::io::{BufRead, IsTerminal, stdin};

use anyhow::{Context, Result};
use k3_xtml::{Effort, ThinkingEffort};

use crate::output::tell;

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Nothing.
    Empty,
    /// Text for the model.
    Text(String),
    /// Something for the program.
    Command(Command),
    /// It looks like a command and is none; why.
    Wrong(String),
}

/// A line that begins with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Reset,
    Quit,
    Thinking(bool),
    Effort(ThinkingEffort),
}

pub(super) const HELP: &str = "\
/thinking on|off               whether the model thinks before it answers
/effort low|high|max|unset     how much it thinks; unset says nothing about it
/reset                         forget the conversation, keep tools and system prompt
/quit                          leave, as the end of input does
//TEXT                         a message that begins with a slash
A line that ends in \\ goes on in the next.
";

impl Line {
    pub(super) fn parse(line: String) -> Self {
        let Some(rest) = line.strip_prefix('/') else {
            return if line.trim().is_empty() { Line::Empty } else { Line::Text(line) };
        };
        if rest.starts_with('/') {
            return Line::Text(rest.to_owned());
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        Line::Command(match words.as_slice() {
            ["help"] => Command::Help,
            ["reset"] => Command::Reset,
            ["quit" | "exit"] => Command::Quit,
            ["thinking", "on"] => Command::Thinking(true),
            ["thinking", "off"] => Command::Thinking(false),
            ["effort", "unset"] => Command::Effort(ThinkingEffort::Silent),
            ["effort", word] if Effort::from_name(word).is_some() => {
                Command::Effort(Effort::from_name(word).map_or(ThinkingEffort::Default, Into::into))
            }
            ["thinking", ..] => return Line::Wrong("/thinking takes `on` or `off`".to_owned()),
            ["effort", ..] => return Line::Wrong("/effort takes `low`, `high`, `max` or `unset`".to_owned()),
            _ => {
                return Line::Wrong(format!(
                    "/{} is no command; /help lists them, and // begins a message with a slash",
                    words.first().copied().unwrap_or_default()
                ));
            }
        })
    }
}

/// The lines of an input, joined where they end in a backslash.
pub(super) struct Lines<R> {
    input: R,
    is_terminal: bool,
}

impl Lines<std::io::StdinLock<'static>> {
    pub(super) fn of_stdin() -> Self {
        Self { input: stdin().lock(), is_terminal: stdin().is_terminal() }
    }
}

impl<R: BufRead> Lines<R> {
    /// The next line, after a prompt if a person is to write it; `None` at the end of input. Bytes that are no text become
    /// U+FFFD.
    pub(super) fn next(&mut self, prompt: &str) -> Result<Option<String>> {
        let mut text = String::new();
        let mut prompt = prompt;
        loop {
            if self.is_terminal {
                tell(format_args!("{prompt}"));
            }
            let mut bytes = Vec::new();
            if self.input.read_until(b'\n', &mut bytes).context("reading stdin")? == 0 {
                if self.is_terminal {
                    tell(format_args!("\n"));
                }
                return Ok(Some(text).filter(|text| !text.is_empty()));
            }
            let line = String::from_utf8_lossy(&bytes);
            let line = line.trim_end_matches(['\n', '\r']);
            let Some(more) = line.strip_suffix('\\') else {
                text.push_str(line);
                return Ok(Some(text));
            };
            text.push_str(more);
            text.push('\n');
            prompt = ". ";
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &str, expected: &Line) {
        assert_eq!(Line::parse(line.to_owned()), *expected, "{line}");
    }

    #[track_caller]
    fn wrong(line: &str, why: &str) {
        let Line::Wrong(found) = Line::parse(line.to_owned()) else { panic!("{line} is good") };
        assert!(found.contains(why), "{found}");
    }

    #[test]
    fn what_lines_mean() {
        check("", &Line::Empty);
        check(" \t", &Line::Empty);
        check(" Hello / you ", &Line::Text(" Hello / you ".into()));
        check("//quit", &Line::Text("/quit".into()));
        check("/quit", &Line::Command(Command::Quit));
        check("/help ", &Line::Command(Command::Help));
        check("/reset", &Line::Command(Command::Reset));
        check("/thinking  off", &Line::Command(Command::Thinking(false)));
        check("/effort low", &Line::Command(Command::Effort(Effort::Low.into())));
        check("/effort unset", &Line::Command(Command::Effort(ThinkingEffort::Silent)));
        wrong("/effort medium", "`max` or `unset`");
        wrong("/thinking", "`on` or `off`");
        wrong("/frobnicate now", "/frobnicate is no command");
        wrong("/", "/help");
    }

    #[test]
    fn lines_of_an_input() {
        let read = |input: &str| {
            let mut lines = Lines { input: input.as_bytes(), is_terminal: false };
            std::iter::from_fn(|| lines.next("> ").unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(read("a\nb\r\n\nc"), ["a", "b", "", "c"]);
        assert_eq!(read("a\\\nb\\\n\\\nc\nd"), ["a\nb\n\nc", "d"]);
        assert_eq!(read("a\\\n"), ["a\n"]);
        assert_eq!(read(""), [""; 0]);
    }
}
