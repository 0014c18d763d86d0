//! What a repacked tree holds.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use k3_format::names::Names;
use k3_format::repack::{ExpertTarget, IoMode, Naming, Recipe, Repack, RepackError, RunOptions, VerifyMode};
use k3_format::{Checkpoint, ExpertFormat, ExpertLocation, ModelConfig};
use serde_json::Value;

use super::{Workshop, flip, open, same};

fn values(matrix: &k3_quant::Matrix) -> Vec<u32> {
    let mut out = vec![0.0; matrix.rows() * matrix.cols()];
    for (r, row) in out.chunks_exact_mut(matrix.cols()).enumerate() {
        matrix.row(r).decode_f32(row);
    }
    out.into_iter().map(f32::to_bits).collect()
}

fn each_expert(config: &ModelConfig) -> impl Iterator<Item = (usize, u32)> {
    let experts = config.moe.num_experts as u32;
    let layers = config.first_k_dense_replace..config.num_hidden_layers();
    layers.flat_map(move |layer| (0..experts).map(move |expert| (layer, expert)))
}

/// Every weight of two checkpoints is the same number, bit for bit.
fn same_weights(a: &Checkpoint, b: &Checkpoint) {
    assert_eq!((a.config(), a.variant()), (b.config(), b.variant()));
    for (id, _) in Names::tensors(a.config()) {
        let (x, y) = (a.tensor(id).expect("a tensor"), b.tensor(id).expect("a tensor"));
        assert_eq!((x.name, x.dtype, x.shape), (y.name, y.dtype, y.shape));
        let bytes = |c: &Checkpoint, t| c.shards().read(t).expect("readable");
        assert_eq!(bytes(a, &x), bytes(b, &y), "{id}");
    }
    for (layer, expert) in each_expert(a.config()) {
        let read = |c: &Checkpoint| c.read_expert(layer, expert).expect("an expert");
        let (x, y) = (read(a), read(b));
        for (x, y) in [(x.w1, y.w1), (x.w2, y.w2), (x.w3, y.w3)] {
            assert!(values(&x) == values(&y), "layer {layer}, expert {expert}");
        }
    }
}

/// Experts in id order, back to back from the beginning of an aligned data section.
fn check_layout(tree: &Checkpoint) {
    assert_eq!(tree.experts().scattered(), 0);
    for (layer, expert) in each_expert(tree.config()) {
        let ExpertLocation::Run { shard, begin } = tree.experts().location(layer, expert).expect("an expert")
        else {
            panic!("layer {layer}, expert {expert} is scattered");
        };
        let file = &tree.shards().files()[shard];
        assert_eq!(file.data_start % 4096, 0);
        assert_eq!(begin, file.data_start + u64::from(expert) * tree.experts().layout().len as u64);
        assert!(file.name.starts_with(&format!("model-{:05}-of-", layer + 1)), "{}", file.name);
    }
    // Large elements come first, so each lies at a multiple of its size.
    for tensor in tree.shards().iter() {
        assert_eq!(tensor.begin % (tensor.dtype.bitsize() as u64 / 8), 0, "{}", tensor.name);
    }
}

fn check(fixture: &str, recipe: Recipe, format: ExpertFormat) -> Checkpoint {
    let workshop = Workshop::of(fixture);
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    let outcome = workshop.tree("tree", recipe, &options);
    let (source, tree) = (open(workshop.source.path()), open(&workshop.out.path().join("tree")));
    assert_eq!(tree.expert_format(), format);
    same_weights(&source, &tree);
    check_layout(&tree);
    let proof = outcome.proof.expect("a proof");
    let report = outcome.report.expect("a report");
    let experts = source.experts().len() as u64;
    assert_eq!(proof.shards_compared, tree.shards().files().len());
    assert_eq!(proof.matrices, 3 * experts);
    let (rows, cols) = source.experts().layout().shapes[0];
    assert_eq!(proof.codes, 3 * experts * (rows * cols) as u64);
    assert_eq!(proof.live_blocks + proof.zero_blocks, proof.codes / 32);
    assert_eq!(report.exponents.live_blocks, proof.live_blocks);
    assert_eq!(report.total_size, tree.shards().iter().map(|t| t.byte_len()).sum::<u64>());
    assert_eq!(report.tensors, tree.shards().len());
    let index: Value =
        serde_json::from_slice(&workshop.files("tree")["model.safetensors.index.json"]).expect("JSON");
    assert_eq!(index["metadata"]["total_size"], report.total_size);
    // `b3sum` of each file is in the report.
    for (name, bytes) in workshop.files("tree") {
        let records = report.shards.iter().chain(&report.files);
        match records.into_iter().find(|record| record.name == name) {
            Some(record) => {
                assert_eq!(record.blake3, blake3::hash(&bytes).to_hex().as_str(), "{name}");
                assert_eq!(record.len, bytes.len() as u64);
            }
            None => assert_eq!(name, "repack.json"),
        }
    }
    tree
}

#[test]
fn nvfp4_for_compressed_tensors() {
    let recipe = Recipe::default();
    for (fixture, tensors) in [("tiny-k31", 1514), ("tiny-k3", 1206), ("dims-k31", 0)] {
        let tree = check(fixture, recipe, ExpertFormat::Nvfp4CompressedTensors);
        let own = tree.experts().len() * 3;
        if tensors > 0 {
            assert_eq!(tree.shards().len(), tensors + own, "{fixture}");
        }
    }
}

#[test]
fn nvfp4_for_modelopt() {
    let tree = check("tiny-k31", Recipe::default().names(Naming::ModelOpt), ExpertFormat::Nvfp4ModelOpt);
    assert_eq!(tree.shards().len(), 1514 + tree.experts().len() * 6);
}

#[test]
fn mxfp4_as_it_is() {
    for fixture in ["tiny-k31", "tiny-k3"] {
        check(fixture, Recipe::default().experts(ExpertTarget::Mxfp4), ExpertFormat::Mxfp4);
    }
}

/// The two conventions are inverse in one scale, and equal in every byte of codes and block scales.
#[test]
fn conventions_differ_in_one_scale() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("ct", Recipe::default(), &RunOptions::default());
    workshop.tree("mo", Recipe::default().names(Naming::ModelOpt), &RunOptions::default());
    let (ct, mo) = (open(&workshop.out.path().join("ct")), open(&workshop.out.path().join("mo")));
    for (layer, expert) in each_expert(ct.config()) {
        let (mut a, mut b) = (vec![0; ct.experts().layout().len], vec![0; mo.experts().layout().len]);
        ct.read_expert_into(layer, expert, &mut a).expect("an expert");
        mo.read_expert_into(layer, expert, &mut b).expect("an expert");
        assert!(a == b);
        let scales =
            |c: &Checkpoint| c.experts().global_scales(layer, expert).expect("scales").expect("NVFP4");
        for (divisor, factor) in scales(&ct).into_iter().zip(scales(&mo)) {
            assert_eq!(divisor.stored() * factor.stored(), 1.0);
        }
        let [w1, _, w3] = scales(&ct);
        assert_eq!(w1, w3);
    }
    let input = mo.shards().iter().filter(|tensor| tensor.name.ends_with(".input_scale"));
    let values = input.map(|tensor| mo.shards().read(&tensor).expect("readable").to_vec());
    assert_eq!(values.collect::<Vec<_>>(), vec![1f32.to_le_bytes().to_vec(); 3 * mo.experts().len()]);
}

fn config(workshop: &Workshop, name: &str) -> Value {
    serde_json::from_slice(&workshop.files(name)["config.json"]).expect("JSON")
}

#[test]
fn configs() {
    let workshop = Workshop::of("tiny-k31");
    let source: Value =
        serde_json::from_slice(&fs::read(workshop.source.path().join("config.json")).expect("a file"))
            .expect("JSON");
    let without = |mut config: Value| {
        config.as_object_mut().expect("an object").remove("quantization_config");
        config["text_config"].as_object_mut().expect("an object").remove("quantization_config");
        config
    };

    workshop.tree("ct", Recipe::default(), &RunOptions::default());
    let ct = config(&workshop, "ct");
    assert_eq!(without(ct.clone()), without(source.clone()));
    let quantization = &ct["quantization_config"];
    assert_eq!(*quantization, ct["text_config"]["quantization_config"]);
    assert_eq!(quantization["format"], "nvfp4-pack-quantized");
    assert_eq!(quantization["config_groups"]["group_0"]["weights"]["group_size"], 16);
    let ignore = quantization["ignore"].as_array().expect("a list");
    assert_eq!(
        ignore[..6],
        source["text_config"]["quantization_config"]["ignore"].as_array().expect("a list")[..]
    );
    assert_eq!(ignore.len(), 10);
    assert!(!workshop.files("ct").contains_key("hf_quant_config.json"));

    workshop.tree("mo", Recipe::default().names(Naming::ModelOpt), &RunOptions::default());
    let mo = config(&workshop, "mo");
    assert_eq!(without(mo.clone()), without(source.clone()));
    assert!(mo["text_config"].get("quantization_config").is_none());
    let quantization = &mo["quantization_config"];
    assert_eq!(
        (&quantization["quant_method"], &quantization["quant_algo"]),
        (&"modelopt_mixed".into(), &"MIXED_PRECISION".into())
    );
    // 12 layers of experts, three prefixes, two names of the module.
    assert_eq!(quantization["quantized_layers"].as_object().expect("an object").len(), 12 * 6);
    let file: Value = serde_json::from_slice(&workshop.files("mo")["hf_quant_config.json"]).expect("JSON");
    assert_eq!(file["quantization"], *quantization);
    // No release, no time, no machine.
    assert_eq!(file["producer"], serde_json::json!({ "name": "k3" }));

    workshop.tree("mx", Recipe::default().experts(ExpertTarget::Mxfp4), &RunOptions::default());
    let mx = config(&workshop, "mx");
    assert_eq!(without(mx.clone()), without(source.clone()));
    assert_eq!(mx["quantization_config"], source["text_config"]["quantization_config"]);
    assert_eq!(mx["text_config"]["quantization_config"], source["text_config"]["quantization_config"]);
}

#[test]
fn vision_and_files_beside_the_shards() {
    let workshop = Workshop::of("tiny-k31");
    let put = |name: &str, text: &str| fs::write(workshop.source.path().join(name), text).expect("written");
    for name in ["LICENSE", "tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py"] {
        put(name, name);
    }
    put("generation_config.json", "{\"eos_token_id\": 2}");
    put("notes.bin", "left alone");
    let outcome = workshop.tree("all", Recipe::default(), &RunOptions::default());
    let report = outcome.report.expect("a report");
    assert_eq!(report.left_out.files, ["notes.bin"]);
    assert!(report.left_out.tensors.is_empty());
    let files = workshop.files("all");
    for name in ["LICENSE", "tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py"] {
        assert_eq!(files[name], name.as_bytes());
    }
    assert!(files.contains_key("generation_config.json") && !files.contains_key("notes.bin"));
    let vision = |name: &str| {
        let tree = open(&workshop.out.path().join(name));
        tree.shards()
            .iter()
            .filter(|t| t.name.starts_with("vision_tower.") || t.name.starts_with("mm_projector."))
            .count()
    };
    assert_eq!(vision("all"), 2);

    let outcome = workshop.tree("text", Recipe::default().text_only(true), &RunOptions::default());
    assert_eq!(outcome.report.expect("a report").left_out.tensors.values().sum::<usize>(), 2);
    assert_eq!(vision("text"), 0);
    same_weights(&open(workshop.source.path()), &open(&workshop.out.path().join("text")));
}

/// Files of any size are copied, and names that no report can hold are named.
#[test]
fn odd_files_beside_the_shards() {
    let workshop = Workshop::of("tiny-k31");
    let put = |name: &[u8], len: u64| {
        let path = workshop.source.path().join(OsStr::from_bytes(name));
        fs::File::create(path).and_then(|file| file.set_len(len)).expect("written");
    };
    let large = (64 << 20) + 3;
    put(b"merges.txt", large);
    put(b"README-\xff.md", 5);
    put(b"bell\x07.txt", 5);
    let source = open(workshop.source.path());
    let repack = Repack::new(&source, Recipe::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(repack.notes().len(), 1);
    assert!(repack.notes()[0].contains("`README-\u{fffd}.md`"), "{:?}", repack.notes());
    let outcome = workshop.tree("tree", Recipe::default(), &RunOptions::default());
    let report = outcome.report.expect("a report");
    assert_eq!(report.left_out.files, ["README-\u{fffd}.md", "bell\\u{7}.txt"]);
    let files = workshop.files("tree");
    assert!(files["merges.txt"].len() as u64 == large && files["merges.txt"].iter().all(|&byte| byte == 0));
    assert!(!files.keys().any(|name| name.starts_with("README") || name.starts_with("bell")));
    // As large as it is, it is a part of what tells the source from another.
    flip(&workshop.source.path().join("merges.txt"), [large as usize - 1]);
    match workshop.run("tree", Recipe::default(), &RunOptions::default()) {
        Err(error @ RepackError::SourceChanged { .. }) => assert!(error.to_string().contains("`merges.txt`")),
        other => panic!("{:?}", other.map(|o| o.notes)),
    }
}

/// Threads, the way of reading and the layout of the source change nothing.
#[test]
fn the_same_bytes_whatever_the_way() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("first", Recipe::default(), &RunOptions::default());
    let first = workshop.files("first");
    for (i, (jobs, io)) in
        [(1, IoMode::Cached), (3, IoMode::Cached), (1, IoMode::Auto), (7, IoMode::Auto), (0, IoMode::Auto)]
            .into_iter()
            .enumerate()
    {
        let mut options = RunOptions::default();
        (options.jobs, options.io) = (jobs, io);
        let name = format!("tree {i}");
        workshop.tree(&name, Recipe::default(), &options);
        same(&first, &workshop.files(&name));
    }
}

/// A source in the layout of a cached download, every file a link into a store of blobs.
#[test]
fn a_source_of_links() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("plain", Recipe::default(), &RunOptions::default());
    let cache = tempfile::tempdir().expect("a directory");
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/main"));
    fs::create_dir_all(&blobs).expect("made");
    fs::create_dir_all(&snapshot).expect("made");
    for (name, bytes) in super::files(workshop.source.path()) {
        let blob = blobs.join(blake3::hash(&bytes).to_hex().as_str());
        fs::write(&blob, bytes).expect("written");
        std::os::unix::fs::symlink(&blob, snapshot.join(name)).expect("linked");
    }
    let before = super::files(&blobs);
    super::run(&snapshot, &workshop.out.path().join("linked"), Recipe::default(), &RunOptions::default())
        .unwrap_or_else(|e| panic!("{e}"));
    same(&workshop.files("plain"), &workshop.files("linked"));
    same(&before, &super::files(&blobs));
}
