//! Printing as Python's `json.dumps(..., ensure_ascii=False)` does.

use std::fmt::Write as _;

use super::{Value, dictionary};

/// Which arguments of `json.dumps`.
#[derive(Clone, Copy)]
pub(super) enum Style {
    /// Keys sorted at every depth, separators `,` and `:`.
    Sorted,
    /// Keys in order, separators `", "` and `": "`.
    Spaced,
}

pub(super) fn print(value: &Value, style: Style, out: &mut String) {
    let (comma, colon) = match style {
        Style::Sorted => (",", ":"),
        Style::Spaced => (", ", ": "),
    };
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(comma);
                }
                print(item, style, out);
            }
            out.push(']');
        }
        Value::Object(pairs) => {
            let mut entries = dictionary(pairs);
            if let Style::Sorted = style {
                // UTF-8 byte order is code point order.
                entries.sort_unstable_by_key(|(key, _)| *key);
            }
            out.push('{');
            for (i, (key, value)) in entries.into_iter().enumerate() {
                if i > 0 {
                    out.push_str(comma);
                }
                push_quoted(key, out);
                out.push_str(colon);
                print(value, style, out);
            }
            out.push('}');
        }
        scalar => push_scalar(scalar, out),
    }
}

fn push_scalar(value: &Value, out: &mut String) {
    match value {
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => {
            let _ = write!(out, "{number}");
        }
        Value::String(text) => push_quoted(text, out),
        Value::Null | Value::Array(_) | Value::Object(_) => out.push_str("null"),
    }
}

/// A JSON string: quote, backslash and characters below 0x20 escaped, all else raw (`docs/xtml.md` 7).
pub(crate) fn push_quoted(text: &str, out: &mut String) {
    out.reserve(text.len() + 2);
    out.push('"');
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[plain..at]);
        plain = at + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            0x08 => out.push_str("\\b"),
            0x0c => out.push_str("\\f"),
            _ => {
                let _ = write!(out, "\\u{byte:04x}");
            }
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// Python's `repr` of a float, and the JSON spellings of the non-finite ones.
pub(crate) fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Shortest digits that round-trip, as d[.ddd]e[-]x; only their arrangement differs from Python's.
    let shortest = format!("{value:e}");
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    if !(-4..16).contains(&exponent) {
        let sign_of_exponent = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{mantissa}e{sign_of_exponent}{:02}", exponent.unsigned_abs());
    }
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    if exponent < 0 {
        let zeros = "0".repeat(exponent.unsigned_abs() as usize - 1);
        return format!("{sign}0.{zeros}{digits}");
    }
    let whole = exponent as usize + 1;
    if digits.len() > whole {
        format!("{sign}{}.{}", &digits[..whole], &digits[whole..])
    } else {
        format!("{sign}{digits}{}.0", "0".repeat(whole - digits.len()))
    }
}
