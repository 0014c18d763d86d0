//! What the router and the sum over experts promise beyond closeness, on both devices.

use k3_graph::device::RouterRule;
use k3_graph::{Device, Reference, Routing};

use crate::support::cpu;

const RULE: RouterRule =
    RouterRule { experts_per_token: 2, renormalize: true, scaling_factor: 1.0, top_p: None };

fn route<D: Device>(device: &D, logits: &[f32], bias: &[f32], rule: RouterRule) -> Routing {
    let logits = device.upload(bias.len(), logits).unwrap();
    device.route(&logits, &device.load_vector(bias).unwrap(), rule).unwrap()
}

/// The routing of some rows on both devices: the same ids, weights within `1e-6`.
#[track_caller]
fn check(logits: &[f32], bias: &[f32], rule: RouterRule, ids: &[u32], weights: &[f64]) {
    for routing in [route(&Reference, logits, bias, rule), route(&cpu(), logits, bias, rule)] {
        assert_eq!(routing.ids, ids);
        assert!(routing.non_finite.is_empty());
        assert_eq!(routing.weights.len(), weights.len());
        for (got, want) in routing.weights.iter().zip(weights) {
            assert!((got - want).abs() <= 1e-6, "{:?} against {weights:?}", routing.weights);
        }
    }
}

/// `sigmoid(LN_3)` is 3/4, `sigmoid(0)` 1/2, `sigmoid(-LN_3)` 1/4.
const LN_3: f32 = 1.098_612_3;

#[test]
fn ties_go_to_the_lowest_id() {
    check(&[0.0; 5], &[0.0; 5], RULE, &[0, 1], &[0.5, 0.5]);
    check(&[-LN_3, 0.0, -LN_3, 0.0, 0.0], &[0.0; 5], RULE, &[1, 3], &[0.5, 0.5]);
    check(&[0.0, -LN_3, LN_3, -LN_3], &[0.0; 4], RULE, &[2, 0], &[0.6, 0.4]);
}

#[test]
fn zeros_of_either_sign_are_equal() {
    // A sigmoid of this is +0, to which the biases are added.
    let ties = [f32::MIN; 4];
    check(&ties, &[-0.0, 0.0, -0.0, 0.0], RULE, &[0, 1], &[0.0, 0.0]);
    check(&ties, &[0.0, -0.0, 0.0, -0.0], RULE, &[0, 1], &[0.0, 0.0]);
    check(&[-0.0, 0.0, -0.0], &[0.0, -0.0, 0.0], RULE, &[0, 1], &[0.5, 0.5]);
}

/// An infinite logit is an overflow, although its sigmoid is finite.
#[test]
fn infinite_logits_are_lost() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let logits = [0.0, bad, 1.0, 0.0, 0.5, 1.0];
        assert_eq!(route(&Reference, &logits, &[0.0; 3], RULE).non_finite, [0]);
        assert_eq!(route(&cpu(), &logits, &[0.0; 3], RULE).non_finite, [0]);
    }
}

/// BF16 has a step of `2^-8` here and would take expert 1.
#[test]
fn selection_in_full_precision() {
    let rule = RouterRule { experts_per_token: 1, ..RULE };
    let step = 2f32.powi(-12);
    check(&[0.0; 4], &[-1.0, 0.75, 0.75 + step, 0.0], rule, &[2], &[0.5]);
    check(&[-1.0, 1.0, 1.0 + step, 0.0], &[0.0; 4], rule, &[2], &[0.731_106]);
    // The same distance, the other way round.
    check(&[0.0; 4], &[-1.0, 0.75 + step, 0.75, 0.0], rule, &[1], &[0.5]);
}

#[test]
fn bias_selects_but_does_not_weigh() {
    let logits = [LN_3, 0.0, -LN_3];
    check(&logits, &[0.0; 3], RULE, &[0, 1], &[0.6, 0.4]);
    check(&logits, &[0.0, 0.0, 0.9], RULE, &[2, 0], &[0.25, 0.75]);
    check(&logits, &[-5.0, 0.0, 0.0], RULE, &[1, 2], &[2.0 / 3.0, 1.0 / 3.0]);
}

#[test]
fn renormalisation_and_scaling_factor() {
    let logits = [LN_3, 0.0, -LN_3];
    let plain = RouterRule { renormalize: false, ..RULE };
    check(&logits, &[0.0; 3], plain, &[0, 1], &[0.75, 0.5]);
    check(&logits, &[0.0; 3], RouterRule { scaling_factor: 2.5, ..plain }, &[0, 1], &[1.875, 1.25]);
    check(&logits, &[0.0; 3], RouterRule { scaling_factor: 2.5, ..RULE }, &[0, 1], &[1.5, 1.0]);
    // One expert keeps its score: there is nothing to renormalise.
    let one = RouterRule { experts_per_token: 1, scaling_factor: 2.0, ..RULE };
    check(&logits, &[0.0; 3], one, &[0], &[1.5]);
}

#[test]
fn gap_to_the_next_expert() {
    fn check<D: Device>(device: &D) {
        let logits = [LN_3, 0.0, -LN_3, 0.0, 0.0, 0.0];
        let routing = route(device, &logits, &[0.0, 0.0, 0.125], RULE);
        assert_eq!(routing.ids, [0, 1, 2, 0]);
        for (got, want) in routing.gaps.iter().zip([0.125, 0.0]) {
            assert!((got - want).abs() < 1e-7, "{:?}", routing.gaps);
        }
        let all = RouterRule { experts_per_token: 3, ..RULE };
        let routing = route(device, &logits, &[0.0, 0.0, 0.125], all);
        assert_eq!((routing.ids, routing.gaps), (vec![0, 1, 2, 2, 0, 1], vec![f64::INFINITY; 2]));
    }
    check(&Reference);
    check(&cpu());
}

#[test]
fn a_lost_row_leaves_the_others() {
    fn check<D: Device>(device: &D) {
        let (clean, bias) = ([LN_3, 0.0, -LN_3], [0.0; 3]);
        let alone = route(device, &clean, &bias, RULE);
        let rows = [&clean[..], &[0.0, f32::NAN, 1.0], &clean].concat();
        let routing = route(device, &rows, &bias, RULE);
        assert_eq!(routing.non_finite, [1]);
        for row in [0, 2] {
            assert_eq!(routing.ids[row * 2..row * 2 + 2], alone.ids);
            assert_eq!(routing.weights[row * 2..row * 2 + 2], alone.weights);
            assert_eq!(routing.gaps[row], alone.gaps[0]);
        }
        assert!(routing.weights[2..4].iter().all(|w| w.is_nan()), "a lost row cannot look like a result");
        // A NaN bias is everyone's.
        assert_eq!(route(device, &clean, &[0.0, 0.0, f32::NAN], RULE).non_finite, [0]);
    }
    check(&Reference);
    check(&cpu());
}

/// In f32 `2^25 + 1 - 2^25` is 0 and `2^25 - 2^25 + 1` is 1.
#[test]
fn experts_are_summed_in_rank_order() {
    let (big, device) = (2f32.powi(25), cpu());
    let sum = |values: [f32; 3]| {
        let outputs = device.upload(1, &values).unwrap();
        let routing = Routing {
            experts_per_token: 3,
            // Ids in another order than ranks.
            ids: vec![2, 0, 1],
            weights: vec![1.0; 3],
            used: Vec::new(),
            runner_ups: Vec::new(),
            gaps: vec![0.0],
            non_finite: Vec::new(),
        };
        device.download(&device.expert_sum(&outputs, &routing).unwrap()).unwrap()
    };
    assert_eq!(sum([big, 1.0, -big]), [0.0]);
    assert_eq!(sum([big, -big, 1.0]), [1.0]);
    assert_eq!(sum([1.0, big, -big]), [0.0]);
}

/// Scores 3/4, 1/2, 1/4 and 1/5: shares of all .441, .294, .147 and .118, summing to .441, .735, .882 and 1.
#[test]
fn top_p_keeps_the_first_experts_and_their_sum() {
    const LN_4: f32 = 1.386_294_4;
    let logits = [-LN_4, LN_3, -LN_3, 0.0];
    let check = |p: f64, expected: &[f64]| {
        let rule = RouterRule { experts_per_token: 4, scaling_factor: 2.5, top_p: Some(p), ..RULE };
        let expected: Vec<f64> = expected.iter().map(|w| w * 2.5).collect();
        check(&logits, &[0.0; 4], rule, &[1, 3, 2, 0], &expected);
        let used = expected.iter().filter(|w| **w > 0.0).count();
        for routing in [route(&Reference, &logits, &[0.0; 4], rule), route(&cpu(), &logits, &[0.0; 4], rule)]
        {
            assert_eq!((routing.used(0), routing.used.as_slice()), (used, &[used][..]), "{p}");
            let sum: f64 = routing.weights.iter().sum();
            assert!((sum - 2.5).abs() < 1e-12, "{p}: {sum}");
        }
    };
    check(1e-9, &[1.0, 0.0, 0.0, 0.0]);
    check(0.44, &[1.0, 0.0, 0.0, 0.0]);
    check(0.45, &[0.6, 0.4, 0.0, 0.0]);
    check(0.74, &[0.5, 1.0 / 3.0, 1.0 / 6.0, 0.0]);
    check(0.89, &[0.75 / 1.7, 0.5 / 1.7, 0.25 / 1.7, 0.2 / 1.7]);
    // All, with the bits of no top-p at all.
    let all = RouterRule { experts_per_token: 4, ..RULE };
    let whole = RouterRule { top_p: Some(1.0), ..all };
    for bias in [[0.0; 4], [0.9, 0.0, -0.3, 0.4]] {
        let (off, on) = (route(&cpu(), &logits, &bias, all), route(&cpu(), &logits, &bias, whole));
        assert_eq!((on.ids, on.weights, on.used), (off.ids, off.weights, vec![4]));
    }
}

/// Scores may underflow, and rows may be lost.
#[test]
fn top_p_of_rows_without_scores() {
    let rule = RouterRule { top_p: Some(0.5), ..RULE };
    let logits = [f32::MIN, f32::MIN, f32::MIN, 0.0, f32::NAN, 0.0, LN_3, 0.0, -LN_3];
    for routing in [route(&Reference, &logits, &[0.0; 3], rule), route(&cpu(), &logits, &[0.0; 3], rule)] {
        assert_eq!((routing.used.as_slice(), routing.non_finite.as_slice()), (&[2, 2, 1][..], &[1][..]));
        assert_eq!(routing.weights[..2], [0.0; 2]);
    }
}
