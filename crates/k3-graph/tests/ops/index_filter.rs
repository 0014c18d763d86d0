//! Selections that go by scores in 8 bits first are those by the f32 scores of all keys.

use k3_format::IndexerConfig;
use k3_graph::device::{IndexQuery, SequenceRows, StateTensor, StateValues};
use k3_graph::{Cpu, Device, IndexFilter, Selected};

use crate::NARROW_MLA;
use crate::support::Lcg;

/// Keys of some sequences and queries of the last tokens of each.
struct Case {
    config: IndexerConfig,
    /// Of each sequence `[keys, head_dim]`, and how many of its tokens ask.
    sequences: Vec<(Vec<f32>, usize)>,
    q: Vec<f32>,
    weights: Vec<f32>,
}

impl Case {
    /// `sequences` gives keys and rows of each.
    fn random(n_heads: usize, head_dim: usize, topk: usize, sequences: &[(usize, usize)]) -> Self {
        let rng = &mut Lcg::new((n_heads * head_dim + topk) as u64);
        let rows: usize = sequences.iter().map(|(_, rows)| rows).sum();
        Self {
            config: IndexerConfig { n_heads, head_dim, topk },
            sequences: sequences
                .iter()
                .map(|&(keys, rows)| (rng.values(keys * head_dim, 1.0), rows))
                .collect(),
            q: rng.values(rows * n_heads * head_dim, 1.0),
            weights: rng.values(rows * n_heads, 1.0),
        }
    }

    fn edit(mut self, edit: impl FnOnce(&mut Self)) -> Self {
        edit(&mut self);
        self
    }

    fn keys(mut self, edit: impl Fn(usize, &mut [f32])) -> Self {
        for (keys, _) in &mut self.sequences {
            keys.chunks_exact_mut(self.config.head_dim).enumerate().for_each(|(i, key)| edit(i, key));
        }
        self
    }

    fn select(&self, device: &Cpu) -> Vec<Selected> {
        let dim = self.config.head_dim;
        let mut states: Vec<_> = self
            .sequences
            .iter()
            .map(|(keys, _)| {
                let tokens = keys.len() / dim;
                let part = |name, width, values: Vec<f32>| StateTensor {
                    name,
                    shape: vec![tokens, width],
                    values: StateValues::F32(values),
                };
                let parts = [
                    part("latent", 1, vec![0.0; tokens]),
                    part("extra_key", 1, vec![0.0; tokens]),
                    part("index_key", dim, keys.clone()),
                ];
                device.import_mla(&NARROW_MLA, Some(&self.config), tokens, &parts).unwrap()
            })
            .collect();
        let mut first = 0;
        let states: Vec<_> = states
            .iter_mut()
            .zip(&self.sequences)
            .map(|(state, (keys, rows))| {
                let position = keys.len() / dim - rows;
                first += rows;
                SequenceRows { state, rows: first - rows..first, position }
            })
            .collect();
        let q = device.upload(self.config.n_heads * dim, &self.q).unwrap();
        let weights = device.upload(self.config.n_heads, &self.weights).unwrap();
        let query = IndexQuery { config: &self.config, q: &q, weights: &weights };
        device.index_select(query, &states).unwrap().rows
    }
}

/// Gives what is selected.
#[track_caller]
fn check(case: &Case) -> Vec<Selected> {
    let device = |threads, filter| Cpu::new(threads).unwrap().with_index_filter(filter);
    let want = case.select(&device(1, IndexFilter::Never));
    for filter in [IndexFilter::Always, IndexFilter::WhereItPays] {
        assert!(case.select(&device(1, filter)) == want, "{filter:?}");
        for threads in [2, 3] {
            assert!(
                case.select(&device(threads, filter).sharing_everything()) == want,
                "{filter:?}, {threads}"
            );
        }
    }
    want
}

#[test]
fn any_geometry() {
    for (heads, dim) in [(1, 1), (1, 5), (3, 37), (4, 16), (9, 64), (32, 128), (33, 24)] {
        for k in [1, 10, 33, 200] {
            check(&Case::random(heads, dim, k, &[(k + 1, 1)]));
            check(&Case::random(heads, dim, k, &[(300, 1)]));
            check(&Case::random(heads, dim, k, &[(300, 40)]));
            check(&Case::random(heads, dim, k, &[(65, 1), (7, 7), (1100, 5), (230, 1)]));
        }
    }
    // Long enough to pay; more keys than a tile holds, at its ends, and for rows that end before others.
    for rows in [1, 2, 9, 31] {
        for keys in [4096, 5119, 5121, 20_000] {
            check(&Case::random(2, 8, 100, &[(keys, rows)]));
        }
    }
    check(&Case::random(2, 8, 100, &[(9000, 3), (50, 2), (100, 1), (7000, 4)]));
    check(&Case::random(2, 8, 1200, &[(4700, 1), (4801, 1), (4900, 8)]));
}

#[test]
fn ties() {
    let case = || Case::random(4, 8, 50, &[(700, 3), (5000, 12)]);
    let small = |x: &mut f32| *x = (*x * 2.0).round();
    // Integers, of which many keys have the same score.
    check(&case().keys(|_, key| key.iter_mut().for_each(small)).edit(|c| {
        c.q.iter_mut().for_each(small);
        c.weights.iter_mut().for_each(small);
    }));
    // The best are among copies of few keys.
    check(
        &case()
            .keys(|i, key| key.iter_mut().enumerate().for_each(|(c, k)| *k = (i * i % 7 + c) as f32 - 5.0)),
    );
    // All keys are equal, or zero: the first ones win.
    let first: Vec<u32> = (0..50).collect();
    let equal = [check(&case().keys(|_, key| key.fill(0.7))), check(&case().keys(|_, key| key.fill(0.0)))];
    assert!(equal.iter().flatten().all(|selected| *selected == Selected::Keys(first.clone())));
    // No head likes any key: every score is zero, of either sign.
    check(&case().keys(|_, key| key.iter_mut().for_each(|k| *k = -k.abs())).edit(|c| {
        c.q.iter_mut().for_each(|q| *q = q.abs());
    }));
    check(&case().edit(|c| c.weights.fill(0.0)));
    check(&case().edit(|c| c.weights.iter_mut().for_each(|w| *w = -w.abs())));
    // Scores that differ in their last bits only.
    check(&case().keys(|i, key| {
        let step = 1.0 + (i * 31 % 64) as f32 * f32::EPSILON;
        key.iter_mut().enumerate().for_each(|(c, k)| *k = (0.3 + c as f32) * step);
    }));
}

#[test]
fn sizes() {
    let case = || Case::random(5, 12, 40, &[(600, 2), (4500, 9)]);
    let scaled = |q: f32, w: f32, k: f32| {
        case().keys(move |_, key| key.iter_mut().for_each(|x| *x *= k)).edit(|c| {
            c.q.iter_mut().for_each(|x| *x *= q);
            c.weights.iter_mut().for_each(|x| *x *= w);
        })
    };
    for (q, w, k) in
        [(1e-20, 1.0, 1e-20), (1e-40, 1.0, 1.0), (1.0, 1e-42, 1.0), (1.0, 1.0, 1e-43), (1e10, 1e10, 1e10)]
    {
        check(&scaled(q, w, k));
    }
    // Keys of very different lengths, the long ones few, many, or last.
    check(&case().keys(|i, key| key.iter_mut().for_each(|k| *k *= 10.0_f32.powi((i * 7 % 60) as i32 - 40))));
    check(&case().keys(|i, key| key.iter_mut().for_each(|k| *k *= if i % 100 == 99 { 1e6 } else { 1.0 })));
    check(&case().keys(|i, key| key.iter_mut().for_each(|k| *k *= if i < 30 { 1e12 } else { 1e-3 })));
    check(&case().keys(|_, key| key[3] *= 1e5));
}

/// What is not finite is found by rows that see it, whatever else their keys hold.
#[test]
fn non_finite() {
    let case = || Case::random(3, 8, 20, &[(4400, 40)]);
    let lost = |case: &Case| check(case).iter().filter(|s| **s == Selected::NonFinite).count();
    assert_eq!(lost(&case()), 0);
    assert_eq!(lost(&case().edit(|c| c.q[8 * 3 * 5] = f32::NAN)), 1);
    assert_eq!(lost(&case().edit(|c| c.weights[3 * 11 + 1] = f32::INFINITY)), 1);
    // The last 10 tokens see a key with a NaN.
    assert_eq!(lost(&case().keys(|i, key| key[2] = if i == 4390 { f32::NAN } else { key[2] })), 10);
    // The scores of one key overflow, whose elements do not.
    let huge = case()
        .keys(|i, key| {
            if i == 100 {
                key.fill(3e38);
            }
        })
        .edit(|c| c.q.iter_mut().for_each(|q| *q *= 1e3));
    assert!(lost(&huge) > 30);
}
