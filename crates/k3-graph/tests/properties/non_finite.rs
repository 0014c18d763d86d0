//! A number that is none stops one sequence, with its place, and no other.

use std::error::Error;

use k3_format::{Role, TensorId, Variant};
use k3_graph::device::StateValues;
use k3_graph::{
    Device, ForwardError, LogitsWanted, Model, Observer, Place, Probe, Reference, Routing, SequenceState,
    Silent, Span, SpanError, SpanResult, StateError,
};

use crate::support::{
    MemoryStore, TOPK, TinyWeights, alone, bits, cpu, load, prompt, run, state_bits, try_run,
};

/// A token whose embedding is damaged; no [`prompt`] holds it.
const POISON: u32 = 95;

fn non_finite(position: usize, place: Place) -> SpanError {
    SpanError::NonFinite { position, place }
}

/// A clean sequence before and after a bad one in the same batch: each clean one gets what it gets alone, before and
/// after, and the bad one's state is lost.
fn check_neighbours<D: Device>(
    model: &Model<D>,
    store: &MemoryStore,
    bad: &mut SequenceState<D>,
    bad_tokens: &[u32],
    clean_tokens: [&[u32]; 2],
    expected: &SpanError,
) {
    let start = bad.position();
    let [mut before, mut after] = [model.new_state().unwrap(), model.new_state().unwrap()];
    let mut spans = [
        Span { state: &mut before, tokens: clean_tokens[0], logits: LogitsWanted::All },
        Span { state: bad, tokens: bad_tokens, logits: LogitsWanted::Last },
        Span { state: &mut after, tokens: clean_tokens[1], logits: LogitsWanted::All },
    ];
    let results: [SpanResult; 3] = model.forward(&mut spans, store, &mut Silent).unwrap().try_into().unwrap();
    let [first, second, third] = results;
    assert_eq!(second.unwrap_err(), *expected);
    for (result, state, tokens) in
        [(first, &mut before, clean_tokens[0]), (third, &mut after, clean_tokens[1])]
    {
        let expected = alone(model, store, tokens, tokens.len());
        assert_eq!(bits(&result.unwrap().values), expected.logits);
        assert!(state_bits(&state.export(model.device()).unwrap()) == expected.state);
        assert!(!state.is_broken());
        // And goes on.
        let mut tokens = tokens.to_vec();
        tokens.push(1);
        let next = run(model, store, state, &[1], LogitsWanted::Last);
        let whole = alone(model, store, &tokens, tokens.len()).logits;
        assert_eq!(bits(&next.values), whole[whole.len() - next.width..]);
    }

    assert!(bad.is_broken());
    let refused = try_run(model, store, bad, &[1], LogitsWanted::Last, &mut Silent).unwrap_err();
    assert_broken(&refused, start);
    assert!(matches!(bad.export(model.device()), Err(StateError::Broken { position }) if position == start));
    assert!(
        matches!(bad.try_clone(model.device()), Err(StateError::Broken { position }) if position == start)
    );
}

fn assert_broken(error: &ForwardError, start: usize) {
    let ForwardError::State { span: 0, source: StateError::Broken { position } } = error else {
        panic!("{error:?} does not say that the state is broken");
    };
    assert_eq!(*position, start, "where the failed pass started");
    assert!(error.source().unwrap().to_string().contains(&format!("failed at position {start}")));
}

#[test]
fn damaged_embedding() {
    fn check<D: Device>(device: D, variant: Variant, bad_value: f32) {
        let weights = TinyWeights::new(variant)
            .edit(TensorId::model(Role::EmbedTokens), move |v| v[POISON as usize * 64 + 17] = bad_value);
        let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
        let clean = [prompt(20, 5), prompt(21, 11)];
        for (earlier, at) in [(0, 0), (0, 3), (9, 3), (2, 5)] {
            let mut state = model.new_state().unwrap();
            if earlier > 0 {
                run(&model, &store, &mut state, &prompt(22, earlier), LogitsWanted::None);
            }
            let mut tokens = prompt(23, 6);
            tokens[at] = POISON;
            // Layer 1 has the first router.
            let expected = non_finite(earlier + at, Place::Router(1));
            check_neighbours(&model, &store, &mut state, &tokens, [&clean[0], &clean[1]], &expected);
        }
    }
    check(cpu(), Variant::K3, f32::NAN);
    check(cpu(), Variant::K31, f32::NAN);
    check(cpu(), Variant::K31, f32::INFINITY);
    check(Reference, Variant::K31, f32::NAN);
}

#[test]
fn no_logits_wanted_is_no_excuse() {
    let weights = TinyWeights::new(Variant::K3)
        .edit(TensorId::model(Role::EmbedTokens), |v| v[POISON as usize * 64] = f32::NAN);
    let (model, store) = (load(cpu(), &weights), MemoryStore::new(&weights.config));
    let mut state = model.new_state().unwrap();
    let result =
        try_run(&model, &store, &mut state, &[1, POISON, 2], LogitsWanted::None, &mut Silent).unwrap();
    assert_eq!(result, Err(non_finite(1, Place::Router(1))));
    assert!(state.is_broken());
}

/// The routing of one layer.
struct RoutingOf(usize, Option<Routing>);

impl Observer for RoutingOf {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Routing
    }
    fn routing(&mut self, layer: usize, routing: &Routing) {
        if layer == self.0 {
            self.1 = Some(routing.clone());
        }
    }
}

/// The experts of every token of a sequence in `layer`.
fn experts<D: Device>(model: &Model<D>, store: &MemoryStore, tokens: &[u32], layer: usize) -> Vec<Vec<u32>> {
    let mut observer = RoutingOf(layer, None);
    let mut state = model.new_state().unwrap();
    try_run(model, store, &mut state, tokens, LogitsWanted::None, &mut observer).unwrap().unwrap();
    let routing = observer.1.unwrap();
    routing.ids.chunks(routing.experts_per_token).map(<[u32]>::to_vec).collect()
}

/// One block scale of one expert is the code that is no number.
#[test]
fn damaged_expert() {
    fn check<D: Device>(device: D, variant: Variant, layer: usize, place: Place) {
        let weights = TinyWeights::new(variant);
        let model = load(device, &weights);
        let store = MemoryStore::new(&weights.config);
        let (clean, bad) = ([prompt(30, 1), prompt(31, 1)], prompt(33, 7));
        let [one, other] = [0, 1].map(|i| {
            // With the token that `check_neighbours` goes on with.
            let tokens = [&clean[i][..], &[1]].concat();
            experts(&model, &store, &tokens, layer).concat()
        });
        let of_bad = experts(&model, &store, &bad, layer);
        let expert = *of_bad
            .concat()
            .iter()
            .find(|e| !one.contains(e) && !other.contains(e))
            .expect("a prompt with an expert of its own");
        let first = of_bad.iter().position(|ids| ids.contains(&expert)).unwrap();

        let store = MemoryStore::new(&weights.config).with_nan_scale(layer, expert);
        // The last layer's output is seen in the logits alone, and of those only the last are wanted.
        let position = if place == Place::Logits {
            assert!(of_bad.last().unwrap().contains(&expert), "choose another prompt");
            bad.len() - 1
        } else {
            first
        };
        let mut state = model.new_state().unwrap();
        let expected = non_finite(position, place);
        check_neighbours(&model, &store, &mut state, &bad, [&clean[0], &clean[1]], &expected);
    }
    check(cpu(), Variant::K3, 1, Place::Router(2));
    check(cpu(), Variant::K31, 3, Place::Router(4));
    check(Reference, Variant::K31, 3, Place::Router(4));
}

/// Damage that only the logits show is found where logits are wanted.
#[test]
fn damaged_expert_of_the_last_layer() {
    let weights = TinyWeights::new(Variant::K3);
    let (model, last) = (load(cpu(), &weights), weights.config.num_hidden_layers() - 1);
    let tokens = prompt(34, 9);
    let used = experts(&model, &MemoryStore::new(&weights.config), &tokens, last);
    let expert = used[8][0];
    let first = used.iter().position(|ids| ids.contains(&expert)).unwrap();
    let store = MemoryStore::new(&weights.config).with_nan_scale(last, expert);
    for (wanted, position) in [(LogitsWanted::Last, 8), (LogitsWanted::All, first)] {
        let mut state = model.new_state().unwrap();
        let result = try_run(&model, &store, &mut state, &tokens, wanted, &mut Silent).unwrap();
        assert_eq!(result, Err(non_finite(position, Place::Logits)));
    }
}

/// Dormant while every key fits; then every row that has to select fails, the first one by name.
#[test]
fn damaged_indexer() {
    fn check<D: Device>(device: D, role: Role) {
        let weights = TinyWeights::new(Variant::K31).edit(TensorId::layer(3, role), |v| v[0] = f32::NAN);
        let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
        let clean = [prompt(40, TOPK - 1), prompt(41, 1)];
        let mut state = model.new_state().unwrap();
        let expected = non_finite(TOPK, Place::Indexer(3));
        let bad = prompt(42, TOPK + 4);
        check_neighbours(&model, &store, &mut state, &bad, [&clean[0], &clean[1]], &expected);
    }
    for role in [Role::IndexerWqB, Role::IndexerWk, Role::IndexerKNormBias, Role::IndexerWeightsProj] {
        check(cpu(), role);
    }
    check(Reference, Role::IndexerWk);
}

/// A state with one damaged indexer key fails as soon as that key has a score, beside an intact one.
#[test]
fn damaged_state() {
    let weights = TinyWeights::new(Variant::K31);
    let (model, store) = (load(cpu(), &weights), MemoryStore::new(&weights.config));
    let mut state = model.new_state().unwrap();
    run(&model, &store, &mut state, &prompt(50, 5), LogitsWanted::None);
    let mut exported = state.export(model.device()).unwrap();
    let key = exported.layers[6].iter_mut().find(|part| part.name == "index_key").unwrap();
    let StateValues::F32(values) = &mut key.values else { panic!("the host device keeps f32") };
    values[2 * 16] = f32::NAN;
    let mut state = model.import_state(&exported).unwrap();
    let expected = non_finite(TOPK, Place::Indexer(6));
    let clean = [prompt(51, 20), prompt(52, 3)];
    check_neighbours(&model, &store, &mut state, &prompt(53, 6), [&clean[0], &clean[1]], &expected);
}

#[test]
fn messages_name_the_place() {
    let message = |place| non_finite(7, place).to_string();
    assert!(message(Place::Router(3)).contains("position 7, router scores of layer 3"));
    assert!(message(Place::Indexer(6)).contains("position 7, indexer scores of layer 6"));
    assert!(message(Place::Logits).contains("position 7, logits"));
}
