//! What the rounds say.

use std::io::Write;

use anyhow::Result;

use super::timed::Visit;

/// The visits of each part: I/O alone, arithmetic alone, each of them beside the other and knowing nothing of it, and both
/// together in one or several ways.
pub(super) struct Round {
    pub(super) parts: Vec<Vec<Visit>>,
}

/// Places in [`Round::parts`].
pub(super) const IO: usize = 0;
pub(super) const ARITHMETIC: usize = 1;
pub(super) const IO_BESIDE: usize = 2;
pub(super) const ARITHMETIC_BESIDE: usize = 3;
pub(super) const TOGETHER: usize = 4;

/// Of which layers a number is.
#[derive(Clone, Copy)]
enum Layers {
    All,
    /// Those behind a MoE layer, as nearly all of the released model are: without a pass's first, which has the dense layer
    /// before it, and without the end of the pass.
    Inner,
}

impl Round {
    /// Visits of the layers that count, each with its I/O alone and its arithmetic alone.
    fn visits(&self, part: usize, layers: Layers) -> Vec<[&Visit; 3]> {
        static NOTHING: Visit = Visit::NOTHING;
        let mut io = self.parts[if part == ARITHMETIC_BESIDE { IO_BESIDE } else { IO }].iter();
        let mut is_first = true;
        let all =
            self.parts[ARITHMETIC].iter().zip(&self.parts[part]).filter_map(move |(arithmetic, visit)| {
                let is_end = arithmetic.is_end;
                let io = if is_end { &NOTHING } else { io.next().unwrap_or(&NOTHING) };
                let is_inner = !is_first && !is_end;
                is_first = is_end;
                (is_inner || matches!(layers, Layers::All)).then_some([io, arithmetic, visit])
            });
        all.collect()
    }

    fn seconds(&self, part: usize, layers: Layers) -> f64 {
        if part == IO || part == IO_BESIDE {
            return self.visits(part + 1, layers).iter().map(|[io, ..]| io.fetch()).sum();
        }
        self.visits(part, layers).iter().map(|[.., visit]| visit.outside + visit.fetch()).sum()
    }

    fn greater(&self, layers: Layers) -> f64 {
        self.seconds(IO, layers).max(self.seconds(ARITHMETIC, layers))
    }

    /// The longer of the two that went on at the same time: what the machine takes from each for the other is in it.
    fn beside(&self, layers: Layers) -> f64 {
        self.seconds(IO_BESIDE, layers).max(self.seconds(ARITHMETIC_BESIDE, layers))
    }

    /// What the two parts need that can go on at the same time in a pass that knows a layer's experts from the layer's
    /// own router only: the reads of a layer, and its arithmetic from the router on.
    fn by_layers(&self, layers: Layers) -> f64 {
        let all = self.visits(ARITHMETIC, layers);
        all.iter().map(|[io, arithmetic, _]| arithmetic.outside + io.fetch().max(arithmetic.inside)).sum()
    }
}

/// A number of each round: the median, the least and the greatest.
fn spread(rounds: &[Round], of: impl Fn(&Round) -> f64) -> [f64; 3] {
    let mut all: Vec<f64> = rounds.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    let median = f64::midpoint(all[(all.len() - 1) / 2], all[all.len() / 2]);
    [median, all[0], all[all.len() - 1]]
}

/// Seconds a token, median and range of rounds of `tokens` tokens.
fn seconds(
    out: &mut impl Write,
    name: &str,
    rounds: &[Round],
    tokens: usize,
    of: impl Fn(&Round, Layers) -> f64,
) -> Result<()> {
    write!(out, "  {name:<38}")?;
    for layers in [Layers::All, Layers::Inner] {
        let [median, least, most] = spread(rounds, |round| of(round, layers) / tokens as f64);
        write!(out, "  {median:.3} ({least:.3} to {most:.3})")?;
    }
    Ok(writeln!(out)?)
}

/// The parts alone, and what follows from them.
pub(super) fn alone(out: &mut impl Write, rounds: &[Round], tokens: usize) -> Result<()> {
    writeln!(
        out,
        "  {:<38}  all layers{:12}  those behind a MoE layer",
        "seconds, median of rounds (range)", ""
    )?;
    seconds(out, "I/O alone", rounds, tokens, |round, layers| round.seconds(IO, layers))?;
    seconds(out, "arithmetic alone", rounds, tokens, |round, layers| round.seconds(ARITHMETIC, layers))?;
    if rounds.iter().all(|round| !round.parts[IO_BESIDE].is_empty()) {
        seconds(out, "both at once, unrelated: the longer", rounds, tokens, Round::beside)?;
    }
    seconds(out, "bound without guesses, by layers", rounds, tokens, Round::by_layers)
}

/// Both together, beside the parts alone.
pub(super) fn together(out: &mut impl Write, rounds: &[Round], part: usize, tokens: usize) -> Result<()> {
    seconds(out, "together", rounds, tokens, |round, layers| round.seconds(part, layers))?;
    let ratio = |of: fn(&Round, Layers) -> f64| {
        move |round: &Round, layers| tokens as f64 * round.seconds(part, layers) / of(round, layers)
    };
    seconds(out, "ratio to the greater alone", rounds, tokens, ratio(Round::greater))?;
    if rounds.iter().all(|round| !round.parts[IO_BESIDE].is_empty()) {
        seconds(out, "ratio to both at once, unrelated", rounds, tokens, ratio(Round::beside))?;
    }
    seconds(out, "ratio to the bound by layers", rounds, tokens, ratio(Round::by_layers))?;
    for layers in [Layers::All, Layers::Inner] {
        let mut sums = [Visit::default(); 2];
        for [_, alone, visit] in rounds.iter().flat_map(|round| round.visits(part, layers)) {
            sums[0].add(visit);
            sums[1].add(alone);
        }
        let mean = |sum: &Visit, of: fn(&Visit) -> f64| of(sum) / (tokens * rounds.len()) as f64;
        let [together, alone] = sums;
        let name = if matches!(layers, Layers::All) { "all layers" } else { "behind a MoE layer" };
        writeln!(
            out,
            "  {name}, means: outside fetches {:.3} (alone {:.3}); in them {:.3} ({:.3}), {:.3} of it after the last wait; \
             waiting for the first read of a layer {:.3}, for others {:.3}; drive idle outside {:.3}, inside {:.3}",
            mean(&together, |v| v.outside),
            mean(&alone, |v| v.outside),
            mean(&together, |v| v.inside),
            mean(&alone, |v| v.inside),
            mean(&together, |v| v.tail),
            mean(&together, |v| v.first_wait),
            mean(&together, |v| v.later_wait),
            mean(&together, |v| v.idle_outside),
            mean(&together, |v| v.idle_inside),
        )?;
    }
    Ok(())
}
