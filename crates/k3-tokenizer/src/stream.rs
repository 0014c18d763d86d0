//! Text from tokens that come one by one.

use crate::{Tokenizer, UnknownId};

/// Bytes in, whole characters out; an incomplete last character waits for its other bytes.
///
/// The joined output equals [`String::from_utf8_lossy`] of all bytes, wherever they are split.
///
/// ```
/// let mut stream = k3_tokenizer::Utf8Stream::default();
/// let mut text = String::new();
/// stream.push(b"caf\xc3", &mut text);
/// assert_eq!(text, "caf");
/// stream.push(b"\xa9", &mut text);
/// assert_eq!(text, "café");
/// ```
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The start of a character, at most three bytes between calls.
    tail: Vec<u8>,
}

impl Utf8Stream {
    /// Takes `bytes` and appends to `text` what is complete. Invalid bytes become U+FFFD.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.tail.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.tail.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = done + invalid.len() == self.tail.len();
            if at_end && is_incomplete(invalid) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                done += invalid.len();
            }
        }
        self.tail.drain(..done);
    }

    /// Appends U+FFFD if a character is left incomplete; the stream can then be used anew.
    pub fn finish(&mut self, text: &mut String) {
        if !self.tail.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.tail.clear();
        }
    }
}

/// Whether more bytes could make these a character: only what stands at the end can be so.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

/// What a [`StreamDecoder`] does with control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ControlText {
    /// They appear as they are spelled.
    #[default]
    Spell,
    /// They leave no text.
    Skip,
}

/// Decodes one token at a time; the deltas join to the text of all tokens.
///
/// A delta is empty while a character is incomplete. [`StreamDecoder::finish`] hands out what is left.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    control_text: ControlText,
    utf8: Utf8Stream,
}

impl StreamDecoder {
    /// A decoder that has seen no token.
    pub fn new(tokenizer: &Tokenizer, control_text: ControlText) -> Self {
        Self { tokenizer: tokenizer.clone(), control_text, utf8: Utf8Stream::default() }
    }

    /// The text that `id` completes.
    ///
    /// # Errors
    /// If `id` is outside the vocabulary; the decoder is as before.
    pub fn push(&mut self, id: u32) -> Result<String, UnknownId> {
        let mut text = String::new();
        let bytes = self.tokenizer.token_bytes(id)?;
        if self.control_text == ControlText::Spell || !self.tokenizer.is_control(id) {
            self.utf8.push(bytes, &mut text);
        }
        Ok(text)
    }

    /// U+FFFD if a character is left incomplete, else nothing; the decoder can then be used anew.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        text
    }
}
