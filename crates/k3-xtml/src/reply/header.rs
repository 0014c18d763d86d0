//! Tag headers: what stands between `<|open|>` or `<|close|>` and `<|sep|>` (`docs/xtml.md` 11.2 rule 2).

/// A header that is still being collected.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) closing: bool,
    pub(super) text: String,
}

/// A header taken apart.
pub(super) struct Tag {
    pub(super) name: String,
    attributes: Vec<(String, String)>,
}

impl Header {
    pub(super) fn new(closing: bool) -> Header {
        Header { closing, text: String::new() }
    }

    /// Name up to the first white space, then attributes; what fits neither is left out.
    pub(super) fn parse(&self) -> Tag {
        let text = self.text.trim();
        let (name, mut rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut attributes = Vec::new();
        while let Some((key, after)) = rest.split_once("=\"") {
            let Some((value, after)) = after.split_once('"') else { break };
            let key = key.split_whitespace().next_back().unwrap_or("");
            attributes.push((key.to_owned(), unescape(value)));
            rest = after;
        }
        Tag { name: name.to_owned(), attributes }
    }

    /// For a closing tag of think that lacks its separator: what follows the name.
    pub(super) fn after_think(&self) -> Option<&str> {
        let rest = self.text.trim_start().strip_prefix("think")?;
        (self.closing && rest.chars().next().is_none_or(char::is_whitespace)).then_some(rest)
    }
}

impl Tag {
    /// The first attribute of this key.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let place = self.attributes.iter().position(|(k, _)| k == key)?;
        Some(self.attributes.remove(place).1)
    }
}

/// The reverse of escaping: `&amp;quot;` stood for the text `&quot;`, so quotes come first.
fn unescape(value: &str) -> String {
    value.replace("&quot;", "\"").replace("&amp;", "&")
}
