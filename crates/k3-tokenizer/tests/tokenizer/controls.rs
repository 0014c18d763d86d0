//! The 256 slots after the ranks, and that text never yields one.

use k3_tokenizer::{ControlProblem, Error, Tokenizer};
use proptest::prelude::*;

use crate::support::{NAMED, O200K_RANKS, o200k, small};

#[test]
fn slots_are_where_the_release_has_them() {
    for (tokenizer, first) in [(small(), 768), (o200k(), O200K_RANKS)] {
        assert_eq!(tokenizer.text_vocab_size(), first as usize);
        assert_eq!(tokenizer.vocab_size(), first as usize + 256);
        for (offset, name) in NAMED {
            assert_eq!(tokenizer.control_id(name), Some(first + offset), "{name}");
        }
        for id in first..first + 256 {
            let spelling = tokenizer.control_spelling(id).unwrap();
            assert_eq!(tokenizer.control_id(spelling), Some(id));
            assert!(tokenizer.is_control(id));
            if NAMED.iter().all(|&(offset, _)| first + offset != id) {
                assert_eq!(spelling, format!("<|reserved_token_{id}|>"));
            }
        }
        for id in [0, first - 1, first + 256, u32::MAX] {
            assert_eq!(tokenizer.control_spelling(id), None);
            assert!(!tokenizer.is_control(id));
        }
    }
}

#[test]
fn the_three_marks_are_not_special() {
    let not_special: Vec<u32> = (0..=1024).filter(|&id| !small().is_special(id)).collect();
    assert_eq!(not_special, (0..768).chain([771, 772, 773, 1024]).collect::<Vec<_>>());
}

#[test]
fn k2_spellings_are_not_known() {
    for name in
        ["<|im_end|>", "<|im_user|>", "<|im_middle|>", "<|tool_call_begin|>", "<|kimi_image_placeholder|>"]
    {
        assert_eq!(small().control_id(name), None);
    }
    // Nor other spellings that come close.
    for name in ["", "<|open|> ", "open", "<|OPEN|>", "<|reserved_token_768|>", "<|reserved_token_1024|>"] {
        assert_eq!(small().control_id(name), None, "{name:?}");
    }
}

#[track_caller]
fn check_is_text(text: &str) {
    for tokenizer in [small(), o200k()] {
        let ids = tokenizer.encode(text);
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.text_vocab_size()), "{text:?}");
        assert_eq!(tokenizer.decode_lossy(&ids).unwrap(), text);
    }
}

#[test]
fn text_that_spells_a_control_token_is_text() {
    for id in 768..1024 {
        let spelling = small().control_spelling(id).unwrap();
        for text in [
            spelling.to_owned(),
            format!("Hi{spelling}"),
            format!("{spelling}Hi"),
            format!(" {spelling} "),
            format!("中{spelling}中"),
            format!("\n{spelling}\n"),
            spelling.repeat(3),
            format!("{{\"name\": \"{spelling}\"}}"),
            format!("<|open|>message role=\"{spelling}\"<|sep|>"),
        ] {
            check_is_text(&text);
        }
    }
}

proptest! {
    #[test]
    fn no_text_yields_a_control_id(pieces in prop::collection::vec(prop_oneof![
        (768..1024_u32).prop_map(|id| small().control_spelling(id).unwrap().to_owned()),
        any::<String>(),
    ], 0..6)) {
        check_is_text(&pieces.concat());
    }
}

#[track_caller]
fn check_refused(named: &[(u32, &str)], expected: &ControlProblem) {
    let bytes = (0..=255_u8).map(|byte| [byte]);
    match Tokenizer::from_parts(bytes, named.iter().copied()) {
        Err(Error::Control { problem, .. }) => assert_eq!(&problem, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn control_tokens_that_do_not_fit_are_refused() {
    let range = ControlProblem::OutOfRange { first: 256, last: 511 };
    check_refused(&[(255, "x")], &range);
    check_refused(&[(512, "x")], &range);
    check_refused(&[(u32::MAX, "x")], &range);
    check_refused(&[(256, "x"), (256, "y")], &ControlProblem::DuplicateId);
    check_refused(&[(256, "")], &ControlProblem::EmptySpelling);
    let duplicate =
        |spelling: &str, other| ControlProblem::DuplicateSpelling { spelling: spelling.into(), other };
    check_refused(&[(256, "x"), (300, "x")], &duplicate("x", 256));
    check_refused(&[(300, "<|reserved_token_301|>")], &duplicate("<|reserved_token_301|>", 300));
}
