//! The published file, for those who have it: `K3_TIKTOKEN_MODEL=/path/to/tiktoken.model cargo test -p k3-tokenizer`.

use std::{collections::HashMap, path::Path, process::Command};

use base64::{Engine, engine::general_purpose::STANDARD};
use k3_tokenizer::Tokenizer;
use serde::Deserialize;

use crate::support::{NAMED, corpus, fixture};

const SHA256: &str = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103";

#[derive(Deserialize)]
struct Recorded {
    name: String,
    flat: String,
    ids: Vec<u32>,
}

#[test]
fn the_published_ranks() {
    let Some(path) = std::env::var_os("K3_TIKTOKEN_MODEL") else {
        eprintln!("skipped: K3_TIKTOKEN_MODEL is not set");
        return;
    };
    let path = Path::new(&path);
    let sum = Command::new("sha256sum").arg(path).output().expect("the program sha256sum");
    assert!(
        sum.stdout.starts_with(SHA256.as_bytes()),
        "{}: {}",
        path.display(),
        String::from_utf8_lossy(&sum.stdout)
    );

    let file = std::fs::read_to_string(path).unwrap();
    let tokens = file.lines().map(|line| STANDARD.decode(line.split(' ').next().unwrap()).unwrap());
    let tokenizer =
        Tokenizer::from_parts(tokens, NAMED.map(|(offset, name)| (163_584 + offset, name))).unwrap();
    assert_eq!(tokenizer.vocab_size(), 163_840);
    assert_eq!(tokenizer.token_id(b"!"), Some(0));
    let (mut longest, mut broken) = (0, 0);
    for id in 0..163_584 {
        let token = tokenizer.token_bytes(id).unwrap();
        longest = longest.max(token.len());
        broken += usize::from(std::str::from_utf8(token).is_err());
    }
    assert_eq!((longest, broken), (256, 1_172));
    for line in corpus() {
        assert_eq!(tokenizer.decode_lossy(&tokenizer.encode(line)).unwrap(), *line);
    }

    // Prompts recorded from the vendor's tokenizer decode to the text they were made of.
    let recorded: Vec<Recorded> =
        serde_json::from_slice(&std::fs::read(fixture("../xtml/ids.json")).unwrap()).unwrap();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for Recorded { name, flat, ids } in &recorded {
        assert_eq!(tokenizer.decode_lossy(ids).unwrap(), *flat, "{name}");
        *seen.entry(name).or_default() += 1;
    }
    assert!(!seen.is_empty());
}
