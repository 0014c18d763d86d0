//! Runs a prompt of token ids: `cargo run --release -p k3-runner --example generate -- DIR 1 2 3`

use std::ops::ControlFlow;
use std::time::Instant;

use k3_graph::Cpu;
use k3_runner::{Engine, EngineOptions, Event, Generate, Sampling};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("a snapshot folder and token ids are needed")?;
    let prompt = args.map(|id| id.parse()).collect::<Result<Vec<u32>, _>>()?;

    let start = Instant::now();
    let engine = Engine::open(dir, Cpu::new(0)?, &EngineOptions::default(), &mut |_| {})?;
    eprintln!("opened in {:.2?}", start.elapsed());

    let request = Generate { max_tokens: 16, sampling: Sampling::greedy(), ..Generate::default() };
    let mut last = Instant::now();
    let reply = engine.generate(&mut engine.new_sequence()?, &prompt, &request, &mut |event| {
        if let Event::Token(id) = event {
            eprintln!("{id:>8} after {:.2?}", last.elapsed());
            last = Instant::now();
        }
        ControlFlow::Continue(())
    })?;
    println!("{:?}, {:?}, logits {}", reply.tokens, reply.finish, reply.logits_hash);
    println!("{}", engine.store().counters());
    Ok(())
}
