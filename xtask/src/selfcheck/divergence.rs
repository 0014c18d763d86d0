//! Where a run first leaves the expected one, and which sublayer is itself wrong.

use anyhow::Result;
use k3_format::AttentionKind;
use k3_graph::Device;
use k3_runner::Engine;

use crate::expect::{
    Axis, Check, Entry, Expectations, Found, Injection, Outcome, Sizes, Tensor, Tensors, Wanted, exceeds,
    layout, record, relative_l2,
};
use crate::progress::Progress;

/// The first place, in the order of computation, where a run is not as expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// 0-based; none after the last layer.
    pub layer: Option<usize>,
    /// The part of the layer, or of the model.
    pub sublayer: Sublayer,
    /// In the prompt; none for a state after it.
    pub position: Option<usize>,
    /// The tensor that shows it.
    pub tensor: &'static str,
    /// How far off.
    pub text: String,
}

/// Parts of the model, in the order of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Sublayer {
    AttnResBeforeAttention,
    Indexer,
    Kda,
    Mla,
    AttnResBeforeMlp,
    Router,
    DenseMlp,
    Moe,
    DepthSum,
    OutputAttnRes,
    FinalNorm,
    LmHead,
}

impl std::fmt::Display for Sublayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AttnResBeforeAttention => "AttnRes mix before attention",
            Self::Indexer => "indexer selection",
            Self::Kda => "KDA",
            Self::Mla => "MLA",
            Self::AttnResBeforeMlp => "AttnRes mix before the MLP",
            Self::Router => "router",
            Self::DenseMlp => "dense MLP",
            Self::Moe => "MoE",
            Self::DepthSum => "depth sum",
            Self::OutputAttnRes => "output AttnRes mix",
            Self::FinalNorm => "final norm",
            Self::LmHead => "lm_head",
        })
    }
}

/// The kind of attention of a layer.
pub(super) fn attention(sizes: &Sizes, layer: usize) -> Sublayer {
    match sizes.config.layers[layer] {
        AttentionKind::Kda => Sublayer::Kda,
        AttentionKind::FullAttention => Sublayer::Mla,
    }
}

/// The kind of MLP of a layer.
pub(super) fn mlp(sizes: &Sizes, layer: usize) -> Sublayer {
    if sizes.config.is_moe(layer) { Sublayer::Moe } else { Sublayer::DenseMlp }
}

/// Walks the model in the order of computation. Tensors that are not expected say nothing; where all positions of a
/// sublayer are known, those count, otherwise the last.
pub(super) fn locate(
    expected: &Expectations,
    found: &Tensors,
    sizes: &Sizes,
    bound: f64,
) -> Option<Divergence> {
    let table = layout(sizes);
    let look = |layer: Option<usize>, sublayer: Sublayer, names: &[&'static str]| {
        names.iter().find_map(|name| {
            let entry = table.iter().find(|e| e.name == *name)?;
            let at = match layer {
                Some(layer) => sizes.layers_on(entry.axis).iter().position(|&l| l == layer)?,
                None => 0,
            };
            let (e, f) = (expected.tensors.get(*name)?, found.get(*name)?);
            let comparison = crate::expect::Comparison { entry, sizes, bound, comparable: 0 };
            let difference = comparison.difference(e, f, at)?;
            let position = position(entry, sizes, difference.row);
            Some(Divergence { layer, sublayer, position, tensor: entry.name, text: difference.text })
        })
    };
    for l in 0..sizes.layers {
        let layer = Some(l);
        let attention = attention(sizes, l);
        let found = look(
            layer,
            Sublayer::AttnResBeforeAttention,
            &["attn_in", "attn_in_last", "attnres_attn_w_last"],
        )
        .or_else(|| look(layer, attention, &["mla_latent", "mla_extra_key"]))
        .or_else(|| look(layer, Sublayer::Indexer, &["index_keys", "index_scores", "index_sel"]))
        .or_else(|| look(layer, attention, &["attn_out", "attn_out_last", "kda_conv_state", "kda_state"]))
        .or_else(|| look(layer, Sublayer::AttnResBeforeMlp, &["mlp_in", "mlp_in_last", "attnres_mlp_w_last"]))
        .or_else(|| look(layer, Sublayer::Router, &["router_idx", "router_weight"]))
        .or_else(|| look(layer, mlp(sizes, l), &["mlp_out", "mlp_out_last"]))
        .or_else(|| look(layer, Sublayer::DepthSum, &["hidden_last"]));
        if found.is_some() {
            return found;
        }
    }
    look(None, Sublayer::OutputAttnRes, &["final_mix_last", "attnres_final_w_last"])
        .or_else(|| look(None, Sublayer::FinalNorm, &["final_norm_last"]))
        .or_else(|| look(None, Sublayer::LmHead, &["logits"]))
}

fn position(entry: &Entry, sizes: &Sizes, row: usize) -> Option<usize> {
    match entry.name {
        "kda_state" | "kda_conv_state" => None,
        name if name.ends_with("_last") => Some(sizes.tokens - 1),
        _ => Some(row),
    }
}

/// One sublayer fed with the expected input of all positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Forced {
    /// 0-based.
    pub layer: usize,
    /// Which.
    pub sublayer: Sublayer,
    /// Of its output at all positions.
    pub relative_l2: f64,
    /// Largest absolute difference in it.
    pub max_abs: f64,
    /// Position with the largest error of its output.
    pub worst_position: usize,
}

/// Feeds every sublayer its expected input and compares the outputs, so that no error is inherited. None if the
/// expectations do not hold all positions.
pub(super) fn forced<D: Device>(
    engine: &Engine<D>,
    prompt: &[u32],
    expected: &Expectations,
    sizes: &Sizes,
) -> Result<Option<Vec<Forced>>> {
    let tensor = |name: &str| expected.tensors.get(name);
    let pairs = [("attn_in", "attn_out"), ("mlp_in", "mlp_out")]
        .into_iter()
        .filter(|(input, output)| tensor(input).is_some() && tensor(output).is_some())
        .collect::<Vec<_>>();
    if pairs.is_empty() {
        return Ok(None);
    }
    let injection = Injection::new(tensor("attn_in"), tensor("mlp_in"), sizes)?;
    let sizes = Sizes { continuation: 0, ..sizes.clone() };
    let wanted = Wanted { all_positions: true, index_scores: false };
    let passes = prompt.len().div_ceil(engine.chunk_tokens());
    let mut progress = Progress::steps("sublayers with expected inputs", passes * sizes.layers);
    let recording = record(engine, prompt, &sizes, wanted, injection, &mut || progress.step())?;

    let mut forced = Vec::new();
    for l in 0..sizes.layers {
        for (_, output) in &pairs {
            let sublayer = if *output == "attn_out" { attention(&sizes, l) } else { mlp(&sizes, l) };
            let values = |t: Option<&Tensor>| {
                let width = sizes.tokens * sizes.config.hidden_size;
                t.and_then(Tensor::as_f32).map(|v| v[l * width..(l + 1) * width].to_vec()).unwrap_or_default()
            };
            let (e, f) = (values(tensor(output)), values(recording.tensors.get(*output)));
            let hidden = sizes.config.hidden_size;
            let rows = f.chunks_exact(hidden).zip(e.chunks_exact(hidden));
            let distances = rows.map(|(f, e)| relative_l2(f, e).0).enumerate();
            let worst = distances.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(row, _)| row);
            let (relative_l2, max_abs) = relative_l2(&f, &e);
            forced.push(Forced { layer: l, sublayer, relative_l2, max_abs, worst_position: worst });
        }
    }
    Ok(Some(forced))
}

/// One check for each kind of sublayer: its worst layer with expected inputs.
pub(super) fn forced_checks(forced: Option<&[Forced]>, sizes: &Sizes, bound: f64) -> Vec<Check> {
    let kinds = [Sublayer::Kda, Sublayer::Mla, Sublayer::DenseMlp, Sublayer::Moe];
    let in_model =
        |kind: Sublayer| (0..sizes.layers).any(|l| attention(sizes, l) == kind || mlp(sizes, l) == kind);
    let check = |kind: Sublayer| {
        let name = format!("{kind} alone");
        let of_kind = forced.unwrap_or_default().iter().filter(|f| f.sublayer == kind);
        let Some(worst) = of_kind.max_by(|a, b| a.relative_l2.total_cmp(&b.relative_l2)) else {
            return Check::skipped(name, "no inputs and outputs of all positions in the expectations");
        };
        let (relative_l2, max_abs) = (worst.relative_l2, worst.max_abs);
        let distance = Found::Distance { relative_l2, worst_row: None, max_abs, bound };
        let note = format!("layer {}, worst at position {}", worst.layer, worst.worst_position);
        Check::of(name, worst.relative_l2 <= bound, distance, note)
    };
    kinds.into_iter().filter(|k| in_model(*k)).map(check).collect()
}

/// What to say about the failed checks: where it starts, and which sublayers are wrong themselves.
pub(super) fn explain(
    checks: &[Check],
    divergence: Option<&Divergence>,
    forced: Option<&[Forced]>,
    bound: f64,
) -> Vec<String> {
    let mut lines = Vec::new();
    if checks.iter().all(|c| c.outcome != Outcome::Failed) {
        return lines;
    }
    match divergence {
        Some(d) => {
            let layer = d.layer.map_or_else(|| "after the last layer".to_owned(), |l| format!("layer {l}"));
            let position =
                d.position.map_or_else(|| "state after the prompt".to_owned(), |p| format!("position {p}"));
            lines.push(format!(
                "first divergence: {layer}, {}, {position}: {} {}",
                d.sublayer, d.tensor, d.text
            ));
        }
        None => lines.push(
            "no divergence inside the prompt's pass as far as the expectations reach: see the failed checks"
                .into(),
        ),
    }
    let Some(forced) = forced else {
        lines.push("without trace.safetensors, errors cannot be told from inherited ones".into());
        return lines;
    };
    let wrong: Vec<_> = forced.iter().filter(|f| exceeds(f.relative_l2, bound)).collect();
    if wrong.is_empty() {
        lines
            .push("with expected inputs, every sublayer is right: the error is outside the sublayers".into());
    }
    for f in wrong.iter().take(10) {
        lines.push(format!(
            "wrong itself, with expected inputs: layer {} {}, rel-L2 {:.1e} (bound {bound:.0e}), worst at position {}",
            f.layer, f.sublayer, f.relative_l2, f.worst_position
        ));
    }
    if wrong.len() > 10 {
        lines.push(format!("and {} more sublayers", wrong.len() - 10));
    } else if !wrong.is_empty() && wrong.len() < forced.len() {
        lines.push(format!("the other {} sublayers are right and inherit", forced.len() - wrong.len()));
    }
    lines
}

/// Whether the expectations hold inputs and outputs of all positions.
pub(super) fn has_all_positions(expected: &Expectations, sizes: &Sizes) -> bool {
    let names = layout(sizes);
    let mut all = names.iter().filter(|e| e.axis == Axis::Layers && e.shape.len() == 3);
    all.any(|e| expected.tensors.contains_key(e.name))
}
