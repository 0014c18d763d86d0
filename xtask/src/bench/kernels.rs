//! Products with weight matrices that no cache holds, beside what the memory and the multipliers of this machine can do.

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_quant::cpu::{Activations, InstructionSet, Mode, matmul_rows_with, probe};
use k3_quant::encode::{Encoder, largest_magnitude};
use k3_quant::{Bytes, GlobalScale, Matrix, ScaleFactor, Scales, WeightFormat, bf16};
use memmap2::MmapMut;
use rayon::prelude::*;
use serde::Serialize;

/// Options of `bench kernels`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// Ask for no huge pages
    #[arg(long)]
    small_pages: bool,
    /// Threads of the second column; 0 takes one a core
    #[arg(long, default_value_t = 0, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(0..=1024))]
    threads: usize,
}

/// Bytes of weights that a measurement goes through: matrices of the released shapes, one after the other.
const BYTES: usize = 5 << 28;
/// Each time is the best of this many.
const TRIES: usize = 3;
/// Weight rows of a task, as the engine has them.
const TASK_ROWS: usize = 32;
/// Bytes of a task that only reads.
const TASK_BYTES: usize = 1 << 18;
/// Distances of prefetches; the best is the limit.
const AHEAD: [usize; 3] = [512, 1024, 4096];
/// Operations of a measurement of many rows, roughly.
const OPERATIONS: f64 = 1e10;
/// Rounds of the measurement of multiply-adds.
const ROUNDS: usize = 10_000_000;

/// What the machine can do with a number of threads.
#[derive(Debug, Serialize)]
struct Limit {
    threads: usize,
    /// Bytes a second of a plain read.
    read: f64,
    /// The same with prefetches.
    prefetched_read: f64,
    /// Floating-point operations a second in registers.
    flops: f64,
}

/// One kernel's measurement.
#[derive(Debug, Serialize)]
struct Measured {
    format: String,
    shape: [usize; 2],
    mode: String,
    instructions: String,
    threads: usize,
    /// Rows of activations.
    rows: usize,
    /// Weight bytes that were read.
    bytes: usize,
    seconds: f64,
    bytes_per_second: f64,
    flops: f64,
    of_read: f64,
    of_prefetched_read: f64,
    of_flops: f64,
}

/// One quantizer's measurement.
#[derive(Debug, Serialize)]
struct Encoded {
    format: String,
    instructions: String,
    bf16_bytes_per_second: f64,
    relative_l2: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    working_set: usize,
    huge_pages: bool,
    limits: Vec<Limit>,
    kernels: Vec<Measured>,
    quantizers: Vec<Encoded>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    let bytes = weights(!args.small_pages)?;
    let mut report = Report {
        working_set: bytes.len(),
        huge_pages: !args.small_pages,
        limits: Vec::new(),
        kernels: Vec::new(),
        quantizers: Vec::new(),
    };
    let matrices = [
        Matrices::new(WeightFormat::Bf16, 12288, 7168, &bytes)?,
        Matrices::new(WeightFormat::Mxfp4, 3072, 3584, &bytes)?,
        Matrices::new(WeightFormat::Nvfp4, 3072, 3584, &bytes)?,
        Matrices::new(WeightFormat::Int8, 12288, 7168, &bytes)?,
        Matrices::new(WeightFormat::Int4, 12288, 7168, &bytes)?,
    ];
    let all =
        rayon::ThreadPoolBuilder::new().num_threads(args.threads).build().context("starting threads")?;
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().context("starting a thread")?;
    let pools = if all.current_num_threads() == 1 { vec![one] } else { vec![one, all] };
    for pool in &pools {
        let limit = pool.install(|| limits(&bytes));
        if !args.json {
            writeln!(
                out,
                "{}: read {:.1} GB/s, with prefetches {:.1} GB/s, multiply-adds {:.0} GFLOP/s",
                threads(limit.threads),
                limit.read / 1e9,
                limit.prefetched_read / 1e9,
                limit.flops / 1e9
            )?;
        }
        let mut keep = |measured: Measured| -> Result<()> {
            if !args.json {
                writeln!(out, "{}", measured.line())?;
            }
            report.kernels.push(measured);
            Ok(())
        };
        for matrices in &matrices {
            let has_integers = matrices.format != WeightFormat::Bf16;
            for mode in [Mode::Exact, Mode::Int8].into_iter().filter(|m| *m == Mode::Exact || has_integers) {
                for rows in [1, 4, 16, 128] {
                    let set = InstructionSet::widest();
                    keep(pool.install(|| matrices.measure(set, mode, rows, 1, &limit)))?;
                }
            }
        }
        report.limits.push(limit);
    }
    // What narrower registers cost, on a part of the weights.
    for set in InstructionSet::available() {
        for matrices in &matrices {
            for (mode, rows) in [(Mode::Exact, 1), (Mode::Int8, 1), (Mode::Exact, 128)] {
                if set == InstructionSet::widest()
                    || mode == Mode::Int8 && matrices.format == WeightFormat::Bf16
                {
                    continue;
                }
                let measured = pools[0].install(|| matrices.measure(set, mode, rows, 16, &report.limits[0]));
                if !args.json {
                    writeln!(out, "{}", measured.line())?;
                }
                report.kernels.push(measured);
            }
        }
    }
    drop((matrices, bytes));
    for encoded in encode()? {
        if !args.json {
            writeln!(
                out,
                "quantizing bf16 to {:<5} {:<8} {:>6.0} MB/s of bf16, relative L2 error {:.4}",
                encoded.format,
                encoded.instructions,
                encoded.bf16_bytes_per_second / 1e6,
                encoded.relative_l2
            )?;
        }
        report.quantizers.push(encoded);
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report).context("writing JSON")?)?;
    }
    Ok(())
}

fn threads(n: usize) -> String {
    if n == 1 { "1 thread".to_owned() } else { format!("{n} threads") }
}

/// A pattern in which every bf16 is an ordinary number, and so is every scale.
fn weights(huge_pages: bool) -> Result<Bytes> {
    let mut map = MmapMut::map_anon(BYTES).context("allocating weights")?;
    #[cfg(target_os = "linux")]
    if huge_pages {
        // Where the kernel has none, the measurement goes on without.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    map.par_chunks_mut(TASK_BYTES).for_each(|bytes| {
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = 0x3c ^ (i as u8 & 3));
    });
    Ok(Bytes::from_owner(map))
}

fn limits(bytes: &Bytes) -> Limit {
    let read = |ahead: Option<usize>| {
        let seconds =
            best(|| bytes.par_chunks(TASK_BYTES).map(|b| probe::read(b, ahead)).reduce(|| 0, |a, b| a ^ b));
        bytes.len() as f64 / seconds
    };
    let threads = rayon::current_num_threads();
    let mut operations = 0.0;
    let seconds = best(|| {
        let done = rayon::broadcast(|_| probe::multiply_add(ROUNDS));
        operations = done.iter().map(|(operations, _)| *operations).sum();
        done.iter().map(|(_, sum)| u64::from(sum.to_bits())).sum()
    });
    Limit {
        threads,
        read: read(None),
        prefetched_read: AHEAD.into_iter().map(|ahead| read(Some(ahead))).fold(0.0, f64::max),
        flops: operations / seconds,
    }
}

/// Matrices of one shape over all of the weights.
struct Matrices {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    all: Vec<Matrix>,
}

impl Matrices {
    fn new(format: WeightFormat, rows: usize, cols: usize, bytes: &Bytes) -> Result<Self> {
        // Scales are of an order that keeps sums finite.
        let (size, scale_size, scale_byte) = match format {
            WeightFormat::Bf16 => (rows * cols * 2, 0, 0),
            WeightFormat::Int8 => (rows * cols, rows * 2, 0x3c),
            WeightFormat::Mxfp4 => (rows * cols / 2, rows * cols / 32, 120),
            WeightFormat::Nvfp4 => (rows * cols / 2, rows * cols / 16, 0x38),
            _ => (rows * cols / 2, rows * cols / 32, 0x3c),
        };
        let count = bytes.len() / size;
        // Scales of all matrices are different memory, as they are in a checkpoint.
        let scales = Bytes::from(vec![scale_byte; count * scale_size]);
        let all = (0..count)
            .map(|i| {
                let codes = bytes.slice(i * size..(i + 1) * size);
                let scale = scales.slice(i * scale_size..(i + 1) * scale_size);
                match format {
                    WeightFormat::Bf16 => Matrix::bf16(rows, cols, codes),
                    WeightFormat::Int8 => Matrix::int8(rows, cols, codes, Scales::Bf16(scale)),
                    WeightFormat::Mxfp4 => Matrix::mxfp4(rows, cols, codes, scale),
                    WeightFormat::Nvfp4 => {
                        Matrix::nvfp4(rows, cols, codes, scale, GlobalScale::Factor(ScaleFactor(0.01)))
                    }
                    _ => Matrix::int4(rows, cols, codes, Scales::Bf16(scale)),
                }
            })
            .collect::<Result<Vec<_>, _>>()
            .context("making matrices")?;
        Ok(Self { format, rows, cols, all })
    }

    /// All matrices times `n` rows of activations, or a part of them.
    fn measure(&self, set: InstructionSet, mode: Mode, n: usize, part: usize, limit: &Limit) -> Measured {
        let x: Vec<f32> = (0..n * self.cols).map(|i| (i % 7) as f32 - 3.0).collect();
        let x = Activations::with_mode(mode, self.format, n, self.cols, &x);
        let operations = 2.0 * (self.rows * self.cols * n) as f64;
        // Few rows: all of the weights.
        let count = if n <= 4 { self.all.len() } else { (OPERATIONS / operations) as usize };
        let mut rows_left = (count.clamp(1, self.all.len()) * self.rows / part).max(TASK_ROWS);
        let mut tasks = Vec::new();
        for matrix in &self.all {
            for first in (0..self.rows.min(rows_left)).step_by(TASK_ROWS) {
                tasks.push((matrix, first..(first + TASK_ROWS).min(self.rows)));
            }
            rows_left = rows_left.saturating_sub(self.rows);
        }
        let mut y = vec![0.0; tasks.len() * TASK_ROWS * n];
        let seconds = best(|| {
            y.par_chunks_mut(TASK_ROWS * n).zip(&tasks).for_each(|(y, (matrix, rows))| {
                matmul_rows_with(set, matrix, rows.clone(), &x, &mut y[..rows.len() * n]);
            });
            u64::from(y[0].to_bits())
        });
        let rows: usize = tasks.iter().map(|(_, rows)| rows.len()).sum();
        let bytes = (self.all[0].size_bytes() as f64 * rows as f64 / self.rows as f64) as usize;
        let (rate, flops) = (bytes as f64 / seconds, 2.0 * (rows * self.cols * n) as f64 / seconds);
        Measured {
            format: self.format.to_string(),
            shape: [self.rows, self.cols],
            mode: mode.to_string(),
            instructions: format!("{set:?}"),
            threads: limit.threads,
            rows: n,
            bytes,
            seconds,
            bytes_per_second: rate,
            flops,
            of_read: rate / limit.read,
            of_prefetched_read: rate / limit.prefetched_read,
            of_flops: flops / limit.flops,
        }
    }
}

impl Measured {
    fn line(&self) -> String {
        format!(
            "{:<5} {:>5}x{} {:<5} {:<8} {:>9} {:>3} rows: {:>6.2} GB/s, {:>5.2} of the read, {:>4.2} of it with prefetches; {:>5.1} GFLOP/s, {:.2} of multiply-adds; {:.3} s",
            self.format,
            self.shape[0],
            self.shape[1],
            self.mode,
            self.instructions,
            threads(self.threads),
            self.rows,
            self.bytes_per_second / 1e9,
            self.of_read,
            self.of_prefetched_read,
            self.flops / 1e9,
            self.of_flops,
            self.seconds
        )
    }
}

/// Quantizing bf16 rows, normally distributed near enough, as trained weights are.
fn encode() -> Result<Vec<Encoded>> {
    /// Shape of the matrix.
    const ROWS: usize = 512;
    const COLS: usize = 7168;
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let values: Vec<bf16> =
        (0..ROWS * COLS).map(|_| bf16::from_f32(0.05 * (0..8).map(|_| next()).sum::<f32>())).collect();
    let largest = largest_magnitude(0, COLS, &values)?;
    let mut all = Vec::new();
    for encoder in [Encoder::nvfp4(largest), Encoder::int8(), Encoder::int4()] {
        for set in InstructionSet::available() {
            let encoder = encoder.with_instruction_set(set);
            let mut codes = vec![0; ROWS * encoder.code_bytes(COLS)];
            let mut scales = vec![0; ROWS * encoder.scale_bytes(COLS)];
            let mut error = encoder.encode(0, COLS, &values, &mut codes, &mut scales)?;
            let seconds = best(|| {
                if let Ok(found) = encoder.encode(0, COLS, &values, &mut codes, &mut scales) {
                    error = found;
                }
                u64::from(codes[0])
            });
            all.push(Encoded {
                format: encoder.format().to_string(),
                instructions: format!("{set:?}"),
                bf16_bytes_per_second: (values.len() * 2) as f64 / seconds,
                relative_l2: error.relative_l2(),
            });
        }
    }
    Ok(all)
}

/// Seconds of the fastest of some runs.
fn best(mut run: impl FnMut() -> u64) -> f64 {
    let time = |_| {
        let start = Instant::now();
        std::hint::black_box(run());
        start.elapsed().as_secs_f64()
    };
    (0..TRIES).map(time).fold(f64::INFINITY, f64::min)
}
