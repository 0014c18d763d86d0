//! The best 2,048 of a million keys, against reading the keys once.

use std::io::Write;
use std::time::Instant;

use anyhow::{Result, ensure};
use k3_format::{IndexerConfig, MlaConfig};
use k3_graph::device::{IndexQuery, SequenceRows, StateTensor, StateValues};
use k3_graph::{Cpu, Device, Selected};

use super::limits::Limits;

/// The released sizes (`docs/checkpoint.md` 3).
const CONFIG: IndexerConfig = IndexerConfig { n_heads: 32, head_dim: 128, topk: 2048 };
/// Each time is the best of so many.
const TRIES: usize = 5;

pub(super) fn run(keys: usize, threads: usize) -> Result<()> {
    ensure!(keys > CONFIG.topk, "{keys} keys are all selected: ask for more than {}", CONFIG.topk);
    let device = Cpu::new(threads)?;
    let mla = MlaConfig {
        num_heads: 1,
        q_lora_rank: 1,
        kv_lora_rank: 1,
        qk_nope_head_dim: 1,
        qk_rope_head_dim: 1,
        v_head_dim: 1,
    };
    let mut state = 1_u64;
    let mut next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut values = |n: usize| -> Vec<f32> { (0..n).map(&mut next).collect() };
    let (q, weights) = (values(CONFIG.n_heads * CONFIG.head_dim), values(CONFIG.n_heads));
    let part = |name, width, values| StateTensor {
        name,
        shape: vec![keys, width],
        values: StateValues::F32(values),
    };
    let parts = [
        part("latent", 1, vec![0.0; keys]),
        part("extra_key", 1, vec![0.0; keys]),
        part("index_key", CONFIG.head_dim, values(keys * CONFIG.head_dim)),
    ];
    let mut cache = device.import_mla(&mla, Some(&CONFIG), keys, &parts)?;
    drop(parts);
    let (q, weights) =
        (device.upload(CONFIG.n_heads * CONFIG.head_dim, &q)?, device.upload(CONFIG.n_heads, &weights)?);
    let query = IndexQuery::<Cpu> { config: &CONFIG, q: &q, weights: &weights };
    let states = [SequenceRows { state: &mut cache, rows: 0..1, position: keys - 1 }];

    let (mut all, mut best_of) = (f64::INFINITY, f64::INFINITY);
    let scores = device.index_scores(query, &states)?;
    for _ in 0..TRIES {
        let start = Instant::now();
        let selection = device.index_select(query, &states)?;
        all = all.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let selected = Selected::by_score(&scores[0], CONFIG.topk);
        best_of = best_of.min(start.elapsed().as_secs_f64());
        ensure!(selection.rows[0] == selected, "two selections of the same scores differ");
    }
    let limits = Limits::measure(device.threads())?;
    let products = (keys * CONFIG.n_heads * CONFIG.head_dim) as f64;
    let (read, add) = (limits.reading(4.0 * (keys * CONFIG.head_dim) as f64), limits.adding(products));
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} threads, {keys} keys, best {} exactly: scores and selection {:.1} ms, the selection {:.2} ms of it",
        device.threads(),
        CONFIG.topk,
        1e3 * all,
        1e3 * best_of
    )?;
    writeln!(
        out,
        "reading the keys once {:.1} ms: {:.2} times as long; their products at the rate of fused multiply-adds {:.1} ms: {:.2} times",
        1e3 * read,
        all / read,
        1e3 * add,
        all / add
    )?;
    writeln!(out, "the selection alone takes {:.2} of the reading", best_of / read)?;
    Ok(())
}
