//! `cargo xtask`: commands of this workspace that are more than cargo.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{
    bench, census, ci, drift, is_closed_pipe, nano, plan, repack, selfcheck, simulate, synth, trace,
};

/// Makes, checks and measures Kimi K3 and K3.1 Pro checkpoints.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, arg_required_else_help = true)]
#[command(after_help = "\
Each command explains itself with examples: `cargo xtask synth --help`.
What is odd about a checkpoint is a note in the output.
RUST_LOG=info also shows what the engine logs, on stderr.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a random but complete checkpoint of either variant, at any size
    Synth(synth::Args),
    Bench(bench::Args),
    Census(census::Args),
    Ci(ci::Args),
    Nano(nano::Args),
    /// Say how far a checkpoint's logits are from those of another
    Drift(drift::Args),
    Plan(plan::Args),
    /// Convert a checkpoint once, without loss: NVFP4 or MXFP4 experts in id order, page-aligned
    Repack(repack::Args),
    /// Check that this engine computes what it should, on the fixtures or on a checkpoint
    Selfcheck(selfcheck::Args),
    Simulate(simulate::Args),
    /// Write everything that happens inside the model for a prompt into a file
    Trace(trace::Args),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match Cli::parse().command {
        Command::Synth(args) => synth::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Census(args) => census::run(&args),
        Command::Ci(args) => ci::run(&args),
        Command::Nano(args) => nano::run(&args),
        Command::Drift(args) => drift::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Repack(args) => repack::run(&args),
        Command::Selfcheck(args) => selfcheck::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Trace(args) => trace::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !is_closed_pipe(&error) {
                // With stderr closed as well there is nobody to tell.
                let _ = writeln!(std::io::stderr(), "error: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}
