//! Routed experts in the three formats, in one piece or scattered.

use k3_format::{Error, ExpertFormat, ExpertLocation, TensorProblem, Warning};
use k3_quant::GlobalScale;
use serde_json::{Value, json};

use crate::snapshot::{Snapshot, Tensor, f32s};
use crate::{check_same_expert, decoded};

const EXPERT: &str = "language_model.model.layers.1.block_sparse_moe.experts.0";

fn snapshot() -> Snapshot {
    Snapshot::of("dims-k31")
}

fn is_expert(name: &str) -> bool {
    name.contains(".experts.")
}

/// The exponent of G: every matrix of these experts gets the same one.
fn exponent(snapshot: &Snapshot) -> i32 {
    let scales = snapshot.tensors.iter().filter(|t| is_expert(&t.name) && t.name.ends_with("weight_scale"));
    let largest = scales.flat_map(|t| t.bytes.iter()).max().expect("scales");
    i32::from(*largest) - 127 - 8
}

/// The E4M3 byte of `2^p`, by the table in `docs/nvfp4.md` 2.
fn e4m3(p: i32) -> u8 {
    match p {
        -6..=8 => ((p + 7) << 3) as u8,
        -9..=-7 => 1 << (p + 9),
        _ => panic!("2^{p} is no E4M3 number"),
    }
}

/// The same experts as NVFP4.
pub(crate) fn to_nvfp4(snapshot: &mut Snapshot, format: ExpertFormat) {
    let m = exponent(snapshot);
    let mut globals = Vec::new();
    for t in snapshot.tensors.iter_mut().filter(|t| is_expert(&t.name)) {
        if let Some(matrix) = t.name.strip_suffix(".weight_scale") {
            let matrix = matrix.to_owned();
            t.dtype = "F8_E4M3".into();
            t.shape[1] *= 2;
            t.bytes = t.bytes.iter().flat_map(|&e| [e4m3(i32::from(e) - 127 - m); 2]).collect();
            let g = 2f32.powi(m);
            let (name, shape, g) = match format {
                ExpertFormat::Nvfp4ModelOpt => ("weight_scale_2", vec![], g),
                _ => ("weight_global_scale", vec![1], 1.0 / g),
            };
            let name = format!("{matrix}.{name}");
            globals.push(Tensor {
                name,
                dtype: "F32".into(),
                shape,
                bytes: f32s(&[g]),
                shard: t.shard.clone(),
            });
        } else if format == ExpertFormat::Nvfp4ModelOpt {
            t.name = t.name.replace("weight_packed", "weight");
        }
    }
    snapshot.tensors.extend(globals);
    set_config(snapshot, format);
}

fn set_config(snapshot: &mut Snapshot, format: ExpertFormat) {
    if format == ExpertFormat::Nvfp4ModelOpt {
        snapshot.text().remove("quantization_config");
        let nvfp4 = json!({"quant_algo": "NVFP4", "group_size": 16});
        let layers: serde_json::Map<String, Value> =
            (1..5).map(|l| (format!("model.layers.{l}.mlp.experts"), nvfp4.clone())).collect();
        snapshot.config["quantization_config"] = json!({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers});
    } else {
        let config = &mut snapshot.text()["quantization_config"];
        config["format"] = json!("nvfp4-pack-quantized");
        config["config_groups"]["group_0"]["format"] = json!("nvfp4-pack-quantized");
        config["config_groups"]["group_0"]["weights"]["group_size"] = json!(16);
    }
}

#[test]
fn one_logical_weight_reads_the_same_in_all_three_formats() {
    let source = snapshot().good();
    assert_eq!(source.expert_format(), ExpertFormat::Mxfp4);
    assert_eq!(source.experts().global_scales(1, 0).expect("an expert"), None);
    for format in [ExpertFormat::Nvfp4CompressedTensors, ExpertFormat::Nvfp4ModelOpt] {
        let mut s = snapshot();
        to_nvfp4(&mut s, format);
        let checkpoint = s.good();
        assert_eq!(checkpoint.expert_format(), format);
        assert_eq!(checkpoint.experts().scattered(), 0);
        for (layer, expert) in [(1, 0), (2, 7), (4, 3)] {
            check_same_expert(&source, &checkpoint, layer, expert);
        }
        let globals = checkpoint.experts().global_scales(1, 0).expect("an expert").expect("NVFP4 has them");
        let factor = matches!(globals[0], GlobalScale::Factor(_));
        assert_eq!(factor, format == ExpertFormat::Nvfp4ModelOpt);
    }
}

#[test]
fn each_matrix_has_its_own_global_scale() {
    let mut s = snapshot();
    to_nvfp4(&mut s, ExpertFormat::Nvfp4ModelOpt);
    let prefix = "language_model.model.layers.2.block_sparse_moe.experts.5";
    for (matrix, g) in [("w1", 1.0), ("w2", 0.3), ("w3", 8.0)] {
        s.get(&format!("{prefix}.{matrix}.weight_scale_2")).bytes = f32s(&[g]);
    }
    let globals = s.good().experts().global_scales(2, 5).expect("an expert").expect("NVFP4 has them");
    assert_eq!(globals.map(GlobalScale::stored), [1.0, 0.3, 8.0]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let name = format!("{prefix}.w2.weight_scale_2");
        s.get(&name).bytes = f32s(&[bad]);
        assert!(matches!(s.problem(), TensorProblem::Value { name: n, .. } if n == name), "{bad}");
    }
}

/// `stored` as the global scale of one matrix: accepted, or refused with these words.
fn check_global(format: ExpertFormat, stored: f32, refused: Option<&str>) {
    let mut s = snapshot();
    to_nvfp4(&mut s, format);
    let part = if format == ExpertFormat::Nvfp4ModelOpt { "weight_scale_2" } else { "weight_global_scale" };
    let name = format!("{EXPERT}.w2.{part}");
    s.get(&name).bytes = f32s(&[stored]);
    let Some(words) = refused else {
        let globals = s.good().experts().global_scales(1, 0).expect("an expert").expect("NVFP4 has them");
        assert_eq!(globals[1].stored(), stored);
        return;
    };
    match s.problem() {
        TensorProblem::Value { name: n, what } => {
            assert_eq!(n, name);
            assert!(what.contains(words) && what.contains(&stored.to_string()), "{what}");
            let both = what.contains("weight_scale_2 is a factor")
                && what.contains("weight_global_scale is a divisor");
            assert!(both || !words.contains("inverse"), "{what}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_global_scale_in_the_inverse_sense_is_refused() {
    use ExpertFormat::{Nvfp4CompressedTensors as Divisor, Nvfp4ModelOpt as Factor};
    for good in [1.0, 8.0, 64.0, 1e-4, 2f32.powi(-13), 2f32.powi(-126)] {
        check_global(Factor, good, None);
    }
    for good in [1.0, 0.125, 0.015_625, 1e4, 2f32.powi(13), 2f32.powi(126)] {
        check_global(Divisor, good, None);
    }
    for bad in [64.1, 2f32.powi(13), 26_880.0, f32::MAX] {
        check_global(Factor, bad, Some("inverse sense, a divisor in the place of a factor"));
    }
    for bad in [0.0155, 2f32.powi(-13), 1e-4, f32::MIN_POSITIVE] {
        check_global(Divisor, bad, Some("inverse sense, a factor in the place of a divisor"));
    }
    for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40] {
        check_global(Factor, bad, Some("a normal number above 0"));
        check_global(Divisor, bad, Some("a normal number above 0"));
    }
    check_global(Divisor, f32::MAX, Some("no normal number as factor"));
}

#[test]
fn swapped_conventions_are_refused_for_every_matrix() {
    let mut s = snapshot();
    to_nvfp4(&mut s, ExpertFormat::Nvfp4ModelOpt);
    let scales = s.tensors.iter_mut().filter(|t| t.name.ends_with("weight_scale_2"));
    // As published trees have it, and the other way round.
    scales.for_each(|t| t.bytes = f32s(&[8192.0]));
    assert_eq!(s.problems().1, 4 * 8 * 3);
}

/// Changing the experts of layer 1, expert 0, w1 gives this problem and no other.
fn check(format: ExpertFormat, change: impl Fn(&mut Snapshot), expected: impl Fn(&TensorProblem) -> bool) {
    let mut s = snapshot();
    if format != ExpertFormat::Mxfp4 {
        to_nvfp4(&mut s, format);
    }
    change(&mut s);
    let (problems, _) = s.problems();
    assert!(problems.iter().any(expected), "{problems:?}");
    assert!(problems.iter().all(|p| p.name().starts_with(EXPERT)), "{problems:?}");
}

#[test]
fn parts_of_an_expert_must_fit_its_format() {
    use ExpertFormat::{Mxfp4, Nvfp4CompressedTensors, Nvfp4ModelOpt};
    use TensorProblem::{Dtype, Missing, Unexpected};
    let part = |name: &str| format!("{EXPERT}.w1.{name}");
    let rescale = |s: &mut Snapshot, dtype: &str, factor: u64| {
        let t = s.get(&part("weight_scale"));
        t.dtype = dtype.into();
        t.shape[1] = t.shape[1] * factor / 2;
        t.bytes = vec![0x38; t.shape.iter().product::<u64>() as usize];
    };
    let missing = |wanted: &str| {
        let wanted = part(wanted);
        move |p: &TensorProblem| matches!(p, Missing { name, .. } if *name == wanted)
    };
    for name in ["weight_packed", "weight_scale"] {
        check(Mxfp4, |s| _ = s.remove(&part(name)), missing(name));
        check(Nvfp4CompressedTensors, |s| _ = s.remove(&part(name)), missing(name));
    }
    check(
        Nvfp4CompressedTensors,
        |s| _ = s.remove(&part("weight_global_scale")),
        missing("weight_global_scale"),
    );
    check(Nvfp4ModelOpt, |s| _ = s.remove(&part("weight_scale_2")), missing("weight_scale_2"));
    check(Nvfp4ModelOpt, |s| _ = s.remove(&part("weight")), missing("weight"));
    // U8 scales of 16 columns, E4M3 scales of 32 columns, another dtype.
    check(Mxfp4, |s| rescale(s, "U8", 4), |p| matches!(p, Dtype { .. }));
    check(Nvfp4ModelOpt, |s| rescale(s, "F8_E4M3", 1), |p| matches!(p, Dtype { .. }));
    check(Nvfp4ModelOpt, |s| rescale(s, "U8", 2), |p| matches!(p, Dtype { .. }));
    check(Mxfp4, |s| rescale(s, "F8_E8M0", 2), |p| matches!(p, Dtype { .. }));
    // Nibbles as signed bytes, in another shape, or a weight that is not quantized.
    check(Mxfp4, |s| s.get(&part("weight_packed")).dtype = "I8".into(), |p| matches!(p, Dtype { .. }));
    check(Mxfp4, |s| s.get(&part("weight_packed")).shape.reverse(), |p| matches!(p, Dtype { .. }));
    check(Mxfp4, |s| s.get(&part("weight_packed")).name = part("weight"), missing("weight_packed"));
    check(
        Mxfp4,
        |s| s.add(&part("weight"), "BF16", &[96, 64], vec![0; 96 * 64 * 2]),
        |p| matches!(p, Dtype { .. }),
    );
    // The scale of the other convention.
    let swap =
        |from: &'static str, to: &'static str| move |s: &mut Snapshot| s.get(&part(from)).name = part(to);
    check(Nvfp4ModelOpt, swap("weight_scale_2", "weight_global_scale"), |p| matches!(p, Unexpected { .. }));
    check(
        Nvfp4CompressedTensors,
        swap("weight_global_scale", "weight_scale_2"),
        missing("weight_global_scale"),
    );
    check(
        Mxfp4,
        |s| s.add(&part("weight_global_scale"), "F32", &[1], f32s(&[1.0])),
        |p| matches!(p, Unexpected { .. }),
    );
    check(
        Nvfp4ModelOpt,
        |s| s.get(&part("weight_scale_2")).dtype = "I32".into(),
        |p| matches!(p, Dtype { .. }),
    );
}

#[test]
fn config_and_experts_must_agree() {
    use ExpertFormat::{Mxfp4, Nvfp4CompressedTensors, Nvfp4ModelOpt};
    for (tensors, config) in [
        (Mxfp4, Nvfp4CompressedTensors),
        (Mxfp4, Nvfp4ModelOpt),
        (Nvfp4CompressedTensors, Mxfp4),
        (Nvfp4CompressedTensors, Nvfp4ModelOpt),
        (Nvfp4ModelOpt, Nvfp4CompressedTensors),
        (Nvfp4ModelOpt, Mxfp4),
    ] {
        let mut s = snapshot();
        let source = s.config.clone();
        if tensors != Mxfp4 {
            to_nvfp4(&mut s, tensors);
        }
        s.config = source;
        if config != Mxfp4 {
            set_config(&mut s, config);
        }
        let (problems, total) = s.problems();
        assert_eq!(total, 4 * 8 * 3, "{tensors} as {config}");
        match &problems[0] {
            TensorProblem::Disagrees { name, found, entry } => {
                assert_eq!(
                    (name.as_str(), found.as_str()),
                    (&*format!("{EXPERT}.w1.weight_scale"), &*tensors.to_string())
                );
                assert!(entry.contains("quantization_config"), "{entry}");
            }
            other => panic!("{other:?}"),
        }
    }
    // ModelOpt lists its layers one by one.
    let mut s = snapshot();
    to_nvfp4(&mut s, Nvfp4ModelOpt);
    let layers = s.config["quantization_config"]["quantized_layers"].as_object_mut().expect("a map");
    layers.remove("model.layers.3.mlp.experts");
    assert!(matches!(s.problem(), TensorProblem::Disagrees { name, .. } if name.contains(".layers.3.")));
}

#[test]
fn an_ignore_list_that_names_the_experts_is_reported() {
    for entry in [
        "re:.*block_sparse_moe\\.experts.*",
        "re:.*block_sparse_moe.*",
        "re:.*",
        "language_model.model.layers.1.block_sparse_moe.experts",
        "experts",
    ] {
        let mut s = snapshot();
        s.text()["quantization_config"]["ignore"] = json!(["re:.*shared_experts.*", entry, "lm_head"]);
        let warnings: Vec<Warning> = s.good().warnings().to_vec();
        let reported =
            |w: &Warning| matches!(w, Warning::IgnoredModuleIsQuantized { entry: e, .. } if e == entry);
        assert_eq!(warnings.iter().filter(|w| reported(w)).count(), 1, "{entry}: {warnings:?}");
        assert_eq!(warnings.len(), 2);
    }
}

#[test]
fn an_ignore_pattern_that_cannot_be_judged_is_reported() {
    let mut s = snapshot();
    s.text()["quantization_config"]["ignore"] = json!(["re:.*shared_experts.*", "re:(", "lm_head"]);
    let warnings: Vec<Warning> = s.good().warnings().to_vec();
    let reported: Vec<&Warning> = warnings
        .iter()
        .filter(|w| matches!(w, Warning::IgnorePattern { entry, .. } if entry == "re:("))
        .collect();
    assert_eq!(reported.len(), 1, "{warnings:?}");
    assert!(reported[0].to_string().contains("\"re:(\""), "{}", reported[0]);
}

#[test]
fn experts_need_not_be_in_order_of_their_ids() {
    let mut s = snapshot();
    let source = s.good();
    // Whole experts, back to front.
    let (mut experts, others): (Vec<_>, Vec<_>) =
        std::mem::take(&mut s.tensors).into_iter().partition(|t| is_expert(&t.name));
    experts.sort_by_key(|t| {
        let numbers: Vec<usize> = t.name.split('.').filter_map(|p| p.parse().ok()).collect();
        std::cmp::Reverse(numbers)
    });
    s.tensors = others;
    s.tensors.extend(experts);
    let checkpoint = s.good();
    assert_eq!(checkpoint.experts().scattered(), 0);
    let begin = |expert| match checkpoint.experts().location(2, expert).expect("an expert") {
        ExpertLocation::Run { begin, .. } => begin,
        ExpertLocation::Scattered(_) => panic!("in one piece"),
    };
    assert!((1..8).all(|e| begin(e) < begin(e - 1)));
    for expert in 0..8 {
        let (a, b) = (source.expert(2, expert).expect("there"), checkpoint.expert(2, expert).expect("there"));
        assert_eq!(decoded(&a.w2), decoded(&b.w2));
    }
}

#[test]
fn scattered_experts_are_counted_and_read_the_same() {
    let mut s = snapshot();
    let source = s.good();
    // A part at the end, a part in another shard, and two parts in the wrong order.
    let moved = s.remove(&format!("{EXPERT}.w1.weight_scale"));
    s.tensors.push(moved);
    let other = "model-00002-of-000002.safetensors";
    s.get("language_model.model.layers.2.block_sparse_moe.experts.1.w3.weight_packed").shard = other.into();
    let at = |s: &Snapshot, name: &str| s.tensors.iter().position(|t| t.name == name).expect("there");
    let prefix = "language_model.model.layers.4.block_sparse_moe.experts.6";
    let (a, b) =
        (at(&s, &format!("{prefix}.w1.weight_packed")), at(&s, &format!("{prefix}.w3.weight_packed")));
    s.tensors.swap(a, b);
    let checkpoint = s.good();
    assert_eq!(checkpoint.experts().scattered(), 3);
    assert!(checkpoint.warnings().contains(&Warning::ScatteredExperts(3)));
    for (layer, expert) in [(1, 0), (2, 1), (4, 6), (4, 5), (3, 0)] {
        check_same_expert(&source, &checkpoint, layer, expert);
    }
    let mut short = vec![0; checkpoint.experts().layout().len - 1];
    assert!(matches!(checkpoint.read_expert_into(1, 0, &mut short), Err(Error::ExpertBuffer { .. })));
}
