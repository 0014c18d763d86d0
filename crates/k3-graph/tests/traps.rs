//! Proves that the fixtures can show every silent error of `docs/arithmetic.md`.
//!
//! An independent f64 model (`oracle`) reproduces the expected results of the three fixtures; made
//! wrong in one way at a time, it must miss them by far more than the engine is allowed to.
//! `cargo test -p k3-graph --test traps -- --ignored --nocapture` prints the table of `docs/traps.md`.

#[allow(dead_code, reason = "each test binary uses its part of the oracle")]
mod oracle;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use oracle::num::relative_l2;
use oracle::ops::{self, Deviation};
use oracle::snapshot::{Tensors, fixture};
use oracle::trap::{Shows, Step, TRAPS, Trap, Vectors};
use oracle::{Model, Outcome, Widths};

/// In the order in which a trap is looked for.
const FIXTURES: [&str; 3] = ["dims-k31", "tiny-k31", "tiny-k3"];
/// The expectations are f64 results stored as f32.
const STORED_AS_F32: f64 = 1e-7;
/// What the engine's logits are held to.
const ACCEPTED: f64 = 3e-5;
const VISIBLE: f64 = 10.0 * ACCEPTED;

struct Fixture {
    name: &'static str,
    model: Model,
    expected: Tensors,
    trace: Tensors,
    ids: Vec<i32>,
}

impl Fixture {
    fn load(name: &'static str) -> Self {
        let folder = fixture(name);
        let expected = Tensors::of_file(&folder.join("expected.safetensors"));
        let trace = Tensors::of_file(&folder.join("trace.safetensors"));
        let ids = expected.integers("input_ids");
        Self { name, model: Model::load(&folder), expected, trace, ids }
    }

    /// Relative L2 of all logits.
    fn logits(&self, outcome: &Outcome) -> f64 {
        relative_l2(outcome.logits.iter().flatten(), &self.expected.floats("logits"))
    }

    /// Token and layer pairs whose set of experts differs, and the relative L2 of the weights.
    fn routes(&self, outcome: &Outcome) -> (usize, f64) {
        let ids = self.expected.integers("router_idx");
        let weights = self.expected.floats("router_weight");
        let actual: Vec<&Vec<(usize, f64)>> = outcome.routes.iter().flatten().collect();
        let per_token = ids.len() / actual.len();
        let experts = 1 + *ids.iter().max().expect("routes") as usize;
        let experts =
            experts.max(1 + actual.iter().flat_map(|r| r.iter().map(|(e, _)| *e)).max().unwrap_or(0));
        let (mut wrong, mut dense, mut dense_expected) = (0, Vec::new(), Vec::new());
        for (t, route) in actual.into_iter().enumerate() {
            let mut row = vec![0.0; experts];
            let mut row_expected = row.clone();
            for (e, w) in route {
                row[*e] = *w;
            }
            for i in t * per_token..(t + 1) * per_token {
                row_expected[ids[i] as usize] = weights[i];
            }
            let chosen = |row: &[f64]| row.iter().map(|w| *w != 0.0).collect::<Vec<_>>();
            wrong += usize::from(chosen(&row) != chosen(&row_expected));
            dense.extend(row);
            dense_expected.extend(row_expected);
        }
        (wrong, relative_l2(&dense, &dense_expected))
    }

    /// Token and layer pairs whose ordered index selection differs, and the relative L2 of the keys.
    fn index(&self, outcome: &Outcome) -> Option<(usize, f64)> {
        self.expected.has("index_sel").then(|| {
            let selected = self.expected.integers("index_sel");
            let topk = *self.expected.shape("index_sel").last().expect("three axes");
            let actual = outcome.index_selected.iter().flatten();
            let wrong = actual.zip(selected.chunks(topk)).filter(|(a, e)| !same_positions(a, e)).count();
            let keys = outcome.index_keys.iter().flatten().flatten();
            (wrong, relative_l2(keys, &self.expected.floats("index_keys")))
        })
    }

    /// None where the snapshot has no part that the trap could touch.
    fn effect(&self, trap: Trap, section: &str) -> Option<Effect> {
        let of_indexer = section.starts_with('7');
        if of_indexer && !self.expected.has("index_sel") {
            return None;
        }
        let outcome = self.model.run(&self.ids, trap);
        let (wrong_routes, router_weights) = self.routes(&outcome);
        let wrong_selections = self.index(&outcome).map_or(0, |(wrong, _)| wrong);
        let logits = self.logits(&outcome);
        Some(Effect { logits, wrong_routes, router_weights, wrong_selections })
    }
}

/// The expectation is padded with -1.
fn same_positions(actual: &[usize], expected: &[i32]) -> bool {
    let expected: Vec<usize> = expected.iter().filter_map(|s| usize::try_from(*s).ok()).collect();
    actual == expected
}

/// How far a trapped run is from what a fixture expects.
#[derive(Clone, Debug)]
struct Effect {
    logits: f64,
    wrong_routes: usize,
    router_weights: f64,
    wrong_selections: usize,
}

impl Effect {
    fn is_visible(&self, shows: Shows) -> bool {
        match shows {
            Shows::Logits => self.logits > VISIBLE,
            Shows::RouterWeights => self.router_weights > VISIBLE,
            Shows::Ops(_) | Shows::ClosedForm(_) => false,
        }
    }
}

fn is_off(deviation: &Deviation) -> bool {
    deviation.wrong > 0 || deviation.relative > VISIBLE
}

fn of_vectors(vectors: Vectors, trap: Trap) -> Deviation {
    match vectors {
        Vectors::Mxfp4Decode => ops::mxfp4_decode(trap),
        Vectors::TopkSelect => ops::topk_select(trap),
    }
}

fn check_untrapped(name: &'static str) {
    let fixture = Fixture::load(name);
    let outcome = fixture.model.run(&fixture.ids, Trap::None);
    let close = |what: &str, actual: Vec<f64>, expected: Vec<f64>| {
        let error = relative_l2(&actual, &expected);
        assert!(error < STORED_AS_F32, "{name}: {what} is off by {error:e}");
    };
    let expected = |tensor: &str| fixture.expected.floats(tensor);
    let flat = |layers: &[Vec<Vec<f64>>]| layers.iter().flatten().flatten().copied().collect::<Vec<f64>>();

    close("logits", outcome.logits.concat(), expected("logits"));
    close("hidden_last", outcome.hidden_last.concat(), expected("hidden_last"));
    close("final_mix_last", outcome.final_mix_last.clone(), expected("final_mix_last"));
    close("final_norm_last", outcome.final_norm_last.clone(), expected("final_norm_last"));
    close("kda_state", flat(&outcome.kda_state), expected("kda_state"));
    close("kda_conv_state", outcome.kda_window.concat(), expected("kda_conv_state"));
    close("mla_latent", flat(&outcome.mla_latent), expected("mla_latent"));
    close("mla_extra_key", flat(&outcome.mla_extra_key), expected("mla_extra_key"));
    for (tensor, actual) in [
        ("attn_in", &outcome.attention_in),
        ("attn_out", &outcome.attention_out),
        ("mlp_in", &outcome.mlp_in),
        ("mlp_out", &outcome.mlp_out),
    ] {
        close(tensor, flat(actual), fixture.trace.floats(tensor));
    }
    let (wrong_routes, router_weights) = fixture.routes(&outcome);
    assert_eq!(wrong_routes, 0, "{name}: router sets");
    assert!(router_weights < STORED_AS_F32, "{name}: router weights are off by {router_weights:e}");
    if let Some((wrong_selections, keys)) = fixture.index(&outcome) {
        assert_eq!(wrong_selections, 0, "{name}: index selections");
        assert!(keys < STORED_AS_F32, "{name}: index keys are off by {keys:e}");
    }
    if fixture.expected.has("index_scores") {
        // Stored as a square, 0 above the diagonal.
        let square = |row: &Vec<f64>| {
            let mut row = row.clone();
            row.resize(fixture.ids.len(), 0.0);
            row
        };
        let scores = outcome.index_scores.iter().flatten().flat_map(square).collect();
        close("index_scores", scores, expected("index_scores"));
    }
    check_continuation(&fixture);
}

/// The greedy continuation: fed back, each of its tokens must be the first of the largest logits
/// before it, and route and select as expected.
fn check_continuation(fixture: &Fixture) {
    let greedy = fixture.expected.integers("greedy_ids");
    assert_eq!(greedy.len(), 16);
    let prompt = fixture.ids.len();
    let fed = [fixture.ids.clone(), greedy.clone()].concat();
    let outcome = fixture.model.run(&fed, Trap::None);
    let rows = &outcome.logits[prompt - 1..prompt - 1 + greedy.len()];
    let largest = |row: &[f64]| (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    let chosen: Vec<i32> = rows.iter().map(|row| largest(row) as i32).collect();
    assert_eq!(chosen, greedy, "{}: greedy ids", fixture.name);
    let error = relative_l2(rows.iter().flatten(), &fixture.expected.floats("greedy_logits"));
    assert!(error < STORED_AS_F32, "{}: greedy logits are off by {error:e}", fixture.name);

    let routes = fixture.expected.integers("cont_router_idx");
    let actual = outcome.routes.iter().flat_map(|layer| &layer[prompt..]);
    let per_token = *fixture.expected.shape("cont_router_idx").last().expect("three axes");
    for (route, expected) in actual.zip(routes.chunks(per_token)) {
        let mut actual: Vec<i32> = route.iter().map(|(e, _)| *e as i32).collect();
        let mut expected = expected.to_vec();
        actual.sort_unstable();
        expected.sort_unstable();
        assert_eq!(actual, expected, "{}: router sets of the continuation", fixture.name);
    }
    if fixture.expected.has("cont_index_sel") {
        let selected = fixture.expected.integers("cont_index_sel");
        let topk = *fixture.expected.shape("cont_index_sel").last().expect("three axes");
        let actual = outcome.index_selected.iter().flat_map(|layer| &layer[prompt..]);
        for (actual, expected) in actual.zip(selected.chunks(topk)) {
            assert!(same_positions(actual, expected), "{}: selections of the continuation", fixture.name);
        }
    }
}

#[test]
fn oracle_matches_tiny_k3() {
    check_untrapped("tiny-k3");
}

#[test]
fn oracle_matches_tiny_k31() {
    check_untrapped("tiny-k31");
}

#[test]
fn oracle_matches_dims_k31() {
    check_untrapped("dims-k31");
}

type Row = (Trap, &'static str, Shows, &'static str);

/// One result for each trap, worked out by two threads.
fn for_every_trap<T: Send>(work: impl Fn(&Row) -> T + Sync) -> Vec<T> {
    let results: Vec<Mutex<Option<T>>> = TRAPS.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(row) = TRAPS.get(i) else { break };
                    let result = work(row);
                    *results[i].lock().expect("no panic") = Some(result);
                }
            });
        }
    });
    results.into_iter().map(|r| r.into_inner().expect("no panic").expect("every trap was run")).collect()
}

#[test]
fn every_trap_is_visible() {
    let fixtures = FIXTURES.map(Fixture::load);
    let visible = for_every_trap(|(trap, section, shows, _)| match shows {
        Shows::Ops(vectors) => is_off(&of_vectors(*vectors, *trap)),
        Shows::ClosedForm(step) => is_off(&ops::closed_form(*step, *trap)),
        // The first fixture that shows it is enough.
        shows => fixtures.iter().any(|f| f.effect(*trap, section).is_some_and(|e| e.is_visible(*shows))),
    });
    let invisible: Vec<&Row> =
        TRAPS.iter().zip(visible).filter(|(_, visible)| !visible).map(|(row, _)| row).collect();
    assert!(invisible.is_empty(), "nothing would show {invisible:#?}");
}

#[test]
#[ignore = "prints the table of docs/traps.md: every trap on every fixture takes a while"]
fn print_the_size_of_every_trap() {
    let fixtures = FIXTURES.map(Fixture::load);
    let rows = for_every_trap(|(trap, section, shows, text)| {
        let effects: Vec<Option<Effect>> = fixtures.iter().map(|f| f.effect(*trap, section)).collect();
        table_row(section, *shows, text, &effects)
    });
    println!("{}", rows.join("\n"));
}

/// One row of `docs/traps.md`.
fn table_row(section: &str, shows: Shows, text: &str, effects: &[Option<Effect>]) -> String {
    let shown_by = match shows {
        Shows::Logits => "logits",
        Shows::RouterWeights => "router weights",
        Shows::Ops(Vectors::Mxfp4Decode) => "`ops/mxfp4_decode.json`",
        Shows::Ops(Vectors::TopkSelect) => "`ops/topk_select.json`",
        Shows::ClosedForm(Step::L2Norm) => "closed form 1",
        Shows::ClosedForm(Step::IndexKeyNorm) => "closed form 2",
        Shows::ClosedForm(Step::RouterBias) => "closed form 3",
        Shows::ClosedForm(Step::RouterTies) => "closed form 4",
        Shows::ClosedForm(Step::RoutedScaling) => "closed form 5",
    };
    let mut cells = Vec::new();
    for effect in effects {
        let Some(effect) = effect else {
            cells.push("-".to_owned());
            continue;
        };
        let wrong = effect.wrong_routes + effect.wrong_selections;
        let size = match shows {
            Shows::RouterWeights => effect.router_weights,
            _ => effect.logits,
        };
        // Below it is the rounding of the stored expectations.
        let size = if size < STORED_AS_F32 { "0".to_owned() } else { format!("{size:.1e}") };
        let wrong = if wrong == 0 { String::new() } else { format!(" ({wrong})") };
        cells.push(size + &wrong);
    }
    format!("| {text} | {section} | {shown_by} | {} |", cells.join(" | "))
}

/// Section, mistake, the width it would offer, the width it would need.
type Refusal = (&'static str, &'static str, fn(&Widths) -> usize, fn(&Widths) -> usize);

/// Mistakes that no engine with checked shapes can make, so the oracle has no switch for them.
const REFUSED_BY_SHAPE: [Refusal; 7] = [
    ("6", "the MLA gate after o_proj", |w| w.attention_out, |w| w.hidden),
    ("7.2", "the index query from q_b's output through wq_b", |w| w.q_b, |w| w.q_lora),
    ("7.2", "the index key from the latent through wk", |w| w.kv_lora, |w| w.hidden),
    ("8.2", "routing on the latent", |w| w.latent, |w| w.hidden),
    ("8.3", "routed_expert_norm after up_proj", |w| w.hidden, |w| w.latent),
    ("8.3", "shared experts fed z", |w| w.latent, |w| w.hidden),
    ("8.3", "shared experts added before up_proj", |w| w.hidden, |w| w.latent),
];

#[test]
fn the_other_traps_are_refused_by_shape() {
    for name in FIXTURES {
        let widths = Model::load(&fixture(name)).widths;
        for (section, mistake, offered, needed) in REFUSED_BY_SHAPE {
            assert_ne!(offered(&widths), needed(&widths), "{name}, {section}, {mistake}: {widths:?}");
        }
    }
}
