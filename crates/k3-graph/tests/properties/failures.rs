//! Experts that do not come: the pass fails, says why, and its states are lost. Dropping an expert would change the
//! output without a word.

use k3_experts::ExpertError;
use k3_format::Variant;
use k3_graph::{
    Device, ForwardError, LogitsWanted, Model, Reference, SequenceState, Silent, Span, StateError,
};

use crate::support::{Fault, MemoryStore, Order, TinyWeights, cpu, load, prompt, run, try_run};

/// The error of a batch of two sequences with this fault, after the check that both states are lost and that the
/// model itself is not.
fn fail<D: Device>(model: &Model<D>, fault: Fault, order: Order) -> ForwardError {
    let sound = MemoryStore::new(model.config());
    let faulty = MemoryStore::new(model.config()).with_fault(fault).with_order(order);
    let mut states = [model.new_state().unwrap(), model.new_state().unwrap()];
    run(model, &sound, &mut states[1], &prompt(1, 4), LogitsWanted::None);
    let kept = states[1].try_clone(model.device()).unwrap();

    let (many, one) = (prompt(2, 9), prompt(3, 1));
    let [a, b] = &mut states;
    let mut spans = [
        Span { state: a, tokens: &many, logits: LogitsWanted::Last },
        Span { state: b, tokens: &one, logits: LogitsWanted::Last },
    ];
    let error = model.forward(&mut spans, &faulty, &mut Silent).unwrap_err();
    for (state, start) in states.iter_mut().zip([0, 4]) {
        assert!(state.is_broken());
        let refused = try_run(model, &sound, state, &one, LogitsWanted::Last, &mut Silent).unwrap_err();
        assert!(
            matches!(refused, ForwardError::State { span: 0, source: StateError::Broken { position } } if position == start),
            "{refused:?}"
        );
    }
    // A snapshot from before goes on as if nothing had been.
    let again = |mut state: SequenceState<D>| run(model, &sound, &mut state, &one, LogitsWanted::Last);
    let mut fresh = model.new_state().unwrap();
    run(model, &sound, &mut fresh, &prompt(1, 4), LogitsWanted::None);
    assert_eq!(again(kept), again(fresh));
    error
}

fn check<D: Device>(device: D, fault: Fault, expected: impl Fn(&ForwardError) -> bool) {
    let model = load(device, &TinyWeights::new(Variant::K31));
    for order in [Order::AsAsked, Order::Reversed, Order::Shuffled(5)] {
        let error = fail(&model, fault, order);
        assert!(expected(&error), "{fault:?}: {error:?}");
    }
}

/// With ten tokens, all of the first experts of a layer are wanted.
fn wanted_expert<D: Device>(model: &Model<D>, layer: usize) -> u32 {
    let store = MemoryStore::new(model.config());
    run(model, &store, &mut model.new_state().unwrap(), &prompt(2, 9), LogitsWanted::None);
    store.take_calls().iter().find(|call| call.layer == layer).unwrap().experts[1]
}

#[test]
fn unreadable_expert() {
    let expert = wanted_expert(&load(cpu(), &TinyWeights::new(Variant::K31)), 4);
    let unreadable = Fault::Unreadable { layer: 4, expert };
    let expected = |error: &ForwardError| {
        let names_it = matches!(
            error,
            ForwardError::Expert(ExpertError::Read { layer: 4, expert: e, .. }) if *e == expert
        );
        names_it && error.to_string() == format!("reading expert {expert} of layer 4")
    };
    check(cpu(), unreadable, expected);
    check(Reference, unreadable, expected);
}

#[test]
fn too_few_experts() {
    let expected = |error: &ForwardError| matches!(error, ForwardError::MissingExperts { layer: 6, expected, found } if found + 1 == *expected);
    check(cpu(), Fault::TooFew { layer: 6 }, expected);
    check(Reference, Fault::TooFew { layer: 6 }, expected);
}

/// The number is right, but one is missing.
#[test]
fn an_expert_twice_in_place_of_another() {
    let expected = |error: &ForwardError| matches!(error, ForwardError::UnexpectedExpert { layer: 2, .. });
    check(cpu(), Fault::Twice { layer: 2 }, expected);
}

/// What nobody asked for must not be mistaken for a result, nor be a panic.
#[test]
fn unasked_expert() {
    for expert in [12, u32::MAX] {
        let expected = |error: &ForwardError| matches!(error, ForwardError::UnexpectedExpert { layer: 3, expert: e } if *e == expert);
        check(cpu(), Fault::Unasked { layer: 3, expert }, expected);
    }
}

#[test]
fn expert_of_another_size() {
    let expert = wanted_expert(&load(cpu(), &TinyWeights::new(Variant::K31)), 5);
    let expected = |error: &ForwardError| {
        matches!(
            error,
            ForwardError::ExpertShape { layer: 5, expert: e, expected: (32, 32), .. } if *e == expert
        )
    };
    check(cpu(), Fault::Misshapen { layer: 5, expert }, expected);
}
