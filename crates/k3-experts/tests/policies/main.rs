//! Replacement policies and the simulator, in closed form where there is one.

mod closed_form;
mod released;
mod traces;

use k3_experts::ExpertId;
use k3_experts::policy::{Policy, Verdict, Visit};
use k3_experts::trace::{Geometry, Trace};

/// A trace of one layer in which each token uses one expert.
fn sequence(experts: usize, ids: &[ExpertId]) -> Trace {
    let mut trace = Trace::new(Geometry { layers: 1, experts, per_token: 1 }, 1);
    ids.iter().for_each(|&id| trace.push(&[id]));
    trace
}

/// A visit of layer `layer` by one token.
fn visit(policy: &mut dyn Policy, layer: usize, experts: &[ExpertId]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let (choices, ranks) = (experts, experts.len());
    policy.visit(Visit { layer, experts, choices, ranks, per_token: ranks }, &mut verdicts);
    verdicts
}
