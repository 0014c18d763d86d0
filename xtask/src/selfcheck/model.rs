//! Checking one checkpoint.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k3_graph::select::argmax;
use k3_graph::{Device, LogitsWanted, Observer};
use k3_runner::{Chatter, Engine, LogitsHash, LogitsHasher, RunError, check_vocabulary};
use k3_tokenizer::Tokenizer;

use super::conversation::{self, Scene};
use super::divergence::{self, Divergence, Forced};
use super::stack::{self, Source};
use super::{Args, goldens, print};
use crate::expect::{
    Check, Expectations, Found, Injection, Outcome, Recording, Sizes, Wanted, align, compare, fits_context,
    record,
};
use crate::open::ignores_indexer;
use crate::progress::Progress;
use crate::prompt::{control_prompt, fixed_prompt};

/// Prefill chunk sizes that cycles go through; the whole prompt comes before them, or as much of it as the engine
/// takes at once.
const CHUNKS: [usize; 2] = [7, 1];
/// Tokens of a chunk of the first cycle at most.
const WHOLE: usize = 512;
/// Length of the fixed prompt and of the continuation where nothing is expected.
const PROMPT: usize = 16;
const CONTINUATION: usize = 8;

/// How far results may be from expected ones, in relative L2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Of the whole model, where errors add up over the layers.
    pub model: f64,
    /// Of one sublayer with expected inputs.
    pub sublayer: f64,
}

impl Bounds {
    /// Single precision (`docs/vectors.md` 5): a tenfold of what float32 arithmetic was measured to do.
    pub const CPU: Self = Self { model: 3e-5, sublayer: 5e-6 };
    /// Double precision against double precision, stored as f32.
    pub const REFERENCE: Self = Self { model: 1e-7, sublayer: 1e-7 };
}

/// One run of the prompt and a greedy continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Cycle {
    /// Prompt tokens that went through the model at once.
    pub chunk: usize,
    /// Of the logits of all prompt positions.
    pub logits_hash: LogitsHash,
    /// Of the logits of the continuation.
    pub continuation_hash: LogitsHash,
    /// The id with the largest logit after the prompt.
    pub top1: u32,
    /// The continuation.
    pub greedy: Vec<u32>,
    /// For the prompt.
    pub prefill: Duration,
    /// For the whole cycle.
    pub time: Duration,
}

/// What came of one checkpoint.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of its folder.
    pub model: String,
    /// The runs.
    pub cycles: Vec<Cycle>,
    /// Everything that was compared or skipped.
    pub checks: Vec<Check>,
    /// Where the run first leaves the expectations.
    pub divergence: Option<Divergence>,
    /// Every sublayer with expected inputs.
    pub forced: Option<Vec<Forced>>,
    /// Names in the expectations that mean nothing for this model.
    pub unknown: Vec<String>,
    /// Tokens whose experts the expectations list in another order than by rank.
    pub reordered: usize,
    /// What the failures mean, line by line.
    pub explanation: Vec<String>,
}

impl Report {
    /// Of a checkpoint of which nothing is known yet.
    fn new(model: String) -> Self {
        Self {
            model,
            cycles: Vec::new(),
            checks: Vec::new(),
            divergence: None,
            forced: None,
            unknown: Vec::new(),
            reordered: 0,
            explanation: Vec::new(),
        }
    }

    /// Of a checkpoint that could not be checked, which is a failed check.
    pub(super) fn obstacle(dir: &Path, error: &anyhow::Error) -> Self {
        let mut report = Self::new(name(dir));
        report.checks.push(Check::of("runs", false, Found::Nothing, format!("{error:#}")));
        report
    }

    /// Checks with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.checks.iter().filter(|c| c.outcome == outcome).count()
    }

    /// Whether something was checked and nothing failed.
    pub fn is_good(&self) -> bool {
        self.count(Outcome::Failed) == 0 && self.count(Outcome::Passed) > 0
    }

    /// The check of this name.
    pub fn check(&self, name: &str) -> Option<&Check> {
        self.checks.iter().find(|c| c.name == name)
    }
}

/// The last part of a path, as the file system knows it.
fn name(dir: &Path) -> String {
    let name = dir.canonicalize().ok().and_then(|d| d.file_name().map(|n| n.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| dir.display().to_string())
}

pub(super) fn check<D: Device>(
    args: &Args,
    dir: &Path,
    device: D,
    threads: usize,
    bounds: Bounds,
    out: &mut dyn Write,
) -> Result<Report> {
    let mut report = Report::new(name(dir));
    let started = Instant::now();
    let mut engine = args.open.open(dir, device)?;
    print::opened(args, &engine, &report.model, threads, started.elapsed(), out)?;

    let (expected, goldens) = expected(args, dir)?;
    let config = engine.model().config().clone();
    let layers = engine.model().num_layers();
    let context = config.max_position_embeddings;
    let ignore_indexer = ignores_indexer(&engine);
    let running = Sizes { config: config.clone(), layers, tokens: 0, continuation: 0, ignore_indexer };
    let source = if args.expect.is_some() { Source::Named } else { Source::Snapshot };
    let expected = of_these_layers(expected, &running, source, &mut report)?;
    let tokenizer = tokenizer(&engine, dir)?;
    let framed = tokenizer.as_ref().filter(|_| args.tokens.is_none() && expected.is_none());
    let framed = framed.map(control_prompt).transpose()?.filter(|ids| ids.len() < context);
    let is_framed = framed.is_some();
    let (prompt, continuation) = if let Some(expected) = &expected {
        if args.tokens.is_some() {
            bail!("--tokens has no use here: the prompt comes from {}", expected.files_text());
        }
        (expected.prompt(config.vocab_size)?, expected.continuation())
    } else if let Some(ids) = framed {
        let continuation = CONTINUATION.min(context - ids.len());
        (ids, continuation)
    } else {
        if let Some(tokens) = args.tokens.filter(|&tokens| tokens > context) {
            bail!("--tokens {tokens} does not fit the model's context of {context}");
        }
        let tokens = args.tokens.unwrap_or(PROMPT.min(context));
        (fixed_prompt(&engine, tokens)?, CONTINUATION.min(context - tokens))
    };
    let mut scene = Scene::beside(dir)?;
    let sizes = Sizes { tokens: prompt.len(), continuation, ..running };
    fits_context(&sizes)?;
    report.unknown = expected.as_ref().map_or_else(|| Ok(Vec::new()), |e| e.validate(&sizes))?;
    let all = goldens.len();
    let goldens = goldens::ready(goldens, &sizes, source, &mut report.unknown)?;
    if goldens.len() < all {
        let what = format!("{} of {all} goldens are", all - goldens.len());
        report.checks.push(stack::left_out("goldens", &what, &sizes, source));
    }
    if stack::is_truncated(&sizes) && scene.take().is_some() {
        let what = format!("{} is", conversation::FILE);
        report.checks.push(Check::skipped("tool call", stack::of_all_layers(&what, &sizes)));
    }
    print::expectations(expected.as_ref(), &report.unknown, &sizes, goldens.len(), is_framed, out)?;
    print::left_out(&report, out)?;
    let outcome =
        fill(args, &mut engine, &prompt, expected.as_ref(), &sizes, bounds, threads, &mut report, out)
            .and_then(|()| speak(args, &mut engine, &goldens, tokenizer, scene.as_ref(), &mut report, out));
    match outcome.map_err(anyhow::Error::downcast::<RunError>) {
        Ok(()) => report.checks.insert(0, Check::of("finite", true, Found::Nothing, "")),
        // The files are readable, and what they hold is no model: a result, not an obstacle.
        Err(Ok(RunError::Span(error))) => {
            report.explanation.push(format!("first divergence: {error}"));
            report.checks.insert(0, Check::of("finite", false, Found::Nothing, error.to_string()));
        }
        Err(Ok(error)) => return Err(error).with_context(|| format!("running {}", report.model)),
        Err(Err(error)) => return Err(error),
    }
    print::model(args, &report, out)?;
    Ok(report)
}

fn fill<D: Device>(
    args: &Args,
    engine: &mut Engine<D>,
    prompt: &[u32],
    expected: Option<&Expectations>,
    sizes: &Sizes,
    bounds: Bounds,
    threads: usize,
    report: &mut Report,
    out: &mut dyn Write,
) -> Result<()> {
    for i in 0..args.cycles as usize {
        let chunk = match (args.chunk, i % (CHUNKS.len() + 1)) {
            (Some(chunk), _) => chunk.min(prompt.len()),
            (None, 0) => prompt.len().min(WHOLE),
            (None, turn) => CHUNKS[turn - 1].min(prompt.len()),
        };
        engine.set_chunk_tokens(chunk);
        let cycle = run_cycle(engine, prompt, sizes.continuation, &format!("cycle {}", i + 1))?;
        print::cycle(i + 1, &report.model, engine, threads, &cycle, out)?;
        report.cycles.push(cycle);
    }
    let (first, rest) = report.cycles.split_first().context("there is at least one cycle")?;
    let same = |c: &&Cycle| {
        (c.logits_hash, c.continuation_hash, &c.greedy)
            == (first.logits_hash, first.continuation_hash, &first.greedy)
    };
    let equal = 1 + rest.iter().filter(same).count();
    let of = report.cycles.len();
    report.checks.push(if of == 1 {
        Check::skipped("bit-identical cycles", "one cycle has nothing to be identical with")
    } else {
        let differs = rest.iter().find(|c| !same(c)).map_or(0, |c| c.chunk);
        let note = format!("chunk {differs} gives other bits than chunk {}", first.chunk);
        Check::of("bit-identical cycles", equal == of, Found::Equal { equal, of }, note)
    });

    let Some(expected) = expected else { return Ok(()) };
    engine.set_chunk_tokens(args.chunk.unwrap_or(prompt.len()).min(WHOLE));
    let recording = recorded(engine, prompt, expected, sizes)?;
    let note = "a run that is watched gives other bits than one that is not";
    report.checks.push(Check::of(
        "watched run",
        recording.logits_hash == first.logits_hash,
        Found::Nothing,
        note,
    ));
    let (found, reordered) = align(&expected.tensors, recording.tensors);
    report.forced = divergence::forced(engine, prompt, expected, sizes)?;
    let mut compared = compare(expected, &found, sizes, bounds.model);
    compared.extend(divergence::forced_checks(report.forced.as_deref(), sizes, bounds.sublayer));
    if compared.iter().all(|check| check.outcome == Outcome::Skipped) {
        compared.insert(0, nothing_compared(args, expected));
    }
    report.checks.extend(compared);
    report.reordered = reordered;
    report.divergence = divergence::locate(expected, &found, sizes, bounds.model);
    report.explanation = divergence::explain(
        &report.checks,
        report.divergence.as_ref(),
        report.forced.as_deref(),
        bounds.sublayer,
    );
    Ok(())
}

/// What the checkpoint should say: its goldens, and its conversation.
fn speak<D: Device>(
    args: &Args,
    engine: &mut Engine<D>,
    goldens: &[goldens::Golden],
    tokenizer: Option<Tokenizer>,
    scene: Option<&Scene>,
    report: &mut Report,
    out: &mut dyn Write,
) -> Result<()> {
    engine.set_chunk_tokens(args.chunk.unwrap_or(WHOLE));
    if !goldens.is_empty() {
        report.checks.extend(goldens::check(engine, goldens)?);
    }
    match (scene, tokenizer) {
        (None, _) => {}
        (Some(_), None) => {
            let why = "there is a conversation.json, and no tiktoken.model beside it to read it with: the copy of the \
                       snapshot is not complete";
            report.checks.push(Check::of("tool call", false, Found::Nothing, why));
        }
        (Some(scene), Some(tokenizer)) => {
            let chatter = Chatter::new(engine, tokenizer)?;
            report.checks.extend(conversation::round_trip(&chatter, scene, out)?);
        }
    }
    let is_expected = |check: &Check| !["finite", "bit-identical cycles"].contains(&check.name.as_str());
    if !report.checks.iter().any(is_expected) {
        report.checks.push(Check::skipped("expectations", "there are none: pass --expect FILE"));
    }
    Ok(())
}

/// Expectations of one of many prompts, with its name.
type Named = (String, Expectations);

/// What is expected of one prompt, and of many others: of those that were named, else of those that the checkpoint has.
fn expected(args: &Args, dir: &Path) -> Result<(Option<Expectations>, Vec<Named>)> {
    match &args.expect {
        // Shards of a checkpoint are no expectations, and may not fit into memory.
        Some(path) if path.is_dir() && !path.join("config.json").exists() => {
            match Expectations::beside(path)? {
                Some(expected) => Ok((Some(expected), Vec::new())),
                None => Ok((None, Expectations::read_each(path)?)),
            }
        }
        Some(path) => Ok((Some(Expectations::read(path)?), Vec::new())),
        None => {
            let many = dir.join(goldens::FOLDER);
            let many = if many.is_dir() { Expectations::read_each(&many)? } else { Vec::new() };
            Ok((Expectations::beside(dir)?, many))
        }
    }
}

/// What is expected of one prompt, if it is of the layers that run; else that is a check of its own.
fn of_these_layers(
    expected: Option<Expectations>,
    running: &Sizes,
    source: Source,
    report: &mut Report,
) -> Result<Option<Expectations>> {
    let Some(expected) = expected else { return Ok(None) };
    let tokens = expected.prompt(running.config.vocab_size)?.len();
    let sizes = Sizes { tokens, continuation: expected.continuation(), ..running.clone() };
    fits_context(&sizes)?;
    if stack::applies(&expected, &sizes, source)? {
        return Ok(Some(expected));
    }
    let what = format!("{}: they are", expected.files_text());
    report.checks.push(stack::left_out("expectations", &what, &sizes, source));
    Ok(None)
}

/// The tokenizer beside the weights, if there is one.
fn tokenizer<D: Device>(engine: &Engine<D>, dir: &Path) -> Result<Option<Tokenizer>> {
    if !dir.join("tiktoken.model").is_file() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::open(dir)?;
    check_vocabulary(engine.model().config(), &tokenizer).with_context(|| dir.display().to_string())?;
    Ok(Some(tokenizer))
}

/// Expectations that hold nothing to compare are no agreement; if they were asked for, that is a failure.
fn nothing_compared(args: &Args, expected: &Expectations) -> Check {
    let names: Vec<&str> = expected.tensors.keys().map(String::as_str).collect();
    let note = format!(
        "nothing was compared: {} holds no expected result for this run, only {}; docs/vectors.md lists the tensors \
         that can be compared",
        expected.files_text(),
        names.join(", ")
    );
    if args.expect.is_some() {
        Check::of("expectations", false, Found::Nothing, note)
    } else {
        Check::skipped("expectations", note)
    }
}

fn run_cycle<D: Device>(
    engine: &Engine<D>,
    prompt: &[u32],
    continuation: usize,
    label: &str,
) -> Result<Cycle> {
    let started = Instant::now();
    let passes = prompt.len().div_ceil(engine.chunk_tokens()) + continuation;
    let mut watch = Watch(Progress::steps(label, passes * engine.model().num_layers()));
    let mut sequence = engine.new_sequence()?;
    // Chunk by chunk: the logits of all positions of a long prompt do not fit into memory.
    let mut hasher = LogitsHasher::new();
    let mut row = Vec::new();
    for chunk in prompt.chunks(engine.chunk_tokens()) {
        let logits = engine.run(&mut sequence, chunk, LogitsWanted::All, &mut watch)?;
        ensure!(logits.values.len() == chunk.len() * logits.width, "logits of {} positions", chunk.len());
        hasher.update(&logits.values);
        row = logits.last().context("a chunk has logits")?.to_vec();
    }
    let logits_hash = hasher.finish();
    let prefill = started.elapsed();
    let top1 = argmax(&row).context("logits are numbers")?;
    let (mut greedy, mut hasher) = (Vec::new(), LogitsHasher::new());
    for _ in 0..continuation {
        let token = argmax(&row).context("logits are numbers")?;
        greedy.push(token);
        row = engine.run(&mut sequence, &[token], LogitsWanted::Last, &mut watch)?.values;
        hasher.update(&row);
    }
    Ok(Cycle {
        chunk: engine.chunk_tokens(),
        logits_hash,
        continuation_hash: hasher.finish(),
        top1,
        greedy,
        prefill,
        time: started.elapsed(),
    })
}

fn recorded<D: Device>(
    engine: &Engine<D>,
    prompt: &[u32],
    expected: &Expectations,
    sizes: &Sizes,
) -> Result<Recording> {
    let wanted = Wanted {
        all_positions: divergence::has_all_positions(expected, sizes),
        index_scores: expected.tensors.contains_key("index_scores") && !sizes.ignore_indexer,
    };
    let passes = prompt.len().div_ceil(engine.chunk_tokens()) + sizes.continuation;
    let mut progress = Progress::steps("comparing", passes * sizes.layers);
    record(engine, prompt, sizes, wanted, Injection::default(), &mut || progress.step())
}

/// Watches nothing but the time.
struct Watch(Progress);

impl Observer for Watch {
    fn layer_done(&mut self, _done: usize, _layers: usize) -> ControlFlow<()> {
        self.0.step();
        ControlFlow::Continue(())
    }
}
