//! Which model runs, and how: what `k3 generate` and `k3 chat` share.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::ValueEnum;
use k3_format::{Checkpoint, GenerationConfig};
use k3_graph::{Device, LogitsWanted, Lookahead, ModelOptions};
use k3_runner::memory::{chunk_tokens, needs};
use k3_runner::{Engine, EngineOptions, OpenProgress, Sampling, check_vocabulary};
use k3_tokenizer::Tokenizer;

use crate::clock::Clock;
use crate::output::tell;
use crate::store::{Opened, StoreArgs, parse_bytes};

/// Headings in the help.
const SAMPLING: &str = "Sampling";
const MACHINE: &str = "Machine";

/// Arguments of every command that runs a model.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// The snapshot folder
    ///
    /// [default: fixtures/nano of this repository, a demonstration model]
    dir: Option<PathBuf>,
    /// The folder with tiktoken.model and tokenizer_config.json
    ///
    /// [default: the snapshot folder]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Tokens of a reply at most, reasoning included
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_tokens: usize,
    /// How evenly tokens are drawn; 0 takes the most likely one
    ///
    /// [default: generation_config.json, else 1; the demonstration model: 0]
    #[arg(long, value_name = "T", help_heading = SAMPLING, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all
    ///
    /// [default: generation_config.json, else 0]
    #[arg(long, value_name = "N", help_heading = SAMPLING)]
    top_k: Option<usize>,
    /// Keep the most likely tokens up to this sum of probabilities
    ///
    /// [default: generation_config.json, else 0.95]
    #[arg(long, value_name = "P", help_heading = SAMPLING, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely one's probability
    #[arg(long, value_name = "P", help_heading = SAMPLING, default_value_t = Sampling::default().min_p,
          allow_negative_numbers = true)]
    min_p: f32,
    /// The same seed draws the same tokens
    #[arg(long, value_name = "N", help_heading = SAMPLING, default_value_t = 0)]
    seed: u64,
    /// What computes
    #[arg(long, value_enum, help_heading = MACHINE, default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,
    /// Threads of the cpu device; 0 takes one a core
    #[arg(long, value_name = "N", help_heading = MACHINE, default_value_t = 0)]
    pub(crate) threads: usize,
    /// Bytes that the computation of a prompt may keep while it works
    ///
    /// The prompt is cut into as few chunks as that allows, each of which reads its experts once. No result depends on it.
    #[arg(long, value_name = "BYTES", help_heading = MACHINE, value_parser = parse_bytes, default_value = "2GiB",
          allow_hyphen_values = true, conflicts_with = "chunk")]
    activation_budget: u64,
    /// Tokens of the prompt that are computed at once, whatever they need; no result depends on it
    #[arg(long, value_name = "N", help_heading = MACHINE,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    chunk: Option<usize>,
    /// What the next layer's router is given early, to read experts ahead while decoding; no result depends on it
    ///
    /// [default: input; for direct and buffered stores]
    #[arg(long, value_enum, help_heading = MACHINE)]
    lookahead: Option<LookaheadName>,
    /// Run K3.1 without its indexer: past the indexer's budget, another function than it was trained for
    #[arg(long)]
    ignore_indexer: bool,
    /// Use of each token's experts only the first, up to this share of their weight, and read no others: faster, and
    /// another function than the model was trained for
    #[arg(long, value_name = "P", value_parser = share_of_weight, allow_hyphen_values = true)]
    routed_top_p: Option<f64>,
    // The heading goes on to whatever follows.
    #[command(flatten, next_help_heading = MACHINE)]
    store: StoreArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LookaheadName {
    /// Nothing: no expert is read before it is asked for
    Off,
    /// What this layer's experts get
    Input,
    /// The same, with the output of this layer's shared experts
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// Single precision on this machine's processor
    Cpu,
    /// The same with activations rounded to 8-bit integers where weights have 4 or 8 bits: faster, and not the arithmetic
    /// that the model was trained with
    CpuInt8,
    /// Double precision in plain loops: slow, for comparison
    Reference,
}

/// A checkpoint that is open, before its weights are loaded: loading can take long, and whatever can be refused without
/// them is refused before.
pub(crate) struct Snapshot {
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// It is the one of the repository, named or not.
    pub(crate) is_demonstration: bool,
    tokenizer: PathBuf,
    options: EngineOptions,
    store: StoreArgs,
    /// Lookahead was asked for.
    lookahead: bool,
    /// Once it is loaded. At the end of the run it notes which experts were used.
    opened: OnceCell<Opened>,
}

impl ModelArgs {
    /// Opens the snapshot, or the demonstration model, saying so.
    pub(crate) fn open(&self) -> Result<Snapshot> {
        let (dir, is_demonstration) = match &self.dir {
            Some(dir) => (dir.clone(), is_the_demonstration(dir)),
            None => (demonstration(&candidates())?, true),
        };
        let mut options = EngineOptions::default();
        options.activation_bytes = self.activation_budget;
        options.chunk_tokens = self.chunk;
        options.model = ModelOptions::default()
            .with_ignore_indexer(self.ignore_indexer)
            .with_routed_top_p(self.routed_top_p)
            .with_lookahead(match self.lookahead.unwrap_or(LookaheadName::Input) {
                LookaheadName::Off => Lookahead::Off,
                LookaheadName::Input => Lookahead::Input,
                LookaheadName::Shared => Lookahead::Shared,
            });
        let checkpoint = Arc::new(Checkpoint::open(&dir, &options.open)?);
        if is_demonstration {
            tell(format_args!(
                "demonstration model (nano), not Kimi: it looks up the weather and the time in a city, greets, and \
                 finds facts in a list; name a snapshot folder to run a model of yours\n"
            ));
        }
        if self.threads != 0 && self.device == DeviceName::Reference {
            tell(format_args!("note: --threads decides nothing: the reference device has one\n"));
        }
        if self.ignore_indexer && checkpoint.config().indexer.is_none() {
            tell(format_args!("note: --ignore-indexer decides nothing: this checkpoint has no indexer\n"));
        }
        let tokenizer = self.tokenizer.clone().unwrap_or(dir);
        let (store, opened) = (self.store.clone(), OnceCell::new());
        let lookahead = self.lookahead.is_some_and(|lookahead| lookahead != LookaheadName::Off);
        Ok(Snapshot { checkpoint, is_demonstration, tokenizer, options, store, lookahead, opened })
    }

    /// The file of uses that was named.
    pub(crate) fn usage(&self) -> Option<&Path> {
        self.store.usage()
    }

    /// Says which options decide nothing where the most likely token is taken.
    pub(crate) fn tell_unused(&self, sampling: &Sampling) {
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p != Sampling::default().min_p),
            ("--seed", self.seed != 0),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        let given: Vec<&str> = given.map(|(name, _)| name).filter(|_| sampling.temperature == 0.0).collect();
        if !given.is_empty() {
            tell(format_args!(
                "note: the temperature is 0, so the most likely token is taken whatever {} may be; --temperature raises it\n",
                given.join(", ")
            ));
        }
    }

    /// The checkpoint's values where the flags are silent, the vendor's recommendation where both are. The
    /// demonstration model has been made for the most likely token.
    pub(crate) fn sampling(&self, snapshot: &Snapshot) -> Sampling {
        let checkpoint: &GenerationConfig = snapshot.checkpoint.generation_config();
        let default = if snapshot.is_demonstration { Sampling::greedy() } else { Sampling::default() };
        Sampling {
            temperature: self
                .temperature
                .or(checkpoint.temperature.map(|t| t as f32))
                .unwrap_or(default.temperature),
            top_k: self.top_k.or(checkpoint.top_k.map(|k| k as usize)).unwrap_or(default.top_k),
            top_p: self.top_p.or(checkpoint.top_p.map(|p| p as f32)).unwrap_or(default.top_p),
            min_p: self.min_p,
            seed: self.seed,
        }
    }
}

impl Snapshot {
    /// The tokenizer, if its vocabulary is the model's.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        check_vocabulary(self.checkpoint.config(), &tokenizer)?;
        Ok(tokenizer)
    }

    /// Loads the weights, with progress, and says what runs. Memory is planned for a sequence of `context` tokens.
    pub(crate) fn load<D: Device>(
        &self,
        device: D,
        sampling: &Sampling,
        max_tokens: usize,
        context: usize,
    ) -> Result<Engine<D>> {
        for warning in self.checkpoint.warnings() {
            tell(format_args!("note: {warning}\n"));
        }
        let config = self.checkpoint.config();
        let context = context.min(config.max_position_embeddings) as u64;
        let chunk = chunk_tokens(config, &self.options, D::VALUE_BYTES, LogitsWanted::Last);
        let needs = needs(config, self.checkpoint.resident_bytes(), 1, context, chunk, &device);
        let opened = self.store.open(&self.checkpoint, needs)?;
        let mut unused = opened.unused.clone();
        unused.extend((self.lookahead && opened.is_mapped()).then_some("--lookahead"));
        if !unused.is_empty() {
            tell(format_args!(
                "note: the mapped store leaves experts to the page cache, which {} cannot change; --store direct or \
                 buffered can\n",
                unused.join(", ")
            ));
        }
        let store = opened.store();
        let mut clock = Clock::new();
        let engine =
            Engine::with_store(self.checkpoint.clone(), store, device, &self.options, &mut |progress| {
                if let OpenProgress::Loaded { layers, of } = progress {
                    clock.line("loading", layers, of);
                }
            })?;
        clock.clear();
        tell(format_args!("experts: {}\n", opened.description()));
        opened.warm();
        // Set once: a snapshot is loaded once.
        let _ = self.opened.set(opened);
        tell(format_args!(
            "{}{} on {}; temperature {}, top-k {}, top-p {}, min-p {}, seed {}, at most {max_tokens} tokens\n",
            self.checkpoint.variant(),
            engine.deviation(),
            engine.model().device().kind(),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
        ));
        Ok(engine)
    }
}

impl Snapshot {
    /// The store of what was loaded, and the memory plan.
    pub(crate) fn opened(&self) -> Option<&Opened> {
        self.opened.get()
    }
}

/// `--routed-top-p`
fn share_of_weight(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a share of a token's weight, above 0 and at most 1, as in 0.9".to_owned())
}

/// Where the demonstration model can be: in the sources that this program was built from, or in those that it is run in.
fn candidates() -> [PathBuf; 2] {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    [sources.join("fixtures/nano"), PathBuf::from("fixtures/nano")]
}

/// Whether a folder that was named is the demonstration model's.
fn is_the_demonstration(dir: &Path) -> bool {
    let real = |dir: &Path| dir.canonicalize().ok();
    real(dir).is_some_and(|named| candidates().iter().any(|known| real(known).as_ref() == Some(&named)))
}

fn demonstration(candidates: &[PathBuf]) -> Result<PathBuf> {
    match candidates.iter().find(|dir| dir.join("config.json").is_file()) {
        Some(dir) => Ok(dir.clone()),
        None => bail!(
            "no model was named, and the demonstration model is not there: name a snapshot folder, or run in a checkout of \
             the repository, whose fixtures/nano it is (looked for {})",
            candidates.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(" and ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demonstration_model_is_a_folder_with_a_config() {
        let root = tempfile::tempdir().unwrap();
        let [built, here] = ["built", "here"].map(|name| root.path().join(name));
        let both = [built.clone(), here.clone()];
        let error = demonstration(&both).unwrap_err().to_string();
        assert!(error.contains("name a snapshot folder") && error.contains("here"), "{error}");
        for dir in &both {
            std::fs::create_dir(dir).unwrap();
        }
        demonstration(&both).unwrap_err();
        std::fs::write(here.join("config.json"), "{}").unwrap();
        assert_eq!(demonstration(&both).unwrap(), here);
        std::fs::write(built.join("config.json"), "{}").unwrap();
        assert_eq!(demonstration(&both).unwrap(), built);
    }
}
