//! Small products among activations, and sums of fixed shape.

use half::bf16;

use super::{DeltaToken, Lanes, VALUE_LANES, ask};
use crate::cpu::LANES;
use crate::cpu::plain::widen;
#[cfg(target_arch = "x86_64")]
use crate::cpu::prefetch::{LINE, fetch};
use crate::cpu::tree::tree_sum;

/// What is read from memory is asked for so many bytes before it is needed.
const AHEAD: usize = 1 << 14;

/// What an operand of a product is made of.
trait Value: Copy + Default {
    fn load<L: Lanes>(x: &[Self; LANES]) -> L::Lanes;
    fn to_f32(self) -> f32;
    /// Asks for the line [`AHEAD`] of `x`, where rows are next to each other.
    fn ask_line(x: &[Self; LANES]);
    /// Asks for `count` of the rows [`AHEAD`] of row `first`, where they can be anywhere.
    fn ask_rows(rows: &[&[Self]], first: usize, count: usize);
}

/// Activations, such as the latents of keys.
impl Value for f32 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[f32; LANES]) -> L::Lanes {
        L::load(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn ask_line(_: &[f32; LANES]) {}
    #[inline(always)]
    fn ask_rows(rows: &[&[f32]], first: usize, count: usize) {
        let ahead = (first + AHEAD / size_of_val(rows[first])).min(rows.len());
        rows[ahead..rows.len().min(ahead + count)].iter().for_each(|row| ask(row));
    }
}

/// Weights.
impl Value for bf16 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[bf16; LANES]) -> L::Lanes {
        L::widen(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        widen(self)
    }
    #[inline(always)]
    fn ask_line(x: &[bf16; LANES]) {
        #[cfg(target_arch = "x86_64")]
        fetch(x.as_ptr().cast::<u8>().wrapping_add(AHEAD), LINE);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = x;
    }
    #[inline(always)]
    fn ask_rows(_: &[&[bf16]], _: usize, _: usize) {}
}

/// `x` and zeros behind it.
#[inline(always)]
fn padded<V: Value>(x: &[V]) -> [V; LANES] {
    let mut out = [V::default(); LANES];
    out[..x.len()].copy_from_slice(x);
    out
}

#[inline(always)]
pub(super) fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    tile::<L, f32, 1, 1>([a], [b])[0][0]
}

/// The dots of `M` rows with `N` others of the same width.
#[inline(always)]
fn tile<L: Lanes, V: Value, const M: usize, const N: usize>(a: [&[f32]; M], b: [&[V]; N]) -> [[f32; N]; M] {
    let mut sums = [[L::splat(0.0); N]; M];
    let (a_steps, b_steps) = (a.map(|a| a.as_chunks::<LANES>().0), b.map(|b| b.as_chunks::<LANES>().0));
    let steps = a_steps[0].len();
    let (a_steps, b_steps) = (a_steps.map(|a| &a[..steps]), b_steps.map(|b| &b[..steps]));
    for step in 0..steps {
        // A line of bf16 is two steps.
        if step % 2 == 0 {
            for j in 0..N {
                V::ask_line(&b_steps[j][step]);
            }
        }
        // No closure: those are not compiled for the instruction set.
        let mut loaded = [L::splat(0.0); N];
        for j in 0..N {
            loaded[j] = V::load::<L>(&b_steps[j][step]);
        }
        for i in 0..M {
            let a = L::load(&a_steps[i][step]);
            for j in 0..N {
                sums[i][j] = L::add_product(sums[i][j], a, loaded[j]);
            }
        }
    }
    if a[0].len() > steps * LANES {
        for j in 0..N {
            let b = V::load::<L>(&padded(&b[j][steps * LANES..]));
            for i in 0..M {
                let a = L::load(&padded(&a[i][steps * LANES..]));
                sums[i][j] = L::add_product(sums[i][j], a, b);
            }
        }
    }
    let mut out = [[0.0; N]; M];
    for i in 0..M {
        for j in 0..N {
            out[i][j] = L::sum(sums[i][j]);
        }
    }
    out
}

/// Row `i` of `x [_, width]`.
#[inline(always)]
fn row(x: &[f32], width: usize, i: usize) -> &[f32] {
    &x[i * width..(i + 1) * width]
}

#[inline(always)]
pub(super) fn dots<L: Lanes>(width: usize, a: &[f32], b: &[&[f32]], out: &mut [f32]) {
    all_dots::<L, f32>(width, a, b, out);
}

#[inline(always)]
pub(super) fn weight_dots<L: Lanes>(width: usize, a: &[f32], b: &[&[bf16]], out: &mut [f32]) {
    all_dots::<L, bf16>(width, a, b, out);
}

#[inline(always)]
fn all_dots<L: Lanes, V: Value>(width: usize, a: &[f32], b: &[&[V]], out: &mut [f32]) {
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
                if i == 0 {
                    V::ask_rows(b, j, 2);
                }
                if j + 2 <= n {
                    let sums = tile::<L, V, 4, 2>(a, [b[j], b[j + 1]]);
                    for (k, sums) in sums.iter().enumerate() {
                        out[(i + k) * n + j..][..2].copy_from_slice(sums);
                    }
                    j += 2;
                } else {
                    let sums = tile::<L, V, 4, 1>(a, [b[j]]);
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
                if i == 0 {
                    V::ask_rows(b, j, 4);
                }
                if j + 4 <= n {
                    let sums = tile::<L, V, 1, 4>(a, [b[j], b[j + 1], b[j + 2], b[j + 3]]);
                    out[i * n + j..][..4].copy_from_slice(&sums[0]);
                    j += 4;
                } else {
                    out[i * n + j] = tile::<L, V, 1, 1>(a, [b[j]])[0][0];
                    j += 1;
                }
            }
            i += 1;
        }
    }
}

#[inline(always)]
pub(super) fn add_products<L: Lanes>(a: &[f32], b: &[&[f32]], out: &mut [f32]) {
    add_all_products::<L, f32>(a, b, out);
}

#[inline(always)]
pub(super) fn add_weight_products<L: Lanes>(a: &[f32], b: &[&[bf16]], out: &mut [f32]) {
    add_all_products::<L, bf16>(a, b, out);
}

#[inline(always)]
fn add_all_products<L: Lanes, V: Value>(a: &[f32], b: &[&[V]], out: &mut [f32]) {
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
            add_row_products::<L, V, 4>(a, b, n, 0, &mut out[i * n..(i + 4) * n]);
            i += 4;
        } else {
            let (a, out) = ([row(a, depth, i)], &mut out[i * n..(i + 1) * n]);
            let mut c = 0;
            // Long pieces of the rows, which come from memory for this row alone.
            while L::MANY && c + 16 * LANES <= n {
                add_column_products::<L, V, 1, 16>(a, b, n, c, out);
                c += 16 * LANES;
            }
            add_row_products::<L, V, 1>(a, b, n, c, out);
            i += 1;
        }
    }
}

/// Columns from `c` on.
#[inline(always)]
fn add_row_products<L: Lanes, V: Value, const M: usize>(
    a: [&[f32]; M],
    b: &[&[V]],
    n: usize,
    mut c: usize,
    out: &mut [f32],
) {
    while c + 2 * LANES <= n {
        add_column_products::<L, V, M, 2>(a, b, n, c, out);
        c += 2 * LANES;
    }
    if c + LANES <= n {
        add_column_products::<L, V, M, 1>(a, b, n, c, out);
        c += LANES;
    }
    for c in c..n {
        for i in 0..M {
            let sum = &mut out[i * n + c];
            for (a, b) in a[i].iter().zip(b) {
                *sum += a * b[c].to_f32();
            }
        }
    }
}

/// 16 `N` columns from `c` on.
#[inline(always)]
fn add_column_products<L: Lanes, V: Value, const M: usize, const N: usize>(
    a: [&[f32]; M],
    b: &[&[V]],
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
        for j in 0..N {
            if j % 2 == 0 {
                V::ask_line(&b[j]);
            }
            let b = V::load::<L>(&b[j]);
            for i in 0..M {
                sums[i][j] = L::add_product(sums[i][j], L::splat(a[i][k]), b);
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
