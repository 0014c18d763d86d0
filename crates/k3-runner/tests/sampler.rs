//! Sampling: ranges, cuts, and the same text for the same seed.

use k3_runner::{Sampler, Sampling, SamplingError};

/// Probabilities 0.5, 0.25, 0.125, 0.125 at temperature 1, not in order.
fn logits() -> Vec<f32> {
    [0.125f32, 0.5, 0.125, 0.25].map(f32::ln).to_vec()
}

/// How often each of the four tokens comes in `n` draws.
fn counts(sampling: Sampling, n: usize) -> [usize; 4] {
    let mut sampler = Sampler::new(sampling, vec![]).unwrap();
    let mut counts = [0; 4];
    for _ in 0..n {
        counts[sampler.sample(&logits()).unwrap() as usize] += 1;
    }
    counts
}

fn all() -> Sampling {
    Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 }
}

#[test]
fn draws_follow_the_probabilities() {
    let n = 20_000;
    for (found, expected) in counts(all(), n).into_iter().zip([0.125, 0.5, 0.125, 0.25]) {
        let found = found as f64 / n as f64;
        // Five standard deviations of a fair draw.
        assert!((found - expected).abs() < 5.0 * (expected * (1.0 - expected) / n as f64).sqrt(), "{found}");
    }
}

#[test]
fn each_cut_keeps_what_it_says() {
    let kept = |sampling| counts(sampling, 2000).map(|c| c > 0);
    assert_eq!(kept(all()), [true; 4]);
    assert_eq!(kept(Sampling { top_k: 1, ..all() }), [false, true, false, false]);
    // Among equals the lower id ranks first.
    assert_eq!(kept(Sampling { top_k: 3, ..all() }), [true, true, false, true]);
    assert_eq!(kept(Sampling { top_p: 0.5, ..all() }), [false, true, false, false]);
    assert_eq!(kept(Sampling { top_p: 0.6, ..all() }), [false, true, false, true]);
    assert_eq!(kept(Sampling { min_p: 0.4, ..all() }), [false, true, false, true]);
    assert_eq!(kept(Sampling { min_p: 1.0, ..all() }), [false, true, false, false]);
    assert_eq!(kept(Sampling { temperature: 1e-3, ..all() }), [false, true, false, false]);
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let mut sampler = Sampler::new(Sampling::greedy(), vec![]).unwrap();
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
    assert_eq!(sampler.sample(&[-0.0, 0.0]).unwrap(), 0);
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let draw = |seed| {
        let mut sampler = Sampler::new(Sampling { seed, ..all() }, vec![]).unwrap();
        (0..50).map(|_| sampler.sample(&logits()).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[test]
fn suppressed_and_non_finite_tokens_never_come() {
    let mut sampler = Sampler::new(Sampling::greedy(), vec![1]).unwrap();
    assert_eq!(sampler.sample(&logits()).unwrap(), 3);
    assert_eq!(sampler.sample(&[f32::NAN, 9.0, f32::INFINITY, -5.0]).unwrap(), 3);
    assert_eq!(sampler.sample(&[f32::NAN, 9.0]), Err(SamplingError::NothingLeft));
}

#[test]
fn values_that_mean_nothing_are_refused_by_name() {
    let refused = |sampling, field: &str| {
        let error = Sampler::new(sampling, vec![]).unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    };
    refused(Sampling { temperature: -1.0, ..all() }, "temperature");
    refused(Sampling { temperature: f32::NAN, ..all() }, "temperature");
    refused(Sampling { top_p: 0.0, ..all() }, "top_p");
    refused(Sampling { top_p: 1.5, ..all() }, "top_p");
    refused(Sampling { min_p: -0.1, ..all() }, "min_p");
}
