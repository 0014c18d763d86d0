//! Lines of a person or of a pipe, and what they mean.

use std::io::{BufRead, IsTerminal, Read as _, stdin};

use anyhow::{Context as _, Result, ensure};
use k3_xtml::{Effort, ThinkingEffort};

use crate::output::tell;
use crate::text::{MAX_BYTES, Place, utf8};

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
    /// An empty result of a tool.
    Empty,
    Reset,
    Quit,
    Thinking(bool),
    Effort(ThinkingEffort),
}

pub(super) const HELP: &str = "\
/thinking on|off               whether the model thinks before it answers
/effort low|high|max|unset     how much it thinks; unset says nothing about it
/empty                         the result of a tool that gave nothing
/reset                         forget the conversation, keep tools and system prompt
/quit                          leave, as the end of input does
//TEXT                         a message or a result that begins with a slash
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
            ["empty"] => Command::Empty,
            ["reset"] => Command::Reset,
            ["quit" | "exit"] => Command::Quit,
            ["thinking", "on"] => Command::Thinking(true),
            ["thinking", "off"] => Command::Thinking(false),
            ["effort", "unset"] => Command::Effort(ThinkingEffort::Silent),
            ["effort", word] if Effort::from_name(word).is_some() => {
                Command::Effort(Effort::from_name(word).map_or(ThinkingEffort::Default, Into::into))
            }
            [word @ ("help" | "empty" | "reset" | "quit" | "exit"), ..] => {
                return Line::Wrong(format!("/{word} takes no argument; // begins a message with a slash"));
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
    /// What was read so far.
    place: Place,
    /// A terminal could go on after its end of input; a conversation does not.
    ended: bool,
}

impl Lines<std::io::StdinLock<'static>> {
    pub(super) fn of_stdin() -> Self {
        Self::new(stdin().lock(), stdin().is_terminal())
    }
}

impl<R: BufRead> Lines<R> {
    fn new(input: R, is_terminal: bool) -> Self {
        Self { input, is_terminal, place: Place::default(), ended: false }
    }

    /// The next line, after a prompt if a person is to write it; `None` at the end of input.
    ///
    /// # Errors
    /// Bytes that are no text; a person at a terminal is told, and asked again.
    pub(super) fn next(&mut self, first_prompt: &str) -> Result<Option<String>> {
        let mut text = String::new();
        let mut prompt = first_prompt;
        while !self.ended {
            if self.is_terminal {
                tell(format_args!("{prompt}"));
            }
            let mut bytes = Vec::new();
            let limit = MAX_BYTES.saturating_sub(text.len() as u64);
            let mut input = self.input.by_ref().take(limit + 1);
            if input.read_until(b'\n', &mut bytes).context("reading stdin")? == 0 {
                if self.is_terminal {
                    tell(format_args!("\n"));
                }
                self.ended = true;
                break;
            }
            ensure!(
                bytes.len() as u64 <= limit,
                "reading stdin: line {}: a message has more than the {MAX_BYTES} bytes that are read at most",
                self.place.lines + 1
            );
            let place = self.place;
            self.place = Place { lines: place.lines + 1, bytes: place.bytes + bytes.len() };
            let line = match utf8(bytes, place) {
                Ok(line) => line,
                Err(error) if self.is_terminal => {
                    tell(format_args!("{error}; write the message again\n"));
                    text.clear();
                    prompt = first_prompt;
                    continue;
                }
                Err(error) => return Err(error.context("reading stdin")),
            };
            let line = line.trim_end_matches(['\n', '\r']);
            let Some(more) = line.strip_suffix('\\') else {
                text.push_str(line);
                return Ok(Some(text));
            };
            text.push_str(more);
            text.push('\n');
            prompt = ". ";
        }
        // What a backslash promised did not come: the message is what there is.
        if text.ends_with('\n') {
            text.pop();
        }
        Ok(Some(text).filter(|text| !text.is_empty()))
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
        check("/empty", &Line::Command(Command::Empty));
        check("/thinking  off", &Line::Command(Command::Thinking(false)));
        check("/effort low", &Line::Command(Command::Effort(Effort::Low.into())));
        check("/effort unset", &Line::Command(Command::Effort(ThinkingEffort::Silent)));
        wrong("/effort medium", "`max` or `unset`");
        wrong("/thinking", "`on` or `off`");
        for command in ["/quit now", "/exit 0", "/reset x", "/help me", "/empty \"\""] {
            let word = command.split(' ').next().unwrap_or_default();
            wrong(command, &format!("{word} takes no argument"));
        }
        wrong("/frobnicate now", "/frobnicate is no command");
        wrong("/", "/help");
    }

    #[test]
    fn lines_of_an_input() {
        let read = |input: &str| {
            let mut lines = Lines::new(input.as_bytes(), false);
            std::iter::from_fn(|| lines.next("> ").unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(read("a\nb\r\n\nc"), ["a", "b", "", "c"]);
        assert_eq!(read("a\\\nb\\\n\\\nc\nd"), ["a\nb\n\nc", "d"]);
        assert_eq!(read(""), [""; 0]);
        // At the end of input a backslash has nothing to go on with.
        assert_eq!(read("a\nb\\"), ["a", "b"]);
        assert_eq!(read("a\\\n"), ["a"]);
        assert_eq!(read("a\\\nb\\\n"), ["a\nb"]);
        assert_eq!(read("a\\\n\\"), ["a\n"]);
        assert_eq!(read("\\"), [""; 0]);
    }

    #[track_caller]
    fn not_text(input: &[u8], good: &[&str], place: &str) {
        let mut lines = Lines::new(input, false);
        for line in good {
            assert_eq!(lines.next("> ").unwrap().as_deref(), Some(*line));
        }
        let error = format!("{:#}", lines.next("> ").unwrap_err());
        assert!(error.starts_with(&format!("reading stdin: {place}: expected UTF-8 text")), "{error}");
    }

    #[test]
    fn bytes_that_are_no_text_are_refused() {
        not_text(b"\xff\n", &[], "line 1, byte offset 0 (0 of the whole input)");
        not_text(b"one\nt\xc3\xa9o\xe9\nthree\n", &["one"], "line 2, byte offset 4 (8 of the whole input)");
        not_text(b"a\\\nb\xe4", &[], "line 2, byte offset 1 (4 of the whole input)");
    }

    /// A person is asked again, and what follows counts.
    #[test]
    fn a_terminal_goes_on() {
        let mut lines = Lines::new(&b"a\\\n\xff\nb\n"[..], true);
        assert_eq!(lines.next("> ").unwrap().as_deref(), Some("b"));
        assert_eq!(lines.next("> ").unwrap(), None);
    }
}
