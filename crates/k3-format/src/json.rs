//! JSON text to a value, with repeated keys refused: which of two values counts differs between readers, so one of
//! them computes something else than the author of the file meant.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Why text was refused.
#[derive(Debug)]
pub(crate) enum JsonFault {
    /// It is not JSON.
    Invalid(serde_json::Error),
    /// An object has this key twice; the path from the root, and where the second one ends.
    Repeated { key: String, line: usize, column: usize },
}

/// Parses a whole file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, JsonFault> {
    let mut repeated = None;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let outcome = Unique(&mut repeated).deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    outcome.map_err(|e| match repeated {
        Some(key) => JsonFault::Repeated { key, line: e.line(), column: e.column() },
        None => JsonFault::Invalid(e),
    })
}

/// Builds a [`Value`]. A repeated key is put here on the way out, because serde's own errors are text only.
struct Unique<'r>(&'r mut Option<String>);

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Value, S::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(Unique(self.0))? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Value, M::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                *self.0 = Some(key);
                return Err(M::Error::custom("a repeated key"));
            }
            let value = map.next_value_seed(Unique(self.0)).inspect_err(|_| {
                if let Some(inner) = self.0.as_mut() {
                    *inner = format!("{key}.{inner}");
                }
            })?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(text: &str) {
        let expected: Value = serde_json::from_str(text).expect(text);
        assert_eq!(parse(text.as_bytes()).expect(text), expected, "{text}");
    }

    fn repeated(text: &str, expected: &str) {
        match parse(text.as_bytes()) {
            Err(JsonFault::Repeated { key, .. }) => assert_eq!(key, expected, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn values_are_those_of_serde_json() {
        for text in
            ["null", "true", "[]", "{}", "-1", "18446744073709551615", "-9223372036854775808", "1e300"]
        {
            same(text);
        }
        same(r#"{"a": {"b": [1, 1.5, "x\u00e9\n", null, {"a": false}]}, "b": {"a": 1}, "A": 2}"#);
        same("[1e-5, 0.1, -0.0, 123456789012345678901234567890]");
    }

    #[test]
    fn repeated_keys_are_named_with_their_path() {
        repeated(r#"{"a": 1, "a": 1}"#, "a");
        repeated(r#"{"a": 1, "\u0061": 2}"#, "a");
        repeated(r#"{"t": {"x": 1, "y": {"a": 1, "b": 2, "a": 3}}, "z": 1}"#, "t.y.a");
        repeated(r#"{"t": [0, {"a": null, "a": null}]}"#, "t.a");
    }

    #[test]
    fn what_is_no_json_is_refused() {
        let deep = "[".repeat(200);
        for text in ["", "{", "{} {}", "1e999", "{1: 2}", "nul", "[1,]", "\u{feff}{}", &deep] {
            assert!(matches!(parse(text.as_bytes()), Err(JsonFault::Invalid(_))), "{text}");
        }
    }
}
