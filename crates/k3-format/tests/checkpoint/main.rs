//! Opening snapshots: the fixtures as they are, and changed in every way that must be noticed.

mod experts;
mod files;
mod identity;
mod indexer;
mod linears;
mod placement;
mod snapshot;
mod tensors;

use k3_format::names::{Extent, Names};
use k3_format::{Checkpoint, Error, LoadMode, OpenOptions, Role, TensorId, Variant, Warning};
use k3_quant::Matrix;
use serde_json::json;
use snapshot::{Snapshot, fixture};

/// A matrix as f32.
pub(crate) fn decoded(matrix: &Matrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows() * matrix.cols()];
    for (r, row) in out.chunks_exact_mut(matrix.cols()).enumerate() {
        matrix.row(r).decode_f32(row);
    }
    out
}

/// Both ways to an expert of `found` give the values that it has in `source`.
#[track_caller]
pub(crate) fn check_same_expert(source: &Checkpoint, found: &Checkpoint, layer: usize, expert: u32) {
    let a = source.expert(layer, expert).expect("there");
    for b in [found.expert(layer, expert), found.read_expert(layer, expert)] {
        let b = b.expect("there");
        for (a, b) in [(&a.w1, &b.w1), (&a.w2, &b.w2), (&a.w3, &b.w3)] {
            assert_eq!(decoded(a), decoded(b), "{}, layer {layer}, expert {expert}", found.expert_format());
        }
    }
}

fn check_fixture(name: &str, variant: Variant, tensors: usize) {
    let read = Checkpoint::open(&fixture(name), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let mapped =
        Checkpoint::open(&fixture(name), &OpenOptions::default().load(LoadMode::Map)).expect("again");
    assert_eq!(read.variant(), variant);
    assert_eq!(read.config().indexer.is_some(), variant == Variant::K31);
    assert_eq!(read.shards().len(), tensors);
    assert_eq!(read.identity(), mapped.identity());
    assert_eq!(read.identity().to_string().len(), 64);
    let vision = Warning::Skipped { vision: 2, activation_scales: 0, cache_scales: 0 };
    assert_eq!(read.warnings(), [vision]);

    let mut bytes = 0;
    let mut seen = 0;
    for (id, entry) in Names::tensors(read.config()) {
        seen += 1;
        bytes += read.tensor(id).expect("a tensor").byte_len();
        let extent = entry.extent(read.config());
        if let Extent::Matrix(rows, cols) = extent {
            let matrix = read.matrix(id).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert_eq!((matrix.rows(), matrix.cols()), (rows, cols), "{id}");
            assert_eq!(decoded(&matrix), decoded(&mapped.matrix(id).expect("mapped")), "{id}");
            assert!(matches!(read.vector(id), Err(Error::WrongKind { .. })), "{id}");
        } else {
            let vector = read.vector(id).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert_eq!(vector.len(), extent.elements(), "{id}");
            assert!(matches!(read.matrix(id), Err(Error::WrongKind { .. })), "{id}");
        }
    }
    assert_eq!(bytes, read.resident_bytes());

    let config = read.config();
    let (inner, latent) = (config.moe.moe_intermediate_size, config.moe.routed_expert_hidden_size);
    for layer in 1..config.num_hidden_layers() {
        for expert in 0..config.moe.num_experts as u32 {
            let mapped = read.expert(layer, expert).unwrap_or_else(|e| panic!("{e}"));
            let copied = read.read_expert(layer, expert).unwrap_or_else(|e| panic!("{e}"));
            for (a, b, shape) in [
                (&mapped.w1, &copied.w1, (inner, latent)),
                (&mapped.w2, &copied.w2, (latent, inner)),
                (&mapped.w3, &copied.w3, (inner, latent)),
            ] {
                assert_eq!((a.rows(), a.cols()), shape);
                assert_eq!(decoded(a), decoded(b), "layer {layer} expert {expert}");
            }
        }
    }
    let experts = config.moe.num_experts;
    assert_eq!(read.experts().len(), (config.num_hidden_layers() - 1) * experts);
    assert_eq!(seen + read.experts().len() * 6 + 2, tensors);
    for (layer, expert) in
        [(0, 0), (1, experts as u32), (config.num_hidden_layers(), 0), (usize::MAX, u32::MAX)]
    {
        assert!(matches!(read.expert(layer, expert), Err(Error::NoSuchExpert { .. })), "{layer} {expert}");
    }
}

#[test]
fn tiny_k3_opens_and_every_tensor_loads() {
    check_fixture("tiny-k3", Variant::K3, count("tiny-k3"));
}

#[test]
fn tiny_k31_opens_and_every_tensor_loads() {
    check_fixture("tiny-k31", Variant::K31, count("tiny-k31"));
}

#[test]
fn dims_k31_opens_and_every_tensor_loads() {
    check_fixture("dims-k31", Variant::K31, count("dims-k31"));
}

fn count(name: &str) -> usize {
    Snapshot::of(name).tensors.len()
}

#[test]
fn values_are_those_of_the_file() {
    let mut snapshot = Snapshot::of("dims-k31");
    let name = "language_model.model.layers.2.self_attn.q_conv1d.weight";
    let bytes = snapshot.get(name).bytes.clone();
    let expected: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let checkpoint = snapshot.good();
    assert_eq!(checkpoint.vector(TensorId::layer(2, Role::QConv1d)).expect("taps"), expected);
    let wide = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    let bytes = snapshot.get("language_model.lm_head.weight").bytes.clone();
    let expected: Vec<f32> = bytes.chunks(2).map(wide).collect();
    assert_eq!(decoded(&checkpoint.matrix(TensorId::model(Role::LmHead)).expect("head")), expected);
    // The nibbles of an expert: low is the even column.
    let packed = snapshot
        .get("language_model.model.layers.4.block_sparse_moe.experts.7.w2.weight_packed")
        .bytes
        .clone();
    let w2 = checkpoint.expert(4, 7).expect("expert").w2;
    let k3_quant::Row::Mxfp4 { packed: row, .. } = w2.row(0) else { panic!("not MXFP4") };
    assert_eq!(row, &packed[..row.len()]);
}

#[test]
fn a_model_without_an_indexer_has_no_indexer_tensors() {
    let k3 = Checkpoint::open(&fixture("tiny-k3"), &OpenOptions::default()).expect("opens");
    for id in [
        TensorId::layer(3, Role::IndexerWk),
        TensorId::layer(3, Role::QProj),
        TensorId::layer(0, Role::RouterGate),
        TensorId::layer(13, Role::OProj),
        TensorId::model(Role::OProj),
        TensorId::layer(0, Role::LmHead),
    ] {
        assert!(matches!(k3.tensor(id), Err(Error::NoSuchTensor { .. })), "{id}");
    }
    assert!(k3.indexer_names().is_none());
}

#[test]
fn files_beside_the_shards_are_read_or_refused() {
    let mut snapshot = Snapshot::of("dims-k31");
    snapshot.generation = Some(json!({"eos_token_id": [2, 3], "temperature": 1.0}));
    assert_eq!(snapshot.good().generation_config().eos, [2, 3]);
    snapshot.generation = Some(json!({"eos_token_id": "2"}));
    assert!(matches!(snapshot.open(), Err(Error::Config(e)) if e.problems[0].field == "eos_token_id"));

    snapshot.generation = None;
    let dir = snapshot.write();
    let open = || Checkpoint::open(dir.path(), &OpenOptions::default());
    let config = dir.path().join("config.json");
    let good = std::fs::read(&config).expect("read");
    let wide: Vec<u8> = good.iter().flat_map(|&b| [b, 0]).collect();
    let with_mark = |mark: &[u8], text: &[u8]| [mark, text].concat();
    for (text, part) in [
        (b"{".to_vec(), "config.json"),
        (b"<!doctype html><html>".to_vec(), "HTML page"),
        (b"".to_vec(), "config.json"),
        (with_mark(b"\xef\xbb\xbf", &good), "behind a byte order mark; save it as UTF-8 without one"),
        (with_mark(b"\xff\xfe", &wide), "text in UTF-16"),
        (with_mark(b"\xfe\xff\0", &wide), "text in UTF-16"),
        (wide.clone(), "text in UTF-16"),
    ] {
        std::fs::write(&config, text).expect("write");
        let error = open().expect_err("no JSON").to_string();
        assert!(error.contains(part) && error.contains("config.json"), "{error}");
    }
    std::fs::remove_file(&config).expect("remove");
    std::fs::write(dir.path().join("tokenizer_config.json"), "{}").expect("write");
    let error = open().expect_err("no config");
    assert!(matches!(&error, Error::NoConfig { dir: d, .. } if d == dir.path()));
    let words = "has no config.json; it holds 2 .safetensors file(s), model.safetensors.index.json, \
                 tokenizer_config.json: download config.json";
    assert!(error.to_string().contains(words), "{error}");
    // An absent shard explains more than an absent config.
    std::fs::remove_file(dir.path().join("model-00001-of-000002.safetensors")).expect("remove");
    assert!(matches!(open(), Err(Error::Shards(_))));
    let nowhere = Checkpoint::open(&dir.path().join("nowhere"), &OpenOptions::default());
    assert!(matches!(nowhere, Err(Error::Shards(_))));
}

#[test]
fn the_gate_sees_the_whole_snapshot() {
    let gate = |name: &str, change: &dyn Fn(&mut Snapshot)| {
        let mut snapshot = Snapshot::of(name);
        change(&mut snapshot);
        match snapshot.open() {
            Err(Error::Gate(e)) => format!("{e:?}"),
            other => panic!("expected a gate error, got {other:?}"),
        }
    };
    let k3 = |s: &mut Snapshot| s.config["model_type"] = json!("kimi_k3");
    let k31 = |s: &mut Snapshot| s.config["model_type"] = json!("kimi_k31");
    let no_dsa = |s: &mut Snapshot| _ = s.text().remove("dsa_config");
    let dsa = json!({"dsa_layers": [4, 8, 12, 13], "index_topk": 16, "index_rope_dim": 0});
    let strip = |s: &mut Snapshot| s.tensors.retain(|t| !t.name.contains(".indexer."));
    assert!(gate("dims-k31", &k3).starts_with("WrapperSaysK3 { found: 10 }"));
    assert!(gate("dims-k31", &|s| (k3(s), no_dsa(s)).1).starts_with("IndexerTensorsOnK3"));
    assert!(gate("dims-k31", &no_dsa).starts_with("DsaConfigMissing"));
    assert!(gate("dims-k31", &|s| (strip(s), k3(s)).1).starts_with("DsaConfigOnK3"));
    let missing = gate("dims-k31", &strip);
    assert!(
        missing.starts_with("IndexerTensorsMissing") && missing.contains("layers.3.self_attn.indexer.wk")
    );
    assert!(gate("tiny-k3", &k31).starts_with("VariantMarkerOnly"));
    assert!(
        gate("tiny-k3", &|s| _ = s.text().insert("dsa_config".into(), dsa.clone()))
            .starts_with("DsaConfigOnK3")
    );
    let partial =
        gate("dims-k31", &|s| _ = s.remove("language_model.model.layers.4.self_attn.indexer.k_norm.bias"));
    assert!(
        partial.starts_with("IndexerTensorsPartial")
            && partial.contains("layers.4.self_attn.indexer.k_norm.bias")
    );
    let outside = gate("dims-k31", &|s| {
        s.add("language_model.model.layers.0.self_attn.indexer.wk.weight", "BF16", &[1], vec![0, 0]);
    });
    assert!(
        outside.starts_with("IndexerTensorsPartial") && outside.contains("layers.0.self_attn.indexer.wk")
    );
}
