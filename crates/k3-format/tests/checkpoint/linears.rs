//! Matrices outside the routed experts, quantized: read, cross-checked with the config, refused where they must not be.

use k3_format::names::{Extent, Names};
use k3_format::{Error, LinearFormat, LoadMode, OpenOptions, Role, TensorId, TensorProblem, Warning};
use k3_quant::encode::{Encoder, largest_magnitude};
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, ScaleFactor, Scales, bf16};
use serde_json::{Value, json};

use crate::decoded;
use crate::experts::to_nvfp4;
use crate::snapshot::{Snapshot, Tensor, f32s};

const FORMATS: [LinearFormat; 4] = [
    LinearFormat::Nvfp4CompressedTensors,
    LinearFormat::Nvfp4ModelOpt,
    LinearFormat::Int8,
    LinearFormat::Int4,
];

const Q_PROJ: &str = "language_model.model.layers.0.self_attn.q_proj";

fn tensor(name: String, dtype: &str, shape: &[usize], bytes: Vec<u8>, like: &Tensor) -> Tensor {
    let shape = shape.iter().map(|&n| n as u64).collect();
    Tensor { name, dtype: dtype.into(), shape, bytes, shard: like.shard.clone() }
}

/// The tensors of a matrix, and the matrix. Names, dtypes and shapes are written out here.
fn quantized(t: &Tensor, format: LinearFormat) -> (Vec<Tensor>, Matrix) {
    let (rows, cols) = (t.shape[0] as usize, t.shape[1] as usize);
    let values: Vec<bf16> = t.bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
    let encoder = match format {
        LinearFormat::Int8 => Encoder::int8(),
        LinearFormat::Int4 => Encoder::int4(),
        _ => Encoder::nvfp4(largest_magnitude(0, cols, &values).expect("finite")),
    };
    let (mut codes, mut scales) =
        (vec![0; rows * encoder.code_bytes(cols)], vec![0; rows * encoder.scale_bytes(cols)]);
    encoder.encode(0, cols, &values, &mut codes, &mut scales).expect("finite");
    let module = t.name.strip_suffix(".weight").expect("a weight");
    let part = |part: &str, dtype: &str, shape: &[usize], bytes: &[u8]| {
        tensor(format!("{module}.{part}"), dtype, shape, bytes.to_vec(), t)
    };
    let (c, s) = (codes.clone(), scales.clone());
    let g = encoder.factor().map_or(0.0, |f| f.0);
    match format {
        LinearFormat::Nvfp4CompressedTensors => (
            vec![
                part("weight_packed", "U8", &[rows, cols / 2], &c),
                part("weight_scale", "F8_E4M3", &[rows, cols / 16], &s),
                part("weight_global_scale", "F32", &[1], &f32s(&[1.0 / g])),
            ],
            Matrix::nvfp4(
                rows,
                cols,
                codes.into(),
                scales.into(),
                GlobalScale::Divisor(ScaleDivisor(1.0 / g)),
            ),
        ),
        LinearFormat::Nvfp4ModelOpt => (
            vec![
                part("weight", "U8", &[rows, cols / 2], &c),
                part("weight_scale", "F8_E4M3", &[rows, cols / 16], &s),
                part("weight_scale_2", "F32", &[], &f32s(&[g])),
                part("input_scale", "F32", &[], &f32s(&[1.0])),
            ],
            Matrix::nvfp4(rows, cols, codes.into(), scales.into(), GlobalScale::Factor(ScaleFactor(g))),
        ),
        LinearFormat::Int8 => (
            vec![part("weight", "I8", &[rows, cols], &c), part("weight_scale", "BF16", &[rows, 1], &s)],
            Matrix::int8(rows, cols, codes.into(), Scales::Bf16(scales.into())),
        ),
        LinearFormat::Int4 => {
            let shape: Vec<u8> = [rows as u64, cols as u64].iter().flat_map(|n| n.to_le_bytes()).collect();
            (
                vec![
                    part("weight_packed", "I32", &[rows, cols / 8], &c),
                    part("weight_scale", "BF16", &[rows, cols / 64], &s),
                    part("weight_shape", "I64", &[2], &shape),
                ],
                Matrix::int4(rows, cols, codes.into(), Scales::Bf16(scales.into())),
            )
        }
    }
    .map_second(|m| m.expect("a matrix"))
}

trait MapSecond<A, B> {
    fn map_second<C>(self, f: impl FnOnce(B) -> C) -> (A, C);
}

impl<A, B> MapSecond<A, B> for (A, B) {
    fn map_second<C>(self, f: impl FnOnce(B) -> C) -> (A, C) {
        (self.0, f(self.1))
    }
}

/// Replaces a matrix by the tensors of its quantized form.
fn quantize(s: &mut Snapshot, name: &str, format: LinearFormat) -> Matrix {
    let plain = s.remove(&format!("{name}.weight"));
    let (tensors, matrix) = quantized(&plain, format);
    s.tensors.extend(tensors);
    matrix
}

/// A group of the config for other matrices than the experts.
fn group(format: LinearFormat) -> Value {
    let (name, weights) = match format {
        LinearFormat::Int8 => {
            ("int-quantized", json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true}))
        }
        LinearFormat::Int4 => (
            "pack-quantized",
            json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": true}),
        ),
        _ => (
            "nvfp4-pack-quantized",
            json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true}),
        ),
    };
    json!({"format": name, "weights": weights, "input_activations": null, "output_activations": null, "targets": [
        "re:.*self_attn\\.(q|k|v|g|o|q_a|q_b)_proj$", "re:.*self_attn\\.kv_a_proj_with_mqa$",
        "re:.*(mlp|shared_experts)\\.(gate|up|down)_proj$", "re:.*routed_expert_(down|up)_proj$",
        "re:.*self_attn\\.kv_b_proj$", "lm_head"
    ]})
}

fn set_config(s: &mut Snapshot, format: LinearFormat) {
    if format == LinearFormat::Nvfp4ModelOpt {
        to_nvfp4(s, k3_format::ExpertFormat::Nvfp4ModelOpt);
        return;
    }
    let config = &mut s.text()["quantization_config"];
    config["format"] = json!("mixed-precision");
    config["config_groups"]["group_1"] = group(format);
    config["ignore"] = json!(["re:.*vision_tower.*", "re:.*self_attn\\.(f_a|f_b|b)_proj$", "re:.*gate$"]);
}

/// All matrices that may be, and fit, are quantized.
fn whole(format: LinearFormat) -> (Snapshot, Vec<(TensorId, Matrix)>) {
    let mut s = Snapshot::of("dims-k31");
    let source = s.good();
    set_config(&mut s, format);
    let mut matrices = Vec::new();
    for (id, entry) in Names::tensors(source.config()) {
        let Extent::Matrix(_, cols) = entry.extent(source.config()) else { continue };
        if !id.role.may_be_quantized() || cols % format.weight_format().column_block() != 0 {
            continue;
        }
        let module = source.names().module(entry, id.layer);
        if format == LinearFormat::Nvfp4ModelOpt {
            let list = &mut s.config["quantization_config"]["quantized_layers"];
            let name = module.strip_prefix("language_model.").expect("a prefix");
            list[name.replace("block_sparse_moe", "mlp")] = json!({"quant_algo": "NVFP4", "group_size": 16});
        }
        matrices.push((id, quantize(&mut s, &module, format)));
    }
    (s, matrices)
}

#[test]
fn every_format_opens_and_yields_its_matrices() {
    let plain = Snapshot::of("dims-k31").good();
    for format in FORMATS {
        let (s, matrices) = whole(format);
        let read = s.good();
        assert!(matrices.len() > 40, "{format}: {}", matrices.len());
        let dir = s.write();
        let mapped = k3_format::Checkpoint::open(dir.path(), &OpenOptions::default().load(LoadMode::Map));
        let mapped = mapped.expect("opens");
        let mut bytes = 0;
        for (id, matrix) in &matrices {
            assert_eq!(read.linear_format(*id), Some(format), "{id}");
            let found = read.matrix(*id).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert_eq!(found.format(), format.weight_format());
            assert_eq!(decoded(&found), decoded(matrix), "{format}, {id}");
            assert_eq!(decoded(&mapped.matrix(*id).expect("mapped")), decoded(matrix), "{format}, {id}");
            bytes += matrix.size_bytes() as u64;
            let codes = read.tensor(*id).expect("codes");
            assert_eq!(codes.byte_len(), read.shards().get(codes.name).expect("the same").byte_len());
        }
        let shapes = if format == LinearFormat::Int4 { 16 * matrices.len() as u64 } else { 0 };
        assert_eq!(read.linear_formats()[&format], (matrices.len(), bytes + shapes));
        assert!(read.resident_bytes() < plain.resident_bytes());
        assert_eq!(read.identity(), mapped.identity());
        assert_ne!(read.identity(), plain.identity());
        // What stays plain is what it was.
        let router = TensorId::layer(1, Role::RouterGate);
        assert_eq!(read.linear_format(router), None);
        assert_eq!(decoded(&read.matrix(router).unwrap()), decoded(&plain.matrix(router).unwrap()));
        let others = read.warnings().iter().filter(|w| !matches!(w, Warning::Skipped { .. }));
        let others: Vec<_> = others.collect();
        if format == LinearFormat::Int4 {
            // Widths of 96 and 160 are no multiples of 64.
            assert!(
                matches!(others[..], [Warning::ListedModulesAreNotQuantized { count, .. }] if *count > 0)
            );
        } else {
            assert!(others.is_empty(), "{format}: {others:?}");
        }
    }
}

#[test]
fn scales_may_be_f32_and_flat() {
    let (mut s, _) = whole(LinearFormat::Int8);
    let scale = s.get(&format!("{Q_PROJ}.weight_scale"));
    let wide: Vec<f32> = scale.bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    let id = TensorId::layer(0, Role::QProj);
    let expected = decoded(&s.good().matrix(id).expect("bf16 scales"));
    let scale = s.get(&format!("{Q_PROJ}.weight_scale"));
    (scale.bytes, scale.dtype) = (f32s(&wide), "F32".into());
    assert_eq!(decoded(&s.good().matrix(id).expect("f32 scales")), expected);
    s.get(&format!("{Q_PROJ}.weight_scale")).shape.truncate(1);
    assert_eq!(decoded(&s.good().matrix(id).expect("flat scales")), expected);
}

/// One change to the tensors of one quantized matrix, and the problem that it makes.
fn check(format: LinearFormat, change: impl Fn(&mut Snapshot), expected: &str) {
    let (mut s, _) = whole(format);
    change(&mut s);
    let problem = s.problem();
    assert!(problem.to_string().contains(expected), "{format}: {problem} does not say {expected:?}");
}

#[test]
fn incomplete_or_unfitting_parts_are_refused() {
    use LinearFormat::{Int4, Int8, Nvfp4CompressedTensors as CompressedTensors, Nvfp4ModelOpt as ModelOpt};
    let part = |part: &str| format!("{Q_PROJ}.{part}");
    let without = |name: &'static str| move |s: &mut Snapshot| _ = s.remove(&part(name));
    check(CompressedTensors, without("weight_scale"), "weight_scale: missing, expected F8_E4M3 [256, 8]");
    check(
        CompressedTensors,
        without("weight_global_scale"),
        "weight_global_scale: missing, expected F32 [1]",
    );
    check(
        CompressedTensors,
        |s| {
            s.remove(&part("weight_packed"));
            s.remove(&part("weight_scale"));
        },
        "q_proj.weight: missing, expected or",
    );
    check(ModelOpt, without("weight_scale_2"), "weight_scale_2: missing, expected F32 []");
    check(Int4, without("weight_shape"), "weight_shape: missing, expected I64 [2]");
    check(Int4, without("weight_scale"), "weight_scale: missing, expected BF16 [256, 2]");
    check(Int8, without("weight_scale"), "q_proj.weight: expected BF16 or F32, found I8");

    let surplus = "does not belong to a matrix stored as";
    let add = |name: &'static str, dtype: &'static str, n: usize| {
        move |s: &mut Snapshot| {
            s.add(&part(name), dtype, &[n as u64], vec![0x3c; n * if dtype == "I64" { 8 } else { 4 }]);
        }
    };
    check(CompressedTensors, add("weight_scale_2", "F32", 1), surplus);
    check(ModelOpt, add("weight_global_scale", "F32", 1), surplus);
    check(Int8, add("weight_shape", "I64", 2), surplus);
    check(Int8, add("weight_zero_point", "F32", 1), "not a tensor of this model");
    check(
        CompressedTensors,
        |s| {
            let gate = "language_model.model.layers.0.self_attn.f_a_proj.weight";
            let bytes = s.get(gate).bytes.clone();
            let shape = s.get(gate).shape.clone();
            s.add(&part("weight"), "BF16", &shape, bytes);
        },
        surplus,
    );

    let change = |name: &'static str, dtype: &'static str, shape: &'static [u64]| {
        move |s: &mut Snapshot| {
            let t = s.get(&part(name));
            (t.dtype, t.shape) = (dtype.into(), shape.into());
        }
    };
    check(CompressedTensors, change("weight_packed", "U8", &[128, 128]), "expected U8 [256, 64]");
    check(
        CompressedTensors,
        change("weight_packed", "I8", &[256, 64]),
        "expected U8 [256, 64] (NVFP4) or I32 [256, 16]",
    );
    check(CompressedTensors, change("weight_scale", "U8", &[256, 8]), "expected F8_E4M3 [256, 8]");
    check(Int8, change("weight_scale", "F16", &[256, 1]), "expected BF16 [256, 1]");
    check(Int8, change("weight_scale", "BF16", &[1, 256]), "expected BF16 [256, 1]");
    check(Int4, change("weight_scale", "BF16", &[128, 4]), "expected BF16 [256, 2]");

    let value =
        |name: &'static str, bytes: Vec<u8>| move |s: &mut Snapshot| s.get(&part(name)).bytes = bytes.clone();
    let swapped: Vec<u8> = [128u64, 256].iter().flat_map(|n| n.to_le_bytes()).collect();
    check(Int4, value("weight_shape", swapped), "it says [128, 256], but the matrix is [256, 128]");
    check(ModelOpt, value("weight_scale_2", f32s(&[65536.0])), "written in the inverse sense");
    check(CompressedTensors, value("weight_global_scale", f32s(&[1e-5])), "written in the inverse sense");
    check(
        CompressedTensors,
        value("weight_global_scale", f32s(&[f32::NAN])),
        "must be a normal number above 0",
    );
}

/// q_b_proj has 96 columns here.
#[test]
fn columns_must_be_whole_blocks() {
    let mut s = Snapshot::of("dims-k31");
    let name = "language_model.model.layers.3.self_attn.q_b_proj";
    let plain = s.remove(&format!("{name}.weight"));
    let rows = plain.shape[0] as usize;
    set_config(&mut s, LinearFormat::Int4);
    s.add(&format!("{name}.weight_packed"), "I32", &[rows as u64, 12], vec![0; rows * 48]);
    s.add(&format!("{name}.weight_scale"), "BF16", &[rows as u64, 2], vec![0; rows * 4]);
    let problem = s.problem().to_string();
    assert!(problem.contains("columns in multiples of 64, as INT4 has them, found [384, 96]"), "{problem}");
}

#[test]
fn scales_that_are_none_are_refused_when_they_are_read() {
    let check = |format: LinearFormat, bytes: &[u8], row: usize, column: usize| {
        let (mut s, _) = whole(format);
        let scale = s.get(&format!("{Q_PROJ}.weight_scale"));
        let width = scale.shape[1] as usize;
        let at = (row * width + column) * bytes.len();
        scale.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        match s.good().matrix(TensorId::layer(0, Role::QProj)) {
            Err(Error::BadScale { name, row: r, column: c, .. }) => {
                assert_eq!((name, r, c), (format!("{Q_PROJ}.weight_scale"), row, column));
            }
            other => panic!("{format}: {other:?}"),
        }
    };
    for byte in [0x7f, 0x80, 0xb8, 0xff] {
        check(LinearFormat::Nvfp4CompressedTensors, &[byte], 3, 5);
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, -0.0] {
        check(LinearFormat::Int8, &bf16::from_f32(bad).to_le_bytes(), 200, 0);
        check(LinearFormat::Int4, &bf16::from_f32(bad).to_le_bytes(), 255, 1);
    }
}

#[test]
fn what_steers_is_never_quantized() {
    for name in [
        "language_model.model.embed_tokens",
        "language_model.model.layers.0.self_attn.f_a_proj",
        "language_model.model.layers.0.self_attn.f_b_proj",
        "language_model.model.layers.0.self_attn.b_proj",
        "language_model.model.layers.1.block_sparse_moe.gate",
        "language_model.model.layers.3.self_attn.indexer.wq_b",
        "language_model.model.layers.3.self_attn.indexer.wk",
        "language_model.model.layers.4.self_attn.indexer.weights_proj",
        "language_model.model.layers.1.mlp_res_proj",
        "language_model.model.output_attn_res_proj",
    ] {
        let mut s = Snapshot::of("dims-k31");
        set_config(&mut s, LinearFormat::Int8);
        quantize(&mut s, name, LinearFormat::Int8);
        match s.problem() {
            TensorProblem::NeverQuantized { name: found } => {
                assert_eq!(found, format!("{name}.weight_scale"));
            }
            other => panic!("{name}: {other}"),
        }
    }
    for name in [
        "language_model.model.norm",
        "language_model.model.layers.2.input_layernorm",
        "language_model.model.layers.0.self_attn.q_conv1d",
        "language_model.model.layers.0.self_attn.o_norm",
        "language_model.model.layers.3.self_attn.indexer.k_norm",
        "language_model.model.layers.3.self_attn.kv_a_layernorm",
        "language_model.model.layers.1.block_sparse_moe.routed_expert_norm",
    ] {
        let mut s = Snapshot::of("dims-k31");
        s.add(&format!("{name}.weight_scale"), "F32", &[1], vec![0; 4]);
        assert!(matches!(s.problem(), TensorProblem::NeverQuantized { .. }), "{name}");
    }
}

#[test]
fn config_and_tensors_are_compared() {
    let disagreement = |change: &dyn Fn(&mut Snapshot)| {
        let (mut s, _) = whole(LinearFormat::Int8);
        change(&mut s);
        match s.problems().0.swap_remove(0) {
            TensorProblem::Disagrees { found, entry, .. } => format!("{found}; {entry}"),
            other => panic!("{other}"),
        }
    };
    let groups = |s: &mut Snapshot| s.text()["quantization_config"]["config_groups"].take();
    let set = |s: &mut Snapshot, groups: Value| s.text()["quantization_config"]["config_groups"] = groups;
    // Other matrices than the experts are not spoken of, and so in the group of all.
    let text = disagreement(&|s| {
        let mut g = groups(s);
        _ = g.as_object_mut().expect("groups").remove("group_1");
        set(s, g);
    });
    assert!(
        text.starts_with("INT8; ") && text.contains("group_0.format = \"mxfp4-pack-quantized\""),
        "{text}"
    );
    // Said to be another format.
    let text = disagreement(&|s| {
        let mut g = groups(s);
        g["group_1"] = group(LinearFormat::Int4);
        set(s, g);
    });
    assert!(text.contains("group_1.format = \"pack-quantized\""), "{text}");
    // Nobody speaks of them: the experts have their own group.
    let text = disagreement(&|s| {
        let mut g = groups(s);
        g["group_0"]["targets"] = json!(["re:.*block_sparse_moe\\.experts\\..*"]);
        _ = g.as_object_mut().expect("groups").remove("group_1");
        set(s, g);
    });
    assert!(text.contains("do not list it"), "{text}");

    // A list of exceptions that is too long is reported, and the tensors decide.
    let (mut s, _) = whole(LinearFormat::Int8);
    s.text()["quantization_config"]["ignore"] =
        json!(["re:.*self_attn.*", "model.layers.1.mlp.shared_experts.up_proj"]);
    let checkpoint = s.good();
    let ignored: Vec<&str> = checkpoint
        .warnings()
        .iter()
        .filter_map(|w| match w {
            Warning::IgnoredModuleIsQuantized { entry, .. } => Some(entry.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(ignored, ["re:.*self_attn.*", "model.layers.1.mlp.shared_experts.up_proj"]);

    // The config speaks of matrices that are plain: 3 x 5 of KDA, 2 x 6 of MLA, 3 dense, 4 x 5 beside experts, the head.
    let mut s = Snapshot::of("dims-k31");
    set_config(&mut s, LinearFormat::Int8);
    let warnings = s.good().warnings().to_vec();
    let listed = |w: &Warning| matches!(w, Warning::ListedModulesAreNotQuantized { count: 51, .. });
    assert!(warnings.iter().any(listed), "{warnings:?}");
}

/// ModelOpt lists every matrix by name.
#[test]
fn a_matrix_that_model_opt_does_not_list_is_refused() {
    let (mut s, _) = whole(LinearFormat::Nvfp4ModelOpt);
    let list = s.config["quantization_config"]["quantized_layers"].as_object_mut().expect("a map");
    list.remove("model.layers.0.self_attn.q_proj").expect("listed");
    list.insert("layers.0.self_attn.k_proj".into(), json!({"quant_algo": "FP8"}));
    list.remove("model.layers.0.self_attn.k_proj").expect("listed");
    let (problems, total) = s.problems();
    assert_eq!(total, 2);
    assert!(problems.iter().all(|p| matches!(p, TensorProblem::Disagrees { .. })), "{problems:?}");
    assert!(
        problems.iter().any(|p| p.to_string().contains("layers.0.self_attn.k_proj = \"FP8\"")),
        "{problems:?}"
    );
}
