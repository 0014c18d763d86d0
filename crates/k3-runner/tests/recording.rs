//! Routing that is recorded is what the model chose, and can be replayed.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use k3_experts::policy::{LayerLru, Retention};
use k3_experts::simulate::{optimum, replay};
use k3_experts::trace::{Geometry, Trace};
use k3_graph::{Cpu, LogitsWanted, ModelOptions, Observer, Probe, Routing};
use k3_runner::{Engine, EngineOptions, Event, Finish, Generate, RecordError, Sampling};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn open(chunk: Option<usize>, layers: Option<usize>) -> Engine<Cpu> {
    let mut options = EngineOptions::default();
    options.chunk_tokens = chunk;
    options.model = ModelOptions::default().with_layers(layers);
    Engine::open(fixture("tiny-k31"), Cpu::new(2).unwrap(), &options, &mut |_| {}).unwrap()
}

fn read(path: &Path) -> Trace {
    Trace::read(&*std::fs::read(path).unwrap()).unwrap()
}

/// Ids of each token and layer, as an observer sees them.
#[derive(Default)]
struct Seen(Vec<(usize, Vec<u32>)>);

impl Observer for Seen {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Routing
    }
    fn routing(&mut self, layer: usize, routing: &Routing) {
        self.0.push((layer, routing.ids.clone()));
    }
}

#[test]
fn what_is_recorded_is_what_was_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..40).map(|i| 3 + i * 7919 % 500).collect();
    let mut files = Vec::new();
    for chunk in [None, Some(7)] {
        let path = dir.path().join(format!("{chunk:?}"));
        let mut engine = open(chunk, None);
        engine.record_routing(&path).unwrap();
        let mut seen = Seen::default();
        let mut sequence = engine.new_sequence().unwrap();
        engine.run(&mut sequence, &ids[..30], LogitsWanted::Last, &mut seen).unwrap();
        for id in &ids[30..] {
            engine.run(&mut sequence, &[*id], LogitsWanted::Last, &mut seen).unwrap();
        }
        assert!(!path.exists(), "the name comes with the end");
        assert_eq!(engine.finish_recording().unwrap(), Some(40));
        let trace = read(&path);
        assert_eq!(trace.geometry(), Geometry { layers: 12, experts: 16, per_token: 4 });
        assert_eq!((trace.len(), trace.ranks()), (40, 16));
        let mut token = [0; 13];
        for (layer, chosen) in seen.0 {
            for ids in chosen.chunks(4) {
                assert_eq!(
                    trace.routed(token[layer], layer - 1),
                    ids,
                    "token {} of layer {layer}",
                    token[layer]
                );
                let mut all = trace.ranked(token[layer], layer - 1).to_vec();
                all.sort_unstable();
                assert_eq!(all, (0..16).collect::<Vec<_>>());
                token[layer] += 1;
            }
        }
        assert_eq!(token[1..], [40; 12]);
        // It can be replayed.
        let best = optimum(&trace, 48, 10).hit_rate();
        for rate in [
            replay(&trace, &mut LayerLru::new(48, 12), 10).hit_rate(),
            replay(&trace, &mut Retention::new(48, 12, 16, 4), 10).hit_rate(),
        ] {
            assert!(rate > 0.0 && rate <= best, "{rate} of {best}");
        }
        files.push(std::fs::read(&path).unwrap());
    }
    assert!(files[0] == files[1], "the trace does not depend on chunks");
}

/// A pass that was broken off leaves no token; a whole reply leaves all but its last, which is not consumed.
#[test]
fn only_whole_passes_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut engine = open(None, None);
    engine.record_routing(&path).unwrap();
    let generate = |max_tokens, events: &mut dyn FnMut(Event) -> ControlFlow<()>| {
        let request =
            Generate { max_tokens, sampling: Sampling::greedy(), ignore_eos: true, ..Generate::default() };
        engine.generate(&mut engine.new_sequence().unwrap(), &[5, 6, 7], &request, events).unwrap()
    };
    assert_eq!(generate(3, &mut |_| ControlFlow::Break(())).finish, Finish::Cancelled);
    assert_eq!(generate(3, &mut |_| ControlFlow::Continue(())).tokens.len(), 3);
    assert_eq!(engine.finish_recording().unwrap(), Some(5));
    assert_eq!(read(&path).len(), 5);
    assert_eq!(engine.finish_recording().unwrap(), None);
}

#[test]
fn what_cannot_be_recorded_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("no such folder").join("trace");
    let error = open(None, None).record_routing(&path).unwrap_err();
    assert!(matches!(&error, RecordError::Write { path: found, .. } if *found == path), "{error}");
    assert!(error.to_string().contains("no such folder"), "{error}");
    // The first layer has no experts.
    let error = open(None, Some(1)).record_routing(dir.path().join("trace")).unwrap_err();
    assert!(matches!(error, RecordError::Geometry { loaded: 1, layers: 0, .. }), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
