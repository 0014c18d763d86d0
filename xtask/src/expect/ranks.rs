//! Experts of a token in another order.
//!
//! The order of `router_idx` is rank order, but other engines list the same experts otherwise (a top-k need not be
//! sorted). What is compared is which experts a token uses and with what weights.

use super::{Tensor, Tensors, Values};

/// The tensors of a run with each token's experts in the order of `expected` where both name the same ones, and how
/// many tokens were reordered.
pub(crate) fn align(expected: &Tensors, mut found: Tensors) -> (Tensors, usize) {
    let mut reordered = 0;
    for (ids, weights) in [("router_idx", Some("router_weight")), ("cont_router_idx", None)] {
        let Some((e, f)) = expected.get(ids).zip(found.get(ids)) else { continue };
        let (Some(&k), Some(e), Some(f)) = (e.shape.last(), e.as_i32(), f.as_i32()) else { continue };
        if e.len() != f.len() || k == 0 {
            continue;
        }
        let rows = e.chunks_exact(k).zip(f.chunks_exact(k)).enumerate();
        let orders: Vec<_> = rows.filter_map(|(row, (e, f))| Some((row, order(e, f)?))).collect();
        reordered += orders.len();
        for (row, order) in orders {
            permute(found.get_mut(ids), row * k, &order);
            if let Some(weights) = weights {
                permute(found.get_mut(weights), row * k, &order);
            }
        }
    }
    (found, reordered)
}

/// For each expected expert its place in `found`; `None` if nothing moves, or others are named.
fn order(expected: &[i32], found: &[i32]) -> Option<Vec<usize>> {
    if expected == found {
        return None;
    }
    let mut left = found.to_vec();
    expected
        .iter()
        .map(|e| {
            let at = left.iter().position(|f| f == e)?;
            // Experts are not negative: each place serves once.
            left[at] = -1;
            Some(at)
        })
        .collect()
}

fn permute(tensor: Option<&mut Tensor>, start: usize, order: &[usize]) {
    fn apply<T: Copy>(values: &mut [T], order: &[usize]) {
        let old = values.to_vec();
        values.iter_mut().zip(order).for_each(|(v, &from)| *v = old[from]);
    }
    match tensor.map(|t| &mut t.values) {
        Some(Values::I32(values)) => apply(&mut values[start..start + order.len()], order),
        Some(Values::F32(values)) => apply(&mut values[start..start + order.len()], order),
        None => {}
    }
}
