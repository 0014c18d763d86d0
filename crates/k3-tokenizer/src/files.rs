//! Reads `tiktoken.model` and `tokenizer_config.json` as published. Both are untrusted input.

use std::{
    fmt,
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

use crate::{
    Error,
    error::LineProblem,
    ranks::{MAX_TOKEN_BYTES, Ranks},
};

/// Name of the file of ranks.
pub(crate) const RANKS_FILE: &str = "tiktoken.model";
/// Name of the file that names the control tokens.
pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";
/// K3's file has 2.8 MB.
const MAX_RANKS_FILE: u64 = 128 << 20;
/// K3's file has a few kB.
const MAX_CONFIG_FILE: u64 = 4 << 20;
/// The longest line that can hold a token of [`MAX_TOKEN_BYTES`].
const MAX_LINE_BYTES: usize = MAX_TOKEN_BYTES.div_ceil(3) * 4 + 16;

/// A control token as `added_tokens_decoder` gives it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct NamedControl {
    #[serde(skip)]
    pub(crate) id: u32,
    #[serde(rename = "content")]
    pub(crate) spelling: String,
    /// Whether "skip special tokens" of other libraries drops it.
    #[serde(default)]
    pub(crate) special: bool,
}

/// The whole of `dir`/`RANKS_FILE`.
pub(crate) fn read_ranks_file(dir: &Path) -> Result<Vec<u8>, Error> {
    read(&dir.join(RANKS_FILE), MAX_RANKS_FILE)?
        .ok_or_else(|| Error::MissingRanks { dir: dir.to_owned(), found: tokenizer_files(dir) })
}

/// The whole of `dir`/`CONFIG_FILE`.
pub(crate) fn read_config_file(dir: &Path) -> Result<Vec<u8>, Error> {
    read(&dir.join(CONFIG_FILE), MAX_CONFIG_FILE)?
        .ok_or_else(|| Error::MissingConfig { dir: dir.to_owned(), found: tokenizer_files(dir) })
}

/// A file's content, `None` if there is no such file.
fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
    let error = |source| Error::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e)),
    };
    let mut content = Vec::new();
    // One more than the limit tells a file of the limit from a longer one, whatever its metadata say.
    file.take(limit + 1).read_to_end(&mut content).map_err(error)?;
    if content.len() as u64 > limit {
        return Err(Error::TooLarge { path: path.to_owned(), limit });
    }
    Ok(Some(content))
}

/// What stands in `dir` that someone could take for a tokenizer; for messages only.
fn tokenizer_files(dir: &Path) -> Vec<String> {
    let mut found: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| ["token", "vocab", "merges"].iter().any(|part| name.contains(part)))
        .take(64)
        .collect();
    found.sort();
    found
}

/// Lines `base64(token) SP rank LF`, ranks dense and in order, the 256 single bytes first.
pub(crate) fn parse_ranks(path: &Path, content: &[u8]) -> Result<Ranks, Error> {
    let mut ranks = Ranks::new();
    let mut token = Vec::new();
    for (i, line) in content.strip_suffix(b"\n").unwrap_or(content).split(|&b| b == b'\n').enumerate() {
        parse_line(line, i, &mut token).and_then(|()| ranks.push(&token)).map_err(|problem| Error::Line {
            path: path.to_owned(),
            line: i + 1,
            problem,
        })?;
    }
    at_least_the_bytes(path, ranks)
}

/// The first 256 tokens are single bytes and unlike each other, so 256 of them are all bytes.
pub(crate) fn at_least_the_bytes(path: &Path, ranks: Ranks) -> Result<Ranks, Error> {
    if ranks.len() < 256 {
        return Err(Error::TooFewRanks { path: path.to_owned(), found: ranks.len() });
    }
    Ok(ranks)
}

fn parse_line(line: &[u8], expected: usize, token: &mut Vec<u8>) -> Result<(), LineProblem> {
    if line.len() > MAX_LINE_BYTES {
        return Err(LineProblem::TooLong { bytes: line.len() / 4 * 3, limit: MAX_TOKEN_BYTES });
    }
    let space =
        line.iter().position(|&b| b == b' ').ok_or_else(|| LineProblem::Form { found: shorten(line) })?;
    let (base64, rank) = (&line[..space], &line[space + 1..]);
    if rank != expected.to_string().as_bytes() {
        return Err(LineProblem::Rank { expected, found: shorten(rank) });
    }
    token.clear();
    STANDARD.decode_vec(base64, token).map_err(|source| LineProblem::Base64 { source })
}

fn shorten(field: &[u8]) -> String {
    String::from_utf8_lossy(&field[..field.len().min(48)]).into_owned()
}

/// The control tokens that `added_tokens_decoder` names, as written: neither ids nor spellings are checked here.
pub(crate) fn parse_config(path: &Path, content: &[u8]) -> Result<Vec<NamedControl>, Error> {
    #[derive(Deserialize)]
    struct Config {
        added_tokens_decoder: Entries,
    }
    let config: Config =
        serde_json::from_slice(content).map_err(|source| Error::Config { path: path.to_owned(), source })?;
    Ok(config.added_tokens_decoder.0)
}

/// The entries of the JSON object in their order, with repeated keys, which a map would swallow.
struct Entries(Vec<NamedControl>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token ids to added tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some((id, named)) = map.next_entry::<u32, NamedControl>()? {
                    entries.push(NamedControl { id, ..named });
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}
