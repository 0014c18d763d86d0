//! Finding the indexer tensors under other names (`docs/checkpoint.md` 9).

use k3_format::{
    Checkpoint, Error, GateError, IndexerNames, OpenOptions, ResolvedBy, Role, TensorId, Warning,
};
use serde_json::json;

use crate::snapshot::{Snapshot, bf16s, fixture};

/// `dims-k31` with the five tensors renamed; names in the order query, key, gain, bias, head weights.
fn renamed(names: [&str; 5]) -> Snapshot {
    let mut snapshot = Snapshot::of("dims-k31");
    for layer in [3, 4] {
        for (from, to) in ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"]
            .into_iter()
            .zip(names)
        {
            let prefix = format!("language_model.model.layers.{layer}");
            snapshot.get(&format!("{prefix}.self_attn.indexer.{from}")).name = format!("{prefix}.{to}");
        }
    }
    snapshot
}

const OTHER: [&str; 5] = ["ix.q.weight", "ix.k.weight", "ix.ln.weight", "ix.ln.bias", "ix.heads.weight"];

fn check(snapshot: &Snapshot, names: [&str; 5], by: ResolvedBy) {
    let checkpoint = snapshot.good();
    let found = checkpoint.indexer_names().expect("K3.1");
    assert_eq!(found.by, by);
    assert_eq!(found.names.all().map(|(_, name)| name), names);
    assert!(checkpoint.warnings().contains(&Warning::IndexerNames(found.clone())));
    assert!(found.to_string().contains(names[4]), "{found}");
    let original = Checkpoint::open(&fixture("dims-k31"), &OpenOptions::default()).expect("the fixture");
    for role in [Role::IndexerKNormWeight, Role::IndexerKNormBias] {
        let id = TensorId::layer(4, role);
        assert_eq!(checkpoint.vector(id).expect("found"), original.vector(id).expect("there"), "{role:?}");
    }
    for role in [Role::IndexerWqB, Role::IndexerWk, Role::IndexerWeightsProj] {
        let id = TensorId::layer(3, role);
        let (a, b) = (checkpoint.matrix(id).expect("found"), original.matrix(id).expect("there"));
        assert_eq!(crate::decoded(&a), crate::decoded(&b), "{role:?}");
    }
}

fn partial_or_missing(snapshot: &Snapshot) -> String {
    match snapshot.open() {
        Err(Error::Gate(
            GateError::IndexerTensorsMissing { by_shape, .. }
            | GateError::IndexerTensorsPartial { by_shape, .. },
        )) => by_shape.expect("it was tried"),
        other => panic!("expected a gate error, got {other:?}"),
    }
}

#[test]
fn the_proposed_names_need_no_search() {
    let checkpoint = Checkpoint::open(&fixture("dims-k31"), &OpenOptions::default()).expect("opens");
    let found = checkpoint.indexer_names().expect("K3.1");
    assert_eq!((found.by, &found.names), (ResolvedBy::Table, &IndexerNames::default()));
    let indexer = checkpoint.config().indexer.as_ref().expect("K3.1");
    assert_eq!((indexer.n_heads, indexer.head_dim, indexer.topk), (4, 128, 32));
}

#[test]
fn names_can_be_given() {
    let snapshot = renamed(OTHER);
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("names.json");
    let text = json!({"query": OTHER[0], "key": OTHER[1], "key_norm_gain": OTHER[2], "key_norm_bias": OTHER[3],
                      "head_weights": OTHER[4]});
    std::fs::write(&file, text.to_string()).expect("write");
    let names = IndexerNames::load(&file).expect("valid");
    let checkpoint = snapshot.open_with(&OpenOptions::default().indexer_names(names.clone())).expect("opens");
    assert_eq!(checkpoint.indexer_names().expect("K3.1").by, ResolvedBy::Caller);
    // Names that were given are not second-guessed.
    let wrong = IndexerNames { query: "ix.other".into(), ..names };
    let result = snapshot.open_with(&OpenOptions::default().indexer_names(wrong));
    assert!(matches!(result, Err(Error::Gate(GateError::IndexerTensorsPartial { .. }))), "{result:?}");

    for bad in
        [json!({"key": "a", "query": "a"}), json!({"key": ""}), json!({"key": "self_attn.o_proj.weight"})]
    {
        std::fs::write(&file, bad.to_string()).expect("write");
        assert!(matches!(IndexerNames::load(&file), Err(Error::IndexerNames { .. })), "{bad}");
    }
    for bad in [json!({"kee": "a"}), json!({"key": 3}), json!([])] {
        std::fs::write(&file, bad.to_string()).expect("write");
        assert!(matches!(IndexerNames::load(&file), Err(Error::Json { .. })), "{bad}");
    }
}

#[test]
fn shapes_tell_the_five_apart() {
    check(&renamed(OTHER), OTHER, ResolvedBy::ShapeAndName);
    // One name of five differs.
    let one = [
        "self_attn.indexer.q_proj.weight",
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.k_norm.bias",
        "self_attn.indexer.weights_proj.weight",
    ];
    check(&renamed(one), one, ResolvedBy::ShapeAndName);
}

#[test]
fn values_tell_gain_from_bias_when_names_do_not() {
    let names = ["ix.q", "ix.k", "ix.ln.gamma", "ix.ln.beta", "ix.heads"];
    check(&renamed(names), names, ResolvedBy::ShapeAndValues);
    let names = ["ix.q", "ix.k", "ix.ln.a", "ix.ln.b", "ix.heads"];
    check(&renamed(names), names, ResolvedBy::ShapeAndValues);
    let mut unclear = renamed(names);
    unclear.get("language_model.model.layers.4.ix.ln.a").bytes = bf16s(&[0.0; 128]);
    assert!(partial_or_missing(&unclear).contains("which of ix.ln.a and ix.ln.b is the gain"));
}

#[test]
fn shapes_that_do_not_fit_are_not_forced() {
    let mut six = renamed(OTHER);
    six.add("language_model.model.layers.3.ix.more", "BF16", &[2], vec![0; 4]);
    assert!(partial_or_missing(&six).contains("6 unknown tensors"));
    let mut uneven = renamed(OTHER);
    uneven.get("language_model.model.layers.4.ix.q.weight").name =
        "language_model.model.layers.4.ix.qq.weight".into();
    assert!(partial_or_missing(&uneven).contains("layers 3 and 4 differ"));
    let mut reshaped = renamed(OTHER);
    for layer in [3, 4] {
        reshaped.get(&format!("language_model.model.layers.{layer}.ix.q.weight")).shape = vec![256, 192];
    }
    assert!(partial_or_missing(&reshaped).contains("not those of an indexer"));
    let mut heads = renamed(OTHER);
    heads.text()["dsa_config"]["index_n_heads"] = json!(8);
    assert!(partial_or_missing(&heads).contains("not those of an indexer"));
}

#[test]
fn sizes_that_the_config_leaves_out_come_from_the_shapes() {
    let mut snapshot = Snapshot::of("dims-k31");
    let dsa = snapshot.text()["dsa_config"].as_object_mut().expect("an object");
    dsa.remove("index_n_heads");
    dsa.remove("index_head_dim");
    let checkpoint = snapshot.good();
    let indexer = checkpoint.config().indexer.as_ref().expect("K3.1");
    assert_eq!((indexer.n_heads, indexer.head_dim, indexer.topk), (4, 128, 32));
    // And shapes that contradict the config are refused.
    snapshot.text()["dsa_config"]["index_head_dim"] = json!(64);
    let (problems, total) = snapshot.problems();
    assert!(total == 8 && problems.iter().all(|p| p.name().contains(".indexer.")), "{problems:?}");
    snapshot.text()["dsa_config"].as_object_mut().expect("an object").remove("index_head_dim");
    snapshot.get("language_model.model.layers.3.self_attn.indexer.wk.weight").shape = vec![128 * 128];
    assert!(snapshot.problems().0[0].name().ends_with("layers.3.self_attn.indexer.wk.weight"));
}
