//! XTML, the chat encoding of Kimi K3: conversations to segments, and replies to events.
//!
//! Kimi K3 has no chat template file; `docs/xtml.md` is the definition this crate implements. There are two halves:
//!
//! * [`encode`] makes the [`Prompt`] of a [`ChatRequest`]. A prompt is a list of [`Segment`]s, and only segments
//!   marked `control` may become control tokens: whatever users, tools or earlier replies wrote stays text, also when
//!   it spells a marker.
//! * [`ReplyParser`] reads the model's output, token by token, and gives [`Event`]s: reasoning, content, tool calls.
//!   It never fails; a reply that breaks the format is repaired by fixed rules and each repair is a [`ReplyError`].
//!
//! The crate does no input or output and knows neither tokenizer nor model: the caller encodes segments to ids and
//! maps ids back to [`Piece`]s (see [`Control::from_id`]; `k3-runner` has an example that does both).
//!
//! The vendor's encoder is a program and not a template, so this is one too, with its cases and its refusals; recorded cases
//! of that encoder are the tests. Start reading at `encode.rs`, and at `reply/parser.rs` for the other half.
//!
//! ```
//! use k3_xtml::{ChatRequest, Control, EncodeOptions, FinishReason, Piece, Reply, ReplyParser, StopReason, encode};
//!
//! let request = ChatRequest::from_json(r#"{"messages": [{"role": "user", "content": "2 + 2?"}]}"#)?;
//! let prompt = encode(&request, &EncodeOptions::default())?;
//! assert!(prompt.flat().ends_with("<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>"));
//!
//! // What the model writes, as the caller maps its ids.
//! let output = [
//!     Piece::Text("Easy."),
//!     Piece::Control(Control::Close), Piece::Text("think"), Piece::Control(Control::Sep),
//!     Piece::Control(Control::Open), Piece::Text("response"), Piece::Control(Control::Sep),
//!     Piece::Text("2 + 2 ="), Piece::Text(" 4"),
//!     Piece::Control(Control::Close), Piece::Text("response"), Piece::Control(Control::Sep),
//!     Piece::Control(Control::Close), Piece::Text("message"), Piece::Control(Control::Sep),
//!     Piece::Control(Control::EndOfMsg),
//! ];
//!
//! let mut parser = ReplyParser::new(prompt.open_channel.expect("a generation prompt was asked for"));
//! let mut reply = Reply::default();
//! for piece in output {
//!     reply.extend(parser.push(piece)); // a server streams the events as they come
//! }
//! reply.extend(parser.finish(StopReason::Eos));
//! assert_eq!(reply.reasoning_content, "Easy.");
//! assert_eq!(reply.content, "2 + 2 = 4");
//! assert_eq!(reply.finish_reason, Some(FinishReason::Stop));
//! # Ok::<(), k3_xtml::EncodeError>(())
//! ```

#![forbid(unsafe_code)]

mod control;
mod encode;
mod error;
pub mod json;
mod reply;
mod request;

pub use control::{Channel, Control, Piece};
pub use encode::{EncodeOptions, Entry, Prompt, Revision, Segment, encode};
pub use error::EncodeError;
pub use reply::{
    Event, FinishReason, Reply, ReplyCall, ReplyError, ReplyParser, StopReason, TextReplyParser,
};
pub use request::{
    Arguments, AssistantMessage, ChatRequest, Content, Effort, Message, ResponseFormat, ThinkingEffort,
    ToolCall, ToolChoice, ToolResult, Unrecognised,
};
