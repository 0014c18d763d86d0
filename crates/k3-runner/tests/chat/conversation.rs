//! Conversations over several turns: what is kept of the sequence changes nothing but the time.

use std::ops::ControlFlow;

use k3_graph::Cpu;
use k3_runner::{
    ChatError, Chatter, Conversation, Engine, EngineOptions, Finish, Generate, RunError, Sampling, Turn,
};
use k3_tokenizer::Tokenizer;
use k3_xtml::{ChatRequest, Message};

use crate::{bytes, engine, fixtures};

fn generate(max_tokens: usize, seed: u64) -> Generate {
    Generate { max_tokens, sampling: Sampling { seed, ..Sampling::default() }, ..Generate::default() }
}

/// The reply, once it is known to be the one that a fresh sequence gives.
#[track_caller]
fn reply(conversation: &mut Conversation<'_, Cpu>, chatter: &Chatter<'_, Cpu>, generate: &Generate) -> Turn {
    let request = conversation.request.clone();
    let ids = chatter.prompt_ids(&request).unwrap().1;
    let consumed = conversation.consumed().to_vec();
    let turn = conversation.reply(generate, &mut |_| ControlFlow::Continue(())).unwrap();
    let fresh = chatter.reply(&request, generate, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(turn.reply.tokens, fresh.tokens);
    assert_eq!(turn.reply.logits_hash, fresh.logits_hash);
    assert_eq!(turn.reply.reply, fresh.reply);
    assert_eq!(turn.reply.usage, fresh.usage);
    assert_eq!(turn.kept_tokens, if ids.starts_with(&consumed) { consumed.len() } else { 0 });
    let read = [ids, turn.reply.tokens[..turn.reply.tokens.len() - 1].to_vec()].concat();
    assert_eq!(conversation.consumed(), read, "prompt and reply have been read, but for the last token");
    turn
}

#[test]
fn what_was_read_is_kept() {
    let engine = engine();
    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let mut conversation = Conversation::new(&chatter, ChatRequest::new(vec![Message::system("Be brief.")]));
    conversation.request.thinking = false;
    let mut kept = Vec::new();
    // One token is not consumed, so that the prompt alone was read. More of them are random bytes, which no text has.
    for (turn, tokens) in [1, 1, 9, 1, 1].into_iter().enumerate() {
        conversation.push(Message::user(format!("Question {turn}?")));
        let before = conversation.consumed().len();
        let made = reply(&mut conversation, &chatter, &generate(tokens, turn as u64));
        kept.push((made.kept_tokens == before && before > 0, made.kept_tokens));
    }
    let [first, second, third, fourth, fifth] = kept.try_into().unwrap();
    assert_eq!(first, (false, 0));
    assert!(second.0 && third.0 && fifth.0 && second.1 < third.1, "{second:?} {third:?} {fifth:?}");
    assert_eq!(fourth, (false, 0), "a reply that reads otherwise as history is prefilled again");
    assert_eq!(conversation.request.messages.len(), 11);
}

#[test]
fn another_option_is_another_prompt() {
    let engine = engine();
    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let mut conversation = Conversation::new(&chatter, ChatRequest::new(vec![Message::user("hi")]));
    reply(&mut conversation, &chatter, &generate(1, 0));
    conversation.push(Message::user("again"));
    conversation.request.thinking = false;
    assert_eq!(reply(&mut conversation, &chatter, &generate(1, 0)).kept_tokens, 0);
    conversation.push(Message::user("again"));
    assert!(reply(&mut conversation, &chatter, &generate(1, 0)).kept_tokens > 0);
}

/// What could not be run leaves the conversation as it was, and the sequence good for what can.
#[test]
fn errors_and_cancelled_replies() {
    let engine = engine();
    let chatter = Chatter::new(&engine, bytes()).unwrap();
    let mut conversation = Conversation::new(&chatter, ChatRequest::new(vec![Message::user("hi")]));
    reply(&mut conversation, &chatter, &generate(1, 0));
    let consumed = conversation.consumed().to_vec();

    conversation.push(Message::user("x".repeat(5000)));
    let error = conversation.reply(&generate(1, 0), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, ChatError::Run(RunError::Tokens(_))), "{error}");
    assert_eq!((conversation.request.messages.len(), conversation.consumed()), (3, &*consumed));

    conversation.request.messages.pop();
    conversation.push(Message::user("short"));
    let cancelled = conversation.reply(&generate(1, 0), &mut |_| ControlFlow::Break(())).unwrap();
    assert_eq!((cancelled.reply.finish, cancelled.reply.tokens.len()), (Finish::Cancelled, 0));
    assert_eq!((conversation.request.messages.len(), conversation.consumed().len()), (3, 0));
    assert_eq!(reply(&mut conversation, &chatter, &generate(1, 0)).kept_tokens, 0);
}

/// What a model writes that was trained on conversations reads the same as history: nothing is read twice.
#[test]
fn a_trained_model_is_never_read_again() {
    let dir = fixtures().join("nano");
    let engine = Engine::open(&dir, Cpu::new(2).unwrap(), &EngineOptions::default(), &mut |_| {}).unwrap();
    let chatter = Chatter::new(&engine, Tokenizer::open(&dir).unwrap()).unwrap();
    let scene = std::fs::read_to_string(dir.join("conversation.json")).unwrap();
    let scene: serde_json::Value = serde_json::from_str(&scene).unwrap();
    let request = ChatRequest::from_json(&scene["request"].to_string()).unwrap();
    let mut conversation = Conversation::new(&chatter, request);
    let greedy = Generate { sampling: Sampling::greedy(), ..Generate::default() };
    let mut before = 0;
    for _ in 0..3 {
        let turn = reply(&mut conversation, &chatter, &greedy);
        assert_eq!(turn.kept_tokens, before);
        assert!(matches!(turn.reply.finish, Finish::Stop(_)) && turn.reply.reply.errors.is_empty());
        before = conversation.consumed().len();
        match turn.call_ids.as_slice() {
            [] => conversation.push(Message::user("Thank you!")),
            ids => ids
                .iter()
                .for_each(|id| conversation.push(Message::tool_result(id.as_str(), "rain, 17 degrees"))),
        }
    }
    assert!(conversation.request.messages.len() > 6);
}
