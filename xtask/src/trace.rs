//! `cargo xtask trace`: everything that happens inside the model for a prompt, into one file that selfcheck reads.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::HumanBytes;
use k3_graph::Device;

use crate::OpenArgs;
use crate::expect::{
    Injection, Sizes, Tensors, Wanted, fits_context, read_tensors, record, refuse_existing, write_tensors,
};
use crate::open::{ignores_indexer, quoted, variant};
use crate::progress::Progress;
use crate::selfcheck::DeviceName;

/// Arguments of `cargo xtask trace`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask trace --model /models/kimi-k3 --ids 1,2,3 --out run.safetensors
      logits, choices, states, and every sublayer's input and output
  cargo xtask trace --model /models/kimi-k3 --layers 4 --ids-file prompt.txt --out four.safetensors
      the first four layers only
  cargo xtask trace --model DIR --ids 1,2,3 --inject other.safetensors --out ours.safetensors
      every sublayer fed with the inputs that another engine had: no error is inherited
  cargo xtask selfcheck --model DIR --expect run.safetensors
      compares a later run, on any device, with this one

The tensors are those of docs/vectors.md.")]
pub struct Args {
    /// Snapshot to run
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Prompt: token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required_unless_present = "ids_file")]
    pub ids: Vec<u32>,
    /// Prompt: a file of token ids, separated by commas, white space or brackets
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    pub ids_file: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "it would replace the description of the command")]
    pub open: OpenArgs,
    /// A safetensors file with `attn_in` or `mlp_in` [layers, tokens, hidden] to use as the sublayers' inputs
    #[arg(long, value_name = "FILE")]
    pub inject: Option<PathBuf>,
    /// Tokens of the greedy continuation; none with --inject
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub greedy: usize,
    /// What runs the model
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
    /// Threads of the CPU device; 0 is one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// File to write
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    refuse_existing(&args.out, args.force)?;
    refuse_inside(&args.out, &args.model)?;
    let tensors = match args.device {
        DeviceName::Cpu => trace(args, k3_graph::Cpu::new(args.threads)?)?,
        DeviceName::Reference => trace(args, k3_graph::Reference)?,
    };
    let made_by = format!("k3 trace {}, device {:?}", env!("CARGO_PKG_VERSION"), args.device).to_lowercase();
    write_tensors(&args.out, &tensors, &made_by, args.force)?;
    let bytes = std::fs::metadata(&args.out).map_or(0, |m| m.len());
    println!("wrote {}: {} tensors, {}", args.out.display(), tensors.len(), HumanBytes(bytes));
    println!(
        "next: cargo xtask selfcheck --model {}{} --expect {}",
        quoted(&args.model),
        args.open.again(),
        quoted(&args.out)
    );
    Ok(())
}

fn trace<D: Device>(args: &Args, device: D) -> Result<Tensors> {
    let prompt = prompt(args)?;
    let engine = args.open.open(&args.model, device)?;
    let config = engine.model().config().clone();
    let room = config.max_position_embeddings.saturating_sub(prompt.len());
    let continuation = if args.inject.is_some() { 0 } else { args.greedy.min(room) };
    let ignore_indexer = ignores_indexer(&engine);
    let sizes = Sizes {
        layers: engine.model().num_layers(),
        tokens: prompt.len(),
        continuation,
        ignore_indexer,
        config,
    };
    fits_context(&sizes)?;
    let injection = match &args.inject {
        Some(path) => {
            let tensors = read_tensors(path)?;
            Injection::new(tensors.get("attn_in"), tensors.get("mlp_in"), &sizes)
                .with_context(|| format!("injecting {}", path.display()))?
        }
        None => Injection::default(),
    };
    let passes = prompt.len().div_ceil(engine.chunk_tokens()) + continuation;
    let mut progress = Progress::steps("tracing", passes * sizes.layers);
    let wanted = Wanted { all_positions: true, index_scores: true };
    let recording = record(&engine, &prompt, &sizes, wanted, injection, &mut || progress.step())?;
    drop(progress);
    println!(
        "{}: {}, {} of {} layers, {} prompt tokens, {continuation} after them; logits_hash {}",
        args.model.display(),
        variant(&engine),
        sizes.layers,
        sizes.config.num_hidden_layers(),
        prompt.len(),
        recording.logits_hash,
    );
    Ok(recording.tensors)
}

fn prompt(args: &Args) -> Result<Vec<u32>> {
    let Some(path) = &args.ids_file else {
        ensure!(!args.ids.is_empty(), "--ids names no token id");
        return Ok(args.ids.clone());
    };
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let parts = text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']'));
    let ids = parts
        .filter(|part| !part.is_empty())
        .map(|part| {
            part.parse().map_err(|_| anyhow!("{}: expected a token id, found `{part}`", path.display()))
        })
        .collect::<Result<Vec<u32>>>()?;
    ensure!(!ids.is_empty(), "{}: there is no token id in it", path.display());
    Ok(ids)
}

/// A checkpoint's folder is only read, also through links.
fn refuse_inside(out: &Path, model: &Path) -> Result<()> {
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = parent.canonicalize().with_context(|| format!("the folder of {}", out.display()))?;
    if let Ok(model) = model.canonicalize()
        && parent.starts_with(&model)
    {
        bail!("{} lies in the checkpoint's folder, which is only read: write elsewhere", out.display());
    }
    Ok(())
}
