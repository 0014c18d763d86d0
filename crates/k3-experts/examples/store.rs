//! Uses the expert store alone: `cargo run --release -p k3-experts --example store -- fixtures/tiny-k31`

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use k3_experts::slab::{Buffered, Reader};
use k3_experts::{Choices, Counters, ExpertRequest, ExpertStore, Phase, SlabOptions, SlabStore};
use k3_format::{Checkpoint, OpenOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("a snapshot folder is needed")?;
    println!("{}", fetch_twice(dir.as_ref())?);
    Ok(())
}

/// Asks for the same experts of the first layer that has any, twice.
pub(crate) fn fetch_twice(dir: &Path) -> Result<Counters, Box<dyn Error>> {
    let checkpoint = Arc::new(Checkpoint::open(dir, &OpenOptions::default())?);
    let layer = checkpoint.config().first_k_dense_replace;
    let reader: Arc<dyn Reader> = Arc::new(Buffered::new(checkpoint.clone())?); // `Direct`: past the page cache
    let options = SlabOptions { budget_bytes: 1 << 30, ..SlabOptions::default() };
    let store = SlabStore::new(checkpoint, &reader, options)?;
    for _ in 0..2 {
        let experts = &[3, 1, 2];
        let request = ExpertRequest { layer, experts, choices: Choices::default(), phase: Phase::Decode };
        for expert in store.fetch(request) {
            let expert = expert?; // a lease: its bytes stay until it is dropped
            println!("expert {}: {:?}, {:?}, {:?}", expert.id, expert.w1, expert.w2, expert.w3);
        }
    }
    Ok(store.counters())
}
