//! Which experts a batch needs.

use k3_experts::{Expert, ExpertId};
use k3_format::MoeConfig;

use super::ForwardError;
use crate::device::{ExpertUse, Routing};

/// Which experts a batch needs, and for which rows.
pub(super) struct ExpertPlan {
    /// In order of [`ExpertRequest::experts`].
    pub(super) wanted: Vec<ExpertId>,
    /// `[rows, ranks]`, without lost rows.
    pub(super) choices: Vec<ExpertId>,
    /// Experts a row, and behind them those that came next.
    pub(super) ranks: usize,
    /// By expert id.
    uses: Vec<Vec<ExpertUse>>,
}

impl ExpertPlan {
    /// A lost row has no use for experts.
    pub(super) fn new(routing: &Routing, num_experts: usize, is_lost: impl Fn(usize) -> bool) -> Self {
        let k = routing.experts_per_token;
        let mut uses: Vec<Vec<ExpertUse>> = vec![Vec::new(); num_experts];
        let rows = routing.ids.len() / k.max(1);
        let behind = routing.runner_ups.len() / rows.max(1);
        let mut choices = Vec::with_capacity(rows * (k + behind));
        let mut best_rank = vec![usize::MAX; num_experts];
        for (row, ids) in routing.ids.chunks_exact(k).enumerate() {
            if is_lost(row) {
                continue;
            }
            choices.extend_from_slice(ids);
            choices.extend_from_slice(&routing.runner_ups[row * behind..(row + 1) * behind]);
            for (rank, &id) in ids[..routing.used(row)].iter().enumerate() {
                uses[id as usize].push(ExpertUse { row, slot: row * k + rank });
                best_rank[id as usize] = best_rank[id as usize].min(rank);
            }
        }
        let mut wanted: Vec<ExpertId> =
            (0..num_experts as u32).filter(|&e| !uses[e as usize].is_empty()).collect();
        wanted.sort_by_key(|&e| (best_rank[e as usize], usize::MAX - uses[e as usize].len(), e));
        Self { wanted, choices, ranks: k + behind, uses }
    }

    /// An expert that came and its uses, if it was still to come and has the right sizes.
    pub(super) fn take(
        &mut self,
        layer: usize,
        expert: Expert,
        config: &MoeConfig,
    ) -> Result<(Expert, Vec<ExpertUse>), ForwardError> {
        let id = expert.id;
        let uses = self.uses.get_mut(id as usize).map(std::mem::take).unwrap_or_default();
        if uses.is_empty() {
            return Err(ForwardError::UnexpectedExpert { layer, expert: id });
        }
        let (inner, latent) = (config.moe_intermediate_size, config.routed_expert_hidden_size);
        let shapes =
            [(&expert.w1, (inner, latent)), (&expert.w2, (latent, inner)), (&expert.w3, (inner, latent))];
        for (matrix, expected) in shapes {
            if (matrix.rows(), matrix.cols()) != expected {
                let found = format!("{matrix:?}");
                return Err(ForwardError::ExpertShape { layer, expert: id, expected, found });
            }
        }
        Ok((expert, uses))
    }
}
