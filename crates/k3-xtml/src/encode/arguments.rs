//! Arguments of calls in history (`docs/xtml.md` 9).

use super::Writer;
use crate::error::EncodeError;
use crate::json::scan::Scanner;
use crate::json::{JsonError, Syntax, Value};

fn argument(out: &mut Writer, key: &str, kind: &str, body: String) {
    out.open("argument", &[(" key", key), (" type", kind)]);
    out.text(body);
    out.close("argument");
}

/// A text that could not be read as an object goes in whole.
fn json_element(out: &mut Writer, text: &str) {
    out.open("json", &[(" type", "object")]);
    out.text(text.to_owned());
    out.close("json");
}

/// Arguments given as an object: values are printed.
pub(super) fn object(out: &mut Writer, entries: &[(&str, &Value)]) {
    for (key, value) in entries {
        let body = value.as_str().map_or_else(|| value.to_spaced(), str::to_owned);
        argument(out, key, value.type_name(), body);
    }
}

/// Arguments given as text, current revision: read one level deep, spelling kept.
pub(super) fn text(out: &mut Writer, text: &str) {
    match one_level(text) {
        Ok(pairs) => {
            for pair in pairs {
                argument(out, &pair.key, pair.kind, pair.body);
            }
        }
        Err(_) => json_element(out, text),
    }
}

struct Pair {
    key: String,
    kind: &'static str,
    body: String,
}

fn one_level(text: &str) -> Result<Vec<Pair>, JsonError> {
    let mut scanner = Scanner::new(text, Syntax::LENIENT);
    let mut pairs = Vec::new();
    scanner.white();
    if !scanner.eat(b'{') {
        return scanner.fail("`{`");
    }
    scanner.white();
    if scanner.eat(b'}') {
        return Ok(pairs);
    }
    loop {
        let mut key = String::new();
        scanner.key(Some(&mut key))?;
        let start = scanner.at();
        let (kind, body) = if scanner.peek() == Some(b'"') {
            let mut decoded = String::new();
            scanner.string(Some(&mut decoded))?;
            ("string", decoded)
        } else {
            scanner.skip_value()?;
            let source = scanner.since(start);
            (type_of(source), source.to_owned())
        };
        pairs.push(Pair { key, kind, body });
        scanner.white();
        if scanner.eat(b'}') {
            return Ok(pairs);
        }
        if !scanner.eat(b',') {
            return scanner.fail("`,` or `}`");
        }
        scanner.white();
    }
}

/// The type of a value that is not a string, by its first byte.
fn type_of(source: &str) -> &'static str {
    match source.as_bytes().first() {
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b't' | b'f') => "boolean",
        Some(b'n') => "null",
        _ => "number",
    }
}

/// Arguments given as text, July revision: read whole and printed anew (`docs/xtml.md` 12).
pub(super) fn july_text(
    out: &mut Writer,
    text: &str,
    message: usize,
    call: usize,
) -> Result<(), EncodeError> {
    if is_python_blank(text) {
        return Ok(());
    }
    match Value::parse_with(text, Syntax::PYTHON) {
        Ok(value @ Value::Object(_)) => object(out, &value.entries()),
        Ok(other) => {
            return Err(EncodeError::ArgumentsNotObject { message, call, found: other.type_name() });
        }
        Err(JsonError::Syntax { .. }) => json_element(out, text),
        Err(deep @ JsonError::TooDeep { .. }) => return Err(deep.into()),
    }
    Ok(())
}

/// Whether Python's `strip` leaves nothing; it counts four separators as white space that Unicode does not.
pub(super) fn is_python_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}
