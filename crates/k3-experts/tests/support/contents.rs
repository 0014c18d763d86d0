//! Whether an expert is what the checkpoint has.

use k3_experts::Expert;
use k3_format::Checkpoint;
use k3_quant::Matrix;

pub(crate) fn values(m: &Matrix) -> Vec<f32> {
    let mut out = vec![0.0; m.rows() * m.cols()];
    for (r, row) in out.chunks_exact_mut(m.cols()).enumerate() {
        m.row(r).decode_f32(row);
    }
    out
}

/// Compares with a read that no store is part of.
pub(crate) fn check_contents(checkpoint: &Checkpoint, layer: usize, expert: &Expert) {
    let read = checkpoint.read_expert(layer, expert.id).unwrap();
    for (found, expected) in [(&expert.w1, &read.w1), (&expert.w2, &read.w2), (&expert.w3, &read.w3)] {
        assert_eq!(values(found), values(expected), "expert {} of layer {layer}", expert.id);
    }
}
