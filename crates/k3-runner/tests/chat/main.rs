//! Conversations: segments to ids, and ids to events, with a small vocabulary in the released layout.

mod conversation;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use k3_graph::Cpu;
use k3_runner::{
    ChatError, ChatEvent, Chatter, Engine, EngineOptions, Finish, Generate, Sampling, prompt_ids,
};
use k3_tokenizer::Tokenizer;
use k3_xtml::{ChatRequest, EncodeOptions, Entry, Message, Revision, encode};
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn small() -> Tokenizer {
    Tokenizer::open(fixtures().join("tokenizer/small")).unwrap()
}

/// The 256 single bytes and the 256 slots: exactly the 512 ids of tiny-k31. Any valid text has one spelling in it.
fn bytes() -> Tokenizer {
    let small = small();
    let tokens: Vec<Vec<u8>> = (0..256).map(|id| small.token_bytes(id).unwrap().to_vec()).collect();
    let names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"];
    Tokenizer::from_parts(tokens, (256..).zip(names)).unwrap()
}

fn engine() -> Engine<Cpu> {
    let dir = fixtures().join("tiny-k31");
    Engine::open(dir, Cpu::new(2).unwrap(), &EngineOptions::default(), &mut |_| {}).unwrap()
}

#[test]
fn every_segment_is_encoded_alone() {
    let tokenizer = small();
    let request = ChatRequest::new(vec![Message::user("a <|open|> b <|end_of_msg|>")]);
    let prompt = encode(&request, &EncodeOptions::default()).unwrap();
    let ids = prompt_ids(&tokenizer, &prompt).unwrap();
    let mut expected = Vec::new();
    for segment in &prompt.segments {
        if segment.control {
            expected.push(tokenizer.control_id(&segment.text).unwrap());
        } else {
            expected.extend(tokenizer.encode(&segment.text));
        }
    }
    assert_eq!(ids, expected);
    let controls = prompt.segments.iter().filter(|s| s.control).count();
    assert_eq!(
        ids.iter().filter(|id| tokenizer.is_control(**id)).count(),
        controls,
        "what a user typed stays text"
    );
    assert_eq!(tokenizer.decode_lossy(&ids).unwrap(), prompt.flat());
}

#[test]
fn a_reply_comes_as_events_that_join_to_it() {
    let engine = engine();
    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let request = ChatRequest::new(vec![Message::user("hello")]);
    let generate = Generate {
        max_tokens: 30,
        sampling: Sampling { seed: 5, ..Sampling::default() },
        ..Generate::default()
    };
    let mut joined = k3_xtml::Reply::default();
    let mut layers = (0, 0);
    let mut tokens = Vec::new();
    let reply = chatter
        .reply(&request, &generate, &mut |event| {
            match event {
                ChatEvent::Prefill { layers: done, of } => layers = (done, of),
                ChatEvent::Token(id) => tokens.push(id),
                ChatEvent::Reply(event) => joined.push(event),
                _ => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(joined, reply.reply);
    assert_eq!(tokens, reply.tokens, "each was told, whether it could be seen or not");
    assert_eq!(layers.0, layers.1, "prefill was reported to its end");
    assert_eq!(reply.usage.completion_tokens, reply.tokens.len());
    assert_eq!(reply.usage.prompt_tokens, chatter.prompt_ids(&request).unwrap().1.len());
    assert!(reply.usage.reasoning_tokens <= reply.usage.completion_tokens);
    assert!(reply.reply.finish_reason.is_some());
}

#[test]
fn a_caller_can_break_off() {
    let engine = engine();
    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let request = ChatRequest::new(vec![Message::user("hello")]);
    let reply = chatter.reply(&request, &Generate::default(), &mut |_| ControlFlow::Break(())).unwrap();
    assert_eq!((reply.finish, reply.tokens.len(), reply.reply.finish_reason), (Finish::Cancelled, 0, None));
    // At the first token: it has been generated, and is the last.
    let mut at_a_token = |event| match event {
        ChatEvent::Prefill { .. } => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let reply = chatter.reply(&request, &Generate::default(), &mut at_a_token).unwrap();
    assert_eq!((reply.finish, reply.tokens.len(), reply.reply.finish_reason), (Finish::Cancelled, 1, None));
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let engine = engine();
    let error = Chatter::new(&engine, small()).err().unwrap();
    assert!(matches!(error, ChatError::Vocabulary { tokenizer: 1024, model: 512 }), "{error}");

    let no_names: [(u32, &str); 0] = [];
    let tokens: Vec<Vec<u8>> = (0..256).map(|id| small().token_bytes(id).unwrap().to_vec()).collect();
    let nameless = Tokenizer::from_parts(tokens, no_names).unwrap();
    let chatter = Chatter::new(&engine, nameless).unwrap();
    let request = ChatRequest::new(vec![Message::user("hello")]);
    let error =
        chatter.reply(&request, &Generate::default(), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, ChatError::NoControl { .. }), "{error}");

    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let mut request = request;
    request.add_generation_prompt = false;
    let error =
        chatter.reply(&request, &Generate::default(), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, ChatError::NoGenerationPrompt), "{error}");
}

/// Whole prompts to the ids that the vendor's tokenizer gave. Needs the published vocabulary, which is not here.
#[test]
fn whole_prompts_with_the_published_vocabulary() {
    let Some(model) = std::env::var_os("K3_TIKTOKEN_MODEL") else {
        println!("skipped: K3_TIKTOKEN_MODEL does not point to the published tiktoken.model");
        return;
    };
    let ranks = std::fs::read_to_string(model).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tiktoken.model"), ranks).unwrap();
    let names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"];
    let named: serde_json::Map<_, _> = (163_584..)
        .zip(names)
        .map(|(id, name): (u32, _)| (id.to_string(), json!({"content": name, "special": true})))
        .collect();
    let config = json!({ "added_tokens_decoder": named }).to_string();
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Tokenizer::open(dir.path()).unwrap();

    let cases: Vec<Value> =
        serde_json::from_slice(&std::fs::read(fixtures().join("xtml/ids.json")).unwrap()).unwrap();
    for case in &cases {
        let mut body = json!({"messages": case["messages"], "tools": case["tools"]});
        let mut kwargs = case["options"].as_object().unwrap().clone();
        for key in ["tool_choice", "response_format"] {
            body[key] = kwargs.remove(key).unwrap_or(Value::Null);
        }
        body["chat_template_kwargs"] = Value::Object(kwargs);
        let request = ChatRequest::from_vendor_json(&body.to_string()).unwrap();
        let entry = if case["entry"] == "bare" { Entry::Bare } else { Entry::Served };
        let prompt = encode(&request, &EncodeOptions { entry, revision: Revision::July }).unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(prompt_ids(&tokenizer, &prompt).unwrap(), expected, "{}", case["name"]);
    }
}
