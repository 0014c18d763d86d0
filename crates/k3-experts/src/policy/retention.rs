//! What is due stays, then what is used often, and what nearly was.

use std::collections::VecDeque;

use super::{Policy, Verdict, Visit, spread};
use crate::ExpertId;

/// Tokens that the recent score looks back.
const LAGS: usize = 16;
/// Ranks whose experts count, as a multiple of the experts that a token uses.
const RANKS: usize = 8;
/// What of the long score is left one token later.
const SLOW_DECAY: f32 = 0.99;
/// What the long score counts beside the recent one.
const SLOW_WEIGHT: f32 = 0.025;
/// Share of the measured reuse that one visit replaces: a token's visits replace about a tenth.
const LEARNING: f32 = 0.001;
/// Turns the reuse at a lag into what a use at that lag is worth.
const SHARPNESS: i32 = 3;

/// The policy of this engine.
///
/// Every expert of a layer has a score. Its recent part is what the last 16 tokens chose, each weighted by how much
/// of a token's choice is used again that many tokens later. That reuse by lag is measured while running: varied text
/// gives weights that fade from token to token, text with a period gives the token one period ago the most, and so
/// does a batch of several sequences. Its long part is a slowly decaying sum of all choices. An expert is admitted if its score is
/// higher than the lowest in the layer's slots.
///
/// In a choice, a rank is worth how far its router score lies above that of the last rank that counts, if
/// scores are normally distributed. Ranks behind those that a token uses count as well, where the visit tells them:
/// an expert that nearly came is likely to come soon.
///
/// A visit of a single token evicts no member of the set that it uses. A visit of many may: a member that was
/// looked up is in use already, and what stays is for the tokens that follow.
#[derive(Debug)]
pub struct Retention {
    slots: usize,
    per_token: usize,
    /// By rank.
    worth: Vec<f32>,
    /// By lag, from 1: share of a token's experts that are used again.
    reuse: [f32; LAGS],
    layers: Vec<Layer>,
    /// Scratch, by expert.
    member: Vec<bool>,
}

#[derive(Debug)]
struct Layer {
    slots: usize,
    residents: Vec<ExpertId>,
    /// By expert, as all that follow.
    resident: Vec<bool>,
    recent: Vec<f32>,
    long: Vec<f32>,
    /// The choices of the last tokens, newest first.
    history: VecDeque<Vec<ExpertId>>,
}

impl Layer {
    fn score(&self, id: ExpertId) -> f32 {
        self.recent[id as usize] + SLOW_WEIGHT * self.long[id as usize]
    }

    /// Position and score of the lowest resident that is not a member.
    fn lowest(&self, member: &[bool]) -> Option<(usize, f32)> {
        let others = self.residents.iter().enumerate().filter(|(_, id)| !member[**id as usize]);
        others.map(|(at, &id)| (at, self.score(id))).min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

impl Retention {
    /// `slots` spread over `layers` of `experts` each.
    pub fn new(slots: usize, layers: usize, experts: usize, per_token: usize) -> Self {
        let layer = |slots| Layer {
            slots,
            residents: Vec::with_capacity(slots.min(experts)),
            resident: vec![false; experts],
            recent: vec![0.0; experts],
            long: vec![0.0; experts],
            history: VecDeque::with_capacity(LAGS + 1),
        };
        let counting = per_token.saturating_mul(RANKS).min(experts);
        let floor = upper_quantile(counting, experts);
        Self {
            slots,
            per_token,
            worth: (0..counting).map(|rank| upper_quantile(rank, experts) - floor).collect(),
            reuse: [0.0; LAGS],
            layers: spread(slots, layers).map(layer).collect(),
            member: vec![false; experts],
        }
    }

    /// Takes notice of what the tokens of a visit chose.
    fn learn(&mut self, visit: &Visit<'_>) {
        let Self { worth, reuse, layers, member, .. } = self;
        let layer = &mut layers[visit.layer];
        for choice in visit.choices.chunks_exact(visit.ranks.max(1)) {
            let used = &choice[..visit.per_token.min(choice.len())];
            used.iter().for_each(|&id| member[id as usize] = true);
            for (reuse, before) in reuse.iter_mut().zip(&layer.history) {
                let before = &before[..visit.per_token.min(before.len())];
                let again = before.iter().filter(|id| member[**id as usize]).count();
                *reuse += LEARNING * (again as f32 / used.len().max(1) as f32 - *reuse);
            }
            used.iter().for_each(|&id| member[id as usize] = false);

            layer.long.iter_mut().for_each(|long| *long *= SLOW_DECAY);
            choice.iter().zip(&*worth).for_each(|(&id, worth)| layer.long[id as usize] += worth);
            layer.history.push_front(choice[..choice.len().min(worth.len())].to_vec());
            layer.history.truncate(LAGS);
        }
        let most = reuse.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        layer.recent.fill(0.0);
        for (lag, (choice, reuse)) in layer.history.iter().zip(&*reuse).enumerate() {
            // Before anything was measured, the last token is all there is to go by.
            let weight = if lag == 0 && *reuse == 0.0 { 1.0 } else { (reuse / most).powi(SHARPNESS) };
            choice.iter().zip(&*worth).for_each(|(&id, worth)| layer.recent[id as usize] += weight * worth);
        }
    }
}

/// The standard normal deviate that a share `(rank + 1/2) / of` exceeds (Abramowitz and Stegun 26.2.22).
fn upper_quantile(rank: usize, of: usize) -> f32 {
    let share = (rank as f32 + 0.5) / of as f32;
    if share > 0.5 {
        return -upper_quantile((of - 1).saturating_sub(rank), of);
    }
    let t = (-2.0 * share.ln()).sqrt();
    t - (2.307_53 + 0.270_61 * t) / (1.0 + t * (0.992_29 + 0.044_81 * t))
}

impl Policy for Retention {
    fn visit(&mut self, visit: Visit<'_>, verdicts: &mut Vec<Verdict>) {
        self.learn(&visit);
        let Self { layers, member, .. } = self;
        let layer = &mut layers[visit.layer];
        verdicts.clear();
        let look_up =
            |&id: &ExpertId| if layer.resident[id as usize] { Verdict::Hit } else { Verdict::Bypassed };
        verdicts.extend(visit.experts.iter().map(look_up));
        let single = visit.choices.len() <= visit.ranks;
        if single {
            visit.experts.iter().for_each(|&id| member[id as usize] = true);
        }
        for (&id, verdict) in visit.experts.iter().zip(&mut *verdicts) {
            if *verdict == Verdict::Hit {
                continue;
            }
            let evicted = if layer.residents.len() < layer.slots {
                None
            } else {
                let score = layer.score(id);
                let Some((at, _)) = layer.lowest(member).filter(|(_, lowest)| *lowest < score) else {
                    continue;
                };
                let evicted = layer.residents.swap_remove(at);
                layer.resident[evicted as usize] = false;
                Some((visit.layer, evicted))
            };
            layer.residents.push(id);
            layer.resident[id as usize] = true;
            *verdict = Verdict::Admitted { evicted };
        }
        visit.experts.iter().for_each(|&id| member[id as usize] = false);
    }

    fn forget(&mut self, layer: usize, expert: ExpertId) {
        let layer = &mut self.layers[layer];
        layer.residents.retain(|&id| id != expert);
        layer.resident[expert as usize] = false;
    }

    fn admit_free(&mut self, layer: usize, expert: ExpertId) -> bool {
        let layer = &mut self.layers[layer];
        let admitted = !layer.resident[expert as usize] && layer.residents.len() < layer.slots;
        if admitted {
            layer.residents.push(expert);
            layer.resident[expert as usize] = true;
        }
        admitted
    }

    /// The long score as it would be after many tokens that used experts as often.
    fn remember(&mut self, layer: usize, uses: &[f32], tokens: f64) {
        let per_token = self.per_token.min(self.worth.len());
        let worth = self.worth[..per_token].iter().sum::<f32>() / per_token.max(1) as f32;
        let scale = worth / (1.0 - SLOW_DECAY) / tokens.max(1.0) as f32;
        let long = &mut self.layers[layer].long;
        long.iter_mut().zip(uses).for_each(|(long, uses)| *long = scale * uses);
    }

    fn slots(&self) -> usize {
        self.slots
    }
}
