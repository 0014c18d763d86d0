//! `k3 tokenize` and `k3 detokenize`.

use std::io::{BufRead, BufWriter, Write, stdin, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result};
use k3_tokenizer::Tokenizer;

use crate::text::{Place, all_of_stdin, utf8};

/// Text on stdin to token ids on stdout
///
/// The text is text: a control spelling such as `<|open|>` in it becomes ordinary tokens, as in a user's message.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  echo -n 'Hello' | k3 tokenize DIR            ids of all of stdin, separated by spaces
  k3 tokenize DIR --json < strings.jsonl       one JSON string a line in, one array of ids a line out")]
pub(crate) struct TokenizeArgs {
    /// The folder with tiktoken.model and tokenizer_config.json
    dir: PathBuf,
    /// Read one JSON string a line, write one JSON array a line
    #[arg(long)]
    json: bool,
}

/// Token ids on stdin to text on stdout
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  echo 9906 1917 | k3 detokenize DIR           the bytes of these ids, nothing added
  k3 detokenize DIR --json < ids.jsonl         one array of ids a line in, one JSON string a line out")]
pub(crate) struct DetokenizeArgs {
    /// The folder with tiktoken.model and tokenizer_config.json
    dir: PathBuf,
    /// Read one JSON array a line, write one JSON string a line; bytes that are no text become U+FFFD
    #[arg(long)]
    json: bool,
}

pub(crate) fn tokenize(args: &TokenizeArgs) -> Result<()> {
    let tokenizer = Tokenizer::open(&args.dir)?;
    let mut out = stdout().lock();
    if args.json {
        return each_line(|line| {
            let text: String = serde_json::from_str(line).context("expected a JSON string")?;
            Ok(writeln!(out, "{}", serde_json::to_string(&tokenizer.encode(&text))?)?)
        });
    }
    let text = all_of_stdin("text")?;
    let mut out = BufWriter::new(out);
    for (i, id) in tokenizer.encode(&text).into_iter().enumerate() {
        write!(out, "{}{id}", if i == 0 { "" } else { " " })?;
    }
    writeln!(out)?;
    Ok(out.flush()?)
}

pub(crate) fn detokenize(args: &DetokenizeArgs) -> Result<()> {
    let tokenizer = Tokenizer::open(&args.dir)?;
    let mut out = stdout().lock();
    if args.json {
        return each_line(|line| {
            let ids: Vec<u32> = serde_json::from_str(line).context("expected a JSON array of token ids")?;
            Ok(writeln!(out, "{}", serde_json::to_string(&tokenizer.decode_lossy(&ids)?)?)?)
        });
    }
    let text = all_of_stdin("ids")?;
    let ids = text
        .split(|c: char| c.is_whitespace() || c == ',')
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("expected a token id, found {word:?}")))
        .collect::<Result<Vec<u32>>>()?;
    Ok(out.write_all(&tokenizer.decode_bytes(&ids)?)?)
}

/// Calls `f` with each line of stdin that is not blank; an error says which line.
fn each_line(mut f: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let mut place = Place::default();
    for line in stdin().lock().split(b'\n') {
        let line = line.with_context(|| format!("reading line {} of stdin", place.lines + 1))?;
        let next = Place { lines: place.lines + 1, bytes: place.bytes + line.len() + 1 };
        let line = utf8(line, place).context("reading stdin")?;
        if !line.trim().is_empty() {
            f(&line).with_context(|| format!("line {} of stdin", next.lines))?;
        }
        place = next;
    }
    Ok(())
}
