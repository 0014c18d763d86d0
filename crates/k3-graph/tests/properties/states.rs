//! A state is everything or nothing: it is copied, exported and restored as a whole, bit for bit.

use k3_format::Variant;
use k3_graph::device::StateValues;
use k3_graph::{
    Cpu, Device, DeviceError, ExportedState, LogitsWanted, Model, ModelOptions, Reference, SequenceState,
    StateError,
};

use crate::support::{MemoryStore, TinyWeights, bits, cpu, load, load_with, prompt, run, state_bits};

fn state_after<D: Device>(model: &Model<D>, tokens: &[u32]) -> SequenceState<D> {
    let mut state = model.new_state().unwrap();
    run(model, &MemoryStore::new(model.config()), &mut state, tokens, LogitsWanted::None);
    state
}

/// Logits of the next few tokens, and the state after them.
fn go_on<D: Device>(model: &Model<D>, state: &mut SequenceState<D>) -> (Vec<u32>, crate::support::StateBits) {
    let store = MemoryStore::new(model.config());
    let logits = run(model, &store, state, &prompt(61, 5), LogitsWanted::All);
    (bits(&logits.values), state_bits(&state.export(model.device()).unwrap()))
}

#[test]
fn a_copy_and_a_restored_state_go_on_with_the_same_bits() {
    fn check<D: Device>(device: D, variant: Variant) {
        let model = load(device, &TinyWeights::new(variant));
        for tokens in [0, 1, 2, 20] {
            let mut state = model.new_state().unwrap();
            if tokens > 0 {
                state = state_after(&model, &prompt(60, tokens));
            }
            assert_eq!(state.position(), tokens);
            let mut copy = state.try_clone(model.device()).unwrap();
            let exported = state.export(model.device()).unwrap();
            let mut restored = model.import_state(&exported).unwrap();
            assert_eq!((exported.position, restored.position()), (tokens, tokens));
            assert!(state_bits(&restored.export(model.device()).unwrap()) == state_bits(&exported));

            let expected = go_on(&model, &mut state);
            // What the original does afterwards is not seen in its copies.
            assert!(go_on(&model, &mut copy) == expected);
            assert!(go_on(&model, &mut restored) == expected);
            let mut again = model.import_state(&exported).unwrap();
            assert!(go_on(&model, &mut again) == expected);
        }
    }
    check(cpu(), Variant::K3);
    check(cpu(), Variant::K31);
    check(Reference, Variant::K31);
}

/// Names and shapes are the documented ones, complete from the first token on.
#[test]
fn parts() {
    fn check<D: Device>(device: D, variant: Variant, index_width: usize) {
        let model = load(device, &TinyWeights::new(variant));
        for tokens in [1, 3, 20] {
            let exported = state_after(&model, &prompt(62, tokens)).export(model.device()).unwrap();
            assert_eq!((exported.device.as_str(), exported.layers.len()), (model.device().kind(), 7));
            for (l, parts) in exported.layers.iter().enumerate() {
                let parts: Vec<(&str, &[usize])> =
                    parts.iter().map(|p| (p.name, p.shape.as_slice())).collect();
                if l == 3 || l == 6 {
                    let expected: [(&str, &[usize]); 3] = [
                        ("latent", &[tokens, 32]),
                        ("extra_key", &[tokens, 8]),
                        ("index_key", &[tokens, index_width]),
                    ];
                    assert_eq!(parts, expected);
                } else {
                    let expected: [(&str, &[usize]); 2] = [("conv", &[3, 3, 32]), ("state", &[2, 16, 16])];
                    assert_eq!(parts, expected);
                }
            }
        }
    }
    check(cpu(), Variant::K3, 0);
    check(cpu(), Variant::K31, 16);
    check(Reference, Variant::K31, 16);
}

/// The window holds the last three inputs, oldest first, and zeros before the sequence.
#[test]
fn windows_before_the_sequence_are_zero() {
    let model = load(cpu(), &TinyWeights::new(Variant::K3));
    let conv = |tokens: &[u32]| {
        let exported = state_after(&model, tokens).export(model.device()).unwrap();
        exported.layers[0][0].values.to_f32()
    };
    let (one, two) = (conv(&[7]), conv(&[7, 9]));
    for window in 0..3 {
        let rows = |conv: &[f32]| -> Vec<Vec<u32>> {
            conv[window * 96..(window + 1) * 96].chunks(32).map(bits).collect()
        };
        let (one, two) = (rows(&one), rows(&two));
        assert_eq!(one[..2], vec![vec![0; 32]; 2]);
        assert_eq!(two[0], vec![0; 32]);
        assert_eq!(two[1], one[2], "the input of the first token has moved by one");
        assert_ne!(two[2], one[2]);
    }
}

/// A good exported state of twelve tokens and a model for it.
fn exported() -> (Model<Cpu>, ExportedState) {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let exported = state_after(&model, &prompt(63, 12)).export(model.device()).unwrap();
    (model, exported)
}

/// Importing a state that `damage` has changed is refused for a part of `layer`, with both sides in the message.
#[track_caller]
fn refused(layer: usize, damage: impl Fn(&mut ExportedState)) {
    let (model, mut exported) = exported();
    damage(&mut exported);
    match model.import_state(&exported).err() {
        Some(StateError::Layer {
            layer: found,
            source: DeviceError::State { expected, found: given, .. },
        }) => {
            assert_eq!(found, layer);
            assert_ne!(expected, given);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_part_that_is_missing() {
    for (layer, parts) in [(0, 2), (3, 3), (6, 3)] {
        for part in 0..parts {
            refused(layer, |s| {
                s.layers[layer].remove(part);
            });
        }
        refused(layer, |s| s.layers[layer].clear());
    }
}

#[test]
fn a_part_too_many_or_out_of_order() {
    refused(3, |s| {
        let again = s.layers[3][0].clone();
        s.layers[3].push(again);
    });
    refused(3, |s| s.layers[3].swap(0, 1));
    refused(0, |s| s.layers[0].swap(0, 1));
    // Layers out of order: KDA's parts are not those of full attention.
    refused(2, |s| s.layers.swap(2, 3));
    refused(5, |s| s.layers[5][0].name = "latent");
}

#[test]
fn a_part_of_another_shape() {
    refused(0, |s| s.layers[0][1].shape = vec![16, 2, 16]);
    refused(0, |s| s.layers[0][1].shape = vec![512]);
    refused(1, |s| s.layers[1][0].shape[1] = 4);
    refused(3, |s| s.layers[3][2].shape[0] = 11);
    refused(6, |s| s.layers[6][0].shape = vec![32, 12]);
    // Values that do not fill the shape.
    refused(6, |s| s.layers[6][1].values = StateValues::F32(vec![0.0; 95]));
    refused(6, |s| s.layers[6][1].values = StateValues::F32(Vec::new()));
}

#[test]
fn a_part_of_another_precision() {
    for (layer, part) in [(0, 0), (0, 1), (3, 0), (6, 2)] {
        refused(layer, |s| {
            let wide = s.layers[layer][part].values.to_f32().iter().map(|&v| f64::from(v)).collect();
            s.layers[layer][part].values = StateValues::F64(wide);
        });
    }
}

/// The caches must hold exactly the tokens that the state claims.
#[test]
fn another_position() {
    refused(3, |s| s.position = 11);
    refused(3, |s| s.position = 0);
    refused(3, |s| s.position = usize::MAX);
    // Sizes that overflow when multiplied.
    refused(3, |s| {
        s.position = usize::MAX;
        for layer in [3, 6] {
            s.layers[layer].iter_mut().for_each(|part| part.shape[0] = usize::MAX);
        }
    });
    refused(3, |s| {
        s.position = 1 << 59;
        for layer in [3, 6] {
            for part in &mut s.layers[layer] {
                part.shape[0] = 1 << 59;
                part.values = StateValues::F32(Vec::new());
            }
        }
    });
}

#[test]
fn another_number_of_layers() {
    let (model, mut exported) = exported();
    exported.layers.pop();
    let error = model.import_state(&exported).unwrap_err();
    assert!(matches!(error, StateError::Layers { expected: 7, found: 6 }), "{error:?}");
    let part =
        load_with(cpu(), &TinyWeights::new(Variant::K31), &ModelOptions::default().with_layers(Some(6)));
    assert!(part.import_state(&exported).is_ok());
}

#[test]
fn another_device() {
    let weights = TinyWeights::new(Variant::K31);
    let (cpu, reference) = (load(cpu(), &weights), load(Reference, &weights));
    let of_cpu = state_after(&cpu, &prompt(64, 3)).export(cpu.device()).unwrap();
    let of_reference = state_after(&reference, &prompt(64, 3)).export(reference.device()).unwrap();
    let device = |error: StateError| match error {
        StateError::Device { expected, found } => (expected, found),
        other => panic!("{other:?}"),
    };
    let kinds = ("reference-f64", "cpu-f32".to_owned());
    assert_eq!(device(reference.import_state(&of_cpu).unwrap_err()), kinds);
    let kinds = ("cpu-f32", "reference-f64".to_owned());
    assert_eq!(device(cpu.import_state(&of_reference).unwrap_err()), kinds);
}

/// A state without indexer keys is none for a model with an indexer, and the other way round.
#[test]
fn another_variant() {
    let model = |ignore| {
        let options = ModelOptions::default().with_ignore_indexer(ignore);
        load_with(cpu(), &TinyWeights::new(Variant::K31), &options)
    };
    let (with, without) = (model(false), model(true));
    for (from, to) in [(&with, &without), (&without, &with)] {
        let exported = state_after(from, &prompt(65, 4)).export(from.device()).unwrap();
        let error = to.import_state(&exported).unwrap_err();
        assert!(
            matches!(
                error,
                StateError::Layer { layer: 3, source: DeviceError::State { name: "index_key", .. } }
            ),
            "{error:?}"
        );
    }
}

/// A living state that was never exported is held to the same.
#[test]
fn living_state_of_another_variant() {
    let model = |ignore| {
        let options = ModelOptions::default().with_ignore_indexer(ignore);
        load_with(cpu(), &TinyWeights::new(Variant::K31), &options)
    };
    let (with, without) = (model(false), model(true));
    for (from, to) in [(&with, &without), (&without, &with)] {
        let mut state = state_after(from, &prompt(66, 12));
        let store = MemoryStore::new(to.config());
        let mut spans = [k3_graph::Span { state: &mut state, tokens: &[1], logits: LogitsWanted::Last }];
        let result = to.forward(&mut spans, &store, &mut k3_graph::Silent);
        assert!(matches!(result, Err(k3_graph::ForwardError::State { span: 0, .. })), "{result:?}");
    }
}
