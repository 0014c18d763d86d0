//! Opening a checkpoint as the arguments of a command say.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use k3_format::{IndexerNames, LoadMode, Variant};
use k3_graph::{Device, ModelOptions};
use k3_runner::{Engine, EngineOptions, OpenProgress};

use crate::progress::Progress;

/// Arguments of every command that runs a checkpoint.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct OpenArgs {
    /// Load only the first layers; the output mix, norm and head follow the last of them. What is expected must be of
    /// as many
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// A JSON file with other names for the five indexer tensors of K3.1
    #[arg(long, value_name = "FILE")]
    pub indexer_names: Option<PathBuf>,
    /// Run K3.1 without its indexer: every token attends to all before it, as in K3. Another function than the model
    /// was trained for; what is expected of the indexer is skipped
    #[arg(long)]
    pub ignore_indexer: bool,
    /// Use of each token's experts only the first, up to this share of their weight: another function than the model
    /// was trained for, and than what is expected of it
    #[arg(long, value_name = "P")]
    pub routed_top_p: Option<f64>,
    /// How matrices outside the routed experts get into memory
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub load: LoadName,
}

/// `--load`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LoadName {
    /// Whole, with large reads
    #[default]
    Read,
    /// Mapped: no copy, read at first touch
    Map,
}

impl OpenArgs {
    /// Opens the snapshot in `dir`, with progress on stderr.
    pub(crate) fn open<D: Device>(&self, dir: &Path, device: D) -> Result<Engine<D>> {
        let mut options = EngineOptions::default();
        options.model = ModelOptions::default()
            .with_layers(self.layers)
            .with_ignore_indexer(self.ignore_indexer)
            .with_routed_top_p(self.routed_top_p);
        options.open.load = match self.load {
            LoadName::Read => LoadMode::Read,
            LoadName::Map => LoadMode::Map,
        };
        if let Some(file) = &self.indexer_names {
            options.open.indexer_names =
                Some(IndexerNames::load(file).context("reading the names of --indexer-names")?);
        }
        let mut progress: Option<Progress> = None;
        let engine = Engine::open(dir, device, &options, &mut |at| {
            if let OpenProgress::Loaded { layers, of } = at {
                progress.get_or_insert_with(|| Progress::steps("loading layers", of)).set(layers as u64);
            }
        })?;
        Ok(engine)
    }

    /// The same arguments, as they are typed again in a command that continues with this one.
    pub(crate) fn again(&self) -> String {
        let parts = [
            self.layers.map(|layers| format!(" --layers {layers}")),
            self.indexer_names.as_ref().map(|file| format!(" --indexer-names {}", quoted(file))),
            self.ignore_indexer.then(|| " --ignore-indexer".to_owned()),
            self.routed_top_p.map(|p| format!(" --routed-top-p {p}")),
            (self.load == LoadName::Map).then(|| " --load map".to_owned()),
        ];
        parts.into_iter().flatten().collect()
    }
}

/// Whether an indexer is there and does not run.
pub(crate) fn ignores_indexer<D: Device>(engine: &Engine<D>) -> bool {
    engine.checkpoint().variant() == Variant::K31 && engine.model().attends_as() == Variant::K3
}

/// The variant, and that its indexer does not run if that is so.
pub(crate) fn variant<D: Device>(engine: &Engine<D>) -> String {
    let variant = engine.checkpoint().variant();
    if ignores_indexer(engine) {
        format!("{variant} with its indexer IGNORED (attends as {})", engine.model().attends_as())
    } else {
        variant.to_string()
    }
}

/// A path as a shell takes it.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}
