//! `k3 generate`: a prompt or a chat request in, a reply out.

use std::io::{IsTerminal, Write as _, stderr, stdout};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use k3_format::GenerationConfig;
use k3_graph::{Cpu, Device, ModelOptions, Reference};
use k3_runner::{
    ChatEvent, ChatReply, Chatter, Engine, EngineOptions, Event, Finish, Generate, Generation, OpenProgress,
    Sampling,
};
use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer};
use k3_xtml::{ChatRequest, Message};

use crate::parse::{event_json, reply_json};
use crate::prompt::read_request;

/// Generate a reply
///
/// Content goes to stdout as it comes, each tool call as a line of JSON. Reasoning, progress and statistics go to stderr.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 generate DIR --prompt 'What is 2 + 2?'
  k3 generate DIR --chat request.json --max-tokens 200 --json
  k3 generate DIR --ids 1,2,3 --temperature 0          token ids in, token ids out")]
pub(crate) struct Args {
    /// The snapshot folder
    dir: PathBuf,
    #[command(flatten)]
    input: Input,
    /// The folder with tiktoken.model and tokenizer_config.json [default: the snapshot folder]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Tokens to generate at most, reasoning included
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the most likely token [default: generation_config.json, else 1]
    #[arg(long)]
    temperature: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: generation_config.json, else 0]
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep the most likely tokens up to this sum of probabilities [default: generation_config.json, else 0.95]
    #[arg(long)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely
    #[arg(long, default_value_t = Sampling::default().min_p)]
    min_p: f32,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Go on past end tokens, for benchmarks
    #[arg(long)]
    ignore_eos: bool,
    /// What computes
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,
    /// Threads of the cpu device; 0 takes one a core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Tokens of the prompt that are computed together; the result does not depend on it
    #[arg(long, default_value_t = EngineOptions::default().chunk_tokens)]
    chunk: usize,
    /// Run K3.1 without its indexer: another function than it was trained for, past the indexer's budget
    #[arg(long)]
    ignore_indexer: bool,
    /// One JSON event a line on stdout, and the whole reply with its usage as the last line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// A user's message
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// An OpenAI chat request in a file, or - for stdin
    #[arg(long, value_name = "FILE")]
    chat: Option<PathBuf>,
    /// Text to continue as it is, without a conversation around it
    #[arg(long, value_name = "TEXT")]
    raw: Option<String>,
    /// Token ids to continue; needs no tokenizer
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    ids: Vec<u32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DeviceName {
    /// Single precision on this machine's processor
    Cpu,
    /// Double precision in plain loops: slow, for comparison
    Reference,
}

impl Args {
    /// The checkpoint's values where the flags are silent, the vendor's recommendation where both are.
    fn sampling(&self, checkpoint: &GenerationConfig) -> Sampling {
        let default = Sampling::default();
        Sampling {
            temperature: self
                .temperature
                .or(checkpoint.temperature.map(|t| t as f32))
                .unwrap_or(default.temperature),
            top_k: self.top_k.or(checkpoint.top_k.map(|k| k as usize)).unwrap_or(default.top_k),
            top_p: self.top_p.or(checkpoint.top_p.map(|p| p as f32)).unwrap_or(default.top_p),
            min_p: self.min_p,
            seed: self.seed,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.device {
        DeviceName::Cpu => run_on(args, Cpu::new(args.threads)?),
        DeviceName::Reference => run_on(args, Reference),
    }
}

fn run_on<D: Device>(args: &Args, device: D) -> Result<()> {
    let mut options = EngineOptions::default();
    options.chunk_tokens = args.chunk;
    options.model = ModelOptions::default().with_ignore_indexer(args.ignore_indexer);
    // What fails fast comes first: the request, then the tokenizer, then the weights.
    let request = match &args.input {
        Input { prompt: Some(text), .. } => Some(ChatRequest::new(vec![Message::user(text.as_str())])),
        Input { chat: Some(file), .. } => Some(read_request(file)?),
        _ => None,
    };
    let needs_text = request.is_some() || args.input.raw.is_some();
    let tokenizer = if needs_text {
        Some(Tokenizer::open(args.tokenizer.as_deref().unwrap_or(&args.dir))?)
    } else {
        None
    };
    let engine = open(&args.dir, device, &options)?;
    let generate = Generate {
        max_tokens: args.max_tokens,
        sampling: args.sampling(engine.checkpoint().generation_config()),
        ignore_eos: args.ignore_eos,
        ..Generate::default()
    };
    let s = &generate.sampling;
    eprintln!(
        "{} on {}; temperature {}, top-k {}, top-p {}, min-p {}, seed {}, at most {} tokens",
        engine.checkpoint().variant(),
        engine.model().device().kind(),
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        s.seed,
        generate.max_tokens
    );
    match (request, tokenizer) {
        (Some(request), Some(tokenizer)) => chat(args, &engine, tokenizer, &request, &generate),
        (None, Some(tokenizer)) => {
            let ids = tokenizer.encode(args.input.raw.as_deref().unwrap_or_default());
            complete(&engine, &ids, Some(&tokenizer), &generate)
        }
        (_, None) => complete(&engine, &args.input.ids, None, &generate),
    }
}

fn chat<D: Device>(
    args: &Args,
    engine: &Engine<D>,
    tokenizer: Tokenizer,
    request: &ChatRequest,
    generate: &Generate,
) -> Result<()> {
    let chatter = Chatter::new(engine, tokenizer)?;
    let mut clock = Clock::new();
    let mut show = |event: ChatEvent| {
        match event {
            ChatEvent::Prefill { layers, of } => clock.prefill(layers, of),
            ChatEvent::Reply(event) => {
                clock.decoding();
                if args.json {
                    say(format_args!("{}\n", event_json(&event)));
                } else {
                    print_event(&event);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let ChatReply { reply, finish, usage, logits_hash, .. } =
        chatter.reply(request, generate, &mut show).context("generating")?;
    if args.json {
        let mut whole = reply_json(&reply);
        whole["usage"] = serde_json::json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        });
        say(format_args!("{whole}\n"));
    } else if !reply.content.is_empty() && !reply.content.ends_with('\n') {
        say(format_args!("\n"));
    }
    let reason = reply.finish_reason.map_or("cancelled", |r| r.as_str());
    eprintln!(
        "\nfinish_reason {reason} ({}); prompt {} tokens, completion {} of which {} reasoning",
        ended(finish),
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens
    );
    if usage.reasoning_tokens > 0 && reply.content.is_empty() && finish == Finish::Length {
        eprintln!("the limit came before an answer: raise --max-tokens, or ask for less reasoning_effort");
    }
    if !reply.errors.is_empty() {
        let names: Vec<&str> = reply.errors.iter().map(|e| e.name()).collect();
        eprintln!("repaired in the reply: {}", names.join(", "));
    }
    clock.report(engine, usage.prompt_tokens, usage.completion_tokens);
    eprintln!("logits_hash {logits_hash}");
    Ok(())
}

/// Text or ids, continued without a conversation.
fn complete<D: Device>(
    engine: &Engine<D>,
    ids: &[u32],
    tokenizer: Option<&Tokenizer>,
    generate: &Generate,
) -> Result<()> {
    if ids.is_empty() {
        bail!("the prompt has no tokens: there is nothing to continue");
    }
    let mut clock = Clock::new();
    let mut decoder = tokenizer.map(|t| StreamDecoder::new(t, ControlText::Spell));
    let mut sequence = engine.new_sequence()?;
    let mut failed = None;
    let Generation { tokens, finish, logits_hash, .. } =
        engine.generate(&mut sequence, ids, generate, &mut |event| {
            match event {
                Event::Prefill { layers, of } => clock.prefill(layers, of),
                Event::Token(id) => {
                    clock.decoding();
                    match decoder.as_mut().map(|d| d.push(id)) {
                        Some(Ok(text)) => say(format_args!("{text}")),
                        Some(Err(error)) => {
                            failed = Some(error);
                            return ControlFlow::Break(());
                        }
                        None => say(format_args!("{id} ")),
                    }
                }
                _ => {}
            }
            ControlFlow::Continue(())
        })?;
    say(format_args!("{}\n", decoder.map(|mut d| d.finish()).unwrap_or_default()));
    if let Some(error) = failed {
        return Err(error).context("the model gave an id that the tokenizer does not have");
    }
    eprintln!("finished: {}; prompt {} tokens, completion {}", ended(finish), ids.len(), tokens.len());
    clock.report(engine, ids.len(), tokens.len());
    eprintln!("logits_hash {logits_hash}");
    Ok(())
}

fn open<D: Device>(dir: &Path, device: D, options: &EngineOptions) -> Result<Engine<D>> {
    let mut clock = Clock::new();
    let engine = Engine::open(dir, device, options, &mut |progress| {
        if let OpenProgress::Loaded { layers, of } = progress {
            clock.line("loading", layers, of);
        }
    })?;
    clock.clear();
    for warning in engine.checkpoint().warnings() {
        eprintln!("note: {warning}");
    }
    Ok(engine)
}

fn print_event(event: &k3_xtml::Event) {
    match event {
        k3_xtml::Event::ReasoningDelta(text) => {
            eprint!("{text}");
            let _ = stderr().flush();
        }
        k3_xtml::Event::ContentDelta(text) => say(format_args!("{text}")),
        k3_xtml::Event::ToolCall(_) => say(format_args!("{}\n", event_json(event))),
        k3_xtml::Event::Error(_) | k3_xtml::Event::Finish(_) => {}
    }
}

/// Writes to stdout at once. A reader that has gone away is no reason to stop: the statistics still count.
fn say(text: std::fmt::Arguments<'_>) {
    let mut out = stdout().lock();
    let _ = out.write_fmt(text).and_then(|()| out.flush());
}

fn ended(finish: Finish) -> String {
    match finish {
        Finish::Stop(id) => format!("id {id}"),
        Finish::Length => "token limit".to_owned(),
        Finish::ContextFull => "context full".to_owned(),
        Finish::Cancelled => "cancelled".to_owned(),
    }
}

/// Times of a run, and a line of progress: redrawn on a terminal, else every few seconds.
struct Clock {
    start: Instant,
    first_token: Option<Duration>,
    shown: Option<Instant>,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now(), first_token: None, shown: None }
    }

    fn prefill(&mut self, layers: usize, of: usize) {
        if layers == of {
            self.clear();
        } else {
            self.line("prefill", layers, of);
        }
    }

    fn decoding(&mut self) {
        self.first_token.get_or_insert_with(|| self.start.elapsed());
    }

    fn line(&mut self, what: &str, done: usize, of: usize) {
        let terminal = stderr().is_terminal();
        let pause = if terminal { Duration::from_millis(200) } else { Duration::from_secs(5) };
        let last = self.shown.unwrap_or(self.start);
        if done == 0 || last.elapsed() < pause {
            return;
        }
        self.shown = Some(Instant::now());
        let elapsed = self.start.elapsed().as_secs_f64();
        let left = elapsed / done as f64 * (of - done) as f64;
        let (before, after) = if terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        eprint!("{before}{what}: layer {done} of {of}, {left:.0} s left{after}");
        let _ = stderr().flush();
    }

    fn clear(&mut self) {
        if self.shown.take().is_some() && stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
    }

    fn report<D: Device>(&self, engine: &Engine<D>, prompt: usize, completion: usize) {
        let total = self.start.elapsed();
        let first = self.first_token.unwrap_or(total);
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        eprintln!(
            "first token after {first:.2?} ({:.2} prompt tokens/s), then {:.2} tokens/s; experts: {}",
            rate(prompt, first),
            rate(completion.saturating_sub(1), total.saturating_sub(first)),
            engine.store().counters()
        );
    }
}
