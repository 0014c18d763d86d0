//! One thread's products with a weight matrix that no cache holds.

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context, Result};
use k3_quant::cpu::{Activations, InstructionSet, matmul_rows_with};
use k3_quant::{Bytes, Matrix};

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
    for matrix in [&bf16, &mxfp4] {
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
