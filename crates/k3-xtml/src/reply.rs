//! What reading a reply yields: events, and a whole reply made of them.

use crate::request::{Arguments, AssistantMessage, Content, Message, ToolCall};

mod call;
mod header;
mod parser;
mod text;

pub use parser::ReplyParser;
pub use text::TextReplyParser;

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended its turn.
    Eos,
    /// The token limit.
    Length,
    /// Another stop condition, such as a stop string, without an end token.
    Stop,
}

/// `finish_reason` of the OpenAI API (`docs/xtml.md` 11.2 rule 13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A complete answer.
    Stop,
    /// The token limit cut the turn, even if it holds complete calls.
    Length,
    /// At least one call.
    ToolCalls,
}

impl FinishReason {
    /// The word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}

/// A call the model made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyCall {
    /// From 0, by arrival.
    pub index: usize,
    /// Name of the function; never empty.
    pub name: String,
    /// JSON text of the arguments, values in the model's own spelling. It is an object, save after
    /// [`ReplyError::BadJsonBlock`], where it is what the model wrote.
    pub arguments: String,
}

/// Something a reply says, as soon as it is certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More reasoning. Never empty.
    ReasoningDelta(String),
    /// More of the answer. Never empty.
    ContentDelta(String),
    /// A complete call.
    ToolCall(ReplyCall),
    /// The model broke the format; reading went on. After [`ReplyError::SkippedThink`] all reasoning so far is
    /// void, and comes again as content.
    Error(ReplyError),
    /// The end. Nothing follows.
    Finish(FinishReason),
}

/// How a reply can break the format, and what was done (`docs/xtml.md` 11.2). To be counted and logged: a reply is
/// usable with any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// Text in `tools` or `call` outside a value, or after the answer: dropped.
    #[error("text in a place for tags only was dropped")]
    StrayText,
    /// Text outside all channels before any answer: taken as content.
    #[error("text outside all channels was taken as content")]
    TextOutsideChannel,
    /// A channel was ended by the next one or by the end of the message.
    #[error("a channel was not closed before the next element")]
    ImplicitClose,
    /// An opening tag with no meaning here: dropped, its text kept.
    #[error("an opening tag that has no meaning at its place was dropped")]
    UnknownTag,
    /// The answer was written into the think channel: moved to content.
    #[error("the answer was written in the think channel and was moved to content")]
    SkippedThink,
    /// A call without its closing tag: dropped.
    #[error("a call that was not closed was dropped")]
    UnclosedCall,
    /// A call without a function name: dropped.
    #[error("a call without a function name was dropped")]
    CallWithoutName,
    /// A call outside `tools`: dropped.
    #[error("a call outside the tools element was dropped")]
    CallOutsideTools,
    /// A value that is not JSON though its type says so: taken as a string.
    #[error("an argument value that is not JSON was taken as a string")]
    BadArgumentValue,
    /// An argument without a key: dropped.
    #[error("an argument without a key was dropped")]
    ArgumentWithoutKey,
    /// An argument without its closing tag: dropped.
    #[error("an argument that was not closed was dropped")]
    UnclosedArgument,
    /// A `json` element that is no JSON object: kept as it is.
    #[error("a json element that is not a JSON object was kept as it is")]
    BadJsonBlock,
    /// A `json` element next to arguments: dropped.
    #[error("a json element next to arguments was dropped")]
    JsonBlockIgnored,
    /// A closing tag that matches nothing: dropped.
    #[error("a closing tag that matches nothing was dropped")]
    StrayClose,
    /// A separator without a tag: dropped.
    #[error("a separator without a tag was dropped")]
    StraySep,
    /// A tag cut by another marker or by the end: dropped.
    #[error("a tag that was cut was dropped")]
    TruncatedTag,
    /// The end token came inside a channel.
    #[error("the reply ended inside a channel")]
    UnclosedChannel,
}

impl ReplyError {
    /// The name in `docs/xtml.md` 11.2.
    pub fn name(self) -> &'static str {
        match self {
            ReplyError::StrayText => "stray_text",
            ReplyError::TextOutsideChannel => "text_outside_channel",
            ReplyError::ImplicitClose => "implicit_close",
            ReplyError::UnknownTag => "unknown_tag",
            ReplyError::SkippedThink => "skipped_think",
            ReplyError::UnclosedCall => "unclosed_call",
            ReplyError::CallWithoutName => "call_without_name",
            ReplyError::CallOutsideTools => "call_outside_tools",
            ReplyError::BadArgumentValue => "bad_argument_value",
            ReplyError::ArgumentWithoutKey => "argument_without_key",
            ReplyError::UnclosedArgument => "unclosed_argument",
            ReplyError::BadJsonBlock => "bad_json_block",
            ReplyError::JsonBlockIgnored => "json_block_ignored",
            ReplyError::StrayClose => "stray_close",
            ReplyError::StraySep => "stray_sep",
            ReplyError::TruncatedTag => "truncated_tag",
            ReplyError::UnclosedChannel => "unclosed_channel",
        }
    }
}

/// A whole reply: the events joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Reasoning; empty if there is none.
    pub reasoning_content: String,
    /// The answer; empty if there is none.
    pub content: String,
    /// Complete calls in order.
    pub tool_calls: Vec<ReplyCall>,
    /// Why it ended; `None` until it has.
    pub finish_reason: Option<FinishReason>,
    /// Errors in order.
    pub errors: Vec<ReplyError>,
}

impl Reply {
    /// Adds one event.
    pub fn push(&mut self, event: Event) {
        match event {
            Event::ReasoningDelta(text) => self.reasoning_content.push_str(&text),
            Event::ContentDelta(text) => self.content.push_str(&text),
            Event::ToolCall(call) => self.tool_calls.push(call),
            Event::Error(error) => {
                if error == ReplyError::SkippedThink {
                    self.reasoning_content.clear();
                }
                self.errors.push(error);
            }
            Event::Finish(reason) => self.finish_reason = Some(reason),
        }
    }

    /// The reply as history for the next request. `id` gives each call its id, from its index; ids must differ
    /// within a conversation, or results cannot be paired with calls.
    pub fn into_message(self, mut id: impl FnMut(usize) -> String) -> Message {
        let call = |call: ReplyCall| ToolCall {
            id: Some(id(call.index)),
            name: call.name,
            arguments: Arguments::Text(call.arguments),
        };
        Message::Assistant(AssistantMessage {
            content: Content::from(self.content),
            name: None,
            reasoning: Some(self.reasoning_content).filter(|text| !text.is_empty()),
            tool_calls: self.tool_calls.into_iter().map(call).collect(),
        })
    }
}

impl Extend<Event> for Reply {
    fn extend<I: IntoIterator<Item = Event>>(&mut self, events: I) {
        for event in events {
            self.push(event);
        }
    }
}

impl FromIterator<Event> for Reply {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Reply {
        let mut reply = Reply::default();
        reply.extend(events);
        reply
    }
}
