//! Scores of the indexer in 8 bits: the same bits on every instruction set, and intervals that hold.

use k3_quant::cpu::InstructionSet;
use k3_quant::cpu::index::{KeyCodes, QueryCodes};
use k3_quant::cpu::vector::{IndexHeads, Vectors};

/// Numbers in -0.5..0.5.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5
    }

    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale).collect()
    }
}

struct Case {
    dim: usize,
    q: Vec<f32>,
    weights: Vec<f32>,
    keys: Vec<f32>,
}

impl Case {
    fn random(heads: usize, dim: usize, keys: usize, scales: [f32; 3]) -> Self {
        let rng = &mut Random((heads * dim * keys) as u64);
        Self {
            dim,
            q: rng.values(heads * dim, scales[0]),
            weights: rng.values(heads, scales[1]),
            keys: rng.values(keys * dim, scales[2]),
        }
    }

    fn edit(mut self, edit: impl FnOnce(&mut Self)) -> Self {
        edit(&mut self);
        self
    }

    fn codes(&self) -> KeyCodes {
        let mut codes = KeyCodes::new(self.dim);
        self.keys.chunks_exact(self.dim).for_each(|key| codes.push(key));
        codes
    }

    fn query(&self, set: InstructionSet) -> Option<QueryCodes> {
        QueryCodes::new(Vectors::of(set), self.dim, &self.q, &self.weights)
            .filter(|query| query.serve(&self.codes()))
    }
}

/// Every f32 score lies in its interval, on every instruction set, which agree on it; gives the mean half width of the
/// intervals by the largest score.
#[track_caller]
fn check(case: &Case) -> f64 {
    let keys = case.codes();
    let n = keys.len();
    let mut scores = vec![0.0; n];
    let heads = IndexHeads::new(case.dim, &case.q, &case.weights);
    Vectors::default().index_scores(&heads, &case.keys, &mut scores);
    assert!(scores.iter().all(|s| s.is_finite()), "an overflow must be left to the f32 scores");
    let portable = InstructionSet::Portable;
    let query = case.query(portable).expect("numbers of this size have bounds");
    let mut approximate = vec![f32::NAN; n];
    query.scores(Vectors::of(portable), &keys, 0, &mut approximate);
    let (mut width, mut largest) = (0.0, 0.0_f64);
    for (i, (&score, &about)) in scores.iter().zip(&approximate).enumerate() {
        let (low, high) = query.interval(&keys, i, about);
        let score = f64::from(score) / query.unit();
        assert!(
            (f64::from(low)..=f64::from(high)).contains(&score),
            "key {i}: {score} not in {low}..={high}"
        );
        width += 0.5 * (f64::from(high) - f64::from(low)) / n as f64;
        largest = largest.max(score.abs());
    }
    for set in InstructionSet::available() {
        let other = case.query(set).unwrap();
        let mut got = vec![f32::NAN; n];
        other.scores(Vectors::of(set), &keys, 0, &mut got);
        assert!(got.iter().zip(&approximate).all(|(a, b)| a.to_bits() == b.to_bits()), "{set:?}");
        // A part of the keys, from any block on.
        if n > 40 {
            let mut part = vec![f32::NAN; n - 39];
            other.scores(Vectors::of(set), &keys, 32, &mut part);
            assert!(part.iter().zip(&got[32..]).all(|(a, b)| a.to_bits() == b.to_bits()), "{set:?}");
        }
        // Every key that reaches a score is among the candidates for it.
        for theta in scores.iter().step_by(n / 5 + 1) {
            let mut found = Vec::new();
            other.candidates(Vectors::of(set), &keys, 0, &got, other.threshold(*theta), &mut found);
            assert!(found.is_sorted());
            for i in (0..n).filter(|&i| scores[i] >= *theta) {
                assert!(found.binary_search(&(i as u32)).is_ok(), "{set:?}: key {i} reaches {theta}");
            }
        }
    }
    width / largest
}

#[test]
fn intervals_hold_at_any_size() {
    for (heads, dim) in [(1, 1), (1, 4), (2, 5), (3, 31), (8, 32), (9, 33), (32, 128), (33, 70), (4, 1024)] {
        for n in [1, 31, 32, 33, 300] {
            check(&Case::random(heads, dim, n, [1.0; 3]));
        }
    }
    // Far from 1: products and scales underflow, or come near to an overflow.
    for scales in [
        [1e-18, 1.0, 1e-18],
        [1e-30, 1e-3, 1e-10],
        [1e-33, 1.0, 1.0],
        [1.0, 1e-38, 1.0],
        [1.0, 1e-42, 1e3],
        [1.0, 1.0, 1e-38],
        [1.0, 1.0, 1e-42],
        [1e-20, 1.0, 1e-25],
        [1e15, 1e-3, 1e20],
        [1e30, 1.0, 1e3],
        [1.0, 1e9, 1e25],
    ] {
        check(&Case::random(7, 40, 90, scales));
    }
}

#[test]
fn intervals_hold_for_odd_keys() {
    let case = || Case::random(12, 64, 200, [1.0; 3]);
    // One column of a key, or of a head, above all others.
    check(&case().edit(|c| c.keys.iter_mut().step_by(64).for_each(|k| *k *= 1e4)));
    check(&case().edit(|c| c.q.iter_mut().step_by(64).for_each(|q| *q *= 1e4)));
    // Keys between which are all magnitudes, zeros among them.
    check(&case().edit(|c| {
        for (i, key) in c.keys.chunks_exact_mut(64).enumerate() {
            let scale = if i % 7 == 0 { 0.0 } else { 10.0_f32.powi(i as i32 % 71 - 45) };
            key.iter_mut().for_each(|k| *k *= scale);
        }
    }));
    // Heads that are equal, with weights of one sign: errors add up; opposite, they cancel.
    let same = |c: &mut Case| (0..12).for_each(|h| c.q.copy_within(0..64, h * 64));
    let equal = check(&case().edit(|c| {
        same(c);
        c.weights.fill(0.3);
    }));
    assert!(equal > 1e-3);
    check(&case().edit(|c| {
        same(c);
        c.weights.iter_mut().enumerate().for_each(|(h, w)| *w = if h % 2 == 0 { 1.0 } else { -1.0 });
    }));
    // Codes at the ends of their range only.
    check(&case().edit(|c| {
        c.keys.iter_mut().chain(&mut c.q).for_each(|x| *x = x.signum());
    }));
    // As far from any code as can be.
    check(&case().edit(|c| {
        for x in c.keys.chunks_exact_mut(64).chain(c.q.chunks_exact_mut(64)) {
            x.iter_mut().for_each(|x| *x = ((*x * 100.0).trunc() + 0.5) / 127.0);
            x[0] = 1.0;
        }
    }));
    // Some weights, and some heads, are zero.
    check(&case().edit(|c| {
        c.weights.iter_mut().step_by(3).for_each(|w| *w = 0.0);
        c.q[64..128].fill(0.0);
    }));
}

/// At the released sizes intervals are narrow: what is not among the best can be told.
#[test]
fn intervals_are_narrow() {
    let width = check(&Case::random(32, 128, 4000, [1.0; 3]));
    assert!(width < 0.1, "{width}");
}

#[test]
fn what_has_no_bounds() {
    let refused = |edit: fn(&mut Case)| {
        let case = Case::random(3, 8, 40, [1.0; 3]).edit(edit);
        for set in InstructionSet::available() {
            assert!(case.query(set).is_none());
        }
    };
    refused(|c| c.q[3] = f32::NAN);
    refused(|c| c.q[3] = f32::INFINITY);
    refused(|c| c.weights[1] = f32::NEG_INFINITY);
    refused(|c| c.weights[1] = f32::NAN);
    refused(|c| c.weights.fill(0.0));
    refused(|c| c.q.fill(0.0));
    refused(|c| c.q.fill(1e-40));
    refused(|c| c.keys[17] = f32::NAN);
    refused(|c| c.keys[17] = f32::INFINITY);
    refused(|c| c.keys[17] = 1e38);
    refused(|c| {
        c.q[0] = 1e20;
        c.keys[0] = 1e20;
    });
    refused(|c| {
        c.weights[0] = 1e38;
        c.q[0] = 100.0;
    });
    assert!(QueryCodes::new(Vectors::of(InstructionSet::Portable), 0, &[], &[1.0]).is_none());
    assert!(QueryCodes::new(Vectors::of(InstructionSet::Portable), 1025, &[1.0; 1025], &[1.0]).is_none());
}

#[test]
fn bytes_of_keys() {
    assert_eq!([0, 1, 4, 128].map(KeyCodes::bytes_per_key), [12, 16, 16, 140]);
}
