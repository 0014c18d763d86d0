//! The `k3` program, for who uses a model.
//!
//! Each command is a module: its arguments as they are typed, then a function that runs it. What another program could want
//! is in a library below; here are terminals, pipes and exit codes. Start reading at `generate.rs`.

#![forbid(unsafe_code)]

mod chat;
mod chrome;
mod clock;
mod generate;
mod inspect;
mod model;
mod output;
mod parse;
mod prompt;
mod request;
mod show;
mod stats;
mod store;
mod text;
mod tokens;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

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
    let command = Cli::parse().command;
    let trace = match &command {
        Command::Generate(args) => args.trace(),
        _ => Ok(None),
    };
    let result = trace.and_then(log).and_then(|_guard| run(&command));
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

/// What the engine logs goes to stderr, as far as `RUST_LOG` asks for it, and its spans into a trace.
fn log(trace: Option<&Path>) -> Result<Option<chrome::Guard>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into());
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(filter);
    let (spans, guard) = trace.map(chrome::ChromeTrace::create).transpose()?.unzip();
    let spans = spans.map(|spans| spans.with_filter(chrome::filter()));
    tracing_subscriber::registry().with(text).with(spans).init();
    Ok(guard)
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Inspect(args) => inspect::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Tokenize(args) => tokens::tokenize(args),
        Command::Detokenize(args) => tokens::detokenize(args),
        Command::Prompt(args) => prompt::run(args),
        Command::Parse(args) => parse::run(args),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
