//! What `cargo xtask` can do, one module a command. `src/main.rs` only parses arguments.

pub mod bench;
pub mod expect;
pub mod selfcheck;
pub mod synth;
pub mod trace;
