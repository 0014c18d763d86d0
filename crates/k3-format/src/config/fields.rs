//! Reading one JSON object field by field, keeping every problem instead of stopping at the first.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::MAX_LAYERS;
use crate::printable::printable;

/// One field of a config file that is missing or cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigProblem {
    /// Path of the field, such as `text_config.linear_attn_config.num_heads`.
    pub field: String,
    /// What the engine can use.
    pub expected: String,
    /// What the file has, shortened.
    pub found: String,
    /// What the field decides, or what to do.
    pub reason: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {} ({})", self.field, self.expected, self.found, self.reason)
    }
}

/// A JSON object, the keys that were asked for, and what was wrong with them.
pub(crate) struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
    read: Vec<&'static str>,
    problems: Vec<ConfigProblem>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &str, map: &'a Map<String, Value>) -> Self {
        Self { path: path.to_owned(), map, read: Vec::new(), problems: Vec::new() }
    }

    /// The full path of `key`.
    pub(crate) fn path(&self, key: &str) -> String {
        let key = printable(key);
        if self.path.is_empty() { key.into_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.read.push(key);
        self.map.get(key)
    }

    /// The value, with `null` taken as absent. Only for fields that the tables call optional.
    pub(crate) fn get_optional(&mut self, key: &'static str) -> Option<&'a Value> {
        self.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn problem(
        &mut self,
        key: &str,
        expected: impl Into<String>,
        found: Option<&Value>,
        reason: &str,
    ) {
        let problem = ConfigProblem {
            field: self.path(key),
            expected: expected.into(),
            found: show(found),
            reason: reason.to_owned(),
        };
        self.problems.push(problem);
    }

    pub(crate) fn int(
        &mut self,
        key: &'static str,
        range: RangeInclusive<usize>,
        reason: &'static str,
    ) -> Option<usize> {
        let value = self.get(key);
        self.int_value(key, value, range, reason)
    }

    pub(crate) fn int_value(
        &mut self,
        key: &str,
        value: Option<&Value>,
        range: RangeInclusive<usize>,
        reason: &str,
    ) -> Option<usize> {
        let number = value.and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        let number = number.filter(|n| range.contains(n));
        if number.is_none() {
            self.problem(key, format!("an integer from {} to {}", range.start(), range.end()), value, reason);
        }
        number
    }

    /// A finite number that `accepts` accepts; `expected` says in words which those are.
    pub(crate) fn float(
        &mut self,
        key: &'static str,
        expected: &str,
        accepts: impl Fn(f64) -> bool,
        reason: &'static str,
    ) -> Option<f64> {
        let value = self.get(key);
        let number = value.and_then(Value::as_f64).filter(|x| x.is_finite() && accepts(*x));
        if number.is_none() {
            self.problem(key, expected, value, reason);
        }
        number
    }

    pub(crate) fn boolean(&mut self, key: &'static str, reason: &'static str) -> Option<bool> {
        let value = self.get(key);
        let flag = value.and_then(Value::as_bool);
        if flag.is_none() {
            self.problem(key, "true or false", value, reason);
        }
        flag
    }

    /// A field of which the engine implements one value only.
    pub(crate) fn only(&mut self, key: &'static str, wanted: impl Into<Value>, reason: &'static str) {
        let value = self.get(key);
        self.only_value(key, value, &wanted.into(), reason);
    }

    /// The same for a field that may be absent (or null), which means `wanted`.
    pub(crate) fn only_if_present(
        &mut self,
        key: &'static str,
        wanted: impl Into<Value>,
        reason: &'static str,
    ) {
        if let Some(value) = self.get_optional(key) {
            self.only_value(key, Some(value), &wanted.into(), reason);
        }
    }

    fn only_value(&mut self, key: &str, value: Option<&Value>, wanted: &Value, reason: &str) {
        if value != Some(wanted) {
            self.problem(key, wanted.to_string(), value, reason);
        }
    }

    /// A nested object.
    pub(crate) fn object(&mut self, key: &'static str, reason: &'static str) -> Option<Fields<'a>> {
        let value = self.get(key);
        let map = value.and_then(Value::as_object);
        if map.is_none() {
            self.problem(key, "an object", value, reason);
        }
        map.map(|map| Fields::new(&self.path(key), map))
    }

    /// A list of positive integers, one a layer at most.
    pub(crate) fn int_list(&mut self, key: &'static str, reason: &'static str) -> Option<Vec<usize>> {
        let value = self.get(key);
        let list = value.and_then(Value::as_array).filter(|list| list.len() <= MAX_LAYERS).and_then(|list| {
            list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect::<Option<Vec<_>>>()
        });
        if list.is_none() {
            self.problem(key, format!("a list of at most {MAX_LAYERS} integers from 1"), value, reason);
        }
        list
    }

    /// Token ids: an integer, a list of them, or nothing.
    pub(crate) fn token_ids(&mut self, key: &'static str, vocab_size: Option<usize>) -> Vec<u32> {
        let value = self.get_optional(key);
        let Some(value) = value else { return Vec::new() };
        let id = |v: &Value| {
            let id = v.as_u64().and_then(|n| u32::try_from(n).ok())?;
            vocab_size.is_none_or(|size| (id as usize) < size).then_some(id)
        };
        let ids = match value {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
            other => id(other).map(|id| vec![id]),
        };
        ids.unwrap_or_else(|| {
            let expected = match vocab_size {
                Some(size) => format!("a token id below vocab_size {size}, or a list of them"),
                None => "a token id or a list of them".to_owned(),
            };
            self.problem(key, expected, Some(value), "a token id with a meaning");
            Vec::new()
        })
    }

    /// Keys of the object that were neither read nor are in `ignored`.
    pub(crate) fn unknown_keys(&self, ignored: &[&str]) -> Vec<String> {
        let known = |key: &str| self.read.contains(&key) || ignored.contains(&key);
        self.map.keys().filter(|key| !known(key)).map(|key| self.path(key)).collect()
    }

    pub(crate) fn absorb(&mut self, problems: Vec<ConfigProblem>) {
        self.problems.extend(problems);
    }

    pub(crate) fn into_problems(self) -> Vec<ConfigProblem> {
        self.problems
    }
}

/// A value in an error message: short, whatever the file holds.
pub(crate) fn show(value: Option<&Value>) -> String {
    const LONGEST: usize = 80;
    let Some(value) = value else { return "nothing: the key is absent".to_owned() };
    let text = match value {
        Value::Object(map) => format!("an object of {} keys", map.len()),
        Value::Array(list) if list.len() > 8 => format!("a list of {} entries", list.len()),
        other => printable(&other.to_string()).into_owned(),
    };
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("...".chars()).collect()
}
