//! Repacked trees with quantized dense matrices: whole, reported, verified, run.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use k3_format::repack::{
    DenseFormat, ExpertTarget, Naming, Outcome, Recipe, Repack, RepackError, RunOptions, VerifyMode,
};
use k3_format::{Checkpoint, LinearFormat, OpenOptions, Role, TensorId, Warning};
use support::{copy, fixture, selfcheck, temporary};
use xtask::OpenArgs;
use xtask::drift::{self, Drift};
use xtask::selfcheck::Args;

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

fn repack(
    source: &Path,
    target: &Path,
    recipe: Recipe,
    change: impl Fn(RunOptions) -> RunOptions,
) -> Result<Outcome, RepackError> {
    let source = open(source);
    Repack::new(&source, recipe)?.run(target, &change(RunOptions::default()), &mut |_| {})
}

fn full(mut options: RunOptions) -> RunOptions {
    options.verify = VerifyMode::Full;
    options
}

/// Every file of a tree.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let item = |item: fs::DirEntry| (item.file_name().into_string().unwrap(), fs::read(item.path()).unwrap());
    fs::read_dir(dir).unwrap().map(|i| item(i.unwrap())).collect()
}

fn drift(source: &Path, other: &Path) -> Drift {
    let (source, other) = (source.to_owned(), other.to_owned());
    let open = OpenArgs::default();
    drift::measure(&drift::Args {
        source,
        other,
        ids: None,
        tokens: 48,
        arithmetic: k3_graph::Mode::Exact,
        threads: 2,
        open,
        json: false,
    })
    .unwrap()
}

/// Every combination that there is.
fn recipes() -> Vec<(Recipe, LinearFormat)> {
    use DenseFormat::{Int4, Int8, Nvfp4};
    let recipe = |experts, names, dense| Recipe::default().experts(experts).names(names).dense(dense);
    let (nv, mx) = (ExpertTarget::Nvfp4, ExpertTarget::Mxfp4);
    let (ct, mo) = (Naming::CompressedTensors, Naming::ModelOpt);
    vec![
        (recipe(nv, ct, Nvfp4), LinearFormat::Nvfp4CompressedTensors),
        (recipe(mx, ct, Nvfp4), LinearFormat::Nvfp4CompressedTensors),
        (recipe(nv, mo, Nvfp4), LinearFormat::Nvfp4ModelOpt),
        (recipe(nv, ct, Int8), LinearFormat::Int8),
        (recipe(mx, ct, Int8), LinearFormat::Int8),
        (recipe(nv, ct, Int4), LinearFormat::Int4),
        (recipe(mx, ct, Int4), LinearFormat::Int4),
    ]
}

#[test]
fn every_format_opens_verifies_and_runs() {
    let source = fixture("tiny-k31");
    let mut drifts: BTreeMap<String, Drift> = BTreeMap::new();
    for (recipe, format) in recipes() {
        let dir = temporary();
        let target = dir.path().join("tree");
        let outcome = repack(&source, &target, recipe, full).unwrap_or_else(|e| panic!("{recipe}: {e}"));
        let report = outcome.report.expect("finished");
        let tree = open(&target);

        // The config and the tensors say the same, and nothing else is odd.
        let vision = Warning::Skipped { vision: 2, activation_scales: 0, cache_scales: 0 };
        if format == LinearFormat::Nvfp4ModelOpt {
            assert!(matches!(tree.warnings(), [Warning::Skipped { .. }]), "{recipe}: {:?}", tree.warnings());
        } else {
            assert_eq!(tree.warnings(), [vision], "{recipe}");
        }
        let formats = tree.linear_formats();
        assert_eq!(formats.keys().copied().collect::<Vec<_>>(), [format], "{recipe}");
        // 9 KDA layers of 5, 4 full-attention layers of 5, 3 of the dense MLP, 12 of 5 beside experts.
        let (quantized, plain) = (formats[&format].0, report.not_quantized.len());
        assert_eq!(quantized + plain, 9 * 5 + 4 * 5 + 3 + 12 * 5, "{recipe}");
        assert_eq!(plain > 0, format == LinearFormat::Int4, "{recipe}");
        assert_eq!(tree.linear_format(TensorId::model(Role::LmHead)), None);
        assert!(tree.resident_bytes() < open(&source).resident_bytes());

        // The rounding of every matrix is reported, and of the right size.
        let kinds: usize = report.rounding.iter().map(|kind| kind.matrices).sum();
        assert_eq!(kinds, quantized, "{recipe}");
        let bounds = match format {
            LinearFormat::Int8 => 0.002..0.02,
            _ => 0.03..0.15,
        };
        for kind in &report.rounding {
            assert!(bounds.contains(&kind.relative_l2), "{recipe}: {kind:?}");
            assert!(kind.worst_relative_l2 >= kind.relative_l2 && kind.largest > 0.0);
        }
        let proof = outcome.proof.expect("verified");
        assert_eq!(proof.quantized_tensors, quantized as u64);

        // It runs, and the same way for all chunks and cycles.
        let (reports, text) = selfcheck(&Args { model: Some(target.clone()), ..Args::default() });
        assert!(reports[0].is_good(), "{recipe}: {text}");
        let found = drift(&source, &target);
        println!("{recipe}: {found:?}");
        assert!(!found.identical && found.relative_l2 > 1e-3, "{recipe}");
        // Experts are converted without loss: their format changes no bit.
        let key = format.weight_format().to_string();
        let known = drifts.entry(key).or_insert_with(|| found.clone());
        assert_eq!(*known, Drift { pinned_bytes: known.pinned_bytes, ..found }, "{recipe}");
    }
}

#[test]
fn a_tree_without_loss_has_the_same_logits() {
    let dir = temporary();
    repack(&fixture("tiny-k31"), &dir.path().join("tree"), Recipe::default(), full).unwrap();
    assert!(drift(&fixture("tiny-k31"), &dir.path().join("tree")).identical);
}

#[test]
fn runs_over_some_layers_give_the_same_tree() {
    for dense in [DenseFormat::Nvfp4, DenseFormat::Int8, DenseFormat::Int4] {
        let recipe = Recipe::default().dense(dense);
        let dir = temporary();
        let (once, twice) = (dir.path().join("once"), dir.path().join("twice"));
        repack(&fixture("dims-k31"), &once, recipe, |o| o).unwrap();
        for layers in [2..4, 0..2, 4..5] {
            let outcome = repack(&fixture("dims-k31"), &twice, recipe, |mut options| {
                options.layers = Some(layers.clone());
                options.jobs = 1;
                options
            });
            assert_eq!(outcome.unwrap().report.is_some(), layers == (4..5));
        }
        assert!(files(&once) == files(&twice), "{dense}");
    }
}

#[test]
fn a_changed_byte_is_found() {
    let recipe = Recipe::default().dense(DenseFormat::Int4);
    for part in ["weight_packed", "weight_scale", "weight_shape"] {
        let dir = temporary();
        let target = dir.path().join("tree");
        repack(&fixture("dims-k31"), &target, recipe, |o| o).unwrap();
        let name = format!("language_model.model.layers.0.self_attn.q_proj.{part}");
        let tree = open(&target);
        let tensor = tree.shards().get(&name).unwrap();
        let (file, at) = (tree.shards().files()[tensor.shard].path.clone(), tensor.begin as usize + 1);
        let mut bytes = fs::read(&file).unwrap();
        bytes[at] ^= 1;
        fs::write(&file, bytes).unwrap();
        let error = repack(&fixture("dims-k31"), &target, recipe, full).unwrap_err().to_string();
        let is_told = error.contains(&format!("`{name}` at [0")) && error.contains("is not what quantizing");
        assert!(is_told, "{error}");
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let source = open(&fixture("tiny-k31"));
    for dense in [DenseFormat::Int8, DenseFormat::Int4] {
        let recipe = Recipe::default().names(Naming::ModelOpt).dense(dense);
        let error = Repack::new(&source, recipe).err().expect("refused");
        assert!(
            matches!(error, RepackError::Recipe { .. }) && error.to_string().contains("--dense nvfp4"),
            "{error}"
        );
    }
    // A tree that is quantized is no source.
    let dir = temporary();
    let target = dir.path().join("tree");
    let recipe = Recipe::default().experts(ExpertTarget::Mxfp4).dense(DenseFormat::Int8);
    repack(&fixture("tiny-k31"), &target, recipe, |o| o).unwrap();
    let tree = open(&target);
    for again in [Recipe::default(), recipe] {
        let error = Repack::new(&tree, again).err().expect("refused");
        assert!(matches!(error, RepackError::SourceQuantized { count: 128, .. }), "{error}");
    }
}

#[test]
fn a_matrix_that_is_damaged_is_refused_with_its_place() {
    for dense in [DenseFormat::Nvfp4, DenseFormat::Int8, DenseFormat::Int4] {
        let damaged = copy("dims-k31", &["expected.json", "expected.safetensors", "trace.safetensors"]);
        let name = "language_model.model.layers.1.self_attn.v_proj.weight";
        let source = open(damaged.path());
        let tensor = source.shards().get(name).unwrap();
        let (file, at) = (source.shards().files()[tensor.shard].path.clone(), tensor.begin as usize);
        drop(source);
        let mut bytes = fs::read(&file).unwrap();
        let at = at + 2 * (200 * 128 + 77);
        bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
        fs::write(&file, bytes).unwrap();
        let dir = temporary();
        let recipe = Recipe::default().dense(dense);
        let error = repack(damaged.path(), &dir.path().join("tree"), recipe, |o| o).unwrap_err();
        let RepackError::NotAWeight { name: found, source } = &error else { panic!("{error}") };
        assert_eq!((found.as_str(), source.row, source.column), (name, 200, 77), "{dense}");
    }
}
