//! What selfcheck prints.

use std::io::{Result, Write};
use std::time::Duration;

use indicatif::HumanBytes;
use k3_format::{AttentionKind, Checkpoint, ResolvedBy, Variant};
use k3_graph::Device;
use k3_runner::Engine;

use super::{Args, Cycle, DeviceName, Report};
use crate::expect::{Check, Expectations, Found, Outcome, Sizes};
use crate::open::{quoted, variant};
use crate::{LoadName, OpenArgs};

/// What runs, and how it was told.
pub(super) fn opened<D: Device>(
    args: &Args,
    engine: &Engine<D>,
    name: &str,
    threads: usize,
    took: Duration,
    out: &mut dyn Write,
) -> Result<()> {
    let (checkpoint, model) = (engine.checkpoint(), engine.model());
    let config = model.config();
    writeln!(out, "{name}: {}, {}", variant(engine), evidence(checkpoint))?;
    let layers = model.num_layers();
    let full = config.layers[..layers].iter().filter(|k| **k == AttentionKind::FullAttention).count();
    let truncated = if layers < config.num_hidden_layers() {
        format!(" (the first of {})", config.num_hidden_layers())
    } else {
        String::new()
    };
    let indexer = config.indexer.as_ref().map_or_else(String::new, |i| format!(", indexer top-{}", i.topk));
    writeln!(
        out,
        "  {layers} layers{truncated}: {} KDA, {full} full attention{indexer}; {} experts top-{} a MoE layer; hidden {}",
        layers - full,
        config.moe.num_experts,
        config.moe.num_experts_per_token,
        config.hidden_size,
    )?;
    let mode = match args.open.load {
        LoadName::Read => "read whole",
        LoadName::Map => "mapped",
    };
    let seconds = took.as_secs_f64();
    let weights = if layers < config.num_hidden_layers() {
        format!("weights of {layers} layers {mode}")
    } else {
        let bytes = checkpoint.resident_bytes();
        let rate = HumanBytes((bytes as f64 / seconds.max(1e-9)) as u64);
        format!("{} of weights {mode} at {rate}/s", HumanBytes(bytes))
    };
    writeln!(
        out,
        "  opened in {seconds:.2} s: {weights}, experts mapped; device {}, {}",
        model.device().kind(),
        count(threads, "thread"),
    )?;
    if args.open.ignore_indexer && checkpoint.variant() == Variant::K3 {
        writeln!(
            out,
            "  note: --ignore-indexer changes nothing here: {} has no indexer",
            checkpoint.variant()
        )?;
    }
    for warning in checkpoint.warnings() {
        writeln!(out, "  note: {warning}")?;
    }
    Ok(())
}

/// What the variant was decided by. The markers agree, or the checkpoint had not been opened (`docs/checkpoint.md` 9.1).
fn evidence(checkpoint: &Checkpoint) -> String {
    let Some(names) = checkpoint.indexer_names() else {
        return "by model_type kimi_k3, no dsa_config, no indexer tensors".to_owned();
    };
    let full = checkpoint.config().layers.iter().filter(|k| **k == AttentionKind::FullAttention).count();
    let tensors = 5 * full;
    let named = match names.by {
        ResolvedBy::Table => "",
        ResolvedBy::Caller => " under the given names",
        ResolvedBy::ShapeAndName | ResolvedBy::ShapeAndValues => " found by shape",
    };
    format!(
        "by model_type kimi_k31, dsa_config present, {tensors} indexer tensors on {full} full-attention layers{named}"
    )
}

/// What the run is held to.
pub(super) fn expectations(
    expected: Option<&Expectations>,
    unknown: &[String],
    sizes: &Sizes,
    goldens: usize,
    is_framed: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let tokens = format!("{} and {} after them", count(sizes.tokens, "prompt token"), sizes.continuation);
    let tokens = match (expected, is_framed) {
        (Some(_), _) => tokens,
        (None, true) => format!("control prompt, framed as a conversation: {tokens}"),
        (None, false) => format!("fixed prompt: {tokens}"),
    };
    let files = expected.map_or(&[][..], |e| &e.files);
    let mut names: Vec<String> = files
        .iter()
        .map(|f| f.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()))
        .collect();
    if goldens > 0 {
        names.push(count(goldens, "golden"));
    }
    let names = match names.as_slice() {
        [] => "no expectations".to_owned(),
        names => format!("expectations: {}", names.join(", ")),
    };
    writeln!(out, "  {names}; {tokens}")?;
    if !unknown.is_empty() {
        writeln!(out, "  note: not known, not compared: {}", unknown.join(", "))?;
    }
    Ok(())
}

/// What is not compared because not all layers run, before anything runs.
pub(super) fn left_out(report: &Report, out: &mut dyn Write) -> Result<()> {
    with(report, Outcome::Skipped).try_for_each(|c| writeln!(out, "  note: {} skipped: {}", c.name, c.note))
}

pub(super) fn cycle<D: Device>(
    number: usize,
    name: &str,
    engine: &Engine<D>,
    threads: usize,
    cycle: &Cycle,
    out: &mut dyn Write,
) -> Result<()> {
    writeln!(
        out,
        "  cycle {number}  {name}  {}  {}  {}  chunk {:<3} logits_hash {}{}  top-1 {:<6} {:.2} s",
        engine.checkpoint().variant(),
        engine.model().device().kind(),
        count(threads, "thread"),
        cycle.chunk,
        cycle.logits_hash,
        engine.deviation(),
        cycle.top1,
        cycle.time.as_secs_f64(),
    )
}

/// The checks of one model, and its verdict.
pub(super) fn model(args: &Args, report: &Report, out: &mut dyn Write) -> Result<()> {
    for check in &report.checks {
        if args.verbose || check.outcome == Outcome::Failed {
            line(check, out)?;
        }
    }
    let skipped: Vec<&str> = with(report, Outcome::Skipped).map(|c| c.name.as_str()).collect();
    if !skipped.is_empty() && !args.verbose {
        writeln!(out, "  SKIPPED (not passed): {}", skipped.join(", "))?;
    }
    if report.reordered > 0 {
        let tokens = count(report.reordered, "token");
        writeln!(out, "  note: {tokens} list their experts in another order than rank order")?;
    }
    for text in &report.explanation {
        writeln!(out, "  {text}")?;
    }
    let verdict = if report.is_good() { "PASS" } else { "FAIL" };
    writeln!(out, "{verdict} {}: {}{}", report.model, counts(std::slice::from_ref(report)), headline(report))
}

fn line(check: &Check, out: &mut dyn Write) -> Result<()> {
    let word = match check.outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "FAILED",
        Outcome::Skipped => "SKIPPED",
    };
    let found = check.found.to_string();
    let parts: Vec<&str> =
        [found.as_str(), check.note.as_str()].into_iter().filter(|p| !p.is_empty()).collect();
    writeln!(out, "  {word:<8} {:<22} {}", check.name, parts.join("; "))
}

/// The numbers that people look for first.
fn headline(report: &Report) -> String {
    let distance = |name: &str| match report.check(name).map(|c| &c.found) {
        Some(Found::Distance { relative_l2, worst_row, max_abs, .. }) => {
            Some((*relative_l2, worst_row.unwrap_or(*relative_l2), *max_abs))
        }
        _ => None,
    };
    let mut parts = Vec::new();
    if let Some((relative_l2, worst, max_abs)) = distance("logits") {
        parts.push(format!(
            "logits rel-L2 {relative_l2:.1e} worst position {worst:.1e} max-abs {max_abs:.1e}"
        ));
    }
    if let Some((relative_l2, _, max_abs)) = distance("goldens greedy_logits") {
        parts.push(format!("goldens logits rel-L2 at most {relative_l2:.1e} max-abs {max_abs:.1e}"));
    }
    for (name, label) in [
        ("goldens greedy_ids", "greedy tokens"),
        ("goldens cont_index_sel", "indexer"),
        ("logits argmax", "argmax"),
        ("greedy_ids", "greedy"),
        ("router_idx", "router"),
        ("index_sel", "indexer"),
    ] {
        if let Some(Found::Equal { equal, of }) = report.check(name).map(|c| &c.found) {
            parts.push(format!("{label} {equal}/{of}"));
        }
    }
    if parts.is_empty() { String::new() } else { format!("; {}", parts.join(", ")) }
}

fn with(report: &Report, outcome: Outcome) -> impl Iterator<Item = &Check> {
    report.checks.iter().filter(move |c| c.outcome == outcome)
}

fn counts(reports: &[Report]) -> String {
    let sum = |outcome| reports.iter().map(|r| r.count(outcome)).sum::<usize>();
    format!(
        "{} passed, {} failed, {} skipped",
        sum(Outcome::Passed),
        sum(Outcome::Failed),
        sum(Outcome::Skipped)
    )
}

/// The total, and what to type next.
pub(super) fn end(args: &Args, reports: &[Report], out: &mut dyn Write) -> Result<()> {
    if reports.len() > 1 {
        let good = reports.iter().filter(|r| r.is_good()).count();
        let verdict = if good == reports.len() { "PASS" } else { "FAIL" };
        writeln!(out, "{verdict} total: {good} of {} models; {}", reports.len(), counts(reports))?;
    }
    writeln!(out, "next: {}", next(args, reports))
}

fn next(args: &Args, reports: &[Report]) -> String {
    let model = args.model.as_ref().map_or_else(String::new, |dir| format!(" --model {}", quoted(dir)));
    let command = format!("cargo xtask selfcheck{model}{}", args.open.again());
    let expect = args.expect.as_ref().map_or_else(String::new, |file| format!(" --expect {}", quoted(file)));
    if reports.iter().any(|r| !r.is_good()) {
        let failed = || reports.iter().flat_map(|r| with(r, Outcome::Failed));
        let is_left_out = |c: &Check| ["expectations", "goldens"].contains(&c.name.as_str());
        if args.open.layers.is_some() && failed().count() > 0 && failed().all(is_left_out) {
            let all = OpenArgs { layers: None, ..args.open.clone() }.again();
            return format!("cargo xtask selfcheck{model}{all}{expect}   (all layers)");
        }
        return match (args.device, args.verbose) {
            (DeviceName::Cpu, _) => {
                format!("{command}{expect} --device reference   (tells a wrong kernel from a wrong file)")
            }
            (DeviceName::Reference, false) => format!("{command}{expect} --device reference --verbose"),
            (DeviceName::Reference, true) => {
                "compare the checkpoint's files with their published checksums".to_owned()
            }
        };
    }
    match &args.model {
        None => format!("{command} --model DIR   (your checkpoint)"),
        Some(_) if reports.iter().any(|r| r.check("expectations").is_some()) => {
            format!("{command} --expect FILE   (results of another engine, docs/vectors.md)")
        }
        Some(dir) => {
            format!("cargo xtask trace --model {} --ids 1,2,3 --out run.safetensors", quoted(dir))
        }
    }
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
