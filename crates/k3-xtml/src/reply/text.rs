//! Text mode: markers are searched in decoded text (`docs/xtml.md` 11.1).

use super::{Event, ReplyParser, StopReason};
use crate::control::{Channel, Control, Piece};

/// Reads a reply of which only the text is known, in chunks cut anywhere.
///
/// A model that quotes a marker cannot be told from one that writes it, so prefer [`ReplyParser`] where ids are known.
/// At most one incomplete marker is held back; at the end of the reply it is dropped.
#[derive(Debug)]
pub struct TextReplyParser {
    parser: ReplyParser,
    held: String,
}

/// Every marker starts so.
const START: char = '<';

impl TextReplyParser {
    /// A parser for a reply that continues in `start`.
    pub fn new(start: Channel) -> TextReplyParser {
        TextReplyParser { parser: ReplyParser::new(start), held: String::new() }
    }

    /// Takes the next text and returns what it makes certain.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let joined;
        let text = if self.held.is_empty() {
            text
        } else {
            joined = std::mem::take(&mut self.held) + text;
            &joined
        };
        let mut events = Vec::new();
        // `text[done..]` is not passed on yet, and has no marker before `look`.
        let (mut done, mut look) = (0, 0);
        while let Some(hit) = text[look..].find(START).map(|at| look + at) {
            let rest = &text[hit..];
            if let Some(marker) = Control::MARKERS.into_iter().find(|m| rest.starts_with(m.spelling())) {
                events.extend(self.parser.push(Piece::Text(&text[done..hit])));
                events.extend(self.parser.push(Piece::Control(marker)));
                done = hit + marker.spelling().len();
                look = done;
            } else if Control::MARKERS.iter().any(|m| m.spelling().starts_with(rest)) {
                rest.clone_into(&mut self.held);
                break;
            } else {
                look = hit + START.len_utf8();
            }
        }
        let end = text.len() - self.held.len();
        events.extend(self.parser.push(Piece::Text(&text[done..end])));
        events
    }

    /// Whether the turn has ended; text is ignored from then on.
    pub fn is_ended(&self) -> bool {
        self.parser.is_ended()
    }

    /// Ends the reply. A second call does nothing.
    pub fn finish(&mut self, stop: StopReason) -> Vec<Event> {
        self.held.clear();
        self.parser.finish(stop)
    }
}
