//! What a forward pass promises whatever the weights are: the same bits for every way to split, batch and schedule
//! the same tokens, failures that stay with the sequence that caused them, and states that are complete.

#[path = "../support/mod.rs"]
mod support;

mod batches;
mod failures;
mod indexer;
mod lookahead;
mod non_finite;
mod observers;
mod refusals;
mod splits;
mod states;
