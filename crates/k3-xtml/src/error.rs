//! Why a request cannot become a prompt.

use crate::json::JsonError;

/// A request that is refused. [`EncodeError::name`] is the name that `docs/xtml.md` 10 gives it; messages, parts and
/// calls are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The request or a part of it is not JSON, or nested too deeply.
    #[error("reading the chat request: {0}")]
    InvalidJson(#[from] JsonError),
    /// The request is JSON, but no object.
    #[error("reading the chat request: expected an object, found {found}")]
    RequestNotObject {
        /// JSON type.
        found: &'static str,
    },
    /// `messages` is missing or no list.
    #[error("reading the chat request: `messages` must be a list, found {found}")]
    MessagesNotList {
        /// JSON type, or `nothing`.
        found: &'static str,
    },
    /// A message is no object.
    #[error(
        "messages[{message}]: expected an object, found {found}; a list of conversations is not supported"
    )]
    MessageNotObject {
        /// Place in `messages`.
        message: usize,
        /// JSON type.
        found: &'static str,
    },
    /// A message has no role, or one that the model does not know.
    #[error("messages[{message}]: role {} is not one of system, user, assistant, tool",
        .role.as_deref().map_or("(missing)".to_owned(), |r| format!("{r:?}")))]
    UnknownRole {
        /// Place in `messages`.
        message: usize,
        /// The role, if there is one.
        role: Option<String>,
    },
    /// Thinking is on and the effort is none that the model knows.
    #[error(
        "thinking effort {value} is not supported: use low, high or max, or reasoning_effort none for no thinking"
    )]
    UnsupportedThinkingEffort {
        /// What was asked for, as JSON.
        value: String,
    },
    /// A content part has no `type`.
    #[error("messages[{message}].content[{part}]: the part has no `type`")]
    PartMissingType {
        /// Place in `messages`.
        message: usize,
        /// Place in the content.
        part: usize,
    },
    /// A content part has no `text`.
    #[error("messages[{message}].content[{part}]: a part of type {kind} without `text` is not supported")]
    PartMissingText {
        /// Place in `messages`.
        message: usize,
        /// Place in the content.
        part: usize,
        /// The part's type, as JSON.
        kind: String,
    },
    /// A content part is no object.
    #[error("messages[{message}].content[{part}]: expected an object with `type` and `text`, found {found}")]
    PartNotObject {
        /// Place in `messages`.
        message: usize,
        /// Place in the content.
        part: usize,
        /// JSON type.
        found: &'static str,
    },
    /// The content is neither null, nor text, nor a list of parts.
    #[error("messages[{message}]: content must be null, text or a list of text parts, found {found}")]
    ContentWrongType {
        /// Place in `messages`.
        message: usize,
        /// JSON type.
        found: &'static str,
    },
    /// An image. The engine has no vision tower.
    #[error("messages[{message}].content[{part}]: images are not supported, send text only")]
    ImageNotSupported {
        /// Place in `messages`.
        message: usize,
        /// Place in the content.
        part: usize,
    },
    /// A call in history has no function name.
    #[error("messages[{message}].tool_calls[{call}]: the function has no `name`")]
    ToolCallWithoutName {
        /// Place in `messages`.
        message: usize,
        /// Place in `tool_calls`.
        call: usize,
    },
    /// A call's arguments are neither null, nor text, nor an object.
    #[error(
        "messages[{message}].tool_calls[{call}]: arguments must be a JSON text or an object, found {found}"
    )]
    ArgumentsWrongType {
        /// Place in `messages`.
        message: usize,
        /// Place in `tool_calls`.
        call: usize,
        /// JSON type.
        found: &'static str,
    },
    /// July revision only: a call's arguments are a JSON text of something else than an object.
    #[error(
        "messages[{message}].tool_calls[{call}]: arguments must be the text of a JSON object, found {found}"
    )]
    ArgumentsNotObject {
        /// Place in `messages`.
        message: usize,
        /// Place in `tool_calls`.
        call: usize,
        /// JSON type.
        found: &'static str,
    },
    /// A tool result names no tool, and no call stands at its position.
    #[error(
        "messages[{message}]: cannot tell which tool this result is of; send the assistant message with its call \
         before it, or a `name`"
    )]
    UnresolvableToolName {
        /// Place in `messages`.
        message: usize,
    },
    /// A field of a message has a type that cannot be rendered.
    #[error("messages[{message}]: `{field}` must be {expected}, found {found}")]
    FieldWrongType {
        /// Place in `messages`.
        message: usize,
        /// The field.
        field: &'static str,
        /// What it may be.
        expected: &'static str,
        /// JSON type.
        found: &'static str,
    },
    /// An option of the request has a type that cannot be used.
    #[error("reading the chat request: `{option}` must be {expected}, found {found}")]
    OptionWrongType {
        /// The option.
        option: &'static str,
        /// What it may be.
        expected: &'static str,
        /// JSON type.
        found: &'static str,
    },
}

impl EncodeError {
    /// The name in `docs/xtml.md` 10, for API errors and vectors.
    pub fn name(&self) -> &'static str {
        match self {
            EncodeError::InvalidJson(JsonError::Syntax { .. }) => "invalid_json",
            EncodeError::InvalidJson(JsonError::TooDeep { .. }) => "nesting_too_deep",
            EncodeError::RequestNotObject { .. } => "request_not_object",
            EncodeError::MessagesNotList { .. } => "messages_not_list",
            EncodeError::MessageNotObject { .. } => "message_not_object",
            EncodeError::UnknownRole { .. } => "unknown_role",
            EncodeError::UnsupportedThinkingEffort { .. } => "unsupported_thinking_effort",
            EncodeError::PartMissingType { .. } => "part_missing_type",
            EncodeError::PartMissingText { .. } => "part_missing_text",
            EncodeError::PartNotObject { .. } => "part_not_object",
            EncodeError::ContentWrongType { .. } => "content_wrong_type",
            EncodeError::ImageNotSupported { .. } => "image_not_supported",
            EncodeError::ToolCallWithoutName { .. } => "tool_call_without_name",
            EncodeError::ArgumentsWrongType { .. } => "arguments_wrong_type",
            EncodeError::ArgumentsNotObject { .. } => "arguments_not_object",
            EncodeError::UnresolvableToolName { .. } => "unresolvable_tool_name",
            EncodeError::FieldWrongType { .. } => "field_wrong_type",
            EncodeError::OptionWrongType { .. } => "option_wrong_type",
        }
    }
}
