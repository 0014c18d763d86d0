//! What a repack says before and after.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use indicatif::{BinaryBytes, DecimalBytes, HumanDuration};
use k3_format::Checkpoint;
use k3_format::repack::{Estimate, Exponents, Outcome, Proof, Refusals, Repack, Report, RunOptions};

use crate::open::quoted;
use crate::output::say;

pub(super) fn plan(source: &Checkpoint, repack: &Repack<'_>) -> Result<()> {
    let plan = repack.plan();
    say(format_args!("source {}: {source}", source.dir().display()))?;
    let tensors: usize = plan.shards.iter().map(|shard| shard.tensors).sum();
    say(format_args!(
        "result: {tensors} tensors, {} in {} shards ({})",
        DecimalBytes(plan.data_bytes()),
        plan.shards.len(),
        plan.recipe
    ))?;
    let stride = plan.experts.len as u64;
    let aligned = if stride.is_multiple_of(4096) { "a multiple of 4096" } else { "no multiple of 4096" };
    say(format_args!("every layer's experts stand in id order, {stride} bytes apart ({aligned})"))?;
    for note in repack.notes() {
        say(format_args!("note: {note}"))?;
    }
    for dropped in &plan.dropped {
        say(format_args!(
            "left out: {} tensors, {}: {}",
            dropped.tensors,
            DecimalBytes(dropped.bytes),
            dropped.why
        ))?;
    }
    Ok(())
}

pub(super) fn estimate(target: &Path, estimate: &Estimate, options: &RunOptions) -> Result<()> {
    let Estimate {
        read_bytes, write_bytes, needed_bytes, free_bytes, shards, complete, compared, jobs, ..
    } = estimate;
    if *complete > 0 {
        say(format_args!("{complete} shards are complete already"))?;
    }
    if *compared > 0 {
        say(format_args!(
            "{compared} shards are there and are compared with the source first; what is not right is made again"
        ))?;
    }
    say(format_args!(
        "to do: {shards} shards, read {} and write {}; {} has {} free",
        DecimalBytes(*read_bytes),
        DecimalBytes(*write_bytes),
        target.display(),
        DecimalBytes(*free_bytes),
    ))?;
    if !estimate.fits() {
        say(format_args!(
            "warning: there is no room for that: {needed_bytes} bytes are needed, {free_bytes} are free; a run is refused \
             until another disk is named or {} bytes more are free",
            needed_bytes - free_bytes
        ))?;
    }
    let way = if estimate.direct { "past the page cache" } else { "through the page cache" };
    // 0 asks for no number.
    let fewer = if *jobs < options.jobs { ", as many as --memory allows" } else { "" };
    say(format_args!(
        "{jobs} shards in flight{fewer}, {way}, buffers of {}",
        BinaryBytes(estimate.buffer_bytes)
    ))?;
    let rate = |rate: Option<f64>| {
        rate.map_or_else(|| "not measured".to_owned(), |rate| format!("{}/s", DecimalBytes(rate as u64)))
    };
    if *shards + *compared > 0 {
        let seconds = estimate.seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let time = seconds.map_or_else(|| "unknown".to_owned(), |time| HumanDuration(time).to_string());
        say(format_args!(
            "measured just now, one request at a time: reads {}, writes {}; at these rates it takes {time}",
            rate(estimate.read_rate),
            rate(estimate.write_rate),
        ))?;
    }
    Ok(())
}

/// What a run did and found, whether it is to be trusted or not.
pub(super) fn outcome(outcome: &Outcome, seconds: f64) -> Result<()> {
    for note in &outcome.notes {
        say(format_args!("note: {note}"))?;
    }
    let rate = |bytes: u64| DecimalBytes((bytes as f64 / seconds.max(1e-9)) as u64);
    if !outcome.written.is_empty() {
        say(format_args!(
            "{} shards written in {}: {} read ({}/s), {} written ({}/s)",
            outcome.written.len(),
            HumanDuration(Duration::from_secs_f64(seconds)),
            DecimalBytes(outcome.bytes_read),
            rate(outcome.bytes_read),
            DecimalBytes(outcome.bytes_written),
            rate(outcome.bytes_written),
        ))?;
    }
    if !outcome.exponents.is_empty() {
        exponents(&outcome.exponents)?;
        say(format_args!("  refused: nothing"))?;
    }
    if let Some(report) = &outcome.report {
        whole(report)?;
    }
    Ok(())
}

/// The last lines of a run without an error.
pub(super) fn finished(target: &Path, outcome: &Outcome) -> Result<()> {
    if let Some(first) = outcome.missing.first() {
        say(format_args!(
            "the tree is not finished: {} shards are still missing, the first {first}; run again with their --layers, or \
             without --layers",
            outcome.missing.len()
        ))?;
    }
    if let Some(proof) = &outcome.proof {
        self::proof(proof)?;
    }
    if outcome.report.is_some() {
        say(format_args!("finished: {}; hashes and exponents are in its repack.json", target.display()))?;
        say(format_args!("next: cargo xtask selfcheck --model {}", quoted(target)))?;
    }
    Ok(())
}

/// The exponents of the layers that were read.
pub(super) fn exponents(layers: &[Exponents]) -> Result<()> {
    if layers.is_empty() {
        return Ok(());
    }
    say(format_args!("exponents of live blocks, as powers of two (a matrix scale covers 17 binades):"))?;
    for Exponents { layer, kmin, kmax, widest, zero_blocks, zero_blocks_replaced, .. } in layers {
        let show = |k: Option<i32>| k.map_or_else(|| "-".to_owned(), |k| k.to_string());
        let widest = widest.map_or_else(|| "-".to_owned(), |w| w.to_string());
        say(format_args!(
            "  layer {:>3}: {:>4} to {:>4}, widest matrix {widest:>2}; {zero_blocks} blocks of zeros, \
             {zero_blocks_replaced} with a new scale",
            layer.unwrap_or_default(),
            show(*kmin),
            show(*kmax),
        ))?;
    }
    let all = Exponents::sum(layers);
    for (e, count) in &all.histogram {
        let share = 100.0 * *count as f64 / all.live_blocks.max(1) as f64;
        say(format_args!("  e = {e:>3}: {count} live blocks, {share:.3} %"))?;
    }
    Ok(())
}

/// How much was refused; the error that follows says what.
pub(super) fn refused(refusals: &Refusals) -> Result<()> {
    say(format_args!(
        "  refused: {} matrices with scales that do not fit NVFP4, {} with scales that are NaN",
        refusals.as_nvfp4_only(),
        refusals.nan
    ))
}

fn whole(report: &Report) -> Result<()> {
    rounding(report)?;
    let files = report.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>().join(", ");
    say(format_args!("beside the shards: {files}"))?;
    if !report.left_out.files.is_empty() {
        say(format_args!("files not taken over: {}", report.left_out.files.join(", ")))?;
    }
    Ok(())
}

/// What quantizing dense matrices cost, by kind.
fn rounding(report: &Report) -> Result<()> {
    if report.rounding.is_empty() {
        return Ok(());
    }
    say(format_args!(
        "quantized matrices, {}: relative L2 error of all of a kind, of the worst, largest difference:",
        report.recipe
    ))?;
    for kind in &report.rounding {
        say(format_args!(
            "  {:<46} {:>4} matrices  {:.5}  {:.5}  {:.2e}",
            kind.kind, kind.matrices, kind.relative_l2, kind.worst_relative_l2, kind.largest
        ))?;
    }
    if !report.not_quantized.is_empty() {
        say(format_args!(
            "  {} matrices stay BF16, because their columns are no whole blocks of the format; the first is {}",
            report.not_quantized.len(),
            report.not_quantized[0]
        ))?;
    }
    Ok(())
}

fn proof(proof: &Proof) -> Result<()> {
    let way = if proof.from_disk {
        "read past the page cache"
    } else {
        "read through the page cache, so perhaps from memory"
    };
    if proof.shards_hashed > 0 {
        let only = if proof.shards_compared > 0 { "" } else { "; the source was not compared" };
        say(format_args!(
            "verified: all {} shards have the BLAKE3 that they were written with ({way}){only}",
            proof.shards_hashed
        ))?;
    }
    if proof.shards_compared > 0 {
        let quantized = match proof.quantized_tensors {
            0 => String::new(),
            matrices => format!(", {matrices} matrices are what quantizing the source's gives"),
        };
        say(format_args!(
            "verified: source and result of all {} shards compared ({way}): {} matrices of routed experts have the same \
             {} codes, the scales of all {} live blocks give the same values, {} blocks are zero in both ({} of them with \
             another scale), {} other tensors are equal in all {} bytes{quantized}",
            proof.shards_compared,
            proof.matrices,
            proof.codes,
            proof.live_blocks,
            proof.zero_blocks,
            proof.zero_blocks_with_other_scale,
            proof.dense_tensors,
            proof.dense_bytes,
        ))?;
    }
    Ok(())
}
