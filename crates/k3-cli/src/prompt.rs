//! `k3 prompt`: exactly what the model will read.

use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use k3_runner::prompt_ids;
use k3_tokenizer::Tokenizer;
use k3_xtml::{ChatRequest, EncodeOptions, Entry, Revision, encode};

use crate::text::{all_of_file, all_of_stdin};

/// Show what the model will read for a chat request
///
/// The request is OpenAI's: messages, tools, tool_choice, response_format, reasoning_effort; the vendor's options
/// (thinking, thinking_effort, add_generation_prompt, response_schema) go into chat_template_kwargs. A request that the
/// encoder refuses is an error that begins with the refusal's name.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 prompt request.json                                segments as one JSON array
  k3 prompt request.json --as text                      the flat text, for people
  k3 prompt request.json --as ids --tokenizer DIR       token ids, separated by spaces")]
pub(crate) struct Args {
    /// A file with the request, or - for stdin
    request: PathBuf,
    /// Form of the answer
    #[arg(long = "as", value_enum, default_value_t = Form::Segments)]
    form: Form,
    /// Which defaults of the vendor apply
    #[arg(long, value_enum, default_value_t = EntryName::Served)]
    entry: EntryName,
    /// Which behaviour of the vendor's encoder
    #[arg(long, value_enum, default_value_t = RevisionName::Current)]
    revision: RevisionName,
    /// The folder with tiktoken.model and tokenizer_config.json, for --as ids
    #[arg(long, value_name = "DIR", required_if_eq("form", "ids"))]
    tokenizer: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// One JSON array of {"text", "control"}
    Segments,
    /// The texts joined. Never tokenize it: a user may have spelled a marker
    Text,
    /// Token ids
    Ids,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EntryName {
    /// As a server gives it: effort max where none is given, developer is system, no tool choice without tools
    Served,
    /// The vendor's bare function: no effort note where none is given, roles and tool choice as they are
    Bare,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RevisionName {
    /// The newest known
    Current,
    /// That of the first release
    July,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let text = read(&args.request)?;
    let request = match args.entry {
        EntryName::Served => ChatRequest::from_json(&text),
        EntryName::Bare => bare(&text),
    };
    let request = request.map_err(|e| refused(&e))?;
    let options = EncodeOptions {
        entry: match args.entry {
            EntryName::Served => Entry::Served,
            EntryName::Bare => Entry::Bare,
        },
        revision: match args.revision {
            RevisionName::Current => Revision::Current,
            RevisionName::July => Revision::July,
        },
    };
    let prompt = encode(&request, &options).map_err(|e| refused(&e))?;
    match args.form {
        Form::Segments => {
            let segments: Vec<_> = prompt
                .segments
                .iter()
                .map(|s| serde_json::json!({"text": s.text, "control": s.control}))
                .collect();
            writeln!(stdout(), "{}", serde_json::to_string(&segments)?)?;
        }
        Form::Text => writeln!(stdout(), "{}", prompt.flat())?,
        Form::Ids => {
            let dir = args.tokenizer.as_ref().context("--as ids needs --tokenizer DIR")?;
            let ids = prompt_ids(&Tokenizer::open(dir)?, &prompt)?;
            writeln!(stdout(), "{}", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))?;
        }
    }
    Ok(())
}

/// A request as the vendor's function takes it: its roles and its tool choice as they are. Only the effort may also come
/// by OpenAI's name.
fn bare(text: &str) -> Result<ChatRequest, k3_xtml::EncodeError> {
    let mut request = ChatRequest::from_vendor_json(text)?;
    let served = ChatRequest::from_json(text)?;
    (request.thinking, request.thinking_effort) = (served.thinking, served.thinking_effort);
    Ok(request)
}

/// A request from a file or, for `-`, from stdin.
pub(crate) fn read(path: &Path) -> Result<String> {
    if path == Path::new("-") { all_of_stdin("the request") } else { all_of_file(path, "the request") }
}

/// The name first, for scripts.
pub(crate) fn refused(error: &k3_xtml::EncodeError) -> anyhow::Error {
    anyhow!("{}: {error}", error.name())
}
