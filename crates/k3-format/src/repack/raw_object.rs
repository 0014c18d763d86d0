//! JSON objects whose members keep their order and their text, so that rewriting one key changes nothing else: no
//! number is rounded, no key moves.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// An object taken apart one level deep.
pub(super) struct RawObject(Vec<(String, String)>);

impl RawObject {
    /// Takes the text of an object apart.
    pub(super) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let mut json = serde_json::Deserializer::from_str(text);
        let object = json.deserialize_map(Members)?;
        json.end()?;
        Ok(object)
    }

    /// The text of a member.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, text)| text.as_str())
    }

    /// Replaces a member, or appends it.
    pub(super) fn set(&mut self, key: &str, text: String) {
        match self.0.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = text,
            None => self.0.push((key.to_owned(), text)),
        }
    }

    /// Takes a member out.
    pub(super) fn remove(&mut self, key: &str) {
        self.0.retain(|(k, _)| k != key);
    }

    /// As text, one member a line, `indent` spaces before the closing brace.
    pub(super) fn print(&self, indent: usize) -> String {
        let members: Vec<String> = self
            .0
            .iter()
            .map(|(key, text)| {
                let key = serde_json::Value::from(key.as_str());
                format!("{:1$}{key}: {text}", "", indent + 2)
            })
            .collect();
        format!("{{\n{}\n{:2$}}}", members.join(",\n"), "", indent)
    }
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = RawObject;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<RawObject, M::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
            members.push((key, value.get().to_owned()));
        }
        Ok(RawObject(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_set_changes() {
        let mut object =
            RawObject::parse(r#"{"z": 1e-05, "a": {"b" :[1, 2]}, "\u0061b": 123456789012345678901}"#)
                .expect("an object");
        assert_eq!(object.get("a"), Some(r#"{"b" :[1, 2]}"#));
        object.set("a", "null".to_owned());
        object.set("new", "[]".to_owned());
        object.remove("absent");
        let printed =
            "{\n  \"z\": 1e-05,\n  \"a\": null,\n  \"ab\": 123456789012345678901,\n  \"new\": []\n}";
        assert_eq!(object.print(0), printed);
        object.remove("z");
        assert!(object.print(2).starts_with("{\n    \"a\": null,\n"));
        assert!(object.print(2).ends_with("\n  }"));
    }
}
