//! Sequences are strangers, and neither threads nor arrival orders are seen in the result.

use std::collections::{BTreeMap, BTreeSet};

use k3_experts::Phase;
use k3_format::Variant;
use k3_graph::{
    Cpu, Device, LogitsWanted, Model, Observer, Probe, Reference, Routing, SequenceState, Silent, Span,
};

use crate::support::{MemoryStore, Order, Outcome, TinyWeights, alone, bits, cpu, load, prompt, state_bits};

/// One batch: which sequences, in which order of rows, and how many of their next tokens.
type Batch = &'static [(usize, usize)];

/// Sequences come, stay a while and leave, with one token or many, in changing order.
const SCHEDULE: &[Batch] = &[
    &[(0, 17), (1, 1), (2, 5)],
    &[(2, 1), (0, 1)],
    &[(1, 5), (2, 17), (0, 1)],
    &[(0, 5)],
    &[(3, 1), (2, 1), (1, 1), (0, 1)],
    &[(3, 17), (1, 5)],
    &[(3, 1)],
];

/// What every sequence of the schedule got.
fn together<D: Device>(model: &Model<D>, store: &MemoryStore, prompts: &[Vec<u32>]) -> Vec<Outcome> {
    let mut states: Vec<SequenceState<D>> = prompts.iter().map(|_| model.new_state().unwrap()).collect();
    let mut logits = vec![Vec::new(); prompts.len()];
    for batch in SCHEDULE {
        let mut free: Vec<Option<&mut SequenceState<D>>> = states.iter_mut().map(Some).collect();
        let mut spans: Vec<Span<'_, D>> = batch
            .iter()
            .map(|&(sequence, n)| {
                let state = free[sequence].take().expect("a sequence is in a batch once");
                let tokens = &prompts[sequence][state.position()..][..n];
                Span { state, tokens, logits: LogitsWanted::All }
            })
            .collect();
        let results = model.forward(&mut spans, store, &mut Silent).unwrap();
        for (&(sequence, _), result) in batch.iter().zip(results) {
            logits[sequence].extend(bits(&result.unwrap().values));
        }
    }
    let state = |s: &SequenceState<D>| state_bits(&s.export(model.device()).unwrap());
    logits.into_iter().zip(&states).map(|(logits, s)| Outcome { logits, state: state(s) }).collect()
}

fn prompts() -> Vec<Vec<u32>> {
    let mut lengths = BTreeMap::new();
    for &(sequence, n) in SCHEDULE.iter().copied().flatten() {
        *lengths.entry(sequence).or_insert(0) += n;
    }
    lengths.iter().map(|(&sequence, &n)| prompt(10 + sequence as u64, n)).collect()
}

fn check_batches<D: Device>(device: D, variant: Variant) {
    let weights = TinyWeights::new(variant);
    let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
    let prompts = prompts();
    let outcomes = together(&model, &store, &prompts);
    for (sequence, (outcome, prompt)) in outcomes.iter().zip(&prompts).enumerate() {
        assert!(*outcome == alone(&model, &store, prompt, prompt.len()), "sequence {sequence}");
    }
}

#[test]
fn each_sequence_gets_what_it_gets_alone() {
    check_batches(cpu(), Variant::K3);
    check_batches(cpu(), Variant::K31);
}

#[test]
fn each_sequence_gets_what_it_gets_alone_on_the_reference() {
    check_batches(Reference, Variant::K3);
    check_batches(Reference, Variant::K31);
}

#[test]
fn equal_sequences_are_equal() {
    let weights = TinyWeights::new(Variant::K31);
    let (model, store) = (load(cpu(), &weights), MemoryStore::new(&weights.config));
    let tokens = prompt(4, 13);
    let mut states = [model.new_state().unwrap(), model.new_state().unwrap()];
    let mut spans: Vec<_> =
        states.iter_mut().map(|state| Span { state, tokens: &tokens, logits: LogitsWanted::All }).collect();
    let results = model.forward(&mut spans, &store, &mut Silent).unwrap();
    assert_eq!(results[0], results[1]);
}

#[test]
fn an_empty_batch_is_nothing() {
    fn check<D: Device>(device: D) {
        let weights = TinyWeights::new(Variant::K31);
        let (model, store) = (load(device, &weights), MemoryStore::new(&weights.config));
        assert!(model.forward(&mut [], &store, &mut Silent).unwrap().is_empty());
    }
    check(cpu());
    check(Reference);
}

#[test]
fn threads_and_arrival_orders_change_no_bit() {
    for variant in [Variant::K3, Variant::K31] {
        let weights = TinyWeights::new(variant);
        let prompts = prompts();
        let run = |threads, order| {
            let model = load(Cpu::new(threads).unwrap(), &weights);
            assert_eq!(model.device().threads(), threads);
            together(&model, &MemoryStore::new(&weights.config).with_order(order), &prompts)
        };
        let expected = run(1, Order::AsAsked);
        for threads in [2, 3, 8] {
            assert!(run(threads, Order::AsAsked) == expected, "{threads} threads");
        }
        for order in [Order::Reversed, Order::Shuffled(1), Order::Shuffled(2)] {
            assert!(run(2, order) == expected, "{order:?}");
        }
    }
}

/// The routing of every layer.
#[derive(Default)]
struct Routings(Vec<(usize, Routing)>);

impl Observer for Routings {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Routing
    }
    fn routing(&mut self, layer: usize, routing: &Routing) {
        self.0.push((layer, routing.clone()));
    }
}

/// One request a layer, every expert that a row needs once, the most wanted first.
#[test]
fn every_expert_is_fetched_once() {
    let weights = TinyWeights::new(Variant::K3);
    let (model, store) = (load(cpu(), &weights), MemoryStore::new(&weights.config));
    let mut states = [model.new_state().unwrap(), model.new_state().unwrap()];
    let steps: [([&[u32]; 2], Phase); 3] = [
        ([&prompt(5, 6), &prompt(6, 1)], Phase::Prefill),
        ([&[3], &[4]], Phase::Decode),
        ([&prompt(7, 2), &prompt(8, 3)], Phase::Prefill),
    ];
    for (tokens, phase) in steps {
        let mut observer = Routings::default();
        let mut spans: Vec<_> = states
            .iter_mut()
            .zip(tokens)
            .map(|(state, tokens)| Span { state, tokens, logits: LogitsWanted::Last })
            .collect();
        model.forward(&mut spans, &store, &mut observer).unwrap();
        let calls = store.take_calls();
        assert_eq!(calls.iter().map(|c| c.layer).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        for (call, (layer, routing)) in calls.iter().zip(&observer.0) {
            assert_eq!((call.layer, call.phase), (*layer, phase));
            let k = routing.experts_per_token;
            assert_eq!((k, routing.ids.len()), (3, 3 * tokens.concat().len()));
            // By best rank, then by number of uses, then by id.
            let mut wanted: Vec<(usize, std::cmp::Reverse<usize>, u32)> = routing
                .ids
                .iter()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .map(|&id| {
                    let ranks =
                        routing.ids.iter().enumerate().filter(|(_, i)| **i == id).map(|(at, _)| at % k);
                    (ranks.clone().min().unwrap(), std::cmp::Reverse(ranks.count()), id)
                })
                .collect();
            wanted.sort_unstable();
            assert_eq!(call.experts, wanted.iter().map(|w| w.2).collect::<Vec<_>>(), "layer {layer}");
        }
    }
}
