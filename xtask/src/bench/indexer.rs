//! The best 2,048 of a million keys, against reading the keys once.

use std::io::Write;
use std::time::Instant;

use anyhow::{Result, ensure};
use k3_format::{IndexerConfig, MlaConfig};
use k3_graph::device::{IndexQuery, SequenceRows, StateTensor, StateValues};
use k3_graph::{Cpu, Device, IndexFilter, Selection};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::limits::Limits;

/// The released sizes (`docs/checkpoint.md` 9).
const CONFIG: IndexerConfig = IndexerConfig { n_heads: 32, head_dim: 128, topk: 2048 };
/// Of what is not measured.
const MLA: MlaConfig = MlaConfig {
    num_heads: 1,
    q_lora_rank: 1,
    kv_lora_rank: 1,
    qk_nope_head_dim: 1,
    qk_rope_head_dim: 1,
    v_head_dim: 1,
};
/// Each time is the best of so many.
const TRIES: usize = 5;
/// The same of prefill.
const CHUNK_TRIES: usize = 2;

/// What keys are measured.
#[derive(Clone, Copy)]
enum Kind {
    /// Normal numbers.
    Normal,
    /// Normal numbers, a column of which is 30 times the others: scales of keys, and with them errors, are larger.
    Outlier,
    /// 64 keys over and over, with a hundredth of noise: scores lie close together.
    Clusters,
    /// One key: nothing can be told apart.
    Equal,
}

impl Kind {
    const ALL: [(&'static str, Self); 4] = [
        ("normal", Self::Normal),
        ("one column 30 times the others", Self::Outlier),
        ("64 clusters", Self::Clusters),
        ("all equal", Self::Equal),
    ];

    fn keys(self, n: usize, random: &mut Random) -> Vec<f32> {
        let dim = CONFIG.head_dim;
        match self {
            Self::Normal => random.values(n * dim),
            Self::Outlier => {
                let mut keys = random.values(n * dim);
                keys.iter_mut().step_by(dim).for_each(|k| *k *= 30.0);
                keys
            }
            Self::Clusters => {
                let centres = random.values(64 * dim);
                let centre = centres.iter().cycle();
                centre.take(n * dim).map(|centre| centre + 0.01 * random.next()).collect()
            }
            Self::Equal => random.values(dim).repeat(n),
        }
    }
}

/// Numbers that are normal, about.
struct Random(ChaCha8Rng);

impl Random {
    /// Sums of four uniform ones.
    fn next(&mut self) -> f32 {
        let bits = self.0.next_u64();
        let sum: u64 = [0, 16, 32, 48].iter().map(|at| bits >> at & 0xffff).sum();
        (sum as f32 / 65_536.0 - 2.0) * 3.0_f32.sqrt()
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// Seconds of the fastest of some tries.
fn best(tries: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..tries {
        let start = Instant::now();
        work()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

pub(super) fn run(keys: usize, rows: usize, threads: usize) -> Result<()> {
    ensure!(keys > CONFIG.topk, "{keys} keys are all selected: ask for more than {}", CONFIG.topk);
    ensure!((1..=keys).contains(&rows), "a prompt of {keys} tokens has no last {rows}");
    let device = |filter| Cpu::new(threads).map(|cpu| cpu.with_index_filter(filter));
    let (device, plain) = (device(IndexFilter::WhereItPays)?, device(IndexFilter::Never)?);
    let random = &mut Random(ChaCha8Rng::seed_from_u64(1));
    let width = CONFIG.n_heads * CONFIG.head_dim;
    let (q, weights) = (random.values(rows * width), random.values(rows * CONFIG.n_heads));
    let limits = Limits::measure(device.threads())?;
    let products = (keys * width) as f64;
    let (read, add) = (limits.reading(4.0 * (keys * CONFIG.head_dim) as f64), limits.adding(products));
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} threads, the best {} of {keys} keys, exactly. Reading the keys once takes {:.1} ms, their products at the rate of fused multiply-adds {:.1} ms.",
        device.threads(),
        CONFIG.topk,
        1e3 * read,
        1e3 * add
    )?;
    for (name, kind) in Kind::ALL {
        let part = |name, width, values| StateTensor {
            name,
            shape: vec![keys, width],
            values: StateValues::F32(values),
        };
        let parts = [
            part("latent", 1, vec![0.0; keys]),
            part("extra_key", 1, vec![0.0; keys]),
            part("index_key", CONFIG.head_dim, kind.keys(keys, random)),
        ];
        let mut cache = device.import_mla(&MLA, Some(&CONFIG), keys, &parts)?;
        drop(parts);
        let mut times = Vec::new();
        for (count, tries) in [(1, TRIES), (rows, CHUNK_TRIES)] {
            let (q, weights) = (
                device.upload(width, &q[..count * width])?,
                device.upload(CONFIG.n_heads, &weights[..count * CONFIG.n_heads])?,
            );
            let query = IndexQuery::<Cpu> { config: &CONFIG, q: &q, weights: &weights };
            let states = [SequenceRows { state: &mut cache, rows: 0..count, position: keys - count }];
            let measure = |device: &Cpu| -> Result<(f64, Selection)> {
                let mut selection = Selection { rows: Vec::new() };
                let seconds = best(tries, || {
                    selection = device.index_select(query, &states)?;
                    Ok(())
                })?;
                Ok((seconds / count as f64, selection))
            };
            let ((filtered, selection), (all, expected)) = (measure(&device)?, measure(&plain)?);
            ensure!(selection == expected, "{name}: selections differ by how they are made");
            times.push((count, filtered, all));
        }
        writeln!(out, "{name}:")?;
        for (count, filtered, all) in times {
            writeln!(
                out,
                "  {count} rows at once, each {:.1} ms, {:.2} times the reading; by the f32 scores of all keys {:.1} ms, {:.2} times",
                1e3 * filtered,
                filtered / read,
                1e3 * all,
                all / read
            )?;
        }
    }
    Ok(())
}
