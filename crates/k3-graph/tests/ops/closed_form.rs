//! Epsilons that no fixture shows, by inputs so small that they decide (`docs/traps.md`, closed forms 1 and 2).

use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_graph::device::{KdaStep, SequenceRows, SituCaps};
use k3_graph::scalar::INDEX_NORM_EPS;
use k3_graph::{Cpu, Device, Reference};

#[track_caller]
fn near(found: f32, expected: f64) {
    assert!((f64::from(found) - expected).abs() < 1e-7, "{found}, expected {expected}");
}

/// A query of (1e-3, 0, ...) comes out of the L2 norm as 1e-3 / sqrt(1e-6 + 1e-6): the epsilon joins the sum of
/// squares, not their mean.
fn l2_epsilon<D: Device>(device: &D) {
    let dim = 128;
    let config = KdaConfig { num_heads: 1, head_dim: dim, short_conv_kernel_size: 4, gate_lower_bound: -5.0 };
    let unit = |scale: f32| {
        let mut row = vec![0.0; dim];
        row[0] = scale;
        device.upload(dim, &row).unwrap()
    };
    let zeros = device.load_vector(&vec![0.0; dim]).unwrap();
    let step = KdaStep {
        config: &config,
        q: &unit(1e-3),
        k: &unit(1e3),
        v: &unit(1.0),
        decay: &unit(0.0),
        beta: &device.upload(1, &[60.0]).unwrap(),
        a_log: &device.load_vector(&[0.0]).unwrap(),
        dt_bias: &zeros,
    };
    let mut state = device.new_kda_state(&config).unwrap();
    let rows = &mut [SequenceRows { state: &mut state, rows: 0..1, position: 0 }];
    // An empty state takes `k v^T` in whole, so the output is `(q . k) v`.
    let out = device.download(&device.kda_step(step, rows).unwrap()).unwrap();
    near(out[0], 0.5f64.sqrt() / (dim as f64).sqrt());
}

/// An indexer key of pairs (1e-3, -1e-3) has variance 1e-6, as large as the epsilon.
fn index_norm_epsilon<D: Device>(device: &D) {
    let dim = 128;
    let mla = MlaConfig {
        num_heads: 1,
        q_lora_rank: 32,
        kv_lora_rank: 32,
        qk_nope_head_dim: 8,
        qk_rope_head_dim: 8,
        v_head_dim: 8,
    };
    let indexer = IndexerConfig { n_heads: 1, head_dim: dim, topk: 1 };
    let mut state = device.new_mla_state(&mla, Some(&indexer)).unwrap();
    let key: Vec<f32> = (0..dim).map(|i| if i % 2 == 0 { 1e-3 } else { -1e-3 }).collect();
    let ones = device.load_vector(&vec![1.0; dim]).unwrap();
    let zeros = device.load_vector(&vec![0.0; dim]).unwrap();
    let rows = &mut [SequenceRows { state: &mut state, rows: 0..1, position: 0 }];
    let key = device.upload(dim, &key).unwrap();
    device.index_append(&key, &ones, &zeros, INDEX_NORM_EPS, rows).unwrap();
    let parts = device.export_mla(&state).unwrap();
    let cached = parts.iter().find(|p| p.name == "index_key").unwrap().values.to_f32();
    near(cached[0], 0.5f64.sqrt());
    near(cached[1], -(0.5f64.sqrt()));
}

#[test]
fn the_epsilon_of_the_l2_norm_joins_the_sum() {
    l2_epsilon(&Reference);
    l2_epsilon(&Cpu::new(1).unwrap());
}

#[test]
fn the_epsilon_of_the_index_norm() {
    index_norm_epsilon(&Reference);
    index_norm_epsilon(&Cpu::new(1).unwrap());
}

/// Squares of 1e20 overflow f32; the row must come out as it would at any other scale, and not as zeros.
fn large_rows<D: Device>(device: &D) {
    let gain = device.load_vector(&[1.0; 4]).unwrap();
    let row = [3e20, -4e20, 0.0, 0.0];
    let x = device.upload(4, &row).unwrap();
    let out = device.download(&device.rms_norm(&x, &gain, 1e-5).unwrap()).unwrap();
    near(out[0], 1.2);
    near(out[1], -1.6);
    let weights = device.attn_res_weights(&[&x, &x], &gain, 1e-5).unwrap();
    near(weights[0], 0.5);
}

/// What overflowed on the way is seen: gates and caps do not swallow it.
fn infinite_operands<D: Device>(device: &D) {
    let caps = SituCaps { beta: 4.0, linear_beta: 25.0 };
    let act = |values: [f32; 2]| device.upload(2, &values).unwrap();
    let lost = |x: D::Act| device.download(&x).unwrap()[0].is_nan();
    for bad in [f32::INFINITY, f32::NEG_INFINITY] {
        assert!(lost(device.situ_glu(&act([bad, 1.0]), &act([1.0, 1.0]), caps).unwrap()));
        assert!(lost(device.situ_glu(&act([1.0, 1.0]), &act([bad, 1.0]), caps).unwrap()));
        assert!(lost(device.sigmoid_gate(&act([1.0, 1.0]), &act([bad, 1.0])).unwrap()));
        let gain = device.load_vector(&[1.0, 1.0]).unwrap();
        assert!(lost(device.rms_norm(&act([bad, 1.0]), &gain, 1e-5).unwrap()));
    }
}

#[test]
fn no_square_overflows() {
    large_rows(&Reference);
    large_rows(&Cpu::new(1).unwrap());
}

#[test]
fn an_overflow_is_not_swallowed() {
    infinite_operands(&Reference);
    infinite_operands(&Cpu::new(1).unwrap());
}
