//! The operations of the model, at the granularity at which a device wants to fuse them.
//!
//! A device holds weights, activations and sequence state in its own types; the model ([`crate::Model`]) only
//! passes them around. Three properties make the whole deterministic, and every method keeps them:
//!
//! * A row of a result depends on the same row of the operands (and on its own sequence's state), never on the
//!   other rows of the batch: not through the value, and not through the order of a sum.
//! * A sum has one fixed shape, whatever the number of threads or work items.
//! * Rows of a sequence are in order of position, and all rows of one sequence are adjacent.
//!
//! A device may work behind the caller's back: a method then queues work and returns. Only what the host has to know
//! waits ([`Device::download`], [`Device::route`] and their like), an error may name a later operation than the one that
//! failed, and what is dropped is freed when the work that uses it is done. `docs/devices.md` follows a token through
//! such a device.
//!
//! Non-finite values are data: they never panic, stay within their sequence, and are reported where a selection
//! meets them ([`Routing::non_finite`], [`Selected::NonFinite`]).

use std::ops::Range;
use std::sync::Arc;

use k3_experts::{Completion, Expert};
pub use k3_format::{IndexerConfig, KdaConfig, MlaConfig, ModelConfig};
pub use k3_quant::Matrix;

use crate::scalar::{keep_top_p, router_weights};
use crate::select::{Score, select_experts, select_keys};

mod state;

pub use state::{StateFloat, StateTensor, StateValues, take_parts};

/// What runs the operations.
///
/// Activations are matrices `[rows, width]`; a row is a token of some sequence. "Head-major" means that head `h` of
/// a row of `heads * dim` values is at `h * dim .. (h + 1) * dim`.
pub trait Device: Send + Sync {
    /// Activations `[rows, width]`.
    type Act: Send;
    /// A weight matrix `[out, in]`.
    type Linear: Send + Sync;
    /// A small vector of weights.
    type Vector: Send + Sync;
    /// State of a KDA layer: the last inputs of the three convolutions, and one matrix `[key, value]` a head.
    type KdaState: Send;
    /// State of a full-attention layer: a latent, an extra key and (K3.1) an indexer key for every token.
    type MlaState: Send;
    /// The keys that the rows of a batch attend.
    type Selection: Send;
    /// Bytes of a value of [`Device::Act`].
    const VALUE_BYTES: usize = 4;

    /// Names the arithmetic, as in saved states: states of one kind are not restored on another.
    fn kind(&self) -> &'static str;
    /// What its arithmetic does that the model's does not, to be said beside every hash of logits. `None`: nothing.
    fn deviation(&self) -> Option<&'static str>;
    /// Bytes that it may have at once for what grows with the `context` that is attended, whatever the number of rows: scores
    /// of keys. [`crate::working_bytes_per_token`] has what grows with rows.
    fn score_bytes(&self, _config: &ModelConfig, _context: usize) -> u64 {
        0
    }

    // Weights and host transfer.

    /// Takes a weight matrix.
    fn load_linear(&self, weight: Matrix) -> Result<Self::Linear, DeviceError>;
    /// Takes a weight vector.
    fn load_vector(&self, weight: &[f32]) -> Result<Self::Vector, DeviceError>;
    /// Activations from the host: `values` is `[rows, width]`.
    fn upload(&self, width: usize, values: &[f32]) -> Result<Self::Act, DeviceError>;
    /// Activations to the host, rounded to f32, `[rows, width]`.
    fn download(&self, x: &Self::Act) -> Result<Vec<f32>, DeviceError>;

    // Row-wise operations.

    /// Rows `ids` of `table [vocab, width]`.
    fn embed(&self, table: &Self::Linear, ids: &[u32]) -> Result<Self::Act, DeviceError>;
    /// `y = W x` for every row.
    fn linear(&self, weight: &Self::Linear, x: &Self::Act) -> Result<Self::Act, DeviceError>;
    /// `gain * x / sqrt(mean(x^2) + eps)` over the whole row.
    fn rms_norm(&self, x: &Self::Act, gain: &Self::Vector, eps: f64) -> Result<Self::Act, DeviceError>;
    /// `acc += y`
    fn add(&self, acc: &mut Self::Act, y: &Self::Act) -> Result<(), DeviceError>;
    /// Rows `rows` of `x`, in that order.
    fn select_rows(&self, x: &Self::Act, rows: &[usize]) -> Result<Self::Act, DeviceError>;
    /// SiTU-GLU of two matrices of one shape.
    fn situ_glu(&self, gate: &Self::Act, up: &Self::Act, caps: SituCaps) -> Result<Self::Act, DeviceError>;
    /// `x * sigmoid(gate)`
    fn sigmoid_gate(&self, x: &Self::Act, gate: &Self::Act) -> Result<Self::Act, DeviceError>;

    // Attention residuals.

    /// AttnRes' softmax weights `[rows, sources]` for the host. `score` is `norm gain * projection`.
    fn attn_res_weights(
        &self,
        sources: &[&Self::Act],
        score: &Self::Vector,
        eps: f64,
    ) -> Result<Vec<f32>, DeviceError>;
    /// The mix of the raw sources under those weights.
    fn attn_res_mix(
        &self,
        sources: &[&Self::Act],
        score: &Self::Vector,
        eps: f64,
    ) -> Result<Self::Act, DeviceError>;

    // Kimi Delta Attention.

    /// The state before the first token.
    fn new_kda_state(&self, config: &KdaConfig) -> Result<Self::KdaState, DeviceError>;
    /// Depthwise causal convolution and SiLU; `taps` is `[width, kernel]`, the last tap multiplies the current
    /// input. Reads and advances the window `which` of each sequence.
    fn short_conv(
        &self,
        x: &Self::Act,
        taps: &Self::Vector,
        which: Conv,
        states: &mut [SequenceRows<'_, Self::KdaState>],
    ) -> Result<Self::Act, DeviceError>;
    /// L2 norms, decay gate, beta and the delta-rule recurrence; the output is head-major `[rows, heads * dim]`.
    fn kda_step(
        &self,
        step: KdaStep<'_, Self>,
        states: &mut [SequenceRows<'_, Self::KdaState>],
    ) -> Result<Self::Act, DeviceError>;
    /// RMSNorm of each head over the gain's width, then `* sigmoid(gate)`.
    fn gated_head_norm(
        &self,
        x: &Self::Act,
        gain: &Self::Vector,
        gate: &Self::Act,
        eps: f64,
    ) -> Result<Self::Act, DeviceError>;

    // Gated MLA and the Lightning Indexer.

    /// The state before the first token. `indexer` gives the width of the indexer's keys, if they are kept.
    fn new_mla_state(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
    ) -> Result<Self::MlaState, DeviceError>;
    /// Splits `kv [rows, kv_lora + extra]`, norms the latent part, and appends both parts to the cache.
    fn mla_append(
        &self,
        kv: &Self::Act,
        latent_gain: &Self::Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, Self::MlaState>],
    ) -> Result<(), DeviceError>;
    /// LayerNorm of `k [rows, head_dim]`, appended to the indexer's keys.
    fn index_append(
        &self,
        k: &Self::Act,
        gain: &Self::Vector,
        bias: &Self::Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, Self::MlaState>],
    ) -> Result<(), DeviceError>;
    /// The keys that each row attends. Every row of `query` is already in the caches.
    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Self::Selection, DeviceError>;
    /// A selection for the host.
    fn download_selection(&self, selection: &Self::Selection) -> Result<Selection, DeviceError>;
    /// Rows of a selection that are lost to scores that are not finite, ascending, as far as the device knows without
    /// waiting. A lost row attends nothing and comes out as NaN, so that the layer's router reports it in any case.
    fn lost_rows(&self, selection: &Self::Selection) -> Result<Vec<usize>, DeviceError>;
    /// The scores behind [`Device::index_select`] for the host, without constant factors: row `r` has one score a
    /// cached position up to its own.
    fn index_scores(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Vec<Vec<f32>>, DeviceError>;
    /// Causal attention in the absorbed form, over all keys or over `selection`; keys are summed in order of
    /// position. Output head-major `[rows, heads * v_head_dim]`.
    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Self::Selection>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Self::Act, DeviceError>;

    // Mixture of experts.

    /// Selects experts from router logits `[rows, experts]`.
    fn route(
        &self,
        logits: &Self::Act,
        bias: &Self::Vector,
        rule: RouterRule,
    ) -> Result<Routing, DeviceError>;
    /// Room for the outputs of routed experts: `rows` of `width`, zero.
    fn expert_outputs(&self, rows: usize, width: usize) -> Result<Self::Act, DeviceError>;
    /// `w2 situ(w1 z, w3 z)` of experts that are there, for the rows of `z` that use them, each into its row of `out`.
    /// How experts are grouped into calls changes no bit.
    ///
    /// `None`: nothing reads the weights any more. A device that still does returns what tells the end of it, and the
    /// caller keeps the leases until then. These complete by themselves, in the order of the calls. With an error nothing is
    /// read any more.
    fn experts_ffn(
        &self,
        experts: &[ExpertWork],
        z: &Self::Act,
        caps: SituCaps,
        out: &mut Self::Act,
    ) -> Result<Option<InFlight>, DeviceError>;
    /// `sum_j weight[r][j] * outputs[r * k + j]` for every row `r`, in rank order `j`.
    fn expert_sum(&self, outputs: &Self::Act, routing: &Routing) -> Result<Self::Act, DeviceError>;

    // State transfer.

    /// A KDA state of its own with the same values. Not `Clone`: the device's memory may not have room for it.
    fn copy_kda(&self, state: &Self::KdaState) -> Result<Self::KdaState, DeviceError>;
    /// A full-attention state of its own with the same values.
    fn copy_mla(&self, state: &Self::MlaState) -> Result<Self::MlaState, DeviceError>;
    /// The parts of a KDA state, in the device's own precision.
    fn export_kda(&self, state: &Self::KdaState) -> Result<Vec<StateTensor>, DeviceError>;
    /// A KDA state from its parts.
    fn import_kda(&self, config: &KdaConfig, parts: &[StateTensor]) -> Result<Self::KdaState, DeviceError>;
    /// The parts of a full-attention state, in the device's own precision.
    fn export_mla(&self, state: &Self::MlaState) -> Result<Vec<StateTensor>, DeviceError>;
    /// A full-attention state of `tokens` tokens from its parts.
    fn import_mla(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Result<Self::MlaState, DeviceError>;
}

/// Why a device could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A saved state does not fit this model or this device.
    #[error("state tensor `{name}`: expected {expected}, found {found}")]
    State {
        /// The part.
        name: &'static str,
        /// What the model asks for.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The device itself failed.
    #[error("{device}: {operation} failed: {reason}")]
    Failed {
        /// [`Device::kind`]
        device: &'static str,
        /// The operation.
        operation: &'static str,
        /// What the driver or allocator said.
        reason: String,
    },
}

/// The rows of one sequence in a batch, with that sequence's state of the layer at work.
#[derive(Debug)]
pub struct SequenceRows<'a, S> {
    /// State of this layer.
    pub state: &'a mut S,
    /// Its rows in the batch.
    pub rows: Range<usize>,
    /// Position of its first row.
    pub position: usize,
}

/// Which convolution of a KDA layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after the projections")]
pub enum Conv {
    Q,
    K,
    V,
}

impl Conv {
    /// All three, in order of storage.
    pub const ALL: [Self; 3] = [Self::Q, Self::K, Self::V];
}

/// The caps of SiTU-GLU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SituCaps {
    /// `activation_situ_beta`
    pub beta: f64,
    /// `activation_situ_linear_beta`
    pub linear_beta: f64,
}

/// Operands of [`Device::kda_step`]; matrices are head-major `[rows, heads * dim]` unless said.
pub struct KdaStep<'a, D: Device + ?Sized> {
    /// Sizes and the decay's lower bound.
    pub config: &'a KdaConfig,
    /// After convolution and SiLU, not normalised.
    pub q: &'a D::Act,
    /// After convolution and SiLU, not normalised.
    pub k: &'a D::Act,
    /// After convolution and SiLU.
    pub v: &'a D::Act,
    /// `f_b f_a x`, without `dt_bias`.
    pub decay: &'a D::Act,
    /// `b_proj x`, `[rows, heads]`.
    pub beta: &'a D::Act,
    /// `[heads]`
    pub a_log: &'a D::Vector,
    /// `[heads * dim]`
    pub dt_bias: &'a D::Vector,
}

/// Operands of [`Device::index_select`] and [`Device::index_scores`].
pub struct IndexQuery<'a, D: Device + ?Sized> {
    /// Sizes.
    pub config: &'a IndexerConfig,
    /// Head-major `[rows, n_heads * head_dim]`.
    pub q: &'a D::Act,
    /// Head weights `[rows, n_heads]`, of either sign.
    pub weights: &'a D::Act,
}

/// Operands of [`Device::mla_attend`].
pub struct MlaAttend<'a, D: Device + ?Sized> {
    /// Sizes.
    pub config: &'a MlaConfig,
    /// Head-major `[rows, heads * (nope + extra)]`.
    pub q: &'a D::Act,
    /// `[heads * (nope + v), kv_lora]`: per head the key rows, then the value rows.
    pub kv_b: &'a D::Linear,
}

impl<D: Device + ?Sized> Clone for IndexQuery<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device + ?Sized> Copy for IndexQuery<'_, D> {}

/// The keys that the rows of a batch attend, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// One entry a row.
    pub rows: Vec<Selected>,
}

impl Selection {
    /// Rows that are lost, ascending.
    pub fn lost_rows(&self) -> Vec<usize> {
        let lost = |row: &usize| self.rows[*row] == Selected::NonFinite;
        (0..self.rows.len()).filter(lost).collect()
    }
}

/// The keys of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selected {
    /// Every position up to its own: they fit the budget.
    All,
    /// These positions, in the order of [`crate::select::select_keys`].
    Keys(Vec<u32>),
    /// A score was not finite; the row is lost.
    NonFinite,
}

impl Selected {
    /// The best `k` of one score a position.
    pub fn by_score<T: Score>(scores: &[T], k: usize) -> Self {
        select_keys(scores, k).map_or(Self::NonFinite, Self::Keys)
    }

    /// The positions to attend, ascending, of `keys` that there are; `None` for a lost row.
    pub fn ascending(&self, keys: usize) -> Option<Vec<usize>> {
        match self {
            Self::All => Some((0..keys).collect()),
            Self::Keys(selected) => {
                let mut positions: Vec<usize> = selected.iter().map(|&s| s as usize).collect();
                positions.sort_unstable();
                Some(positions)
            }
            Self::NonFinite => None,
        }
    }
}

/// How the router selects and weighs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRule {
    /// `num_experts_per_token`
    pub experts_per_token: usize,
    /// `moe_renormalize`
    pub renormalize: bool,
    /// `routed_scaling_factor`
    pub scaling_factor: f64,
    /// Uses only the first experts of a row, up to this share of its weight (`docs/arithmetic.md` 8.2, "Routed top-p").
    pub top_p: Option<f64>,
}

/// Ranks that [`Routing::push_scores`] tells of `experts`, the `k` of a row among them: eight times as many.
pub(crate) fn ranks_told(k: usize, experts: usize) -> usize {
    (8 * k).max(k + 1).min(experts)
}

/// The experts of every row, in rank order: descending biased score, then id.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Experts a row.
    pub experts_per_token: usize,
    /// `[rows, k]`
    pub ids: Vec<u32>,
    /// `[rows, k]`; 0 for those that are not used.
    pub weights: Vec<f64>,
    /// How many of its `k` experts a row uses, `[rows]`; empty: all. Those behind are neither fetched nor computed.
    pub used: Vec<usize>,
    /// The experts that came next, `[rows, any]` in rank order. No result depends on them: they tell a store what is
    /// likely to be asked for soon. May be empty.
    pub runner_ups: Vec<u32>,
    /// Distance of the k-th to the next biased score, `[rows]`; infinite when all experts are taken.
    pub gaps: Vec<f64>,
    /// Rows with a score that is not finite, ascending. Their ids are meaningless and must not be fetched; their weights
    /// are NaN.
    pub non_finite: Vec<usize>,
}

impl Routing {
    /// Room for `rows` rows.
    pub fn with_rows(experts_per_token: usize, rows: usize) -> Self {
        Self {
            experts_per_token,
            ids: Vec::with_capacity(rows * experts_per_token),
            weights: Vec::with_capacity(rows * experts_per_token),
            used: Vec::new(),
            runner_ups: Vec::new(),
            gaps: Vec::with_capacity(rows),
            non_finite: Vec::new(),
        }
    }

    /// Experts that `row` uses: the first so many of its ids.
    pub fn used(&self, row: usize) -> usize {
        self.used.get(row).copied().unwrap_or(self.experts_per_token)
    }

    /// The next row.
    pub fn push(&mut self, ids: &[u32], weights: &[f64], gap: f64) {
        self.ids.extend_from_slice(ids);
        self.weights.extend_from_slice(weights);
        self.gaps.push(gap);
    }

    /// The next row from its logits, unbiased scores and biased scores, one an expert: selection, weights, gap
    /// (`docs/arithmetic.md` 8.2). The row is lost if a logit or a biased score is not finite; a sigmoid alone would
    /// hide an infinite logit.
    pub fn push_scores<T: Score + Into<f64>>(
        &mut self,
        logits: &[T],
        scores: &[T],
        biased: &[T],
        rule: RouterRule,
    ) {
        let k = rule.experts_per_token;
        let finite = logits.iter().all(|l| l.is_finite());
        let ranks = ranks_told(k, biased.len());
        let Some(order) = select_experts(biased, ranks).filter(|_| finite) else {
            self.runner_ups.extend(std::iter::repeat_n(0, ranks - k));
            if rule.top_p.is_some() {
                self.used.push(k);
            }
            return self.push_non_finite(self.gaps.len());
        };
        self.runner_ups.extend_from_slice(&order[k..]);
        let of = |values: &[T], e: u32| -> f64 { values[e as usize].into() };
        let selected: Vec<f64> = order[..k].iter().map(|&e| of(scores, e)).collect();
        let gap = order.get(k).map_or(f64::INFINITY, |&next| of(biased, order[k - 1]) - of(biased, next));
        let mut weights = router_weights(&selected, rule.renormalize, rule.scaling_factor);
        if let Some(p) = rule.top_p {
            self.used.push(keep_top_p(&mut weights, &selected, p));
        }
        self.push(&order[..k], &weights, gap);
    }

    /// The next row, `row`, is lost.
    pub fn push_non_finite(&mut self, row: usize) {
        self.ids.extend(0..self.experts_per_token as u32);
        self.weights.extend(std::iter::repeat_n(f64::NAN, self.experts_per_token));
        self.gaps.push(f64::NAN);
        self.non_finite.push(row);
    }
}

/// One use of an expert: a row of its input, and the row of the output buffer for the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertUse {
    /// Row of `z`.
    pub row: usize,
    /// Row of `out`: `row * k + rank`.
    pub slot: usize,
}

/// An expert that is there, and its uses by a batch.
pub type ExpertWork = (Expert, Vec<ExpertUse>);

/// Tells when work that was queued has read its operands.
pub type InFlight = Arc<dyn Completion + Sync>;
