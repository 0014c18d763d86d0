//! The host device against the reference on random inputs, at sizes that no block or register width divides.

use k3_experts::Expert;
use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_graph::device::{Conv, ExpertUse, IndexQuery, KdaStep, MlaAttend, RouterRule, SequenceRows, SituCaps};
use k3_graph::{Cpu, Device, Reference, Selected, Selection};
use k3_quant::WeightFormat::{self, Bf16, F32, Int4, Int8, Mxfp4, Nvfp4};

use crate::support::{Lcg, assert_close, bits, cpu, random_matrix};
use crate::{CPU_BOUND, NARROW_MLA};

/// Runs one operation on both devices and compares. How the host device shares it among threads changes no bit.
macro_rules! agree {
    ($operation:ident($($argument:expr),*)) => {{
        let what = stringify!($operation($($argument),*));
        let got = $operation(&cpu(), $($argument),*);
        assert_close(what, &got, &$operation(&Reference, $($argument),*), CPU_BOUND);
        for threads in [2, 5] {
            let shared = $operation(&Cpu::new(threads).unwrap().sharing_everything(), $($argument),*);
            assert_eq!(bits(&shared), bits(&got), "{what} shared by {threads} threads");
        }
    }};
}

const CAPS: SituCaps = SituCaps { beta: 4.0, linear_beta: 25.0 };

fn random<D: Device>(device: &D, rng: &mut Lcg, rows: usize, width: usize, scale: f32) -> D::Act {
    device.upload(width, &rng.values(rows * width, scale)).unwrap()
}

fn vector<D: Device>(device: &D, rng: &mut Lcg, n: usize, scale: f32) -> D::Vector {
    device.load_vector(&rng.values(n, scale)).unwrap()
}

#[test]
fn rms_norms() {
    agree!(rms_norm(1, 1, 1e-5));
    agree!(rms_norm(3, 67, 1e-5));
    agree!(rms_norm(2, 1536, 1e-6));
}

fn rms_norm<D: Device>(d: &D, rows: usize, width: usize, eps: f64) -> Vec<f32> {
    let rng = &mut Lcg::new(width as u64);
    // Small enough for the epsilon to count.
    let x = random(d, rng, rows, width, 4e-3);
    d.download(&d.rms_norm(&x, &vector(d, rng, width, 2.0), eps).unwrap()).unwrap()
}

#[test]
fn products() {
    for format in [F32, Bf16] {
        agree!(linear(format, 1, 1, 1));
        agree!(linear(format, 1, 33, 67));
        agree!(linear(format, 5, 70, 130));
        agree!(linear(format, 40, 600, 64));
    }
    for format in [Mxfp4, Nvfp4] {
        agree!(linear(format, 1, 33, 96));
        agree!(linear(format, 9, 7, 160));
    }
    agree!(linear(Nvfp4, 2, 5, 48));
    agree!(linear(Int8, 1, 33, 67));
    agree!(linear(Int8, 5, 70, 130));
    agree!(linear(Int4, 1, 33, 128));
    agree!(linear(Int4, 9, 7, 192));
}

/// Matrices of many tiles, whose sizes follow from what is left: products that wait for weights, and one that does not.
#[test]
fn linear_layers_in_many_tiles() {
    agree!(linear(Bf16, 1, 9001, 160));
    agree!(linear(Nvfp4, 4, 9001, 176));
    agree!(linear(Mxfp4, 5, 4001, 160));
}

fn linear<D: Device>(d: &D, format: WeightFormat, rows: usize, out: usize, cols: usize) -> Vec<f32> {
    let rng = &mut Lcg::new((out * cols) as u64);
    let weight = d.load_linear(random_matrix(format, out, cols, rng)).unwrap();
    d.download(&d.linear(&weight, &random(d, rng, rows, cols, 1.0)).unwrap()).unwrap()
}

/// Exact in every format, any row, any number of times.
#[test]
fn rows_of_a_table() {
    for format in [F32, Bf16, Mxfp4, Int4] {
        assert_eq!(bits(&embed(&cpu(), format)), bits(&embed(&Reference, format)));
    }
}

fn embed<D: Device>(d: &D, format: WeightFormat) -> Vec<f32> {
    let table = d.load_linear(random_matrix(format, 11, 192, &mut Lcg::new(5))).unwrap();
    d.download(&d.embed(&table, &[10, 0, 3, 3]).unwrap()).unwrap()
}

#[test]
fn element_wise() {
    agree!(add_and_select(5, 67));
    agree!(situ(3, 67));
    agree!(situ(70, 67));
    agree!(situ(2, 9001));
    agree!(sigmoid_gate(3, 67));
    agree!(sigmoid_gate(70, 67));
}

fn add_and_select<D: Device>(d: &D, rows: usize, width: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(6);
    let (mut a, b) = (random(d, rng, rows, width, 1.0), random(d, rng, rows, width, 1.0));
    d.add(&mut a, &b).unwrap();
    d.download(&d.select_rows(&a, &[rows - 1, 0, 2, 2]).unwrap()).unwrap()
}

fn situ<D: Device>(d: &D, rows: usize, width: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(7);
    let (gate, up) = (random(d, rng, rows, width, 20.0), random(d, rng, rows, width, 60.0));
    d.download(&d.situ_glu(&gate, &up, CAPS).unwrap()).unwrap()
}

fn sigmoid_gate<D: Device>(d: &D, rows: usize, width: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(8);
    let (x, gate) = (random(d, rng, rows, width, 2.0), random(d, rng, rows, width, 10.0));
    d.download(&d.sigmoid_gate(&x, &gate).unwrap()).unwrap()
}

#[test]
fn attention_residuals() {
    agree!(attn_res(1, 3, 67));
    agree!(attn_res(9, 2, 130));
}

/// Weights, then the mix.
fn attn_res<D: Device>(d: &D, sources: usize, rows: usize, width: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(9);
    let sources: Vec<D::Act> = (0..sources).map(|i| random(d, rng, rows, width, 1.0 + i as f32)).collect();
    let sources: Vec<&D::Act> = sources.iter().collect();
    let score = vector(d, rng, width, 0.3);
    let mut out = d.attn_res_weights(&sources, &score, 1e-5).unwrap();
    out.extend(d.download(&d.attn_res_mix(&sources, &score, 1e-5).unwrap()).unwrap());
    out
}

#[test]
fn short_convolutions() {
    agree!(short_conv(4, &[9]));
    agree!(short_conv(4, &[1, 1, 1, 1, 5]));
    agree!(short_conv(4, &[2, 7]));
    agree!(short_conv(2, &[3, 1]));
    agree!(short_conv(1, &[3, 1]));
}

/// Outputs of the three convolutions over several calls, then the windows.
fn short_conv<D: Device>(d: &D, kernel: usize, calls: &[usize]) -> Vec<f32> {
    let rng = &mut Lcg::new(10);
    let config =
        KdaConfig { num_heads: 3, head_dim: 5, short_conv_kernel_size: kernel, gate_lower_bound: -5.0 };
    let width = config.projection_size();
    let mut state = d.new_kda_state(&config).unwrap();
    let mut out = Vec::new();
    for which in Conv::ALL {
        let taps = vector(d, rng, width * kernel, 1.0);
        let mut position = 0;
        for &n in calls {
            let x = random(d, rng, n, width, 2.0);
            let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
            out.extend(d.download(&d.short_conv(&x, &taps, which, &mut states).unwrap()).unwrap());
            position += n;
        }
    }
    out.extend(d.export_kda(&state).unwrap()[0].values.to_f32());
    out
}

/// Two sequences in one call: each reads and advances its own window only.
#[test]
fn convolution_windows_belong_to_their_sequences() {
    fn check<D: Device>(d: &D) {
        let rng = &mut Lcg::new(11);
        let config =
            KdaConfig { num_heads: 1, head_dim: 3, short_conv_kernel_size: 4, gate_lower_bound: -5.0 };
        let taps = vector(d, rng, 12, 1.0);
        let x = rng.values(7 * 3, 1.0);
        let run = |states: &mut [SequenceRows<'_, D::KdaState>], x: &[f32]| {
            let x = d.upload(3, x).unwrap();
            d.download(&d.short_conv(&x, &taps, Conv::K, states).unwrap()).unwrap()
        };
        let new = || d.new_kda_state(&config).unwrap();
        let (mut a, mut b) = (new(), new());
        let together = run(
            &mut [
                SequenceRows { state: &mut a, rows: 0..2, position: 0 },
                SequenceRows { state: &mut b, rows: 2..7, position: 0 },
            ],
            &x,
        );
        let (mut alone_a, mut alone_b) = (new(), new());
        let first = run(&mut [SequenceRows { state: &mut alone_a, rows: 0..2, position: 0 }], &x[..6]);
        let second = run(&mut [SequenceRows { state: &mut alone_b, rows: 0..5, position: 0 }], &x[6..]);
        assert_eq!(bits(&together), bits(&[first, second].concat()));
        assert_eq!(d.export_kda(&a).unwrap(), d.export_kda(&alone_a).unwrap());
        assert_eq!(d.export_kda(&b).unwrap(), d.export_kda(&alone_b).unwrap());
    }
    check(&cpu());
    check(&Reference);
}

#[test]
fn delta_rule() {
    agree!(kda_step(1, 4, &[1]));
    agree!(kda_step(3, 7, &[5, 1, 30]));
    agree!(kda_step(2, 33, &[40]));
    agree!(kda_step(1, 64, &[1, 130, 2]));
    agree!(kda_step(5, 32, &[65]));
}

/// Outputs over several calls, then the state. Gates move over their whole range.
fn kda_step<D: Device>(d: &D, heads: usize, dim: usize, calls: &[usize]) -> Vec<f32> {
    let rng = &mut Lcg::new(dim as u64);
    let config =
        KdaConfig { num_heads: heads, head_dim: dim, short_conv_kernel_size: 4, gate_lower_bound: -5.0 };
    let width = heads * dim;
    let (a_log, dt_bias) = (vector(d, rng, heads, 1.0), vector(d, rng, width, 2.0));
    let mut state = d.new_kda_state(&config).unwrap();
    let mut out = Vec::new();
    let mut position = 0;
    for &n in calls {
        let step = KdaStep {
            config: &config,
            q: &random(d, rng, n, width, 1.0),
            k: &random(d, rng, n, width, 1.0),
            v: &random(d, rng, n, width, 3.0),
            decay: &random(d, rng, n, width, 6.0),
            beta: &random(d, rng, n, heads, 3.0),
            a_log: &a_log,
            dt_bias: &dt_bias,
        };
        let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
        out.extend(d.download(&d.kda_step(step, &mut states).unwrap()).unwrap());
        position += n;
    }
    out.extend(d.export_kda(&state).unwrap()[1].values.to_f32());
    out
}

#[test]
fn gated_head_norms() {
    agree!(gated_head_norm(1, 1, 7));
    agree!(gated_head_norm(5, 3, 37));
}

fn gated_head_norm<D: Device>(d: &D, rows: usize, heads: usize, dim: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(12);
    let (x, gate) = (random(d, rng, rows, heads * dim, 0.01), random(d, rng, rows, heads * dim, 8.0));
    let gain = vector(d, rng, dim, 2.0);
    d.download(&d.gated_head_norm(&x, &gain, &gate, 1e-5).unwrap()).unwrap()
}

/// Which keys a row of the test below attends.
#[derive(Clone, Copy)]
enum Keys {
    NoSelection,
    All,
    /// Every key, by name.
    Listed,
    /// Every key, by name, in another order.
    Backwards,
    /// Every third key and the own one.
    EveryThird,
}

impl Keys {
    fn of(self, position: u32) -> Selected {
        match self {
            Self::NoSelection | Self::All => Selected::All,
            Self::Listed => Selected::Keys((0..=position).collect()),
            Self::Backwards => Selected::Keys((0..=position).rev().collect()),
            Self::EveryThird => {
                Selected::Keys((0..=position).rev().filter(|p| (position - p).is_multiple_of(3)).collect())
            }
        }
    }
}

#[test]
fn latent_attention() {
    agree!(mla(Bf16, 3, &[1], Keys::NoSelection));
    agree!(mla(Bf16, 3, &[1, 70, 3], Keys::NoSelection));
    agree!(mla(F32, 3, &[5, 1, 1], Keys::NoSelection));
    agree!(mla(Bf16, 3, &[40, 33], Keys::EveryThird));
    agree!(mla(Int8, 3, &[5, 1, 1], Keys::NoSelection));
    agree!(mla(Bf16, 3, &[130, 64, 1, 200], Keys::NoSelection));
    agree!(mla(Bf16, 3, &[140, 1], Keys::EveryThird));
    // Heads that go together, and a tile with fewer.
    agree!(mla(Bf16, 19, &[1, 70, 3, 1], Keys::NoSelection));
    agree!(mla(F32, 19, &[20, 2], Keys::EveryThird));
}

#[test]
fn attending_all_keys_by_name_changes_no_bit() {
    fn check<D: Device<Selection = Selection>>(d: &D) {
        let calls = [1, 66, 1, 5];
        for heads in [3, 19] {
            let dense = bits(&mla(d, Bf16, heads, &calls, Keys::NoSelection));
            for keys in [Keys::All, Keys::Listed, Keys::Backwards] {
                assert_eq!(bits(&mla(d, Bf16, heads, &calls, keys)), dense);
            }
            assert_ne!(bits(&mla(d, Bf16, heads, &calls, Keys::EveryThird)), dense);
        }
    }
    check(&cpu());
    check(&Reference);
}

/// Outputs over several calls, then the caches.
fn mla<D: Device<Selection = Selection>>(
    d: &D,
    format: WeightFormat,
    heads: usize,
    calls: &[usize],
    keys: Keys,
) -> Vec<f32> {
    let rng = &mut Lcg::new(13);
    let config = MlaConfig {
        num_heads: heads,
        q_lora_rank: 1,
        kv_lora_rank: 37,
        qk_nope_head_dim: 11,
        qk_rope_head_dim: 5,
        v_head_dim: 9,
    };
    let (latent, extra) = (config.kv_lora_rank, config.qk_rope_head_dim);
    let kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim);
    let kv_b = d.load_linear(random_matrix(format, kv_b_rows, latent, rng)).unwrap();
    let gain = vector(d, rng, latent, 2.0);
    let mut state = d.new_mla_state(&config, None).unwrap();
    let mut out = Vec::new();
    let mut position = 0;
    for &n in calls {
        // Latents small enough for the epsilon to count, queries large enough for a sharp softmax.
        let kv = random(d, rng, n, latent + extra, 3e-3);
        let q = random(d, rng, n, heads * config.qk_head_dim(), 3.0);
        let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
        d.mla_append(&kv, &gain, 1e-6, &mut states).unwrap();
        let selection = Selection { rows: (position..position + n).map(|p| keys.of(p as u32)).collect() };
        let selection = (!matches!(keys, Keys::NoSelection)).then_some(&selection);
        let attend = MlaAttend { config: &config, q: &q, kv_b: &kv_b };
        out.extend(d.download(&d.mla_attend(attend, selection, &states).unwrap()).unwrap());
        position += n;
    }
    for part in d.export_mla(&state).unwrap() {
        out.extend(part.values.to_f32());
    }
    out
}

/// A lost row attends to nothing and says so; its neighbours do not notice.
#[test]
fn a_lost_selection_leaves_the_other_rows() {
    fn check<D: Device<Selection = Selection>>(d: &D) {
        let config = MlaConfig {
            num_heads: 2,
            q_lora_rank: 1,
            kv_lora_rank: 8,
            qk_nope_head_dim: 4,
            qk_rope_head_dim: 2,
            v_head_dim: 4,
        };
        let rng = &mut Lcg::new(14);
        let kv_b = d.load_linear(random_matrix(F32, 16, 8, rng)).unwrap();
        let gain = vector(d, rng, 8, 1.0);
        let (kv, q) = (random(d, rng, 3, 10, 1.0), random(d, rng, 3, 12, 1.0));
        let mut state = d.new_mla_state(&config, None).unwrap();
        let mut states = [SequenceRows { state: &mut state, rows: 0..3, position: 0 }];
        d.mla_append(&kv, &gain, 1e-6, &mut states).unwrap();
        let run = |selection: Option<&Selection>| {
            let attend = MlaAttend { config: &config, q: &q, kv_b: &kv_b };
            d.download(&d.mla_attend(attend, selection, &states).unwrap()).unwrap()
        };
        let all = run(None);
        let lost = run(Some(&Selection { rows: vec![Selected::All, Selected::NonFinite, Selected::All] }));
        assert_eq!(bits(&lost[..8]), bits(&all[..8]));
        assert!(lost[8..16].iter().all(|v| v.is_nan()));
        assert_eq!(bits(&lost[16..]), bits(&all[16..]));
    }
    check(&cpu());
    check(&Reference);
}

#[test]
fn indexers() {
    agree!(index(1, 5, &[1, 20]));
    agree!(index(3, 37, &[33, 1, 1, 300]));
    agree!(index(9, 64, &[1, 2, 61, 1, 1100, 3]));
    // The scores of random inputs are far enough apart for both precisions to select the same.
    assert_eq!(selected(&cpu(), 3, 37, &[33, 1, 30]), selected(&Reference, 3, 37, &[33, 1, 30]));
}

fn index<D: Device>(d: &D, heads: usize, dim: usize, calls: &[usize]) -> Vec<f32> {
    index_both(d, heads, dim, calls).0
}

fn selected<D: Device>(d: &D, heads: usize, dim: usize, calls: &[usize]) -> Vec<Selected> {
    let selected = index_both(d, heads, dim, calls).1;
    assert!(matches!(selected.last(), Some(Selected::Keys(keys)) if keys.len() == 10));
    selected
}

/// Scores over several calls and then the keys; the selections.
fn index_both<D: Device>(d: &D, heads: usize, dim: usize, calls: &[usize]) -> (Vec<f32>, Vec<Selected>) {
    let rng = &mut Lcg::new(15);
    let mla = MlaConfig { kv_lora_rank: 2, ..NARROW_MLA };
    let config = IndexerConfig { n_heads: heads, head_dim: dim, topk: 10 };
    let (gain, bias, latent_gain) =
        (vector(d, rng, dim, 1.0), vector(d, rng, dim, 0.3), vector(d, rng, 2, 1.0));
    let mut state = d.new_mla_state(&mla, Some(&config)).unwrap();
    let (mut out, mut selected) = (Vec::new(), Vec::new());
    let mut position = 0;
    for &n in calls {
        let kv = random(d, rng, n, 3, 1.0);
        let k = random(d, rng, n, dim, 2e-3);
        let (q, weights) = (random(d, rng, n, heads * dim, 1.0), random(d, rng, n, heads, 1.0));
        let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
        d.mla_append(&kv, &latent_gain, 1e-6, &mut states).unwrap();
        d.index_append(&k, &gain, &bias, 1e-6, &mut states).unwrap();
        let query = IndexQuery { config: &config, q: &q, weights: &weights };
        out.extend(d.index_scores(query, &states).unwrap().into_iter().flatten());
        let selection = d.index_select(query, &states).unwrap();
        selected.extend(d.download_selection(&selection).unwrap().rows);
        position += n;
    }
    out.extend(d.export_mla(&state).unwrap()[2].values.to_f32());
    (out, selected)
}

#[test]
fn router() {
    agree!(route_weights(1, 17, 16, None));
    agree!(route_weights(5, 37, 4, None));
    agree!(route_weights(5, 37, 4, Some(0.6)));
    let ids = |routing: k3_graph::Routing| routing.ids;
    assert_eq!(ids(route(&cpu(), 5, 37, 4, None)), ids(route(&Reference, 5, 37, 4, None)));
}

fn route_weights<D: Device>(d: &D, rows: usize, experts: usize, k: usize, top_p: Option<f64>) -> Vec<f32> {
    route(d, rows, experts, k, top_p).weights.iter().map(|&w| w as f32).collect()
}

fn route<D: Device>(d: &D, rows: usize, experts: usize, k: usize, top_p: Option<f64>) -> k3_graph::Routing {
    let rng = &mut Lcg::new(16);
    let rule = RouterRule { experts_per_token: k, renormalize: true, scaling_factor: 2.5, top_p };
    let (logits, bias) = (random(d, rng, rows, experts, 3.0), vector(d, rng, experts, 0.2));
    d.route(&logits, &bias, rule).unwrap()
}

#[test]
fn routed_experts() {
    for format in [Mxfp4, Nvfp4, Bf16] {
        agree!(experts(format, 64, 96));
        // Many tiles.
        agree!(experts(format, 256, 2080));
    }
}

/// Two experts into slots in no order, then their weighted sum; a slot that nobody writes counts as zero.
fn experts<D: Device>(d: &D, format: WeightFormat, latent: usize, inner: usize) -> Vec<f32> {
    let rng = &mut Lcg::new(17);
    let mut expert = |id| {
        let mut matrix = |rows, cols| random_matrix(format, rows, cols, rng);
        Expert { id, w1: matrix(inner, latent), w2: matrix(latent, inner), w3: matrix(inner, latent) }
    };
    let (first, second) = (expert(3), expert(8));
    let rng = &mut Lcg::new(18);
    let z = random(d, rng, 4, latent, 3.0);
    let mut out = d.expert_outputs(8, latent).unwrap();
    let uses = |uses: &[(usize, usize)]| -> Vec<ExpertUse> {
        uses.iter().map(|&(row, slot)| ExpertUse { row, slot }).collect()
    };
    d.experts_ffn(&[(second, uses(&[(2, 5), (0, 0), (3, 7)]))], &z, CAPS, &mut out).unwrap();
    d.experts_ffn(&[(first, uses(&[(1, 2), (0, 1), (2, 4)]))], &z, CAPS, &mut out).unwrap();
    let routing = k3_graph::Routing {
        experts_per_token: 2,
        ids: vec![8, 3, 3, 0, 3, 8, 0, 8],
        weights: rng.values(8, 1.0).iter().map(|&w| f64::from(w)).collect(),
        used: Vec::new(),
        runner_ups: Vec::new(),
        gaps: vec![1.0; 4],
        non_finite: Vec::new(),
    };
    let mut values = d.download(&out).unwrap();
    assert!(values[3 * latent..4 * latent].iter().all(|&v| v == 0.0), "an unused slot stays zero");
    values.extend(d.download(&d.expert_sum(&out, &routing).unwrap()).unwrap());
    values
}

/// However experts are grouped, the bits are those of each alone.
#[test]
fn groups_of_experts() {
    fn check<D: Device>(d: &D, format: WeightFormat) {
        let rng = &mut Lcg::new(19);
        let (latent, inner, rows) = (64, 96, 7);
        let experts: Vec<Expert> = (0..5)
            .map(|id| {
                let mut matrix = |rows, cols| random_matrix(format, rows, cols, rng);
                Expert { id, w1: matrix(inner, latent), w2: matrix(latent, inner), w3: matrix(inner, latent) }
            })
            .collect();
        let z = random(d, rng, rows, latent, 3.0);
        // Expert e is used by every row that e + 1 divides, as rank e.
        let uses = |e: usize| -> Vec<ExpertUse> {
            let used = (0..rows).filter(|row| row % (e + 1) == 0);
            used.map(|row| ExpertUse { row, slot: row * 5 + e }).collect()
        };
        let mut alone = d.expert_outputs(rows * 5, latent).unwrap();
        for (e, expert) in experts.iter().enumerate() {
            d.experts_ffn(&[(expert.clone(), uses(e))], &z, CAPS, &mut alone).unwrap();
        }
        for groups in [vec![vec![0, 1, 2, 3, 4]], vec![vec![4, 1], vec![2], vec![3, 0]]] {
            let mut out = d.expert_outputs(rows * 5, latent).unwrap();
            for group in groups {
                let group: Vec<_> = group.into_iter().map(|e| (experts[e].clone(), uses(e))).collect();
                d.experts_ffn(&group, &z, CAPS, &mut out).unwrap();
            }
            let bits = |act| -> Vec<u32> { d.download(act).unwrap().iter().map(|v| v.to_bits()).collect() };
            assert_eq!(bits(&out), bits(&alone), "{format:?}");
        }
    }
    for format in [Mxfp4, Nvfp4, Bf16] {
        check(&cpu(), format);
        check(&Reference, format);
    }
}
