//! How much of reading is hidden behind arithmetic, or of arithmetic behind reading.

mod timed;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use k3_experts::policy::PolicyName;
use k3_experts::simulate;
use k3_experts::slab::{Direct, Reader};
use k3_experts::trace::{Geometry, Trace};
use k3_experts::{Choices, ExpertId, ExpertRequest, ExpertStore, Phase, SlabOptions, SlabStore};
use k3_format::{Checkpoint, LoadMode, OpenOptions};
use k3_graph::{Cpu, LogitsWanted, Lookahead, Model, ModelOptions, SequenceState, Silent, Span};

use timed::{Asked, Timed, Visit};

#[derive(Clone, Debug, clap::Args)]
pub(super) struct Args {
    /// A snapshot with experts of the released size
    #[arg(long)]
    model: PathBuf,
    /// Tokens that are decoded and timed
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// Of these, tokens that each part takes before the next part does
    #[arg(long, default_value_t = 2)]
    round: usize,
    /// Tokens before them, whose experts fill the slots
    #[arg(long, default_value_t = 8)]
    warm: usize,
    /// Hit rates at which decode is timed; each sets a budget. Without a value decode is not timed
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "0,0.35,0.6")]
    hit_rates: Vec<f64>,
    /// Tokens of a prompt that is timed as well; 0: none
    #[arg(long, default_value_t = 0)]
    prefill: usize,
    /// Threads that compute; 0 takes one a core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Reads in flight on a drive
    #[arg(long, default_value_t = 6)]
    reads_in_flight: usize,
    /// What the next layer's router is given early
    #[arg(long, value_enum, default_value_t)]
    lookahead: LookaheadName,
    /// Let guesses come true as often as those published of the released model (92 % at rank 1, 60 % at rank 8). The
    /// routers of a synthetic tree are random, and their guesses worth nothing
    #[arg(long)]
    published_guesses: bool,
    /// Experts read on a guess that may be in memory at once; without a value as usual
    #[arg(long)]
    guesses: Option<usize>,
    /// Times that the prompt is measured; the median counts
    #[arg(long, default_value_t = 1)]
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
    guesses: Option<usize>,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    ensure!(args.tokens > 0 && args.round > 0 && args.repeat > 0, "nothing is to be timed");
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
        reader: Arc::new(Direct::new(checkpoint.clone())?),
        reads_in_flight: args.reads_in_flight,
        guesses: args.guesses,
        checkpoint,
    };
    let Geometry { layers, experts, per_token } = geometry;
    writeln!(
        out,
        "{layers} layers of {experts} experts, {per_token} a token; {threads} threads, {} reads in flight, lookahead {:?}",
        args.reads_in_flight, args.lookahead
    )?;
    let resident = bench.store(layers * experts)?;
    let vocab = bench.model.config().vocab_size as u64;
    let ids =
        |n: usize| -> Vec<u32> { (0..n as u64).map(|i| (i * 7919 + 13) as u32 % vocab as u32).collect() };
    if !args.hit_rates.is_empty() {
        // Everything comes into memory, and the choices are written down.
        let ids = ids(args.warm + args.tokens);
        let (warm, timed) = ids.split_at(args.warm);
        let tape = Timed::new(&resident, None);
        let mut state = bench.model.new_state()?;
        bench.decode(&tape, &mut state, warm)?;
        let (warm, after_warm) = (tape.take().0, state.try_clone(bench.model.device())?);
        bench.decode(&tape, &mut state, timed)?;
        let requests = tape.take().0;
        let trace = trace(geometry, warm.iter().chain(&requests))?;
        for &wanted in &args.hit_rates {
            let slots = slots_for(&trace, args.warm, wanted);
            let stores = [bench.store(slots)?, bench.store(slots)?];
            // The same experts are in the slots of both when the clock starts.
            for store in &stores {
                replay(&Timed::new(store, None), &warm)?;
            }
            let decode = Decode { bench: &bench, state: &after_warm, ids: timed, requests: &requests };
            let future = args.published_guesses.then_some(&*requests);
            let before = stores[1].counters();
            let rounds = decode.rounds(&resident, &stores, future, args.round)?;
            let after = stores[1].counters();
            let hit_rate = (after.hits - before.hits) as f64 / (after.requested - before.requested) as f64;
            writeln!(
                out,
                "\ndecode, {slots} slots, {} tokens in {} rounds, hit rate {hit_rate:.2}; {} guesses, {} used, {:.2} GB wasted",
                timed.len(),
                rounds.len(),
                after.guesses - before.guesses,
                after.guesses_used - before.guesses_used,
                (after.bytes_wasted - before.bytes_wasted) as f64 / 1e9
            )?;
            report(&mut out, &rounds, args.round)?;
        }
    }
    if args.prefill > 0 {
        let ids = ids(args.prefill);
        let all: Vec<ExpertId> = (0..experts as ExpertId).collect();
        let dense = bench.model.config().first_k_dense_replace;
        for layer in dense..dense + layers {
            let (choices, phase) = (Choices::default(), Phase::Prefill);
            for expert in resident.fetch(ExpertRequest { layer, experts: &all, choices, phase }) {
                expert.context("fetching an expert")?;
            }
        }
        // Weights come into the page cache.
        bench.decode(&Timed::new(&resident, None), &mut bench.model.new_state()?, &ids[..1])?;
        let mut rounds = Vec::new();
        let mut requests = Vec::new();
        for turn in 0..args.repeat {
            let mut round = Round::default();
            // What is read alone needs a pass to have asked for it.
            for part in [1, 2, 0].map(|part| if turn == 0 { part } else { (part + turn) % 3 }) {
                round.parts[part] = match part {
                    0 => replay(&Timed::new(&bench.store(per_token)?, None), &requests)?,
                    part => {
                        let fresh = if part == 2 { Some(bench.store(per_token)?) } else { None };
                        let timed = Timed::new(fresh.as_ref().unwrap_or(&resident), None);
                        bench.pass(&timed, &mut bench.model.new_state()?, &ids)?;
                        let (asked, visits) = timed.take();
                        requests = asked;
                        visits
                    }
                };
            }
            rounds.push(round);
        }
        writeln!(out, "\nprefill of {} tokens, {} rounds", args.prefill, rounds.len())?;
        report(&mut out, &rounds, 1)?;
    }
    Ok(())
}

/// What is decoded in rounds: each part takes some tokens before the next part does, so that a drive or a machine that
/// changes its pace changes that of all parts alike.
struct Decode<'a> {
    bench: &'a Bench,
    state: &'a SequenceState<Cpu>,
    ids: &'a [u32],
    requests: &'a [Asked],
}

/// The visits of each part: I/O alone, arithmetic alone, together.
#[derive(Default)]
struct Round {
    parts: [Vec<Visit>; 3],
}

impl Decode<'_> {
    fn rounds(
        &self,
        resident: &SlabStore,
        [alone, together]: &[SlabStore; 2],
        future: Option<&[Asked]>,
        tokens: usize,
    ) -> Result<Vec<Round>> {
        let timed = [Timed::new(alone, None), Timed::new(resident, None), Timed::new(together, future)];
        let copy = || self.state.try_clone(self.bench.model.device());
        let mut states = [copy()?, copy()?];
        let mut rounds = Vec::new();
        let a_token = self.requests.len() / self.ids.len();
        for (turn, (ids, requests)) in
            self.ids.chunks(tokens).zip(self.requests.chunks(tokens * a_token)).enumerate()
        {
            let mut round = Round::default();
            for part in [0, 1, 2].map(|part| (part + turn) % 3) {
                round.parts[part] = if part == 0 {
                    replay(&timed[0], requests)?
                } else {
                    self.bench.decode(&timed[part], &mut states[part - 1], ids)?;
                    timed[part].take().1
                };
            }
            rounds.push(round);
        }
        Ok(rounds)
    }
}

impl Round {
    fn seconds(&self, part: usize) -> f64 {
        self.parts[part].iter().map(|visit| visit.outside + visit.fetch()).sum()
    }

    /// What the two parts need that can go on at the same time in a pass that knows a layer's experts from the layer's
    /// own router only: the reads of a layer, and its arithmetic from the router on.
    fn by_layers(&self) -> f64 {
        let [io, arithmetic, _] = &self.parts;
        // A pass has one visit without a fetch at its end, and its replay has none.
        let mut io = io.iter();
        let both = arithmetic.iter().map(|visit| {
            let fetch = if visit.fetch() > 0.0 { io.next().map_or(0.0, Visit::fetch) } else { 0.0 };
            visit.outside + fetch.max(visit.inside)
        });
        both.sum()
    }
}

/// A number of each round: the median, the least and the greatest.
fn spread(rounds: &[Round], of: impl Fn(&Round) -> f64) -> [f64; 3] {
    let mut all: Vec<f64> = rounds.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    [all[all.len() / 2], all[0], all[all.len() - 1]]
}

fn report(out: &mut impl std::io::Write, rounds: &[Round], tokens: usize) -> Result<()> {
    let n = tokens as f64;
    let mut seconds = |name: &str, of: &dyn Fn(&Round) -> f64| -> Result<()> {
        let [median, least, most] = spread(rounds, of);
        Ok(writeln!(out, "  {name:<38} {:7.3} s  ({:.3} to {:.3})", median / n, least / n, most / n)?)
    };
    seconds("together", &|r| r.seconds(2))?;
    seconds("I/O alone", &|r| r.seconds(0))?;
    seconds("arithmetic alone", &|r| r.seconds(1))?;
    seconds("bound without guesses, layer by layer", &Round::by_layers)?;
    let greater = |r: &Round| r.seconds(0).max(r.seconds(1));
    let all = |of: &dyn Fn(&Round) -> f64| rounds.iter().map(of).sum::<f64>();
    let greater_of_all = all(&|r| r.seconds(0)).max(all(&|r| r.seconds(1)));
    let mut ratio = |name: &str, of: &dyn Fn(&Round) -> f64, of_all: f64| -> Result<()> {
        let [median, least, most] = spread(rounds, |r| r.seconds(2) / of(r));
        Ok(writeln!(
            out,
            "  {name:<38} {median:7.3}    ({least:.3} to {most:.3}); of all rounds {of_all:.3}"
        )?)
    };
    let wall = all(&|r| r.seconds(2));
    ratio("together / the greater alone", &greater, wall / greater_of_all)?;
    ratio("together / bound layer by layer", &Round::by_layers, wall / all(&Round::by_layers))?;
    let mean = |part: usize| {
        let mut sum = Visit::default();
        rounds.iter().flat_map(|round| &round.parts[part]).for_each(|visit| sum.add(visit));
        move |of: fn(&Visit) -> f64| of(&sum) / n / rounds.len() as f64
    };
    let (alone, together) = (mean(1), mean(2));
    writeln!(
        out,
        "  on average, together (alone): outside fetches {:.3} ({:.3}) s, in them {:.3} ({:.3}), of it behind the last \
         expert {:.3}; waiting for the first read of a layer {:.3}, for others {:.3}; drive idle outside fetches {:.3}, \
         in them {:.3}",
        together(|v| v.outside),
        alone(|v| v.outside),
        together(|v| v.inside),
        alone(|v| v.inside),
        together(|v| v.tail),
        together(|v| v.first_wait),
        together(|v| v.later_wait),
        together(|v| v.idle_outside),
        together(|v| v.idle_inside),
    )?;
    Ok(())
}

impl Bench {
    /// A store with `slots` slots for experts that stay, and its usual room for those on their way.
    fn store(&self, slots: usize) -> Result<SlabStore> {
        let usual = SlabOptions::default();
        let options = |budget_bytes| SlabOptions {
            budget_bytes,
            reads_in_flight: self.reads_in_flight,
            guesses: self.guesses.unwrap_or(usual.guesses),
            ..usual
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
