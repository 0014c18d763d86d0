//! `k3 chat`: a conversation in the terminal, or through pipes.

mod input;

use std::io::{IsTerminal, StdinLock, stderr};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use k3_graph::{Cpu, Device, Reference};
use k3_runner::{ChatEvent, Chatter, Conversation, Finish, Generate, Sampler, Turn};
use k3_xtml::json::Value;
use k3_xtml::{ChatRequest, Effort, EncodeOptions, Message, ReplyCall, ThinkingEffort, encode};

use crate::clock::Clock;
use crate::model::{DeviceName, ModelArgs};
use crate::output::{Output, tell};
use crate::prompt::refused;

use input::{Command, HELP, Line, Lines};

/// The tools that the demonstration model was trained on, exactly as declared there.
const DEMONSTRATION: &str = include_str!("chat/demonstration.json");

/// Talk to a model, line by line
///
/// Every line of stdin is a message, the reply goes to stdout as it comes. Reasoning, prompts and statistics go to stderr.
/// When the model calls a tool, the next line is the tool's result. Lines that begin with a slash are commands: /help. What
/// the model has read is kept from turn to turn, so that a turn costs only what is new in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 chat                            the demonstration model of the repository
  k3 chat DIR --system 'Be brief.' --effort low
  k3 chat DIR --tools tools.json     OpenAI's list of tools, or an object with it
  printf 'Who are you?\\n' | k3 chat")]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// A JSON file that declares tools [default: none; of the demonstration model its own]
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Whether the model thinks before it answers
    #[arg(long, value_enum, default_value_t = Switch::On)]
    thinking: Switch,
    /// How much it thinks
    #[arg(long, value_enum, default_value_t = EffortName::Max)]
    effort: EffortName,
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
    Low,
    High,
    /// What a server takes where a request names none
    Max,
    /// Say nothing about it
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
        DeviceName::Reference => run_on(args, Reference),
    }
}

fn run_on<D: Device>(args: &Args, device: D) -> Result<()> {
    let tools = args.tools.as_deref().map(declared).transpose()?;
    let snapshot = args.model.open()?;
    let request = ChatRequest {
        tools: match tools {
            Some(tools) => tools,
            None if snapshot.is_demonstration => declarations(DEMONSTRATION)?,
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
    let engine = snapshot.load(device, &sampling, args.model.max_tokens, CONTEXT + args.model.max_tokens)?;
    let chatter = Chatter::new(&engine, tokenizer)?;

    let names: Vec<&str> = request.tools.iter().map(name_of).collect();
    if !names.is_empty() {
        tell(format_args!("tools: {}; when one is called, you write its result\n", names.join(", ")));
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

/// The declarations in a file.
fn declared(file: &Path) -> Result<Vec<Value>> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("reading the tools {}", file.display()))?;
    declarations(&text).with_context(|| format!("reading the tools {}", file.display()))
}

/// The declarations in a JSON text.
fn declarations(text: &str) -> Result<Vec<Value>> {
    let value = Value::parse(text)?;
    let tools = if let Value::Object(_) = value { value.get("tools") } else { Some(&value) };
    match tools {
        Some(Value::Array(tools)) if tools.iter().all(|t| matches!(t, Value::Object(_))) => Ok(tools.clone()),
        _ => bail!(
            "expected a list of objects, as `tools` of an OpenAI chat request, or an object with that list"
        ),
    }
}

/// The name that a declaration gives its tool.
fn name_of(tool: &Value) -> &str {
    let function = tool.get("function").unwrap_or(tool);
    function.get("name").and_then(Value::as_str).unwrap_or("(unnamed)")
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
            for (call, id) in calls.iter().zip(&turn.call_ids) {
                match self.result(call)? {
                    Answer::Result(text) => self.conversation.push(Message::tool_result(id.as_str(), text)),
                    Answer::Forgotten => return Ok(Next::Message),
                    Answer::Leave => return Ok(Next::Leave),
                }
            }
        }
    }

    /// What a tool that the model called gave, as the person at the terminal says.
    fn result(&mut self, call: &ReplyCall) -> Result<Answer> {
        let prompt = format!("result of {}> ", call.name);
        while let Some(line) = self.lines.next(&prompt)? {
            match Line::parse(line) {
                Line::Empty => return Ok(Answer::Result(String::new())),
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
        Ok(Answer::Leave)
    }

    /// One reply, shown as it comes, and what is to be said about it.
    fn reply(&mut self) -> Result<Turn> {
        let mut clock = Clock::new();
        let mut show = Show { out: &mut self.out, is_dim: false, thought: false, line_open: false };
        let turn = self.conversation.reply(&self.generate, &mut |event| match event {
            ChatEvent::Prefill { layers, of } => {
                clock.prefill(layers, of);
                ControlFlow::Continue(())
            }
            ChatEvent::Reply(event) => {
                clock.decoding();
                show.event(&event)
            }
            _ => ControlFlow::Continue(()),
        });
        show.end();
        let turn = turn?;
        // Another draw for the next reply, and still the same for the same seed.
        self.generate.sampling.seed = self.generate.sampling.seed.wrapping_add(1);
        let (reply, usage) = (&turn.reply, turn.reply.usage);
        let new = usage.prompt_tokens - turn.kept_tokens;
        let (first, _, rate) = clock.rates(new, usage.completion_tokens);
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
            "{dim}[prompt {} tokens, {} of them read before; first token after {first:.2?}; reply {} tokens, {rate:.1} a \
             second{cut}{repaired}]{plain}\n",
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
    Leave,
}

/// How to write dimly on stderr, and how to end it; nothing where stderr is no terminal or colours are not wanted.
fn dim() -> (&'static str, &'static str) {
    let wanted = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    if wanted { ("\x1b[2m", "\x1b[0m") } else { ("", "") }
}

/// A reply on its way to the terminal.
struct Show<'a> {
    out: &'a mut Output,
    /// Reasoning is being written.
    is_dim: bool,
    /// There is reasoning without the line break after it.
    thought: bool,
    /// There is content without the line break after it.
    line_open: bool,
}

impl Show<'_> {
    fn event(&mut self, event: &k3_xtml::Event) -> ControlFlow<()> {
        match event {
            k3_xtml::Event::ReasoningDelta(text) => {
                let dim = if std::mem::replace(&mut self.is_dim, true) { "" } else { dim().0 };
                self.thought = true;
                tell(format_args!("{dim}{text}"));
                ControlFlow::Continue(())
            }
            k3_xtml::Event::ContentDelta(text) => {
                self.end_thought();
                self.line_open = !text.ends_with('\n');
                self.out.say(format_args!("{text}"))
            }
            k3_xtml::Event::ToolCall(call) => {
                self.end();
                self.out.say(format_args!("-> {} {}\n", call.name, call.arguments))
            }
            k3_xtml::Event::Error(_) | k3_xtml::Event::Finish(_) => ControlFlow::Continue(()),
        }
    }

    fn end_thought(&mut self) {
        if std::mem::take(&mut self.thought) {
            tell(format_args!("{}\n", dim().1));
            self.is_dim = false;
        }
    }

    /// Ends what was begun.
    fn end(&mut self) {
        self.end_thought();
        if std::mem::take(&mut self.line_open) {
            let _ = self.out.say(format_args!("\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_of_the_demonstration_model() {
        let tools = declarations(DEMONSTRATION).unwrap();
        assert_eq!(tools.iter().map(name_of).collect::<Vec<_>>(), ["get_weather", "get_time"]);
    }
}
