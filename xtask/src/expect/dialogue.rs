//! Expectations about many short prompts, each with little (`docs/vectors.md` 6).

use anyhow::{Result, bail, ensure};

use super::{Tensor, Tensors};

/// A prompt, and what should follow it.
#[derive(Clone, Debug, PartialEq)]
pub struct Dialogue {
    /// Its name in the file.
    pub name: String,
    /// What the model reads.
    pub prompt: Vec<u32>,
    /// Logits after the last token of the prompt, `[vocab]`.
    pub logits: Option<Vec<f32>>,
    /// The tokens with the largest logits that follow; may be none.
    pub greedy: Vec<u32>,
}

impl Dialogue {
    /// A dialogue from its tensors, for a model of `vocab_size` ids and `context` positions. Names that mean nothing are
    /// added to `unknown`.
    pub(super) fn read(
        name: &str,
        tensors: &Tensors,
        vocab_size: usize,
        context: usize,
        unknown: &mut Vec<String>,
    ) -> Result<Self> {
        let mut dialogue =
            Self { name: name.to_owned(), prompt: Vec::new(), logits: None, greedy: Vec::new() };
        for (part, tensor) in tensors {
            match part.as_str() {
                "input_ids" => dialogue.prompt = ids(name, part, tensor, vocab_size)?,
                "greedy_ids" => dialogue.greedy = ids(name, part, tensor, vocab_size)?,
                "logits_last" => match tensor.as_f32() {
                    Some(logits) if tensor.shape == [vocab_size] => dialogue.logits = Some(logits.to_vec()),
                    _ => bail!(
                        "tensor `{name}/{part}`: expected F32 [{vocab_size}], found {:?} {:?}",
                        tensor.dtype(),
                        tensor.shape
                    ),
                },
                _ => unknown.push(format!("{name}/{part}")),
            }
        }
        let Self { prompt, logits, greedy, .. } = &dialogue;
        ensure!(
            !prompt.is_empty(),
            "dialogue `{name}`: expected token ids in `{name}/input_ids`, found none"
        );
        ensure!(
            logits.is_some() || !greedy.is_empty(),
            "dialogue `{name}`: expected `{name}/logits_last` or `{name}/greedy_ids`, found nothing to compare"
        );
        ensure!(
            prompt.len() + greedy.len() <= context,
            "dialogue `{name}`: {} prompt tokens and {} after them do not fit the model's context of {context}",
            prompt.len(),
            greedy.len()
        );
        Ok(dialogue)
    }
}

fn ids(dialogue: &str, part: &str, tensor: &Tensor, vocab_size: usize) -> Result<Vec<u32>> {
    let list = tensor.as_i32().filter(|_| tensor.shape.len() == 1);
    let Some(list) = list else {
        bail!(
            "tensor `{dialogue}/{part}`: expected I32 [tokens], found {:?} {:?}",
            tensor.dtype(),
            tensor.shape
        );
    };
    let id = |(at, &id): (usize, &i32)| match u32::try_from(id) {
        Ok(id) if (id as usize) < vocab_size => Ok(id),
        _ => bail!("tensor `{dialogue}/{part}`: expected token ids below {vocab_size}, found {id} at {at}"),
    };
    list.iter().enumerate().map(id).collect()
}
