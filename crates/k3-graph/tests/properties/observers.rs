//! Looking into a pass changes nothing; what an observer replaces and breaks off takes effect.

use std::collections::HashMap;
use std::ops::ControlFlow;

use k3_format::Variant;
use k3_graph::{
    Cpu, Device, ForwardError, Logits, LogitsWanted, Model, ModelOptions, Observer, Point, Probe, Reference,
    Routing, Selection, Silent, StateError,
};

use crate::support::{
    MemoryStore, TinyWeights, assert_close, bits, cpu, load, load_with, prompt, relative_l2, run, try_run,
};

/// Everything there is to see.
#[derive(Default)]
struct Everything {
    activations: HashMap<Point, Vec<f32>>,
    attn_res: HashMap<Point, Vec<f32>>,
    routings: Vec<usize>,
    selections: Vec<usize>,
    done: Vec<(usize, usize)>,
}

impl Observer for Everything {
    fn wants(&self, _: Probe) -> bool {
        true
    }
    fn activation(&mut self, point: Point, values: &[f32]) {
        assert!(self.activations.insert(point, values.to_vec()).is_none(), "{point:?} comes once");
    }
    fn attn_res_weights(&mut self, point: Point, weights: &[f32]) {
        assert!(self.attn_res.insert(point, weights.to_vec()).is_none(), "{point:?} comes once");
    }
    fn routing(&mut self, layer: usize, _: &Routing) {
        self.routings.push(layer);
    }
    fn selection(&mut self, layer: usize, _: &Selection, _: &[Vec<f32>]) {
        self.selections.push(layer);
    }
    fn layer_done(&mut self, done: usize, layers: usize) -> ControlFlow<()> {
        self.done.push((done, layers));
        ControlFlow::Continue(())
    }
}

/// Activations to use at some points.
struct Replacing(HashMap<Point, Vec<f32>>);

impl Observer for Replacing {
    fn replace(&mut self, point: Point) -> Option<Vec<f32>> {
        self.0.get(&point).cloned()
    }
}

/// A pass over a fresh sequence.
fn observe<D: Device>(
    model: &Model<D>,
    tokens: &[u32],
    wanted: LogitsWanted,
    observer: &mut dyn Observer,
) -> Logits {
    let store = MemoryStore::new(model.config());
    try_run(model, &store, &mut model.new_state().unwrap(), tokens, wanted, observer).unwrap().unwrap()
}

#[test]
fn watching_changes_no_bit() {
    for variant in [Variant::K3, Variant::K31] {
        let model = load(cpu(), &TinyWeights::new(variant));
        let tokens = prompt(80, 11);
        let seen = observe(&model, &tokens, LogitsWanted::All, &mut Everything::default());
        assert_eq!(
            bits(&seen.values),
            bits(&observe(&model, &tokens, LogitsWanted::All, &mut Silent).values)
        );
    }
}

#[test]
fn everything_is_seen_once() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    // Fewer keys than the indexer's budget: it runs for the observer.
    let mut seen = Everything::default();
    observe(&model, &prompt(81, 5), LogitsWanted::Last, &mut seen);
    assert_eq!(seen.routings, [1, 2, 3, 4, 5, 6]);
    assert_eq!(seen.selections, [3, 6]);
    assert_eq!(seen.done, (1..=7).map(|done| (done, 7)).collect::<Vec<_>>());
    assert_eq!(seen.activations.len(), 7 * 5 + 2);
    for (point, values) in &seen.activations {
        let rows = if matches!(point, Point::FinalMix | Point::FinalNorm) { 1 } else { 5 };
        assert_eq!(values.len(), rows * 64, "{point:?}");
    }
    // Snapshots are pushed at layers 0, 3 and 6, after the attention's mix and before the MLP's.
    assert_eq!(seen.attn_res.len(), 6 + 7 + 1);
    for (point, weights) in &seen.attn_res {
        let (rows, sources) = match point {
            Point::AttnIn(l) => (5, l.div_ceil(3) + 1),
            Point::MlpIn(l) => (5, l / 3 + 2),
            _ => (1, 4),
        };
        assert_eq!(weights.len(), rows * sources, "{point:?}");
        for row in weights.chunks(sources) {
            let sum: f32 = row.iter().sum();
            assert!((sum - 1.0).abs() < 1e-6, "{point:?}: {row:?}");
        }
    }
}

/// The depth sum restarts from the attention's output where a snapshot is pushed, and grows by both outputs elsewhere.
#[test]
fn depth_sum() {
    let model = load(cpu(), &TinyWeights::new(Variant::K3));
    let mut seen = Everything::default();
    observe(&model, &prompt(82, 4), LogitsWanted::Last, &mut seen);
    let at = |point| seen.activations[&point].as_slice();
    for l in 0..7 {
        let mut sum: Vec<f32> = at(Point::AttnOut(l)).to_vec();
        if l % 3 != 0 {
            sum = at(Point::Hidden(l - 1)).iter().zip(&sum).map(|(p, y)| p + y).collect();
        }
        let sum: Vec<f32> = sum.iter().zip(at(Point::MlpOut(l))).map(|(p, y)| p + y).collect();
        assert_eq!(bits(at(Point::Hidden(l))), bits(&sum), "layer {l}");
    }
}

/// What went in at every sublayer, put in by hand, gives the same bits; something else at one of them does not.
#[test]
fn replacement_takes_effect() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let tokens = prompt(83, 12);
    let mut seen = Everything::default();
    let expected = bits(&observe(&model, &tokens, LogitsWanted::All, &mut seen).values);
    let inputs: HashMap<Point, Vec<f32>> = seen
        .activations
        .into_iter()
        .filter(|(point, _)| matches!(point, Point::AttnIn(_) | Point::MlpIn(_)))
        .collect();
    assert_eq!(inputs.len(), 14);
    let logits = |inputs| bits(&observe(&model, &tokens, LogitsWanted::All, &mut Replacing(inputs)).values);
    assert_eq!(logits(inputs.clone()), expected);
    for point in [Point::AttnIn(0), Point::AttnIn(3), Point::MlpIn(0), Point::MlpIn(2), Point::MlpIn(6)] {
        let mut other = inputs[&point].clone();
        other[5] += 1.0;
        assert_ne!(logits(HashMap::from([(point, other)])), expected, "{point:?}");
    }
    // Other points are not asked for.
    let nothing = HashMap::from([(Point::Hidden(2), vec![0.0]), (Point::FinalMix, vec![0.0])]);
    assert_eq!(logits(nothing), expected);
}

#[test]
fn replacement_of_another_size() {
    let model = load(cpu(), &TinyWeights::new(Variant::K3));
    let store = MemoryStore::new(model.config());
    for point in [Point::AttnIn(0), Point::MlpIn(4)] {
        let mut state = model.new_state().unwrap();
        let observer = &mut Replacing(HashMap::from([(point, vec![0.0; 64])]));
        let error = try_run(&model, &store, &mut state, &[1, 2], LogitsWanted::Last, observer).unwrap_err();
        assert!(
            matches!(
                error,
                ForwardError::Replacement { point: p, expected: 128, found: 64 } if p == point
            ),
            "{error:?}"
        );
        assert!(state.is_broken());
    }
}

/// Breaks off after some layers.
struct Impatient(usize);

impl Observer for Impatient {
    fn layer_done(&mut self, done: usize, _: usize) -> ControlFlow<()> {
        if done == self.0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn cancelling() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let store = MemoryStore::new(model.config());
    for layers in [1, 4, 7] {
        let mut state = model.new_state().unwrap();
        run(&model, &store, &mut state, &[1, 2, 3], LogitsWanted::None);
        let kept = state.try_clone(model.device()).unwrap();
        store.take_calls();
        let observer = &mut Impatient(layers);
        let error = try_run(&model, &store, &mut state, &[4], LogitsWanted::Last, observer).unwrap_err();
        assert!(matches!(error, ForwardError::Cancelled { layers: l } if l == layers), "{error:?}");
        assert_eq!(store.take_calls().len(), layers - 1, "no later expert was asked for");
        assert!(state.is_broken());
        let refused = try_run(&model, &store, &mut state, &[4], LogitsWanted::Last, &mut Silent).unwrap_err();
        assert!(matches!(
            refused,
            ForwardError::State { span: 0, source: StateError::Broken { position: 3 } }
        ));
        // The snapshot from before goes on.
        run(&model, &store, &mut { kept }, &[4], LogitsWanted::Last);
    }
}

/// The two devices compute the same function; f32 rounding is all that is between them.
#[test]
fn devices_agree() {
    for variant in [Variant::K3, Variant::K31] {
        let weights = TinyWeights::new(variant);
        let tokens = prompt(84, 48);
        let (cpu, reference) = (load(cpu(), &weights), load(Reference, &weights));
        let got = observe(&cpu, &tokens, LogitsWanted::All, &mut Silent);
        let want = observe(&reference, &tokens, LogitsWanted::All, &mut Silent);
        for t in 0..tokens.len() {
            assert_close(&format!("{variant}: logits after {t}"), got.row(t), want.row(t), 1e-5);
        }
    }
}

/// The first layers of a model are a model: what they compute is what the whole one computes up to there.
#[test]
fn first_layers() {
    let weights = TinyWeights::new(Variant::K31);
    let whole = load(cpu(), &weights);
    let part = load_with(cpu(), &weights, &ModelOptions::default().with_layers(Some(4)));
    let tokens = prompt(85, 12);
    let (mut of_whole, mut of_part) = (Everything::default(), Everything::default());
    let logits = observe(&whole, &tokens, LogitsWanted::Last, &mut of_whole);
    let logits_of_part = observe(&part, &tokens, LogitsWanted::Last, &mut of_part);
    for l in 0..4 {
        let at = |seen: &Everything| bits(&seen.activations[&Point::Hidden(l)]);
        assert_eq!(at(&of_whole), at(&of_part));
    }
    assert!(!of_part.activations.contains_key(&Point::Hidden(4)));
    assert!(relative_l2(&logits_of_part.values, &logits.values) > 1e-3);
}

/// Cpu is named where states are saved; a rename would orphan them.
#[test]
fn kinds() {
    let model: Model<Cpu> = load(cpu(), &TinyWeights::new(Variant::K3));
    assert_eq!((model.device().kind(), Reference.kind()), ("cpu-f32", "reference-f64"));
}
