//! `cargo xtask synth`: a random but complete checkpoint of either variant, at any size.
//!
//! The values are random, everything else is as in the release: names, shapes, dtypes, shards, the order of tensors in
//! them, config (`docs/checkpoint.md` 1 to 5, 9). Weights are scaled so that activations keep unit scale through all
//! layers, so routers, indexers and samplers choose among many instead of collapsing. The same geometry, seed and
//! options give the same bytes.

mod config;
mod fill;
mod geometry;
mod layout;
mod tokenizer;
mod write;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;
use indicatif::DecimalBytes;
use k3_format::Variant;

use crate::output::say;

pub use geometry::Geometry;
pub use write::{Progress, Summary, SynthOptions, write};

/// Arguments of `cargo xtask synth`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask synth /tmp/tiny --geometry tiny
      a few MB, to look at the layout or to test a loader
  cargo xtask synth /data/bench --geometry bench --variant k3
      3 GB with the released head sizes, what the benchmarks use
  cargo xtask synth /data/k31-5 --geometry k31 --layers 5
      the first five layers at the released sizes, 75 GB
  cargo xtask synth /tmp/names --geometry k31 --sparse
      all 93 layers as headers, index and holes: opens like the release, reads as
      zeros, needs about 130 MB

The directory must be new or empty. The index is written last, so an interrupted run
is never mistaken for a checkpoint; delete it and start again. The same arguments give
the same bytes.")]
pub struct Args {
    /// Directory to write to; new or empty
    pub dir: PathBuf,
    /// Sizes of the model
    #[arg(long, value_enum)]
    pub geometry: GeometryName,
    /// Variant of `tiny` and `bench` [default: k31]; the released geometries name theirs
    #[arg(long, value_enum)]
    pub variant: Option<VariantName>,
    /// Keep the first N decoder layers; the last of them becomes full attention
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Routed experts of a layer; experts per token stay as they are
    #[arg(long, value_name = "N")]
    pub experts: Option<usize>,
    /// Take the vocabulary of this folder (tiktoken.model, tokenizer_config.json) and copy it beside the weights, so
    /// that conversations can be run
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Seed of the random values
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write headers, configs and index only, and leave the weights as holes that read as zeros
    #[arg(long)]
    pub sparse: bool,
}

/// `--geometry`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GeometryName {
    /// A few MB: 13 layers, hidden 128, 16 experts top-4
    Tiny,
    /// 3 GB: 13 layers, hidden 2048, released head sizes, 96 experts top-16
    Bench,
    /// Kimi K3 as released: 93 layers, 1.56 TB
    K3,
    /// Kimi K3.1 Pro as released: 93 layers, 1.56 TB
    K31,
}

/// `--variant`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VariantName {
    /// Kimi K3
    K3,
    /// Kimi K3.1 Pro
    K31,
}

impl Args {
    /// The geometry that these arguments ask for, checked.
    pub fn geometry(&self) -> Result<Geometry> {
        let variant = self.variant.map(|name| match name {
            VariantName::K3 => Variant::K3,
            VariantName::K31 => Variant::K31,
        });
        let mut geometry = match self.geometry {
            GeometryName::Tiny => Geometry::tiny(variant.unwrap_or(Variant::K31)),
            GeometryName::Bench => Geometry::bench(variant.unwrap_or(Variant::K31)),
            GeometryName::K3 => Geometry::released(Variant::K3),
            GeometryName::K31 => Geometry::released(Variant::K31),
        };
        if let Some(variant) = variant
            && variant != geometry.variant()
        {
            bail!("--geometry names {}, --variant names {variant}; leave --variant out", geometry.variant());
        }
        if let Some(layers) = self.layers {
            geometry = geometry.with_layers(layers)?;
        }
        if let Some(experts) = self.experts {
            geometry = geometry.with_experts(experts);
        }
        if let Some(dir) = &self.tokenizer {
            tokenizer::adopt(dir, &mut geometry.model)?;
        }
        geometry.check()?;
        Ok(geometry)
    }
}

/// Runs `cargo xtask synth`.
pub fn run(args: &Args) -> Result<()> {
    let geometry = args.geometry()?;
    let options = SynthOptions { seed: args.seed, sparse: args.sparse };
    let plan = write::plan(&geometry)?;
    say(format_args!(
        "{}, {} layers, {} experts a layer: {} tensors, {} of weights in {} shards{}",
        geometry.variant(),
        geometry.model.layers.len(),
        geometry.model.moe.num_experts,
        plan.tensors,
        DecimalBytes(plan.data_bytes),
        plan.shards,
        if args.sparse { ", as holes" } else { "" },
    ))?;
    let mut shown = crate::progress::Progress::bytes("writing", plan.data_bytes);
    let summary = write(&args.dir, &geometry, &options, &mut |progress| shown.set(progress.bytes_done))?;
    drop(shown);
    if let Some(tokenizer) = &args.tokenizer {
        tokenizer::copy(tokenizer, &args.dir)?;
    }
    say(format_args!("wrote {} ({} in files)", args.dir.display(), DecimalBytes(summary.file_bytes)))
}
