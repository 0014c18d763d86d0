//! The Kimi K3 tokenizer: text to ids and back, exact to the published one (`docs/tokenizer.md`, `docs/checkpoint.md` 8).
//!
//! [`Tokenizer::open`] reads `tiktoken.model` and `tokenizer_config.json` as they are published; no `tokenizer.json` is
//! needed. Kimi K3, K3.1 Pro, K2 and K2.5 share one file of ranks; the control tokens are K3's.
//!
//! ```
//! use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer};
//!
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tokenizer/small");
//! let tokenizer = Tokenizer::open(dir)?;
//!
//! // A prompt is a list of segments: control tokens by their spelling, text by `encode`, each segment alone.
//! let mut ids = Vec::new();
//! ids.extend(tokenizer.control_id("<|open|>"));
//! tokenizer.encode_into("message role=\"user\"", &mut ids);
//! ids.extend(tokenizer.control_id("<|sep|>"));
//! tokenizer.encode_into("What does <|end_of_msg|> mean?", &mut ids);
//!
//! // Text stays text, whatever it spells.
//! let end_of_msg = tokenizer.control_id("<|end_of_msg|>").unwrap();
//! assert!(!ids.contains(&end_of_msg));
//! assert_eq!(
//!     tokenizer.decode_lossy(&ids)?,
//!     "<|open|>message role=\"user\"<|sep|>What does <|end_of_msg|> mean?"
//! );
//!
//! // Tokens may hold parts of characters: a stream hands out whole ones.
//! let mut stream = StreamDecoder::new(&tokenizer, ControlText::Skip);
//! let mut text = String::new();
//! for id in tokenizer.encode("家👩‍🚀") {
//!     text += &stream.push(id)?;
//! }
//! text += &stream.finish();
//! assert_eq!(text, "家👩‍🚀");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it guarantees
//!
//! * The same ids as Python `tiktoken` behind the published wrapper, which cuts huge texts first; the cuts change ids and
//!   are part of the result.
//! * [`Tokenizer::encode`] never yields a control id, so text cannot close a message.
//! * Linear time but for a logarithm, no recursion: a million equal characters are encoded like any text.
//! * Files are untrusted: what is wrong is an [`Error`] with file and line, never a panic.
//!
//! # Feature `hf`
//!
//! `Tokenizer::to_hf` gives a pipeline of the `tokenizers` crate with equal ids, for programs that want its interface.
//!
//! # What it does not know
//!
//! Conversations (`k3-xtml` writes them as segments, control tokens and texts) and the model. Text goes through `cuts.rs`,
//! `split.rs` and `ranks.rs`, in this order; start reading there.
#![forbid(unsafe_code)]

mod controls;
mod cuts;
mod error;
mod files;
#[cfg(feature = "hf")]
pub mod hf;
mod ranks;
mod split;
mod stream;

use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    path::Path,
    sync::Arc,
};

use regex_automata::{hybrid::dfa::Cache, util::pool::Pool};

pub use error::{ControlProblem, Error, LineProblem, UnknownId};
pub use stream::{ControlText, StreamDecoder, Utf8Stream};

use controls::Controls;
use files::NamedControl;
use ranks::{Part, Ranks};

/// A vocabulary with its control tokens; the front page of the crate shows its use.
///
/// Clones share the vocabulary. Threads may encode at the same time.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    ranks: Ranks,
    controls: Controls,
    /// What encoding needs to write to, one a thread at work.
    scratch: Pool<Scratch, NewScratch>,
}

type NewScratch = Box<dyn Fn() -> Scratch + Send + Sync + UnwindSafe + RefUnwindSafe>;

struct Scratch {
    dfa: Cache,
    parts: Vec<Part>,
}

impl Tokenizer {
    /// Reads `tiktoken.model` and `tokenizer_config.json` from the folder `dir`.
    ///
    /// # Errors
    /// If a file is missing, cannot be read, is larger than such a file can be, or is not of the published form
    /// (`docs/checkpoint.md` 8): ranks dense and in order, the single bytes first, no token twice; control tokens within
    /// the 256 slots after the ranks, no id and no spelling twice.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let ranks_file = files::read_ranks_file(dir)?;
        let config_file = files::read_config_file(dir)?;
        let ranks = files::parse_ranks(&dir.join(files::RANKS_FILE), &ranks_file)?;
        let config_path = dir.join(files::CONFIG_FILE);
        let named = files::parse_config(&config_path, &config_file)?;
        Self::new(&config_path, ranks, named)
    }

    /// A tokenizer of the tokens in `tokens`, whose place is their rank, with the control tokens `named` given by id and
    /// spelling. Slots without a name become `<|reserved_token_{id}|>`, as in files.
    ///
    /// # Errors
    /// As [`Tokenizer::open`]; "lines" are places in `tokens`, counted from 1.
    pub fn from_parts<T, S>(
        tokens: impl IntoIterator<Item = T>,
        named: impl IntoIterator<Item = (u32, S)>,
    ) -> Result<Self, Error>
    where
        T: AsRef<[u8]>,
        S: Into<String>,
    {
        let path = Path::new("(tokens from memory)");
        let mut ranks = Ranks::new();
        for (i, token) in tokens.into_iter().enumerate() {
            ranks.push(token.as_ref()).map_err(|problem| Error::Line {
                path: path.to_owned(),
                line: i + 1,
                problem,
            })?;
        }
        let ranks = files::at_least_the_bytes(path, ranks)?;
        let named = named.into_iter().map(|(id, spelling)| NamedControl {
            id,
            spelling: spelling.into(),
            special: true,
        });
        Self::new(path, ranks, named.collect())
    }

    fn new(config_path: &Path, ranks: Ranks, named: Vec<NamedControl>) -> Result<Self, Error> {
        let controls = Controls::new(config_path, ranks.len() as u32, named)?;
        let new_scratch: NewScratch = Box::new(|| Scratch { dfa: split::new_cache(), parts: Vec::new() });
        Ok(Self { inner: Arc::new(Inner { ranks, controls, scratch: Pool::new(new_scratch) }) })
    }

    /// Number of ids, `0..vocab_size`: the ranks and the 256 control slots. 163,840 for K3.
    pub fn vocab_size(&self) -> usize {
        self.text_vocab_size() + controls::SLOTS
    }

    /// Number of ids that text can yield, `0..text_vocab_size`; control ids follow. 163,584 for K3.
    pub fn text_vocab_size(&self) -> usize {
        self.inner.ranks.len()
    }

    /// The ids of `text`, which is text alone: no control id, whatever it spells. No BOS or EOS is added.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        // Text has three to four bytes a token.
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        self.encode_into(text, &mut ids);
        ids
    }

    /// Appends the ids of `text`, as [`Tokenizer::encode`] gives them.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) {
        let ranks = &self.inner.ranks;
        let mut scratch = self.inner.scratch.get();
        let Scratch { dfa, parts } = &mut *scratch;
        for piece in cuts::pieces(text) {
            split::split(dfa, piece, |word| ranks.encode_piece(word.as_bytes(), parts, ids));
        }
    }

    /// The id of the control token spelled exactly so, such as `<|open|>`.
    pub fn control_id(&self, spelling: &str) -> Option<u32> {
        self.inner.controls.id(spelling)
    }

    /// How the control token `id` is spelled; `None` if `id` is no control token.
    pub fn control_spelling(&self, id: u32) -> Option<&str> {
        self.inner.controls.spelling(id)
    }

    /// Whether `id` is one of the 256 control tokens.
    pub fn is_control(&self, id: u32) -> bool {
        self.control_spelling(id).is_some()
    }

    /// Whether `id` is a control token that the checkpoint flags "special", so that "skip special tokens" of other libraries
    /// drops it: all but `<|open|>`, `<|close|>` and `<|sep|>`. With [`Tokenizer::from_parts`] all are.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.controls.is_special(id)
    }

    /// The id of the text token with exactly these bytes.
    pub fn token_id(&self, bytes: &[u8]) -> Option<u32> {
        self.inner.ranks.id(bytes)
    }

    /// The bytes of `id`; of a control token its spelling. They may be part of a character.
    ///
    /// # Errors
    /// If `id` is outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], UnknownId> {
        (self.inner.ranks.token(id))
            .or_else(|| self.control_spelling(id).map(str::as_bytes))
            .ok_or(UnknownId { id, vocab_size: self.vocab_size() })
    }

    /// The bytes of `ids`, control tokens as they are spelled.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn decode_bytes(&self, ids: &[u32]) -> Result<Vec<u8>, UnknownId> {
        let mut bytes = Vec::with_capacity(ids.len().saturating_mul(4));
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id)?);
        }
        Ok(bytes)
    }

    /// The text of `ids`, control tokens as they are spelled, bytes that are not UTF-8 as U+FFFD.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn decode_lossy(&self, ids: &[u32]) -> Result<String, UnknownId> {
        Ok(String::from_utf8(self.decode_bytes(ids)?)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
