//! `cargo xtask plan`: what a machine would make of a model, before anybody buys one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use k3_experts::memory::Machine;
use k3_experts::plan::{ExpertSizes, MemoryPlan, gigabytes, parse_bytes, parse_rate};
use k3_experts::slab::{
    Buffered, Direct, DriveRate, ProbeOptions, Reader, SlabOptions, drive_count, probe, slot_bytes,
};
use k3_format::names::{Extent, Names};
use k3_format::repack::{DenseFormat, ExpertTarget, Naming, Recipe};
use k3_format::{Checkpoint, ExpertLayout, ModelConfig, OpenOptions, TensorId, Variant};
use k3_graph::{Cpu, Device as _, LogitsWanted};
use k3_runner::EngineOptions;
use k3_runner::memory::{chunk_tokens, expert_sizes, needs};
use serde::Serialize;

use crate::output::say;
use crate::synth::Geometry;

/// Bytes a second that are assumed of memory on a machine that is not at hand.
const MEMORY_RATE: f64 = 40e9;
/// Drives in bytes a second, when nothing is known of the user's: of PCIe 3, 4 and 5, and two and four of the last.
const DISK_RATES: [f64; 5] = [3e9, 7e9, 14e9, 28e9, 56e9];

/// Say what fits into memory and how long a token would take, before anybody buys a disk
///
/// Reads sizes only. With a folder, its drives are measured for about a second; with a geometry, nothing is read. Times are
/// bounds: what reading or memory alone would take, whichever is longer, with no arithmetic in the way.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask plan /models/kimi-k3
  cargo xtask plan --geometry k31 --ram 128GB --disk-rate 14GB --dense int4
  cargo xtask plan --geometry k3 --ram 64GB --json")]
pub struct Args {
    /// A snapshot folder
    #[arg(conflicts_with = "geometry", required_unless_present = "geometry")]
    dir: Option<PathBuf>,
    /// A released model, without its files
    #[arg(long, value_enum)]
    geometry: Option<GeometryName>,
    /// Memory of the machine, as in 128GB or 96GiB [default: what is available on this one]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_hyphen_values = true)]
    ram: Option<u64>,
    /// What its drives give together in a second, as in 7GB [default: measured on the folder; several are told for a
    /// geometry]
    #[arg(long, value_name = "BYTES", value_parser = parse_rate, allow_hyphen_values = true)]
    disk_rate: Option<u64>,
    /// What its memory gives in a second [default: measured here; 40GB with --ram]
    #[arg(long, value_name = "BYTES", value_parser = parse_rate, allow_hyphen_values = true)]
    memory_rate: Option<u64>,
    /// Format of the routed experts
    #[arg(long, value_enum, conflicts_with = "dir", default_value_t = ExpertsName::Mxfp4)]
    experts: ExpertsName,
    /// Format of the large matrices outside the routed experts
    #[arg(long, value_enum, conflicts_with = "dir", default_value_t = DenseName::Bf16)]
    dense: DenseName,
    /// Tokens of the sequence
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    context: u64,
    /// Tokens of a prompt that are computed together [default: as many as 2 GiB of activations are enough for]
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    chunk: Option<usize>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GeometryName {
    /// Kimi K3
    K3,
    /// Kimi K3.1 Pro
    K31,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExpertsName {
    /// As published
    Mxfp4,
    /// As `cargo xtask repack` makes them
    Nvfp4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DenseName {
    /// As published
    Bf16,
    /// 4.5 bits a weight
    Nvfp4,
    /// 8 bits a weight
    Int8,
    /// 4.25 bits a weight
    Int4,
}

/// Tokens of the prompt that is told of.
const PROMPT: usize = 2048;

/// A figure, and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Rate {
    bytes_per_second: f64,
    source: &'static str,
}

/// The sizes of a model.
#[derive(Clone, Debug)]
struct Model {
    name: String,
    config: ModelConfig,
    pinned: u64,
    /// Of the pinned bytes, those that every token reads: all but the embedding, of which it reads a row.
    read_by_token: u64,
    sizes: ExpertSizes,
    /// Bytes of an expert, without what alignment adds.
    expert_bytes: u64,
}

/// What is told.
#[derive(Clone, Debug, Serialize)]
struct Report {
    model: String,
    context: u64,
    room: u64,
    bound_by: String,
    pinned: u64,
    state: u64,
    activations: u64,
    reserve: u64,
    expert_budget: u64,
    missing: u64,
    slots: u64,
    slots_per_layer: f64,
    working_sets: f64,
    /// `null`: not known of such a model.
    expected_hit_rate: Option<f64>,
    expert_bytes_of_a_token: u64,
    /// Other weights that a token reads.
    other_bytes_of_a_token: u64,
    memory: Rate,
    /// None of what does not fit.
    times: Vec<Times>,
    notes: Vec<String>,
}

/// At one rate of the drives.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Times {
    disk: Rate,
    /// Read for a token that follows others.
    bytes_per_token: f64,
    seconds_per_token: f64,
    /// Reading takes longer than memory.
    bound_by_disk: bool,
    /// Read for a prompt of [`PROMPT`] tokens, each expert at most once.
    prompt_bytes: f64,
    prompt_seconds: f64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let (model, disk) = match (&args.dir, args.geometry) {
        (Some(dir), _) => {
            let checkpoint = Arc::new(Checkpoint::open(dir, &OpenOptions::default())?);
            let disk = if args.disk_rate.is_none() { Some(measure_disk(&checkpoint)?) } else { None };
            (of_checkpoint(&checkpoint)?, disk)
        }
        (None, Some(name)) => (of_geometry(name, args.experts, args.dense)?, None),
        (None, None) => bail!("a snapshot folder or --geometry is needed"),
    };
    let disks = match (args.disk_rate, disk) {
        (Some(rate), _) => vec![Rate { bytes_per_second: rate as f64, source: "given" }],
        (None, Some(rate)) => vec![Rate { bytes_per_second: rate, source: "measured" }],
        (None, None) => {
            DISK_RATES.map(|bytes_per_second| Rate { bytes_per_second, source: "assumed" }).into()
        }
    };
    let memory = match (args.memory_rate, args.ram) {
        (Some(rate), _) => Rate { bytes_per_second: rate as f64, source: "given" },
        (None, Some(_)) => Rate { bytes_per_second: MEMORY_RATE, source: "assumed" },
        (None, None) => Rate { bytes_per_second: measure_memory()?, source: "measured" },
    };
    ensure!(
        disks.iter().chain([&memory]).all(|rate| rate.bytes_per_second > 0.0),
        "a rate of 0 bytes a second would take for ever"
    );
    let machine = match args.ram {
        Some(ram) => Machine::with(ram),
        None => Machine::read().context("finding out what memory this machine has; name it with --ram")?,
    };
    let plan = plan(&model, &machine, args.context, args.chunk)?;
    let mut report = report(&model, &plan, args.context, memory, disks);
    if plan.missing == 0 {
        report.notes.extend(of_chunks(chunk(&model, args.chunk)));
    }
    if args.json {
        say(format_args!("{}", serde_json::to_string_pretty(&report)?))
    } else {
        tell(&report, &plan)
    }
}

/// What is told, as a function of sizes and rates.
fn report(model: &Model, plan: &MemoryPlan, context: u64, memory: Rate, disks: Vec<Rate>) -> Report {
    let geometry = model.sizes.geometry;
    let of_token = geometry.working_set() as f64 * model.expert_bytes as f64;
    let all = (geometry.layers * geometry.experts) as f64 * model.expert_bytes as f64;
    let hits = plan.expected_hit_rate();
    // What does not fit takes no time that could be told.
    let disks = if plan.missing > 0 { Vec::new() } else { disks };
    // Without a known rate, as if nothing stayed.
    let misses = 1.0 - hits.unwrap_or(0.0);
    let in_slots = plan.slots() as f64 * model.expert_bytes as f64;
    let times = disks.into_iter().map(|disk| {
        let rate = disk.bytes_per_second;
        let bytes_per_token = misses * of_token;
        let reading = bytes_per_token / rate;
        let in_memory = (model.read_by_token as f64 + of_token) / memory.bytes_per_second;
        // A long prompt uses every expert; what lies in slots is not read again.
        let prompt_bytes = (all - in_slots).max(0.0);
        let prompt_in_memory = (model.read_by_token as f64 + all) / memory.bytes_per_second;
        Times {
            bytes_per_token,
            seconds_per_token: reading.max(in_memory),
            bound_by_disk: reading > in_memory,
            prompt_bytes,
            prompt_seconds: (prompt_bytes / rate).max(prompt_in_memory),
            disk,
        }
    });
    let times = times.collect();
    let mut notes = Vec::new();
    if plan.missing == 0 {
        notes.push(
            "times are bounds, of reading or of memory: arithmetic, and what does not overlap, come on top"
                .to_owned(),
        );
    }
    if hits.is_none() {
        notes.push(
            "hit rates are known of layers of 896 experts with 16 a token only: taken as 0 here".into(),
        );
    } else if hits != Some(1.0) && plan.missing == 0 {
        notes
            .push("the hit rate is that of generated routing of varied text (docs/expert-store.md 3)".into());
    }
    if plan.missing > 0 {
        notes.push(format!(
            "this does not fit: {} of memory are missing for the least that can run, which has {} of experts, one layer's \
             of a token; pinned weights of fewer bits need less (int4), and so do a shorter --context and a smaller --chunk",
            gigabytes(plan.missing),
            gigabytes(model.sizes.least())
        ));
    }
    Report {
        model: model.name.clone(),
        context: context.min(model.config.max_position_embeddings as u64),
        room: plan.room,
        bound_by: plan.bound_by.to_string(),
        pinned: plan.needs.pinned,
        state: plan.needs.state,
        activations: plan.needs.activations,
        reserve: plan.reserve,
        expert_budget: plan.experts,
        missing: plan.missing,
        slots: plan.slots(),
        slots_per_layer: plan.slots_per_layer(),
        working_sets: plan.working_sets(),
        expected_hit_rate: hits,
        expert_bytes_of_a_token: of_token as u64,
        other_bytes_of_a_token: model.read_by_token,
        memory,
        times,
        notes,
    }
}

/// Tokens of a prompt that are computed at once.
fn chunk(model: &Model, asked: Option<usize>) -> usize {
    let mut options = EngineOptions::default();
    options.chunk_tokens = asked;
    chunk_tokens(&model.config, &options, Cpu::VALUE_BYTES, LogitsWanted::Last)
}

/// What to think of the prompt's figures, which are those of one chunk, if it has several.
fn of_chunks(chunk: usize) -> Option<String> {
    let chunks = PROMPT.div_ceil(chunk);
    (chunks > 1).then(|| {
        format!(
            "the prompt's figures are for all of it at once: {chunk} tokens at once are {chunks} chunks, each of which reads \
             the experts that it needs, so it may take {chunks} times as much"
        )
    })
}

fn plan(model: &Model, machine: &Machine, context: u64, chunk: Option<usize>) -> Result<MemoryPlan> {
    let context = context.min(model.config.max_position_embeddings as u64);
    let chunk = self::chunk(model, chunk);
    // As many threads as this machine would have.
    let needs = needs(&model.config, model.pinned, 1, context, chunk, &Cpu::new(0)?);
    Ok(MemoryPlan::new(machine, needs, model.sizes, None))
}

fn tell(report: &Report, plan: &MemoryPlan) -> Result<()> {
    say(format_args!("{}, one sequence of {} tokens", report.model, report.context))?;
    say(format_args!("{}", plan.to_string().trim_end()))?;
    say(format_args!(
        "\na token uses {} of experts and {} of other weights; memory gives {}/s ({})",
        gigabytes(report.expert_bytes_of_a_token),
        gigabytes(report.other_bytes_of_a_token),
        gigabytes(report.memory.bytes_per_second as u64),
        report.memory.source
    ))?;
    if !report.times.is_empty() {
        let reads = "reads";
        say(format_args!(
            "\n{:<24}{:<32}{}\n{:<24}{reads:>10}{:>10}  {:<10}{reads:>10}{:>10}",
            "drives", "      a token", "      a prompt of 2,048 tokens", "", "takes", "bound by", "takes"
        ))?;
    }
    for times in &report.times {
        say(format_args!(
            "{:<24}{:>10} {:>9}  {:<10}{:>10} {:>9}",
            format!("{}/s {}", gigabytes(times.disk.bytes_per_second as u64), times.disk.source),
            gigabytes(times.bytes_per_token as u64),
            seconds(times.seconds_per_token),
            if times.bound_by_disk { "drives" } else { "memory" },
            gigabytes(times.prompt_bytes as u64),
            seconds(times.prompt_seconds),
        ))?;
    }
    say(format_args!(""))?;
    report.notes.iter().try_for_each(|note| say(format_args!("{note}")))
}

/// With three digits or so.
fn seconds(seconds: f64) -> String {
    match seconds {
        ..0.1 => format!("{:.2} ms", seconds * 1e3),
        0.1..100.0 => format!("{seconds:.2} s"),
        _ => format!("{seconds:.0} s"),
    }
}

fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Model> {
    let config = checkpoint.config().clone();
    let embedding = checkpoint.tensor(TensorId::model(k3_format::Role::EmbedTokens));
    let pinned = checkpoint.resident_bytes();
    Ok(Model {
        name: format!("{} in {}", checkpoint.variant(), checkpoint.dir().display()),
        pinned,
        read_by_token: pinned - embedding.map_or(0, |tensor| tensor.byte_len()),
        sizes: expert_sizes(
            &config,
            slot_bytes(checkpoint, Direct::ALIGN),
            SlabOptions::default().moving(drive_count(checkpoint)?),
        ),
        expert_bytes: checkpoint.experts().layout().len as u64,
        config,
    })
}

fn of_geometry(name: GeometryName, experts: ExpertsName, dense: DenseName) -> Result<Model> {
    let variant = match name {
        GeometryName::K3 => Variant::K3,
        GeometryName::K31 => Variant::K31,
    };
    let config = Geometry::released(variant).model;
    let target = match experts {
        ExpertsName::Mxfp4 => ExpertTarget::Mxfp4,
        ExpertsName::Nvfp4 => ExpertTarget::Nvfp4,
    };
    let dense = match dense {
        DenseName::Bf16 => DenseFormat::Bf16,
        DenseName::Nvfp4 => DenseFormat::Nvfp4,
        DenseName::Int8 => DenseFormat::Int8,
        DenseName::Int4 => DenseFormat::Int4,
    };
    let (pinned, embedding) = pinned(&config, dense)?;
    let layout = ExpertLayout::new(&config, Recipe::default().experts(target).expert_format());
    // What reads past the page cache add: a block at the beginning, and up to 64 KiB.
    let slot = (layout.len as u64 + 4095).next_multiple_of(64 << 10);
    Ok(Model {
        name: format!("{variant}, experts {target}, other weights {dense}"),
        pinned,
        read_by_token: pinned - embedding,
        sizes: expert_sizes(&config, slot, SlabOptions::default().moving(1)),
        expert_bytes: layout.len as u64,
        config,
    })
}

/// Bytes of all tensors outside the routed experts, and of the embedding.
fn pinned(config: &ModelConfig, dense: DenseFormat) -> Result<(u64, u64)> {
    let (mut all, mut embedding) = (0, 0);
    for (id, entry) in Names::tensors(config) {
        let extent = entry.extent(config);
        let quantized = match (extent, dense.linear(Naming::default())) {
            (Extent::Matrix(rows, cols), Some(format)) if id.role.is_quantized_on_request() => {
                let block = dense.weight_format().map_or(1, k3_quant::WeightFormat::column_block);
                (cols % block == 0).then(|| format.tensors("", rows, cols))
            }
            _ => None,
        };
        let bytes = match quantized {
            Some(parts) => parts.iter().map(k3_format::TensorSpec::byte_len).sum::<Result<u64, _>>()?,
            None => extent.elements() as u64 * entry.release.bitsize() as u64 / 8,
        };
        all += bytes;
        if id.role == k3_format::Role::EmbedTokens {
            embedding = bytes;
        }
    }
    Ok((all, embedding))
}

/// What the drives of a checkpoint give together, past the page cache if they can.
fn measure_disk(checkpoint: &Arc<Checkpoint>) -> Result<f64> {
    let reader: Box<dyn Reader> = match Direct::new(checkpoint.clone()) {
        Ok(direct) => Box::new(direct),
        Err(_) => Box::new(Buffered::new(checkpoint.clone())?),
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let options = ProbeOptions {
        reads_in_flight: SlabOptions::default().reads_in_flight,
        time: std::time::Duration::from_secs(1),
        seed: now.map_or(0, |now| now.as_nanos() as u64),
        ..ProbeOptions::default()
    };
    let rates = probe(checkpoint, &*reader, options).context("measuring how fast experts are read")?;
    Ok(rates.iter().map(DriveRate::rate).sum())
}

/// Bytes a second that all cores read together, the best of a few passes.
fn measure_memory() -> Result<f64> {
    /// Larger than caches, for each thread.
    const BYTES: usize = 128 << 20;
    const PASSES: usize = 4;
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(threads * BYTES).context("no memory to measure memory with")?;
    bytes.resize(threads * BYTES, 1_u8);
    let mut best = 0.0_f64;
    for _ in 0..PASSES {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for part in bytes.chunks(BYTES) {
                scope.spawn(move || std::hint::black_box(k3_quant::cpu::probe::read(part, None)));
            }
        });
        best = best.max((threads * BYTES) as f64 / begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn released(experts: ExpertsName, dense: DenseName) -> Model {
        of_geometry(GeometryName::K31, experts, dense).unwrap()
    }

    fn rate(bytes_per_second: f64) -> Rate {
        Rate { bytes_per_second, source: "given" }
    }

    /// `docs/repack.md`: what is kept in memory in each format.
    #[test]
    fn pinned_bytes_of_the_released_model() {
        let check = |dense, expected: f64| {
            let model = of_geometry(GeometryName::K3, ExpertsName::Mxfp4, dense).unwrap();
            let found = model.pinned as f64 / 1e9;
            assert!((found - expected).abs() < 0.05, "{dense:?}: {found}");
        };
        check(DenseName::Bf16, 113.5);
        check(DenseName::Nvfp4, 36.9);
        check(DenseName::Int8, 60.3);
        check(DenseName::Int4, 35.3);
    }

    #[test]
    fn bytes_of_experts() {
        let check = |experts, expected| {
            assert_eq!(released(experts, DenseName::Bf16).expert_bytes, expected, "{experts:?}");
        };
        check(ExpertsName::Mxfp4, 17_547_264);
        check(ExpertsName::Nvfp4, 18_579_456);
    }

    /// 35.3 GB of weights in 128 GB leave three working sets, of which the curve says what is found.
    #[test]
    fn times_are_the_slower_of_reading_and_memory() {
        let model = released(ExpertsName::Mxfp4, DenseName::Int4);
        let at = |ram: u64, disk: f64| {
            let machine = Machine::with(ram * GB);
            let plan = plan(&model, &machine, 8192, Some(512)).unwrap();
            report(&model, &plan, 8192, rate(50e9), vec![rate(disk)])
        };
        let slow = at(128, 7e9);
        let hits = slow.expected_hit_rate.unwrap();
        assert!((0.55..0.62).contains(&hits), "{hits}");
        let times = &slow.times[0];
        let token = 1472.0 * 17_547_264.0;
        assert!((times.bytes_per_token - (1.0 - hits) * token).abs() < 1.0);
        assert!(times.bound_by_disk && (times.seconds_per_token - times.bytes_per_token / 7e9).abs() < 1e-9);
        let all = 82_432.0 * 17_547_264.0;
        assert!((times.prompt_bytes - (all - slow.slots as f64 * 17_547_264.0)).abs() < 1.0);
        assert!((times.prompt_seconds - times.prompt_bytes / 7e9).abs() < 1e-6);
        // A drive that is faster than memory.
        let fast = at(128, 1e12);
        let bytes = model.read_by_token as f64 + token;
        assert!(!fast.times[0].bound_by_disk);
        assert!((fast.times[0].seconds_per_token - bytes / 50e9).abs() < 1e-9);
        assert!(fast.notes.iter().all(|note| !note.contains("does not fit")));
        // More memory is never slower.
        let seconds: Vec<f64> =
            [64, 96, 128, 192, 512, 1024, 2048].map(|ram| at(ram, 7e9).times[0].seconds_per_token).into();
        assert!(seconds.is_sorted_by(|a, b| a >= b), "{seconds:?}");
        assert_eq!(at(2048, 7e9).expected_hit_rate, Some(1.0));
        assert_eq!(at(2048, 7e9).times[0].prompt_bytes, 0.0);
    }

    #[test]
    fn seconds_have_a_unit() {
        let check = |value: f64, expected: &str| assert_eq!(seconds(value), expected);
        check(0.0, "0.00 ms");
        check(0.004_56, "4.56 ms");
        check(0.1, "0.10 s");
        check(3.714, "3.71 s");
        check(454.4, "454 s");
    }

    #[test]
    fn chunks_of_a_prompt_are_told() {
        let model = released(ExpertsName::Mxfp4, DenseName::Bf16);
        assert_eq!(of_chunks(chunk(&model, None)), None);
        assert_eq!(of_chunks(chunk(&model, Some(PROMPT))), None);
        let note = of_chunks(chunk(&model, Some(PROMPT - 1))).unwrap();
        assert!(note.contains("2047 tokens at once are 2 chunks"), "{note}");
    }

    #[test]
    fn a_machine_that_is_too_small_is_told_what_is_missing() {
        let model = released(ExpertsName::Mxfp4, DenseName::Bf16);
        let plan = plan(&model, &Machine::with(64 * GB), 8192, Some(512)).unwrap();
        let found = report(&model, &plan, 8192, rate(40e9), vec![rate(7e9)]);
        assert!(found.missing > 50 * GB, "{}", found.missing);
        assert!(found.notes.iter().any(|note| note.contains("does not fit: 5")), "{:?}", found.notes);
        assert_eq!(found.expert_budget, model.sizes.least());
        assert_eq!(found.times, []);
    }
}
