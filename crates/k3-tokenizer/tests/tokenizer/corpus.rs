//! Equal ids to Python tiktoken: mixed lines, and long runs around every limit.

use crate::support::{corpus, digest, expected, fixture, hex_digest, o200k, small};

#[test]
fn every_line_has_the_ids_of_tiktoken() {
    let hashes = std::fs::read(fixture("corpus.ids.bin")).unwrap();
    let (hashes, []) = hashes.as_chunks::<8>() else { panic!("not a multiple of eight bytes") };
    let expected = expected();
    assert_eq!((corpus().len(), hashes.len()), (expected.lines, expected.lines));
    assert!(expected.lines >= 20_000);
    let mut tokens = 0;
    let mut wrong = Vec::new();
    for (line, hash) in corpus().iter().zip(hashes) {
        let ids = o200k().encode(line);
        tokens += ids.len();
        if digest(&ids) != *hash {
            wrong.push((line, ids));
        }
    }
    assert!(wrong.is_empty(), "{} lines differ, the first: {:?}", wrong.len(), wrong[0]);
    assert_eq!(tokens, expected.tokens);
}

#[test]
fn every_line_comes_back() {
    for tokenizer in [o200k(), small()] {
        for line in corpus() {
            let ids = tokenizer.encode(line);
            assert_eq!(tokenizer.decode_bytes(&ids).unwrap(), line.as_bytes());
            assert_eq!(tokenizer.decode_lossy(&ids).unwrap(), *line);
        }
    }
}

#[test]
fn the_small_vocabulary_has_the_ids_of_tiktoken() {
    let mut ids = Vec::new();
    corpus().iter().for_each(|line| small().encode_into(line, &mut ids));
    let expected = expected().small;
    assert_eq!((ids.len(), hex_digest(&ids)), (expected.tokens, expected.ids));
}

#[test]
fn long_runs_have_the_ids_of_tiktoken_behind_the_cuts() {
    for run in expected().runs {
        let text = run.text();
        let ids = o200k().encode(&text);
        assert_eq!((ids.len(), hex_digest(&ids)), (run.tokens, run.ids), "{}", run.name);
        assert_eq!(o200k().decode_bytes(&ids).unwrap(), text.as_bytes(), "{}", run.name);
    }
}

#[test]
fn encode_into_appends() {
    let mut ids = vec![7];
    o200k().encode_into("a b", &mut ids);
    o200k().encode_into("", &mut ids);
    assert_eq!(ids, [vec![7], o200k().encode("a b")].concat());
}

#[test]
fn threads_share_a_tokenizer() {
    let lines = &corpus()[..2_000];
    let alone: Vec<_> = lines.iter().map(|line| small().encode(line)).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                lines.iter().zip(&alone).for_each(|(line, ids)| assert_eq!(small().encode(line), *ids));
            });
        }
    });
}
