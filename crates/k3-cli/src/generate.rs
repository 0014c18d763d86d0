//! `k3 generate`: a prompt or a chat request in, a reply out.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k3_experts::trace::MAGIC;
use k3_format::NewFile;
use k3_graph::{Cpu, Device, Mode, Reference, check_tokens};
use k3_runner::{
    ChatError, ChatEvent, ChatReply, Chatter, Engine, Event, Finish, Generate, Generation, Sampler,
    prompt_ids,
};
use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer};
use k3_xtml::{Channel, ChatRequest, EncodeOptions, Message, encode};

use crate::clock::Clock;
use crate::model::{DeviceName, ModelArgs};
use crate::output::{Output, tell};
use crate::parse::reply_json;
use crate::prompt::{read, refused};
use crate::request::apply;
use crate::show::{Show, Style};
use crate::stats::{tell_memory, tell_run};
use crate::store::Opened;

/// Generate a reply
///
/// Content goes to stdout as it comes, and each tool call as a line of JSON of its own. Reasoning, progress and statistics
/// go to stderr: through a pipe stdout is the answer and nothing else. On a terminal reasoning is dim (plain if NO_COLOR is
/// set), and the answer begins on a line of its own.
///
/// For programs, --json makes every piece of the reply, reasoning too, a line of JSON on stdout.
#[derive(Debug, clap::Args)]
#[command(override_usage = "\
k3 generate [DIR] --prompt TEXT [OPTIONS]
       k3 generate [DIR] --chat FILE [OPTIONS]
       k3 generate [DIR] --raw TEXT [OPTIONS]
       k3 generate [DIR] --ids IDS [OPTIONS]")]
#[command(after_help = "\
Examples:
  k3 generate --prompt 'Who are you?'             the demonstration model
  k3 generate DIR --prompt 'What is 2 + 2?'
  k3 generate DIR --prompt 'Hello' 2>/dev/null    the answer alone
  k3 generate DIR --chat request.json --json      lines of JSON
  k3 generate DIR --ids 1,2,3 --temperature 0     token ids in, token ids out")]
pub(crate) struct Args {
    #[command(flatten)]
    input: Input,
    /// Write one JSON event a line to stdout, and the whole reply with its usage as the last line; with --prompt or --chat
    #[arg(long, conflicts_with_all = ["raw", "ids"])]
    json: bool,
    /// Go on past end tokens, for benchmarks
    #[arg(long)]
    ignore_eos: bool,
    /// Where memory, bytes and time went, in a table at the end
    #[arg(long)]
    stats: bool,
    /// Write what was read and waited for, and when, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write which experts every token chose, for `cargo xtask simulate --trace`
    #[arg(long, value_name = "FILE")]
    record_routing: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

impl Args {
    /// Where the trace goes, after a look whether each output has a file of its own.
    pub(crate) fn trace(&self) -> Result<Option<&Path>> {
        let outputs = [
            ("--trace", self.trace.as_deref()),
            ("--record-routing", self.record_routing.as_deref()),
            ("--usage", self.model.usage()),
        ];
        for (at, (option, path)) in outputs.iter().enumerate() {
            for (other, another) in &outputs[..at] {
                let is_shared =
                    path.zip(*another).is_some_and(|(path, another)| place(path) == place(another));
                ensure!(!is_shared, "{other} and {option} name the same file: each needs one of its own");
            }
        }
        Ok(self.trace.as_deref())
    }
}

/// Where a file is or will be, however its name is spelled.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let in_folder = || Ok(folder.canonicalize()?.join(path.file_name().unwrap_or_default()));
    path.canonicalize().or_else(|_| in_folder()).unwrap_or_else(|_: io::Error| path.to_owned())
}

/// Heading in the help.
const INPUT: &str = "What to reply to, or to continue (one of them)";

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// A user's message, as the only one of a conversation
    #[arg(long, help_heading = INPUT, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// An OpenAI chat request in a file, or - for stdin
    #[arg(long, help_heading = INPUT, value_name = "FILE")]
    chat: Option<PathBuf>,
    /// Text to continue as it is, without a conversation around it
    #[arg(long, help_heading = INPUT, value_name = "TEXT", allow_hyphen_values = true)]
    raw: Option<String>,
    /// Token ids to continue, separated by commas; no tokenizer is needed, and ids come out
    #[arg(long, help_heading = INPUT, value_name = "IDS", value_delimiter = ',', conflicts_with = "tokenizer")]
    ids: Vec<u32>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.model.device {
        DeviceName::Cpu => run_on(args, Cpu::new(args.model.threads)?),
        DeviceName::CpuInt8 => run_on(args, Cpu::new(args.model.threads)?.with_mode(Mode::Int8)),
        DeviceName::Reference => run_on(args, Reference),
    }
}

/// What is to be continued.
enum Task {
    /// A conversation, as ids that end in an open channel.
    Chat(Tokenizer, Vec<u32>, Channel),
    /// Text or ids.
    Plain(Option<Tokenizer>, Vec<u32>),
}

fn run_on<D: Device>(args: &Args, device: D) -> Result<()> {
    let request = request(&args.input)?;
    let snapshot = args.model.open()?;
    let config = snapshot.checkpoint.config();
    let mut generate = Generate {
        max_tokens: args.model.max_tokens,
        sampling: args.model.sampling(&snapshot),
        ignore_eos: args.ignore_eos,
        ..Generate::default()
    };
    let task = match (&request, &args.input.raw) {
        (Some((request, body)), _) => {
            apply(body, &mut generate)?;
            let tokenizer = snapshot.tokenizer()?;
            let prompt = encode(request, &EncodeOptions::default()).map_err(|e| refused(&e))?;
            let channel = prompt.open_channel.ok_or(ChatError::NoGenerationPrompt)?;
            let ids = prompt_ids(&tokenizer, &prompt)?;
            Task::Chat(tokenizer, ids, channel)
        }
        (None, Some(text)) => {
            let tokenizer = snapshot.tokenizer()?;
            let ids = tokenizer.encode(text);
            Task::Plain(Some(tokenizer), ids)
        }
        (None, None) => Task::Plain(None, args.input.ids.clone()),
    };
    let (Task::Chat(_, ids, _) | Task::Plain(_, ids)) = &task;
    check_tokens(config, ids, 0).context("the prompt cannot be run")?;
    Sampler::new(generate.sampling.clone(), Vec::new())?;
    args.model.tell_unused(&generate.sampling);
    if let Some(file) = &args.record_routing {
        // The engine makes it anew; what cannot be made is known before the minutes that loading takes.
        NewFile::replacing(file, MAGIC)
            .with_context(|| format!("recording routing in {}", file.display()))?;
    }

    let context = ids.len().saturating_add(generate.max_tokens);
    let mut engine = snapshot.load(device, &generate.sampling, generate.max_tokens, context)?;
    if args.trace.is_some() && snapshot.opened().is_some_and(Opened::is_mapped) {
        tell(format_args!(
            "note: --trace has nothing to write of mapped files, which the system reads; --store direct or buffered has\n"
        ));
    }
    if let Some(file) = &args.record_routing {
        engine.record_routing(file)?;
    }
    let stats = snapshot.opened().filter(|_| args.stats);
    match task {
        Task::Chat(tokenizer, ids, channel) => {
            let chatter = Chatter::new(&engine, tokenizer)?;
            chat(args.json, stats, &chatter, &engine, &ids, channel, &generate)?;
        }
        Task::Plain(tokenizer, ids) => complete(stats, &engine, &ids, tokenizer.as_ref(), &generate)?,
    }
    if let (Some(file), Some(tokens)) = (&args.record_routing, engine.finish_recording()?) {
        tell(format_args!("routing of {tokens} tokens in {}\n", file.display()));
    }
    Ok(())
}

/// The chat request, and its JSON for the fields that are not the encoder's.
fn request(input: &Input) -> Result<Option<(ChatRequest, String)>> {
    Ok(match input {
        Input { prompt: Some(text), .. } => {
            Some((ChatRequest::new(vec![Message::user(text.as_str())]), String::new()))
        }
        Input { chat: Some(file), .. } => {
            let body = read(file)?;
            Some((ChatRequest::from_json(&body).map_err(|e| refused(&e))?, body))
        }
        _ => None,
    })
}

fn chat<D: Device>(
    json: bool,
    stats: Option<&Opened>,
    chatter: &Chatter<'_, D>,
    engine: &Engine<D>,
    ids: &[u32],
    channel: Channel,
    generate: &Generate,
) -> Result<()> {
    let mut clock = Clock::new();
    let mut out = Output::default();
    let mut show = Show::new(&mut out, if json { Style::Events } else { Style::Plain });
    let mut events = |event: ChatEvent| match event {
        ChatEvent::Prefill { layers, of } => {
            clock.prefill_from(engine, layers, of);
            ControlFlow::Continue(())
        }
        ChatEvent::Token(_) => {
            clock.token();
            ControlFlow::Continue(())
        }
        ChatEvent::Reply(event) => show.event(&event),
        _ => ControlFlow::Continue(()),
    };
    let mut sequence = engine.new_sequence()?;
    let generated = chatter.reply_to_ids(&mut sequence, ids, channel, generate, &mut events);
    show.end();
    let ChatReply { reply, finish, usage, logits_hash, .. } = generated.context("generating")?;
    // The statistics are told even if no one reads the reply any more.
    if json {
        let mut whole = reply_json(&reply);
        whole["usage"] = serde_json::json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        });
        let _ = out.say(format_args!("{whole}\n"));
    }
    let reason = reply.finish_reason.map_or("cancelled", |r| r.as_str());
    tell(format_args!(
        "\nfinish_reason {reason} ({}); prompt {} tokens, completion {} of which {} reasoning\n",
        ended(finish),
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens
    ));
    if usage.reasoning_tokens > 0 && reply.content.is_empty() && finish == Finish::Length {
        tell(format_args!(
            "the limit came before an answer: raise --max-tokens, or ask for less reasoning_effort\n"
        ));
    }
    if !reply.errors.is_empty() {
        let names: Vec<&str> = reply.errors.iter().map(|e| e.name()).collect();
        tell(format_args!("repaired in the reply: {}\n", names.join(", ")));
    }
    clock.report(engine, usage.prompt_tokens, usage.completion_tokens);
    if let Some(opened) = stats {
        tell_run(engine, &clock, usage.prompt_tokens, usage.completion_tokens);
        tell_memory(opened);
    }
    tell(format_args!("logits_hash {logits_hash}{}\n", engine.deviation()));
    out.finish().context("writing the reply to stdout")
}

/// Text or ids, continued without a conversation.
fn complete<D: Device>(
    stats: Option<&Opened>,
    engine: &Engine<D>,
    ids: &[u32],
    tokenizer: Option<&Tokenizer>,
    generate: &Generate,
) -> Result<()> {
    let mut clock = Clock::new();
    let mut out = Output::default();
    let mut decoder = tokenizer.map(|t| StreamDecoder::new(t, ControlText::Spell));
    let mut failed = None;
    let mut first = true;
    let mut show = |event: Event| match event {
        Event::Prefill { layers, of } => {
            clock.prefill_from(engine, layers, of);
            ControlFlow::Continue(())
        }
        Event::Token(id) => {
            clock.token();
            let separator = if std::mem::take(&mut first) { "" } else { " " };
            match decoder.as_mut().map(|d| d.push(id)) {
                Some(Ok(text)) => out.say(format_args!("{text}")),
                Some(Err(error)) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
                None => out.say(format_args!("{separator}{id}")),
            }
        }
        _ => ControlFlow::Continue(()),
    };
    let Generation { tokens, finish, logits_hash, .. } =
        engine.generate(&mut engine.new_sequence()?, ids, generate, &mut show)?;
    let _ = out.say(format_args!("{}\n", decoder.map(|mut d| d.finish()).unwrap_or_default()));
    if let Some(error) = failed {
        return Err(error).context("the model gave an id that the tokenizer does not have");
    }
    tell(format_args!(
        "finished: {}; prompt {} tokens, completion {}\n",
        ended(finish),
        ids.len(),
        tokens.len()
    ));
    clock.report(engine, ids.len(), tokens.len());
    if let Some(opened) = stats {
        tell_run(engine, &clock, ids.len(), tokens.len());
        tell_memory(opened);
    }
    tell(format_args!("logits_hash {logits_hash}{}\n", engine.deviation()));
    out.finish().context("writing the reply to stdout")
}

fn ended(finish: Finish) -> String {
    match finish {
        Finish::Stop(id) => format!("id {id}"),
        Finish::Length => "token limit".to_owned(),
        Finish::ContextFull => "context full".to_owned(),
        Finish::Cancelled => "cancelled".to_owned(),
    }
}
