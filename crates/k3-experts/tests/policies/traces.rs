use k3_experts::trace::{Generator, Geometry, Statistics, Trace, TraceFileError};

const GEOMETRY: Geometry = Geometry { layers: 3, experts: 20, per_token: 4 };

fn bytes(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    trace.write(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_trace_survives_its_file() {
    let mut generator = Generator::new(GEOMETRY, 5);
    generator.ranks = 7;
    let trace = generator.generate(9);
    let file = bytes(&trace);
    assert!(file.starts_with(b"k3-routing 1 3 20 4 7\n"));
    assert_eq!(file.len(), 22 + 9 * 3 * 7 * 2);
    assert_eq!(Trace::read(&file[..]).unwrap(), trace);
    // A run that was interrupted: whole tokens only.
    let cut = Trace::read(&file[..file.len() - 1]).unwrap();
    assert_eq!(cut.len(), 8);
    assert_eq!(cut.ranked(7, 2), trace.ranked(7, 2));
}

#[test]
fn what_is_no_trace_is_refused() {
    let header = |line: &str| {
        let error = Trace::read(line.as_bytes()).unwrap_err();
        assert!(matches!(error, TraceFileError::Header { .. }), "{line:?}: {error}");
    };
    header("");
    header("k3-routing 1 3 20 4 7");
    header("k3-routing 2 3 20 4 7\n");
    header("k3-routing 1 3 20 4\n");
    header("k3-routing 1 0 20 4 7\n");
    header("k3-routing 1 3 20 8 7\n");
    header("k3-routing 1 3 20 4 21\n");
    header("k3-routing 1 3 70000 4 7\n");
    header("k3-routing 1 99999999999999999999 20 4 7\n");
    header(&"x".repeat(1000));
    // A token of them would take gigabytes before anything is read.
    header("k3-routing 1 65536 65536 16 65536\n");
    header("k3-routing 1 65536 257 1 1\n");
    let error = Trace::read(&b"k3-routing 1 1 2 1 1\n\x01\x00\x02\x00"[..]).unwrap_err();
    assert!(matches!(error, TraceFileError::Id { token: 1, found: 2, experts: 2 }), "{error}");
    // The same experts in the next layer and the next token, and then one twice in a layer.
    let distinct = b"k3-routing 1 2 2 2 2\n\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x01\x00\x01\x00\x00\x00";
    assert_eq!(Trace::read(&distinct[..]).unwrap().len(), 2);
    let mut twice = *distinct;
    twice[distinct.len() - 2] = 1;
    let error = Trace::read(&twice[..]).unwrap_err();
    assert!(matches!(error, TraceFileError::Twice { token: 1, expert: 1 }), "{error}");
}

#[test]
fn a_seed_names_a_trace() {
    let make = |seed| Generator::new(GEOMETRY, seed).generate(20);
    assert_eq!(make(1), make(1));
    assert_ne!(make(1), make(2));
    // A longer trace begins like a shorter one.
    let longer = Generator::new(GEOMETRY, 1).generate(30);
    assert!((0..20).all(|t| longer.ranked(t, 1) == make(1).ranked(t, 1)));
}

#[test]
fn choices_are_distinct_and_options_change_them() {
    let plain = Generator::new(GEOMETRY, 1);
    for generator in [
        Generator { depth: true, ..plain.clone() },
        Generator { period: Some(3), ..plain.clone() },
        Generator { topic_tokens: Some(5), ..plain.clone() },
    ] {
        let trace = generator.generate(20);
        assert_ne!(trace, plain.generate(20), "{generator:?}");
        for (token, layer) in (0..20).flat_map(|t| (0..3).map(move |l| (t, l))) {
            let mut ids = trace.routed(token, layer).to_vec();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), 4);
        }
    }
}

#[test]
fn late_layers_reuse_more_with_depth() {
    let geometry = Geometry { layers: 12, experts: 896, per_token: 16 };
    let trace = Generator { depth: true, ..Generator::new(geometry, 1) }.generate(120);
    let statistics = Statistics::new(&trace);
    let (first, last) = (statistics.reuse_in_layer(1, 0), statistics.reuse_in_layer(1, 11));
    assert!((0.15..0.25).contains(&first) && (0.38..0.46).contains(&last), "{first:.3} to {last:.3}");
}
