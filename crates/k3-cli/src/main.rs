//! The `k3` program.

#![forbid(unsafe_code)]

mod chat;
mod clock;
mod generate;
mod inspect;
mod model;
mod output;
mod parse;
mod prompt;
mod request;
mod show;
mod store;
mod text;
mod tokens;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs Kimi K3 and Kimi K3.1 Pro checkpoints on one machine
#[derive(Parser)]
#[command(name = "k3", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Inspect(inspect::Args),
    Chat(chat::Args),
    Generate(generate::Args),
    Tokenize(tokens::TokenizeArgs),
    Detokenize(tokens::DetokenizeArgs),
    Prompt(prompt::Args),
    Parse(parse::Args),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match Cli::parse().command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Tokenize(args) => tokens::tokenize(&args),
        Command::Detokenize(args) => tokens::detokenize(&args),
        Command::Prompt(args) => prompt::run(&args),
        Command::Parse(args) => parse::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::tell(format_args!("error: {error:#}\n"));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
