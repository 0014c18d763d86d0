//! What of a request can be had.

use k3_format::Checkpoint;

use crate::{ExpertError, ExpertId, ExpertRequest};

/// Routed experts of a layer; 0 of one that has none or does not exist.
pub(crate) fn experts_of(checkpoint: &Checkpoint, layer: usize) -> usize {
    let config = checkpoint.config();
    let has_experts = layer < config.num_hidden_layers() && config.is_moe(layer);
    if has_experts { config.moe.num_experts } else { 0 }
}

impl ExpertRequest<'_> {
    /// Its experts, in order: each that the checkpoint has once, and an error in the place of any other.
    pub(crate) fn checked(
        &self,
        checkpoint: &Checkpoint,
    ) -> impl Iterator<Item = Result<ExpertId, ExpertError>> {
        let layer = self.layer;
        let experts = experts_of(checkpoint, layer);
        let mut seen = vec![false; experts];
        self.experts.iter().map(move |&expert| match seen.get_mut(expert as usize) {
            None => Err(ExpertError::Unknown { layer, expert, experts }),
            Some(true) => Err(ExpertError::Repeated { layer, expert }),
            Some(seen) => {
                *seen = true;
                Ok(expert)
            }
        })
    }
}
