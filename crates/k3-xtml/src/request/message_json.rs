//! Messages from JSON. Python's rules on absent, null and empty fields decide much here (`docs/xtml.md` 6, 8, 9).

use super::from_json::Layer;
use super::{Arguments, AssistantMessage, Content, Message, ToolCall, ToolResult, Unrecognised};
use crate::error::EncodeError;
use crate::json::Value;

/// A message of the request, at `place` in the list.
pub(super) fn message(value: &Value, place: usize, layer: Layer) -> Result<Message, EncodeError> {
    let Value::Object(_) = value else {
        return Ok(Message::Unrecognised(Unrecognised::NotObject(value.type_name())));
    };
    let reader = Reader { message: value, place };
    reader.refuse_images()?;
    let role = value.get("role").and_then(Value::as_str);
    match role {
        Some("developer") if layer == Layer::Api => reader.system(),
        Some("system") => reader.system(),
        Some("user") => Ok(Message::User { content: reader.content()?, name: reader.name()? }),
        Some("assistant") => reader.assistant(),
        Some("tool") => reader.tool_result(),
        _ => {
            let role = value.get("role").map(|r| r.as_str().map_or_else(|| r.to_spaced(), str::to_owned));
            Ok(Message::Unrecognised(Unrecognised::Role(role)))
        }
    }
}

struct Reader<'a> {
    message: &'a Value,
    place: usize,
}

impl Reader<'_> {
    /// Images are refused in every role, also where the content is not shown.
    fn refuse_images(&self) -> Result<(), EncodeError> {
        let Some(Value::Array(parts)) = self.message.get("content") else { return Ok(()) };
        let is_image = |part: &Value| {
            part.get("type")
                .and_then(Value::as_str)
                .is_some_and(|kind| kind == "image" || kind == "image_url")
        };
        match parts.iter().position(is_image) {
            Some(part) => Err(EncodeError::ImageNotSupported { message: self.place, part }),
            None => Ok(()),
        }
    }

    fn wrong(&self, field: &'static str, expected: &'static str, found: &Value) -> EncodeError {
        EncodeError::FieldWrongType { message: self.place, field, expected, found: found.type_name() }
    }

    fn content(&self) -> Result<Content, EncodeError> {
        match self.message.get("content") {
            None | Some(Value::Null) => Ok(Content::default()),
            Some(Value::String(text)) => Ok(Content::from(text.as_str())),
            Some(Value::Array(parts)) => {
                let texts = parts.iter().enumerate().map(|(place, part)| self.part(part, place));
                Ok(Content(texts.collect::<Result<_, _>>()?))
            }
            Some(other) => {
                Err(EncodeError::ContentWrongType { message: self.place, found: other.type_name() })
            }
        }
    }

    fn part(&self, part: &Value, place: usize) -> Result<String, EncodeError> {
        let message = self.place;
        let Value::Object(_) = part else {
            return Err(EncodeError::PartNotObject { message, part: place, found: part.type_name() });
        };
        let Some(kind) = part.get("type") else {
            return Err(EncodeError::PartMissingType { message, part: place });
        };
        match part.get("text") {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(EncodeError::ContentWrongType { message, found: other.type_name() }),
            None => Err(EncodeError::PartMissingText { message, part: place, kind: kind.to_spaced() }),
        }
    }

    /// The string form of a scalar, as Python's `str` gives it; `None` for null.
    fn string_form(&self, field: &'static str, value: &Value) -> Result<Option<String>, EncodeError> {
        match value {
            Value::Null => Ok(None),
            Value::Bool(true) => Ok(Some("True".to_owned())),
            Value::Bool(false) => Ok(Some("False".to_owned())),
            Value::Number(number) => Ok(Some(number.to_string())),
            Value::String(text) => Ok(Some(text.clone())),
            Value::Array(_) | Value::Object(_) => Err(self.wrong(field, "a string", value)),
        }
    }

    fn name(&self) -> Result<Option<String>, EncodeError> {
        match self.message.get("name") {
            Some(name) if !name.is_falsy() => self.string_form("name", name),
            _ => Ok(None),
        }
    }

    fn system(&self) -> Result<Message, EncodeError> {
        match self.message.get("tools") {
            Some(Value::Array(tools)) if !tools.is_empty() => {
                Ok(Message::ToolDeclaration { tools: tools.clone() })
            }
            Some(other) if !other.is_falsy() => Err(self.wrong("tools", "a list", other)),
            _ => Ok(Message::System { content: self.content()?, name: self.name()? }),
        }
    }

    fn assistant(&self) -> Result<Message, EncodeError> {
        let tool_calls = match self.message.get("tool_calls") {
            Some(Value::Array(calls)) => {
                let calls = calls.iter().enumerate().map(|(place, call)| self.tool_call(call, place));
                calls.collect::<Result<_, _>>()?
            }
            Some(other) if !other.is_falsy() => return Err(self.wrong("tool_calls", "a list", other)),
            _ => Vec::new(),
        };
        Ok(Message::Assistant(AssistantMessage {
            content: self.content()?,
            name: self.name()?,
            reasoning: self.reasoning()?,
            tool_calls,
        }))
    }

    /// `reasoning_content`, or `reasoning` when that is falsy.
    fn reasoning(&self) -> Result<Option<String>, EncodeError> {
        for field in ["reasoning_content", "reasoning"] {
            match self.message.get(field) {
                Some(Value::String(text)) if !text.is_empty() => return Ok(Some(text.clone())),
                Some(other) if !other.is_falsy() => return Err(self.wrong(field, "a string", other)),
                _ => {}
            }
        }
        Ok(None)
    }

    fn tool_call(&self, call: &Value, place: usize) -> Result<ToolCall, EncodeError> {
        let function = call.get("function").unwrap_or(call);
        let name = match function.get("name") {
            Some(name) => self.string_form("tool_calls[].function.name", name)?,
            None => None,
        };
        let Some(name) = name else {
            return Err(EncodeError::ToolCallWithoutName { message: self.place, call: place });
        };
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Arguments::Text(String::new()),
            Some(Value::String(text)) => Arguments::Text(text.clone()),
            Some(Value::Object(pairs)) => Arguments::Object(pairs.clone()),
            Some(other) => {
                let found = other.type_name();
                return Err(EncodeError::ArgumentsWrongType { message: self.place, call: place, found });
            }
        };
        let id = match call.get("id") {
            Some(id) => self.string_form("tool_calls[].id", id)?,
            None => None,
        };
        Ok(ToolCall { id, name, arguments })
    }

    fn tool_result(&self) -> Result<Message, EncodeError> {
        // The first key that is present counts, even if it is null.
        let first_of = |fields: [&'static str; 2]| {
            let present = fields.into_iter().find_map(|field| Some((field, self.message.get(field)?)));
            present.map_or(Ok(None), |(field, value)| self.string_form(field, value))
        };
        Ok(Message::Tool(ToolResult {
            content: self.content()?,
            call_id: first_of(["tool_call_id", "id"])?,
            tool: first_of(["tool", "name"])?,
        }))
    }
}
