//! Guesses at the next layer's experts: only for who wants them, only in decode, and without a trace in the result.

use k3_format::Variant;
use k3_graph::{Cpu, LogitsWanted, Lookahead, Model, ModelOptions};

use crate::support::{MemoryStore, TinyWeights, bits, cpu, load_with, prompt, run};

fn model(lookahead: Lookahead) -> Model<Cpu> {
    load_with(cpu(), &TinyWeights::new(Variant::K31), &ModelOptions::default().with_lookahead(lookahead))
}

#[test]
fn guesses_are_made_in_decode_for_who_wants_them() {
    let check = |lookahead, wants: bool, expected: &[usize]| {
        let model = model(lookahead);
        let store = MemoryStore::new(model.config());
        let store = if wants { store.with_guesses() } else { store };
        let mut state = model.new_state().unwrap();
        run(&model, &store, &mut state, &prompt(91, 5), LogitsWanted::None);
        assert!(store.take_guesses().is_empty(), "no guesses in prefill");
        run(&model, &store, &mut state, &[7], LogitsWanted::Last);
        let guesses = store.take_guesses();
        assert_eq!(guesses.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), expected, "{lookahead:?}");
        let k = model.config().moe.num_experts_per_token;
        for (_, ids) in guesses {
            let mut distinct = ids.clone();
            distinct.sort_unstable();
            distinct.dedup();
            // The better three quarters of the ranks.
            assert_eq!((ids.len(), distinct.len()), ((3 * k).div_ceil(4), (3 * k).div_ceil(4)));
        }
    };
    // Layer 0 is dense, and behind layer 6 there is none.
    check(Lookahead::Input, true, &[1, 2, 3, 4, 5, 6]);
    check(Lookahead::Shared, true, &[1, 2, 3, 4, 5, 6]);
    check(Lookahead::Off, true, &[]);
    check(Lookahead::Input, false, &[]);
}

/// A guess is more often right than a draw would be: the state at hand is most of what the next layer gets.
#[test]
fn guesses_come_true_more_often_than_chance() {
    for lookahead in [Lookahead::Input, Lookahead::Shared] {
        let model = model(lookahead);
        let store = MemoryStore::new(model.config()).with_guesses();
        let mut state = model.new_state().unwrap();
        let (mut right, mut made) = (0, 0);
        for id in prompt(92, 40) {
            run(&model, &store, &mut state, &[id], LogitsWanted::None);
            let calls = store.take_calls();
            for (layer, ids) in store.take_guesses() {
                let asked = &calls.iter().find(|call| call.layer == layer).unwrap().experts;
                right += ids.iter().filter(|id| asked.contains(id)).count();
                made += ids.len();
            }
        }
        let moe = &model.config().moe;
        let chance = moe.num_experts_per_token as f64 / moe.num_experts as f64;
        let share = right as f64 / made as f64;
        println!("{lookahead:?}: {share:.3} against {chance:.3}");
        assert!(share > chance, "{lookahead:?}: {share} against {chance}");
    }
}

#[test]
fn guesses_change_no_bit() {
    let logits = |lookahead| {
        let model = model(lookahead);
        let store = MemoryStore::new(model.config()).with_guesses();
        let mut state = model.new_state().unwrap();
        let ids = prompt(93, 12);
        ids.iter()
            .flat_map(|id| bits(&run(&model, &store, &mut state, &[*id], LogitsWanted::All).values))
            .collect::<Vec<_>>()
    };
    assert_eq!(logits(Lookahead::Input), logits(Lookahead::Off));
    assert_eq!(logits(Lookahead::Shared), logits(Lookahead::Off));
}
