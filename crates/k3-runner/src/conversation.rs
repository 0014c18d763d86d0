//! Conversations that go on: the sequence is kept between turns, and only what is new is prefilled.

use std::ops::ControlFlow;

use k3_graph::{Device, check_tokens};
use k3_xtml::{ChatRequest, Message};

use crate::{ChatError, ChatEvent, ChatReply, Chatter, Finish, Generate, RunError, Sequence};

/// A conversation and the sequence that has read it so far.
///
/// Before every reply the whole request is encoded anew. Where the ids that the sequence has consumed begin that prompt,
/// only the rest is prefilled; where they do not (another option, a reply that broke the format and was repaired, text
/// that the model did not write in the tokenizer's own pieces), all of it is. So a reply never depends on whether earlier
/// turns were made here.
pub struct Conversation<'a, D: Device> {
    chatter: &'a Chatter<'a, D>,
    /// Messages and options of the next reply. They may be changed in any way between replies.
    pub request: ChatRequest,
    sequence: Option<Sequence<D>>,
    calls: usize,
}

/// A reply in a conversation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Turn {
    /// The reply. Its [`crate::Usage::prompt_tokens`] is the whole prompt.
    pub reply: ChatReply,
    /// Ids that the calls of the reply have in the history, in order: for [`Message::tool_result`].
    pub call_ids: Vec<String>,
    /// Tokens of the prompt that the sequence had read before.
    pub kept_tokens: usize,
}

impl<'a, D: Device> Conversation<'a, D> {
    /// A conversation of which nothing has been read yet.
    pub fn new(chatter: &'a Chatter<'a, D>, request: ChatRequest) -> Self {
        Self { chatter, request, sequence: None, calls: 0 }
    }

    /// Adds a message.
    pub fn push(&mut self, message: Message) {
        self.request.messages.push(message);
    }

    /// The ids that have been read and need not be prefilled again.
    pub fn consumed(&self) -> &[u32] {
        self.sequence.as_ref().map_or(&[], |s| s.tokens())
    }

    /// Replies to the messages so far, and adds the reply to them as history.
    ///
    /// After an error the messages are as before. A reply that was cancelled before its first token is not added.
    pub fn reply(
        &mut self,
        generate: &Generate,
        events: &mut dyn FnMut(ChatEvent) -> ControlFlow<()>,
    ) -> Result<Turn, ChatError> {
        let (prompt, ids) = self.chatter.prompt_ids(&self.request)?;
        let channel = prompt.open_channel.ok_or(ChatError::NoGenerationPrompt)?;
        let engine = self.chatter.engine();
        // Refused before the sequence is touched: it stays good for a shorter prompt.
        check_tokens(engine.model().config(), &ids, 0).map_err(RunError::from)?;
        let mut sequence = match self.sequence.take() {
            Some(kept) if kept.position() < ids.len() && ids.starts_with(kept.tokens()) => kept,
            _ => engine.new_sequence().map_err(RunError::from)?,
        };
        let kept_tokens = sequence.position();
        let mut reply =
            self.chatter.reply_to_ids(&mut sequence, &ids[kept_tokens..], channel, generate, events)?;
        reply.usage.prompt_tokens = ids.len();
        // A prefill that was broken off leaves a sequence that cannot go on.
        if sequence.position() >= ids.len() {
            self.sequence = Some(sequence);
        }
        let first = self.calls;
        let call_ids = (first..).take(reply.reply.tool_calls.len()).map(|n| format!("call-{n}")).collect();
        if !(reply.finish == Finish::Cancelled && reply.tokens.is_empty()) {
            self.calls += reply.reply.tool_calls.len();
            self.push(reply.reply.clone().into_message(|index| format!("call-{}", first + index)));
        }
        Ok(Turn { reply, call_ids, kept_tokens })
    }
}
