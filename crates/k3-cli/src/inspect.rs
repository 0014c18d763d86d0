//! `k3 inspect`: what a snapshot is, or why it would be refused.

use std::fmt::Write as _;
use std::io::{Write as _, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result};
use k3_experts::plan::gigabytes as bytes;
use k3_format::names::IndexerNames;
use k3_format::{AttentionKind, Checkpoint, ModelConfig, OpenOptions, Variant};
use k3_runner::memory::state_bytes;

/// Show what a snapshot is: variant and its evidence, layer map, sizes, formats
///
/// Opens it as strictly as a run would and touches no weights but small vectors, so it answers in seconds. What a
/// run would refuse, this refuses with the same error.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The snapshot folder
    dir: PathBuf,
    /// A JSON file with other names for the five indexer tensors of K3.1
    #[arg(long, value_name = "FILE")]
    indexer_names: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut options = OpenOptions::default();
    if let Some(file) = &args.indexer_names {
        options = options.indexer_names(IndexerNames::load(file).context("reading the indexer names")?);
    }
    let checkpoint = Checkpoint::open(&args.dir, &options)?;
    Ok(write!(stdout(), "{}", describe(&checkpoint))?)
}

fn describe(checkpoint: &Checkpoint) -> String {
    let c = checkpoint.config();
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<10} {value}");
    };
    line("model", format!("{} in {}", checkpoint.variant(), checkpoint.dir().display()));
    line("evidence", evidence(checkpoint));
    let shards = checkpoint.shards();
    line("files", format!("{} shards, {} tensors", shards.files().len(), shards.len()));
    line("identity", checkpoint.identity().to_string());
    line("layers", layers(c));
    line(
        "widths",
        format!(
            "hidden {}, vocabulary {}, context {}, AttnRes block {}, dense MLP {}",
            c.hidden_size,
            c.vocab_size,
            c.max_position_embeddings,
            c.attn_res_block_size,
            c.intermediate_size
        ),
    );
    line(
        "KDA",
        format!(
            "{} heads x {}, {} taps, log decay above {}",
            c.kda.num_heads, c.kda.head_dim, c.kda.short_conv_kernel_size, c.kda.gate_lower_bound
        ),
    );
    line(
        "MLA",
        format!(
            "{} heads, key {} + {}, value {}, query latent {}, key/value latent {}",
            c.mla.num_heads,
            c.mla.qk_nope_head_dim,
            c.mla.qk_rope_head_dim,
            c.mla.v_head_dim,
            c.mla.q_lora_rank,
            c.mla.kv_lora_rank
        ),
    );
    if let Some(i) = &c.indexer {
        line("indexer", format!("{} heads x {}, attends {} keys at most", i.n_heads, i.head_dim, i.topk));
    }
    if let Some(found) = checkpoint.indexer_names() {
        line("", found.to_string());
    }
    let experts = checkpoint.experts();
    line(
        "experts",
        format!(
            "{} a layer, {} a token, {} shared; {}, latent {}, inner {}, {} each{}",
            c.moe.num_experts,
            c.moe.num_experts_per_token,
            c.moe.num_shared_experts,
            checkpoint.expert_format(),
            c.moe.routed_expert_hidden_size,
            c.moe.moe_intermediate_size,
            bytes(experts.layout().len as u64),
            match experts.scattered() {
                0 => String::new(),
                n => format!("; {n} not in one piece"),
            }
        ),
    );
    line("pinned", pinned(checkpoint));
    let moe_layers = (0..c.num_hidden_layers()).filter(|&l| c.is_moe(l)).count();
    let per_token = (moe_layers * c.moe.num_experts_per_token * experts.layout().len) as u64;
    line(
        "bytes",
        format!(
            "{} of experts, {} pinned; a token reads {} of experts",
            bytes(experts.size_bytes()),
            bytes(checkpoint.resident_bytes()),
            bytes(per_token)
        ),
    );
    let (fixed, growing) = state_bytes(c);
    line("state", format!("{} a sequence, and {} a token", bytes(fixed), bytes(growing)));
    let ids = |ids: &[u32]| match ids {
        [] => "none".to_owned(),
        ids => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
    };
    line(
        "end ids",
        format!(
            "{} in config.json, {} in generation_config.json",
            ids(&c.tokens.eos),
            ids(&checkpoint.generation_config().eos)
        ),
    );
    for warning in checkpoint.warnings() {
        line("note", warning.to_string());
    }
    out
}

/// How the weights outside the routed experts are stored: quantized matrices by format, and the rest.
fn pinned(checkpoint: &Checkpoint) -> String {
    let formats = checkpoint.linear_formats();
    let quantized: u64 = formats.values().map(|(_, size)| size).sum();
    let rest = format!("{} of BF16 and F32", bytes(checkpoint.resident_bytes() - quantized));
    let formats =
        formats.iter().map(|(f, (count, size))| format!("{count} matrices of {f}, {}", bytes(*size)));
    formats.chain([rest]).collect::<Vec<_>>().join("; ")
}

/// The three markers of the variant gate; that they agree was checked on opening.
fn evidence(checkpoint: &Checkpoint) -> String {
    match (checkpoint.variant(), &checkpoint.config().indexer) {
        (Variant::K31, Some(_)) => {
            let full =
                checkpoint.config().layers.iter().filter(|k| **k == AttentionKind::FullAttention).count();
            format!("root model_type kimi_k31, text_config.dsa_config, {} indexer tensors", full * 5)
        }
        _ => "root model_type kimi_k3, no dsa_config, no indexer tensors".to_owned(),
    }
}

/// `13: KDA 1-3 5-7, full attention 4 8; dense 1, experts 2-13`, 1-based as in the config.
fn layers(c: &ModelConfig) -> String {
    let of =
        |f: &dyn Fn(usize) -> bool| ranges(&(0..c.num_hidden_layers()).filter(|&l| f(l)).collect::<Vec<_>>());
    format!(
        "{}: KDA {}; full attention {}; dense MLP {}; experts {} (1-based)",
        c.num_hidden_layers(),
        of(&|l| c.layers[l] == AttentionKind::Kda),
        of(&|l| c.layers[l] == AttentionKind::FullAttention),
        of(&|l| !c.is_moe(l)),
        of(&|l| c.is_moe(l)),
    )
}

/// Ascending 0-based numbers as 1-based runs.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => runs.push((n, n)),
        }
    }
    if runs.is_empty() {
        return "none".to_owned();
    }
    let run =
        |(a, b): &(usize, usize)| if a == b { format!("{}", a + 1) } else { format!("{}-{}", a + 1, b + 1) };
    runs.iter().map(run).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_layers() {
        let check = |numbers: &[usize], expected| assert_eq!(ranges(numbers), expected);
        check(&[], "none");
        check(&[0], "1");
        check(&[0, 1, 2, 4, 6, 7], "1-3 5 7-8");
    }

    /// `docs/checkpoint.md` 7, with the caches in f32, and 140 bytes a token for the 8-bit form of 24 layers' indexer keys.
    #[test]
    fn state_of_the_released_model() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs/kimi-k31.config.json");
        let value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let file = k3_format::ConfigFile::check(&value, path.as_ref()).unwrap();
        let mut config = file.model;
        config.indexer = Some(k3_format::IndexerConfig { n_heads: 32, head_dim: 128, topk: 2048 });
        assert_eq!(state_bytes(&config), (434_110_464 + 30_523_392, 2 * (27_648 + 6_144) + 24 * 140));
    }
}
