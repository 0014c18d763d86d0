//! Reading expectations from the files of `docs/vectors.md`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use super::{Entry, Rule, Sizes, Tensor, Tensors, layout, read_tensors};

/// Names of the files in a folder.
const TENSORS: &str = "expected.safetensors";
const JSON: &str = "expected.json";
const TRACE: &str = "trace.safetensors";

/// Names that expectations have in a folder.
pub(crate) const FILES: [&str; 3] = [TENSORS, JSON, TRACE];

/// What a run should give.
#[derive(Clone, Debug)]
pub struct Expectations {
    /// Where they come from.
    pub files: Vec<PathBuf>,
    /// The tensors of all files.
    pub tensors: Tensors,
    /// `greedy` of the JSON file.
    pub json_greedy: Option<Vec<i32>>,
}

impl Expectations {
    /// Reads expectations from a folder that holds `expected.safetensors` or `expected.json`, or from such a file
    /// and those beside it: `X.safetensors` goes with `X.json`, and `expected.*` also with `trace.safetensors`.
    pub fn read(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        let (tensors, json) = if path.is_dir() {
            let (tensors, json) = (path.join(TENSORS), path.join(JSON));
            if !(is_there(&tensors)? | is_there(&json)?) {
                bail!(
                    "{} holds neither {TENSORS} nor {JSON}, one of which has the prompt (docs/vectors.md)",
                    path.display()
                );
            }
            (tensors, json)
        } else {
            match path.extension().and_then(|e| e.to_str()) {
                Some("json") => (path.with_extension("safetensors"), path.clone()),
                Some("safetensors") => (path.clone(), path.with_extension("json")),
                _ => bail!(
                    "{}: expectations are a .safetensors file, a .json file or a folder with {TENSORS} or {JSON}",
                    path.display()
                ),
            }
        };
        if !path.is_dir() && !is_there(&path)? {
            bail!("{}: no such file or folder with expectations", path.display());
        }
        let mut expectations = Self { files: Vec::new(), tensors: Tensors::new(), json_greedy: None };
        if is_there(&tensors)? {
            expectations.add_tensors(&tensors)?;
        }
        let trace = tensors.with_file_name(TRACE);
        if tensors.file_name().is_some_and(|name| name == TENSORS) && is_there(&trace)? {
            expectations.add_tensors(&trace)?;
        }
        if is_there(&json)? {
            expectations.add_json(&json)?;
        }
        ensure!(
            expectations.tensors.contains_key("input_ids"),
            "{}: there is no prompt: neither a tensor `input_ids` nor the key `prompt` of a .json file beside it",
            path.display()
        );
        Ok(expectations)
    }

    /// Expectations that a checkpoint carries in its own folder, if it has a file of one of the names.
    ///
    /// # Errors
    /// Those of [`Expectations::read`].
    pub fn beside(dir: &Path) -> Result<Option<Self>> {
        let there = FILES.map(|name| is_there(&dir.join(name)));
        let any = there.into_iter().try_fold(false, |any, there| there.map(|there| any | there))?;
        any.then(|| Self::read(dir)).transpose()
    }

    /// The expectations in a folder of many: those of every .safetensors file in it, by name, each with its name.
    ///
    /// # Errors
    /// Those of [`Expectations::read`], and a folder without such a file.
    pub fn read_each(dir: &Path) -> Result<Vec<(String, Self)>> {
        let listing = || format!("listing the expectations in {}", dir.display());
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir).with_context(listing)? {
            let path = entry.with_context(listing)?.path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                files.push(path);
            }
        }
        ensure!(
            !files.is_empty(),
            "{} holds neither {TENSORS} nor {JSON}, nor any other .safetensors file with expectations",
            dir.display()
        );
        files.sort();
        let name = |file: &Path| file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        files.iter().map(|file| Ok((name(file), Self::read(file)?))).collect()
    }

    fn add_tensors(&mut self, path: &Path) -> Result<()> {
        for (name, tensor) in read_tensors(path)? {
            if self.tensors.contains_key(&name) {
                bail!("tensor `{name}` is in {} and in {}", self.files_text(), path.display());
            }
            self.tensors.insert(name, tensor);
        }
        self.files.push(path.to_owned());
        Ok(())
    }

    fn add_json(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let json: Value =
            serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", path.display()))?;
        let ids = |key: &str| -> Result<Option<Vec<i32>>> {
            let Some(value) = json.get(key) else { return Ok(None) };
            let ids: Option<Vec<i32>> = value.as_array().and_then(|list| {
                list.iter().map(|id| id.as_i64().and_then(|id| i32::try_from(id).ok())).collect()
            });
            ids.map(Some).ok_or_else(|| anyhow!("{}: `{key}`: expected a list of token ids", path.display()))
        };
        if let Some(prompt) = ids("prompt")? {
            let tensor = Tensor::i32([prompt.len()], prompt);
            match self.tensors.get("input_ids") {
                None => {
                    self.tensors.insert("input_ids".to_owned(), tensor);
                }
                Some(found) if *found == tensor => {}
                Some(_) => bail!(
                    "the prompts of {} and {} differ: they are not of one run",
                    self.files_text(),
                    path.display()
                ),
            }
        }
        self.json_greedy = ids("greedy")?;
        self.files.push(path.to_owned());
        Ok(())
    }

    /// The files, for a message.
    pub fn files_text(&self) -> String {
        self.files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Tokens of the greedy continuation that something is expected of.
    pub fn continuation(&self) -> usize {
        let dim = |name: &str, at: usize| self.tensors.get(name).and_then(|t| t.shape.get(at)).copied();
        dim("greedy_ids", 0)
            .or_else(|| dim("greedy_logits", 0))
            .or_else(|| dim("cont_router_idx", 1))
            .or_else(|| dim("cont_index_sel", 1))
            .or_else(|| self.json_greedy.as_ref().map(Vec::len))
            .unwrap_or(0)
    }

    /// The prompt, once it is known to be token ids of a vocabulary of `vocab_size`.
    pub fn prompt(&self, vocab_size: usize) -> Result<Vec<u32>> {
        let wrong = |expected: String, found: String| {
            anyhow!("{}: tensor `input_ids`: expected {expected}, found {found}", self.files_text())
        };
        let tensor = &self.tensors["input_ids"];
        let ids = match tensor.as_i32() {
            Some(ids) if tensor.shape.len() == 1 && !ids.is_empty() => ids,
            _ => {
                let found = format!("{:?} {:?}", tensor.dtype(), tensor.shape);
                return Err(wrong("I32 [tokens], one or more".into(), found));
            }
        };
        let id = |(i, &id): (usize, &i32)| match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab_size => Ok(id),
            _ => Err(wrong(format!("token ids below {vocab_size}"), format!("{id} at {i}"))),
        };
        ids.iter().enumerate().map(id).collect()
    }

    /// Checks every tensor against the model. Returns the names that mean nothing for it.
    ///
    /// # Errors
    /// A known tensor of another type, shape or list of layers than the model has.
    pub fn validate(&self, sizes: &Sizes) -> Result<Vec<String>> {
        let table = layout(sizes);
        let mut unknown = Vec::new();
        for (name, tensor) in &self.tensors {
            match table.iter().find(|entry| entry.name == name) {
                Some(entry) => self.fits(entry, tensor, sizes)?,
                None => unknown.push(name.clone()),
            }
        }
        Ok(unknown)
    }

    fn fits(&self, entry: &Entry, tensor: &Tensor, sizes: &Sizes) -> Result<()> {
        let name = entry.name;
        if tensor.dtype() != entry.dtype() || !entry.admits(&tensor.shape) {
            bail!(
                "{}: tensor `{name}`: expected {:?} {:?} for {} layers, {} prompt tokens and {} after them, found \
                 {:?} {:?}: the file is of another model or another run, or damaged",
                self.files_text(),
                entry.dtype(),
                entry.shape,
                sizes.layers,
                sizes.tokens,
                sizes.continuation,
                tensor.dtype(),
                tensor.shape,
            );
        }
        if let (Rule::LayerList(axis), Some(found)) = (entry.rule, tensor.as_i32()) {
            let expected: Vec<i32> = sizes.layers_on(axis).iter().map(|&l| l as i32).collect();
            ensure!(
                found == expected,
                "{}: tensor `{name}`: expected layers {expected:?} of this model, found {found:?}",
                self.files_text()
            );
        }
        Ok(())
    }
}

/// Whether there is a file of this name.
///
/// # Errors
/// Something else has the name: it would be passed over, or, as a pipe, be read for ever.
fn is_there(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => {
            bail!("{} is not a regular file, so its expectations cannot be read: remove it", path.display())
        }
        Err(_) if path.is_symlink() => {
            bail!("{} is a link that leads to no readable file: mend or remove it", path.display())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("looking for {}", path.display())),
    }
}
