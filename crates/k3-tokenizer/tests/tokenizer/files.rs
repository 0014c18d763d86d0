//! `Tokenizer::open` on files that are missing, damaged, or not what they should be.

use std::fs;

use k3_tokenizer::{ControlProblem, Error, LineProblem, Tokenizer};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::support::{fixture, small};

fn ranks_file() -> Vec<u8> {
    fs::read(fixture("small/tiktoken.model")).unwrap()
}

fn config_file() -> Vec<u8> {
    fs::read(fixture("small/tokenizer_config.json")).unwrap()
}

fn folder(ranks: &[u8], config: &[u8]) -> TempDir {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("tiktoken.model"), ranks).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    dir
}

fn open(ranks: &[u8], config: &[u8]) -> Result<Tokenizer, Error> {
    Tokenizer::open(folder(ranks, config).path())
}

#[test]
fn the_message_for_missing_ranks_says_what_is_there_and_what_to_do() {
    let dir = TempDir::new().unwrap();
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        message.contains("no tiktoken.model") && message.contains("no tokenizer file at all"),
        "{message}"
    );
    for name in ["tokenizer.json", "merges.txt", "model.safetensors"] {
        fs::write(dir.path().join(name), "{}").unwrap();
    }
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("there is: merges.txt, tokenizer.json)"), "{message}");
    assert!(message.contains("put both files of the checkpoint into this folder"), "{message}");
    fs::write(dir.path().join("tiktoken.model"), ranks_file()).unwrap();
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("no tokenizer_config.json"), "{message}");
    assert!(matches!(Tokenizer::open(dir.path().join("nowhere")), Err(Error::MissingRanks { .. })));
    fs::create_dir(dir.path().join("tokenizer_config.json")).unwrap();
    assert!(matches!(Tokenizer::open(dir.path()), Err(Error::Read { .. })));
}

#[track_caller]
fn check_line(from: &str, to: &str, line: usize, expected: &LineProblem) {
    let file = String::from_utf8(ranks_file()).unwrap();
    assert!(file.contains(from));
    match open(file.replacen(from, to, 1).as_bytes(), &config_file()) {
        Err(Error::Line { line: at, problem, path }) => {
            assert_eq!((at, &problem), (line, expected));
            assert!(path.ends_with("tiktoken.model"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn damaged_lines_are_named() {
    let rank = |expected, found: &str| LineProblem::Rank { expected, found: found.into() };
    // Line 4 is "JA== 3": the byte '$'.
    check_line("JA== 3\n", "JA==3\n", 4, &LineProblem::Form { found: "JA==3".into() });
    check_line("JA== 3\n", "\n", 4, &LineProblem::Form { found: String::new() });
    check_line("JA== 3\n", "JA== 4\n", 4, &rank(3, "4"));
    check_line("JA== 3\n", "JA== 03\n", 4, &rank(3, "03"));
    check_line("JA== 3\n", "JA== +3\n", 4, &rank(3, "+3"));
    check_line("JA== 3\n", "JA== 3\r\n", 4, &rank(3, "3\r"));
    check_line("JA== 3\n", "JA==  3\n", 4, &rank(3, " 3"));
    check_line("JA== 3\n", "JA== 99999999999999999999\n", 4, &rank(3, "99999999999999999999"));
    check_line("JA== 3\n", " 3\n", 4, &LineProblem::Empty);
    check_line("JA== 3\n", "JCQ= 3\n", 4, &LineProblem::NotAByte { bytes: 2 });
    check_line("JA== 3\n", "Iw== 3\n", 4, &LineProblem::Duplicate { first: 3 });
    check_line("JA== 3\n", "", 4, &rank(3, "4"));
    let long = format!("{} 767\n", "QUFB".repeat(2_000));
    let file = String::from_utf8(ranks_file()).unwrap();
    let last = file.lines().last().unwrap().to_owned() + "\n";
    check_line(&last, &long, 768, &LineProblem::TooLong { bytes: 6_003, limit: 4_096 });
    let base64 = open(file.replacen("JA== 3", "J$== 3", 1).as_bytes(), &config_file());
    assert!(matches!(base64, Err(Error::Line { line: 4, problem: LineProblem::Base64 { .. }, .. })));
    let message = base64.unwrap_err().to_string();
    assert!(message.contains("tiktoken.model line 4: the token is not base64"), "{message}");
}

#[test]
fn ends_of_the_file() {
    let file = ranks_file();
    // The last line break may be missing.
    assert_eq!(open(&file[..file.len() - 1], &config_file()).unwrap().vocab_size(), 1024);
    assert!(matches!(open(b"", &config_file()), Err(Error::Line { line: 1, .. })));
    let half: Vec<u8> = file.split_inclusive(|&b| b == b'\n').take(200).flatten().copied().collect();
    assert!(matches!(open(&half, &config_file()), Err(Error::TooFewRanks { found: 200, .. })));
    // A file cut at the end of a line: the control tokens do not fit behind it.
    let cut: Vec<u8> = file.split_inclusive(|&b| b == b'\n').take(700).flatten().copied().collect();
    assert!(matches!(
        open(&cut, &config_file()),
        Err(Error::Control { problem: ControlProblem::OutOfRange { first: 700, last: 955 }, .. })
    ));
}

#[test]
fn configs() {
    for config in [
        "",
        "[]",
        "{}",
        "{\"added_tokens_decoder\": []}",
        "{\"added_tokens_decoder\": {\"x\": {\"content\": \"a\"}}}",
    ] {
        assert!(matches!(open(&ranks_file(), config.as_bytes()), Err(Error::Config { .. })), "{config}");
    }
    for config in [
        r#"{"added_tokens_decoder": {"-1": {"content": "a"}}}"#,
        r#"{"added_tokens_decoder": {"4294967296": {"content": "a"}}}"#,
        r#"{"added_tokens_decoder": {"768": {}}}"#,
        r#"{"added_tokens_decoder": {"768": {"content": 3}}}"#,
    ] {
        assert!(matches!(open(&ranks_file(), config.as_bytes()), Err(Error::Config { .. })), "{config}");
    }
    let named = |entries: &str| {
        open(&ranks_file(), format!("{{\"added_tokens_decoder\": {{{entries}}}}}").as_bytes())
    };
    assert_eq!(named("").unwrap().control_id("<|reserved_token_768|>"), Some(768));
    assert_eq!(
        named(r#""770": {"content": "<|end_of_msg|>", "new_field": 1}"#)
            .unwrap()
            .control_id("<|end_of_msg|>"),
        Some(770)
    );
    // A repeated key, which a JSON map would swallow.
    assert!(matches!(
        named(r#""770": {"content": "a"}, "770": {"content": "b"}"#),
        Err(Error::Control { id: 770, problem: ControlProblem::DuplicateId, .. })
    ));
    let message = named(r#""163586": {"content": "<|end_of_msg|>"}"#).unwrap_err().to_string();
    assert!(message.contains("control token 163586: the id is outside 768..=1023"), "{message}");
}

#[test]
fn a_file_that_is_too_large_is_not_read() {
    let dir = folder(&ranks_file(), &config_file());
    let sparse = fs::File::options().write(true).open(dir.path().join("tokenizer_config.json")).unwrap();
    sparse.set_len(8 << 20).unwrap();
    assert!(matches!(Tokenizer::open(dir.path()), Err(Error::TooLarge { .. })));
}

#[test]
fn any_order_of_the_bytes_will_do() {
    let tokens = (0..=255_u8).rev().map(|byte| vec![byte]).chain([b"ab".to_vec(), b"xyz".to_vec()]);
    let tokenizer = Tokenizer::from_parts(tokens, [(258, "[BOS]")]).unwrap();
    assert_eq!(tokenizer.encode("ab"), [256]);
    // A token that no pair builds: itself alone, never within a longer word.
    assert_eq!(tokenizer.encode("xyz"), [257]);
    assert_eq!(tokenizer.encode("xyzab"), [135, 134, 133, 256]);
    assert_eq!(tokenizer.decode_lossy(&[258, 135]).unwrap(), "[BOS]x");
}

#[test]
fn from_parts_needs_the_bytes() {
    let no_names: [(u32, &str); 0] = [];
    assert!(matches!(
        Tokenizer::from_parts((0..255_u8).map(|byte| [byte]), no_names),
        Err(Error::TooFewRanks { found: 255, .. })
    ));
    assert!(matches!(
        Tokenizer::from_parts(["ab"], no_names),
        Err(Error::Line { line: 1, problem: LineProblem::NotAByte { bytes: 2 }, .. })
    ));
}

/// A mutation of a file: some bytes overwritten, removed or inserted.
fn mutate(mut file: Vec<u8>, edits: &[(usize, u8, u8)]) -> Vec<u8> {
    for &(at, kind, byte) in edits {
        let at = at % file.len().max(1);
        match kind {
            _ if file.is_empty() => {}
            0 => file[at] = byte,
            1 => drop(file.remove(at)),
            2 => file.insert(at, byte),
            _ => file.truncate(at),
        }
    }
    file
}

fn edits() -> impl Strategy<Value = Vec<(usize, u8, u8)>> {
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b" \n\r=0123456789\"{}[]:,".to_vec())];
    prop::collection::vec((any::<usize>(), 0..3_u8, byte), 1..6)
}

proptest! {
    #[test]
    fn damaged_files_never_panic(ranks in edits(), config in edits(), which in 0..3_u8) {
        let ranks = if which == 1 { ranks_file() } else { mutate(ranks_file(), &ranks) };
        let config = if which == 0 { config_file() } else { mutate(config_file(), &config) };
        if let Ok(tokenizer) = open(&ranks, &config) {
            // What still opens still is a tokenizer.
            let text = "message role=\"user\" naïve 中文 <|open|>";
            prop_assert_eq!(tokenizer.decode_lossy(&tokenizer.encode(text)).unwrap(), text);
            prop_assert_eq!(tokenizer.vocab_size(), tokenizer.text_vocab_size() + 256);
        }
    }

    #[test]
    fn cut_files_never_panic(ranks in any::<prop::sample::Index>(), config in any::<prop::sample::Index>()) {
        let (r, c) = (ranks_file(), config_file());
        let _ = open(&r[..ranks.index(r.len() + 1)], &c);
        prop_assert!(open(&r, &c[..config.index(c.len() - 1)]).is_err());
    }

    #[test]
    fn noise_is_refused(ranks in prop::collection::vec(any::<u8>(), 0..400), config in any::<String>()) {
        prop_assert!(open(&ranks, &config_file()).is_err());
        prop_assert!(open(&ranks_file(), config.as_bytes()).is_err());
    }
}

#[test]
fn the_words_of_the_markup_are_tokens_of_the_small_vocabulary() {
    for word in ["message", " role", "think", "response", "tool"] {
        assert!(small().token_id(word.as_bytes()).is_some(), "{word}");
    }
}
