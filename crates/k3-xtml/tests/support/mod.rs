//! Vectors, and shorthands that several test files share.
#![allow(dead_code)]

use std::path::Path;

use k3_xtml::json::Value;
use k3_xtml::{Channel, ChatRequest, Control, Event, Piece, Reply, ReplyParser, StopReason, TextReplyParser};

/// The cases of a file in `fixtures/xtml`.
pub(crate) fn vectors(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/xtml").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
    match Value::parse(&text) {
        Ok(Value::Array(cases)) => cases,
        other => panic!("{file} is not a list: {other:?}"),
    }
}

pub(crate) fn string(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_else(|| panic!("no text {key} in {value}")).to_owned()
}

pub(crate) fn strings(value: &Value, key: &str) -> Vec<String> {
    match value.get(key) {
        Some(Value::Array(items)) => items.iter().map(|i| i.as_str().expect("a string").to_owned()).collect(),
        other => panic!("{key} is not a list: {other:?}"),
    }
}

/// The JSON text of a value with numbers as they were spelled.
pub(crate) fn raw(value: &Value) -> String {
    match value {
        Value::Number(number) => number.as_source().to_owned(),
        Value::Array(items) => format!("[{}]", items.iter().map(raw).collect::<Vec<_>>().join(",")),
        Value::Object(pairs) => {
            let pairs: Vec<String> =
                pairs.iter().map(|(k, v)| format!("{}:{}", Value::from(k.as_str()), raw(v))).collect();
            format!("{{{}}}", pairs.join(","))
        }
        other => other.to_spaced(),
    }
}

/// The request body of an encode case: its options go where an API client puts them.
pub(crate) fn body(case: &Value) -> String {
    let options = case.get("options").expect("options");
    let mut kwargs = Vec::new();
    let mut fields = vec![("messages", raw(case.get("messages").expect("messages")))];
    if let Some(tools) = case.get("tools") {
        fields.push(("tools", raw(tools)));
    }
    for (key, value) in options.entries() {
        match key {
            "tool_choice" | "response_format" => fields.push((key, raw(value))),
            "thinking" | "thinking_effort" | "add_generation_prompt" => kwargs.push((key, raw(value))),
            other => panic!("option {other} is unknown to the test"),
        }
    }
    let object = |pairs: &[(&str, String)]| {
        let pairs: Vec<String> = pairs.iter().map(|(k, v)| format!("\"{k}\":{v}")).collect();
        format!("{{{}}}", pairs.join(","))
    };
    fields.push(("chat_template_kwargs", object(&kwargs)));
    object(&fields)
}

pub(crate) fn request(case: &Value) -> Result<ChatRequest, k3_xtml::EncodeError> {
    ChatRequest::from_vendor_json(&body(case))
}

/// A chunk of a decode case in token mode: what spells a marker is the marker.
pub(crate) fn piece(chunk: &str) -> Piece<'_> {
    Control::from_spelling(chunk).map_or(Piece::Text(chunk), Piece::Control)
}

pub(crate) fn events<'a>(
    start: Channel,
    stop: StopReason,
    pieces: impl IntoIterator<Item = Piece<'a>>,
) -> Vec<Event> {
    let mut parser = ReplyParser::new(start);
    let mut events: Vec<Event> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish(stop));
    events
}

pub(crate) fn read<'a>(
    start: Channel,
    stop: StopReason,
    pieces: impl IntoIterator<Item = Piece<'a>>,
) -> Reply {
    events(start, stop, pieces).into_iter().collect()
}

pub(crate) fn read_text<'a>(
    start: Channel,
    stop: StopReason,
    texts: impl IntoIterator<Item = &'a str>,
) -> Reply {
    let mut parser = TextReplyParser::new(start);
    let mut reply = Reply::default();
    for text in texts {
        reply.extend(parser.push(text));
    }
    reply.extend(parser.finish(stop));
    reply
}

pub(crate) fn error_names(reply: &Reply) -> Vec<&'static str> {
    reply.errors.iter().map(|error| error.name()).collect()
}

/// Pieces of a compact notation: `⟨` open, `⟩` sep, `⟪` close, `■` end of message, `□` EOS, `▣` another control.
pub(crate) fn pieces(notation: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = notation;
    let control = |c: char| match c {
        '⟨' => Some(Control::Open),
        '⟩' => Some(Control::Sep),
        '⟪' => Some(Control::Close),
        '■' => Some(Control::EndOfMsg),
        '□' => Some(Control::Eos),
        '▣' => Some(Control::Other),
        _ => None,
    };
    while let Some(first) = rest.chars().next() {
        let len = if let Some(marker) = control(first) {
            pieces.push(Piece::Control(marker));
            first.len_utf8()
        } else {
            let len = rest.find(|c| control(c).is_some()).unwrap_or(rest.len());
            pieces.push(Piece::Text(&rest[..len]));
            len
        };
        rest = &rest[len..];
    }
    pieces
}

/// The same reply with every text cut into single characters.
pub(crate) fn single_chars<'a>(pieces: &[Piece<'a>]) -> Vec<Piece<'a>> {
    let mut cut = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => cut.extend(text.split("").filter(|c| !c.is_empty()).map(Piece::Text)),
            Piece::Control(control) => cut.push(Piece::Control(*control)),
        }
    }
    cut
}
