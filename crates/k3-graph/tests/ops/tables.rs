//! The scalar functions, against the printed tables of `docs/arithmetic.md`.

use k3_graph::scalar::{
    INDEX_NORM_EPS, L2_NORM_EPS, LORA_NORM_EPS, ROUTER_SUM_EPS, kda_log_decay, relu, router_weights, sigmoid,
    silu, situ_glu,
};
use k3_graph::select::{argmax, select_experts, select_keys};

/// To the last printed digit.
#[track_caller]
fn check(got: f64, printed: f64, half_a_digit: f64) {
    assert!((got - printed).abs() <= half_a_digit, "{got} is not {printed}");
}

/// 5.3: log decay `g`, decay `exp(g)`, and what Kimi-Linear's softplus form would give, which is far off.
#[test]
fn kda_decay() {
    let row = |a_log: f64, z: f64, g: f64, alpha: f64, softplus_form: f64| {
        let got = kda_log_decay(z, f64::exp(a_log), -5.0);
        check(got, g, 0.6e-7);
        check(got.exp(), alpha, 0.6e-7);
        assert!((got.exp() - softplus_form).abs() > 0.1, "the table tells the two forms apart");
    };
    row(0.0, 0.0, -2.5, 0.082_085_0, 0.5);
    row(0.0, 1.0, -3.655_292_9, 0.025_853_9, 0.268_941_4);
    row(1.0, -2.0, -0.021_677_7, 0.978_555_6, 0.708_202_0);
    row(std::f64::consts::LN_2, -1.5, -0.237_129_4, 0.788_889_2, 0.668_424_0);
}

#[test]
fn kda_decay_stays_between_its_bounds() {
    for (z, g) in [(f64::MAX, -5.0), (1e4, -5.0), (-1e4, 0.0), (f64::MIN, 0.0)] {
        assert_eq!(kda_log_decay(z, 0.3, -5.0), g);
    }
    // An input that overflowed is not a decay at its bound.
    assert!(kda_log_decay(f64::INFINITY, 0.3, -5.0).is_nan());
    assert!(kda_log_decay(f64::NEG_INFINITY, 0.3, -5.0).is_nan());
}

/// 8.1, with the column of the wrong form: sigmoid of the capped gate.
#[test]
fn situ() {
    let row = |g: f64, u: f64, act: f64, of_capped_gate: f64| {
        let got = situ_glu(g, u, 4.0, 25.0);
        check(got / act, 1.0, 4e-15);
        let capped = 4.0 * (g / 4.0).tanh();
        check(capped * sigmoid(capped) * 25.0 * (u / 25.0).tanh(), of_capped_gate, 0.6e-5);
        assert!((got - of_capped_gate).abs() > 1e-3, "the table tells the two forms apart");
    };
    row(1.0, 1.0, 0.715_817_828_074_840_4, 0.71189);
    row(4.0, 25.0, 56.959_319_511_084_34, 55.37075);
    row(-1.0, 2.0, -0.525_828_895_514_303, -0.53368);
    row(100.0, 100.0, 99.932_929_973_906_71, 98.13552);
    row(-100.0, 100.0, -3.717_580_920_093_028e-42, -1.79741);
}

/// 4 and 8.2: what no config says.
#[test]
fn epsilons() {
    assert_eq!((LORA_NORM_EPS, L2_NORM_EPS, INDEX_NORM_EPS, ROUTER_SUM_EPS), (1e-6, 1e-6, 1e-6, 1e-20));
}

#[test]
fn small_functions() {
    assert_eq!((relu(-1.0), relu(-0.0), relu(2.0)), (0.0, 0.0, 2.0));
    assert!(relu(f64::NAN).is_nan(), "a NaN is handed on, not hidden");
    assert_eq!((sigmoid(0.0), sigmoid(f64::INFINITY), sigmoid(f64::NEG_INFINITY)), (0.5, 1.0, 0.0));
    assert_eq!((silu(0.0), silu(-800.0)), (0.0, 0.0));
}

#[test]
fn weights_of_experts() {
    let scores = [0.75, 0.5, 0.25];
    assert_eq!(router_weights(&scores, false, 1.0), scores);
    assert_eq!(router_weights(&scores, true, 1.0), [0.5, 1.0 / 3.0, 1.0 / 6.0]);
    assert_eq!(router_weights(&scores, true, 3.0), [1.5, 1.0, 0.5]);
    assert_eq!(router_weights(&scores, false, 2.0), [1.5, 1.0, 0.5]);
    // A single expert is not renormalised.
    assert_eq!(router_weights(&[0.25], true, 2.0), [0.5]);
    assert_eq!(router_weights(&[0.0, 0.0], true, 1.0), [0.0, 0.0]);
}

#[test]
fn selections_are_total_orders() {
    let experts = |biased: &[f32], k| select_experts(biased, k);
    assert_eq!(experts(&[0.1, 0.3, 0.3, 0.2], 3), Some(vec![1, 2, 3]));
    assert_eq!(experts(&[0.3; 4], 2), Some(vec![0, 1]));
    assert_eq!(experts(&[-0.0, 0.0, -0.0, -1.0], 3), Some(vec![0, 1, 2]));
    assert_eq!(experts(&[0.1, 0.2], 2), Some(vec![1, 0]));
    assert_eq!(experts(&[0.1, f32::NAN], 1), None);
    assert_eq!(experts(&[0.1, f32::INFINITY], 1), None);
    assert_eq!(experts(&[0.1, 0.2], 0), Some(vec![]));

    assert_eq!(select_keys(&[f32::NAN, 1.0], 1), None);
    // Also where all would be kept: the score is lost either way.
    assert_eq!(select_keys(&[f64::NAN, 1.0], 2), None);
    assert_eq!(select_keys(&[f32::INFINITY, 1.0, f32::INFINITY], 1), None);
    assert_eq!(select_keys::<f32>(&[], 3), Some(vec![]));
    assert_eq!(select_keys(&[1.0f32], 0), Some(vec![]));

    assert_eq!(argmax(&[0.0, 2.0, 2.0]), Some(1));
    assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
    assert_eq!(argmax(&[f32::NAN, -3.0]), Some(1));
    assert_eq!((argmax(&[f32::NAN]), argmax(&[])), (None, None));
}

/// Against a sort by the definition, with ties, zeros of both signs, and scores that differ in their last bits only.
#[test]
fn keys_are_those_of_a_sort() {
    fn by_sort(scores: &[f64], k: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|&a, &b| scores[b as usize].partial_cmp(&scores[a as usize]).unwrap().then(a.cmp(&b)));
        order.truncate(k);
        let Some(theta) = order.last().map(|&last| scores[last as usize]) else { return order };
        order.sort_by_key(|&i| (scores[i as usize] == theta, i));
        order
    }
    let mut state = 7_u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for kind in 0..6 {
        for n in [1, 2, 3, 33, 500, 3000] {
            let scores: Vec<f32> = (0..n)
                .map(|_| match kind {
                    0 => next(1 << 30) as f32 * 1e-6 - 500.0,
                    1 => next(5) as f32 - 2.0,
                    2 => [0.0, -0.0, 1e-45, -1e-45][next(4) as usize],
                    3 => f32::from_bits(1.5_f32.to_bits() + next(40) as u32),
                    4 => -f32::from_bits(next(0x7f80_0000) as u32),
                    _ => 3.0,
                })
                .collect();
            let wide: Vec<f64> = scores.iter().map(|&s| f64::from(s)).collect();
            for k in [0, 1, 2, n / 3, n / 2, n - 1, n, n + 1] {
                let want = if k < n { by_sort(&wide, k) } else { (0..n as u32).collect() };
                assert_eq!(select_keys(&scores, k).as_ref(), Some(&want), "kind {kind}, {k} of {n}");
                assert_eq!(select_keys(&wide, k), Some(want), "kind {kind}, {k} of {n}");
            }
        }
    }
}
