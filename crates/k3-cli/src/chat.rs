//! `k3 chat`: a conversation in the terminal, or through pipes.

mod input;
mod tools;

use std::io::{IsTerminal, StdinLock};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;
use k3_graph::{Cpu, Device, Mode, Reference};
use k3_runner::{ChatEvent, Chatter, Conversation, Finish, Generate, Sampler, Turn};
use k3_xtml::{ChatRequest, Effort, EncodeOptions, Message, ReplyCall, ThinkingEffort, encode};

use crate::clock::{Clock, Rates};
use crate::model::{DeviceName, ModelArgs};
use crate::output::{Output, tell};
use crate::prompt::refused;
use crate::show::{Show, Style, dim};

use input::{Command, HELP, Line, Lines};
use tools::{declared, name_of, of_the_demonstration};

/// Talk to a model, line by line
///
/// Every line of stdin is a message, in UTF-8; the reply goes to stdout as it comes. Reasoning (dim on a terminal), prompts
/// and statistics go to stderr. A line that ends in a backslash goes on in the next.
///
/// No tool is run: when the model calls one, the next line that you write is its result. /empty is an empty result.
///
/// Lines that begin with a slash are commands; /help lists them. The end of input, or /quit, ends the conversation.
///
/// What the model has read is kept from turn to turn, so a turn costs only what is new in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 chat                           the demonstration model of the repository
  k3 chat DIR --system 'Be brief.' --effort low
  k3 chat DIR --tools tools.json    a list as `tools` of an OpenAI request
  printf 'Who are you?\\n' | k3 chat 2>/dev/null")]
pub(crate) struct Args {
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Declare the tools of a JSON file: a list as `tools` of an OpenAI chat request, or an object with it
    ///
    /// [default: none; for the demonstration model its own]
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Whether the model thinks before it answers
    #[arg(long, value_name = "on|off", value_enum, hide_possible_values = true, default_value_t = Switch::On)]
    thinking: Switch,
    /// How much it thinks, with --thinking on
    #[arg(long, value_enum, default_value_t = EffortName::Max)]
    effort: EffortName,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Tokens of a conversation that memory is planned for; it may go on beyond them.
const CONTEXT: usize = 32_768;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EffortName {
    /// Little
    Low,
    /// Much
    High,
    /// The most: what a server takes where a request names none
    Max,
    /// The prompt says nothing about it
    Unset,
}

impl From<EffortName> for ThinkingEffort {
    fn from(name: EffortName) -> Self {
        match name {
            EffortName::Low => Effort::Low.into(),
            EffortName::High => Effort::High.into(),
            EffortName::Max => Effort::Max.into(),
            EffortName::Unset => ThinkingEffort::Silent,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.model.device {
        DeviceName::Cpu => run_on(args, Cpu::new(args.model.threads)?),
        DeviceName::CpuInt8 => run_on(args, Cpu::new(args.model.threads)?.with_mode(Mode::Int8)),
        DeviceName::Reference => run_on(args, Reference),
    }
}

fn run_on<D: Device>(args: &Args, device: D) -> Result<()> {
    let tools = args.tools.as_deref().map(declared).transpose()?;
    let snapshot = args.model.open()?;
    let request = ChatRequest {
        tools: match tools {
            Some(tools) => tools,
            None if snapshot.is_demonstration => of_the_demonstration()?,
            None => Vec::new(),
        },
        thinking: args.thinking == Switch::On,
        thinking_effort: args.effort.into(),
        ..ChatRequest::new(args.system.iter().map(|text| Message::system(text.as_str())).collect())
    };
    encode(&request, &EncodeOptions::default()).map_err(|e| refused(&e))?;
    let tokenizer = snapshot.tokenizer()?;
    let sampling = args.model.sampling(&snapshot);
    Sampler::new(sampling.clone(), Vec::new())?;
    args.model.tell_unused(&sampling);
    let engine = snapshot.load(
        device,
        &sampling,
        args.model.max_tokens,
        CONTEXT.saturating_add(args.model.max_tokens),
    )?;
    let chatter = Chatter::new(&engine, tokenizer)?;

    let names: Vec<&str> = request.tools.iter().map(name_of).collect();
    if !names.is_empty() {
        tell(format_args!(
            "tools: {}; when one is called, you write its result, or /empty\n",
            names.join(", ")
        ));
    }
    if snapshot.is_demonstration {
        tell(format_args!(
            "it has learnt conversations of at most 512 tokens: /reset when it gets confused\n"
        ));
    }
    if std::io::stdin().is_terminal() {
        tell(format_args!("/help lists the commands, /quit or the end of input leaves\n"));
    }
    let mut session = Session {
        first: request.messages.len(),
        conversation: Conversation::new(&chatter, request),
        generate: Generate { max_tokens: args.model.max_tokens, sampling, ..Generate::default() },
        lines: Lines::of_stdin(),
        out: Output::default(),
    };
    session.talk()?;
    session.out.finish().context("writing the reply to stdout")
}

/// What goes on after a line.
enum Next {
    /// The next message.
    Message,
    /// The end.
    Leave,
}

struct Session<'a, D: Device> {
    conversation: Conversation<'a, D>,
    /// Messages before the conversation.
    first: usize,
    generate: Generate,
    lines: Lines<StdinLock<'static>>,
    out: Output,
}

impl<D: Device> Session<'_, D> {
    fn talk(&mut self) -> Result<()> {
        while let Some(line) = self.lines.next("> ")? {
            let next = match Line::parse(line) {
                Line::Empty => Next::Message,
                Line::Text(text) => self.exchange(Message::user(text))?,
                Line::Command(command) => self.command(&command),
                Line::Wrong(why) => {
                    tell(format_args!("{why}\n"));
                    Next::Message
                }
            };
            if matches!(next, Next::Leave) || self.out.is_closed() {
                break;
            }
        }
        Ok(())
    }

    fn command(&mut self, command: &Command) -> Next {
        let request = &mut self.conversation.request;
        match command {
            Command::Help => tell(format_args!("{HELP}")),
            Command::Empty => tell(format_args!("/empty is a tool's result, and no tool was called\n")),
            Command::Quit => return Next::Leave,
            Command::Reset => {
                request.messages.truncate(self.first);
                tell(format_args!("the conversation is forgotten\n"));
            }
            Command::Thinking(on) => {
                request.thinking = *on;
                tell(format_args!("thinking {}\n", if *on { "on" } else { "off" }));
            }
            Command::Effort(effort) => {
                request.thinking_effort = effort.clone();
                let without = if request.thinking { "" } else { ", once thinking is on" };
                tell(format_args!("another effort from the next message on{without}\n"));
            }
        }
        Next::Message
    }

    /// A message, and all that follows until the model has answered. What fails is told and taken back.
    fn exchange(&mut self, message: Message) -> Result<Next> {
        let before = self.conversation.request.messages.len();
        self.conversation.push(message);
        loop {
            let turn = match self.reply() {
                Ok(turn) => turn,
                Err(error) => {
                    self.conversation.request.messages.truncate(before);
                    tell(format_args!(
                        "error: {error:#}\nthe conversation goes on as if the message had not been sent; /reset begins a \
                         new one\n"
                    ));
                    return Ok(Next::Message);
                }
            };
            let calls = &turn.reply.reply.tool_calls;
            if calls.is_empty() || self.out.is_closed() {
                return Ok(Next::Message);
            }
            for (given, (call, id)) in calls.iter().zip(&turn.call_ids).enumerate() {
                match self.result(call)? {
                    Answer::Result(text) => self.conversation.push(Message::tool_result(id.as_str(), text)),
                    Answer::Forgotten => return Ok(Next::Message),
                    Answer::Leave => return Ok(Next::Leave),
                    Answer::Ended => {
                        let then = match given {
                            0 => "and the conversation with it",
                            _ => "so the model answers to those before",
                        };
                        let (name, arguments) = (&call.name, &call.arguments);
                        tell(format_args!(
                            "the input ended before the result of {name} {arguments}, {then}\n"
                        ));
                        match given {
                            0 => return Ok(Next::Leave),
                            _ => break,
                        }
                    }
                }
            }
        }
    }

    /// What a tool that the model called gave, as the person at the terminal says.
    fn result(&mut self, call: &ReplyCall) -> Result<Answer> {
        let prompt = format!("result of {}> ", call.name);
        while let Some(line) = self.lines.next(&prompt)? {
            match Line::parse(line) {
                Line::Empty => tell(format_args!(
                    "an empty line is no result: write what {} gave, or /empty if that was nothing\n",
                    call.name
                )),
                Line::Command(Command::Empty) => return Ok(Answer::Result(String::new())),
                Line::Text(text) => return Ok(Answer::Result(text)),
                Line::Command(Command::Quit) => return Ok(Answer::Leave),
                Line::Command(command) => {
                    self.command(&command);
                    if command == Command::Reset {
                        return Ok(Answer::Forgotten);
                    }
                }
                Line::Wrong(why) => tell(format_args!("{why}\n")),
            }
        }
        Ok(Answer::Ended)
    }

    /// One reply, shown as it comes, and what is to be said about it.
    fn reply(&mut self) -> Result<Turn> {
        let mut clock = Clock::new();
        let mut show = Show::new(&mut self.out, Style::Talk);
        let turn = self.conversation.reply(&self.generate, &mut |event| match event {
            ChatEvent::Prefill { layers, of } => {
                clock.prefill(layers, of);
                ControlFlow::Continue(())
            }
            ChatEvent::Token(_) => {
                clock.token();
                ControlFlow::Continue(())
            }
            ChatEvent::Reply(event) => show.event(&event),
            _ => ControlFlow::Continue(()),
        });
        show.end();
        let turn = turn?;
        // Another draw for the next reply, and still the same for the same seed.
        self.generate.sampling.seed = self.generate.sampling.seed.wrapping_add(1);
        let (reply, usage) = (&turn.reply, turn.reply.usage);
        let new = usage.prompt_tokens - turn.kept_tokens;
        let Rates { first, reply: rate, .. } = clock.rates(new, usage.completion_tokens);
        let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} a second"));
        let cut = match reply.finish {
            Finish::Stop(_) => "",
            Finish::Length => "; cut by --max-tokens",
            Finish::ContextFull => "; the context is full: /reset begins a new one",
            Finish::Cancelled => "; cancelled",
        };
        let names: Vec<&str> = reply.reply.errors.iter().map(|e| e.name()).collect();
        let repaired =
            if names.is_empty() { String::new() } else { format!("; repaired: {}", names.join(", ")) };
        let (dim, plain) = dim();
        tell(format_args!(
            "{dim}[prompt {} tokens, {} of them read before; first token after {first:.2?}; reply {} tokens{rate}{cut}\
             {repaired}]{plain}\n",
            usage.prompt_tokens, turn.kept_tokens, usage.completion_tokens,
        ));
        Ok(turn)
    }
}

/// What the result of a call is.
enum Answer {
    Result(String),
    /// The conversation was reset instead.
    Forgotten,
    /// There is no more input.
    Ended,
    Leave,
}
