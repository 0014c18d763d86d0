//! A vocabulary for a synthetic checkpoint.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use k3_format::ModelConfig;
use k3_tokenizer::Tokenizer;

const FILES: [&str; 2] = ["tiktoken.model", "tokenizer_config.json"];

/// Gives the model the vocabulary in `dir`, and the ids that the release gives a meaning.
pub(super) fn adopt(dir: &Path, model: &mut ModelConfig) -> Result<()> {
    let tokenizer = Tokenizer::open(dir)?;
    model.vocab_size = tokenizer.vocab_size();
    model.tokens.bos = tokenizer.control_id("[BOS]");
    model.tokens.eos = tokenizer.control_id("<|end_of_msg|>").into_iter().collect();
    model.tokens.pad = tokenizer.control_id("[PAD]");
    model.tokens.media_placeholder = tokenizer.control_id("<|media_pad|>");
    Ok(())
}

/// Copies the files of the vocabulary.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    for file in FILES {
        fs::copy(from.join(file), to.join(file))
            .with_context(|| format!("copying {file} from {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}
