//! The vector loops: the same bits on every instruction set, and what plain f64 loops give.

#[path = "support/lcg.rs"]
mod lcg;

use k3_quant::bf16;
use k3_quant::cpu::InstructionSet;
use k3_quant::cpu::vector::{DeltaToken, IndexHeads, VALUE_LANES, Vectors};

use lcg::Lcg;

/// Numbers in -0.5..0.5, times `scale`.
fn random(rng: &mut Lcg, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|_| 0.5 * rng.unit() * scale).collect()
}

/// What `run` gives on the portable loops, after a check that all instruction sets give the same bits.
#[track_caller]
fn on_all_sets(run: impl Fn(Vectors) -> Vec<f32>) -> Vec<f32> {
    let portable = run(Vectors::of(InstructionSet::Portable));
    for set in InstructionSet::available() {
        for (i, (got, want)) in run(Vectors::of(set)).iter().zip(&portable).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{set:?}, value {i}: {got}, portable {want}");
        }
    }
    portable
}

/// `bound` times the largest value is allowed.
#[track_caller]
fn check(got: &[f32], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0_f64, |max, w| max.max(w.abs()));
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound * largest, "value {i}: {got}, expected {want}");
    }
}

fn f64s(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn plain_dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

const LENGTHS: [usize; 12] = [0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 130, 1000];

#[test]
fn dots() {
    for n in LENGTHS {
        let rng = &mut Lcg(n as u64);
        let (a, b) = (random(rng, n, 1.0), random(rng, n, 1.0));
        check(&on_all_sets(|v| vec![v.dot(&a, &b)]), &[plain_dot(&a, &b)], 1e-4);
        let sum = on_all_sets(|v| vec![v.square_sum(&a) as f32]);
        check(&sum, &[plain_dot(&a, &a)], 1e-7);
        for (m, rows) in [(1, 1), (1, 5), (4, 2), (5, 3), (9, 7)] {
            let (x, y) = (random(rng, m * n, 1.0), random(rng, rows * n, 1.0));
            let y: Vec<&[f32]> = (0..rows).map(|i| &y[i * n..(i + 1) * n]).collect();
            let got = on_all_sets(|v| {
                let mut out = vec![f32::NAN; m * rows];
                v.dots(n, &x, &y, &mut out);
                out
            });
            // Each dot is what it is alone.
            for i in 0..m {
                for j in 0..rows {
                    let alone = Vectors::default().dot(&x[i * n..(i + 1) * n], y[j]);
                    assert_eq!(got[i * rows + j].to_bits(), alone.to_bits());
                }
            }
        }
    }
}

#[test]
fn sums_of_rows() {
    for n in LENGTHS {
        for (m, depth) in [(1, 1), (4, 3), (5, 64), (11, 2)] {
            let rng = &mut Lcg(n as u64);
            let (a, b, start) =
                (random(rng, m * depth, 1.0), random(rng, depth * n, 1.0), random(rng, m * n, 1.0));
            let rows: Vec<&[f32]> = (0..depth).map(|k| &b[k * n..(k + 1) * n]).collect();
            let got = on_all_sets(|v| {
                let mut out = start.clone();
                v.add_products(&a, &rows, &mut out);
                out
            });
            // The order is that of `k`, for every element.
            for (i, got) in got.iter().enumerate() {
                let (row, c) = (i / n, i % n);
                let want = (0..depth).fold(start[i], |sum, k| sum + a[row * depth + k] * b[k * n + c]);
                assert_eq!(got.to_bits(), want.to_bits());
            }
        }
        let rng = &mut Lcg(n as u64);
        let (x, y) = (random(rng, n, 1.0), random(rng, n, 1.0));
        let changed = |change: fn(Vectors, &[f32], &mut [f32])| {
            on_all_sets(|v| {
                let mut y = y.clone();
                change(v, &x, &mut y);
                y
            })
        };
        let each =
            |f: fn(f32, f32) -> f32| -> Vec<f32> { x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect() };
        assert_eq!(changed(Vectors::add), each(|x, y| y + x));
        assert_eq!(changed(|v, x, y| v.add_scaled(0.3, x, y)), each(|x, y| y + 0.3 * x));
        assert_eq!(changed(|v, x, y| v.scale(x, x, 0.7, y)), each(|x, _| x * (x * 0.7)));
    }
}

/// Arguments from all over the range of f32, of both signs.
fn arguments() -> Vec<f32> {
    let mut x =
        vec![0.0, -0.0, f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::MIN, 87.0, -87.0, 103.0, -104.0, 300.0];
    for exponent in -30..8 {
        for i in 0..40 {
            let magnitude = 2.0_f32.powi(exponent) * (1.0 + i as f32 / 40.0);
            x.extend([magnitude, -magnitude]);
        }
    }
    x
}

/// To the neighbour of the nearest f32 at most.
#[track_caller]
fn check_functions(arguments: &[f32], got: &[f32], function: impl Fn(f64) -> f64) {
    for (&x, &got) in arguments.iter().zip(got) {
        let want = function(f64::from(x));
        let nearest = want as f32;
        let distance = i64::from(got.to_bits() & !(1 << 31)) - i64::from(nearest.to_bits() & !(1 << 31));
        let same_sign = got.is_sign_negative() == nearest.is_sign_negative() || got == 0.0;
        assert!(distance.abs() <= 1 && same_sign, "at {x}: {got}, expected {want}");
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[test]
fn gates() {
    let x = arguments();
    let ones = vec![1.0; x.len()];
    let got = on_all_sets(|v| {
        let mut y = ones.clone();
        v.sigmoid_gate(&mut y, &x);
        y
    });
    check_functions(&x, &got, sigmoid);

    for kernel in [1, 2, 4] {
        // Taps of which only the last is not zero: SiLU alone.
        let mut taps = vec![0.0; kernel * x.len()];
        taps[kernel - 1..].iter_mut().step_by(kernel).for_each(|t| *t = 1.0);
        let inputs: Vec<&[f32]> = (0..kernel).map(|_| &x[..]).collect();
        let got = on_all_sets(|v| {
            let mut y = ones.clone();
            v.convolve(&taps, &inputs, &mut y);
            y
        });
        check_functions(&x, &got, |x| x * sigmoid(x));
    }

    let zeros = vec![0.0; x.len()];
    for (rate, bound) in [(1.0, -5.0), (0.3, -2.0), (2.7, -80.0)] {
        let got = on_all_sets(|v| {
            let mut y = ones.clone();
            v.decay(&x, &zeros, rate, bound, &mut y);
            y
        });
        check_functions(&x, &got, |x| (bound * sigmoid(rate * x)).exp());
    }
}

#[test]
fn situ_glu() {
    let g = arguments();
    // A rotation: every gate meets another up.
    for turn in [0, 1, 77, 1000] {
        let up: Vec<f32> = (0..g.len()).map(|i| g[(i + turn) % g.len()]).collect();
        let got = on_all_sets(|v| {
            let mut y = g.clone();
            v.situ_glu(&mut y, &up, 4.0, 25.0);
            y
        });
        for ((&g, &u), &got) in g.iter().zip(&up).zip(&got) {
            let (x, y) = (f64::from(g), f64::from(u));
            let want = 4.0 * (x / 4.0).tanh() * sigmoid(x) * 25.0 * (y / 25.0).tanh();
            let error = (f64::from(got) - want).abs();
            let allowed = (want.abs() * 1.2e-7).max(f64::from(f32::from_bits(1)));
            assert!(error <= allowed, "{g}, {u}: {got}, expected {want}");
        }
    }
}

#[test]
fn softmaxes() {
    for n in LENGTHS.into_iter().skip(1) {
        let x = random(&mut Lcg(n as u64), n, 30.0);
        let got = on_all_sets(|v| {
            let mut x = x.clone();
            v.softmax(&mut x);
            x
        });
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = x.iter().map(|x| f64::from(x - max).exp()).collect();
        let sum: f64 = powers.iter().sum();
        check(&got, &powers.iter().map(|p| p / sum).collect::<Vec<_>>(), 3e-7);
    }
}

/// What is not finite in one place stays there, and comes out as what the scalar functions of the model give.
#[test]
fn values_that_are_not_finite() {
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let x = [1.0, bad[0], 2.0, bad[1], 3.0, bad[2]];
    let nan = on_all_sets(|v| {
        let mut y = [2.0; 6];
        v.sigmoid_gate(&mut y, &x);
        let mut gate = x;
        v.situ_glu(&mut gate, &[1.0; 6], 4.0, 25.0);
        let mut up = [1.0; 6];
        v.situ_glu(&mut up, &x, 4.0, 25.0);
        let mut alpha = [0.0; 6];
        v.decay(&x, &[0.5; 6], 1.0, -5.0, &mut alpha);
        [y, gate, up, alpha].concat().iter().map(|v| f32::from(v.is_nan())).collect()
    });
    assert_eq!(nan, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0].repeat(4));
    let silu = on_all_sets(|v| {
        let mut y = [0.0; 6];
        v.convolve(&[1.0; 6], &[&x], &mut y);
        y.map(|y| if y.is_nan() { -1.0 } else { y }).to_vec()
    });
    assert!(silu[1] == -1.0 && silu[3] == f32::INFINITY && silu[5] == -1.0);
    assert!(
        on_all_sets(|v| {
            let mut x = [1.0, f32::NAN, 0.0];
            v.softmax(&mut x);
            x.map(|x| f32::from(x.is_nan())).to_vec()
        })[1]
            == 1.0
    );
}

#[test]
fn bf16_values() {
    let x: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let got = on_all_sets(|v| {
        let mut out = vec![0.0; x.len()];
        v.add_weight_products(&[1.0], &[&x], &mut out);
        // NaN of any kind is as good.
        out.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect()
    });
    assert!(got.iter().zip(&x).all(|(got, x)| *got == x.to_f32() || got.is_nan() && x.is_nan()));
}

#[test]
fn products_with_stored_weights_are_those_with_their_values() {
    for n in LENGTHS.into_iter().chain([256, 300, 777]) {
        for (m, rows) in [(1, 1), (1, 9), (3, 64), (4, 5), (9, 7)] {
            let rng = &mut Lcg(n as u64);
            let weights: Vec<bf16> = random(rng, rows * n, 1.0).into_iter().map(bf16::from_f32).collect();
            let values: Vec<f32> = weights.iter().map(|w| w.to_f32()).collect();
            let stored: Vec<&[bf16]> = (0..rows).map(|i| &weights[i * n..(i + 1) * n]).collect();
            let decoded: Vec<&[f32]> = (0..rows).map(|i| &values[i * n..(i + 1) * n]).collect();
            let (x, y, start) =
                (random(rng, m * n, 1.0), random(rng, m * rows, 1.0), random(rng, m * n, 1.0));
            let got = on_all_sets(|v| {
                let (mut dots, mut sums) = (vec![f32::NAN; m * rows], start.clone());
                v.weight_dots(n, &x, &stored, &mut dots);
                v.add_weight_products(&y, &stored, &mut sums);
                [dots, sums].concat()
            });
            let (mut dots, mut sums) = (vec![f32::NAN; m * rows], start.clone());
            Vectors::default().dots(n, &x, &decoded, &mut dots);
            Vectors::default().add_products(&y, &decoded, &mut sums);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&[dots, sums].concat()), "{m} rows, {rows} of {n}");
        }
    }
}

/// A score of the indexer in the order of operations that its documentation gives.
fn index_score(q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    let mut score = 0.0;
    for (q, weight) in q.chunks_exact(key.len()).zip(weights) {
        let mut dot = 0.0;
        for (q, key) in q.chunks(32).zip(key.chunks(32)) {
            dot += q.iter().zip(key).fold(0.0, |sum, (q, k)| sum + q * k);
        }
        score += weight * if dot < 0.0 { 0.0 } else { dot };
    }
    score
}

#[test]
fn scores_of_an_indexer() {
    for (heads, dim) in [(1, 1), (4, 32), (5, 33), (32, 128), (3, 70), (16, 31), (17, 8), (33, 64), (64, 128)]
    {
        let rng = &mut Lcg(dim as u64);
        let (q, weights) = (random(rng, heads * dim, 1.0), random(rng, heads, 1.0));
        let n = 23;
        let keys = random(rng, n * dim, 1.0);
        let index_heads = IndexHeads::new(dim, &q, &weights);
        let got = on_all_sets(|v| {
            let mut out = vec![f32::NAN; n];
            v.index_scores(&index_heads, &keys, &mut out);
            out
        });
        let exact: Vec<f32> = keys.chunks_exact(dim).map(|key| index_score(&q, &weights, key)).collect();
        assert!(
            got.iter().zip(&exact).all(|(got, want)| got.to_bits() == want.to_bits()),
            "{heads} of {dim}"
        );
        let want: Vec<f64> = keys
            .chunks_exact(dim)
            .map(|key| {
                let heads = q.chunks_exact(dim).zip(&weights);
                heads.map(|(q, w)| f64::from(*w) * plain_dot(q, key).max(0.0)).sum()
            })
            .collect();
        check(&got, &want, 1e-6);
        let positions = [7, 0, 22, 22, 3, 11, 1];
        let some = on_all_sets(|v| {
            let mut out = vec![f32::NAN; positions.len()];
            v.index_scores_at(&index_heads, &keys, &positions, &mut out);
            out
        });
        assert!(some.iter().zip(positions).all(|(some, at)| some.to_bits() == got[at as usize].to_bits()));
    }
    // A NaN in a key is not taken for a score of 0, and only its own score is lost.
    let (dim, mut keys) = (3, vec![0.5; 3 * 32]);
    keys[3 * 7 + 1] = f32::NAN;
    let heads = IndexHeads::new(dim, &[1.0; 3], &[1.0]);
    let got = on_all_sets(|v| {
        let mut out = vec![0.0; 32];
        v.index_scores(&heads, &keys, &mut out);
        out.iter().map(|x| if x.is_nan() { -1.0 } else { *x }).collect()
    });
    assert!(got.iter().enumerate().all(|(i, x)| *x == if i == 7 { -1.0 } else { 1.5 }));
}

#[test]
fn delta_rules() {
    for (keys, values) in [(1, 1), (3, 32), (4, 5), (33, 31), (128, 32)] {
        let rng = &mut Lcg(keys as u64);
        let state: Vec<f32> = (0..keys * VALUE_LANES)
            .map(|i| if i % VALUE_LANES < values { 0.5 * rng.unit() } else { 0.0 })
            .collect();
        let alpha: Vec<f32> = random(rng, keys, 0.9).iter().map(|a| a.abs()).collect();
        let (k, q, v) = (random(rng, keys, 0.3), random(rng, keys, 0.3), random(rng, values, 2.0));
        let token = DeltaToken { alpha: &alpha, k: &k, q: &q, beta: 0.7, v: &v };
        let got = on_all_sets(|vectors| {
            let (mut state, mut out) = (state.clone(), vec![f32::NAN; values]);
            vectors.delta_rule(token, &mut state, &mut out);
            [out, state].concat()
        });

        let mut s = f64s(&state);
        let row = |i: usize| i * VALUE_LANES..i * VALUE_LANES + values;
        let read = |s: &[f64], x: &[f32]| -> Vec<f64> {
            (0..values).map(|c| (0..keys).map(|i| s[row(i)][c] * f64::from(x[i])).sum()).collect()
        };
        (0..keys).for_each(|i| s[row(i)].iter_mut().for_each(|s| *s *= f64::from(alpha[i])));
        let u: Vec<f64> =
            read(&s, &k).iter().zip(&v).map(|(r, v)| 0.7_f32 as f64 * (f64::from(*v) - r)).collect();
        (0..keys).for_each(|i| s[row(i)].iter_mut().zip(&u).for_each(|(s, u)| *s += f64::from(k[i]) * u));
        check(&got, &[read(&s, &q), s].concat(), 1e-6);
    }
}
