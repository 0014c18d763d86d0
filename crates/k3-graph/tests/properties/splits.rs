//! Prefill is the same as step by step, at any length and in any chunks.

use k3_format::Variant;
use k3_graph::{Cpu, Device, LogitsWanted, Reference};

use crate::support::{MemoryStore, TinyWeights, alone, bits, cpu, load, prompt, run, state_bits};

/// For every length up to `lengths`: the logits after all tokens at once are those after all but one and a step,
/// and so is the state.
fn check_lengths<D: Device>(device: D, variant: Variant, lengths: usize) {
    let weights = TinyWeights::new(variant);
    let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
    let tokens = prompt(1, lengths);
    // The state after all but one.
    let mut shorter = model.new_state().unwrap();
    for n in 1..=lengths {
        let mut whole = model.new_state().unwrap();
        let at_once = run(&model, &store, &mut whole, &tokens[..n], LogitsWanted::Last);
        let step = run(&model, &store, &mut shorter, &tokens[n - 1..n], LogitsWanted::Last);
        assert_eq!(bits(&at_once.values), bits(&step.values), "logits after {n} tokens");
        assert_eq!(at_once.last(), Some(at_once.row(0)));
        let export = |state: &k3_graph::SequenceState<D>| state_bits(&state.export(model.device()).unwrap());
        assert_eq!(export(&whole), export(&shorter), "state after {n} tokens");
        shorter = whole;
    }
}

#[test]
fn one_more_token_is_a_step() {
    check_lengths(cpu(), Variant::K3, 130);
}

#[test]
fn one_more_token_is_a_step_with_an_indexer() {
    check_lengths(cpu(), Variant::K31, 130);
}

#[test]
fn one_more_token_is_a_step_on_the_reference() {
    check_lengths(Reference, Variant::K3, 12);
    check_lengths(Reference, Variant::K31, 20);
}

/// The same logits at every position and the same final state, in spans of all these sizes and at once.
fn check_chunks<D: Device>(device: D, variant: Variant, tokens: usize, chunks: &[usize]) {
    let weights = TinyWeights::new(variant);
    let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
    let tokens = prompt(2, tokens);
    let whole = alone(&model, &store, &tokens, tokens.len());
    for &chunk in chunks {
        assert!(alone(&model, &store, &tokens, chunk) == whole, "chunks of {chunk}");
    }
}

#[test]
fn chunks() {
    check_chunks(cpu(), Variant::K3, 200, &[1, 7, 64]);
    check_chunks(cpu(), Variant::K31, 200, &[1, 7, 64]);
}

#[test]
fn chunks_on_the_reference() {
    check_chunks(Reference, Variant::K3, 70, &[1, 7, 64]);
    check_chunks(Reference, Variant::K31, 70, &[1, 7, 64]);
}

#[test]
fn a_thousand_tokens() {
    check_chunks(Cpu::new(1).unwrap(), Variant::K31, 1000, &[1, 7, 64]);
}

/// Which logits are wanted changes neither them nor the state.
#[test]
fn wanted_logits() {
    for variant in [Variant::K3, Variant::K31] {
        let weights = TinyWeights::new(variant);
        let (model, store) = (load(cpu(), &weights), MemoryStore::new(&weights.config));
        let tokens = prompt(3, 21);
        let run = |wanted| {
            let mut state = model.new_state().unwrap();
            let logits = run(&model, &store, &mut state, &tokens, wanted);
            (logits, state_bits(&state.export(model.device()).unwrap()))
        };
        let [(none, a), (last, b), (all, c)] =
            [LogitsWanted::None, LogitsWanted::Last, LogitsWanted::All].map(run);
        assert!(a == b && b == c);
        assert_eq!(all.values.len(), 21 * all.width);
        assert_eq!((none.last(), none.values.len()), (None, 0));
        assert_eq!(bits(last.last().unwrap()), bits(all.row(20)));
        assert_eq!(bits(last.row(0)), bits(all.last().unwrap()));
    }
}
