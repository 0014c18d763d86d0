//! Guesses at the next layer's experts, while this layer's are being read.

use k3_experts::{ExpertId, Phase};

use super::{ForwardError, Pass};
use crate::device::{Device, Routing};
use crate::model::{Layer, Mlp, Moe};

/// What the next layer's router is given early (`docs/expert-store.md` 9). No result depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    /// Nothing: there are no guesses.
    Off,
    /// The mix that enters this layer's MoE or MLP, under the next layer's norm.
    #[default]
    Input,
    /// The same, with the output of this layer's shared experts added; behind a dense layer as [`Lookahead::Input`].
    Shared,
}

/// A router that can be asked early.
pub(super) struct NextRouter<'a, D: Device> {
    layer: usize,
    norm: &'a D::Vector,
    moe: &'a Moe<D>,
}

impl<'a, D: Device> NextRouter<'a, D> {
    /// The router behind layer `l`, if guesses at it are wanted: in decode only, and only by a store that has a use
    /// for them, because they cost a product with the router's weights.
    pub(super) fn behind(l: usize, pass: &Pass<'a, '_, D>) -> Option<Self> {
        let Layer { post_attention_layernorm, mlp, .. } = pass.model.layers.get(l + 1)?;
        let Mlp::Moe(moe) = mlp else { return None };
        let is_asked = pass.phase == Phase::Decode
            && pass.model.lookahead != Lookahead::Off
            && pass.store.wants_guesses();
        is_asked.then_some(Self { layer: l + 1, norm: post_attention_layernorm, moe })
    }

    /// Tells the store what the next layer would ask for if `state [rows, hidden]` were what its MoE gets.
    pub(super) fn guess(&self, pass: &Pass<'_, '_, D>, state: &D::Act) -> Result<(), ForwardError> {
        let device = &pass.model.device;
        let x = device.rms_norm(state, self.norm, pass.model.config.rms_norm_eps)?;
        let logits = device.linear(&self.moe.gate, &x)?;
        let routing = device.route(&logits, &self.moe.e_score_correction_bias, pass.model.router_rule())?;
        let guesses = likely(&routing, |row| pass.is_lost(row));
        if !guesses.is_empty() {
            pass.store.prefetch(self.layer, &guesses);
        }
        Ok(())
    }
}

/// The better three quarters of each row's ranks, the best ranks of all rows first: in the released model between nine and
/// four in ten of them are asked for, from the first to the last, and of the others fewer. A store reads as many of them
/// as it has time for.
fn likely(routing: &Routing, is_lost: impl Fn(usize) -> bool) -> Vec<ExpertId> {
    let k = routing.experts_per_token;
    let rows = routing.gaps.len();
    let mut likely = Vec::new();
    for rank in 0..(3 * k).div_ceil(4) {
        for row in 0..rows {
            let id = routing.ids[row * k + rank];
            let counts = rank < routing.used(row) && !is_lost(row) && !routing.non_finite.contains(&row);
            if counts && !likely.contains(&id) {
                likely.push(id);
            }
        }
    }
    likely
}
