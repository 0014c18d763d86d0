//! A snapshot directory, opened and checked: the one way in for everything that reads weights.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use k3_quant::Matrix;
use safetensors::Dtype;
use serde_json::Value;

use crate::config::{ConfigFile, ExpertFormat};
use crate::directory::{check_directory, inventory};
use crate::error::{Error, TensorErrors};
use crate::experts::{ExpertLocation, ExpertMatrices, Experts};
use crate::generation_config::GenerationConfig;
use crate::identity::CheckpointId;
use crate::indexer::IndexerResolution;
use crate::linear::{self, LinearFormat, StoredLinear};
use crate::names::{Extent, IndexerNames, Names};
use crate::read::Buffer;
use crate::shard_error::ShardError;
use crate::shards::{Shards, TensorInfo};
use crate::small_file::read_json;
use crate::tensor_check::{check, load_vector};
use crate::values::first_not_finite;
use crate::warning::Warning;
use crate::{ModelConfig, Role, TensorId, Variant};

/// How matrices outside the routed experts get into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Whole, with large reads. Safe against files that change, and fast on network volumes. Values that are not
    /// finite are refused.
    #[default]
    Read,
    /// Mapped: no copy, but each first touch of a page is a small read. The caller promises that no process truncates
    /// the files or writes to them in place while the checkpoint or anything read from it is in use
    /// ([`Shards::map`]); replacing a file by rename is fine. Values are not looked at, since that would read all of
    /// them: an infinity or NaN in a matrix may go unnoticed where a sigmoid or tanh follows.
    Map,
}

/// Choices of a caller of [`Checkpoint::open`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Names of the indexer tensors, if they are not those of the table.
    pub indexer_names: Option<IndexerNames>,
    /// How matrices outside the routed experts are loaded.
    pub load: LoadMode,
}

impl OpenOptions {
    /// The same, with these names for the indexer tensors.
    #[must_use]
    pub fn indexer_names(mut self, names: IndexerNames) -> Self {
        self.indexer_names = Some(names);
        self
    }

    /// The same, with matrices loaded in this way.
    #[must_use]
    pub fn load(mut self, load: LoadMode) -> Self {
        self.load = load;
        self
    }
}

/// A Kimi K3 or Kimi K3.1 Pro snapshot whose config, variant and tensors agree (`docs/checkpoint.md` 10).
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    variant: Variant,
    generation: GenerationConfig,
    shards: Shards,
    names: Names,
    indexer: Option<IndexerResolution>,
    experts: Experts,
    linears: HashMap<TensorId, StoredLinear>,
    id: CheckpointId,
    warnings: Vec<Warning>,
    load: LoadMode,
    other_bytes: u64,
}

impl Checkpoint {
    /// Opens the snapshot in `dir` and checks everything that can be checked without reading large tensors: the
    /// config, the shards against the index, the variant gate, every tensor's presence, dtype and shape, the layout
    /// of every routed expert, and the values of small tensors.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Shards`], [`Error::Gate`] or [`Error::Tensors`], each with all that is wrong.
    pub fn open(dir: &Path, options: &OpenOptions) -> Result<Self, Error> {
        if let Some(names) = &options.indexer_names {
            names.check()?;
        }
        check_directory(dir)?;
        let config_file = dir.join("config.json");
        let Some(json) = read_optional(&config_file)? else {
            // A wrong path or an unfinished download has a better explanation than one absent file.
            Shards::open(dir)?;
            return Err(Error::NoConfig { dir: dir.to_owned(), found: inventory(dir)? });
        };
        let file = ConfigFile::check(&json, &config_file)?;
        let generation_file = dir.join("generation_config.json");
        let generation = match read_optional(&generation_file)? {
            Some(json) => GenerationConfig::check(&json, file.model.vocab_size, &generation_file)?,
            None => GenerationConfig::default(),
        };
        let shards = Shards::open(dir)?;
        let opened = check(file, options.indexer_names.as_ref(), &shards)?;
        let indexer_names = opened.indexer.as_ref().map(|resolution| &resolution.names);
        let id =
            CheckpointId::new(&opened.config, opened.variant, shards.files(), indexer_names, opened.values);
        Ok(Self {
            dir: dir.to_owned(),
            config: opened.config,
            variant: opened.variant,
            generation,
            names: opened.names,
            indexer: opened.indexer,
            experts: opened.experts,
            linears: opened.linears,
            id,
            warnings: opened.warnings,
            load: options.load,
            other_bytes: opened.table_bytes,
            shards,
        })
    }

    /// The snapshot directory, as given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The language model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Which model it is.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// What tells this checkpoint from others, wherever it lies and however it is loaded; see [`CheckpointId`] for
    /// what it covers.
    pub fn identity(&self) -> CheckpointId {
        self.id
    }

    /// Stop tokens and sampling defaults beside `config.json`.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    /// What a user should hear once.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The files.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The routed experts: where they are and how they are stored.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// How the routed experts are stored.
    pub fn expert_format(&self) -> ExpertFormat {
        self.experts.layout().format
    }

    /// The indexer tensors' names and how they were found; `None` for Kimi K3.
    pub fn indexer_names(&self) -> Option<&IndexerResolution> {
        self.indexer.as_ref()
    }

    /// The table of names in use.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Bytes of the language model without routed experts.
    pub fn resident_bytes(&self) -> u64 {
        self.other_bytes
    }

    /// How a matrix outside the routed experts is stored, if it is quantized.
    pub fn linear_format(&self, id: TensorId) -> Option<LinearFormat> {
        self.linears.get(&id).map(|stored| stored.format)
    }

    /// How many matrices outside the routed experts are stored in each quantized format, and their bytes.
    pub fn linear_formats(&self) -> BTreeMap<LinearFormat, (usize, u64)> {
        let mut formats = BTreeMap::new();
        for stored in self.linears.values() {
            let (count, bytes) = formats.entry(stored.format).or_default();
            *count += 1;
            *bytes += stored.bytes;
        }
        formats
    }

    /// A tensor of the language model: name, dtype, shape and place. Of a quantized matrix, that of its codes.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, id: TensorId) -> Result<TensorInfo<'_>, Error> {
        Ok(self.find(id)?.1)
    }

    fn find(&self, id: TensorId) -> Result<(Extent, TensorInfo<'_>), Error> {
        let unknown = || Error::NoSuchTensor { id };
        let entry = self.names.find(&self.config, id).ok_or_else(unknown)?;
        let extent = entry.extent(&self.config);
        let name = match (self.linears.get(&id), extent) {
            (Some(stored), Extent::Matrix(rows, cols)) => {
                let module = self.names.module(entry, id.layer);
                stored.format.tensors(&module, rows, cols).swap_remove(0).name
            }
            _ => self.names.name(entry, id.layer),
        };
        let tensor = self.shards.get(&name).ok_or_else(unknown)?;
        Ok((extent, tensor))
    }

    /// A weight matrix `[out, in]`, in the type it is stored in.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], [`Error::WrongKind`] for a vector, [`Error::Shards`], and with [`LoadMode::Read`]
    /// [`Error::NotFinite`] for an infinity or NaN in any matrix but [`Role::EmbedTokens`], [`Error::BadScale`] for one
    /// in the scales of a quantized matrix.
    pub fn matrix(&self, id: TensorId) -> Result<Matrix, Error> {
        let (extent, tensor) = self.find(id)?;
        let Extent::Matrix(rows, cols) = extent else { return Err(Error::WrongKind { id, asked: "matrix" }) };
        if let Some(stored) = self.linears.get(&id) {
            let module = tensor.name.rsplit_once('.').map_or(tensor.name, |(module, _)| module);
            return linear::load(&self.shards, self.load, module, (rows, cols), stored);
        }
        let bytes = match self.load {
            LoadMode::Read => self.shards.read(&tensor)?,
            LoadMode::Map => self.shards.map(&tensor)?,
        };
        // Sigmoid and tanh turn an infinity into an ordinary number, so later is too late. Rows of the embedding
        // whose ids no text has may hold anything; a row that is used is checked by the sequence that uses it.
        if self.load == LoadMode::Read
            && id.role != Role::EmbedTokens
            && let Some((at, value)) = first_not_finite(tensor.dtype, &bytes)
        {
            return Err(Error::NotFinite {
                name: tensor.name.to_owned(),
                file: self.shards.files()[tensor.shard].path.clone(),
                row: at / cols,
                column: at % cols,
                value,
            });
        }
        let matrix = match tensor.dtype {
            Dtype::F32 => Matrix::f32(rows, cols, bytes),
            _ => Matrix::bf16(rows, cols, bytes),
        };
        matrix.map_err(|source| Error::Matrix { name: tensor.name.to_owned(), source })
    }

    /// Everything that is not a matrix, as f32: norms, biases, the taps of a convolution `[channels * taps]`,
    /// `A_log` cut to its heads, the row of an AttnRes projection.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], [`Error::WrongKind`] for a matrix, [`Error::Shards`], [`Error::Tensors`] for values
    /// that are not finite, or not zero where they must be.
    pub fn vector(&self, id: TensorId) -> Result<Vec<f32>, Error> {
        let (extent, tensor) = self.find(id)?;
        if matches!(extent, Extent::Matrix(..)) {
            return Err(Error::WrongKind { id, asked: "vector" });
        }
        let mut errors = TensorErrors::default();
        match load_vector(&self.shards, &tensor, extent, &mut errors)? {
            Some(values) => Ok(values),
            None => Err(errors.into()),
        }
    }

    /// A routed expert, mapped in every [`LoadMode`]: nothing is copied, and pages are read as they are touched.
    ///
    /// The caller promises that no process truncates the shard or writes to it in place while it is mapped, which is
    /// until the checkpoint and all matrices from here are dropped ([`Shards::map`]). Where that cannot be promised,
    /// use [`Checkpoint::read_expert`].
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`], [`Error::Shards`].
    pub fn expert(&self, layer: usize, expert: u32) -> Result<ExpertMatrices, Error> {
        let layout = self.experts.layout();
        match self.experts.location(layer, expert)? {
            ExpertLocation::Run { shard, begin } => {
                let run = self.shards.map_range(shard, begin, begin + layout.len as u64)?;
                self.experts.matrices(layer, expert, &run)
            }
            ExpertLocation::Scattered(parts) => {
                let mut bytes: [Bytes; 6] = Default::default();
                for ((bytes, part), range) in bytes.iter_mut().zip(parts).zip(&layout.parts) {
                    let end = part.begin + range.len() as u64;
                    *bytes = self.shards.map_range(part.shard as usize, part.begin, end)?;
                }
                self.experts.matrices_of(layer, expert, bytes)
            }
        }
    }

    /// Tells the kernel that a routed expert will be read soon ([`Shards::will_need`]).
    pub fn will_need_expert(&self, layer: usize, expert: u32) {
        let layout = self.experts.layout();
        match self.experts.location(layer, expert) {
            Ok(ExpertLocation::Run { shard, begin }) => {
                self.shards.will_need(shard, begin, begin + layout.len as u64);
            }
            Ok(ExpertLocation::Scattered(parts)) => {
                for (part, range) in parts.iter().zip(&layout.parts) {
                    self.shards.will_need(part.shard as usize, part.begin, part.begin + range.len() as u64);
                }
            }
            // Asking for it is what fails.
            Err(_) => {}
        }
    }

    /// Reads a routed expert into `run`, in the order of [`crate::ExpertLayout::parts`] however it is stored. Give
    /// the bytes to [`Experts::matrices`] for its matrices.
    ///
    /// # Errors
    /// [`Error::NoSuchExpert`], [`Error::ExpertBuffer`] if `run` is not [`crate::ExpertLayout::len`] bytes long,
    /// [`Error::Shards`].
    pub fn read_expert_into(&self, layer: usize, expert: u32, run: &mut [u8]) -> Result<(), Error> {
        self.experts.check_buffer(layer, expert, run.len())?;
        match self.experts.location(layer, expert)? {
            ExpertLocation::Run { shard, begin } => self.shards.read_range(shard, begin, run)?,
            ExpertLocation::Scattered(parts) => {
                for (part, range) in parts.iter().zip(&self.experts.layout().parts) {
                    self.shards.read_range(part.shard as usize, part.begin, &mut run[range.clone()])?;
                }
            }
        }
        Ok(())
    }

    /// A routed expert, read into memory of its own.
    ///
    /// # Errors
    /// As [`Checkpoint::read_expert_into`], and [`ShardError::NoMemory`].
    pub fn read_expert(&self, layer: usize, expert: u32) -> Result<ExpertMatrices, Error> {
        let len = self.experts.layout().len;
        let shard = match self.experts.location(layer, expert)? {
            ExpertLocation::Run { shard, .. } => shard,
            ExpertLocation::Scattered(parts) => parts[0].shard as usize,
        };
        let mut run = Buffer::zeroed(len).map_err(|e| {
            let what = format!("routed expert {expert} of layer {layer}");
            ShardError::no_memory(&self.shards.files()[shard].path, &what, len as u64, e)
        })?;
        self.read_expert_into(layer, expert, run.as_mut())?;
        self.experts.matrices(layer, expert, &run.freeze())
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} layers, {} tensors in {} shards, {} bytes of {} experts ({}), {} bytes of other weights",
            self.variant,
            self.config.num_hidden_layers(),
            self.shards.len(),
            self.shards.files().len(),
            self.experts.size_bytes(),
            self.experts.len(),
            self.expert_format(),
            self.other_bytes
        )
    }
}

/// A small JSON file; `None` if there is none.
fn read_optional(file: &Path) -> Result<Option<Value>, Error> {
    // A dangling link is a file that should be there.
    if matches!(file.symlink_metadata(), Err(e) if e.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    read_json(file).map(Some)
}
