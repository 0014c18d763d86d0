//! From a request to the segments of its prompt (`docs/xtml.md` 3 to 9).

use std::borrow::Cow;

use crate::control::{Channel, Control};
use crate::error::EncodeError;
use crate::json::dictionary;
use crate::request::{
    Arguments, AssistantMessage, ChatRequest, Content, Effort, Message, ThinkingEffort, ToolCall,
    Unrecognised,
};

mod arguments;
mod notes;
mod results;
mod writer;

use results::Results;
use writer::Writer;

/// The vendor's entry points, which differ in the default of the thinking effort (`docs/xtml.md` 10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entry {
    /// The function that builds segments: no effort, no note.
    Bare,
    /// The chat template of the tokenizer, which servers call: no effort means `max`.
    #[default]
    Served,
}

/// The vendor's published behaviours (`docs/xtml.md` 12).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Revision {
    /// The checkpoints of August 2026 and later.
    #[default]
    Current,
    /// The first checkpoints.
    July,
}

/// How to encode. The default is what a server wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Which defaults apply.
    pub entry: Entry,
    /// Which behaviour of the vendor.
    pub revision: Revision,
}

/// A stretch of the prompt. Each is tokenized alone and the ids are joined; joining texts first would change ids
/// (`docs/xtml.md` 3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The text; never empty.
    pub text: Cow<'static, str>,
    /// Whether the text is exactly one control token. If not, no control token may be recognised in it.
    pub control: bool,
}

/// An encoded request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prompt {
    /// The prompt in order.
    pub segments: Vec<Segment>,
    /// The channel that the reply continues, where there is a generation prompt. [`crate::ReplyParser`] starts here.
    pub open_channel: Option<Channel>,
}

impl Prompt {
    /// All text in one string, for people. Never tokenize it: that is how users would forge control tokens.
    pub fn flat(&self) -> String {
        self.segments.iter().map(|segment| segment.text.as_ref()).collect()
    }
}

/// Encodes a request.
pub fn encode(request: &ChatRequest, options: &EncodeOptions) -> Result<Prompt, EncodeError> {
    let mut encoder =
        Encoder { out: Writer::default(), revision: options.revision, thinking: request.thinking };
    if !request.tools.is_empty() {
        encoder.note("tool-declare", notes::static_tools(&request.tools));
    }
    if let Some(effort) = effort(request, options.entry)? {
        encoder.note("thinking-effort", notes::effort(effort));
    }
    encoder.conversation(&request.messages)?;
    if let Some(note) = notes::tool_choice(request.tool_choice) {
        encoder.note("tool-choice", note);
    }
    if let Some(note) = notes::response_format(&request.response_format) {
        encoder.note("response-format", note);
    }
    let open_channel = request.add_generation_prompt.then_some(if request.thinking {
        Channel::Think
    } else {
        Channel::Response
    });
    if let Some(channel) = open_channel {
        encoder.out.open("message", &[(" role", "assistant")]);
        encoder.out.open(channel.name(), &[]);
    }
    Ok(Prompt { segments: encoder.out.segments, open_channel })
}

fn effort(request: &ChatRequest, entry: Entry) -> Result<Option<Effort>, EncodeError> {
    if !request.thinking {
        return Ok(None);
    }
    match &request.thinking_effort {
        ThinkingEffort::Default => Ok((entry == Entry::Served).then_some(Effort::Max)),
        ThinkingEffort::Silent => Ok(None),
        ThinkingEffort::Level(level) => Ok(Some(*level)),
        ThinkingEffort::Unsupported(value) => {
            Err(EncodeError::UnsupportedThinkingEffort { value: value.clone() })
        }
    }
}

struct Encoder {
    out: Writer,
    revision: Revision,
    thinking: bool,
}

impl Encoder {
    fn note(&mut self, kind: &'static str, body: String) {
        self.out.open("message", &[(" role", "system"), (" type", kind)]);
        self.out.text(body);
        self.end_message();
    }

    fn end_message(&mut self) {
        self.out.close("message");
        self.out.control(Control::EndOfMsg);
    }

    fn content(&mut self, content: &Content) {
        for part in content.parts() {
            self.out.text(part.clone());
        }
    }

    fn conversation(&mut self, messages: &[Message]) -> Result<(), EncodeError> {
        let mut results = Results::default();
        let mut place = 0;
        while let Some(message) = messages.get(place) {
            match message {
                Message::System { content, name } => self.plain("system", name.as_deref(), content),
                Message::User { content, name } => self.plain("user", name.as_deref(), content),
                Message::ToolDeclaration { tools } => {
                    self.note("tool-declare", notes::dynamic_tools(tools));
                }
                Message::Assistant(assistant) => {
                    self.assistant(assistant, place)?;
                    results.follow(&assistant.tool_calls);
                }
                Message::Tool(_) => {
                    let run = results.take_run(messages, place)?;
                    place += run.len();
                    for result in run {
                        let index = result.index.to_string();
                        let attributes = [(" role", "tool"), (" tool", result.tool), (" index", &index)];
                        self.out.open("message", &attributes);
                        self.content(result.content);
                        self.end_message();
                    }
                    continue;
                }
                Message::Unrecognised(_) if self.revision == Revision::July => {}
                Message::Unrecognised(Unrecognised::Role(role)) => {
                    return Err(EncodeError::UnknownRole { message: place, role: role.clone() });
                }
                Message::Unrecognised(Unrecognised::NotObject(found)) => {
                    return Err(EncodeError::MessageNotObject { message: place, found });
                }
            }
            place += 1;
        }
        Ok(())
    }

    fn open_message(&mut self, role: &str, name: Option<&str>) {
        match name.filter(|name| !name.is_empty()) {
            Some(name) => self.out.open("message", &[(" role", role), (" name", name)]),
            None => self.out.open("message", &[(" role", role)]),
        }
    }

    fn plain(&mut self, role: &str, name: Option<&str>, content: &Content) {
        self.open_message(role, name);
        self.content(content);
        self.end_message();
    }

    fn assistant(&mut self, message: &AssistantMessage, place: usize) -> Result<(), EncodeError> {
        self.open_message("assistant", message.name.as_deref());
        if self.thinking {
            self.out.open("think", &[]);
            let reasoning = message.reasoning.as_deref().unwrap_or("");
            if self.revision == Revision::Current || !arguments::is_python_blank(reasoning) {
                self.out.text(reasoning.to_owned());
            }
            self.out.close("think");
        }
        self.out.open("response", &[]);
        self.content(&message.content);
        self.out.close("response");
        if !message.tool_calls.is_empty() {
            self.out.open("tools", &[]);
            for (number, call) in message.tool_calls.iter().enumerate() {
                self.call(call, place, number)?;
            }
            self.out.close("tools");
        }
        self.end_message();
        Ok(())
    }

    fn call(&mut self, call: &ToolCall, message: usize, number: usize) -> Result<(), EncodeError> {
        let index = (number + 1).to_string();
        self.out.open("call", &[(" tool", &call.name), (" index", &index)]);
        match &call.arguments {
            Arguments::Object(pairs) => arguments::object(&mut self.out, &dictionary(pairs)),
            Arguments::Text(text) if text.is_empty() => {}
            Arguments::Text(text) if self.revision == Revision::Current => {
                arguments::text(&mut self.out, text);
            }
            Arguments::Text(text) => arguments::july_text(&mut self.out, text, message, number)?,
        }
        self.out.close("call");
        Ok(())
    }
}
