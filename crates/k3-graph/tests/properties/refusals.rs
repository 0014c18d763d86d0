//! Input that is refused before any state is touched, and weights that do not fit.

use std::error::Error;

use k3_format::{Role, TensorId, Variant};
use k3_graph::{
    Cpu, Device, ForwardError, LoadError, LogitsWanted, Model, ModelOptions, Reference, SequenceState,
    Silent, Span, StateError, TokenError, WeightSource,
};
use k3_quant::Matrix;

use crate::support::{MemoryStore, TinyWeights, VOCAB, bits, cpu, load, load_with, prompt, run, state_bits};

/// A batch of a good span and a bad one: refused with an error that `expected` accepts, no expert fetched, and both
/// states are where they were.
fn check<D: Device>(
    model: &Model<D>,
    bad: &mut SequenceState<D>,
    tokens: &[u32],
    expected: impl Fn(&ForwardError) -> bool,
) {
    let store = MemoryStore::new(model.config());
    let mut good = model.new_state().unwrap();
    run(model, &store, &mut good, &prompt(1, 3), LogitsWanted::None);
    let unbroken = !bad.is_broken();
    let export = |s: &SequenceState<D>| s.export(model.device()).ok().map(|e| state_bits(&e));
    let before = (export(&good), export(bad));
    store.take_calls();

    let mut spans = [
        Span { state: &mut good, tokens: &[1, 2], logits: LogitsWanted::Last },
        Span { state: bad, tokens, logits: LogitsWanted::Last },
    ];
    let error = model.forward(&mut spans, &store, &mut Silent).unwrap_err();
    assert!(expected(&error), "{error:?}");
    assert!(store.take_calls().is_empty());
    assert!((export(&good), export(bad)) == before, "a refusal leaves the states alone");
    assert!(!good.is_broken() && bad.is_broken() != unbroken);

    let mut other = model.new_state().unwrap();
    run(model, &store, &mut other, &prompt(1, 3), LogitsWanted::None);
    let next =
        |state: &mut SequenceState<D>| bits(&run(model, &store, state, &[5], LogitsWanted::Last).values);
    assert_eq!(next(&mut good), next(&mut other));
}

fn after_two<D: Device>(model: &Model<D>) -> SequenceState<D> {
    let mut state = model.new_state().unwrap();
    run(model, &MemoryStore::new(model.config()), &mut state, &prompt(2, 2), LogitsWanted::None);
    state
}

#[test]
fn tokens() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let state = &mut after_two(&model);
    let refused = |expected: TokenError| move |e: &ForwardError| matches!(e, ForwardError::Tokens { span: 1, source } if *source == expected);
    check(&model, state, &[], refused(TokenError::None));
    check(&model, state, &[0, 1, 96], refused(TokenError::Media { index: 2, id: 96 }));
    for id in [VOCAB as u32, u32::MAX] {
        let unknown = TokenError::Unknown { index: 1, id, vocab_size: VOCAB };
        check(&model, state, &[0, id], refused(unknown));
    }
    // The last id that exists is not beyond the vocabulary, where it is no placeholder.
    let mut weights = TinyWeights::new(Variant::K3);
    weights.config.tokens.media_placeholder = None;
    let model = load(cpu(), &weights);
    run(&model, &MemoryStore::new(model.config()), &mut after_two(&model), &[96], LogitsWanted::Last);
}

#[test]
fn context() {
    let mut weights = TinyWeights::new(Variant::K3);
    weights.config.max_position_embeddings = 10;
    let model = load(cpu(), &weights);
    let store = MemoryStore::new(model.config());
    let state = &mut after_two(&model);
    let over = |tokens: usize, position: usize| {
        move |e: &ForwardError| {
            let expected = TokenError::Context { tokens, position, context: 10 };
            matches!(e, ForwardError::Tokens { span: 1, source } if *source == expected)
        }
    };
    check(&model, state, &prompt(3, 9), over(9, 2));
    // To the last position and no further.
    run(&model, &store, state, &prompt(3, 8), LogitsWanted::Last);
    assert_eq!(state.position(), 10);
    check(&model, state, &[1], over(1, 10));
    let told = |tokens, position| TokenError::Context { tokens, position, context: 10 }.to_string();
    assert_eq!(told(11, 0), "11 tokens do not fit the model's context of 10");
    assert_eq!(told(9, 2), "9 tokens after 2 already consumed do not fit the model's context of 10");
}

#[test]
fn broken_state() {
    let model = load(cpu(), &TinyWeights::new(Variant::K31));
    let mut state = after_two(&model);
    let faulty = MemoryStore::new(model.config()).with_fault(crate::support::Fault::TooFew { layer: 1 });
    let mut spans = [Span { state: &mut state, tokens: &[1], logits: LogitsWanted::None }];
    model.forward(&mut spans, &faulty, &mut Silent).unwrap_err();
    check(&model, &mut state, &[1], |e| {
        matches!(e, ForwardError::State { span: 1, source: StateError::Broken { position: 2 } })
    });
}

/// A state of the same model with fewer layers, and the other way round.
#[test]
fn state_with_another_number_of_layers() {
    fn layers(error: &ForwardError) -> Option<(usize, usize)> {
        match error {
            ForwardError::State { span: 1, source: StateError::Layers { expected, found } } => {
                Some((*expected, *found))
            }
            _ => None,
        }
    }
    let weights = TinyWeights::new(Variant::K31);
    let whole = load(cpu(), &weights);
    let part = load_with(cpu(), &weights, &ModelOptions::default().with_layers(Some(4)));
    check(&whole, &mut after_two(&part), &[1], |e| layers(e) == Some((7, 4)));
    check(&part, &mut after_two(&whole), &[1], |e| layers(e) == Some((4, 7)));
}

#[test]
fn number_of_layers() {
    let weights = TinyWeights::new(Variant::K3);
    for asked in [0, 8, usize::MAX] {
        let options = ModelOptions::default().with_layers(Some(asked));
        let error = Model::load(Reference, weights.config.clone(), &weights, &options, &mut |_, _| {});
        assert!(
            matches!(error, Err(LoadError::Layers { asked: found, layers: 7 }) if found == asked),
            "{asked} layers"
        );
    }
    let mut heard = Vec::new();
    let options = ModelOptions::default().with_layers(Some(2));
    let progress = &mut |done, layers| heard.push((done, layers));
    let model = Model::load(Reference, weights.config.clone(), &weights, &options, progress).unwrap();
    assert_eq!(model.num_layers(), 2);
    assert_eq!(heard, [(0, 2), (1, 2), (2, 2)]);
}

/// A source in which one tensor is wrong.
struct Faulty {
    sound: TinyWeights,
    id: TensorId,
    fault: LoadFault,
}

#[derive(Clone, Copy, PartialEq)]
enum LoadFault {
    Missing,
    WrongSize,
    Zero,
}

impl WeightSource for Faulty {
    fn matrix(&self, id: TensorId) -> Result<Matrix, Box<dyn Error + Send + Sync>> {
        match self.fault {
            LoadFault::Missing if id == self.id => Err("not in the shards".into()),
            LoadFault::WrongSize if id == self.id => Ok(crate::support::f32_matrix(2, 3, &[0.0; 6])),
            _ => self.sound.matrix(id),
        }
    }

    fn vector(&self, id: TensorId) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
        match self.fault {
            LoadFault::Missing if id == self.id => Err("not in the shards".into()),
            LoadFault::WrongSize if id == self.id => Ok(vec![0.0; 5]),
            LoadFault::Zero if id == self.id => Ok(vec![0.0; self.sound.vector(id)?.len()]),
            _ => self.sound.vector(id),
        }
    }
}

fn load_faulty(id: TensorId, fault: LoadFault) -> Result<Model<Cpu>, LoadError> {
    let source = Faulty { sound: TinyWeights::new(Variant::K31), id, fault };
    Model::load(cpu(), source.sound.config.clone(), &source, &ModelOptions::default(), &mut |_, _| {})
}

#[test]
fn weights() {
    let everywhere = [
        TensorId::model(Role::EmbedTokens),
        TensorId::model(Role::Norm),
        TensorId::model(Role::OutputAttnResProj),
        TensorId::model(Role::LmHead),
        TensorId::layer(0, Role::MlpUpProj),
        TensorId::layer(0, Role::MlpResNorm),
        TensorId::layer(1, Role::SelfAttentionResProj),
        TensorId::layer(2, Role::QConv1d),
        TensorId::layer(2, Role::ALog),
        TensorId::layer(3, Role::KvBProj),
        TensorId::layer(3, Role::IndexerWk),
        TensorId::layer(6, Role::IndexerKNormBias),
        TensorId::layer(6, Role::RouterBias),
        TensorId::layer(6, Role::SharedDownProj),
    ];
    for id in everywhere {
        let missing = load_faulty(id, LoadFault::Missing).err().unwrap();
        assert!(matches!(&missing, LoadError::Source { id: found, .. } if *found == id), "{missing:?}");
        assert_eq!(missing.to_string(), format!("loading {id}"));
        let wrong = load_faulty(id, LoadFault::WrongSize).err().unwrap();
        assert!(matches!(&wrong, LoadError::Shape { id: found, .. } if *found == id), "{wrong:?}");
        assert!(wrong.to_string().contains("expected") && wrong.to_string().starts_with(&id.to_string()));
    }
    // The snapshots of layer 0 are empty: its first pair of AttnRes weights is never read.
    for role in [Role::SelfAttentionResNorm, Role::SelfAttentionResProj] {
        assert!(load_faulty(TensorId::layer(0, role), LoadFault::Missing).is_ok());
    }
}

/// A file that was never filled reads as zeros. A gain of zeros ends every signal; a bias of zeros is ordinary.
#[test]
fn weights_that_were_never_written() {
    for id in [
        TensorId::model(Role::Norm),
        TensorId::layer(0, Role::InputLayernorm),
        TensorId::layer(1, Role::ONorm),
        TensorId::layer(3, Role::KvALayernorm),
        TensorId::layer(6, Role::RoutedExpertNorm),
    ] {
        let error = load_faulty(id, LoadFault::Zero).err().unwrap();
        assert!(matches!(&error, LoadError::ZeroGain { id: found } if *found == id), "{error:?}");
    }
    assert!(load_faulty(TensorId::layer(6, Role::RouterBias), LoadFault::Zero).is_ok());
}
