//! `k3 generate`: a prompt or a chat request in, a reply out.

use std::io::{IsTerminal, stderr};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use k3_experts::ExpertStore;
use k3_format::{Checkpoint, GenerationConfig};
use k3_graph::{Cpu, Device, ModelOptions, Reference, check_tokens};
use k3_runner::{
    ChatError, ChatEvent, ChatReply, Chatter, Engine, EngineOptions, Event, Finish, Generate, Generation,
    OpenProgress, Sampler, Sampling, check_vocabulary, prompt_ids,
};
use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer};
use k3_xtml::{Channel, ChatRequest, EncodeOptions, Message, encode};

use crate::output::{Output, tell};
use crate::parse::{event_json, reply_json};
use crate::prompt::{read, refused};
use crate::request::apply;
use crate::store::StoreArgs;

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
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: generation_config.json, else 0]
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep the most likely tokens up to this sum of probabilities [default: generation_config.json, else 0.95]
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely
    #[arg(long, default_value_t = Sampling::default().min_p, allow_negative_numbers = true)]
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
    #[command(flatten)]
    store: StoreArgs,
    /// Run K3.1 without its indexer: another function than it was trained for, past the indexer's budget
    #[arg(long)]
    ignore_indexer: bool,
    /// One JSON event a line on stdout, and the whole reply with its usage as the last line; for conversations
    #[arg(long, conflicts_with_all = ["raw", "ids"])]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// A user's message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// An OpenAI chat request in a file, or - for stdin
    #[arg(long, value_name = "FILE")]
    chat: Option<PathBuf>,
    /// Text to continue as it is, without a conversation around it
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
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

/// What is to be continued.
enum Task {
    /// A conversation, as ids that end in an open channel.
    Chat(Tokenizer, Vec<u32>, Channel),
    /// Text or ids.
    Plain(Option<Tokenizer>, Vec<u32>),
}

fn run_on<D: Device>(args: &Args, device: D) -> Result<()> {
    // Loading can take long: whatever can be refused without the weights is refused before.
    let request = request(&args.input)?;
    let tokenizer = || Tokenizer::open(args.tokenizer.as_deref().unwrap_or(&args.dir));
    let mut options = EngineOptions::default();
    options.chunk_tokens = args.chunk;
    options.model = ModelOptions::default().with_ignore_indexer(args.ignore_indexer);
    let checkpoint = Arc::new(Checkpoint::open(&args.dir, &options.open)?);
    let config = checkpoint.config();
    let mut generate = Generate {
        max_tokens: args.max_tokens,
        sampling: args.sampling(checkpoint.generation_config()),
        ignore_eos: args.ignore_eos,
        ..Generate::default()
    };
    let task = match (&request, &args.input.raw) {
        (Some((request, body)), _) => {
            apply(body, &mut generate)?;
            let tokenizer = tokenizer()?;
            check_vocabulary(config, &tokenizer)?;
            let prompt = encode(request, &EncodeOptions::default()).map_err(|e| refused(&e))?;
            let channel = prompt.open_channel.ok_or(ChatError::NoGenerationPrompt)?;
            let ids = prompt_ids(&tokenizer, &prompt)?;
            Task::Chat(tokenizer, ids, channel)
        }
        (None, Some(text)) => {
            let tokenizer = tokenizer()?;
            check_vocabulary(config, &tokenizer)?;
            let ids = tokenizer.encode(text);
            Task::Plain(Some(tokenizer), ids)
        }
        (None, None) => Task::Plain(None, args.input.ids.clone()),
    };
    let (Task::Chat(_, ids, _) | Task::Plain(_, ids)) = &task;
    check_tokens(config, ids, 0).context("the prompt cannot be run")?;
    Sampler::new(generate.sampling.clone(), Vec::new())?;

    let (store, experts) = args.store.open(&checkpoint)?;
    let engine = load(checkpoint.clone(), store, device, &options)?;
    tell(format_args!("{experts}\n"));
    let s = &generate.sampling;
    tell(format_args!(
        "{} on {}; temperature {}, top-k {}, top-p {}, min-p {}, seed {}, at most {} tokens\n",
        checkpoint.variant(),
        engine.model().device().kind(),
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        s.seed,
        generate.max_tokens
    ));
    match task {
        Task::Chat(tokenizer, ids, channel) => {
            chat(args, &Chatter::new(&engine, tokenizer)?, &engine, &ids, channel, &generate)
        }
        Task::Plain(tokenizer, ids) => complete(&engine, &ids, tokenizer.as_ref(), &generate),
    }
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
    args: &Args,
    chatter: &Chatter<'_, D>,
    engine: &Engine<D>,
    ids: &[u32],
    channel: Channel,
    generate: &Generate,
) -> Result<()> {
    let mut clock = Clock::new();
    let mut out = Output::default();
    let mut show = |event: ChatEvent| match event {
        ChatEvent::Prefill { layers, of } => {
            clock.prefill(layers, of);
            ControlFlow::Continue(())
        }
        ChatEvent::Reply(event) => {
            clock.decoding();
            if args.json {
                out.say(format_args!("{}\n", event_json(&event)))
            } else {
                print_event(&event, &mut out)
            }
        }
        _ => ControlFlow::Continue(()),
    };
    let mut sequence = engine.new_sequence()?;
    let ChatReply { reply, finish, usage, logits_hash, .. } =
        chatter.reply_to_ids(&mut sequence, ids, channel, generate, &mut show).context("generating")?;
    // The statistics are told even if no one reads the reply any more.
    let _ = if args.json {
        let mut whole = reply_json(&reply);
        whole["usage"] = serde_json::json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        });
        out.say(format_args!("{whole}\n"))
    } else if !reply.content.is_empty() && !reply.content.ends_with('\n') {
        out.say(format_args!("\n"))
    } else {
        ControlFlow::Continue(())
    };
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
    tell(format_args!("logits_hash {logits_hash}\n"));
    out.finish().context("writing the reply to stdout")
}

/// Text or ids, continued without a conversation.
fn complete<D: Device>(
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
            clock.prefill(layers, of);
            ControlFlow::Continue(())
        }
        Event::Token(id) => {
            clock.decoding();
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
    tell(format_args!("logits_hash {logits_hash}\n"));
    out.finish().context("writing the reply to stdout")
}

fn load<D: Device>(
    checkpoint: Arc<Checkpoint>,
    store: Arc<dyn ExpertStore>,
    device: D,
    options: &EngineOptions,
) -> Result<Engine<D>> {
    for warning in checkpoint.warnings() {
        tell(format_args!("note: {warning}\n"));
    }
    let mut clock = Clock::new();
    let engine = Engine::with_store(checkpoint, store, device, options, &mut |progress| {
        if let OpenProgress::Loaded { layers, of } = progress {
            clock.line("loading", layers, of);
        }
    })?;
    clock.clear();
    Ok(engine)
}

fn print_event(event: &k3_xtml::Event, out: &mut Output) -> ControlFlow<()> {
    match event {
        k3_xtml::Event::ReasoningDelta(text) => tell(format_args!("{text}")),
        k3_xtml::Event::ContentDelta(text) => return out.say(format_args!("{text}")),
        k3_xtml::Event::ToolCall(_) => return out.say(format_args!("{}\n", event_json(event))),
        k3_xtml::Event::Error(_) | k3_xtml::Event::Finish(_) => {}
    }
    ControlFlow::Continue(())
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
        tell(format_args!("{before}{what}: layer {done} of {of}, {left:.0} s left{after}"));
    }

    fn clear(&mut self) {
        if self.shown.take().is_some() && stderr().is_terminal() {
            tell(format_args!("\r\x1b[K"));
        }
    }

    fn report<D: Device>(&self, engine: &Engine<D>, prompt: usize, completion: usize) {
        let total = self.start.elapsed();
        let first = self.first_token.unwrap_or(total);
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        tell(format_args!(
            "first token after {first:.2?} ({:.2} prompt tokens/s), then {:.2} tokens/s; experts: {}\n",
            rate(prompt, first),
            rate(completion.saturating_sub(1), total.saturating_sub(first)),
            engine.store().counters()
        ));
    }
}
