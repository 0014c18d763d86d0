//! How much of reading is hidden behind arithmetic, or of arithmetic behind reading.

mod paced;
mod report;
mod timed;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use k3_experts::plan::parse_rate;
use k3_experts::policy::PolicyName;
use k3_experts::simulate;
use k3_experts::slab::{Direct, Reader};
use k3_experts::trace::{Geometry, Trace};
use k3_experts::{Choices, ExpertId, ExpertRequest, ExpertStore, Phase, SlabOptions, SlabStore};
use k3_format::{Checkpoint, LoadMode, OpenOptions};
use k3_graph::{Cpu, LogitsWanted, Lookahead, Model, ModelOptions, SequenceState, Silent, Span};

use paced::Paced;
use report::{ARITHMETIC, ARITHMETIC_BESIDE, IO, IO_BESIDE, Round, TOGETHER, alone, together};
use timed::{Asked, Timed, Visit};

#[derive(Clone, Debug, clap::Args)]
pub(super) struct Args {
    /// A snapshot with experts of the released size
    #[arg(long)]
    model: PathBuf,
    /// Tokens that are decoded and timed
    #[arg(long, default_value_t = 16, value_parser = count(1))]
    tokens: usize,
    /// Of these, tokens that each part takes before the next part does
    #[arg(long, default_value_t = 2, value_parser = count(1))]
    round: usize,
    /// Milliseconds of rest before each part: a drive may give more for a short time than it can keep up
    #[arg(long, default_value_t = 800, value_parser = clap::value_parser!(u64).range(..=60_000))]
    rest: u64,
    /// Tokens before them, whose experts fill the slots
    #[arg(long, default_value_t = 8, value_parser = count(0))]
    warm: usize,
    /// Hit rates at which decode is timed; each sets a budget. Without a value decode is not timed
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "0,0.35,0.6", value_parser = share)]
    hit_rates: Vec<f64>,
    /// Tokens of a prompt that is timed as well; 0: none
    #[arg(long, default_value_t = 0, value_parser = count(0))]
    prefill: usize,
    /// Threads that compute; 0 takes one a core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Reads in flight on a drive
    #[arg(long, default_value_t = 6)]
    reads_in_flight: usize,
    /// Bytes a second that the drive gives at most, as if all shards were on one, 1MB/s or more: 0 lets it give what it can.
    /// For a disk that gives more for a while than it keeps up; less than it keeps up is the same in every part
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = drive_rate, allow_hyphen_values = true)]
    drive_rate: u64,
    /// What the next layer's router is given early
    #[arg(long, value_enum, default_value_t)]
    lookahead: LookaheadName,
    /// Let guesses come true as often as those published of the released model (92 % at rank 1, 60 % at rank 8). The
    /// routers of a synthetic tree are random, and their guesses worth nothing
    #[arg(long)]
    published_guesses: bool,
    /// Experts read on a guess that may be in memory at once: both together is measured with each of these; 0: no guesses
    #[arg(long, value_delimiter = ',', default_value = "0,6")]
    guesses: Vec<usize>,
    /// Times that the prompt is measured; the median counts
    #[arg(long, default_value_t = 1, value_parser = count(1))]
    repeat: usize,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum LookaheadName {
    Off,
    #[default]
    Input,
    Shared,
}

/// The model, and what it takes to make stores of any size.
struct Bench {
    model: Model<Cpu>,
    checkpoint: Arc<Checkpoint>,
    reader: Arc<dyn Reader>,
    reads_in_flight: usize,
}

/// A number of tokens or of times: not what a slip of the finger makes of it.
fn count(least: usize) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(least as u64..=1 << 20)
}

/// `--drive-rate`: 0, or a rate at which the end can be waited for.
fn drive_rate(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 1_000_000;
    let rate = parse_rate(text)?;
    let is_possible = rate == 0 || rate >= LEAST;
    is_possible.then_some(rate).ok_or_else(|| "expected 0, or 1MB/s or more: an expert has 17 MB".to_owned())
}

/// From 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a hit rate is a share, from 0 to 1".to_owned()),
    }
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    ensure!(
        !args.hit_rates.is_empty() || args.prefill > 0,
        "nothing is to be timed: name a hit rate or a prompt"
    );
    ensure!(
        args.tokens.is_multiple_of(args.round),
        "rounds of {} tokens are no part of {}",
        args.round,
        args.tokens
    );
    let mut open = OpenOptions::default();
    // What is not touched need not fit into memory: most of the embedding.
    open.load = LoadMode::Map;
    let checkpoint = Arc::new(Checkpoint::open(&args.model, &open)?);
    let config = checkpoint.config().clone();
    let options = ModelOptions::default().with_lookahead(match args.lookahead {
        LookaheadName::Off => Lookahead::Off,
        LookaheadName::Input => Lookahead::Input,
        LookaheadName::Shared => Lookahead::Shared,
    });
    let device = Cpu::new(args.threads)?;
    let threads = device.threads();
    let geometry = Geometry {
        layers: config.num_hidden_layers() - config.first_k_dense_replace,
        experts: config.moe.num_experts,
        per_token: config.moe.num_experts_per_token,
    };
    let bench = Bench {
        model: Model::load(device, config, &*checkpoint, &options, &mut |_, _| {})?,
        reader: match (Direct::new(checkpoint.clone())?, args.drive_rate) {
            (direct, 0) => Arc::new(direct),
            (direct, rate) => Arc::new(Paced::new(direct, rate)),
        },
        reads_in_flight: args.reads_in_flight,
        checkpoint,
    };
    let Geometry { layers, experts, per_token } = geometry;
    writeln!(
        out,
        "{layers} layers of {experts} experts, {per_token} a token; {threads} threads, {} reads in flight, lookahead {:?}",
        args.reads_in_flight, args.lookahead
    )?;
    let resident = bench.store(layers * experts)?;
    if !args.hit_rates.is_empty() {
        time_decode(args, &bench, geometry, &resident, &mut out)?;
    }
    if args.prefill > 0 {
        time_prefill(args, &bench, geometry, &resident, &mut out)?;
    }
    Ok(())
}

fn time_decode(
    args: &Args,
    bench: &Bench,
    geometry: Geometry,
    resident: &SlabStore,
    out: &mut impl Write,
) -> Result<()> {
    // Everything comes into memory, and the choices are written down.
    let ids = bench.ids(args.warm + args.tokens);
    let (warm, timed) = ids.split_at(args.warm);
    let tape = Timed::new(resident, None);
    let mut state = bench.model.new_state()?;
    bench.decode(&tape, &mut state, warm)?;
    let (warm, after_warm) = (tape.take().0, state.try_clone(bench.model.device())?);
    bench.decode(&tape, &mut state, timed)?;
    let requests = tape.take().0;
    let trace = trace(geometry, warm.iter().chain(&requests))?;
    for &wanted in &args.hit_rates {
        let slots = slots_for(&trace, args.warm, wanted);
        let mut stores = vec![bench.store(slots)?, bench.store(slots)?];
        for &guesses in &args.guesses {
            stores.push(bench.guessing_store(slots, guesses)?);
        }
        // The same experts are in the slots of all when the clock starts.
        for store in &stores {
            replay(&Timed::new(store, None), &warm)?;
        }
        let future = args.published_guesses.then_some(&*requests);
        let decode = Decode { bench, state: &after_warm, ids: timed, requests: &requests, future };
        let before: Vec<_> = stores.iter().map(ExpertStore::counters).collect();
        let rounds = decode.rounds(resident, &stores, args.round, Duration::from_millis(args.rest))?;
        writeln!(out, "\ndecode, {slots} slots, {} tokens in {} rounds", timed.len(), rounds.len())?;
        alone(out, &rounds, args.round)?;
        for (i, guesses) in args.guesses.iter().enumerate() {
            let (after, before) = (stores[i + 2].counters(), before[i + 2]);
            let hits = (after.hits - before.hits) as f64 / (after.requested - before.requested) as f64;
            writeln!(
                out,
                "together, {guesses} guesses at once: hit rate {hits:.2}; {} guesses, {} used, {:.2} GB wasted",
                after.guesses - before.guesses,
                after.guesses_used - before.guesses_used,
                (after.bytes_wasted - before.bytes_wasted) as f64 / 1e9
            )?;
            together(out, &rounds, TOGETHER + i, args.round)?;
        }
    }
    Ok(())
}

fn time_prefill(
    args: &Args,
    bench: &Bench,
    geometry: Geometry,
    resident: &SlabStore,
    out: &mut impl Write,
) -> Result<()> {
    let ids = bench.ids(args.prefill);
    let all: Vec<ExpertId> = (0..geometry.experts as ExpertId).collect();
    let dense = bench.model.config().first_k_dense_replace;
    for layer in dense..dense + geometry.layers {
        let (choices, phase) = (Choices::default(), Phase::Prefill);
        for expert in resident.fetch(ExpertRequest { layer, experts: &all, choices, phase }) {
            expert.context("fetching an expert")?;
        }
    }
    // Weights come into the page cache.
    bench.decode(&Timed::new(resident, None), &mut bench.model.new_state()?, &ids[..1])?;
    let mut rounds = Vec::new();
    let mut requests = Vec::new();
    for turn in 0..args.repeat {
        let mut round = Round { parts: vec![Vec::new(); TOGETHER + 1] };
        // What is read alone needs a pass to have asked for it.
        let mut parts = [ARITHMETIC, TOGETHER, IO];
        let places = parts.len();
        parts.rotate_left(turn % places);
        for part in parts {
            round.parts[part] = if part == IO {
                replay(&Timed::new(&bench.store(geometry.per_token)?, None), &requests)?
            } else {
                let fresh = if part == TOGETHER { Some(bench.store(geometry.per_token)?) } else { None };
                let timed = Timed::new(fresh.as_ref().unwrap_or(resident), None);
                bench.pass(&timed, &mut bench.model.new_state()?, &ids)?;
                let (asked, visits) = timed.take();
                requests = asked;
                visits
            };
        }
        rounds.push(round);
    }
    writeln!(out, "\nprefill of {} tokens, {} rounds", args.prefill, rounds.len())?;
    alone(out, &rounds, 1)?;
    together(out, &rounds, TOGETHER, 1)?;
    Ok(())
}

/// What is decoded in rounds: each part takes some tokens before the next part does, so that a drive or a machine that
/// changes its pace changes that of all parts alike.
struct Decode<'a> {
    bench: &'a Bench,
    state: &'a SequenceState<Cpu>,
    ids: &'a [u32],
    requests: &'a [Asked],
    /// The requests, where guesses are to come true as published.
    future: Option<&'a [Asked]>,
}

impl Decode<'_> {
    /// `stores`: the first two for I/O alone and beside arithmetic, the others for both together.
    fn rounds(
        &self,
        resident: &SlabStore,
        stores: &[SlabStore],
        tokens: usize,
        rest: Duration,
    ) -> Result<Vec<Round>> {
        let mut timed: Vec<_> = [&stores[0], resident, &stores[1], resident]
            .into_iter()
            .map(|store| Timed::new(store, None))
            .collect();
        timed.extend(stores[2..].iter().map(|store| Timed::new(store, self.future)));
        let copy = || self.state.try_clone(self.bench.model.device());
        let mut states = timed.iter().map(|_| copy()).collect::<Result<Vec<_>, _>>()?;
        let mut rounds = Vec::new();
        let a_token = self.requests.len() / self.ids.len();
        let requests = self.requests.chunks(tokens * a_token);
        for (turn, (ids, requests)) in self.ids.chunks(tokens).zip(requests).enumerate() {
            let mut round = Round { parts: vec![Vec::new(); timed.len()] };
            let mut decode = |part: usize| {
                self.bench.decode(&timed[part], &mut states[part], ids)?;
                anyhow::Ok(timed[part].take().1)
            };
            let parts: Vec<usize> = (0..timed.len()).filter(|part| *part != ARITHMETIC_BESIDE).collect();
            for part in (0..parts.len()).map(|i| parts[(i + turn) % parts.len()]) {
                thread::sleep(rest);
                match part {
                    IO => round.parts[IO] = replay(&timed[IO], requests)?,
                    IO_BESIDE => thread::scope(|scope| {
                        let io = scope.spawn(|| replay(&timed[IO_BESIDE], requests));
                        round.parts[ARITHMETIC_BESIDE] = decode(ARITHMETIC_BESIDE)?;
                        let io = io.join().map_err(|_| anyhow!("the thread that reads panicked"))?;
                        round.parts[IO_BESIDE] = io?;
                        anyhow::Ok(())
                    })?,
                    part => round.parts[part] = decode(part)?,
                }
            }
            rounds.push(round);
        }
        Ok(rounds)
    }
}

impl Bench {
    /// A store with `slots` slots for experts that stay, and its usual room for those on their way.
    fn store(&self, slots: usize) -> Result<SlabStore> {
        self.guessing_store(slots, SlabOptions::default().guesses)
    }

    fn guessing_store(&self, slots: usize, guesses: usize) -> Result<SlabStore> {
        let options = |budget_bytes| SlabOptions {
            budget_bytes,
            reads_in_flight: self.reads_in_flight,
            guesses,
            ..SlabOptions::default()
        };
        let probe = SlabStore::new(self.checkpoint.clone(), &self.reader, options(u64::MAX))?;
        // Half of the buffers are slots at least.
        let buffers = (slots..=2 * slots).find(|&buffers| {
            let budget = buffers as u64 * probe.slot_bytes() as u64;
            SlabStore::new(self.checkpoint.clone(), &self.reader, options(budget))
                .is_ok_and(|s| s.slots() >= slots)
        });
        let buffers = buffers.context("no budget gives so many slots")?;
        Ok(SlabStore::new(
            self.checkpoint.clone(),
            &self.reader,
            options(buffers as u64 * probe.slot_bytes() as u64),
        )?)
    }

    /// Some ids that have nothing to do with each other.
    fn ids(&self, n: usize) -> Vec<u32> {
        let vocab = self.model.config().vocab_size as u64;
        (0..n as u64).map(|i| ((i * 7919 + 13) % vocab) as u32).collect()
    }

    /// A pass over `ids`.
    fn pass(&self, store: &Timed<'_>, state: &mut SequenceState<Cpu>, ids: &[u32]) -> Result<()> {
        store.begin();
        // Without the head, which is a fiftieth of the released model, and a third of a tree of four layers.
        let span = Span { state, tokens: ids, logits: LogitsWanted::None };
        for result in self.model.forward(&mut [span], store, &mut Silent)? {
            result?;
        }
        store.end();
        Ok(())
    }

    /// A pass for each of `ids`.
    fn decode(&self, store: &Timed<'_>, state: &mut SequenceState<Cpu>, ids: &[u32]) -> Result<()> {
        ids.iter().try_for_each(|id| self.pass(store, state, &[*id]))
    }
}

/// Reads what was asked for, and computes nothing.
fn replay(store: &Timed<'_>, asked: &[Asked]) -> Result<Vec<Visit>> {
    store.begin();
    for Asked { layer, experts, choices, ranks, used, phase } in asked {
        let choices = Choices { ids: choices, ranks: *ranks, used: *used };
        for expert in store.fetch(ExpertRequest { layer: *layer, experts, choices, phase: *phase }) {
            expert.context("fetching an expert")?;
        }
    }
    Ok(store.take().1)
}

fn trace<'a>(geometry: Geometry, asked: impl Iterator<Item = &'a Asked>) -> Result<Trace> {
    let mut asked = asked.peekable();
    let mut trace = Trace::new(geometry, asked.peek().context("no expert was asked for")?.ranks);
    let mut token = Vec::new();
    for (i, asked) in asked.enumerate() {
        token.extend_from_slice(&asked.choices);
        if (i + 1) % geometry.layers == 0 {
            trace.push(&token);
            token.clear();
        }
    }
    Ok(trace)
}

/// Slots with which the policy comes closest to a hit rate; the fewest are those of one layer's choice.
fn slots_for(trace: &Trace, warm: usize, wanted: f64) -> usize {
    let Geometry { layers, experts, per_token } = trace.geometry();
    let distance = |&slots: &usize| {
        let mut policy = PolicyName::default().make(slots, trace.geometry());
        (simulate::replay(trace, &mut *policy, warm).hit_rate() - wanted).abs()
    };
    (per_token..layers * experts)
        .step_by((per_token / 2).max(1))
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
        .unwrap_or(per_token)
}
