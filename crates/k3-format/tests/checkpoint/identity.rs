//! What tells checkpoints apart.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use k3_format::{Checkpoint, CheckpointId, ExpertFormat, IndexerNames, LoadMode, OpenOptions};
use serde_json::json;

use crate::experts::to_nvfp4;
use crate::snapshot::{Snapshot, fixture};

fn id_of(dir: &Path) -> CheckpointId {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}")).identity()
}

#[test]
fn identity_follows_meaning_and_not_layout() {
    let mut snapshot = Snapshot::of("dims-k31");
    let id = |s: &Snapshot| s.good().identity();
    let before = id(&snapshot);
    assert_eq!(id(&snapshot), before);
    snapshot.text().insert("rms_norm_eps".into(), json!(2e-5));
    let other_config = id(&snapshot);
    assert_ne!(other_config, before);
    let last = snapshot.tensors.len() - 1;
    snapshot.tensors.swap(last, last - 1);
    assert_ne!(id(&snapshot), other_config);
    // The fixture's own file has other spaces and other key orders than the rewritten one.
    let dir = Snapshot::of("dims-k31").write();
    let compact = Checkpoint::open(dir.path(), &OpenOptions::default()).expect("opens").identity();
    let pretty = serde_json::to_string_pretty(&Snapshot::of("dims-k31").config).expect("JSON");
    std::fs::write(dir.path().join("config.json"), pretty).expect("write");
    assert_eq!(Checkpoint::open(dir.path(), &OpenOptions::default()).expect("opens").identity(), compact);
}

/// Changing the lowest bit of the last byte but one of a tensor gives another checkpoint, or not.
fn check(name: &str, differs: bool) {
    let mut snapshot = Snapshot::of("dims-k31");
    let before = snapshot.good().identity();
    let bytes = &mut snapshot.get(name).bytes;
    let at = bytes.len() - 2;
    bytes[at] ^= 1;
    assert_eq!(snapshot.good().identity() != before, differs, "{name}");
}

#[test]
fn a_changed_small_tensor_is_another_checkpoint() {
    check("language_model.model.norm.weight", true);
    check("language_model.model.output_attn_res_proj.weight", true);
    check("language_model.model.layers.0.input_layernorm.weight", true);
    check("language_model.model.layers.1.self_attn.dt_bias", true);
    check("language_model.model.layers.2.self_attn.o_norm.weight", true);
    check("language_model.model.layers.3.self_attn.kv_a_layernorm.weight", true);
    check("language_model.model.layers.4.self_attn.indexer.k_norm.bias", true);
    check("language_model.model.layers.4.mlp_res_proj.weight", true);
    check("language_model.model.layers.4.block_sparse_moe.gate.e_score_correction_bias", true);
    check("language_model.model.layers.4.block_sparse_moe.routed_expert_norm.weight", true);
    // What is too large to be read on opening.
    check("language_model.model.embed_tokens.weight", false);
    check("language_model.model.layers.4.block_sparse_moe.experts.0.w1.weight_packed", false);
}

#[test]
fn changes_all_over_a_matrix_are_another_checkpoint() {
    for name in [
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "language_model.model.layers.0.mlp.down_proj.weight",
        "language_model.model.layers.1.self_attn.q_conv1d.weight",
        "language_model.model.layers.3.self_attn.kv_b_proj.weight",
        "language_model.model.layers.4.self_attn.indexer.wk.weight",
        "language_model.model.layers.4.block_sparse_moe.shared_experts.up_proj.weight",
    ] {
        let mut snapshot = Snapshot::of("dims-k31");
        let before = snapshot.good().identity();
        snapshot.get(name).bytes.iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
        assert_ne!(snapshot.good().identity(), before, "{name}");
    }
}

#[test]
fn keys_that_are_not_read_do_not_count() {
    let mut snapshot = Snapshot::of("dims-k31");
    let before = snapshot.good().identity();
    snapshot.text().insert("use_cache".into(), json!("another value"));
    snapshot.text().insert("temperature".into(), json!(0.5));
    assert_eq!(snapshot.good().identity(), before);
    for (key, value) in [
        ("routed_scaling_factor", json!(1.75)),
        ("activation_situ_beta", json!(5.0)),
        ("max_position_embeddings", json!(12345)),
        ("eos_token_id", json!([5, 6])),
    ] {
        let mut snapshot = Snapshot::of("dims-k31");
        snapshot.text().insert(key.into(), value);
        assert_ne!(snapshot.good().identity(), before, "{key}");
    }
}

#[test]
fn every_head_of_a_log_counts() {
    let mut snapshot = Snapshot::of("dims-k31");
    let before = snapshot.good().identity();
    snapshot.get("language_model.model.layers.0.self_attn.A_log").bytes[0] ^= 1;
    assert_ne!(snapshot.good().identity(), before);
}

#[test]
fn global_scales_of_experts_count() {
    for format in [ExpertFormat::Nvfp4CompressedTensors, ExpertFormat::Nvfp4ModelOpt] {
        let mut snapshot = Snapshot::of("dims-k31");
        to_nvfp4(&mut snapshot, format);
        let before = snapshot.good().identity();
        let name =
            if format == ExpertFormat::Nvfp4ModelOpt { "weight_scale_2" } else { "weight_global_scale" };
        let prefix = "language_model.model.layers.4.block_sparse_moe.experts.7.w3";
        snapshot.get(&format!("{prefix}.{name}")).bytes[0] ^= 1;
        assert_ne!(snapshot.good().identity(), before, "{format}");
    }
}

#[test]
fn another_naming_of_the_indexer_is_another_checkpoint() {
    let names = IndexerNames::default();
    let swapped = IndexerNames {
        key_norm_gain: names.key_norm_bias.clone(),
        key_norm_bias: names.key_norm_gain.clone(),
        ..names.clone()
    };
    let id = |names| {
        let options = OpenOptions::default().indexer_names(names);
        Checkpoint::open(&fixture("dims-k31"), &options).expect("opens").identity()
    };
    assert_ne!(id(names.clone()), id(swapped));
    // Who names them as they are found anyway says nothing new.
    assert_eq!(id(names), id_of(&fixture("dims-k31")));
}

#[test]
fn place_links_and_loading_do_not_count() {
    for name in ["tiny-k3", "dims-k31"] {
        let source = fixture(name);
        let id = id_of(&source);
        let mapped = OpenOptions::default().load(LoadMode::Map);
        assert_eq!(Checkpoint::open(&source, &mapped).expect("opens").identity(), id);

        let dir = tempfile::tempdir().expect("a directory");
        let [copy, links, blobs] = ["copy", "links", "blobs"].map(|d| dir.path().join(d));
        for dir in [&copy, &links, &blobs] {
            fs::create_dir(dir).expect("a directory");
        }
        for (i, file) in fs::read_dir(&source).expect("list").enumerate() {
            let file = file.expect("list");
            let blob = format!("{i:064x}");
            fs::copy(file.path(), copy.join(file.file_name())).expect("copy");
            fs::copy(file.path(), blobs.join(&blob)).expect("copy");
            symlink(Path::new("../blobs").join(&blob), links.join(file.file_name())).expect("link");
        }
        assert_eq!((id_of(&copy), id_of(&links)), (id, id), "{name}");
        // A link to the directory.
        symlink("copy", dir.path().join("link")).expect("link");
        assert_eq!(id_of(&dir.path().join("link")), id);
    }
    assert_ne!(id_of(&fixture("tiny-k3")), id_of(&fixture("tiny-k31")));
}
