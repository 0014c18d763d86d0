//! What stands beside the shards: config, tokenizer, licence, code.

use std::fs;
use std::path::Path;

use crate::Checkpoint;
use crate::index::INDEX_FILE;
use crate::printable::is_printable;
use crate::small_file::read_small;

use super::config::rewrite;
use super::error::RepackError;
use super::plan::Plan;
use super::recipe::Naming;
use super::{ExpertTarget, REPORT_FILE};

const CONFIG_FILE: &str = "config.json";
/// Where ModelOpt's loaders look for the quantization besides `config.json`.
const MODELOPT_FILE: &str = "hf_quant_config.json";

/// Ends of names that are copied.
const COPIED: [&str; 9] = [".json", ".py", ".md", ".txt", ".model", ".tiktoken", ".jinja", ".yaml", ".yml"];
/// What the name of a licence begins with.
const LICENCES: [&str; 5] = ["license", "licence", "notice", "copying", "third"];
/// JSON files that describe the source and would be wrong of the result, or that the result has its own of.
const REPLACED: [&str; 5] = [CONFIG_FILE, INDEX_FILE, MODELOPT_FILE, REPORT_FILE, "expected.json"];

/// The small files of a source, and those of the result.
pub(super) struct Extras {
    /// As they are in the source.
    sources: Vec<(String, Vec<u8>)>,
    /// As they will be in the result, by name.
    pub(super) outputs: Vec<(String, Vec<u8>)>,
    /// Files of the source that are not taken over.
    pub(super) left_out: Vec<String>,
}

impl Extras {
    /// Reads them all; together they have a few MB.
    pub(super) fn new(source: &Checkpoint, plan: &Plan) -> Result<Self, RepackError> {
        let dir = source.dir();
        let mut names = Vec::new();
        let mut left_out = Vec::new();
        for item in fs::read_dir(dir).map_err(RepackError::io("list", dir))? {
            let item = item.map_err(RepackError::io("list", dir))?;
            let name = item.file_name().to_string_lossy().into_owned();
            let is_shard = source.shards().files().iter().any(|file| file.name == name);
            if is_shard || REPLACED[..4].contains(&name.as_str()) {
                continue;
            }
            // Follows links: a file of a cached download is one.
            let is_file = fs::metadata(item.path()).is_ok_and(|m| m.is_file());
            if is_file && is_copied(&name) { names.push(name) } else { left_out.push(name) }
        }
        names.sort_unstable();
        left_out.sort_unstable();
        let read = |name: String| read_small(&dir.join(&name)).map(|bytes| (name, bytes));
        let mut sources = names.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let mut outputs = sources.clone();
        let config = read_small(&dir.join(CONFIG_FILE))?;
        let rewritten = rewrite(&config, plan, source.config())
            .map_err(|message| RepackError::Config { path: dir.join(CONFIG_FILE), message })?;
        outputs.push((CONFIG_FILE.to_owned(), rewritten.config));
        if plan.recipe.experts == ExpertTarget::Nvfp4 && plan.recipe.names == Naming::ModelOpt {
            outputs.push((MODELOPT_FILE.to_owned(), rewritten.hf_quant_config));
        }
        outputs.sort_by(|a, b| a.0.cmp(&b.0));
        sources.push((CONFIG_FILE.to_owned(), config));
        Ok(Self { sources, outputs, left_out })
    }

    /// Names and bytes of the files that the result depends on.
    pub(super) fn sources(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.sources.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }
}

/// Whether a file of this name goes with the model.
fn is_copied(name: &str) -> bool {
    let lower = name.to_lowercase();
    let ends = COPIED.iter().any(|end| lower.ends_with(end));
    let licence = LICENCES.iter().any(|begin| lower.starts_with(begin)) && !lower.contains(".safetensors");
    (ends || licence)
        && is_printable(name)
        && !name.starts_with('.')
        && !REPLACED.contains(&name)
        && Path::new(&lower).extension().is_none_or(|e| e != "partial")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, copied: bool) {
        assert_eq!(is_copied(name), copied, "{name}");
    }

    #[test]
    fn what_goes_with_the_model() {
        for name in [
            "generation_config.json",
            "tiktoken.model",
            "tokenizer_config.json",
            "tokenization_kimi.py",
            "LICENSE",
            "License.txt",
            "THIRD_PARTY_NOTICES.md",
            "chat_template.jinja",
        ] {
            check(name, true);
        }
        for name in [
            "config.json",
            "model.safetensors.index.json",
            "hf_quant_config.json",
            "repack.json",
            "expected.json",
            "model.safetensors",
            "pytorch_model.bin",
            ".gitattributes",
            "config.json.partial",
            "logo.png",
        ] {
            check(name, false);
        }
    }
}
