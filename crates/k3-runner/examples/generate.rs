//! Continues a prompt of token ids: `cargo run --release -p k3-runner --example generate -- fixtures/tiny-k31 1 2 3`

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use k3_graph::Cpu;
use k3_runner::{Engine, EngineOptions, Generate, Generation, Sampling};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("a snapshot folder and token ids are needed")?;
    let prompt = args.map(|id| id.parse()).collect::<Result<Vec<u32>, _>>()?;
    let reply = generate(dir.as_ref(), &prompt)?;
    println!("{:?}, {:?}, logits {}", reply.tokens, reply.finish, reply.logits_hash);
    Ok(())
}

/// The likeliest 16 tokens after `prompt`.
pub(crate) fn generate(dir: &Path, prompt: &[u32]) -> Result<Generation, Box<dyn Error>> {
    let engine = Engine::open(dir, Cpu::new(0)?, &EngineOptions::default(), &mut |_| {})?;
    let mut sequence = engine.new_sequence()?;
    let request = Generate { max_tokens: 16, sampling: Sampling::greedy(), ..Generate::default() };
    let reply = engine.generate(&mut sequence, prompt, &request, &mut |event| {
        eprintln!("{event:?}"); // layers of the prompt that are done, then tokens
        ControlFlow::Continue(())
    })?;
    Ok(reply)
}
