//! JSON without loss: key order, duplicate keys and the spelling of numbers survive.
//!
//! The prompt depends on all three, and on printing exactly as Python does (`docs/xtml.md` 7 and 9), so the usual
//! value types will not do: they sort keys, or turn large integers into floats, or print `1e16` for `1e+16`.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

mod parse;
mod print;
pub(crate) mod scan;

pub use parse::MAX_DEPTH;
use print::Style;
pub(crate) use print::{push_quoted, python_float};
pub(crate) use scan::Syntax;

/// A JSON value.
///
/// Reading and printing work at any size. Nesting is limited to [`MAX_DEPTH`] when reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, in the spelling of its source.
    Number(Number),
    /// A decoded string. Escapes of lone surrogates became U+FFFD.
    String(String),
    /// An array.
    Array(Vec<Value>),
    /// An object: all pairs in the order of the source, equal keys included. [`Value::entries`] gives them as a
    /// Python dictionary would hold them.
    Object(Vec<(String, Value)>),
}

/// A JSON number as it was spelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    text: String,
    /// Whether it has a fraction or an exponent (or is not finite): Python reads it as a float, all others as integers
    /// of any size.
    float: bool,
}

impl Number {
    pub(crate) fn from_source(text: &str) -> Number {
        // `NaN` and `Infinity` have no digit, `-Infinity` neither; integers are digits after an optional sign.
        let digits = text.strip_prefix('-').unwrap_or(text);
        Number { text: text.to_owned(), float: !digits.bytes().all(|b| b.is_ascii_digit()) }
    }

    /// The spelling of the source, such as `1e2` or `1.50`.
    pub fn as_source(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Number {
    /// As Python prints it: integers exactly, floats as `repr` (`docs/xtml.md` 7).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.float {
            let value = match self.text.as_str() {
                "NaN" => f64::NAN,
                "Infinity" => f64::INFINITY,
                "-Infinity" => f64::NEG_INFINITY,
                // Only number syntax gets here, and the standard parser knows all of it.
                text => text.parse().unwrap_or(f64::NAN),
            };
            f.write_str(&python_float(value))
        } else if self.text == "-0" {
            f.write_str("0")
        } else {
            f.write_str(&self.text)
        }
    }
}

impl Value {
    /// Reads one JSON text; white space around it is allowed.
    pub fn parse(text: &str) -> Result<Value, JsonError> {
        parse::document(text, Syntax::STRICT)
    }

    pub(crate) fn parse_with(text: &str, syntax: Syntax) -> Result<Value, JsonError> {
        parse::document(text, syntax)
    }

    /// The value of a key of an object: the last of equal ones, as in Python. `None` if there is none or if this is
    /// no object.
    pub fn get(&self, key: &str) -> Option<&Value> {
        match self {
            Value::Object(pairs) => pairs.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The pairs of an object as a Python dictionary holds them: a repeated key stays at its first place and has its
    /// last value. Empty for anything but an object.
    pub fn entries(&self) -> Vec<(&str, &Value)> {
        match self {
            Value::Object(pairs) => dictionary(pairs),
            _ => Vec::new(),
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The JSON name of the type: `null`, `boolean`, `number`, `string`, `array` or `object`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        }
    }

    /// Form J of `docs/xtml.md` 7: keys sorted by code point at every depth, no spaces, non-ASCII raw.
    pub fn to_sorted(&self) -> String {
        let mut out = String::new();
        print::print(self, Style::Sorted, &mut out);
        out
    }

    /// The form of argument values of `docs/xtml.md` 9: keys in order, `", "` and `": "` between, non-ASCII raw.
    pub fn to_spaced(&self) -> String {
        let mut out = String::new();
        print::print(self, Style::Spaced, &mut out);
        out
    }

    /// Whether Python's `if` takes it for false: null, false, zero, and everything empty.
    pub(crate) fn is_falsy(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Bool(b) => !b,
            Value::Number(n) => matches!(n.to_string().as_str(), "0" | "0.0" | "-0.0"),
            Value::String(s) => s.is_empty(),
            Value::Array(a) => a.is_empty(),
            Value::Object(o) => o.is_empty(),
        }
    }
}

/// The pairs as a Python dictionary holds them.
pub(crate) fn dictionary(pairs: &[(String, Value)]) -> Vec<(&str, &Value)> {
    let mut places: HashMap<&str, usize> = HashMap::with_capacity(pairs.len());
    let mut entries: Vec<(&str, &Value)> = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        if let Some(&place) = places.get(key.as_str()) {
            entries[place].1 = value;
        } else {
            places.insert(key, entries.len());
            entries.push((key, value));
        }
    }
    entries
}

impl fmt::Display for Value {
    /// [`Value::to_spaced`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_spaced())
    }
}

impl FromStr for Value {
    type Err = JsonError;

    fn from_str(text: &str) -> Result<Value, JsonError> {
        Value::parse(text)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Number(Number { text: value.to_string(), float: false })
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Number(Number { text: python_float(value), float: true })
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::String(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::String(text)
    }
}

impl From<Vec<Value>> for Value {
    fn from(items: Vec<Value>) -> Value {
        Value::Array(items)
    }
}

/// Why a text is not the JSON that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// The text breaks the syntax.
    #[error("reading JSON: expected {expected} at byte {at}")]
    Syntax {
        /// Byte offset of the first byte that does not fit.
        at: usize,
        /// What would have been right there.
        expected: &'static str,
    },
    /// Objects and arrays are nested too deeply.
    #[error("reading JSON: nested more than {MAX_DEPTH} deep at byte {at}; flatten the value")]
    TooDeep {
        /// Byte offset of the bracket that is one too many.
        at: usize,
    },
}

#[cfg(test)]
mod tests;
