//! How much of reading is hidden behind arithmetic, or of arithmetic behind reading.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use k3_experts::policy::PolicyName;
use k3_experts::simulate::replay;
use k3_experts::slab::{Direct, Reader};
use k3_experts::trace::{Geometry, Trace};
use k3_experts::{
    Arrivals, Choices, Completion, Counters, Expert, ExpertId, ExpertRequest, ExpertStore, Phase,
    SlabOptions, SlabStore,
};
use k3_format::{Checkpoint, LoadMode, OpenOptions};
use k3_graph::{Cpu, LogitsWanted, Lookahead, Model, ModelOptions, SequenceState, Silent, Span};

#[derive(Clone, Debug, clap::Args)]
pub(super) struct Args {
    /// A snapshot with experts of the released size
    #[arg(long)]
    model: PathBuf,
    /// Tokens that are decoded and timed, after as many that are not
    #[arg(long, default_value_t = 8)]
    tokens: usize,
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
    /// Times that everything is measured, in turn; the median counts
    #[arg(long, default_value_t = 3)]
    repeat: usize,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum LookaheadName {
    Off,
    #[default]
    Input,
    Shared,
}

/// What a pass asked the store for.
#[derive(Clone)]
struct Asked {
    layer: usize,
    experts: Vec<ExpertId>,
    choices: Vec<ExpertId>,
    ranks: usize,
    used: usize,
    phase: Phase,
}

/// Whether the `rank`-th guess comes true in the released model, as it was published.
const PUBLISHED: [f64; 8] = [0.92, 0.88, 0.84, 0.80, 0.75, 0.69, 0.64, 0.60];

/// A store whose requests are written down, and whose guesses may be made as good as published ones.
struct Taped<'a> {
    store: &'a SlabStore,
    tape: Mutex<Vec<Asked>>,
    /// What will be asked for, if guesses are to come true as often as in the released model.
    future: Option<&'a [Asked]>,
}

impl<'a> Taped<'a> {
    fn new(store: &'a SlabStore, future: Option<&'a [Asked]>) -> Self {
        Self { store, tape: Mutex::default(), future }
    }

    /// As many guesses, of which the published share are what the next request has at that rank.
    fn published(&self, layer: usize, guesses: &[ExpertId], future: &[Asked]) -> Vec<ExpertId> {
        let done = self.tape.lock().unwrap_or_else(PoisonError::into_inner).len();
        let Some(next) = future.get(done).filter(|next| next.layer == layer) else { return Vec::new() };
        let random = |rank: usize| {
            let x = (done as u64 * 31 + rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11) as f64 / (1_u64 << 53) as f64
        };
        let guess = |(rank, guess): (usize, &ExpertId)| {
            let is_true = random(rank) < PUBLISHED.get(rank).copied().unwrap_or(0.5);
            if is_true {
                Some(next.choices[rank])
            } else {
                Some(*guess).filter(|id| !next.experts.contains(id))
            }
        };
        guesses.iter().enumerate().filter_map(guess).collect()
    }

    fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.tape.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ExpertStore for Taped<'_> {
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a> {
        let Choices { ids, ranks, used } = request.choices;
        self.tape.lock().unwrap_or_else(PoisonError::into_inner).push(Asked {
            layer: request.layer,
            experts: request.experts.to_vec(),
            choices: ids.to_vec(),
            ranks,
            used,
            phase: request.phase,
        });
        self.store.fetch(request)
    }
    fn prefetch(&self, layer: usize, experts: &[ExpertId]) {
        match self.future {
            Some(future) => self.store.prefetch(layer, &self.published(layer, experts, future)),
            None => self.store.prefetch(layer, experts),
        }
    }
    fn wants_guesses(&self) -> bool {
        self.store.wants_guesses()
    }
    fn retire(&self, expert: Expert, after: Box<dyn Completion>) {
        self.store.retire(expert, after);
    }
    fn counters(&self) -> Counters {
        self.store.counters()
    }
}

/// The model, and what it takes to make stores of any size.
struct Bench {
    model: Model<Cpu>,
    checkpoint: Arc<Checkpoint>,
    reader: Arc<dyn Reader>,
    reads_in_flight: usize,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    ensure!(args.tokens > 0 && args.repeat > 0, "nothing is to be timed");
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
        let ids = ids(2 * args.tokens);
        let (warm, timed) = ids.split_at(args.tokens);
        // Everything comes into memory, and the choices are written down.
        let taped = Taped::new(&resident, None);
        let mut state = bench.model.new_state()?;
        bench.decode(&taped, &mut state, warm)?;
        let after_warm = state;
        let again = || after_warm.try_clone(bench.model.device());
        let mut state = again()?;
        bench.decode(&taped, &mut state, timed)?;
        let asked = taped.take();
        let trace = trace(geometry, &asked)?;
        for &wanted in &args.hit_rates {
            let slots = slots_for(&trace, args.tokens, wanted);
            let mut runs = Vec::new();
            for _ in 0..args.repeat {
                let arithmetic = bench.decode(&resident, &mut again()?, timed)?;
                let store = bench.store(slots)?;
                bench.decode(&store, &mut bench.model.new_state()?, warm)?;
                let before = store.counters();
                let future = args.published_guesses.then_some(&asked[asked.len() / 2..]);
                let taped = Taped::new(&store, future);
                let wall = bench.decode(&taped, &mut again()?, timed)?;
                let after = store.counters();
                let hit_rate =
                    (after.hits - before.hits) as f64 / (after.requested - before.requested) as f64;
                let guesses = (after.guesses - before.guesses, after.guesses_used - before.guesses_used);
                drop(store);
                let store = bench.store(slots)?;
                replayed(&store, &asked[..asked.len() / 2])?;
                let io = replayed(&store, &asked[asked.len() / 2..])?;
                runs.push((wall / io.max(arithmetic), wall, io, arithmetic, hit_rate, guesses));
            }
            runs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (ratio, wall, io, arithmetic, hit_rate, (guesses, used)) = runs[runs.len() / 2];
            let n = args.tokens as f64;
            writeln!(
                out,
                "decode, {slots} slots, hit rate {hit_rate:.2}: {:.3} s a token; I/O alone {:.3}, arithmetic alone {:.3}; \
                 ratio {ratio:.3} ({:.3} to {:.3}); hidden {:.0} %; {guesses} guesses, {used} used",
                wall / n,
                io / n,
                arithmetic / n,
                runs[0].0,
                runs[runs.len() - 1].0,
                100.0 * (io + arithmetic - wall) / io.min(arithmetic),
            )?;
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
        let mut runs = Vec::new();
        for _ in 0..args.repeat {
            let taped = Taped::new(&resident, None);
            let arithmetic = bench.pass(&taped, &mut bench.model.new_state()?, &ids)?;
            let asked = taped.take();
            let wall = bench.pass(&bench.store(per_token)?, &mut bench.model.new_state()?, &ids)?;
            let io = replayed(&bench.store(per_token)?, &asked)?;
            runs.push((wall / io.max(arithmetic), wall, io, arithmetic));
        }
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (ratio, wall, io, arithmetic) = runs[runs.len() / 2];
        writeln!(
            out,
            "prefill of {} tokens: {wall:.2} s; I/O alone {io:.2}, arithmetic alone {arithmetic:.2}; ratio {ratio:.3} \
             ({:.3} to {:.3}); hidden {:.0} %",
            args.prefill,
            runs[0].0,
            runs[runs.len() - 1].0,
            100.0 * (io + arithmetic - wall) / io.min(arithmetic),
        )?;
    }
    Ok(())
}

impl Bench {
    /// A store with `slots` slots for experts that stay, and its usual room for those on their way.
    fn store(&self, slots: usize) -> Result<SlabStore> {
        let options = |budget_bytes| SlabOptions {
            budget_bytes,
            reads_in_flight: self.reads_in_flight,
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

    /// Seconds of a pass over `ids`.
    fn pass(&self, store: &dyn ExpertStore, state: &mut SequenceState<Cpu>, ids: &[u32]) -> Result<f64> {
        let begin = Instant::now();
        // Without the head, which is a fiftieth of the released model, and a third of a tree of four layers.
        let span = Span { state, tokens: ids, logits: LogitsWanted::None };
        for result in self.model.forward(&mut [span], store, &mut Silent)? {
            result?;
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds of a pass for each of `ids`.
    fn decode(&self, store: &dyn ExpertStore, state: &mut SequenceState<Cpu>, ids: &[u32]) -> Result<f64> {
        ids.iter().map(|id| self.pass(store, state, &[*id])).sum()
    }
}

/// Seconds to read what was asked for, and compute nothing.
fn replayed(store: &SlabStore, asked: &[Asked]) -> Result<f64> {
    let begin = Instant::now();
    for Asked { layer, experts, choices, ranks, used, phase } in asked {
        let choices = Choices { ids: choices, ranks: *ranks, used: *used };
        for expert in store.fetch(ExpertRequest { layer: *layer, experts, choices, phase: *phase }) {
            expert.context("fetching an expert")?;
        }
    }
    Ok(begin.elapsed().as_secs_f64())
}

fn trace(geometry: Geometry, asked: &[Asked]) -> Result<Trace> {
    let ranks = asked.first().context("no expert was asked for")?.ranks;
    let mut trace = Trace::new(geometry, ranks);
    for token in asked.chunks_exact(geometry.layers) {
        trace.push(&token.iter().flat_map(|asked| &asked.choices).copied().collect::<Vec<_>>());
    }
    Ok(trace)
}

/// Slots with which the policy comes closest to a hit rate; the fewest are those of one layer's choice.
fn slots_for(trace: &Trace, warm: usize, wanted: f64) -> usize {
    let Geometry { layers, experts, per_token } = trace.geometry();
    let distance = |&slots: &usize| {
        let mut policy = PolicyName::default().make(slots, trace.geometry());
        (replay(trace, &mut *policy, warm).hit_rate() - wanted).abs()
    };
    (per_token..layers * experts)
        .step_by((per_token / 2).max(1))
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
        .unwrap_or(per_token)
}
