//! What stands beside the shards: config, tokenizer, licence, code.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::index::INDEX_FILE;
use crate::new_file::NewFile;
use crate::printable::{is_printable, printable};
use crate::shard_file::open_regular;
use crate::small_file::read_small;
use crate::{Checkpoint, ShardError};

use super::config::rewrite;
use super::error::RepackError;
use super::plan::Plan;
use super::recipe::Naming;
use super::source_id::SourceFile;
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

/// A file of the result beside its shards.
pub(super) struct Extra {
    pub(super) name: String,
    pub(super) len: u64,
    pub(super) hash: blake3::Hash,
    content: Content,
}

enum Content {
    /// Made from the source's config.
    Made(Vec<u8>),
    /// A file of the source, of whatever size.
    Copied(PathBuf),
}

/// The files beside the shards of a source, and those of the result.
pub(super) struct Extras {
    /// Those that the result depends on, as they are in the source, by name.
    pub(super) sources: Vec<SourceFile>,
    /// As they will be in the result, by name.
    pub(super) outputs: Vec<Extra>,
    /// Files of the source that are not taken over.
    pub(super) left_out: Vec<String>,
    /// What a user should hear of them.
    pub(super) notes: Vec<String>,
}

impl Extras {
    /// Reads them all, in pieces.
    pub(super) fn new(source: &Checkpoint, plan: &Plan) -> Result<Self, RepackError> {
        let dir = source.dir();
        let (mut outputs, mut left_out, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        for item in fs::read_dir(dir).map_err(RepackError::io("list", dir))? {
            let item = item.map_err(RepackError::io("list", dir))?;
            let name = item.file_name();
            let Some(name) = name.to_str() else {
                let shown = printable(&name.to_string_lossy()).into_owned();
                notes.push(format!(
                    "`{shown}` of the source is not taken over, because its name is not UTF-8: if the model needs it, copy \
                     it by hand"
                ));
                left_out.push(shown);
                continue;
            };
            let is_shard = source.shards().files().iter().any(|file| file.name == name);
            if is_shard || REPLACED[..4].contains(&name) {
                continue;
            }
            // Follows links: a file of a cached download is one.
            let path = item.path();
            if is_copied(name) && fs::metadata(&path).is_ok_and(|m| m.is_file()) {
                let (len, hash) = read_through(&path, &mut |_| Ok(()))?;
                outputs.push(Extra { name: name.to_owned(), len, hash, content: Content::Copied(path) });
            } else {
                left_out.push(printable(name).into_owned());
            }
        }
        let path = dir.join(CONFIG_FILE);
        let config = read_small(&path)?;
        let source_file = |name: &str, len, hash: blake3::Hash| SourceFile {
            name: name.to_owned(),
            len,
            blake3: hash.to_hex().to_string(),
        };
        let mut sources: Vec<SourceFile> =
            outputs.iter().map(|file: &Extra| source_file(&file.name, file.len, file.hash)).collect();
        sources.push(source_file(CONFIG_FILE, config.len() as u64, blake3::hash(&config)));
        let made = |name: &str, bytes: Vec<u8>| {
            let (len, hash) = (bytes.len() as u64, blake3::hash(&bytes));
            Extra { name: name.to_owned(), len, hash, content: Content::Made(bytes) }
        };
        let rewritten = rewrite(&config, plan, source.config())
            .map_err(|message| RepackError::Config { path, message })?;
        outputs.push(made(CONFIG_FILE, rewritten.config));
        if plan.recipe.experts == ExpertTarget::Nvfp4 && plan.recipe.names == Naming::ModelOpt {
            outputs.push(made(MODELOPT_FILE, rewritten.hf_quant_config));
        }
        outputs.sort_by(|a, b| a.name.cmp(&b.name));
        sources.sort_by(|a, b| a.name.cmp(&b.name));
        left_out.sort_unstable();
        notes.sort_unstable();
        Ok(Self { sources, outputs, left_out, notes })
    }
}

impl Extra {
    /// Writes it into the tree `dir`.
    pub(super) fn write(&self, dir: &Path) -> Result<(), RepackError> {
        let mut file = NewFile::create(&dir.join(&self.name))?;
        match &self.content {
            Content::Made(bytes) => file.write(bytes)?,
            Content::Copied(path) => {
                let found = read_through(path, &mut |piece| file.write(piece))?;
                if found != (self.len, self.hash) {
                    let what = format!("`{}` has other contents now", self.name);
                    return Err(RepackError::SourceModified { dir: dir.to_owned(), what });
                }
            }
        }
        Ok(file.commit()?)
    }
}

/// Hands a regular file to `take`, piece by piece, and returns its length and hash.
fn read_through(
    path: &Path,
    take: &mut dyn FnMut(&[u8]) -> Result<(), ShardError>,
) -> Result<(u64, blake3::Hash), RepackError> {
    let (mut file, _): (File, _) = open_regular(path)?;
    let (mut piece, mut len, mut hasher) = (vec![0; 1 << 20], 0, blake3::Hasher::new());
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok((len, hasher.finalize())),
            Ok(n) => {
                hasher.update(&piece[..n]);
                take(&piece[..n])?;
                len += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(RepackError::io("read", path)(e)),
        }
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
