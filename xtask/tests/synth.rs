//! `cargo xtask synth`, through its library entry.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use k3_format::{Checkpoint, OpenOptions, Variant, Warning};
use k3_graph::{Cpu, LogitsWanted, Observer, Point, Probe, Routing};
use k3_runner::{Engine, EngineOptions};
use serde_json::Value;
use xtask::synth::{Args, Geometry, GeometryName, Summary, SynthOptions, run, write};

fn synth(dir: &Path, geometry: &Geometry, options: SynthOptions) -> Summary {
    let mut last = None;
    let summary = write(dir, geometry, &options, &mut |progress| last = Some(progress)).unwrap();
    let last = last.unwrap();
    assert_eq!((last.bytes_done, last.bytes_total), (summary.data_bytes, summary.data_bytes));
    assert_eq!((last.shard, last.shards), (summary.shards, summary.shards));
    summary
}

fn seed(seed: u64) -> SynthOptions {
    SynthOptions { seed, sparse: false }
}

/// Every file of a directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

fn index(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("model.safetensors.index.json")).unwrap()).unwrap()
}

/// The reader finds in the directory what the geometry says. Returns its warnings.
fn open(dir: &Path, geometry: &Geometry) -> Vec<Warning> {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default()).unwrap();
    assert_eq!((checkpoint.variant(), checkpoint.config()), (geometry.variant(), &geometry.model));
    checkpoint.warnings().to_vec()
}

fn check_opens(geometry: &Geometry) {
    let dir = tempfile::tempdir().unwrap();
    synth(dir.path(), geometry, seed(0));
    assert_eq!(open(dir.path(), geometry), []);
}

/// The smallest sizes that MXFP4 blocks allow, with this many experts.
fn smallest(variant: Variant, experts: usize, per_token: usize) -> Geometry {
    let mut geometry = Geometry::tiny(variant).with_layers(2).unwrap().with_experts(experts);
    let m = &mut geometry.model;
    m.hidden_size = 32;
    (m.kda.num_heads, m.kda.head_dim) = (1, 32);
    m.mla.num_heads = 1;
    m.moe.num_experts_per_token = per_token;
    (m.moe.routed_expert_hidden_size, m.moe.moe_intermediate_size) = (32, 32);
    geometry
}

#[test]
fn same_seed_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, s| {
        let dir = dir.path().join(name);
        synth(&dir, &Geometry::tiny(Variant::K31), seed(s));
        files(&dir)
    };
    let (a, b, c) = (write("a", 7), write("b", 7), write("c", 8));
    assert!(a == b, "the same seed gave other bytes");
    for (name, bytes) in &a {
        assert_eq!(bytes != &c[name], name.starts_with("model-0"), "{name}");
    }
}

/// A tensor's values depend on its name and the seed, not on what is written before it.
#[test]
fn a_tensor_keeps_its_values_in_another_geometry() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = |name: &str, geometry: &Geometry| {
        let dir = dir.path().join(name);
        synth(&dir, geometry, seed(1));
        let file =
            fs::read(dir.join(format!("model-00002-of-{:06}.safetensors", geometry.model.layers.len() + 1)));
        let file = file.unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale";
        tensors.tensor(name).unwrap().data().to_vec()
    };
    let tiny = Geometry::tiny(Variant::K3);
    let fewer = Geometry::tiny(Variant::K31).with_layers(3).unwrap().with_experts(5);
    assert_eq!(tensor("all", &tiny), tensor("fewer", &fewer));
}

#[test]
fn shards_are_laid_out_as_in_the_release() {
    let dir = tempfile::tempdir().unwrap();
    let summary = synth(dir.path(), &Geometry::tiny(Variant::K3), seed(0));
    assert_eq!(summary.shards, 14);
    let index = index(dir.path());
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), summary.tensors);
    assert_eq!(index["metadata"]["total_size"], summary.data_bytes);
    assert_eq!(map["language_model.model.layers.4.mlp_res_proj.weight"], "model-00005-of-000014.safetensors");
    assert_eq!(map["language_model.lm_head.weight"], "model-00014-of-000014.safetensors");

    let file = fs::read(dir.path().join("model-00005-of-000014.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(metadata.info("language_model.model.layers.4.self_attn.A_log").unwrap().shape, [32]);
    let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let experts: Vec<(usize, &str)> = tensors
        .iter()
        .filter_map(|(name, _)| name.split_once(".experts.")?.1.split_once('.'))
        .map(|(expert, part)| (expert.parse().unwrap(), part))
        .collect();
    assert_eq!(experts.len(), 6 * 16);
    for expert in experts.chunks(6) {
        let parts: Vec<&str> = expert.iter().map(|(_, part)| *part).collect();
        let order = ["w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale"];
        assert_eq!(parts[..4], order);
        assert_eq!(parts[4..], ["w3.weight_packed", "w3.weight_scale"]);
        assert!(expert.iter().all(|(id, _)| *id == expert[0].0));
    }
    assert!(!experts.is_sorted_by_key(|(id, _)| *id), "experts are in id order");
}

#[test]
fn tiny_opens() {
    check_opens(&Geometry::tiny(Variant::K3));
    check_opens(&Geometry::tiny(Variant::K31));
}

#[test]
fn a_cut_layer_map_opens() {
    check_opens(&Geometry::tiny(Variant::K31).with_layers(1).unwrap());
    check_opens(&Geometry::tiny(Variant::K3).with_layers(6).unwrap());
}

#[test]
fn many_experts_open() {
    check_opens(&smallest(Variant::K3, 896, 16));
    check_opens(&smallest(Variant::K3, 1_100, 40));
    check_opens(&smallest(Variant::K31, 896, 40));
    check_opens(&smallest(Variant::K31, 1_100, 16));
}

/// Three tokens run, and every one of them uses as many experts as the config says, none twice.
fn check_experts_run(variant: Variant, experts: usize, per_token: usize) {
    let dir = tempfile::tempdir().unwrap();
    synth(dir.path(), &smallest(variant, experts, per_token), seed(0));
    let engine =
        Engine::open(dir.path(), Cpu::new(1).unwrap(), &EngineOptions::default(), &mut |_| {}).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut used = Used::default();
    let logits = engine.run(&mut sequence, &[3, 141, 59], LogitsWanted::All, &mut used).unwrap();
    assert_eq!(logits.values.len(), 3 * 512);
    assert!(logits.values.iter().all(|v| v.is_finite()));
    // One of the two layers has routed experts.
    assert_eq!(used.0.len(), 3 * per_token);
    for token in used.0.chunks(per_token) {
        let distinct: BTreeSet<_> = token.iter().collect();
        assert_eq!(distinct.len(), per_token);
        assert!(token.iter().all(|&id| (id as usize) < experts));
    }
    // A second sequence, token by token, gives the same bits.
    let mut sequence = engine.new_sequence().unwrap();
    let rows: Vec<f32> =
        [3, 141, 59].iter().flat_map(|&id| engine.decode(&mut sequence, id).unwrap().values).collect();
    assert_eq!(rows, logits.values);
}

/// Experts in the order in which they are used.
#[derive(Default)]
struct Used(Vec<u32>);

impl Observer for Used {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Routing
    }

    fn routing(&mut self, _: usize, routing: &Routing) {
        self.0.extend(&routing.ids);
    }
}

#[test]
fn many_experts_run() {
    check_experts_run(Variant::K3, 1_100, 40);
    check_experts_run(Variant::K31, 896, 16);
}

/// The spread of what passes through a model.
#[derive(Default)]
struct Spread {
    /// Root mean square of every sublayer output.
    outputs: Vec<(Point, f64)>,
    /// Experts used, one entry a MoE layer.
    experts: Vec<BTreeSet<u32>>,
}

impl Observer for Spread {
    fn wants(&self, probe: Probe) -> bool {
        matches!(probe, Probe::Activations | Probe::Routing)
    }

    fn activation(&mut self, point: Point, values: &[f32]) {
        if matches!(point, Point::AttnOut(_) | Point::MlpOut(_) | Point::FinalMix) {
            self.outputs.push((point, rms(values)));
        }
    }

    fn routing(&mut self, _: usize, routing: &Routing) {
        self.experts.push(routing.ids.iter().copied().collect());
    }
}

fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

/// Activations stay near unit scale to the last layer, routers use their experts, and no token wins everywhere.
fn check_conditioning(variant: Variant) {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::tiny(variant);
    synth(dir.path(), &geometry, seed(0));
    let engine =
        Engine::open(dir.path(), Cpu::new(1).unwrap(), &EngineOptions::default(), &mut |_| {}).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let prompt: Vec<u32> = (0..64).map(|i| (i * 97 + 5) % 512).collect();
    let mut spread = Spread::default();
    let logits = engine.run(&mut sequence, &prompt, LogitsWanted::All, &mut spread).unwrap();
    for (point, rms) in &spread.outputs {
        assert!((0.1..10.0).contains(rms), "{point:?}: rms {rms}");
    }
    assert_eq!(spread.experts.len(), 12);
    assert!(spread.experts.iter().all(|used| used.len() >= 12), "{:?}", spread.experts);
    assert!((1.0..4.0).contains(&rms(&logits.values)), "logits: rms {}", rms(&logits.values));
    let winner = |row: usize| (0..512).max_by(|a, b| logits.row(row)[*a].total_cmp(&logits.row(row)[*b]));
    let winners: BTreeSet<_> = (0..64).map(winner).collect();
    assert!(winners.len() > 16, "{} winners", winners.len());
}

#[test]
fn conditioning() {
    check_conditioning(Variant::K3);
    check_conditioning(Variant::K31);
}

/// The whole release as headers and holes: names, bytes, and the length of every header (`docs/checkpoint.md` 1, 4, 5).
fn check_release(variant: Variant, names: usize, total: u64, headers: Option<u64>) {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::released(variant);
    let summary = synth(dir.path(), &geometry, SynthOptions { seed: 0, sparse: true });
    assert_eq!((summary.shards, summary.tensors, summary.data_bytes), (96, names, total));
    let index = index(dir.path());
    assert_eq!(index["weight_map"].as_object().unwrap().len(), names);
    assert_eq!(index["metadata"]["total_size"], total);
    let shards = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap());
    let shards = shards.filter(|entry| entry.file_name().to_string_lossy().starts_with("model-0"));
    assert_eq!(shards.map(|entry| entry.metadata().unwrap().len()).sum::<u64>(), summary.file_bytes);
    let skipped = Warning::Skipped { vision: 168, activation_scales: 0, cache_scales: 0 };
    assert_eq!(open(dir.path(), &geometry), [skipped]);
    if let Some(headers) = headers {
        assert_eq!(summary.file_bytes - total, headers);
        let length = |file: &str| fs::metadata(dir.path().join(file)).unwrap().len();
        assert_eq!(length("model-00001-of-000096.safetensors"), 2_341_213_184 + 2_928);
        assert_eq!(length("model-00011-of-000096.safetensors"), 16_990_916_912);
    }
}

#[test]
fn sparse_release_k3() {
    check_release(Variant::K3, 497_220, 1_560_860_324_864, Some(75_766_584));
}

#[test]
fn sparse_release_k31() {
    check_release(Variant::K31, 497_340, 1_560_860_324_864 + 24 * 14_877_184, None);
}

/// Sparse and full trees have the same tensors at the same offsets, the same index and configs.
#[test]
fn sparse_differs_in_data_only() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::tiny(Variant::K31);
    let (full, sparse) = (dir.path().join("full"), dir.path().join("sparse"));
    synth(&full, &geometry, seed(5));
    synth(&sparse, &geometry, SynthOptions { seed: 5, sparse: true });
    let (full, sparse) = (files(&full), files(&sparse));
    assert!(full.keys().eq(sparse.keys()));
    let (mut shards, mut zeros) = (0, 0);
    for (name, bytes) in &full {
        let other = &sparse[name];
        if !name.ends_with(".safetensors") {
            assert!(bytes == other, "{name}");
            continue;
        }
        shards += 1;
        let header = |bytes: &[u8]| -> Value {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            serde_json::from_slice(&bytes[8..8 + length]).unwrap()
        };
        assert_eq!(header(bytes), header(other), "{name}");
        for (_, tensor) in safetensors::SafeTensors::deserialize(other).unwrap().iter() {
            zeros += tensor.data().iter().map(|byte| usize::from(*byte != 0)).sum::<usize>();
        }
    }
    assert_eq!((shards, zeros), (14, 0));
}

fn refused(dir: &Path, geometry: &Geometry, expected: &[&str]) {
    let error = write(dir, geometry, &seed(0), &mut |_| {}).unwrap_err();
    let message = format!("{error:#}");
    for part in expected {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn refuses_a_directory_with_something_in_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("precious"), "x").unwrap();
    refused(dir.path(), &Geometry::tiny(Variant::K3), &["not empty", "precious", "new or empty"]);
    assert_eq!(files(dir.path()).len(), 1);
}

#[test]
fn refuses_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    // 300 TB.
    let mut geometry = Geometry::tiny(Variant::K3);
    geometry.model.moe.routed_expert_hidden_size = 1 << 20;
    geometry.model.moe.moe_intermediate_size = 1 << 20;
    refused(dir.path(), &geometry, &["needs", "free", "--layers"]);
    assert!(files(dir.path()).is_empty());
}

#[test]
fn refuses_impossible_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = || Geometry::tiny(Variant::K31);
    refused(dir.path(), &tiny().with_experts(3), &["3 experts", "uses 4", "at least 4 with --experts"]);
    refused(dir.path(), &tiny().with_experts(0), &["num_experts is 0"]);
    let change = |change: fn(&mut Geometry)| {
        let mut geometry = tiny();
        change(&mut geometry);
        geometry
    };
    let latent = change(|g| g.model.moe.routed_expert_hidden_size = 48);
    refused(dir.path(), &latent, &["routed_expert_hidden_size is 48", "multiple of 32"]);
    refused(dir.path(), &change(|g| g.model.vocab_size = 100), &["token id", "vocabulary of 100"]);
    assert!(tiny().with_layers(14).is_err() && tiny().with_layers(0).is_err());
}

fn with_tokenizer(dir: &Path, tokenizer: &Path) -> Args {
    Args {
        dir: dir.to_owned(),
        geometry: GeometryName::Tiny,
        variant: None,
        layers: Some(2),
        experts: None,
        tokenizer: Some(tokenizer.to_owned()),
        seed: 0,
        sparse: false,
    }
}

/// The vocabulary goes with the weights, and its ids into the config.
#[test]
fn a_tokenizer_is_adopted() {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tokenizer/small");
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("tiny");
    let args = with_tokenizer(&dir, &tokenizer);
    run(&args).unwrap();
    assert_eq!(open(&dir, &args.geometry().unwrap()), []);
    let checkpoint = Checkpoint::open(&dir, &OpenOptions::default()).unwrap();
    let (config, tokens) = (checkpoint.config(), &checkpoint.config().tokens);
    assert_eq!((config.vocab_size, tokens.eos.as_slice()), (1024, [770].as_slice()));
    assert_eq!((tokens.bos, tokens.pad, tokens.media_placeholder), (Some(768), Some(1023), Some(789)));
    for file in ["tiktoken.model", "tokenizer_config.json"] {
        assert_eq!(fs::read(dir.join(file)).unwrap(), fs::read(tokenizer.join(file)).unwrap(), "{file}");
    }
}

#[test]
fn an_absent_tokenizer_is_refused_before_anything_is_written() {
    let parent = tempfile::tempdir().unwrap();
    let (dir, tokenizer) = (parent.path().join("tiny"), parent.path().join("tokenizer"));
    fs::create_dir(&tokenizer).unwrap();
    let error = format!("{:#}", run(&with_tokenizer(&dir, &tokenizer)).unwrap_err());
    assert!(error.contains("tokenizer") && error.contains("tiktoken.model"), "{error}");
    assert!(!dir.exists());
}
