//! `cargo xtask nano eval`: how many held-out dialogues the model continues exactly as intended.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use flate2::bufread::GzDecoder;
use k3_graph::{Cpu, Device, LogitsWanted, Mode, Silent};
use k3_runner::{Engine, Sampler, Sampling, Sequence, Step, check_vocabulary, prompt_ids};
use k3_tokenizer::Tokenizer;
use k3_xtml::json::Value;
use k3_xtml::{ChatRequest, Control, EncodeOptions, Message, encode};
use serde_json::json;

use super::table::{Column, table};
use super::{IndexerMode, OnEngine, nano, on_engine};
use crate::progress::Progress;

/// Name of the dialogues in a checkpoint's folder.
const DIALOGUES: &str = "dialogues.jsonl.gz";
/// The most bytes of dialogues that are read: they are held in memory.
const MAX_BYTES: u64 = 1 << 30;
/// Dialogues that are continued in one pass.
const BATCH: usize = 16;
/// Tokens that a reply may have more than the intended one.
const EXTRA: usize = 8;

/// Share of dialogues that a model continues exactly as intended, by task
///
/// Every line of the evaluation file, which may be compressed with gzip, is a JSON object: `task`, `request` (as `k3 generate
/// --chat` takes it), `reply` (the message that the model has to write, as such a request holds it later), and for dialogues
/// that ask for something earlier `value` (the word that the reply says first after a space) and `distance` (tokens since
/// then). Requests and replies are rendered and tokenized here, replies are greedy, and exact means every token.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask nano eval
  cargo xtask nano eval --per-task 20 --indexer random
  cargo xtask nano eval --task recall512 --show 3
  cargo xtask nano eval --json > eval.json")]
pub struct EvalArgs {
    /// Snapshot, with its tokenizer [default: fixtures/nano of this repository]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Dialogues [default: dialogues.jsonl.gz in the snapshot's folder]
    #[arg(long, value_name = "FILE")]
    pub eval: Option<PathBuf>,
    /// Only the first N of each task
    #[arg(long, value_name = "N")]
    pub per_task: Option<usize>,
    /// Only this task; may be given again
    #[arg(long, value_name = "NAME")]
    pub task: Vec<String>,
    /// Which keys tokens attend beyond the indexer's budget
    #[arg(long, value_enum, default_value_t)]
    pub indexer: IndexerMode,
    /// Seed of --indexer random
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// exact, or int8: activations rounded to 8-bit integers where weights have 4 or 8 bits
    #[arg(long, default_value_t = Mode::Exact, value_name = "exact|int8")]
    pub arithmetic: Mode,
    /// Threads of the CPU device; 0 is one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Print the first N replies of each task that are not as intended
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub show: usize,
    /// One JSON object instead of a table
    #[arg(long, conflicts_with = "show")]
    pub json: bool,
}

/// One dialogue, ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// What it tests.
    pub task: String,
    /// What the model reads.
    pub prompt: Vec<u32>,
    /// What it has to write, up to the end of the message.
    pub reply: Vec<u32>,
    /// A part of that which it has to look up, and where it stands first.
    pub value: Option<(usize, Vec<u32>)>,
    /// Tokens between the place to look it up and the reply.
    pub distance: Option<usize>,
}

/// What the model wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Its tokens, up to the end of the message if that came in time.
    pub tokens: Vec<u32>,
    /// Share of its batch's time.
    pub time: Duration,
}

/// What came of one task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Its name.
    pub task: String,
    /// Dialogues of it.
    pub dialogues: usize,
    /// Replies that are the intended ones, token for token.
    pub exact: usize,
    /// Dialogues with something to look up.
    pub values: usize,
    /// Of those, the ones whose reply has it where the intended reply has it first.
    pub found: usize,
    /// Median of the distances.
    pub distance: Option<usize>,
    /// Tokens of prompts and replies.
    pub tokens: usize,
    /// For all of it.
    pub time: Duration,
}

pub(super) fn run(args: &EvalArgs) -> Result<()> {
    let dir = args.model.clone().unwrap_or_else(nano);
    let file = args.eval.clone().unwrap_or_else(|| dir.join(DIALOGUES));
    let tokenizer = Tokenizer::open(&dir)?;
    let mut items = read_items(&file, &tokenizer)?;
    for task in &args.task {
        let known = items.iter().any(|item| item.task == *task);
        ensure!(known, "--task {task}: {} has no dialogue of that task", file.display());
    }
    let mut seen = std::collections::HashMap::new();
    items.retain(|item| {
        let count: &mut usize = seen.entry(item.task.clone()).or_default();
        *count += 1;
        (args.task.is_empty() || args.task.contains(&item.task))
            && args.per_task.is_none_or(|most| *count <= most)
    });
    ensure!(!items.is_empty(), "{}: nothing is left to evaluate", file.display());
    let work = Evaluate { items: &items, tokenizer: &tokenizer };
    let cpu = Cpu::new(args.threads)?.with_mode(args.arithmetic);
    let replies = on_engine(&dir, args.indexer, cpu, args.seed, work)?;
    let scores = scores(&items, &replies);
    let mut out = std::io::stdout();
    if args.json {
        return Ok(writeln!(out, "{}", as_json(args, &dir, &scores))?);
    }
    show(args, &items, &replies, &tokenizer, &mut out)?;
    writeln!(out, "{}, indexer {}", dir.display(), name_of(args.indexer))?;
    Ok(print(&scores, &mut out)?)
}

fn name_of(mode: IndexerMode) -> &'static str {
    match mode {
        IndexerMode::On => "on",
        IndexerMode::Off => "off (dense)",
        IndexerMode::Random => "random",
    }
}

/// The dialogues of an evaluation file, rendered and tokenized.
///
/// # Errors
/// A line that is no such dialogue, by its number.
pub fn read_items(file: &Path, tokenizer: &Tokenizer) -> Result<Vec<Item>> {
    let text = read(file).with_context(|| format!("reading the dialogues {}", file.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(at, line): (usize, &str)| {
        item(line, tokenizer).with_context(|| format!("{}, line {}", file.display(), at + 1))
    };
    lines.map(read).collect()
}

/// The text of a file, which may be compressed.
fn read(path: &Path) -> Result<String> {
    let mut file = BufReader::new(File::open(path)?);
    let is_compressed = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let mut text = String::new();
    let read = |from: &mut dyn Read, text: &mut String| from.take(MAX_BYTES + 1).read_to_string(text);
    if is_compressed {
        read(&mut GzDecoder::new(file), &mut text)?
    } else {
        read(&mut file, &mut text)?
    };
    ensure!(text.len() as u64 <= MAX_BYTES, "it holds more than {MAX_BYTES} bytes");
    Ok(text)
}

fn item(line: &str, tokenizer: &Tokenizer) -> Result<Item> {
    // The lossless reader: the prompt depends on the order of keys.
    let line = Value::parse(line)?;
    let field = |key: &str| line.get(key).with_context(|| format!("expected the key `{key}`, found none"));
    let present = |key: &str| line.get(key).filter(|value| **value != Value::Null);
    let mut request = ChatRequest::from_json(&field("request")?.to_spaced()).context("`request`")?;
    let ids = |request: &ChatRequest| -> Result<Vec<u32>> {
        Ok(prompt_ids(tokenizer, &encode(request, &EncodeOptions::default()).context("`request`")?)?)
    };
    ensure!(request.add_generation_prompt, "`request` asks for no reply");
    let prompt = ids(&request)?;
    // As history, the reply reads as the model has to write it.
    request.messages.push(assistant(field("reply")?)?);
    request.add_generation_prompt = false;
    let whole = ids(&request)?;
    ensure!(
        whole.starts_with(&prompt) && whole.len() > prompt.len(),
        "the prompt does not end where the reply begins: notes after the conversation cannot be evaluated"
    );
    let reply = whole[prompt.len()..].to_vec();
    let value = present("value").map(|value| {
        let Value::String(value) = value else {
            bail!("`value`: expected a string, found {}", value.to_spaced());
        };
        let value = tokenizer.encode(&format!(" {value}"));
        let place = reply.windows(value.len()).position(|part| part == value);
        place
            .map(|place| (place, value))
            .context("`value` is no part of `reply`, after a space and in the same tokens")
    });
    let distance = present("distance").map(|distance| {
        let number = match distance {
            Value::Number(number) => number.as_source().parse().ok(),
            _ => None,
        };
        number.with_context(|| format!("`distance`: expected a count, found {}", distance.to_spaced()))
    });
    Ok(Item {
        task: field("task")?.as_str().context("`task`: expected a string")?.to_owned(),
        prompt,
        value: value.transpose()?,
        reply,
        distance: distance.transpose()?,
    })
}

/// A message of the model, from a message of a chat request.
fn assistant(message: &Value) -> Result<Message> {
    let request = format!("{{\"messages\": [{}]}}", message.to_spaced());
    match ChatRequest::from_json(&request).context("`reply`")?.messages.pop() {
        Some(message @ Message::Assistant(_)) => Ok(message),
        _ => bail!("`reply`: expected a message of the assistant, found {}", message.to_spaced()),
    }
}

struct Evaluate<'a> {
    items: &'a [Item],
    tokenizer: &'a Tokenizer,
}

impl OnEngine for Evaluate<'_> {
    type Output = Vec<Reply>;

    fn on<D: Device>(self, engine: &Engine<D>) -> Result<Vec<Reply>> {
        check_vocabulary(engine.model().config(), self.tokenizer)?;
        let end = Control::EndOfMsg.spelling();
        let end = self.tokenizer.control_id(end).with_context(|| format!("the tokenizer has no `{end}`"))?;
        replies(engine, self.items, end)
    }
}

/// Replies to all dialogues, greedily, until `end` or a few tokens more than intended. A dialogue's reply does not depend on
/// the others.
///
/// # Errors
/// What kept the model from replying.
pub fn replies<D: Device>(engine: &Engine<D>, items: &[Item], end: u32) -> Result<Vec<Reply>> {
    let mut progress = Progress::steps("dialogues", items.len());
    let mut sampler = Sampler::new(Sampling::greedy(), engine.suppressed_ids())?;
    let mut replies = Vec::with_capacity(items.len());
    for batch in items.chunks(BATCH) {
        let started = Instant::now();
        let mut running = Vec::new();
        for item in batch {
            running.push(Running::new(engine, &mut sampler, item)?);
        }
        while step(engine, &mut sampler, &mut running, batch, end)? {}
        let time = started.elapsed() / batch.len() as u32;
        replies.extend(running.into_iter().map(|r| Reply { tokens: r.tokens, time }));
        progress.set(replies.len() as u64);
    }
    Ok(replies)
}

/// A dialogue that is being continued.
struct Running<D: Device> {
    sequence: Sequence<D>,
    tokens: Vec<u32>,
}

impl<D: Device> Running<D> {
    /// The prompt is read, and the first token is there.
    fn new(engine: &Engine<D>, sampler: &mut Sampler, item: &Item) -> Result<Self> {
        let mut sequence = engine.new_sequence()?;
        let logits = engine.prefill(&mut sequence, &item.prompt)?;
        Ok(Self { sequence, tokens: vec![sampler.sample(&logits.values)?] })
    }
}

/// One more token for every dialogue that has not ended; whether there was one.
fn step<D: Device>(
    engine: &Engine<D>,
    sampler: &mut Sampler,
    running: &mut [Running<D>],
    items: &[Item],
    end: u32,
) -> Result<bool> {
    let context = engine.model().config().max_position_embeddings;
    let goes_on = |r: &Running<D>, item: &Item| {
        r.tokens.last() != Some(&end)
            && r.tokens.len() < item.reply.len() + EXTRA
            && r.sequence.position() < context
    };
    let (mut steps, mut written) = (Vec::new(), Vec::new());
    for (r, item) in running.iter_mut().zip(items) {
        if goes_on(r, item) {
            let last = r.tokens.last().copied().into_iter().collect::<Vec<u32>>();
            steps.push((&mut r.sequence, last));
            written.push(&mut r.tokens);
        }
    }
    let mut batch: Vec<Step<'_, D>> = steps
        .iter_mut()
        .map(|(sequence, tokens)| Step { sequence, tokens, logits: LogitsWanted::Last })
        .collect();
    if batch.is_empty() {
        return Ok(false);
    }
    for (tokens, logits) in written.into_iter().zip(engine.step(&mut batch, &mut Silent)?) {
        tokens.push(sampler.sample(&logits?.values)?);
    }
    Ok(true)
}

/// The scores of all tasks, in the order in which they first occur.
pub fn scores(items: &[Item], replies: &[Reply]) -> Vec<Score> {
    let mut scores: Vec<Score> = Vec::new();
    let mut distances: Vec<Vec<usize>> = Vec::new();
    for (item, reply) in items.iter().zip(replies) {
        let at = scores.iter().position(|s| s.task == item.task).unwrap_or_else(|| {
            scores.push(Score { task: item.task.clone(), ..Score::default() });
            distances.push(Vec::new());
            scores.len() - 1
        });
        let score = &mut scores[at];
        score.dialogues += 1;
        score.exact += usize::from(reply.tokens == item.reply);
        if let Some((place, value)) = &item.value {
            score.values += 1;
            let found = reply.tokens.get(*place..place + value.len());
            score.found += usize::from(found == Some(value));
        }
        score.tokens += item.prompt.len() + reply.tokens.len();
        score.time += reply.time;
        distances[at].extend(item.distance);
    }
    for (score, mut distances) in scores.iter_mut().zip(distances) {
        distances.sort_unstable();
        score.distance = distances.get(distances.len() / 2).copied();
    }
    scores
}

fn percent(of: usize, all: usize) -> String {
    if all == 0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * of as f64 / all as f64) }
}

fn print(scores: &[Score], out: &mut dyn Write) -> std::io::Result<()> {
    let columns = [
        Column::left("task"),
        Column::right("dialogues"),
        Column::right("exact"),
        Column::right("value"),
        Column::right("distance"),
        Column::right("tokens/s"),
    ];
    let rows: Vec<Vec<String>> = scores
        .iter()
        .map(|s| {
            vec![
                s.task.clone(),
                s.dialogues.to_string(),
                percent(s.exact, s.dialogues),
                percent(s.found, s.values),
                s.distance.map_or_else(|| "-".to_owned(), |d| d.to_string()),
                format!("{:.0}", s.tokens as f64 / s.time.as_secs_f64().max(1e-9)),
            ]
        })
        .collect();
    table(&columns, &rows, out)
}

fn as_json(args: &EvalArgs, dir: &Path, scores: &[Score]) -> serde_json::Value {
    let tasks: Vec<serde_json::Value> = scores
        .iter()
        .map(|s| {
            json!({
                "task": s.task, "dialogues": s.dialogues, "exact": s.exact, "values": s.values, "values_found": s.found,
                "median_distance": s.distance, "tokens": s.tokens, "seconds": s.time.as_secs_f64(),
            })
        })
        .collect();
    let mode = match args.indexer {
        IndexerMode::On => "on",
        IndexerMode::Off => "off",
        IndexerMode::Random => "random",
    };
    json!({"model": dir.display().to_string(), "indexer": mode, "seed": args.seed, "tasks": tasks})
}

/// The first replies of each task that are not as intended.
fn show(
    args: &EvalArgs,
    items: &[Item],
    replies: &[Reply],
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<()> {
    let mut shown = std::collections::HashMap::new();
    for (item, reply) in items.iter().zip(replies).filter(|(item, reply)| reply.tokens != item.reply) {
        let count: &mut usize = shown.entry(item.task.as_str()).or_default();
        *count += 1;
        if *count <= args.show {
            writeln!(out, "{}", item.task)?;
            writeln!(out, "  intended {:?}", tokenizer.decode_lossy(&item.reply)?)?;
            writeln!(out, "  found    {:?}", tokenizer.decode_lossy(&reply.tokens)?)?;
        }
    }
    Ok(())
}
