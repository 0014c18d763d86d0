//! The tokenizer against Python tiktoken, and everything its files and users can do to it.

mod controls;
mod corpus;
mod decode;
mod files;
#[cfg(feature = "hf")]
mod hf;
mod published;
mod support;
