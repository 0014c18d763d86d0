//! A request from OpenAI-shaped JSON: its options. Messages are next door.

use super::{ChatRequest, Effort, Message, ResponseFormat, ThinkingEffort, ToolChoice, message_json};
use crate::error::EncodeError;
use crate::json::Value;

/// Whose rules apply where an API and the vendor's encoder differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    Api,
    Vendor,
}

impl ChatRequest {
    /// Reads the body of an OpenAI-shaped chat request.
    ///
    /// Used: `messages`, `tools`, `tool_choice`, `response_format`, `reasoning_effort`, and in `chat_template_kwargs`:
    /// `thinking` (or `enable_thinking`), `thinking_effort`, `add_generation_prompt`, `response_schema`. All other
    /// fields are left to the caller.
    ///
    /// What an API adds to the vendor's encoder (`docs/xtml.md` 6 and 10): the role `developer` is `system`;
    /// `reasoning_effort` stands in for an absent `thinking_effort`, its value `none` turns thinking off unless
    /// `thinking` is given; a `tool_choice` writes nothing while no tools are declared.
    ///
    /// ```
    /// # use k3_xtml::ChatRequest;
    /// let request = ChatRequest::from_json(r#"{"messages":[{"role":"user","content":[]}],"reasoning_effort":"none"}"#)?;
    /// assert!(!request.thinking);
    /// # Ok::<(), k3_xtml::EncodeError>(())
    /// ```
    pub fn from_json(body: &str) -> Result<ChatRequest, EncodeError> {
        from_value(&Value::parse(body)?, Layer::Api)
    }

    /// Reads a body of the same shape without what an API adds: exactly what the vendor's encoder would be given.
    /// For comparing with the vendor's output.
    pub fn from_vendor_json(body: &str) -> Result<ChatRequest, EncodeError> {
        from_value(&Value::parse(body)?, Layer::Vendor)
    }
}

fn from_value(body: &Value, layer: Layer) -> Result<ChatRequest, EncodeError> {
    let Value::Object(_) = body else {
        return Err(EncodeError::RequestNotObject { found: body.type_name() });
    };
    let messages = match body.get("messages") {
        Some(Value::Array(items)) => items,
        other => {
            return Err(EncodeError::MessagesNotList { found: other.map_or("nothing", Value::type_name) });
        }
    };
    let messages = messages
        .iter()
        .enumerate()
        .map(|(place, message)| message_json::message(message, place, layer))
        .collect::<Result<Vec<_>, _>>()?;
    let kwargs = match body.get("chat_template_kwargs") {
        None | Some(Value::Null) => &Value::Null,
        Some(object @ Value::Object(_)) => object,
        Some(other) => return Err(wrong_option("chat_template_kwargs", "an object", other)),
    };

    let mut request = ChatRequest::new(messages);
    request.tools = match body.get("tools") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(tools)) => tools.clone(),
        Some(other) => return Err(wrong_option("tools", "a list", other)),
    };
    request.tool_choice = tool_choice(body.get("tool_choice"));
    if layer == Layer::Api && !declares_tools(&request) {
        request.tool_choice = ToolChoice::Auto;
    }
    request.response_format = response_format(body.get("response_format"), kwargs.get("response_schema"));
    if let Some(on) = switch(kwargs, "add_generation_prompt")? {
        request.add_generation_prompt = on;
    }

    let mut thinking = switch(kwargs, "thinking")?;
    request.thinking_effort = match kwargs.get("thinking_effort") {
        None => ThinkingEffort::Default,
        Some(Value::Null) => ThinkingEffort::Silent,
        Some(value) => effort(value),
    };
    if layer == Layer::Api {
        if thinking.is_none() {
            thinking = switch(kwargs, "enable_thinking")?;
        }
        if request.thinking_effort == ThinkingEffort::Default {
            match body.get("reasoning_effort") {
                None | Some(Value::Null) => {}
                Some(Value::String(word)) if word == "none" => thinking = thinking.or(Some(false)),
                Some(value) => request.thinking_effort = effort(value),
            }
        }
    }
    request.thinking = thinking.unwrap_or(true);
    Ok(request)
}

fn wrong_option(option: &'static str, expected: &'static str, found: &Value) -> EncodeError {
    EncodeError::OptionWrongType { option, expected, found: found.type_name() }
}

fn switch(kwargs: &Value, option: &'static str) -> Result<Option<bool>, EncodeError> {
    match kwargs.get(option) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(on)) => Ok(Some(*on)),
        Some(other) => Err(wrong_option(option, "true or false", other)),
    }
}

fn effort(value: &Value) -> ThinkingEffort {
    match value.as_str().and_then(Effort::from_name) {
        Some(level) => ThinkingEffort::Level(level),
        None => ThinkingEffort::Unsupported(value.to_spaced()),
    }
}

fn declares_tools(request: &ChatRequest) -> bool {
    !request.tools.is_empty() || request.messages.iter().any(|m| matches!(m, Message::ToolDeclaration { .. }))
}

fn tool_choice(value: Option<&Value>) -> ToolChoice {
    match value.and_then(Value::as_str) {
        Some("required") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        _ => ToolChoice::Auto,
    }
}

/// `docs/xtml.md` 7, on where the type and the schema come from.
fn response_format(format: Option<&Value>, response_schema: Option<&Value>) -> ResponseFormat {
    let Some(format) = format else { return ResponseFormat::Text };
    let kind = match format {
        Value::String(kind) => Some(kind.as_str()),
        object => object.get("type").and_then(Value::as_str),
    };
    match kind {
        Some("json_object") => ResponseFormat::JsonObject,
        Some("json_schema") => {
            let given = response_schema.filter(|schema| **schema != Value::Null);
            let described = format.get("json_schema").map(|described| {
                described.get("schema").or_else(|| described.get("json_schema")).unwrap_or(described)
            });
            ResponseFormat::JsonSchema(given.or(described).cloned().unwrap_or(Value::Null))
        }
        _ => ResponseFormat::Text,
    }
}
