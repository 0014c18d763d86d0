//! What a forward pass asks for, without what only policies look at.

use k3_experts::{Choices, ExpertRequest, Phase};

pub(crate) fn request(layer: usize, experts: &[u32]) -> ExpertRequest<'_> {
    ExpertRequest { layer, experts, choices: Choices::default(), phase: Phase::Decode }
}
