//! Encodes a request and reads a reply: `cargo run --release -p k3-runner --example conversation -- fixtures/nano`

use std::error::Error;

use k3_runner::prompt_ids;
use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer};
use k3_xtml::{ChatRequest, Control, EncodeOptions, Message, Piece, Reply, ReplyParser, StopReason, encode};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("a folder with a tokenizer is needed")?;
    let request = ChatRequest::from_json(r#"{"messages": [{"role": "user", "content": "2 + 2?"}]}"#)?;
    println!("{:?}", answered(&Tokenizer::open(dir)?, request, "2 + 2 = 4")?);
    Ok(())
}

/// What is read when a model answers `request` so: what it would write is what history looks like behind the prompt.
pub(crate) fn answered(
    tokenizer: &Tokenizer,
    mut request: ChatRequest,
    answer: &str,
) -> Result<Reply, Box<dyn Error>> {
    let prompt = encode(&request, &EncodeOptions::default())?;
    let ids = prompt_ids(tokenizer, &prompt)?;
    println!("{}\n{ids:?}", prompt.flat());
    request.messages.push(Message::assistant(answer));
    let history = prompt_ids(tokenizer, &encode(&request, &EncodeOptions::default())?)?;

    let mut parser = ReplyParser::new(prompt.open_channel.ok_or("no reply is asked for")?);
    let (mut stream, mut reply) = (StreamDecoder::new(tokenizer, ControlText::Skip), Reply::default());
    for &id in &history[ids.len()..] {
        reply.extend(parser.push(Piece::Text(&stream.push(id)?)));
        if let Some(spelling) = tokenizer.control_spelling(id) {
            let marker = Control::MARKERS.into_iter().find(|marker| marker.spelling() == spelling);
            reply.extend(parser.push(Piece::Control(marker.unwrap_or(Control::Other))));
        }
    }
    reply.extend(parser.finish(StopReason::Eos));
    Ok(reply)
}
