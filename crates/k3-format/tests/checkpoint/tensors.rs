//! Names, dtypes, shapes and values of everything but routed experts.

use k3_format::names::Names;
use k3_format::{
    Checkpoint, ConfigFile, Dtype, Error, ExpertFormat, ExpertLayout, IndexerConfig, LoadMode, ModelConfig,
    OpenOptions, Role, TensorId, TensorProblem, Warning,
};

use crate::snapshot::{Snapshot, bf16s, f32s};

const LAYER: &str = "language_model.model.layers";

fn snapshot() -> Snapshot {
    Snapshot::of("dims-k31")
}

/// A tensor that is missing is named, wherever it is in the model.
fn check_missing(name: &str) {
    let mut s = snapshot();
    s.remove(name);
    assert!(matches!(s.problem(), TensorProblem::Missing { name: n, .. } if n == name), "{name}");
}

#[test]
fn every_missing_tensor_is_named() {
    check_missing("language_model.model.embed_tokens.weight");
    check_missing("language_model.model.output_attn_res_proj.weight");
    check_missing("language_model.lm_head.weight");
    check_missing("language_model.model.layers.0.self_attention_res_norm.weight");
    check_missing("language_model.model.layers.0.mlp.up_proj.weight");
    check_missing("language_model.model.layers.1.self_attn.A_log");
    check_missing("language_model.model.layers.2.block_sparse_moe.gate.e_score_correction_bias");
    check_missing("language_model.model.layers.3.self_attn.kv_a_proj_with_mqa.weight");
    check_missing("language_model.model.layers.4.block_sparse_moe.shared_experts.down_proj.weight");
}

#[test]
fn many_problems_are_listed_up_to_a_number_and_counted() {
    let mut s = snapshot();
    s.tensors.retain(|t| !t.name.contains(".layers.1."));
    let (problems, total) = s.problems();
    // 6 + 2 common, 12 KDA, 8 MoE, 8 experts of 6.
    assert_eq!((problems.len(), total), (20, 28 + 48));
    let text = s.open().expect_err("refused").to_string();
    assert!(text.contains("76 differences") && text.contains("and 56 more"), "{text}");
}

/// The dtype of a tensor; the bytes follow its size.
fn check_dtype(name: &str, dtype: &str, size: usize) {
    let mut s = snapshot();
    let tensor = s.get(name);
    tensor.dtype = dtype.into();
    tensor.bytes = vec![0; tensor.shape.iter().product::<u64>() as usize * size];
    match s.problem() {
        TensorProblem::Dtype { name: n, expected, found } => {
            assert_eq!((n.as_str(), expected.as_str(), found.as_str()), (name, "BF16 or F32", dtype));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_types_than_bf16_and_f32_are_refused() {
    for (dtype, size) in
        [("F16", 2), ("F64", 8), ("I8", 1), ("U8", 1), ("F8_E4M3", 1), ("I32", 4), ("BOOL", 1)]
    {
        check_dtype("language_model.model.layers.0.self_attn.q_proj.weight", dtype, size);
        check_dtype("language_model.model.layers.1.self_attn.dt_bias", dtype, size);
        check_dtype("language_model.model.layers.3.self_attn.indexer.wk.weight", dtype, size);
        check_dtype("language_model.model.norm.weight", dtype, size);
    }
}

#[test]
fn bf16_and_f32_are_read_by_the_header_and_narrow_ones_are_named() {
    let mut s = snapshot();
    let taps: Vec<f32> = (0..256 * 4).map(|i| i as f32 / 4.0 - 100.0).collect();
    let narrow = format!("{LAYER}.1.self_attn.k_conv1d.weight");
    let t = s.get(&narrow);
    (t.dtype, t.bytes) = ("BF16".into(), bf16s(&taps));
    let wide = format!("{LAYER}.1.input_layernorm.weight");
    let norm: Vec<f32> = (0..128).map(|i| 1.0 + i as f32 * 1e-5).collect();
    let t = s.get(&wide);
    (t.dtype, t.bytes) = ("F32".into(), f32s(&norm));
    let matrix: Vec<f32> = (0..128 * 128).map(|i| i as f32 * 1e-4).collect();
    let t = s.get(&format!("{LAYER}.1.self_attn.f_a_proj.weight"));
    (t.dtype, t.bytes) = ("F32".into(), f32s(&matrix));
    let checkpoint = s.good();
    let rounded: Vec<f32> = taps.iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
    assert_eq!(checkpoint.vector(TensorId::layer(1, Role::KConv1d)).expect("taps"), rounded);
    assert_eq!(checkpoint.vector(TensorId::layer(1, Role::InputLayernorm)).expect("norm"), norm);
    let loaded = checkpoint.matrix(TensorId::layer(1, Role::FAProj)).expect("matrix");
    assert_eq!(crate::decoded(&loaded), matrix);
    assert!(checkpoint.warnings().contains(&Warning::NarrowerThanRelease(vec![narrow])));
}

/// Whether a tensor may have another shape; its bytes are filled up with zeros or cut.
fn shape_of(name: &str, shape: &[u64]) -> Result<Checkpoint, TensorProblem> {
    let mut s = snapshot();
    let t = s.get(name);
    let size = if t.dtype == "F32" { 4 } else { 2 };
    t.shape = shape.to_vec();
    t.bytes.resize(shape.iter().product::<u64>() as usize * size, 0);
    match s.open_with(&OpenOptions::default()) {
        Ok(checkpoint) => Ok(checkpoint),
        Err(_) => Err(s.problem()),
    }
}

fn accepted(name: &str, shape: &[u64]) -> Checkpoint {
    shape_of(name, shape).unwrap_or_else(|e| panic!("{name} {shape:?}: {e}"))
}

fn refused(name: &str, shape: &[u64]) {
    match shape_of(name, shape) {
        Err(TensorProblem::Shape { name: n, found, .. }) => {
            assert_eq!((n.as_str(), found), (name, format!("{shape:?}")));
        }
        other => panic!("{name} {shape:?}: {other:?}"),
    }
}

#[test]
fn vectors_come_in_the_shapes_of_the_table_and_no_other() {
    let a_log = "language_model.model.layers.0.self_attn.A_log";
    let original = accepted(a_log, &[128]).vector(TensorId::layer(0, Role::ALog)).expect("A_log");
    assert_eq!(original.len(), 2);
    for shape in [&[2][..], &[1, 1, 2, 1], &[3], &[65_536]] {
        let read = accepted(a_log, shape).vector(TensorId::layer(0, Role::ALog)).expect("A_log");
        assert_eq!(read, original, "{shape:?}");
    }
    for shape in [&[1][..], &[2, 1], &[1, 2], &[1, 1, 128, 1], &[1, 2, 1, 1], &[65_537], &[]] {
        refused(a_log, shape);
    }
    let conv = "language_model.model.layers.0.self_attn.v_conv1d.weight";
    accepted(conv, &[256, 4]);
    for shape in [&[256 * 4][..], &[4, 256], &[1, 256, 4], &[256, 4, 1], &[256, 1, 3]] {
        refused(conv, shape);
    }
    let res = "language_model.model.layers.4.mlp_res_proj.weight";
    accepted(res, &[128]);
    for shape in [&[128, 1][..], &[127], &[1, 1, 128]] {
        refused(res, shape);
    }
    let dt_bias = "language_model.model.layers.0.self_attn.dt_bias";
    accepted(dt_bias, &[2, 128]);
    for shape in [&[128, 2][..], &[1, 256], &[128]] {
        refused(dt_bias, shape);
    }
    refused("language_model.model.layers.0.input_layernorm.weight", &[1, 128]);
    refused("language_model.model.layers.0.self_attn.o_norm.weight", &[256]);
    refused("language_model.model.layers.0.self_attn.q_proj.weight", &[128, 256]);
    refused("language_model.model.layers.0.self_attn.o_proj.weight", &[256, 128]);
    refused("language_model.model.layers.3.self_attn.g_proj.weight", &[256, 128, 1]);
    refused("language_model.lm_head.weight", &[511, 128]);
}

/// A value of an F32 or BF16 vector that cannot be right.
fn check_value(name: &str, at: usize, value: f32) {
    let mut s = snapshot();
    let t = s.get(name);
    let (size, bytes) = if t.dtype == "F32" { (4, f32s(&[value])) } else { (2, bf16s(&[value])) };
    t.bytes[at * size..(at + 1) * size].copy_from_slice(&bytes);
    match s.problem() {
        TensorProblem::Value { name: n, what } => {
            assert!(n == name && what.contains(&format!("value {at} ")), "{n}: {what}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn values_that_cannot_be_right_are_refused() {
    check_value("language_model.model.layers.0.self_attn.A_log", 2, 1e-30);
    check_value("language_model.model.layers.0.self_attn.A_log", 127, -1.0);
    check_value("language_model.model.layers.0.self_attn.A_log", 0, f32::NAN);
    check_value("language_model.model.layers.2.self_attn.dt_bias", 255, f32::INFINITY);
    check_value("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", 7, f32::NAN);
    check_value("language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight", 0, f32::NAN);
    check_value("language_model.model.norm.weight", 5, f32::NEG_INFINITY);
    check_value("language_model.model.layers.3.self_attn.indexer.k_norm.bias", 5, f32::NAN);
}

#[test]
fn a_bad_tap_is_refused_when_it_is_loaded() {
    let mut s = snapshot();
    s.get("language_model.model.layers.0.self_attn.q_conv1d.weight").bytes[..4]
        .copy_from_slice(&f32s(&[f32::NAN]));
    let checkpoint = s.good();
    assert!(checkpoint.vector(TensorId::layer(0, Role::QConv1d)).is_err());
}

#[test]
fn extra_tensors_are_skipped_counted_or_refused() {
    let mut s = snapshot();
    s.add(
        "language_model.model.layers.1.block_sparse_moe.experts.3.w1.input_scale",
        "F32",
        &[],
        f32s(&[1.0]),
    );
    s.add("language_model.model.layers.3.self_attn.k_proj.k_scale", "F32", &[1], f32s(&[1.0]));
    s.add("vision_tower.encoder.blocks.0.norm0.weight", "BF16", &[1], vec![0; 2]);
    s.add("foo", "F16", &[1], vec![0; 2]);
    s.add("bar.baz", "I64", &[], vec![0; 8]);
    let checkpoint = s.good();
    let skipped = Warning::Skipped { vision: 3, activation_scales: 1, cache_scales: 1 };
    let unknown = Warning::UnknownTensors { count: 2, first: vec!["foo".into(), "bar.baz".into()] };
    assert_eq!(checkpoint.warnings(), [skipped, unknown]);
    assert!(checkpoint.warnings()[1].to_string().contains("2 unknown tensors"));

    for name in [
        "language_model.model.foo",
        "language_model.foo",
        "language_model.model.layers.0.foo",
        "language_model.model.layers.3.foo",
        "language_model.model.layers.01.input_layernorm.weight",
        "language_model.model.layers.5.input_layernorm.weight",
        "language_model.model.layers.18446744073709551616.input_layernorm.weight",
        "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.8.w1.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w1.bias",
        "language_model.model.layers.1.block_sparse_moe.experts.07.w1.weight_packed",
        "language_model.model.layers.1.mlp.up_proj.weight",
        "language_model.model.layers.0.self_attn.q_a_proj.weight",
        "language_model.model.layers.0.self_attn.q_proj.bias",
    ] {
        let mut s = snapshot();
        s.add(name, "BF16", &[1], vec![0; 2]);
        assert_eq!(s.problem(), TensorProblem::Unknown { name: name.to_owned() });
    }
}

#[test]
fn a_layer_may_lie_in_two_shards() {
    let checkpoint =
        Checkpoint::open(&crate::snapshot::fixture("dims-k31"), &OpenOptions::default()).expect("opens");
    let shard = |role| checkpoint.tensor(TensorId::layer(3, role)).expect("a tensor").shard;
    assert_ne!(shard(Role::KvBProj), shard(Role::OProj));
}

/// The table against the byte sums and the census that the published index gives (`docs/checkpoint.md` 4).
#[test]
fn the_table_adds_up_to_the_release() {
    let read = |name: &str| {
        let file = crate::snapshot::fixture("configs").join(name);
        let json = serde_json::from_slice(&std::fs::read(&file).expect(name)).expect(name);
        ConfigFile::check(&json, &file).expect(name).model
    };
    let sums = |config: &ModelConfig| {
        let (mut bf16, mut f32, mut bytes) = (0, 0, 0);
        for (_, entry) in Names::tensors(config) {
            let narrow = entry.release == Dtype::BF16;
            // A_log is stored with 128 entries for 96 heads.
            let elements = if entry.role == Role::ALog { 128 } else { entry.extent(config).elements() };
            bytes += elements * if narrow { 2 } else { 4 };
            *(if narrow { &mut bf16 } else { &mut f32 }) += 1;
        }
        (bf16, f32, bytes)
    };
    let k3 = read("kimi-k3.config.json");
    assert_eq!(sums(&k3), (2122 - 168, 506, 113_509_540_864));
    let indexer = Some(IndexerConfig { n_heads: 32, head_dim: 128, topk: 2048 });
    let k31 = ModelConfig { indexer, ..read("kimi-k31.config.json") };
    assert_eq!(sums(&k31), (2122 - 168 + 120, 506, 113_509_540_864 + 357_052_416));
    assert_eq!(ExpertLayout::new(&k3, ExpertFormat::Mxfp4).len, 17_547_264);
    assert_eq!(ExpertLayout::new(&k3, ExpertFormat::Nvfp4CompressedTensors).len, 18_579_456);
}

/// `value` in a matrix of `cols` columns is refused when it is read, at its place; mapped, it is not looked at.
fn check_not_finite(id: TensorId, name: &str, at: usize, value: f32) {
    let mut s = Snapshot::of("dims-k31");
    let tensor = s.get(name);
    let cols = tensor.shape[1] as usize;
    let size = if tensor.dtype == "F32" { 4 } else { 2 };
    tensor.bytes[at * size..][..size].copy_from_slice(&value.to_le_bytes()[4 - size..]);
    match s.good().matrix(id) {
        Err(Error::NotFinite { name: n, row, column, value: v, file }) => {
            assert_eq!((n.as_str(), row, column), (name, at / cols, at % cols));
            assert!(!v.is_finite() && (v.is_nan() == value.is_nan()) && (v.is_nan() || v == value), "{v}");
            let text = Error::NotFinite { name: n, row, column, value: v, file }.to_string();
            assert!(text.contains(name) && text.contains("get the file again"), "{text}");
        }
        other => panic!("{name}: {other:?}"),
    }
    s.open_with(&OpenOptions::default().load(LoadMode::Map))
        .and_then(|c| c.matrix(id))
        .expect("not looked at");
}

#[test]
fn values_of_matrices_must_be_finite() {
    let layer = |layer: usize, rest: &str| format!("language_model.model.layers.{layer}.{rest}.weight");
    check_not_finite(TensorId::layer(3, Role::KvBProj), &layer(3, "self_attn.kv_b_proj"), 0, f32::NAN);
    check_not_finite(TensorId::layer(1, Role::QProj), &layer(1, "self_attn.q_proj"), 131, f32::INFINITY);
    check_not_finite(TensorId::layer(4, Role::GProj), &layer(4, "self_attn.g_proj"), 77, f32::NEG_INFINITY);
    check_not_finite(TensorId::layer(0, Role::MlpUpProj), &layer(0, "mlp.up_proj"), 5, f32::INFINITY);
    check_not_finite(TensorId::layer(2, Role::RouterGate), &layer(2, "block_sparse_moe.gate"), 9, f32::NAN);
    check_not_finite(TensorId::model(Role::LmHead), "language_model.lm_head.weight", 200, f32::NAN);

    let mut s = Snapshot::of("dims-k31");
    s.get("language_model.model.embed_tokens.weight").bytes[..2].copy_from_slice(&[0x80, 0x7f]);
    s.good().matrix(TensorId::model(Role::EmbedTokens)).expect("a row that may never be used");
}
