//! Vector loops on activations, beside the products with weights: small products among activations, sums of fixed shape,
//! and the functions of the model in which an exponential is.
//!
//! As with the products, the bits do not depend on the instruction set: products and sums are separate operations, in
//! one order, and exponentials come from one polynomial instead of from the platform's library. That polynomial is
//! worked out in f64 and its error is below 1e-11 of the result, so what is rounded to f32 is the right value but for
//! one case in some thousands, where it is the neighbour.

mod functions;
mod indexer;
mod lanes;
mod products;

use half::bf16;

use super::InstructionSet;
pub(super) use indexer::DOT_BLOCK;
pub use indexer::IndexHeads;
pub(super) use lanes::Lanes;
use lanes::Portable;
#[cfg(target_arch = "x86_64")]
pub(super) use lanes::{Avx2, Avx512};

/// Asks for all of `x`, which is needed soon.
#[inline(always)]
fn ask(x: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    super::prefetch::fetch(x.as_ptr().cast(), size_of_val(x));
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// Value channels that [`Vectors::delta_rule`] works on.
pub const VALUE_LANES: usize = 32;

/// The loops of one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors(InstructionSet);

impl Default for Vectors {
    fn default() -> Self {
        Self(InstructionSet::widest())
    }
}

impl Vectors {
    /// Those of `set`. The bits do not depend on it.
    ///
    /// # Panics
    /// If this machine does not have the instruction set.
    pub fn of(set: InstructionSet) -> Self {
        assert!(set <= InstructionSet::widest(), "this machine has no {set:?}");
        Self(set)
    }

    /// The instruction set.
    pub fn set(self) -> InstructionSet {
        self.0
    }
}

/// One token of one head for [`Vectors::delta_rule`]; `alpha`, `k` and `q` have one value a key channel.
#[derive(Clone, Copy, Debug)]
pub struct DeltaToken<'a> {
    /// Decay, in (0, 1).
    pub alpha: &'a [f32],
    /// Normalised.
    pub k: &'a [f32],
    /// Normalised and scaled.
    pub q: &'a [f32],
    /// Of this head.
    pub beta: f32,
    /// At most [`VALUE_LANES`] value channels.
    pub v: &'a [f32],
}

/// A method for each function of the same name in `body`, compiled for every instruction set.
macro_rules! vector_loops {
    ($($(#[$doc:meta])* $body:ident::$name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl Vectors {$(
            $(#[$doc])*
            #[inline]
            pub fn $name(self, $($argument: $type),*) $(-> $result)? {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2")]
                    fn avx2($($argument: $type),*) $(-> $result)? {
                        $body::$name::<Avx2>($($argument),*)
                    }
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                    fn avx512($($argument: $type),*) $(-> $result)? {
                        $body::$name::<Avx512>($($argument),*)
                    }
                    if self.0 >= InstructionSet::Avx512 {
                        // SAFETY: `self` names an instruction set that was found.
                        return unsafe { avx512($($argument),*) };
                    }
                    if self.0 >= InstructionSet::Avx2 {
                        // SAFETY: as above.
                        return unsafe { avx2($($argument),*) };
                    }
                }
                $body::$name::<Portable>($($argument),*)
            }
        )*}
    };
}

vector_loops! {
    /// `a . b`: 16 columns at a time into 16 partial sums, and a fixed tree over those.
    ///
    /// # Panics
    /// If the lengths differ.
    products::dot(a: &[f32], b: &[f32]) -> f32;
    /// `out[i, j] = a_i . b_j` for `a [m, width]`, `n` rows `b` of `width`, `out [m, n]`; each as [`Vectors::dot`].
    ///
    /// # Panics
    /// If the lengths do not fit.
    products::dots(width: usize, a: &[f32], b: &[&[f32]], out: &mut [f32]);
    /// `out[i, :] += sum_k a[i, k] b_k`, in order of `k`, for `a [m, depth]`, `depth` rows `b` of `n`, `out [m, n]`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    products::add_products(a: &[f32], b: &[&[f32]], out: &mut [f32]);
    /// As [`Vectors::dots`], with rows of a matrix of weights that are next to each other: those behind them are asked for.
    ///
    /// # Panics
    /// If the lengths do not fit.
    products::weight_dots(width: usize, a: &[f32], b: &[&[bf16]], out: &mut [f32]);
    /// As [`Vectors::add_products`], with rows as [`Vectors::weight_dots`] takes them.
    ///
    /// # Panics
    /// If the lengths do not fit.
    products::add_weight_products(a: &[f32], b: &[&[bf16]], out: &mut [f32]);
    /// `y += a x`
    ///
    /// # Panics
    /// If the lengths differ.
    products::add_scaled(a: f32, x: &[f32], y: &mut [f32]);
    /// `y += x`
    ///
    /// # Panics
    /// If the lengths differ.
    products::add(x: &[f32], y: &mut [f32]);
    /// The sum of squares in f64, where no f32 overflows: 16 partial sums and a fixed tree.
    products::square_sum(x: &[f32]) -> f64;
    /// `out = gain * (x * scale)`
    ///
    /// # Panics
    /// If the lengths differ.
    products::scale(x: &[f32], gain: &[f32], scale: f32, out: &mut [f32]);
    /// `sum_h weights_h relu(q_h . key)` for `keys [out.len(), dim]`. A dot is summed in order within 32 columns, those sums
    /// in order, and the heads in order. NaN stays NaN.
    ///
    /// # Panics
    /// If the lengths do not fit.
    indexer::index_scores(heads: &IndexHeads, keys: &[f32], out: &mut [f32]);
    /// The same for those of `keys [keys, dim]` that `positions` name, one for each of `out`.
    ///
    /// # Panics
    /// If the lengths do not fit, or there is no such key.
    indexer::index_scores_at(heads: &IndexHeads, keys: &[f32], positions: &[u32], out: &mut [f32]);
    /// One token of the delta rule on [`VALUE_LANES`] value channels of one head: `S = diag(alpha) S`,
    /// `u = beta (v - S^T k)`, `S += k u^T`, `out = S^T q`. `state` is `[key channels, VALUE_LANES]`; lanes beyond `v` stay
    /// as zero as they are.
    ///
    /// # Panics
    /// If the lengths do not fit.
    products::delta_rule(token: DeltaToken<'_>, state: &mut [f32], out: &mut [f32]);
    /// One token of a depthwise convolution, with SiLU: `out_c = silu(sum_j taps[c, j] inputs[j][c])`, summed in order of `j`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    functions::convolve(taps: &[f32], inputs: &[&[f32]], out: &mut [f32]);
    /// `x * sigmoid(gate)`; NaN where the gate is not finite.
    ///
    /// # Panics
    /// If the lengths differ.
    functions::sigmoid_gate(x: &mut [f32], gate: &[f32]);
    /// `gate = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`; NaN where an operand is not
    /// finite.
    ///
    /// # Panics
    /// If the lengths differ.
    functions::situ_glu(gate: &mut [f32], up: &[f32], beta: f64, linear_beta: f64);
    /// `exp(lower_bound sigmoid(rate (z + bias)))`; NaN where `rate (z + bias)` is not finite.
    ///
    /// # Panics
    /// If the lengths differ.
    functions::decay(z: &[f32], bias: &[f32], rate: f64, lower_bound: f64, out: &mut [f32]);
    /// Softmax in place. The sum is taken in f64: 16 partial sums and a fixed tree.
    functions::softmax(x: &mut [f32]);
}
