//! What `cargo xtask` can do, one module a command. `src/main.rs` only parses arguments.
//!
//! For who checks machines, models and other engines, and for who works on this one ([`ci`], [`census`]). Commands are a
//! library so that tests call them. Start reading at [`selfcheck`].

#![forbid(unsafe_code)]

pub mod bench;
pub mod census;
pub mod ci;
pub mod drift;
pub mod expect;
pub mod nano;
mod open;
mod output;
pub mod plan;
mod progress;
mod prompt;
pub mod repack;
pub mod selfcheck;
pub mod simulate;
pub mod synth;
pub mod trace;

pub use open::{LoadName, OpenArgs};
pub use output::is_closed_pipe;
