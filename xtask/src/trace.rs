//! `cargo xtask trace`: everything that happens inside the model for a prompt, into one file that selfcheck reads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::HumanBytes;
use k3_graph::Device;

use crate::OpenArgs;
use crate::expect::{
    FILES, Injection, Sizes, Tensor, Tensors, Wanted, fits_context, read_tensors, record, refuse_existing,
    write_tensors,
};
use crate::open::{ignores_indexer, quoted, variant};
use crate::output::say;
use crate::progress::Progress;
use crate::selfcheck::DeviceName;

/// Tokens after the prompt, where the context has room for them.
const CONTINUATION: usize = 16;

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
    /// Prompt: token ids, separated by commas [default: `input_ids` of --inject]
    #[arg(long, value_name = "IDS", value_delimiter = ',', required_unless_present_any = ["ids_file", "inject"])]
    pub ids: Vec<u32>,
    /// Prompt: a file of token ids, separated by commas, white space or brackets
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    pub ids_file: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "it would replace the description of the command")]
    pub open: OpenArgs,
    /// A safetensors file with `attn_in` or `mlp_in` [layers, tokens, hidden] to use as the sublayers' inputs, and
    /// perhaps `input_ids`, the prompt they are of
    #[arg(long, value_name = "FILE")]
    pub inject: Option<PathBuf>,
    /// Tokens of the greedy continuation [default: 16, or what fits the context; none with --inject]
    #[arg(long, value_name = "N")]
    pub greedy: Option<usize>,
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
    let is_safetensors = args.out.extension().is_some_and(|e| e == "safetensors");
    ensure!(is_safetensors, "--out {}: the name has to end in .safetensors", args.out.display());
    refuse_existing(&args.out, args.force)?;
    refuse_checkpoint(&args.out, &args.model)?;
    let continued = args.greedy.filter(|&n| n > 0 && args.inject.is_some());
    if let Some(n) = continued {
        bail!(
            "--greedy {n}: there is nothing to inject into tokens after the prompt; leave it or --inject out"
        );
    }
    let tensors = match args.device {
        DeviceName::Cpu => trace(args, k3_graph::Cpu::new(args.threads)?)?,
        DeviceName::Reference => trace(args, k3_graph::Reference)?,
    };
    let made_by = format!("k3 trace {}, device {:?}", env!("CARGO_PKG_VERSION"), args.device).to_lowercase();
    write_tensors(&args.out, &tensors, &made_by, args.force)?;
    let bytes = std::fs::metadata(&args.out).map_or(0, |m| m.len());
    say(format_args!("wrote {}: {} tensors, {}", args.out.display(), tensors.len(), HumanBytes(bytes)))?;
    say(format_args!(
        "next: cargo xtask selfcheck --model {}{} --expect {}",
        quoted(&args.model),
        args.open.again(),
        quoted(&args.out)
    ))
}

fn trace<D: Device>(args: &Args, device: D) -> Result<Tensors> {
    let injected = args.inject.as_deref().map(read_tensors).transpose()?;
    let prompt = prompt(args, injected.as_ref())?;
    let engine = args.open.open(&args.model, device)?;
    let config = engine.model().config().clone();
    let room = config.max_position_embeddings.saturating_sub(prompt.len());
    let continuation = match (args.greedy, &args.inject) {
        (_, Some(_)) => 0,
        (Some(asked), None) => asked,
        (None, None) => CONTINUATION.min(room),
    };
    let ignore_indexer = ignores_indexer(&engine);
    let sizes = Sizes {
        layers: engine.model().num_layers(),
        tokens: prompt.len(),
        continuation,
        ignore_indexer,
        config,
    };
    fits_context(&sizes)?;
    let injection = match injected {
        Some(tensors) => Injection::new(tensors.get("attn_in"), tensors.get("mlp_in"), &sizes)
            .with_context(|| injecting(args))?,
        None => Injection::default(),
    };
    let passes = prompt.len().div_ceil(engine.chunk_tokens()) + continuation;
    let mut progress = Progress::steps("tracing", passes * sizes.layers);
    let wanted = Wanted { all_positions: true, index_scores: true };
    let recording = record(&engine, &prompt, &sizes, wanted, injection, &mut || progress.step())?;
    drop(progress);
    say(format_args!(
        "{}: {}, {} of {} layers, {} prompt tokens, {continuation} after them; logits_hash {}{}",
        args.model.display(),
        variant(&engine),
        sizes.layers,
        sizes.config.num_hidden_layers(),
        prompt.len(),
        recording.logits_hash,
        engine.deviation(),
    ))?;
    Ok(recording.tensors)
}

fn injecting(args: &Args) -> String {
    format!("injecting {}", args.inject.as_deref().unwrap_or(Path::new("")).display())
}

/// The prompt that was given, or that of the tensors to inject; if there are both, they are the same.
fn prompt(args: &Args, injected: Option<&Tensors>) -> Result<Vec<u32>> {
    let of_inputs = match injected.and_then(|tensors| tensors.get("input_ids")) {
        Some(tensor) => Some(input_ids(tensor).with_context(|| injecting(args))?),
        None => None,
    };
    let given = match &args.ids_file {
        Some(path) => Some(ids_of_file(path)?),
        None => Some(args.ids.clone()).filter(|ids| !ids.is_empty()),
    };
    match (given, of_inputs) {
        (Some(given), Some(of_inputs)) if given != of_inputs => {
            let at = given.iter().zip(&of_inputs).take_while(|(a, b)| a == b).count();
            let text = |ids: &[u32]| ids.get(at).map_or_else(|| "the end".to_owned(), u32::to_string);
            bail!(
                "the prompt is not the `input_ids` that the inputs in {} are of: at position {at} expected {}, found \
                 {}; leave --ids and --ids-file out to take theirs",
                args.inject.as_deref().unwrap_or(Path::new("")).display(),
                text(&of_inputs),
                text(&given),
            )
        }
        (Some(ids), _) | (None, Some(ids)) => Ok(ids),
        (None, None) if injected.is_some() => {
            bail!(
                "there is no prompt: --inject has no tensor `input_ids`, so give it with --ids or --ids-file"
            )
        }
        (None, None) => bail!("--ids names no token id"),
    }
}

/// Token ids of a tensor `input_ids`.
fn input_ids(tensor: &Tensor) -> Result<Vec<u32>> {
    let ids = tensor.as_i32().filter(|ids| tensor.shape.len() == 1 && !ids.is_empty()).ok_or_else(|| {
        let (dtype, shape) = (tensor.dtype(), &tensor.shape);
        anyhow!("tensor `input_ids`: expected I32 [tokens], one or more, found {dtype:?} {shape:?}")
    })?;
    let id = |&id| u32::try_from(id).map_err(|_| anyhow!("tensor `input_ids`: {id} is no token id"));
    ids.iter().map(id).collect()
}

fn ids_of_file(path: &Path) -> Result<Vec<u32>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
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

/// A checkpoint is only read: its folder, and every folder that one of its files really lies in.
fn refuse_checkpoint(out: &Path, model: &Path) -> Result<()> {
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = parent.canonicalize().with_context(|| format!("the folder of {}", out.display()))?;
    // A checkpoint that is not there is the business of opening it.
    let Ok(folder) = model.canonicalize() else { return Ok(()) };
    let Ok(entries) = fs::read_dir(&folder) else { return Ok(()) };
    if parent.starts_with(&folder) {
        bail!("{} lies in the checkpoint's folder, which is only read: write elsewhere", out.display());
    }
    for entry in entries {
        let entry = entry.with_context(|| format!("looking into the checkpoint {}", model.display()))?;
        // Expectations may come from anywhere, and are not what the checkpoint consists of.
        if FILES.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        if let Ok(file) = entry.path().canonicalize()
            && file.is_file()
            && file.parent() == Some(&parent)
        {
            bail!(
                "{} would lie beside {}, which is {} of the checkpoint and only read: write elsewhere",
                out.display(),
                file.display(),
                entry.file_name().display()
            );
        }
    }
    Ok(())
}
