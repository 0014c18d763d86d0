//! `cargo xtask simulate`: hit rates of replacement policies on a routing trace, without I/O.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use k3_experts::policy::{GlobalLru, LayerLru, Policy, Retention};
use k3_experts::simulate::{optimum, replay_batches};
use k3_experts::trace::{Generator, Geometry, RELEASED, Statistics, Trace};

/// Hit rates of the expert store's replacement policies on a routing trace, without I/O
///
/// The trace is generated with the statistics of the released model, or read from a file that a run recorded. Capacities
/// are in working sets: what one token needs, 1472 experts or 25.8 GB in the released models.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask simulate
  cargo xtask simulate --period 4
  cargo xtask simulate --trace chat.k3-routing --capacities 0.5,1,2")]
pub struct Args {
    /// Replay this recorded trace instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["period", "depth", "topic_tokens", "layers", "seed", "tokens", "ranks"])]
    trace: Option<PathBuf>,
    /// Tokens of the generated trace
    #[arg(long, default_value_t = 1000, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    tokens: usize,
    /// Tokens that fill the slots before hits are counted [default: half of the trace, or what leaves a batch of it]
    #[arg(long)]
    warm: Option<usize>,
    /// Layers of the generated trace
    #[arg(long, default_value_t = RELEASED.layers, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..1000))]
    layers: usize,
    /// Names the generated trace
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Text that repeats itself after so many tokens
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..1000))]
    period: Option<usize>,
    /// Early layers reuse less than late ones
    #[arg(long)]
    depth: bool,
    /// Change the topic after so many tokens
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    topic_tokens: Option<usize>,
    /// Ranks of a choice that policies see: those used, and behind them those that nearly came
    #[arg(long, default_value_t = 128, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(16..=896))]
    ranks: usize,
    /// Tokens that are computed together, as of so many sequences whose tokens the trace holds in turn
    #[arg(long, default_value_t = 1, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=4096))]
    batch: usize,
    /// Slots of all layers together, in working sets
    #[arg(long, value_delimiter = ',', default_value = "0.25,0.5,1,1.5,2,4,5.33,8", value_parser = capacity,
          allow_hyphen_values = true)]
    capacities: Vec<f64>,
    /// Also write the trace
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

/// Working sets.
fn capacity(text: &str) -> Result<f64, String> {
    /// No layer has more experts.
    const MOST: f64 = 65536.0;
    let number = text.parse().ok().filter(|capacity| (0.0..=MOST).contains(capacity));
    number.ok_or_else(|| format!("expected working sets, 0 to {MOST}, as in 0.5,1,2"))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let trace = match &args.trace {
        Some(path) => {
            let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
            Trace::read(BufReader::new(file)).with_context(|| path.display().to_string())?
        }
        None => Generator {
            geometry: Geometry { layers: args.layers, ..RELEASED },
            seed: args.seed,
            ranks: args.ranks,
            depth: args.depth,
            topic_tokens: args.topic_tokens,
            period: args.period,
        }
        .generate(args.tokens),
    };
    if let Some(path) = &args.save {
        let saving = || format!("writing {}", path.display());
        let mut file = BufWriter::new(File::create_new(path).with_context(saving)?);
        trace.write(&mut file).and_then(|()| file.flush()).with_context(saving)?;
    }
    let warm = warm(trace.len(), args.warm, args.batch)?;
    statistics(&trace)?;
    hit_rates(&trace, warm, args.batch, &args.capacities)
}

/// Tokens that are not counted, of a trace of `tokens` that is replayed in whole batches.
fn warm(tokens: usize, asked: Option<usize>, batch: usize) -> Result<usize> {
    ensure!(tokens > 0, "the trace holds no whole token, so there is nothing to replay");
    ensure!(tokens >= batch, "the trace has {tokens} tokens, fewer than the {batch} of a --batch");
    let last = (tokens / batch - 1) * batch;
    let warm = asked.unwrap_or(tokens / 2);
    ensure!(
        warm <= last || asked.is_none(),
        "--warm {warm} leaves nothing to count of a trace of {tokens} tokens: it may be {last} at most, so that a batch of \
         {batch} is left"
    );
    Ok(warm.min(last))
}

fn statistics(trace: &Trace) -> Result<()> {
    let mut out = std::io::stdout();
    let geometry = trace.geometry();
    let Geometry { layers, experts, per_token } = geometry;
    let statistics = Statistics::new(trace);
    writeln!(out, "{} tokens, {layers} layers of {experts} experts, {per_token} a token", trace.len())?;
    let mut is_short = false;
    let mut line =
        |what: &str, at: &[usize], published: &str, figure: &dyn Fn(usize) -> f64, digits: usize| {
            let list = |items: Vec<String>| items.join(" ");
            let shown = list(at.iter().map(usize::to_string).collect());
            let figures = at.iter().map(|&n| figure(n));
            is_short |= figures.clone().any(f64::is_nan);
            let found = figures.map(|figure| match figure {
                _ if figure.is_nan() => "-".to_owned(),
                _ => format!("{figure:.digits$}"),
            });
            let found = list(found.collect());
            writeln!(out, "{:<44} {found:<32} {published}", format!("{what} {shown}"))
        };
    line("", &[], "published", &|_| 0.0, 0)?;
    line("reuse after tokens", &[1, 2, 3, 4, 8], ".34 .23 .16 .13 .09", &|n| statistics.reuse(n), 2)?;
    let ranks: Vec<usize> = [1, 2, 4, 8, 12, 16].into_iter().filter(|&r| r <= per_token).collect();
    let of_rank = |rank| statistics.reuse_of_rank(1, rank - 1);
    line("reuse of gate rank", &ranks, ".68 .56 .46 .33 .23 .19", &of_rank, 2)?;
    line(
        "distinct experts of a layer, tokens",
        &[2, 4, 8, 12],
        "26.5 44 75 109",
        &|n| statistics.distinct(n),
        1,
    )?;
    line("picks per distinct expert, tokens", &[32, 64], "2.7 3.3", &|n| statistics.dedup(n), 2)?;
    line("effective experts, tokens", &[64], "200", &|n| statistics.effective(n), 0)?;
    line("share of the most used, tokens", &[64], ".28", &|n| statistics.top_mass(n), 2)?;
    let steps: Vec<usize> = (0..layers).step_by(layers.div_ceil(9)).collect();
    let in_layer = |layer| statistics.reuse_in_layer(1, layer);
    line("reuse in layer", &steps, ".22 .31 .26 .34 .43 .39 .35 .39 .41 (ten layers each)", &in_layer, 2)?;
    if is_short {
        writeln!(out, "-: the trace has too few tokens for it")?;
    }
    Ok(())
}

fn hit_rates(trace: &Trace, warm: usize, batch: usize, capacities: &[f64]) -> Result<()> {
    let mut out = std::io::stdout();
    let geometry = trace.geometry();
    let Geometry { layers, experts, per_token } = geometry;
    let together = if batch == 1 { String::new() } else { format!(", {batch} tokens at once") };
    // The optimum is known token by token only.
    let last = if batch == 1 { "  optimum" } else { "" };
    writeln!(
        out,
        "\nhit rates after {warm} tokens{together}\nworking sets  global LRU  layer LRU  retention{last}"
    )?;
    for &capacity in capacities {
        // More slots than experts change nothing.
        let slots = ((capacity * geometry.working_set() as f64).round() as usize).min(layers * experts);
        let rate = |policy: &mut dyn Policy| replay_batches(trace, policy, warm, batch).hit_rate();
        let best = || format!("  {:>7.3}", optimum(trace, slots, warm).hit_rate());
        writeln!(
            out,
            "{capacity:>12}  {:>10.3}  {:>9.3}  {:>9.3}{}",
            rate(&mut GlobalLru::new(slots)),
            rate(&mut LayerLru::new(slots, layers)),
            rate(&mut Retention::new(slots, layers, experts, per_token)),
            if batch == 1 { best() } else { String::new() },
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_left_to_count() {
        let check = |tokens: usize, asked: Option<usize>, batch: usize, expected: Result<usize, &str>| {
            let found = warm(tokens, asked, batch).map_err(|error| error.to_string());
            match (&found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(*found, expected),
                (Err(found), Err(words)) => assert!(found.contains(words), "{found}"),
                _ => panic!("{found:?}, expected {expected:?}"),
            }
        };
        check(1000, None, 1, Ok(500));
        check(1, None, 1, Ok(0));
        check(10, None, 4, Ok(4));
        check(10, None, 10, Ok(0));
        check(10, Some(6), 4, Err("it may be 4 at most"));
        check(10, Some(10), 1, Err("it may be 9 at most"));
        check(10, Some(9), 1, Ok(9));
        check(10, None, 11, Err("10 tokens, fewer than the 11"));
        check(0, None, 1, Err("no whole token"));
    }

    #[test]
    fn capacities_are_working_sets() {
        assert_eq!([capacity("0"), capacity("5.33")], [Ok(0.0), Ok(5.33)]);
        for text in ["-1", "NaN", "inf", "1e300", "", "1GB"] {
            assert!(capacity(text).unwrap_err().contains("expected working sets"), "{text}");
        }
    }
}
