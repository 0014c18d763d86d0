//! The conversation and the options of one request, as types.

use crate::json::Value;

mod from_json;
mod message_json;

/// A request: what the prompt is made of.
///
/// From OpenAI-shaped JSON by [`ChatRequest::from_json`], or by hand:
///
/// ```
/// use k3_xtml::{ChatRequest, Effort, Message};
///
/// let mut request = ChatRequest::new(vec![Message::system("Be brief."), Message::user("Hello")]);
/// request.thinking_effort = Effort::Low.into();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatRequest {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Declarations of the tools, each as the caller wrote it.
    pub tools: Vec<Value>,
    /// Whether the model is told that it must, or must not, call tools.
    pub tool_choice: ToolChoice,
    /// Whether the model is told to answer in JSON.
    pub response_format: ResponseFormat,
    /// Whether the model thinks before it answers. History is shown with its reasoning only if so.
    pub thinking: bool,
    /// How much it thinks. Ignored while `thinking` is off.
    pub thinking_effort: ThinkingEffort,
    /// Whether the prompt ends in an open assistant message.
    pub add_generation_prompt: bool,
}

impl ChatRequest {
    /// A request with the defaults of `docs/xtml.md` 10: thinking on, generation prompt on, nothing else.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest {
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            thinking: true,
            thinking_effort: ThinkingEffort::Default,
            add_generation_prompt: true,
        }
    }
}

/// One message (`docs/xtml.md` 6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Instructions.
    System {
        /// What it says.
        content: Content,
        /// Who says it; empty counts as absent.
        name: Option<String>,
    },
    /// A system message that adds tools in the middle of a conversation (`docs/xtml.md` 7, dynamic declaration).
    ToolDeclaration {
        /// Declarations, each as the caller wrote it.
        tools: Vec<Value>,
    },
    /// The user.
    User {
        /// What it says.
        content: Content,
        /// Who says it; empty counts as absent.
        name: Option<String>,
    },
    /// An earlier reply.
    Assistant(AssistantMessage),
    /// The result of a tool call.
    Tool(ToolResult),
    /// A message the vendor's current encoder refuses and its July revision skips.
    Unrecognised(Unrecognised),
}

impl Message {
    /// A system message.
    pub fn system(content: impl Into<Content>) -> Message {
        Message::System { content: content.into(), name: None }
    }

    /// A user message.
    pub fn user(content: impl Into<Content>) -> Message {
        Message::User { content: content.into(), name: None }
    }

    /// An earlier reply without reasoning and calls; for more see [`AssistantMessage`].
    pub fn assistant(content: impl Into<Content>) -> Message {
        Message::Assistant(AssistantMessage { content: content.into(), ..AssistantMessage::default() })
    }

    /// The result of the call with this id.
    pub fn tool_result(call_id: impl Into<String>, content: impl Into<Content>) -> Message {
        Message::Tool(ToolResult { content: content.into(), call_id: Some(call_id.into()), tool: None })
    }
}

/// An earlier reply of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssistantMessage {
    /// The answer.
    pub content: Content,
    /// Name of the speaker; empty counts as absent.
    pub name: Option<String>,
    /// The reasoning before the answer. The model is trained with the reasoning of all earlier turns in sight.
    pub reasoning: Option<String>,
    /// The calls it made.
    pub tool_calls: Vec<ToolCall>,
}

/// A call in history (`docs/xtml.md` 9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Pairs results with calls; never shown to the model.
    pub id: Option<String>,
    /// Name of the function.
    pub name: String,
    /// What it was called with.
    pub arguments: Arguments,
}

/// Arguments of a call in history. The two full forms render differently (`docs/xtml.md` 9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arguments {
    /// A JSON text: the spelling of top-level values that are not strings is kept. Empty means no arguments.
    Text(String),
    /// An object: values are printed anew.
    Object(Vec<(String, Value)>),
}

/// The result of a call (`docs/xtml.md` 8).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolResult {
    /// What the tool returned.
    pub content: Content,
    /// Id of the call.
    pub call_id: Option<String>,
    /// Name of the tool; a call found by id replaces it, and without either the call at the same position names it.
    pub tool: Option<String>,
}

/// What is wrong with a message that has no rendering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unrecognised {
    /// Role unknown or missing.
    Role(Option<String>),
    /// No object; its JSON type.
    NotObject(&'static str),
}

/// Text of a message: one segment a part, no separator. Empty parts vanish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content(Vec<String>);

impl Content {
    /// The parts.
    pub fn parts(&self) -> &[String] {
        &self.0
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Content {
        Content(vec![text.to_owned()])
    }
}

impl From<String> for Content {
    fn from(text: String) -> Content {
        Content(vec![text])
    }
}

impl From<Vec<String>> for Content {
    fn from(parts: Vec<String>) -> Content {
        Content(parts)
    }
}

/// `tool_choice`, as far as the prompt shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Nothing is written: `auto`, absent, or a named function.
    #[default]
    Auto,
    /// The model must call tools.
    Required,
    /// The model must not call tools.
    None,
}

/// `response_format`, as far as the prompt shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ResponseFormat {
    /// Nothing is written: `text`, absent, or an unknown type.
    #[default]
    Text,
    /// Any JSON.
    JsonObject,
    /// JSON of this schema.
    JsonSchema(Value),
}

/// The option `thinking_effort` (`docs/xtml.md` 10).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ThinkingEffort {
    /// Not given: `max` at the served entry point, no note in the bare function.
    #[default]
    Default,
    /// Explicitly null: no note.
    Silent,
    /// A level.
    Level(Effort),
    /// Some other value, as JSON: refused while thinking is on.
    Unsupported(String),
}

impl From<Effort> for ThinkingEffort {
    fn from(effort: Effort) -> ThinkingEffort {
        ThinkingEffort::Level(effort)
    }
}

/// How much the model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// `low`
    Low,
    /// `high`
    High,
    /// `max`
    Max,
}

impl Effort {
    /// The word in the prompt.
    pub fn name(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }

    /// The level of a word, if the model knows it.
    pub fn from_name(name: &str) -> Option<Effort> {
        [Effort::Low, Effort::High, Effort::Max].into_iter().find(|effort| effort.name() == name)
    }
}
