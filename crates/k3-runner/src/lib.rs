//! The thin part that puts the engine together: open a checkpoint, prefill, decode, sample, save and restore.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use k3_graph::Cpu;
//! use k3_runner::{Engine, EngineOptions, Generate, Sampling};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-k31");
//! let engine = Engine::open(dir, Cpu::new(0)?, &EngineOptions::default(), &mut |_| {})?;
//! let mut sequence = engine.new_sequence()?;
//! let request = Generate { max_tokens: 4, sampling: Sampling::greedy(), ..Generate::default() };
//! let reply = engine.generate(&mut sequence, &[1, 2, 3], &request, &mut |_| ControlFlow::Continue(()))?;
//! println!("{:?} {:?}", reply.tokens, reply.finish);
//!
//! // The sequence goes on from there: the last token of a reply is not consumed yet.
//! assert_eq!(sequence.position(), 3 + reply.tokens.len() - 1);
//! # Ok(())
//! # }
//! ```
//!
//! Under it are token ids; [`Chatter`] puts conversations on top: a chat request in, reasoning, content and tool calls
//! out. A [`Conversation`] keeps the sequence between turns.
//!
//! An [`Engine`] is shared, a [`Sequence`] is owned by who continues it. That is all the state there is: who wants a server,
//! a scheduler or a cache of prompts builds it on these two, with [`Engine::step`] for several sequences in one pass.
//!
//! This crate knows no HTTP, no terminal and no arithmetic. Start reading at `engine.rs`.

#![forbid(unsafe_code)]

mod chat;
mod conversation;
mod engine;
mod error;
mod generate;
pub mod memory;
mod record;
mod sampler;
mod saved;

pub use chat::{ChatError, ChatEvent, ChatReply, Chatter, Usage, check_vocabulary, prompt_ids};
pub use conversation::{Conversation, Turn};
pub use engine::{Engine, EngineOptions, OpenProgress, Sequence, Step};
pub use error::{Error, RunError};
pub use generate::{Event, Finish, Generate, Generation};
pub use record::RecordError;
pub use sampler::{Sampler, Sampling, SamplingError};
pub use saved::SavedStateError;

/// The first 64 bits of the BLAKE3 hash of logits as little-endian f32: two runs gave the same bits if and (but for
/// a chance of 2^-64) only if their hashes are equal. Printed as 16 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogitsHash(pub u64);

impl LogitsHash {
    /// Hashes logits of any number of positions, in order.
    pub fn of(logits: &[f32]) -> Self {
        let mut hasher = LogitsHasher::new();
        hasher.update(logits);
        hasher.finish()
    }
}

/// Computes a [`LogitsHash`] piece by piece, for logits that do not fit into memory together. How they are cut does
/// not change it.
#[derive(Clone, Debug, Default)]
pub struct LogitsHasher(blake3::Hasher);

impl LogitsHasher {
    /// Of no logits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the logits that follow.
    pub fn update(&mut self, logits: &[f32]) {
        self.0.update(bytemuck::cast_slice(logits));
    }

    /// The hash of everything so far.
    pub fn finish(&self) -> LogitsHash {
        let digest = self.0.finalize();
        let (head, _) = digest.as_bytes().split_first_chunk().expect("a digest has 32 bytes");
        LogitsHash(u64::from_be_bytes(*head))
    }
}

impl std::fmt::Display for LogitsHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However logits are cut, the hash is that of the first 8 bytes of the BLAKE3 hash of them all.
    #[track_caller]
    fn check(cuts: &[usize]) {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
        let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
        let digest = blake3::hash(&bytes);
        let mut hasher = LogitsHasher::new();
        let mut rest = logits.as_slice();
        for &cut in cuts {
            let (piece, after) = rest.split_at(cut);
            hasher.update(piece);
            rest = after;
        }
        hasher.update(rest);
        assert_eq!(hasher.finish(), LogitsHash::of(&logits));
        assert_eq!(hasher.finish().to_string(), digest.to_hex()[..16]);
    }

    #[test]
    fn logits_in_pieces_have_one_hash() {
        check(&[]);
        check(&[1, 0, 500]);
        check(&[333, 333, 334]);
    }
}
