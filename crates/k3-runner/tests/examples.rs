//! The examples do what they say.

#[allow(dead_code, reason = "its `main` is run by people")]
#[path = "../examples/conversation.rs"]
mod conversation;
#[allow(dead_code, reason = "its `main` is run by people")]
#[path = "../examples/generate.rs"]
mod generate;

use std::fs;
use std::path::{Path, PathBuf};

use k3_runner::Finish;
use k3_tokenizer::Tokenizer;
use k3_xtml::{ChatRequest, FinishReason, Message};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

#[test]
fn generate_continues_as_the_oracle_does() {
    let dir = fixture("tiny-k31");
    let expected: Value = serde_json::from_slice(&fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let ids = |key: &str| -> Vec<u32> { serde_json::from_value(expected[key].clone()).unwrap() };
    let reply = generate::generate(&dir, &ids("prompt")).unwrap();
    assert_eq!((reply.tokens, reply.finish), (ids("greedy"), Finish::Length));
}

#[test]
fn a_reply_is_read_as_it_was_written() {
    for answer in ["2 + 2 = 4", "<|end_of_msg|> ends a message", "家👩‍🚀"] {
        let tokenizer = Tokenizer::open(fixture("nano")).unwrap();
        let request = ChatRequest::new(vec![Message::user("2 + 2?")]);
        let reply = conversation::answered(&tokenizer, request, answer).unwrap();
        assert_eq!((reply.content.as_str(), reply.finish_reason), (answer, Some(FinishReason::Stop)));
        assert_eq!(reply.errors, []);
    }
}
