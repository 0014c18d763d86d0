//! A call in the making, and its arguments string (`docs/xtml.md` 11.2 rules 7 to 10).

use std::collections::HashMap;

use super::ReplyError;
use super::header::Tag;
use crate::json::push_quoted;
use crate::json::scan::whole_value;

/// An element of a call whose body is being collected.
#[derive(Debug)]
pub(super) struct Body {
    kind: Kind,
    pub(super) text: String,
}

#[derive(Debug)]
enum Kind {
    /// `key`, and whether the body is JSON.
    Argument(Option<String>, bool),
    Json,
}

impl Body {
    pub(super) fn argument(mut tag: Tag) -> Body {
        let is_json = tag.take("type").is_some_and(|kind| kind != "string");
        Body { kind: Kind::Argument(tag.take("key"), is_json), text: String::new() }
    }

    pub(super) fn json() -> Body {
        Body { kind: Kind::Json, text: String::new() }
    }

    /// The name of the tag that closes it.
    pub(super) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Argument(..) => "argument",
            Kind::Json => "json",
        }
    }
}

/// A call that has been opened.
#[derive(Debug)]
pub(super) struct Call {
    name: Option<String>,
    outside_tools: bool,
    /// Keys with their values as JSON texts.
    arguments: Vec<(String, String)>,
    /// Where in `arguments` a key stands.
    places: HashMap<String, usize>,
    /// Body of the first json element.
    json: Option<String>,
    /// Further json elements.
    spare_json: usize,
}

impl Call {
    pub(super) fn new(mut tag: Tag, outside_tools: bool) -> Call {
        Call {
            name: tag.take("tool").filter(|name| !name.is_empty()),
            outside_tools,
            arguments: Vec::new(),
            places: HashMap::new(),
            json: None,
            spare_json: 0,
        }
    }

    /// Takes an element that has been closed.
    pub(super) fn take(&mut self, body: Body) -> Result<(), ReplyError> {
        let Body { kind, text } = body;
        let (key, is_json) = match kind {
            Kind::Argument(Some(key), is_json) => (key, is_json),
            Kind::Argument(None, _) => return Err(ReplyError::ArgumentWithoutKey),
            Kind::Json => {
                self.spare_json += usize::from(self.json.is_some());
                self.json.get_or_insert(text);
                return Ok(());
            }
        };
        let own = if is_json { whole_value(&text) } else { None };
        let value = own.map_or_else(|| quoted(&text), str::to_owned);
        let bad = is_json && own.is_none();
        if let Some(&place) = self.places.get(&key) {
            self.arguments[place].1 = value;
        } else {
            self.places.insert(key.clone(), self.arguments.len());
            self.arguments.push((key, value));
        }
        if bad { Err(ReplyError::BadArgumentValue) } else { Ok(()) }
    }

    /// Name and arguments, if the call counts; and what was wrong with it.
    pub(super) fn finish(self) -> (Option<(String, String)>, Vec<ReplyError>) {
        if self.outside_tools {
            return (None, vec![ReplyError::CallOutsideTools]);
        }
        let Some(name) = self.name else { return (None, vec![ReplyError::CallWithoutName]) };
        let mut errors = vec![ReplyError::JsonBlockIgnored; self.spare_json];
        let arguments = match self.json {
            Some(text) if self.arguments.is_empty() => {
                if !whole_value(&text).is_some_and(|value| value.starts_with('{')) {
                    errors.push(ReplyError::BadJsonBlock);
                }
                text
            }
            json => {
                errors.extend(json.map(|_| ReplyError::JsonBlockIgnored));
                join(&self.arguments)
            }
        };
        (Some((name, arguments)), errors)
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::new();
    push_quoted(text, &mut out);
    out
}

fn join(arguments: &[(String, String)]) -> String {
    let mut out = String::from("{");
    for (i, (key, value)) in arguments.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        push_quoted(key, &mut out);
        out.push_str(": ");
        out.push_str(value);
    }
    out.push('}');
    out
}
