//! Building values. No recursion: hostile nesting ends in an error, never in a stack overflow.

use super::scan::{Scanner, Syntax};
use super::{JsonError, Number, Value};

/// Deepest nesting of objects and arrays that [`Value::parse`] accepts. Printing, comparing and dropping a value
/// recurse, so this bounds their stack; Python's own reader stops near the same depth.
pub const MAX_DEPTH: usize = 1000;

/// A container that is still open.
enum Frame {
    Array(Vec<Value>),
    /// Pairs so far, and the key whose value comes next.
    Object(Vec<(String, Value)>, String),
}

pub(super) fn document(text: &str, syntax: Syntax) -> Result<Value, JsonError> {
    let mut scanner = Scanner::new(text, syntax);
    scanner.white();
    let value = value(&mut scanner)?;
    scanner.white();
    if scanner.peek().is_some() {
        return scanner.fail("the end of the text");
    }
    Ok(value)
}

fn value(scanner: &mut Scanner<'_>) -> Result<Value, JsonError> {
    let mut open: Vec<Frame> = Vec::new();
    loop {
        let mut done = match scanner.peek() {
            Some(bracket @ (b'{' | b'[')) => {
                if open.len() == MAX_DEPTH {
                    return Err(JsonError::TooDeep { at: scanner.at() });
                }
                scanner.eat(bracket);
                scanner.white();
                if bracket == b'{' {
                    if !scanner.eat(b'}') {
                        open.push(Frame::Object(Vec::new(), key(scanner)?));
                        continue;
                    }
                    Value::Object(Vec::new())
                } else {
                    if !scanner.eat(b']') {
                        open.push(Frame::Array(Vec::new()));
                        continue;
                    }
                    Value::Array(Vec::new())
                }
            }
            Some(b'"') => {
                let mut text = String::new();
                scanner.string(Some(&mut text))?;
                Value::String(text)
            }
            _ => scalar(scanner)?,
        };
        loop {
            let Some(frame) = open.pop() else { return Ok(done) };
            scanner.white();
            match frame {
                Frame::Array(mut items) => {
                    items.push(done);
                    if scanner.eat(b',') {
                        scanner.white();
                        open.push(Frame::Array(items));
                        break;
                    }
                    if !scanner.eat(b']') {
                        return scanner.fail("`,` or `]`");
                    }
                    done = Value::Array(items);
                }
                Frame::Object(mut pairs, name) => {
                    pairs.push((name, done));
                    if scanner.eat(b',') {
                        scanner.white();
                        open.push(Frame::Object(pairs, key(scanner)?));
                        break;
                    }
                    if !scanner.eat(b'}') {
                        return scanner.fail("`,` or `}`");
                    }
                    done = Value::Object(pairs);
                }
            }
        }
    }
}

fn key(scanner: &mut Scanner<'_>) -> Result<String, JsonError> {
    let mut key = String::new();
    scanner.key(Some(&mut key))?;
    Ok(key)
}

fn scalar(scanner: &mut Scanner<'_>) -> Result<Value, JsonError> {
    let start = scanner.at();
    scanner.scalar()?;
    Ok(match scanner.since(start) {
        "null" => Value::Null,
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        number => Value::Number(Number::from_source(number)),
    })
}
