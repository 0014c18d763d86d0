//! The operator vectors of `fixtures/ops`, made by an independent f64 implementation.

use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_graph::device::{IndexQuery, KdaStep, SequenceRows, SituCaps, StateTensor, StateValues};
use k3_graph::scalar::INDEX_NORM_EPS;
use k3_graph::select::select_keys;
use k3_graph::{Device, Reference, Selected};
use k3_quant::Matrix;
use serde_json::Value;

use crate::support::{assert_close, bits, cpu, f32_matrix};
use crate::{CPU_BOUND, REFERENCE_BOUND};

fn fixture(name: &str) -> Value {
    let path = format!("{}/../../fixtures/ops/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_str(&text).unwrap()
}

/// The numbers of a nested array in order, as the f32 values that their shortest decimals stand for.
fn numbers(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        Value::Number(n) => vec![n.to_string().parse().unwrap()],
        _ => panic!("{value} is no number"),
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    numbers(value).iter().map(|&b| b as u8).collect()
}

fn size(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn cases(fixture: &Value) -> &[Value] {
    let cases = fixture["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    cases
}

#[test]
fn situ_glu() {
    check_situ(&Reference, REFERENCE_BOUND);
    check_situ(&cpu(), CPU_BOUND);
}

fn check_situ<D: Device>(device: &D, bound: f64) {
    let f = fixture("situ");
    let (gates, ups, expected) = (numbers(&f["gate"]), numbers(&f["up"]), numbers(&f["expected"]));
    let caps =
        SituCaps { beta: f["beta"].as_f64().unwrap(), linear_beta: f["linear_beta"].as_f64().unwrap() };
    let upload = |x: &[f32]| device.upload(ups.len(), x).unwrap();
    let gate = upload(&gates.iter().flat_map(|&g| vec![g; ups.len()]).collect::<Vec<_>>());
    let up = upload(&gates.iter().flat_map(|_| &ups).copied().collect::<Vec<_>>());
    let got = device.download(&device.situ_glu(&gate, &up, caps).unwrap()).unwrap();
    assert_close("situ", &got, &expected, bound);
    for (got, want) in got.iter().zip(&expected) {
        assert!(got.abs() <= 100.0, "{got} is not bounded by the product of the caps");
        // Each value by itself, the small ones included.
        let error = (f64::from(*got) - f64::from(*want)).abs();
        assert!(
            error <= f64::from(want.abs()) * bound + f64::from(f32::MIN_POSITIVE),
            "{got} against {want}"
        );
    }
}

#[test]
fn attn_res() {
    check_attn_res(&Reference, REFERENCE_BOUND);
    check_attn_res(&cpu(), CPU_BOUND);
}

fn check_attn_res<D: Device>(device: &D, bound: f64) {
    let f = fixture("attnres");
    let eps = f["eps"].as_f64().unwrap();
    for case in cases(&f) {
        let what = format!("attn_res of {}", case["n_entries"]);
        let (norm, proj) = (numbers(&case["norm_weight"]), numbers(&case["proj_weight"]));
        let score: Vec<f32> = norm.iter().zip(&proj).map(|(g, a)| g * a).collect();
        let score = device.load_vector(&score).unwrap();
        let sources: Vec<D::Act> = case["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|source| device.upload(norm.len(), &numbers(source)).unwrap())
            .collect();
        let sources: Vec<&D::Act> = sources.iter().collect();

        let weights = device.attn_res_weights(&sources, &score, eps).unwrap();
        let by_source = numbers(&case["weights"]);
        let rows = by_source.len() / sources.len();
        let expected: Vec<f32> =
            (0..rows).flat_map(|r| by_source.iter().skip(r).step_by(rows)).copied().collect();
        assert_close(&format!("{what}: weights"), &weights, &expected, bound);

        let mix = device.download(&device.attn_res_mix(&sources, &score, eps).unwrap()).unwrap();
        assert_close(&what, &mix, &numbers(&case["out"]), bound);
    }
}

#[test]
fn indexer() {
    check_indexer(&Reference, REFERENCE_BOUND);
    check_indexer(&cpu(), CPU_BOUND);
}

/// What a run over all tokens gave: cached keys, a selection a token, and a row of scores a token.
#[derive(Debug, PartialEq)]
struct Indexed {
    keys: Vec<f32>,
    selected: Vec<Selected>,
    scores: Vec<Vec<f32>>,
}

fn check_indexer<D: Device>(device: &D, bound: f64) {
    let f = fixture("indexer");
    for (i, case) in cases(&f).iter().enumerate() {
        let tokens = size(&case["tokens"]);
        assert_eq!(case["norm_eps"].as_f64().unwrap(), INDEX_NORM_EPS);
        let whole = index(device, case, &[tokens]);
        assert_close(&format!("case {i}: keys"), &whole.keys, &numbers(&case["keys"]), bound);

        let factor = (size(&case["n_heads"]) as f64 * size(&case["head_dim"]) as f64).powf(-0.5);
        let scaled: Vec<f32> =
            whole.scores.iter().flatten().map(|&s| (f64::from(s) * factor) as f32).collect();
        assert_close(&format!("case {i}: scores"), &scaled, &numbers(&case["scores"]), bound);

        for (t, (selected, expected)) in
            whole.selected.iter().zip(case["selected"].as_array().unwrap()).enumerate()
        {
            let expected: Vec<u32> = expected.as_array().unwrap().iter().map(|v| size(v) as u32).collect();
            let selected = match selected {
                Selected::All => (0..=t as u32).collect(),
                Selected::Keys(keys) => keys.clone(),
                Selected::NonFinite => panic!("case {i}, token {t}: no score is NaN"),
            };
            assert_eq!(selected, expected, "case {i}, token {t}");
        }
        for split in [vec![1; tokens], vec![7, 1, tokens - 8], vec![tokens - 1, 1]] {
            assert_eq!(index(device, case, &split), whole, "case {i} in spans of {split:?}");
        }
    }
}

/// The indexer of a layer over all tokens of a case, in spans of these lengths.
fn index<D: Device>(device: &D, case: &Value, spans: &[usize]) -> Indexed {
    let config = IndexerConfig {
        n_heads: size(&case["n_heads"]),
        head_dim: size(&case["head_dim"]),
        topk: size(&case["topk"]),
    };
    let (hidden, q_lora) = (size(&case["hidden"]), size(&case["q_lora"]));
    let linear =
        |name: &str, rows, cols| device.load_linear(f32_matrix(rows, cols, &numbers(&case[name]))).unwrap();
    let vector = |name: &str| device.load_vector(&numbers(&case[name])).unwrap();
    let wq_b = linear("wq_b", config.n_heads * config.head_dim, q_lora);
    let wk = linear("wk", config.head_dim, hidden);
    let weights_proj = linear("weights_proj", config.n_heads, hidden);
    let (gain, bias) = (vector("k_norm_weight"), vector("k_norm_bias"));
    let (x, cq) = (numbers(&case["x"]), numbers(&case["qr"]));

    // The caches of a layer grow together, so each token also brings a latent and an extra key of no interest here.
    let mla = MlaConfig {
        num_heads: 1,
        q_lora_rank: q_lora,
        kv_lora_rank: 4,
        qk_nope_head_dim: 4,
        qk_rope_head_dim: 2,
        v_head_dim: 4,
    };
    let latent_gain = device.load_vector(&[1.0; 4]).unwrap();
    let mut state = device.new_mla_state(&mla, Some(&config)).unwrap();
    let mut out = Indexed { keys: Vec::new(), selected: Vec::new(), scores: Vec::new() };
    let mut position = 0;
    for &n in spans {
        let span = |values: &[f32], width: usize| {
            device.upload(width, &values[position * width..(position + n) * width]).unwrap()
        };
        let (x, cq, kv) = (span(&x, hidden), span(&cq, q_lora), device.upload(6, &vec![1.0; n * 6]).unwrap());
        let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
        device.mla_append(&kv, &latent_gain, 1e-6, &mut states).unwrap();
        let k = device.linear(&wk, &x).unwrap();
        device.index_append(&k, &gain, &bias, INDEX_NORM_EPS, &mut states).unwrap();
        let (q, weights) = (device.linear(&wq_b, &cq).unwrap(), device.linear(&weights_proj, &x).unwrap());
        let query = IndexQuery { config: &config, q: &q, weights: &weights };
        let selection = device.index_select(query, &states).unwrap();
        out.selected.extend(device.download_selection(&selection).unwrap().rows);
        out.scores.extend(device.index_scores(query, &states).unwrap());
        position += n;
    }
    let exported = device.export_mla(&state).unwrap();
    let keys = exported.iter().find(|part| part.name == "index_key").unwrap();
    assert_eq!(keys.shape, [position, config.head_dim]);
    out.keys = keys.values.to_f32();
    out
}

#[test]
fn kda_over_many_tokens() {
    check_kda(&Reference, REFERENCE_BOUND);
    check_kda(&cpu(), CPU_BOUND);
}

fn check_kda<D: Device>(device: &D, bound: f64) {
    let f = fixture("kda_long");
    let tokens = size(&f["tokens"]);
    let whole = kda(device, &f, &[tokens]);
    assert_close("outputs", &whole.0, &numbers(&f["out"]), bound);
    assert_close("final state", &whole.1, &numbers(&f["state_out"]), bound);
    for split in [vec![1; tokens], vec![16, 16, 5], vec![12, 1, 24], vec![36, 1]] {
        let (out, state) = kda(device, &f, &split);
        assert_eq!((bits(&out), bits(&state)), (bits(&whole.0), bits(&whole.1)), "spans of {split:?}");
    }
}

/// Outputs and final state over all tokens, in spans of these lengths.
fn kda<D: Device>(device: &D, f: &Value, spans: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let (heads, dim) = (size(&f["heads"]), size(&f["dim"]));
    let width = heads * dim;
    let config =
        KdaConfig { num_heads: heads, head_dim: dim, short_conv_kernel_size: 4, gate_lower_bound: -5.0 };

    // The vector gives what the operation computes first. q and k come normalised: a power of two makes them so
    // long that the norm's epsilon is nothing. The gates are inverted; both ends of the decay, which are infinite, become
    // numbers whose sigmoid is exactly 1 and 0.
    let logit = |p: f64| (p / (1.0 - p)).ln() as f32;
    let long = |name: &str| numbers(&f[name]).iter().map(|v| v * 1024.0).collect::<Vec<f32>>();
    let (q, k, v) = (long("q"), long("k"), numbers(&f["v"]));
    let decay: Vec<f32> = numbers(&f["log_decay"]).iter().map(|&g| logit(f64::from(g) / -5.0)).collect();
    let beta: Vec<f32> = numbers(&f["beta"]).iter().map(|&b| logit(f64::from(b))).collect();
    assert!(decay.contains(&f32::INFINITY), "the vector has tokens at the lower bound");
    let decay: Vec<f32> = decay.into_iter().map(|z| z.clamp(-1e4, 1e4)).collect();

    let a_log = device.load_vector(&vec![0.0; heads]).unwrap();
    let dt_bias = device.load_vector(&vec![0.0; width]).unwrap();
    let mut state = kda_state(device, &config, &numbers(&f["state_in"]));
    let mut out = Vec::new();
    let mut position = 0;
    for &n in spans {
        let span = |values: &[f32], width: usize| {
            device.upload(width, &values[position * width..(position + n) * width]).unwrap()
        };
        let step = KdaStep {
            config: &config,
            q: &span(&q, width),
            k: &span(&k, width),
            v: &span(&v, width),
            decay: &span(&decay, width),
            beta: &span(&beta, heads),
            a_log: &a_log,
            dt_bias: &dt_bias,
        };
        let mut states = [SequenceRows { state: &mut state, rows: 0..n, position }];
        out.extend(device.download(&device.kda_step(step, &mut states).unwrap()).unwrap());
        position += n;
    }
    let state = device.export_kda(&state).unwrap();
    (out, part(&state, "state").values.to_f32())
}

fn part<'a>(parts: &'a [StateTensor], name: &str) -> &'a StateTensor {
    parts.iter().find(|part| part.name == name).unwrap()
}

/// An empty window and these matrices `[heads, key, value]`.
fn kda_state<D: Device>(device: &D, config: &KdaConfig, matrices: &[f32]) -> D::KdaState {
    let mut parts = device.export_kda(&device.new_kda_state(config).unwrap()).unwrap();
    let state = parts.iter_mut().find(|part| part.name == "state").unwrap();
    state.values = match state.values {
        StateValues::F32(_) => StateValues::F32(matrices.to_vec()),
        StateValues::F64(_) => StateValues::F64(matrices.iter().map(|&v| f64::from(v)).collect()),
    };
    device.import_kda(config, &parts).unwrap()
}

/// Values and bit patterns of a case of `topk_select.json`.
#[test]
fn selection_of_keys() {
    for case in cases(&fixture("topk_select")) {
        let scores: Vec<f32> = case["score_bits"]
            .as_array()
            .unwrap()
            .iter()
            .map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32))
            .collect();
        let expected: Vec<u32> =
            case["selected"].as_array().unwrap().iter().map(|v| size(v) as u32).collect();
        let k = size(&case["k"]);
        assert_eq!(select_keys(&scores, k).as_ref(), Some(&expected), "{}", case["name"]);
        let wide: Vec<f64> = scores.iter().map(|&s| f64::from(s)).collect();
        assert_eq!(select_keys(&wide, k), Some(expected), "{} in f64", case["name"]);
    }
}

#[test]
fn mxfp4() {
    check_mxfp4(&Reference, REFERENCE_BOUND);
    check_mxfp4(&cpu(), CPU_BOUND);
}

fn check_mxfp4<D: Device>(device: &D, bound: f64) {
    let f = fixture("mxfp4_decode");
    let load = |m: &Value| {
        let (packed, scale) = (bytes(&m["packed"]), bytes(&m["scale"]));
        let matrix = Matrix::mxfp4(size(&m["rows"]), size(&m["cols"]), packed.into(), scale.into());
        device.load_linear(matrix.unwrap()).unwrap()
    };
    // A row of a table is decoded exactly, subnormals and overflow included.
    let rows = |table: &D::Linear, n: u64| {
        let ids: Vec<u32> = (0..n as u32).collect();
        bits(&device.download(&device.embed(table, &ids).unwrap()).unwrap())
    };
    let blocks = &f["single_block_rows"];
    let expected: Vec<u32> = blocks["expected_f32_bits"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|bits| bits.as_u64().unwrap() as u32)
        .collect();
    assert_eq!(rows(&load(blocks), blocks["rows"].as_u64().unwrap()), expected);

    let m = &f["matrix"];
    let matrix = load(m);
    assert_eq!(rows(&matrix, m["rows"].as_u64().unwrap()), bits(&numbers(&m["expected"])));
    let (x, expected) = (numbers(&m["x"]), numbers(&m["w_times_x"]));
    for n in [1, 3] {
        let x = device.upload(x.len(), &x.repeat(n)).unwrap();
        let y = device.download(&device.linear(&matrix, &x).unwrap()).unwrap();
        assert_close(&format!("{n} rows"), &y, &expected.repeat(n), bound);
    }
}
