//! The same tensors at other offsets, in other shards and in the other float type: nothing changes.

use k3_format::names::{Extent, Names};
use k3_format::{Checkpoint, Dtype, ExpertLocation, LoadMode, OpenOptions, Warning};

use crate::snapshot::{Snapshot, fixture};
use crate::{check_same_expert, decoded};

const OTHER: &str = "model-00002-of-000002.safetensors";

fn source() -> Checkpoint {
    Checkpoint::open(&fixture("dims-k31"), &OpenOptions::default()).expect("opens")
}

/// Every tensor and every expert has the same values as in the fixture, read and mapped.
fn check_equal(snapshot: &Snapshot) -> Checkpoint {
    let source = source();
    for load in [LoadMode::Read, LoadMode::Map] {
        let found = snapshot.open_with(&OpenOptions::default().load(load)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found.config(), source.config());
        for (id, entry) in Names::tensors(source.config()) {
            if matches!(entry.extent(source.config()), Extent::Matrix(..)) {
                let (a, b) = (source.matrix(id).expect("there"), found.matrix(id).expect("there"));
                assert_eq!(decoded(&a), decoded(&b), "{id} {load:?}");
            } else {
                assert_eq!(source.vector(id).expect("there"), found.vector(id).expect("there"), "{id}");
            }
        }
        for layer in 1..source.config().num_hidden_layers() {
            for expert in 0..source.config().moe.num_experts as u32 {
                check_same_expert(&source, &found, layer, expert);
            }
        }
    }
    snapshot.good()
}

#[test]
fn data_may_begin_at_any_byte() {
    let mut snapshot = Snapshot::of("dims-k31");
    snapshot.odd = true;
    let checkpoint = check_equal(&snapshot);
    assert!(checkpoint.shards().files().iter().all(|file| file.data_start % 2 == 1));
    let misaligned = |dtype| checkpoint.shards().iter().any(|t| t.dtype == dtype && t.begin % 2 == 1);
    assert!(misaligned(Dtype::BF16) && misaligned(Dtype::F32));
}

#[test]
fn all_six_parts_of_every_expert_may_be_apart() {
    let mut snapshot = Snapshot::of("dims-k31");
    // By part instead of by expert: no part of an expert has another one beside it.
    snapshot.tensors.sort_by_key(|t| t.name.rsplit('.').take(2).collect::<Vec<_>>().join("."));
    let checkpoint = check_equal(&snapshot);
    assert_eq!(checkpoint.experts().scattered(), checkpoint.experts().len());
    let layout = checkpoint.experts().layout();
    let ExpertLocation::Scattered(parts) = checkpoint.experts().location(2, 3).expect("there") else {
        panic!("scattered")
    };
    let mut ranges: Vec<_> =
        parts.iter().zip(&layout.parts).map(|(p, r)| (p.shard, p.begin, p.begin + r.len() as u64)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|w| w[0].0 != w[1].0 || w[0].2 < w[1].1), "{ranges:?}");
}

#[test]
fn an_expert_may_be_split_over_two_shards_after_any_part() {
    let order =
        ["w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale", "w3.weight_packed"];
    for split in 1..=order.len() {
        let mut snapshot = Snapshot::of("dims-k31");
        let prefix = "language_model.model.layers.1.block_sparse_moe.experts.0";
        let first = snapshot.get(&format!("{prefix}.w1.weight_packed")).shard.clone();
        assert_ne!(first, OTHER);
        for t in snapshot.tensors.iter_mut().filter(|t| t.name.starts_with(prefix)) {
            if !order[..split].iter().any(|part| t.name.ends_with(part)) {
                t.shard = OTHER.into();
            }
        }
        let checkpoint = check_equal(&snapshot);
        assert!(checkpoint.warnings().contains(&Warning::ScatteredExperts(1)), "split after {split}");
    }
}

#[test]
fn every_bf16_tensor_may_be_stored_as_f32() {
    let mut snapshot = Snapshot::of("dims-k31");
    let mut widened = 0;
    for t in snapshot.tensors.iter_mut().filter(|t| t.dtype == "BF16") {
        t.bytes = t.bytes.chunks(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
        t.dtype = "F32".into();
        widened += 1;
    }
    assert!(widened > 50, "{widened}");
    let checkpoint = check_equal(&snapshot);
    let narrower = |w: &Warning| matches!(w, Warning::NarrowerThanRelease(_));
    assert!(!checkpoint.warnings().iter().any(narrower), "{:?}", checkpoint.warnings());
}

#[test]
fn f32_tensors_may_be_stored_as_bf16_and_are_named() {
    let mut snapshot = Snapshot::of("dims-k31");
    let mut narrowed = Vec::new();
    for t in snapshot.tensors.iter_mut().filter(|t| t.dtype == "F32") {
        t.bytes = t.bytes.chunks(4).flat_map(|b| [b[2], b[3]]).collect();
        t.dtype = "BF16".into();
        narrowed.push(t.name.clone());
    }
    narrowed.sort_unstable();
    let checkpoint = snapshot.good();
    let named = checkpoint.warnings().iter().find_map(|w| match w {
        Warning::NarrowerThanRelease(names) => Some(names.clone()),
        _ => None,
    });
    let mut named = named.expect("a warning");
    named.sort_unstable();
    assert_eq!(named, narrowed);
    let source = source();
    for (id, entry) in Names::tensors(source.config()).filter(|(_, entry)| entry.release == Dtype::F32) {
        let exact = source.vector(id).expect("there");
        let cut: Vec<f32> = exact.iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
        assert_eq!(checkpoint.vector(id).expect("there"), cut, "{} {id}", entry.suffix);
    }
}
