//! Conversations on an engine: chat request to ids, ids to reasoning, content and tool calls.

use std::ops::ControlFlow;

use k3_format::ModelConfig;
use k3_graph::Device;
use k3_tokenizer::{Tokenizer, UnknownId, Utf8Stream};
use k3_xtml::{
    Channel, ChatRequest, Control, EncodeError, EncodeOptions, Piece, Prompt, Reply, ReplyParser, StopReason,
    encode,
};

use crate::{Engine, Event, Finish, Generate, LogitsHash, RunError, Sequence};

/// An engine that speaks: the model, and the tokenizer of its checkpoint.
///
/// ```no_run
/// use k3_graph::Cpu;
/// use k3_runner::{ChatEvent, Chatter, Engine, EngineOptions, Generate};
/// use k3_xtml::{ChatRequest, Message};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = "/models/kimi-k3";
/// let engine = Engine::open(dir, Cpu::new(0)?, &EngineOptions::default(), &mut |_| {})?;
/// let chatter = Chatter::new(&engine, k3_tokenizer::Tokenizer::open(dir)?)?;
/// let request = ChatRequest::new(vec![Message::user("What is 2 + 2?")]);
/// let reply = chatter.reply(&request, &Generate::default(), &mut |event| {
///     if let ChatEvent::Reply(k3_xtml::Event::ContentDelta(text)) = event {
///         print!("{text}");
///     }
///     std::ops::ControlFlow::Continue(())
/// })?;
/// println!("\n{:?} {:?}", reply.reply.finish_reason, reply.usage);
/// # Ok(())
/// # }
/// ```
pub struct Chatter<'a, D: Device> {
    engine: &'a Engine<D>,
    tokenizer: Tokenizer,
}

/// What happens while a reply is made.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChatEvent {
    /// Layers of the prompt's forward passes that are done, of how many.
    Prefill {
        /// Done.
        layers: usize,
        /// Of.
        of: usize,
    },
    /// A token was sampled. What it adds to the reply, if anything, comes after it: markers and parts of characters
    /// add nothing that can be seen.
    Token(u32),
    /// A piece of the reply.
    Reply(k3_xtml::Event),
}

/// A whole reply.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChatReply {
    /// Reasoning, content, tool calls, finish reason, and what was repaired. A cancelled reply has no finish reason.
    pub reply: Reply,
    /// The generated ids, the one that ended the turn included.
    pub tokens: Vec<u32>,
    /// Why generation ended.
    pub finish: Finish,
    /// Token counts.
    pub usage: Usage,
    /// As [`crate::Generation::logits_hash`].
    pub logits_hash: LogitsHash,
}

/// Token counts of one reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// In the prompt.
    pub prompt_tokens: usize,
    /// Generated, reasoning and markers included.
    pub completion_tokens: usize,
    /// Of those, the ones that came while the think channel was open. Of a reply that turned out to have skipped its
    /// thinking, none.
    pub reasoning_tokens: usize,
}

/// Why a conversation could not be continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The vocabulary is not the model's.
    #[error("the tokenizer has {tokenizer} ids, the model {model}: they do not belong together")]
    Vocabulary {
        /// Ids of the tokenizer, control slots included.
        tokenizer: usize,
        /// `vocab_size` of the model.
        model: usize,
    },
    /// The tokenizer has no such control token.
    #[error("the tokenizer has no control token `{spelling}`, which the chat encoding needs")]
    NoControl {
        /// How it is spelled.
        spelling: String,
    },
    /// The request cannot be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The request asks for no reply.
    #[error("the request has add_generation_prompt off: the prompt opens no channel for a reply")]
    NoGenerationPrompt,
    /// The model gave an id that is not in the vocabulary.
    #[error(transparent)]
    Token(#[from] UnknownId),
    /// The run itself.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl<'a, D: Device> Chatter<'a, D> {
    /// Joins an engine and the tokenizer of its checkpoint.
    pub fn new(engine: &'a Engine<D>, tokenizer: Tokenizer) -> Result<Self, ChatError> {
        check_vocabulary(engine.model().config(), &tokenizer)?;
        Ok(Self { engine, tokenizer })
    }

    /// The engine.
    pub fn engine(&self) -> &'a Engine<D> {
        self.engine
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The ids that the model reads for a request, as a server encodes it.
    pub fn prompt_ids(&self, request: &ChatRequest) -> Result<(Prompt, Vec<u32>), ChatError> {
        let prompt = encode(request, &EncodeOptions::default())?;
        let ids = prompt_ids(&self.tokenizer, &prompt)?;
        Ok((prompt, ids))
    }

    /// Encodes `request`, generates, and parses the reply as it comes.
    pub fn reply(
        &self,
        request: &ChatRequest,
        generate: &Generate,
        events: &mut dyn FnMut(ChatEvent) -> ControlFlow<()>,
    ) -> Result<ChatReply, ChatError> {
        let (prompt, ids) = self.prompt_ids(request)?;
        let channel = prompt.open_channel.ok_or(ChatError::NoGenerationPrompt)?;
        let mut sequence = self.engine.new_sequence().map_err(RunError::from)?;
        self.reply_to_ids(&mut sequence, &ids, channel, generate, events)
    }

    /// Generates after `prompt`, which ends in the open `channel`, and parses the reply as it comes.
    pub fn reply_to_ids(
        &self,
        sequence: &mut Sequence<D>,
        prompt: &[u32],
        channel: Channel,
        generate: &Generate,
        events: &mut dyn FnMut(ChatEvent) -> ControlFlow<()>,
    ) -> Result<ChatReply, ChatError> {
        // Files of one checkpoint name different end ids, and a model may give either.
        let ends = [Control::EndOfMsg, Control::Eos].map(|c| control_id(&self.tokenizer, c.spelling()));
        let mut request = generate.clone();
        if !request.ignore_eos {
            for end in ends {
                request.stop.push(end?);
            }
        }
        let mut reader = Reader::new(&self.tokenizer, channel);
        let mut unknown = None;
        let generation = self.engine.generate(sequence, prompt, &request, &mut |event| match event {
            Event::Prefill { layers, of } => events(ChatEvent::Prefill { layers, of }),
            Event::Token(id) => match reader.push(id) {
                Ok(parsed) => {
                    let parsed = parsed.into_iter().map(ChatEvent::Reply);
                    std::iter::once(ChatEvent::Token(id)).chain(parsed).try_for_each(&mut *events)
                }
                Err(error) => {
                    unknown = Some(error);
                    ControlFlow::Break(())
                }
            },
        })?;
        if let Some(error) = unknown {
            return Err(error.into());
        }
        let stop = match generation.finish {
            Finish::Stop(_) if reader.parser.is_ended() => Some(StopReason::Eos),
            Finish::Stop(_) => Some(StopReason::Stop),
            Finish::Length | Finish::ContextFull => Some(StopReason::Length),
            Finish::Cancelled => None,
        };
        if let Some(stop) = stop {
            for event in reader.finish(stop) {
                let _ = events(ChatEvent::Reply(event));
            }
        }
        Ok(ChatReply {
            usage: Usage {
                prompt_tokens: generation.prompt_tokens,
                completion_tokens: generation.tokens.len(),
                reasoning_tokens: reader.reasoning_tokens,
            },
            reply: reader.reply,
            tokens: generation.tokens,
            finish: generation.finish,
            logits_hash: generation.logits_hash,
        })
    }
}

/// Whether the ids of `tokenizer` are those of the model.
pub fn check_vocabulary(config: &ModelConfig, tokenizer: &Tokenizer) -> Result<(), ChatError> {
    let (model, tokenizer) = (config.vocab_size, tokenizer.vocab_size());
    if model == tokenizer { Ok(()) } else { Err(ChatError::Vocabulary { tokenizer, model }) }
}

/// The ids of a prompt: every segment is encoded alone, and only control segments become control ids.
pub fn prompt_ids(tokenizer: &Tokenizer, prompt: &Prompt) -> Result<Vec<u32>, ChatError> {
    let mut ids = Vec::new();
    for segment in &prompt.segments {
        if segment.control {
            ids.push(control_id(tokenizer, &segment.text)?);
        } else {
            tokenizer.encode_into(&segment.text, &mut ids);
        }
    }
    Ok(ids)
}

fn control_id(tokenizer: &Tokenizer, spelling: &str) -> Result<u32, ChatError> {
    tokenizer.control_id(spelling).ok_or_else(|| ChatError::NoControl { spelling: spelling.to_owned() })
}

/// Ids to events.
struct Reader<'a> {
    tokenizer: &'a Tokenizer,
    parser: ReplyParser,
    utf8: Utf8Stream,
    reply: Reply,
    reasoning_tokens: usize,
}

impl<'a> Reader<'a> {
    fn new(tokenizer: &'a Tokenizer, channel: Channel) -> Self {
        Self {
            tokenizer,
            parser: ReplyParser::new(channel),
            utf8: Utf8Stream::default(),
            reply: Reply::default(),
            reasoning_tokens: 0,
        }
    }

    fn push(&mut self, id: u32) -> Result<Vec<k3_xtml::Event>, UnknownId> {
        let mut text = String::new();
        let mut events = Vec::new();
        if self.parser.current_channel() == Some(Channel::Think) && !self.parser.is_ended() {
            self.reasoning_tokens += 1;
        }
        if let Some(spelling) = self.tokenizer.control_spelling(id) {
            // What was begun before a marker ends there.
            self.utf8.finish(&mut text);
            events.extend(self.text(&text));
            let control = Control::from_spelling(spelling).unwrap_or(Control::Other);
            events.extend(self.parser.push(Piece::Control(control)));
        } else {
            self.utf8.push(self.tokenizer.token_bytes(id)?, &mut text);
            events.extend(self.text(&text));
        }
        if events.contains(&k3_xtml::Event::Error(k3_xtml::ReplyError::SkippedThink)) {
            self.reasoning_tokens = 0;
        }
        self.reply.extend(events.iter().cloned());
        Ok(events)
    }

    fn finish(&mut self, stop: StopReason) -> Vec<k3_xtml::Event> {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        let mut events = self.text(&text);
        events.extend(self.parser.finish(stop));
        self.reply.extend(events.iter().cloned());
        events
    }

    fn text(&mut self, text: &str) -> Vec<k3_xtml::Event> {
        if text.is_empty() { Vec::new() } else { self.parser.push(Piece::Text(text)) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k3_xtml::FinishReason;

    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizer/small")).unwrap()
    }

    /// What a reply written like this, markers spelled, is read as.
    fn read(script: &[&str]) -> (Reply, usize) {
        let tokenizer = tokenizer();
        let mut reader = Reader::new(&tokenizer, Channel::Think);
        for part in script {
            match tokenizer.control_id(part) {
                Some(id) => drop(reader.push(id).unwrap()),
                None => tokenizer.encode(part).into_iter().for_each(|id| drop(reader.push(id).unwrap())),
            }
        }
        reader.finish(StopReason::Eos);
        (reader.reply, reader.reasoning_tokens)
    }

    const TO_RESPONSE: [&str; 6] = ["<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>"];

    /// Either end id ends the turn; the files of one checkpoint disagree on which it is.
    #[test]
    fn both_end_ids_end_the_turn() {
        for end in ["<|end_of_msg|>", "[EOS]"] {
            let script =
                [&["Hm."][..], &TO_RESPONSE, &["Yes.", "<|close|>", "response", "<|sep|>", end]].concat();
            let (reply, reasoning) = read(&script);
            assert_eq!((reply.reasoning_content.as_str(), reply.content.as_str()), ("Hm.", "Yes."), "{end}");
            assert_eq!(reply.finish_reason, Some(FinishReason::Stop));
            // "Hm." and the three tokens and more that close think; not the answer.
            let tokens = |part: &str| tokenizer().encode(part).len();
            assert_eq!(reasoning, tokens("Hm.") + tokens("think") + 2);
            assert!(reply.errors.is_empty(), "{:?}", reply.errors);
        }
    }

    /// Markers that a model spells in ordinary tokens are text, and characters over several tokens come whole.
    #[test]
    fn spelled_markers_and_split_characters() {
        let quoted = "<|close|>response<|sep|> 👩‍🚀 世界";
        let tokenizer = tokenizer();
        let mut reader = Reader::new(&tokenizer, Channel::Response);
        for id in tokenizer.encode(quoted) {
            for event in reader.push(id).unwrap() {
                let k3_xtml::Event::ContentDelta(text) = event else { panic!("{event:?}") };
                assert!(!text.contains('\u{fffd}'), "{text}");
            }
        }
        assert_eq!(reader.reply.content, quoted);
    }

    /// A character that a marker cuts is closed before the marker, not after.
    #[test]
    fn a_cut_character_stays_in_its_channel() {
        let tokenizer = tokenizer();
        let mut reader = Reader::new(&tokenizer, Channel::Response);
        let first = tokenizer.token_id(&[0xe4]).unwrap();
        reader.push(first).unwrap();
        reader.push(tokenizer.control_id("<|end_of_msg|>").unwrap()).unwrap();
        reader.finish(StopReason::Eos);
        assert_eq!(reader.reply.content, "\u{fffd}");
    }
}
