//! Small products among activations, and sums of fixed shape.

use super::{DeltaToken, Lanes, VALUE_LANES};
use crate::cpu::LANES;
use crate::cpu::tree::tree_sum;

/// `x` and zeros behind it.
#[inline(always)]
fn padded(x: &[f32]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    out[..x.len()].copy_from_slice(x);
    out
}

#[inline(always)]
fn sum<L: Lanes>(x: L::Lanes) -> f32 {
    let mut sums = [0.0; LANES];
    L::store(x, &mut sums);
    tree_sum(sums)
}

#[inline(always)]
pub(super) fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    tile::<L, 1, 1>([a], [b])[0][0]
}

/// The dots of `M` rows with `N` others of the same width.
#[inline(always)]
fn tile<L: Lanes, const M: usize, const N: usize>(a: [&[f32]; M], b: [&[f32]; N]) -> [[f32; N]; M] {
    let mut sums = [[L::splat(0.0); N]; M];
    let (a_steps, b_steps) = (a.map(|a| a.as_chunks::<LANES>().0), b.map(|b| b.as_chunks::<LANES>().0));
    let steps = a_steps[0].len();
    let (a_steps, b_steps) = (a_steps.map(|a| &a[..steps]), b_steps.map(|b| &b[..steps]));
    for step in 0..steps {
        let b = b_steps.map(|b| L::load(&b[step]));
        for i in 0..M {
            let a = L::load(&a_steps[i][step]);
            for j in 0..N {
                sums[i][j] = L::add_product(sums[i][j], a, b[j]);
            }
        }
    }
    if a[0].len() > steps * LANES {
        let b = b.map(|b| L::load(&padded(&b[steps * LANES..])));
        for i in 0..M {
            let a = L::load(&padded(&a[i][steps * LANES..]));
            for j in 0..N {
                sums[i][j] = L::add_product(sums[i][j], a, b[j]);
            }
        }
    }
    sums.map(|sums| sums.map(|lanes| sum::<L>(lanes)))
}

/// Row `i` of `x [_, width]`.
#[inline(always)]
fn row(x: &[f32], width: usize, i: usize) -> &[f32] {
    &x[i * width..(i + 1) * width]
}

#[inline(always)]
pub(super) fn dots<L: Lanes>(width: usize, a: &[f32], b: &[&[f32]], out: &mut [f32]) {
    if width == 0 {
        return out.fill(0.0);
    }
    assert!(a.len().is_multiple_of(width) && b.iter().all(|b| b.len() == width));
    let (m, n) = (a.len() / width, b.len());
    assert_eq!(out.len(), m * n);
    let mut i = 0;
    while i < m {
        let mut j = 0;
        if i + 4 <= m {
            let a = [0, 1, 2, 3].map(|k| row(a, width, i + k));
            while j < n {
                if j + 2 <= n {
                    let sums = tile::<L, 4, 2>(a, [b[j], b[j + 1]]);
                    for (k, sums) in sums.iter().enumerate() {
                        out[(i + k) * n + j..][..2].copy_from_slice(sums);
                    }
                    j += 2;
                } else {
                    let sums = tile::<L, 4, 1>(a, [b[j]]);
                    for (k, sums) in sums.iter().enumerate() {
                        out[(i + k) * n + j] = sums[0];
                    }
                    j += 1;
                }
            }
            i += 4;
        } else {
            let a = [row(a, width, i)];
            while j < n {
                if j + 4 <= n {
                    let sums = tile::<L, 1, 4>(a, [b[j], b[j + 1], b[j + 2], b[j + 3]]);
                    out[i * n + j..][..4].copy_from_slice(&sums[0]);
                    j += 4;
                } else {
                    out[i * n + j] = tile::<L, 1, 1>(a, [b[j]])[0][0];
                    j += 1;
                }
            }
            i += 1;
        }
    }
}

#[inline(always)]
pub(super) fn add_products<L: Lanes>(a: &[f32], b: &[&[f32]], out: &mut [f32]) {
    let depth = b.len();
    if depth == 0 || out.is_empty() {
        return;
    }
    let n = b[0].len();
    let m = a.len() / depth;
    assert!(a.len() == m * depth && out.len() == m * n && b.iter().all(|b| b.len() == n));
    let mut i = 0;
    while i < m {
        if i + 4 <= m {
            let a = [0, 1, 2, 3].map(|k| row(a, depth, i + k));
            add_row_products::<L, 4>(a, b, n, &mut out[i * n..(i + 4) * n]);
            i += 4;
        } else {
            add_row_products::<L, 1>([row(a, depth, i)], b, n, &mut out[i * n..(i + 1) * n]);
            i += 1;
        }
    }
}

#[inline(always)]
fn add_row_products<L: Lanes, const M: usize>(a: [&[f32]; M], b: &[&[f32]], n: usize, out: &mut [f32]) {
    let mut c = 0;
    while c + 2 * LANES <= n {
        add_column_products::<L, M, 2>(a, b, n, c, out);
        c += 2 * LANES;
    }
    if c + LANES <= n {
        add_column_products::<L, M, 1>(a, b, n, c, out);
        c += LANES;
    }
    for c in c..n {
        for i in 0..M {
            let sum = &mut out[i * n + c];
            for (a, b) in a[i].iter().zip(b) {
                *sum += a * b[c];
            }
        }
    }
}

/// 16 `N` columns from `c` on.
#[inline(always)]
fn add_column_products<L: Lanes, const M: usize, const N: usize>(
    a: [&[f32]; M],
    b: &[&[f32]],
    n: usize,
    c: usize,
    out: &mut [f32],
) {
    let mut sums = [[L::splat(0.0); N]; M];
    for i in 0..M {
        let (out, _) = out[i * n + c..][..N * LANES].as_chunks::<LANES>();
        for j in 0..N {
            sums[i][j] = L::load(&out[j]);
        }
    }
    let a = a.map(|a| &a[..b.len()]);
    for (k, b) in b.iter().enumerate() {
        let (b, _) = b[c..][..N * LANES].as_chunks::<LANES>();
        let mut loaded = [L::splat(0.0); N];
        for j in 0..N {
            loaded[j] = L::load(&b[j]);
        }
        for i in 0..M {
            let a = L::splat(a[i][k]);
            for j in 0..N {
                sums[i][j] = L::add_product(sums[i][j], a, loaded[j]);
            }
        }
    }
    for i in 0..M {
        let (out, _) = out[i * n + c..][..N * LANES].as_chunks_mut::<LANES>();
        for j in 0..N {
            L::store(sums[i][j], &mut out[j]);
        }
    }
}

#[inline(always)]
pub(super) fn add_scaled<L: Lanes>(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

#[inline(always)]
pub(super) fn add<L: Lanes>(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

#[inline(always)]
pub(super) fn square_sum<L: Lanes>(x: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let (steps, rest) = x.as_chunks::<LANES>();
    for x in steps {
        for j in 0..LANES {
            sums[j] += f64::from(x[j]) * f64::from(x[j]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x) * f64::from(*x);
    }
    tree_sum(sums)
}

#[inline(always)]
pub(super) fn scale<L: Lanes>(x: &[f32], gain: &[f32], scale: f32, out: &mut [f32]) {
    assert!(x.len() == gain.len() && x.len() == out.len());
    out.iter_mut().zip(x.iter().zip(gain)).for_each(|(out, (x, gain))| *out = gain * (x * scale));
}

#[inline(always)]
pub(super) fn delta_rule<L: Lanes>(token: DeltaToken<'_>, state: &mut [f32], out: &mut [f32]) {
    /// Registers of a row of the state.
    const WIDTH: usize = VALUE_LANES / LANES;
    /// Partial sums over key channels, by channel: they hide the latency of an addition.
    const SUMS: usize = 4;
    let DeltaToken { alpha, k, q, beta, v } = token;
    let (rows, _) = state.as_chunks_mut::<VALUE_LANES>();
    let n = rows.len();
    assert!(alpha.len() == n && k.len() == n && q.len() == n);
    assert!(v.len() <= VALUE_LANES && v.len() == out.len());

    let add_tree = |sums: [[L::Lanes; WIDTH]; SUMS]| {
        let mut total = sums[0];
        for j in 0..WIDTH {
            total[j] = L::add(L::add(sums[0][j], sums[1][j]), L::add(sums[2][j], sums[3][j]));
        }
        total
    };
    let (row_steps, last_rows) = rows.as_chunks_mut::<SUMS>();
    let ((alpha_steps, last_alpha), (k_steps, last_k)) = (alpha.as_chunks::<SUMS>(), k.as_chunks::<SUMS>());
    let mut sums = [[L::splat(0.0); WIDTH]; SUMS];
    for (rows, (alpha, k)) in row_steps.iter_mut().zip(alpha_steps.iter().zip(k_steps)) {
        for i in 0..SUMS {
            decay_and_read::<L, WIDTH>(&mut rows[i], alpha[i], k[i], &mut sums[i]);
        }
    }
    let mut u = add_tree(sums);
    for (row, (alpha, k)) in last_rows.iter_mut().zip(last_alpha.iter().zip(last_k)) {
        decay_and_read::<L, WIDTH>(row, *alpha, *k, &mut u);
    }

    let mut update = [0.0; VALUE_LANES];
    let (lanes, _) = update.as_chunks_mut::<LANES>();
    for j in 0..WIDTH {
        L::store(u[j], &mut lanes[j]);
    }
    let mut values = [0.0; VALUE_LANES];
    values[..v.len()].copy_from_slice(v);
    for (u, v) in update.iter_mut().zip(values) {
        *u = beta * (v - *u);
    }
    let (lanes, _) = update.as_chunks::<LANES>();
    for j in 0..WIDTH {
        u[j] = L::load(&lanes[j]);
    }

    let (q_steps, last_q) = q.as_chunks::<SUMS>();
    let mut sums = [[L::splat(0.0); WIDTH]; SUMS];
    for (rows, (k, q)) in row_steps.iter_mut().zip(k_steps.iter().zip(q_steps)) {
        for i in 0..SUMS {
            write_and_read::<L, WIDTH>(&mut rows[i], k[i], &u, q[i], &mut sums[i]);
        }
    }
    let mut o = add_tree(sums);
    for (row, (k, q)) in last_rows.iter_mut().zip(last_k.iter().zip(last_q)) {
        write_and_read::<L, WIDTH>(row, *k, &u, *q, &mut o);
    }
    let (lanes, _) = values.as_chunks_mut::<LANES>();
    for j in 0..WIDTH {
        L::store(o[j], &mut lanes[j]);
    }
    out.copy_from_slice(&values[..out.len()]);
}

/// `row *= alpha; sum += row * k`
#[inline(always)]
fn decay_and_read<L: Lanes, const WIDTH: usize>(
    row: &mut [f32; VALUE_LANES],
    alpha: f32,
    k: f32,
    sum: &mut [L::Lanes; WIDTH],
) {
    let (row, _) = row.as_chunks_mut::<LANES>();
    for j in 0..WIDTH {
        let s = L::mul(L::load(&row[j]), L::splat(alpha));
        L::store(s, &mut row[j]);
        sum[j] = L::add_product(sum[j], s, L::splat(k));
    }
}

/// `row += k * u; sum += row * q`
#[inline(always)]
fn write_and_read<L: Lanes, const WIDTH: usize>(
    row: &mut [f32; VALUE_LANES],
    k: f32,
    u: &[L::Lanes; WIDTH],
    q: f32,
    sum: &mut [L::Lanes; WIDTH],
) {
    let (row, _) = row.as_chunks_mut::<LANES>();
    for j in 0..WIDTH {
        let s = L::add_product(L::load(&row[j]), u[j], L::splat(k));
        L::store(s, &mut row[j]);
        sum[j] = L::add_product(sum[j], s, L::splat(q));
    }
}
