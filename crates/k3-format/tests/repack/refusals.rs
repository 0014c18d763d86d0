//! Blocks that cannot be converted, and those that only look so.

use k3_format::repack::{
    ExpertTarget, Exponents, Recipe, Refusal, Refusals, RepackError, RunOptions, VerifyMode,
};

use super::Workshop;
use super::snapshot::Snapshot;

fn name(layer: usize, expert: usize, part: &str) -> String {
    format!("language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}")
}

/// Sets the scale of a block; `zero` also clears its codes, but for signs.
fn set(
    snapshot: &mut Snapshot,
    (layer, expert, matrix): (usize, usize, &str),
    block: usize,
    e: u8,
    zero: bool,
) {
    snapshot.get(&name(layer, expert, &format!("{matrix}.weight_scale"))).bytes[block] = e;
    let packed = &mut snapshot.get(&name(layer, expert, &format!("{matrix}.weight_packed"))).bytes;
    let codes = &mut packed[16 * block..16 * (block + 1)];
    if zero {
        codes.iter_mut().for_each(|byte| *byte &= 0x88);
    } else {
        codes[7] |= 0x20;
    }
}

fn refused(workshop: &Workshop, recipe: Recipe) -> Refusals {
    match workshop.run("tree", recipe, &RunOptions::default()) {
        Err(RepackError::Refused(refusals)) => refusals,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("nothing was refused"),
    }
}

#[test]
fn every_misfit_is_named_and_the_rest_is_written() {
    let mut snapshot = Snapshot::of("tiny-k31");
    // w1 [96, 64] has two blocks a row, w2 [64, 96] three.
    set(&mut snapshot, (1, 3, "w1"), 2 * 50 + 1, 60, false);
    set(&mut snapshot, (1, 3, "w1"), 2 * 51, 61, false);
    set(&mut snapshot, (4, 15, "w2"), 3 * 10 + 2, 255, true);
    let workshop = Workshop::new(&snapshot);
    let refusals = refused(&workshop, Recipe::default());
    assert_eq!(refusals.total, 2);
    let Refusal { layer, expert, matrix, row, block, e, kmax, blocks, why, .. } = &refusals.first[0];
    assert_eq!((*layer, *expert, *matrix, *row, *block, *e, *blocks), (1, 3, "w1", 50, 1, 60, 2));
    let kmax = kmax.expect("live blocks");
    assert!((-8..=0).contains(&kmax), "{kmax}");
    assert!(why.contains("17 binades"), "{why}");
    let second = &refusals.first[1];
    assert_eq!((second.layer, second.expert, second.matrix, second.row), (4, 15, "w2", 10));
    assert_eq!((second.block, second.e), (2, 255));
    let text = refusals.to_string();
    assert!(text.contains("(layer 1, expert 3, matrix w1): row 50, block 1: e = 60, kmax = "), "{text}");

    // All shards but those of the two layers are there, and no index says that the tree is whole.
    let files = workshop.files("tree");
    let shards = files.keys().filter(|name| name.ends_with(".safetensors")).count();
    assert_eq!(shards, 13);
    for absent in [
        "model-00002-of-00015.safetensors",
        "model-00005-of-00015.safetensors",
        "model.safetensors.index.json",
    ] {
        assert!(!files.contains_key(absent), "{absent}");
    }

    // Nor is there a part of them.
    assert!(!files.keys().any(|name| name.ends_with(".partial")), "{:?}", files.keys());

    // As MXFP4 only NaN is refused.
    let other = Workshop::new(&snapshot);
    let refusals = refused(&other, Recipe::default().experts(ExpertTarget::Mxfp4));
    assert_eq!((refusals.total, refusals.first[0].e), (1, 255));
    assert_eq!((refusals.nan, refusals.as_nvfp4_only()), (1, 0));
}

/// What is advised would help, and each reason is counted for itself.
#[test]
fn advice_and_counts() {
    let (advice, damaged) = ("--experts mxfp4", "the source is damaged");
    let check = |changes: &[(u8, usize)], recipe: Recipe, nan: usize, window: usize, wanted, unwanted| {
        let mut snapshot = Snapshot::of("tiny-k31");
        for &(e, expert) in changes {
            set(&mut snapshot, (1, expert, "w1"), usize::from(e) % 5, e, false);
        }
        let refusals = refused(&Workshop::new(&snapshot), recipe);
        let text = refusals.to_string();
        assert_eq!((refusals.nan, refusals.as_nvfp4_only()), (nan, window), "{text}");
        assert!(text.contains(wanted) && !text.contains(unwanted), "{text}");
        text
    };
    let (nvfp4, mxfp4) = (Recipe::default(), Recipe::default().experts(ExpertTarget::Mxfp4));
    check(&[(60, 3)], nvfp4, 0, 1, advice, damaged);
    check(&[(255, 3)], nvfp4, 1, 0, damaged, advice);
    check(&[(60, 3), (255, 4)], nvfp4, 1, 1, damaged, advice);
    check(&[(60, 3), (255, 4)], mxfp4, 1, 0, damaged, advice);
    // In one matrix: as MXFP4 it would be refused as well.
    let text = check(&[(61, 3), (255, 3), (62, 3)], nvfp4, 1, 0, damaged, advice);
    assert!(text.contains("2 block(s) that do not fit, 1 NaN"), "{text}");
}

/// What was read is told of every layer, also where something is refused.
#[test]
fn exponents_of_refused_and_of_partial_runs() {
    let mut snapshot = Snapshot::of("tiny-k31");
    set(&mut snapshot, (4, 15, "w2"), 1, 255, false);
    set(&mut snapshot, (6, 2, "w2"), 1, 20, false);
    let workshop = Workshop::new(&snapshot);
    let outcome = workshop.part("tree", 0..3);
    let layers = |exponents: &[Exponents]| exponents.iter().filter_map(|e| e.layer).collect::<Vec<_>>();
    assert_eq!(layers(&outcome.exponents), [1, 2]);
    // Layers 1 and 2 are of the run before.
    let refusals = refused(&workshop, Recipe::default());
    assert_eq!(layers(&refusals.exponents), (1..13).collect::<Vec<_>>());
    let of = |layer: usize| refusals.exponents.iter().find(|e| e.layer == Some(layer)).expect("a layer");
    assert_eq!(of(4).histogram[&255], 1);
    assert_eq!((of(6).histogram[&20], of(6).kmin), (1, Some(20 - 127)));
}

/// Gate and up share a scale, so a block of one may lie too far below the other's.
#[test]
fn gate_and_up_are_judged_together() {
    let fill = |snapshot: &mut Snapshot, matrix: &str, e: u8| {
        snapshot.get(&name(2, 0, &format!("{matrix}.weight_scale"))).bytes.fill(e);
    };
    let mut snapshot = Snapshot::of("tiny-k31");
    fill(&mut snapshot, "w1", 110);
    fill(&mut snapshot, "w3", 127);
    fill(&mut snapshot, "w2", 90);
    let workshop = Workshop::new(&snapshot);
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    let outcome = workshop.tree("tree", Recipe::default(), &options);
    let report = outcome.report.expect("a report");
    let layer = report.shards.iter().filter_map(|s| s.exponents.as_ref()).find(|l| l.layer == Some(2));
    let layer = layer.expect("layer 2");
    assert_eq!((layer.widest, layer.kmin), (Some(17), Some(90 - 127)));
    let tree = super::open(&workshop.out.path().join("tree"));
    let scales = tree.experts().global_scales(2, 0).expect("scales").expect("NVFP4");
    assert_eq!(scales.map(k3_quant::GlobalScale::stored), [256.0, 2f32.powi(45), 256.0]);

    fill(&mut snapshot, "w1", 109);
    let refusals = refused(&Workshop::new(&snapshot), Recipe::default());
    assert_eq!((refusals.total, refusals.first[0].matrix, refusals.first[0].kmax), (1, "w1", Some(0)));
    assert_eq!(refusals.first[0].blocks, 192);
}

/// Blocks of zeros never count, whatever their scale, and are counted.
#[test]
fn blocks_of_zeros() {
    let mut snapshot = Snapshot::of("tiny-k31");
    for e in 0..=254_usize {
        set(&mut snapshot, (3, e / 128, "w1"), e % 128, e as u8, true);
    }
    let all_zero = name(5, 5, "w2.weight_packed");
    snapshot.get(&all_zero).bytes.fill(0x80);
    let workshop = Workshop::new(&snapshot);
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    let outcome = workshop.tree("tree", Recipe::default(), &options);
    let (report, proof) = (outcome.report.expect("a report"), outcome.proof.expect("a proof"));
    assert_eq!(report.exponents.zero_blocks, 255 + 192);
    assert_eq!(proof.zero_blocks, 255 + 192);
    assert_eq!(proof.zero_blocks_with_other_scale, report.exponents.zero_blocks_replaced);
    // At most 18 of the 128 exponents of an expert fit.
    assert!((255 - 36..=255).contains(&report.exponents.zero_blocks_replaced));

    let mx = workshop.tree("mx", Recipe::default().experts(ExpertTarget::Mxfp4), &options);
    assert_eq!(mx.proof.expect("a proof").zero_blocks_with_other_scale, 0);
    assert_eq!(mx.report.expect("a report").exponents.zero_blocks_replaced, 0);
}

/// A matrix scale that our own reader would refuse is refused before it is written.
#[test]
fn weights_as_large_as_no_weights_are() {
    let mut snapshot = Snapshot::of("tiny-k31");
    snapshot.get(&name(6, 1, "w2.weight_scale")).bytes.fill(142);
    let refusals = refused(&Workshop::new(&snapshot), Recipe::default());
    assert_eq!((refusals.total, refusals.first[0].e, refusals.first[0].kmax), (1, 142, Some(15)));
    snapshot.get(&name(6, 1, "w2.weight_scale")).bytes.fill(141);
    Workshop::new(&snapshot).tree("tree", Recipe::default(), &RunOptions::default());
}

/// NVFP4 is no source.
#[test]
fn only_mxfp4_is_converted() {
    let workshop = Workshop::of("tiny-k31");
    workshop.tree("first", Recipe::default(), &RunOptions::default());
    let first = workshop.out.path().join("first");
    let second =
        super::run(&first, &workshop.out.path().join("second"), Recipe::default(), &RunOptions::default());
    assert!(matches!(second, Err(RepackError::SourceFormat { .. })));
    assert!(!workshop.out.path().join("second").exists());
}
