//! The example does what it says.

#[allow(dead_code, reason = "its `main` is run by people")]
#[path = "../examples/repack.rs"]
mod repack;

use std::path::Path;

use k3_format::{Checkpoint, ExpertFormat, OpenOptions};

#[test]
fn a_repacked_checkpoint_is_whole_and_proven() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31");
    let target = tempfile::tempdir().unwrap();
    let target = target.path().join("nvfp4");
    let outcome = repack::repack(&source, &target).unwrap();
    assert!(outcome.report.is_some() && outcome.proof.is_some());
    let repacked = Checkpoint::open(&target, &OpenOptions::default()).unwrap();
    assert_eq!(repacked.expert_format(), ExpertFormat::Nvfp4CompressedTensors);
}
