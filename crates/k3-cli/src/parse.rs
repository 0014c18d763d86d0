//! `k3 parse`: a reply as the model gave it, to reasoning, content and tool calls.

use std::io::{self, Write as _, stdout};

use anyhow::{Context, Result};
use clap::ValueEnum;
use k3_xtml::{
    Channel, Control, Event, FinishReason, Piece, Reply, ReplyParser, StopReason, TextReplyParser,
};
use serde_json::{Value, json};

use crate::text::all_of_stdin;

/// Parse a reply: a JSON array of text chunks on stdin, one JSON object out
///
/// In token mode a chunk that equals a marker, such as `<|open|>` or `<|end_of_msg|>`, is that control token, and all other
/// chunks are text whatever they spell: this is how the engine reads its own ids. In text mode the chunks are joined and
/// searched for markers.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  echo '[\"Hm.\",\"<|close|>\",\"think\",\"<|sep|>\",\"<|open|>\",\"response\",\"<|sep|>\",\"4\",\"<|end_of_msg|>\"]' | k3 parse")]
pub(crate) struct Args {
    /// The channel that the prompt left open
    #[arg(long, value_enum, default_value_t = Start::Think)]
    start: Start,
    /// Why generation ended
    #[arg(long, value_enum, default_value_t = Ended::Eos)]
    stop: Ended,
    /// How markers are recognised
    #[arg(long, value_enum, default_value_t = Mode::Token)]
    mode: Mode,
    /// Write one event a line as it becomes certain
    #[arg(long)]
    stream: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Start {
    Think,
    Response,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Ended {
    /// An end token came
    Eos,
    /// The token limit cut the turn
    Length,
    /// Another stop condition, without an end token
    Stop,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    Token,
    Text,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let text = all_of_stdin("chunks")?;
    let chunks: Vec<String> =
        serde_json::from_str(&text).context("expected a JSON array of strings on stdin")?;
    let start = match args.start {
        Start::Think => Channel::Think,
        Start::Response => Channel::Response,
    };
    let stop = match args.stop {
        Ended::Eos => StopReason::Eos,
        Ended::Length => StopReason::Length,
        Ended::Stop => StopReason::Stop,
    };
    let mut reply = Reply::default();
    let mut take = |events: Vec<Event>| -> io::Result<()> {
        if args.stream {
            events.iter().try_for_each(|event| writeln!(stdout(), "{}", event_json(event)))?;
        }
        reply.extend(events);
        Ok(())
    };
    match args.mode {
        Mode::Token => {
            let mut parser = ReplyParser::new(start);
            chunks.iter().try_for_each(|chunk| take(parser.push(piece(chunk))))?;
            take(parser.finish(stop))?;
        }
        Mode::Text => {
            let mut parser = TextReplyParser::new(start);
            chunks.iter().try_for_each(|chunk| take(parser.push(chunk)))?;
            take(parser.finish(stop))?;
        }
    }
    if !args.stream {
        writeln!(stdout(), "{}", reply_json(&reply))?;
    }
    Ok(())
}

fn piece(chunk: &str) -> Piece<'_> {
    let marker = Control::MARKERS.into_iter().chain([Control::Eos]).find(|m| m.spelling() == chunk);
    marker.map_or(Piece::Text(chunk), Piece::Control)
}

/// The fields of a reply as an API would name them.
pub(crate) fn reply_json(reply: &Reply) -> Value {
    let calls: Vec<Value> =
        reply.tool_calls.iter().map(|c| json!({"name": c.name, "arguments": c.arguments})).collect();
    json!({
        "reasoning_content": reply.reasoning_content,
        "content": reply.content,
        "tool_calls": calls,
        "finish_reason": reply.finish_reason.map(FinishReason::as_str),
        "errors": reply.errors.iter().map(|e| e.name()).collect::<Vec<_>>(),
    })
}

/// One event as an object with one key.
pub(crate) fn event_json(event: &Event) -> Value {
    match event {
        Event::ReasoningDelta(text) => json!({"reasoning_content": text}),
        Event::ContentDelta(text) => json!({"content": text}),
        Event::ToolCall(c) => {
            json!({"tool_call": {"index": c.index, "name": c.name, "arguments": c.arguments}})
        }
        Event::Error(error) => json!({"error": error.name()}),
        Event::Finish(reason) => json!({"finish_reason": reason.as_str()}),
    }
}
