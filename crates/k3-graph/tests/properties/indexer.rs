//! The Lightning Indexer in the whole model: dormant up to its budget, from the first token on in the cache.

use k3_format::{Role, Variant};
use k3_graph::{
    Cpu, Device, LogitsWanted, Model, ModelOptions, Observer, Probe, Reference, Selected, Selection,
};

use crate::support::{MemoryStore, TOPK, TinyWeights, bits, cpu, load, load_with, prompt, run, try_run};

/// Selections and scores of every full-attention layer.
#[derive(Default)]
struct Selections(Vec<(usize, Selection, Vec<Vec<f32>>)>);

impl Observer for Selections {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Indexer
    }
    fn selection(&mut self, layer: usize, selection: &Selection, scores: &[Vec<f32>]) {
        self.0.push((layer, selection.clone(), scores.to_vec()));
    }
}

fn select<D: Device>(model: &Model<D>, tokens: &[u32]) -> Selections {
    let mut observer = Selections::default();
    let store = MemoryStore::new(model.config());
    let state = &mut model.new_state().unwrap();
    try_run(model, &store, state, tokens, LogitsWanted::None, &mut observer).unwrap().unwrap();
    observer
}

#[test]
fn dormant_up_to_the_budget() {
    fn check<D: Device>(device: impl Fn() -> D) {
        let weights = TinyWeights::new(Variant::K31);
        let with = load(device(), &weights);
        let without = load_with(device(), &weights, &ModelOptions::default().with_ignore_indexer(true));
        assert_eq!((with.attends_as(), without.attends_as()), (Variant::K31, Variant::K3));
        let store = MemoryStore::new(&weights.config);
        let tokens = prompt(70, 40);
        let all = |model: &Model<D>| {
            let logits = run(model, &store, &mut model.new_state().unwrap(), &tokens, LogitsWanted::All);
            (0..tokens.len()).map(|t| bits(logits.row(t))).collect::<Vec<_>>()
        };
        let (sparse, dense) = (all(&with), all(&without));
        assert_eq!(sparse[..TOPK], dense[..TOPK], "every key fits");
        // From then on, some key is left out of every row.
        for t in TOPK..tokens.len() {
            assert_ne!(sparse[t], dense[t], "position {t}");
        }
    }
    check(cpu);
    check(|| Reference);
}

/// The same for weights of a K3 and of a K3.1 that differ in the indexer alone.
#[test]
fn ignored_indexer_is_the_other_variant() {
    let (k3, k31) = (TinyWeights::new(Variant::K3), TinyWeights::new(Variant::K31));
    let store = MemoryStore::new(&k3.config);
    let tokens = prompt(71, 30);
    let logits = |model: &Model<Cpu>| {
        bits(&run(model, &store, &mut model.new_state().unwrap(), &tokens, LogitsWanted::All).values)
    };
    let ignored = load_with(cpu(), &k31, &ModelOptions::default().with_ignore_indexer(true));
    assert_eq!(logits(&load(cpu(), &k3)), logits(&ignored));
    assert_ne!(logits(&load(cpu(), &k31)), logits(&ignored));
}

#[test]
fn keys_are_cached_from_the_first_token() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let store = MemoryStore::new(model.config());
    let keys = |tokens: &[u32]| {
        let mut state = model.new_state().unwrap();
        run(&model, &store, &mut state, tokens, LogitsWanted::None);
        let exported = state.export(model.device()).unwrap();
        [3, 6].map(|l: usize| exported.layers[l][2].values.to_f32())
    };
    let tokens = prompt(72, 20);
    let (dormant, long) = (keys(&tokens[..4]), keys(&tokens));
    for (dormant, long) in dormant.iter().zip(&long) {
        assert_eq!((dormant.len(), long.len()), (4 * 16, 20 * 16));
        assert_eq!(bits(dormant), bits(&long[..4 * 16]));
        for key in long.chunks(16) {
            assert!(key.iter().any(|&v| v != 0.0));
        }
    }
}

/// Each row has a score for every position up to its own, and what it selects follows from them.
#[test]
fn selection_follows_from_the_scores() {
    fn check<D: Device>(device: D) {
        let model = load(device, &TinyWeights::new(Variant::K31));
        let seen = select(&model, &prompt(73, 30));
        assert_eq!(seen.0.iter().map(|s| s.0).collect::<Vec<_>>(), [3, 6]);
        for (_, selection, scores) in &seen.0 {
            assert_eq!((selection.rows.len(), scores.len()), (30, 30));
            for (t, (selected, scores)) in selection.rows.iter().zip(scores).enumerate() {
                assert_eq!(scores.len(), t + 1);
                if t < TOPK {
                    assert_eq!(*selected, Selected::All);
                    continue;
                }
                let Selected::Keys(keys) = selected else { panic!("row {t} selects {selected:?}") };
                assert_eq!(keys.len(), TOPK);
                let mut distinct = keys.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(distinct.len(), TOPK);
                let least = keys.iter().map(|&k| scores[k as usize]).fold(f32::INFINITY, f32::min);
                let left_out = (0..=t as u32).filter(|k| !keys.contains(k));
                assert!(left_out.into_iter().all(|k| scores[k as usize] <= least));
            }
        }
    }
    check(cpu());
    check(Reference);
}

/// Where all scores are equal, of either sign of zero, the lowest positions win, whatever the number of threads.
#[test]
fn ties_go_to_the_lowest_positions() {
    fn check<D: Device>(device: D, weights: &TinyWeights) -> Vec<u32> {
        let model = load(device, weights);
        let tokens = prompt(74, 30);
        for (layer, selection, scores) in &select(&model, &tokens).0 {
            assert!(scores.iter().flatten().all(|&s| s == 0.0));
            for (t, selected) in selection.rows.iter().enumerate().skip(TOPK) {
                let lowest = Selected::Keys((0..TOPK as u32).collect());
                assert_eq!(*selected, lowest, "layer {layer}, position {t}");
            }
        }
        let store = MemoryStore::new(model.config());
        bits(&run(&model, &store, &mut model.new_state().unwrap(), &tokens, LogitsWanted::All).values)
    }
    let zero = |v: &mut [f32]| v.fill(0.0);
    let no_weight = TinyWeights::new(Variant::K31).edit_full_attention(Role::IndexerWeightsProj, zero);
    // Weights of both signs times a relu that is always zero.
    let no_query = TinyWeights::new(Variant::K31).edit_full_attention(Role::IndexerWqB, zero);
    let expected = check(Cpu::new(1).unwrap(), &no_weight);
    for threads in [2, 3, 8, 16] {
        assert_eq!(check(Cpu::new(threads).unwrap(), &no_weight), expected, "{threads} threads");
    }
    assert_eq!(check(cpu(), &no_query), expected);
    check(Reference, &no_weight);
    check(Reference, &no_query);
}
