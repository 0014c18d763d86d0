//! One thread's products with a weight matrix that no cache holds.

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_quant::cpu::{Activations, InstructionSet, matmul_rows_with};
use k3_quant::encode::{Encoder, largest_magnitude};
use k3_quant::{Bytes, GlobalScale, Matrix, ScaleFactor, Scales, bf16};

/// The width of Kimi K3.
const COLS: usize = 7168;
/// Bytes of each matrix: more than the last-level cache of any machine.
const BYTES: usize = 256 << 20;
/// Each time is the best of this many.
const TRIES: usize = 3;

pub(super) fn run() -> Result<()> {
    let mut out = std::io::stdout();
    // A pattern in which every bf16 is an ordinary number, and so is every scale.
    let weights = Bytes::from((0..BYTES).map(|i| 0x3c ^ (i as u8 & 3)).collect::<Vec<u8>>());
    let limit = weights.len() as f64 / best(|| read(&weights));
    writeln!(out, "one thread; plain read {:.1} GB/s", limit / 1e9)?;

    let rows = BYTES / (COLS * 2);
    let bf16 = Matrix::bf16(rows, COLS, weights.slice(..rows * COLS * 2)).context("bf16 matrix")?;
    let rows = BYTES / (COLS / 2);
    let scale = Bytes::from(vec![120; rows * (COLS / 32)]);
    let mxfp4 =
        Matrix::mxfp4(rows, COLS, weights.slice(..rows * (COLS / 2)), scale).context("MXFP4 matrix")?;
    let rows = BYTES / (COLS / 2);
    let packed = weights.slice(..rows * (COLS / 2));
    let scale = Bytes::from(vec![0x38; rows * (COLS / 16)]);
    let global = GlobalScale::Factor(ScaleFactor(0.01));
    let nvfp4 = Matrix::nvfp4(rows, COLS, packed.clone(), scale, global).context("NVFP4 matrix")?;
    let scale = Scales::Bf16(vec![0x3c; rows * (COLS / 64) * 2].into());
    let int4 = Matrix::int4(rows, COLS, packed, scale).context("INT4 matrix")?;
    let rows = BYTES / COLS;
    let scale = Scales::Bf16(vec![0x3c; rows * 2].into());
    let int8 = Matrix::int8(rows, COLS, weights.slice(..rows * COLS), scale).context("INT8 matrix")?;
    for matrix in [&bf16, &mxfp4, &nvfp4, &int8, &int4] {
        for set in InstructionSet::available() {
            for (n, share) in [(1, 1), (64, 64)] {
                let x: Vec<f32> = (0..n * COLS).map(|i| (i % 7) as f32 - 3.0).collect();
                let x = Activations::new(matrix.format(), n, COLS, &x);
                let rows = matrix.rows() / share;
                let mut y = vec![0.0; rows * n];
                let seconds = best(|| {
                    matmul_rows_with(set, matrix, 0..rows, &x, &mut y);
                    u64::from(y[0].to_bits())
                });
                let rate = matrix.size_bytes() as f64 / share as f64 / seconds;
                let flops = 2.0 * (rows * COLS * n) as f64 / seconds;
                writeln!(
                    out,
                    "{:<5} {n:>2} rows of activations, {:<8} {:>6.2} GB/s of weights, {:>4.0} % of the read, {:>5.1} GFLOP/s",
                    matrix.format().to_string(),
                    format!("{set:?}"),
                    rate / 1e9,
                    100.0 * rate / limit,
                    flops / 1e9
                )?;
            }
        }
    }
    encode(&mut out)
}

/// Quantizing bf16 rows, normally distributed near enough, as trained weights are.
fn encode(out: &mut impl std::io::Write) -> Result<()> {
    /// Rows of the matrix.
    const ROWS: usize = 512;
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let values: Vec<bf16> =
        (0..ROWS * COLS).map(|_| bf16::from_f32(0.05 * (0..8).map(|_| next()).sum::<f32>())).collect();
    let largest = largest_magnitude(0, COLS, &values)?;
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
            writeln!(
                out,
                "quantizing bf16 to {:<5} {:<8} {:>6.0} MB/s of bf16, relative L2 error {:.4}",
                encoder.format().to_string(),
                format!("{set:?}"),
                (values.len() * 2) as f64 / seconds / 1e6,
                error.relative_l2()
            )?;
        }
    }
    Ok(())
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

/// Reads all bytes, as words, in a way that compilers turn into wide loads.
fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<64>();
    let mut sums = [0_u64; 8];
    for word in words {
        let (lanes, _) = word.as_chunks::<8>();
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum ^= u64::from_le_bytes(*lane);
        }
    }
    sums.iter().fold(0, |a, b| a ^ b)
}
