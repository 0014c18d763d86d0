//! The oracle's parts against the vectors of `fixtures/ops`, trapped or not.

use serde_json::Value;

use super::attnres::{ResPair, SCORE_EPS};
use super::indexer::{Indexer, layer_norm, top_k};
use super::kda;
use super::moe::{self, Router};
use super::mxfp4::{Packed, scale};
use super::num::{Matrix, Rows, relative_l2, scaled};
use super::snapshot::{fixture, json};
use super::trap::{Step, Trap};

/// How far an operator is from its vectors.
#[derive(Debug, Default)]
pub(crate) struct Deviation {
    /// The worst relative L2 error of a case's numbers.
    pub(crate) relative: f64,
    /// How many discrete results (selections, bit patterns) differ.
    pub(crate) wrong: usize,
    /// How many discrete results and number groups were compared.
    pub(crate) compared: usize,
}

impl Deviation {
    fn numbers(&mut self, actual: &[f64], expected: &[f64]) {
        self.compared += 1;
        self.relative = self.relative.max(relative_l2(actual, expected));
    }

    fn result(&mut self, right: bool) {
        self.compared += 1;
        self.wrong += usize::from(!right);
    }
}

pub(crate) fn attnres(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/attnres.json"));
    assert_eq!(float(&file["eps"]), f64::from(SCORE_EPS as f32));
    let mut deviation = Deviation::default();
    for case in list(&file["cases"]) {
        let pair = ResPair { norm: floats(&case["norm_weight"]), proj: floats(&case["proj_weight"]) };
        let entries: Vec<Rows> = list(&case["entries"]).iter().map(rows).collect();
        let (weights, out) = (rows(&case["weights"]), rows(&case["out"]));
        for t in 0..out.len() {
            let sources: Vec<&[f64]> = entries.iter().map(|tokens| tokens[t].as_slice()).collect();
            let (actual, actual_weights) = pair.mix(&sources, trap);
            deviation.numbers(&actual, &out[t]);
            let expected: Vec<f64> = weights.iter().map(|tokens| tokens[t]).collect();
            deviation.numbers(&actual_weights, &expected);
        }
    }
    deviation
}

pub(crate) fn indexer(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/indexer.json"));
    let mut deviation = Deviation::default();
    for case in list(&file["cases"]) {
        let indexer = Indexer {
            heads: size(&case["n_heads"]),
            dim: size(&case["head_dim"]),
            topk: size(&case["topk"]),
            wq_b: matrix(&case["wq_b"]),
            wk: matrix(&case["wk"]),
            k_norm: floats(&case["k_norm_weight"]),
            k_norm_bias: floats(&case["k_norm_bias"]),
            weights: matrix(&case["weights_proj"]),
        };
        let trace = indexer.select(&rows(&case["x"]), &rows(&case["qr"]), &[], &[], trap);
        deviation.numbers(&trace.keys.concat(), &rows(&case["keys"]).concat());
        deviation.numbers(&trace.reported_scores().concat(), &rows(&case["scores"]).concat());
        for (actual, expected) in trace.selected.iter().zip(list(&case["selected"])) {
            deviation.result(actual[0] == sizes(expected));
        }
    }
    deviation
}

pub(crate) fn kda_long(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/kda_long.json"));
    let dim = size(&file["dim"]);
    let q_scale = float(&file["q_scale"]);
    let [q, k, v, log_decay, out] = ["q", "k", "v", "log_decay", "out"]
        .map(|name| list(&file[name]).iter().map(rows).collect::<Vec<_>>());
    let beta = rows(&file["beta"]);
    let mut state: Rows = list(&file["state_in"]).iter().map(|head| rows(head).concat()).collect();
    let mut deviation = Deviation::default();
    for t in 0..q.len() {
        for (h, state) in state.iter_mut().enumerate() {
            assert_eq!(q[t][h].len(), dim);
            let alpha: Vec<f64> = log_decay[t][h].iter().map(|g| g.exp()).collect();
            let o =
                kda::step(state, &scaled(&q[t][h], q_scale), &k[t][h], &v[t][h], &alpha, beta[t][h], trap);
            deviation.numbers(&o, &out[t][h]);
        }
    }
    let expected: Rows = list(&file["state_out"]).iter().map(|head| rows(head).concat()).collect();
    deviation.numbers(&state.concat(), &expected.concat());
    deviation
}

pub(crate) fn mxfp4_decode(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/mxfp4_decode.json"));
    let mut deviation = Deviation::default();
    let single = &file["single_block_rows"];
    let decoded = packed(single).decode(trap);
    let bits: Vec<usize> = list(&single["expected_f32_bits"]).iter().flat_map(sizes).collect();
    assert_eq!(bits.len(), decoded.data.len());
    for (value, bits) in decoded.data.iter().zip(bits) {
        deviation.result((*value as f32).to_bits() as usize == bits);
    }
    let nan = u8::try_from(size(&file["nan_scale_byte"])).expect("a byte");
    deviation.result(scale(nan, trap).is_nan());
    let case = &file["matrix"];
    let decoded = packed(case).decode(trap);
    deviation.numbers(&decoded.data, &rows(&case["expected"]).concat());
    deviation.numbers(&decoded.apply(&floats(&case["x"])), &floats(&case["w_times_x"]));
    deviation
}

pub(crate) fn situ(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/situ.json"));
    let (gate, up, expected) = (floats(&file["gate"]), floats(&file["up"]), rows(&file["expected"]));
    let mut deviation = Deviation::default();
    for (g, expected) in gate.iter().zip(&expected) {
        for (u, expected) in up.iter().zip(expected) {
            let actual = moe::situ(*g, *u, trap);
            deviation.result(actual.is_finite() && actual.abs() <= 100.0);
            // Half an ulp of the stored f32, be it normal or subnormal.
            let tolerance = expected.abs() * 2f64.powi(-24) + 2f64.powi(-150);
            deviation.result((actual - expected).abs() <= tolerance);
        }
    }
    deviation
}

pub(crate) fn topk_select(trap: Trap) -> Deviation {
    let file = json(&fixture("ops/topk_select.json"));
    let mut deviation = Deviation::default();
    for case in list(&file["cases"]) {
        let scores: Vec<f64> = sizes(&case["score_bits"])
            .into_iter()
            .map(|bits| f64::from(f32::from_bits(u32::try_from(bits).expect("32 bits"))))
            .collect();
        deviation.result(top_k(&scores, size(&case["k"]), trap) == sizes(&case["selected"]));
    }
    deviation
}

/// One step on an input whose result is known by hand.
pub(crate) fn closed_form(step: Step, trap: Trap) -> Deviation {
    let mut deviation = Deviation::default();
    // Two experts with equal logits: whatever x is, both score sigma(0) = 0.5.
    let router = |per_token: usize, bias: [f64; 2]| Router {
        per_token,
        renormalize: true,
        scaling_factor: 2.5,
        weight: Matrix { rows: 2, cols: 1, data: vec![0.0; 2] },
        bias: bias.to_vec(),
    };
    match step {
        // sum = eps = 1e-6, so x / sqrt(2e-6) = 0.5^0.5.
        Step::L2Norm => {
            let mut head = vec![0.0; 128];
            head[0] = 1e-3;
            kda::l2_normalise(&mut head, 128, 1.0, trap);
            deviation.numbers(&head[..1], &[0.5f64.sqrt()]);
        }
        // mean = 0, variance = eps = 1e-6.
        Step::IndexKeyNorm => {
            let y = [1e-3, -1e-3].repeat(64);
            let out = layer_norm(&y, &[1.0; 128], &[0.0; 128], trap);
            deviation.numbers(&out, &scaled(&y, 1e3 * 0.5f64.sqrt()));
        }
        // 1.001 rounds to 1 in bf16, and the tie would go to expert 0.
        Step::RouterBias => {
            let route = router(1, [1.0, 1.001]).route(&[1.0], trap);
            deviation.result(route[0].0 == 1);
        }
        Step::RouterTies => {
            let route = router(1, [0.25, 0.25]).route(&[1.0], trap);
            deviation.result(route[0].0 == 0);
        }
        // 0.5 / (0.5 + 0.5) * 2.5 each.
        Step::RoutedScaling => {
            let route = router(2, [0.0, 0.0]).route(&[1.0], trap);
            let weights: Vec<f64> = route.iter().map(|(_, w)| *w).collect();
            deviation.numbers(&weights, &[1.25, 1.25]);
        }
    }
    deviation
}

fn packed(case: &Value) -> Packed {
    let bytes = |rows: &Value| -> Vec<u8> {
        let all = list(rows).iter().flat_map(sizes);
        all.map(|b| u8::try_from(b).expect("a byte")).collect()
    };
    Packed {
        rows: size(&case["rows"]),
        cols: size(&case["cols"]),
        codes: bytes(&case["packed"]),
        scales: bytes(&case["scale"]),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

/// The decimals stand for f32 values.
fn float(value: &Value) -> f64 {
    f64::from(value.as_f64().expect("a number") as f32)
}

fn floats(value: &Value) -> Vec<f64> {
    list(value).iter().map(float).collect()
}

fn rows(value: &Value) -> Rows {
    list(value).iter().map(floats).collect()
}

fn matrix(value: &Value) -> Matrix {
    let rows = rows(value);
    Matrix { rows: rows.len(), cols: rows[0].len(), data: rows.concat() }
}

fn size(value: &Value) -> usize {
    usize::try_from(value.as_u64().expect("a whole number")).expect("a size")
}

fn sizes(value: &Value) -> Vec<usize> {
    list(value).iter().map(size).collect()
}
