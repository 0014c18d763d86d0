//! The tokenizer as a pipeline of the `tokenizers` crate.
//!
//! That crate's concrete `Tokenizer` holds its models in a closed enum, so no model of ours fits into it. Its generic
//! [`TokenizerImpl`] has the same methods (`encode`, `encode_batch`, `decode`, `decode_stream`, truncation, padding) and
//! takes any model: [`HfTokenizer`] is that. It cannot be saved as `tokenizer.json`, since no such file can hold ranks.
//!
//! Tokens are shown as in GPT-2: each byte as one printable character, a space as `Ġ`.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizedString,
    PreTokenizer, Result, Token, TokenizerImpl, Trainer, decoders::byte_level::ByteLevel,
    tokenizer::normalizer::Range,
};

use crate::{Tokenizer, cuts, split};

/// What [`Tokenizer::to_hf`] returns: no normalizer, our pre-tokenizer and model, no post-processor, GPT-2's bytes.
pub type HfTokenizer =
    TokenizerImpl<RankBpe, NormalizerWrapper, KimiPreTokenizer, PostProcessorWrapper, DecoderWrapper>;

impl Tokenizer {
    /// A pipeline that yields the ids of [`Tokenizer::encode`]: control tokens in the text are text. It decodes all ids,
    /// and `token_to_id` knows the control tokens.
    ///
    /// # Errors
    /// If the `tokenizers` crate refuses the parts, which it does not at the version this was built with.
    pub fn to_hf(&self) -> Result<HfTokenizer> {
        let mut hf = TokenizerImpl::new(RankBpe { tokenizer: self.clone() });
        hf.with_pre_tokenizer(Some(KimiPreTokenizer { tokenizer: self.clone() }));
        hf.with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::default())));
        Ok(hf)
    }

    /// The same with all 256 control tokens added, so that text which spells one yields its id: for **trusted** text
    /// alone. The text between them is encoded as separate segments.
    ///
    /// # Errors
    /// As [`Tokenizer::to_hf`].
    pub fn to_hf_with_control_tokens(&self) -> Result<HfTokenizer> {
        let mut hf = self.to_hf()?;
        let added = self.control_ids().filter_map(|id| {
            let special = self.is_special(id);
            Some(AddedToken::from(self.control_spelling(id)?, special).normalized(false))
        });
        hf.add_tokens(added)?;
        Ok(hf)
    }

    fn control_ids(&self) -> impl Iterator<Item = u32> {
        self.text_vocab_size() as u32..self.vocab_size() as u32
    }
}

/// Rank BPE as a [`Model`]: ids and byte offsets of one pre-token.
#[derive(Debug, Clone)]
pub struct RankBpe {
    tokenizer: Tokenizer,
}

impl RankBpe {
    fn show(&self, id: u32) -> Option<String> {
        match self.tokenizer.control_spelling(id) {
            Some(spelling) => Some(spelling.to_owned()),
            None => {
                Some(self.tokenizer.inner.ranks.token(id)?.iter().map(|&b| SHOWN[usize::from(b)]).collect())
            }
        }
    }
}

impl Model for RankBpe {
    type Trainer = NoTrainer;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        let (mut ids, mut parts, mut at) = (Vec::new(), Vec::new(), 0);
        if !sequence.is_empty() {
            self.tokenizer.inner.ranks.encode_piece(sequence.as_bytes(), &mut parts, &mut ids);
        }
        let token = |id| {
            let start = at;
            at += self.tokenizer.token_bytes(id)?.len();
            Ok(Token::new(id, self.show(id).unwrap_or_default(), (start, at)))
        };
        ids.into_iter().map(token).collect()
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.control_id(token).or_else(|| {
            let bytes: Option<Vec<u8>> = token.chars().map(|c| BYTES.get(&c).copied()).collect();
            self.tokenizer.token_id(&bytes?)
        })
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.show(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.tokenizer.vocab_size() as u32).filter_map(|id| Some((self.show(id)?, id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("Kimi K3's vocabulary is saved as tiktoken.model and tokenizer_config.json; copy those files"
            .into())
    }

    fn get_trainer(&self) -> NoTrainer {
        NoTrainer
    }
}

/// The cuts of the published wrapper and the split pattern as a [`PreTokenizer`].
#[derive(Debug, Clone)]
pub struct KimiPreTokenizer {
    tokenizer: Tokenizer,
}

impl PreTokenizer for KimiPreTokenizer {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Result<()> {
        text.split(|_, normalized| {
            let mut ends = Vec::new();
            {
                let mut scratch = self.tokenizer.inner.scratch.get();
                let mut at = 0;
                for piece in cuts::pieces(normalized.get()) {
                    split::split(&mut scratch.dfa, piece, |word| {
                        at += word.len();
                        ends.push(at);
                    });
                }
            }
            let mut start = 0;
            let mut words = Vec::with_capacity(ends.len());
            for end in ends {
                words.push(
                    normalized.slice(Range::Normalized(start..end)).ok_or("a split within a character")?,
                );
                start = end;
            }
            Ok(words)
        })
    }
}

/// A [`Model`] must name a trainer; this one refuses, since the vocabulary is the checkpoint's.
#[derive(Debug, Clone, Copy)]
pub struct NoTrainer;

impl Trainer for NoTrainer {
    type Model = RankBpe;

    fn should_show_progress(&self) -> bool {
        false
    }

    fn train(&self, _: &mut RankBpe) -> Result<Vec<AddedToken>> {
        Err("Kimi K3's vocabulary belongs to the checkpoint and cannot be trained".into())
    }

    fn feed<I, S, F>(&mut self, _: I, _: F) -> Result<()>
    where
        I: Iterator<Item = S> + Send,
        S: AsRef<str> + Send,
        F: Fn(&str) -> Result<Vec<String>> + Sync,
    {
        Err("Kimi K3's vocabulary belongs to the checkpoint and cannot be trained".into())
    }
}

/// GPT-2's printable character for each byte: Latin-1's printable ones are themselves, the others follow from U+0100.
static SHOWN: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut others = '\u{100}'..;
    std::array::from_fn(|b| match b as u8 {
        b @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..) => char::from(b),
        _ => others.next().expect("an endless range"),
    })
});

/// [`SHOWN`] backwards.
static BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| (0..=255).map(|b| (SHOWN[usize::from(b)], b)).collect());
