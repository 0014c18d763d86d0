//! The lexical level: white space, strings, numbers, and skipping over one whole value without recursion.

use super::JsonError;

/// What is accepted beyond RFC 8259.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Syntax {
    /// Raw control characters inside strings.
    pub(crate) raw_controls: bool,
    /// `NaN`, `Infinity`, `-Infinity`.
    pub(crate) constants: bool,
}

impl Syntax {
    /// RFC 8259.
    pub(crate) const STRICT: Syntax = Syntax { raw_controls: false, constants: false };
    /// Python's `json.loads`.
    pub(crate) const PYTHON: Syntax = Syntax { raw_controls: false, constants: true };
    /// Python's decoder with `strict=False`: the reader of argument strings (`docs/xtml.md` 9).
    pub(crate) const LENIENT: Syntax = Syntax { raw_controls: true, constants: true };
}

/// A position in a JSON text.
pub(crate) struct Scanner<'a> {
    text: &'a str,
    at: usize,
    syntax: Syntax,
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(text: &'a str, syntax: Syntax) -> Scanner<'a> {
        Scanner { text, at: 0, syntax }
    }

    /// Byte offset.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub(crate) fn fail<T>(&self, expected: &'static str) -> Result<T, JsonError> {
        Err(JsonError::Syntax { at: self.at, expected })
    }

    /// Steps over `byte` if it is next.
    pub(crate) fn eat(&mut self, byte: u8) -> bool {
        let hit = self.peek() == Some(byte);
        self.at += usize::from(hit);
        hit
    }

    fn eat_str(&mut self, literal: &str) -> bool {
        let hit = self.text.as_bytes()[self.at..].starts_with(literal.as_bytes());
        if hit {
            self.at += literal.len();
        }
        hit
    }

    /// Steps over space, tab, LF and CR.
    pub(crate) fn white(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// The source between an earlier offset and here.
    pub(crate) fn since(&self, start: usize) -> &'a str {
        &self.text[start..self.at]
    }

    /// Steps over one scalar that is not a string: a literal or a number.
    pub(crate) fn scalar(&mut self) -> Result<(), JsonError> {
        let constants = self.syntax.constants;
        match self.peek() {
            Some(b'n') if self.eat_str("null") => Ok(()),
            Some(b't') if self.eat_str("true") => Ok(()),
            Some(b'f') if self.eat_str("false") => Ok(()),
            Some(b'N') if constants && self.eat_str("NaN") => Ok(()),
            Some(b'I') if constants && self.eat_str("Infinity") => Ok(()),
            Some(b'-') if constants && self.eat_str("-Infinity") => Ok(()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.fail("a value"),
        }
    }

    /// The longest number that starts here, as Python's decoder takes it: `01` reads `0`, `1.` reads `1`.
    fn number(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        self.eat(b'-');
        if !self.eat(b'0') && self.digits() == 0 {
            self.at = start;
            return self.fail("a value");
        }
        let whole = self.at;
        if self.eat(b'.') && self.digits() == 0 {
            self.at = whole;
            return Ok(());
        }
        let fraction = self.at;
        if self.eat(b'e') || self.eat(b'E') {
            let _ = self.eat(b'+') || self.eat(b'-');
            if self.digits() == 0 {
                self.at = fraction;
            }
        }
        Ok(())
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - start
    }

    /// Steps over a string; `into` gets the decoded text if it is wanted.
    pub(crate) fn string(&mut self, mut into: Option<&mut String>) -> Result<(), JsonError> {
        if !self.eat(b'"') {
            return self.fail("a string");
        }
        loop {
            let start = self.at;
            // Every byte that ends a plain stretch is ASCII, so slices at these offsets are whole characters.
            while self
                .peek()
                .is_some_and(|b| b != b'"' && b != b'\\' && (b >= 0x20 || self.syntax.raw_controls))
            {
                self.at += 1;
            }
            if let Some(out) = into.as_deref_mut() {
                out.push_str(&self.text[start..self.at]);
            }
            if self.eat(b'"') {
                return Ok(());
            }
            if !self.eat(b'\\') {
                return self.fail("the end of a string");
            }
            let c = self.escape()?;
            if let Some(out) = into.as_deref_mut() {
                out.push(c);
            }
        }
    }

    /// The character of an escape; the backslash is behind us.
    fn escape(&mut self) -> Result<char, JsonError> {
        let c = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at += 1;
                return self.code_point();
            }
            _ => return self.fail("an escape"),
        };
        self.at += 1;
        Ok(c)
    }

    fn code_point(&mut self) -> Result<char, JsonError> {
        let high = self.hex4()?;
        if (0xd800..0xdc00).contains(&high) && self.text.as_bytes()[self.at..].starts_with(b"\\u") {
            let after_high = self.at;
            self.at += 2;
            let low = self.hex4()?;
            if (0xdc00..0xe000).contains(&low) {
                let c = 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                return Ok(char::from_u32(c).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            self.at = after_high;
        }
        // Python keeps a lone surrogate; a Rust string cannot.
        Ok(char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut value = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|b| char::from(b).to_digit(16));
            let Some(digit) = digit else { return self.fail("four hex digits") };
            value = value * 16 + digit;
            self.at += 1;
        }
        Ok(value)
    }

    /// Steps over one whole value. Nesting costs a byte a level, so depth is limited by memory alone.
    pub(crate) fn skip_value(&mut self) -> Result<(), JsonError> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            match self.peek() {
                Some(b'{') => {
                    self.at += 1;
                    self.white();
                    if !self.eat(b'}') {
                        self.key(None)?;
                        open.push(b'}');
                        continue;
                    }
                }
                Some(b'[') => {
                    self.at += 1;
                    self.white();
                    if !self.eat(b']') {
                        open.push(b']');
                        continue;
                    }
                }
                Some(b'"') => self.string(None)?,
                _ => self.scalar()?,
            }
            loop {
                let Some(&end) = open.last() else { return Ok(()) };
                self.white();
                if self.eat(b',') {
                    self.white();
                    if end == b'}' {
                        self.key(None)?;
                    }
                    break;
                }
                if !self.eat(end) {
                    return self.fail(if end == b'}' { "`,` or `}`" } else { "`,` or `]`" });
                }
                open.pop();
            }
        }
    }

    /// A key with its colon and the white space around that.
    pub(crate) fn key(&mut self, into: Option<&mut String>) -> Result<(), JsonError> {
        self.string(into)?;
        self.white();
        if !self.eat(b':') {
            return self.fail("`:`");
        }
        self.white();
        Ok(())
    }
}

/// The value in `text` without the white space around it, if `text` is exactly one JSON value.
pub(crate) fn whole_value(text: &str) -> Option<&str> {
    let mut scanner = Scanner::new(text, Syntax::STRICT);
    scanner.white();
    let start = scanner.at();
    scanner.skip_value().ok()?;
    let value = scanner.since(start);
    scanner.white();
    scanner.peek().is_none().then_some(value)
}
