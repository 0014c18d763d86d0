//! The thin part that puts the engine together: open a checkpoint, prefill, decode, sample, save and restore.
//!
//! ```no_run
//! use k3_graph::Cpu;
//! use k3_runner::{Engine, EngineOptions, Generate, Sampling};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::open("/models/kimi-k3", Cpu::new(0)?, &EngineOptions::default(), &mut |_| {})?;
//! let mut sequence = engine.new_sequence()?;
//! let request = Generate { max_tokens: 64, sampling: Sampling::greedy(), ..Generate::default() };
//! let reply = engine.generate(&mut sequence, &[1, 2, 3], &request, &mut |_| std::ops::ControlFlow::Continue(()))?;
//! println!("{:?} {:?}", reply.tokens, reply.finish);
//! # Ok(())
//! # }
//! ```
//!
//! Under it are token ids; [`Chatter`] puts conversations on top: a chat request in, reasoning, content and tool calls
//! out.

#![forbid(unsafe_code)]

mod chat;
mod engine;
mod error;
mod generate;
mod sampler;
mod saved;

pub use chat::{ChatError, ChatEvent, ChatReply, Chatter, Usage, prompt_ids};
pub use engine::{Engine, EngineOptions, OpenProgress, Sequence, Step};
pub use error::{Error, RunError};
pub use generate::{Event, Finish, Generate, Generation};
pub use sampler::{Sampler, Sampling, SamplingError};
pub use saved::SavedStateError;

/// The first 64 bits of the BLAKE3 hash of logits as little-endian f32: two runs gave the same bits if and (but for
/// a chance of 2^-64) only if their hashes are equal. Printed as 16 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogitsHash(pub u64);

impl LogitsHash {
    /// Hashes logits of any number of positions, in order.
    pub fn of(logits: &[f32]) -> Self {
        let digest = blake3::hash(bytemuck::cast_slice(logits));
        let (head, _) = digest.as_bytes().split_first_chunk().expect("a digest has 32 bytes");
        Self(u64::from_be_bytes(*head))
    }
}

impl std::fmt::Display for LogitsHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
