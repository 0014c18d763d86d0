//! What scores of a long context need of memory: foreseen from the config, and measured.

use std::path::Path;

use k3_format::{Checkpoint, IndexerConfig, MlaConfig, ModelConfig, OpenOptions};
use k3_graph::device::{IndexQuery, MlaAttend, SequenceRows, StateTensor, StateValues};
use k3_graph::{Cpu, Device};
use k3_quant::Matrix;
use peak_alloc::PeakAlloc;

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

/// Sizes at which a key in the cache is small beside its scores.
const MLA: MlaConfig = MlaConfig {
    num_heads: 16,
    q_lora_rank: 1,
    kv_lora_rank: 1,
    qk_nope_head_dim: 1,
    qk_rope_head_dim: 1,
    v_head_dim: 1,
};
const INDEXER: IndexerConfig = IndexerConfig { n_heads: 2, head_dim: 4, topk: 64 };

fn config(indexer: Option<IndexerConfig>) -> ModelConfig {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k3");
    let checkpoint = Checkpoint::open(&dir, &OpenOptions::default()).unwrap();
    ModelConfig { mla: MLA, indexer, ..checkpoint.config().clone() }
}

/// What keys are like.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Far from each other.
    Mixed,
    /// A few keys over and over, with little noise: most cannot be told apart without their f32 scores.
    Clusters,
    /// One key.
    Equal,
}

fn values(n: usize, kind: Kind) -> Vec<f32> {
    let mixed = |i: usize| (i as u32).wrapping_mul(0x9e37_79b1) as f32 / 2e9 - 1.0;
    let value = |i: usize| match kind {
        Kind::Mixed => mixed(i),
        Kind::Clusters => mixed(i % 12) + 1e-4 * mixed(i),
        Kind::Equal => 0.5,
    };
    (0..n).map(value).collect()
}

/// Bytes at the peak of what the last `rows` of `keys` tokens select, or attend where nothing is selected.
fn measured(device: &Cpu, config: &ModelConfig, keys: usize, rows: usize, kind: Kind) -> u64 {
    let indexer = config.indexer.as_ref();
    let dim = indexer.map_or(0, |i| i.head_dim);
    let part = |name, width: usize| StateTensor {
        name,
        shape: vec![keys, width],
        values: StateValues::F32(values(keys * width, kind)),
    };
    let parts = [part("latent", 1), part("extra_key", 1), part("index_key", dim)];
    let mut state = device.import_mla(&MLA, indexer, keys, &parts).unwrap();
    let states = [SequenceRows { state: &mut state, rows: 0..rows, position: keys - rows }];
    let upload = |width: usize| device.upload(width, &values(rows * width, Kind::Mixed)).unwrap();
    if let Some(indexer) = indexer {
        let (q, weights) = (upload(indexer.n_heads * dim), upload(indexer.n_heads));
        let query = IndexQuery { config: indexer, q: &q, weights: &weights };
        return peak_of(|| drop(device.index_select(query, &states).unwrap()));
    }
    let q = upload(MLA.num_heads * MLA.qk_head_dim());
    let weights = values(2 * MLA.num_heads, Kind::Mixed).into_iter().flat_map(f32::to_le_bytes);
    let kv_b = Matrix::f32(2 * MLA.num_heads, 1, weights.collect::<Vec<u8>>().into()).unwrap();
    let attend = MlaAttend { config: &MLA, q: &q, kv_b: &kv_b };
    peak_of(|| drop(device.mla_attend(attend, None, &states).unwrap()))
}

/// Bytes at the peak of `work`, beyond what there was before.
fn peak_of(work: impl FnOnce()) -> u64 {
    let before = PEAK.current_usage();
    PEAK.reset_peak_usage();
    work();
    (PEAK.peak_usage() - before) as u64
}

/// One test, so that nothing else runs meanwhile.
#[test]
fn what_is_foreseen_is_what_is_needed() {
    // One thread: of several, each may have its scores at the same time, or not, as they are scheduled.
    let device = Cpu::new(1).unwrap();
    let mut wrong = Vec::new();
    let mut check = |indexer: Option<IndexerConfig>, keys: usize, kinds: &[Kind], rows: &[usize]| {
        let name = if indexer.is_some() { "indexer" } else { "attention" };
        let config = config(indexer);
        let foreseen = device.score_bytes(&config, keys);
        let mut most = 0;
        for (&kind, &rows) in kinds.iter().flat_map(|kind| rows.iter().map(move |rows| (kind, rows))) {
            let needed = measured(&device, &config, keys, rows, kind);
            println!("{name}, {keys} keys, {kind:?}, {rows} rows: {needed} of {foreseen} foreseen");
            most = most.max(needed);
        }
        // Not counted are rows and outputs.
        if !(foreseen / 10 * 8..foreseen + (1 << 20)).contains(&most) {
            wrong.push(format!("{name}, {keys} keys: {foreseen} foreseen, {most} needed"));
        }
    };
    // Few rows that see much, and as many as may go together.
    check(None, 600_000, &[Kind::Mixed], &[1]);
    check(None, 200_000, &[Kind::Mixed], &[24]);
    let kinds = [Kind::Mixed, Kind::Clusters, Kind::Equal];
    check(Some(INDEXER), 200_000, &kinds, &[1, 16]);
    check(Some(INDEXER), 270_000, &kinds, &[16]);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
