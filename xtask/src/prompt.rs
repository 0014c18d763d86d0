//! Prompts for checkpoints that nothing is expected of.

use anyhow::{Result, ensure};
use k3_graph::Device;
use k3_runner::{Engine, prompt_ids};
use k3_tokenizer::Tokenizer;
use k3_xtml::{ChatRequest, EncodeOptions, Message, encode};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The last ids of the vocabulary are control slots (`docs/checkpoint.md` 8).
const CONTROL_SLOTS: usize = 256;
const SEED: u64 = 3;

/// A question, framed as a conversation: what a trained model is made to read.
pub(crate) fn control_prompt(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let request = ChatRequest::new(vec![Message::user("What is the weather in Paris?")]);
    Ok(prompt_ids(tokenizer, &encode(&request, &EncodeOptions::default())?)?)
}

/// `len` ids, always the same for the same vocabulary: no special ids, and no control slots where the vocabulary has
/// room for them.
pub(crate) fn fixed_prompt<D: Device>(engine: &Engine<D>, len: usize) -> Result<Vec<u32>> {
    let config = engine.model().config();
    let vocab = config.vocab_size;
    let text = if vocab > 16 * CONTROL_SLOTS { vocab - CONTROL_SLOTS } else { vocab };
    let special: Vec<u32> = engine.stop_ids().into_iter().chain(engine.suppressed_ids()).collect();
    ensure!(
        (0..text as u32).any(|id| !special.contains(&id)),
        "the vocabulary of {vocab} has no id that is not special: nothing can be run"
    );
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let ids = std::iter::repeat_with(|| (rng.next_u64() % text as u64) as u32);
    Ok(ids.filter(|id| !special.contains(id)).take(len).collect())
}
