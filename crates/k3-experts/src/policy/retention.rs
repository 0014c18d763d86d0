//! What is likely to be used soon stays.

use std::collections::VecDeque;

use super::regression::Regression;
use super::{Policy, Verdict, Visit, spread};
use crate::ExpertId;

/// Tokens before the next one whose choices count one by one.
const LAGS: usize = 16;
/// Running averages of all choices: what is left of each one token later. The first is the long memory that earlier runs
/// fill.
const DECAYS: [f32; 2] = [0.995, 0.9];
/// What an expert is judged by: its worth in each of the last tokens, its averages, and 1.
const FEATURES: usize = LAGS + DECAYS.len() + 1;
/// Ranks whose experts count, as a multiple of the experts that a token uses; at most half of a layer.
const RANKS: usize = 8;
/// Tokens that are looked ahead beside the next one, at least and at most.
const HORIZON: std::ops::RangeInclusive<usize> = 2..=24;
/// Most tokens of a visit that are taken for a batch; more are a prompt.
const BATCH: usize = 24;
/// Layers of a pass that are learnt from, about; more tell no more, and take time before reads begin.
const SAMPLES: usize = 16;
/// What one sample leaves of those before it.
const FADE: f64 = 1.0 - 1.0 / 2000.0;

/// The policy of this engine.
///
/// The experts of a layer are ranked by how many of the tokens to come will use them, as far as a linear function of the
/// past tells: of the ranks that an expert had in each of the last 16 tokens, and of two running averages. Its weights are the
/// least squares over what was used so far, in all layers alike, and are found while running: smooth text gives nearly all weight to
/// the last token, text with a period (and a batch of several sequences) to the token one period ago, text of one topic to
/// the long average. The tokens to come count the less the further ahead they are, up to twice as many as the slots could
/// hold if no expert were used twice: large stores look further.
///
/// In a choice, a rank is worth how far its router score lies above that of the last rank that counts, if scores are normally
/// distributed. Ranks behind those that a token uses count as well, where the visit tells them: an expert that
/// nearly came is likely to come soon.
///
/// An expert is admitted if it ranks above the lowest in the layer's slots. A visit of a single token evicts no member of
/// the set that it uses. A visit of many may: a member that was looked up is in use already, and what stays is for the
/// tokens that follow.
#[derive(Debug)]
pub struct Retention {
    slots: usize,
    per_token: usize,
    /// By rank.
    worth: Vec<f32>,
    /// Tokens that are looked ahead, beside the next one.
    horizon: usize,
    regression: Regression<FEATURES>,
    /// Of the features.
    weights: [f32; FEATURES],
    passes: usize,
    samples: usize,
    layers: Vec<Layer>,
    /// Scratch, by expert.
    member: Vec<bool>,
    /// Scratch, by expert.
    features: Vec<[f32; FEATURES]>,
}

#[derive(Debug)]
struct Layer {
    slots: usize,
    residents: Vec<ExpertId>,
    /// By expert, as all that follow.
    resident: Vec<bool>,
    score: Vec<f32>,
    averages: [Vec<f32>; DECAYS.len()],
    /// The choices of the last tokens, newest first.
    history: VecDeque<Vec<ExpertId>>,
}

impl Layer {
    /// Position and score of the lowest resident that is not a member.
    fn lowest(&self, member: &[bool]) -> Option<(usize, f32)> {
        let others = self.residents.iter().enumerate().filter(|(_, id)| !member[**id as usize]);
        others.map(|(at, &id)| (at, self.score[id as usize])).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// What all experts would have been judged by `delay` tokens ago.
    fn features_before(&self, delay: usize, worth: &[f32], features: &mut [[f32; FEATURES]]) {
        let mut blank = [0.0; FEATURES];
        blank[FEATURES - 1] = 1.0;
        features.fill(blank);
        for (lag, choice) in self.history.iter().skip(delay).take(LAGS).enumerate() {
            choice.iter().zip(worth).for_each(|(&id, worth)| features[id as usize][lag] = *worth);
        }
        for (at, (decay, average)) in (LAGS..).zip(DECAYS.iter().zip(&self.averages)) {
            features.iter_mut().zip(average).for_each(|(of, average)| of[at] = *average);
            // Without what the tokens since then added.
            let mut left = 1.0;
            for choice in self.history.iter().take(delay) {
                let share = (1.0 - decay) * left;
                choice.iter().zip(worth).for_each(|(&id, worth)| features[id as usize][at] -= share * worth);
                left *= decay;
            }
            features.iter_mut().for_each(|of| of[at] /= left);
        }
    }

    fn push(&mut self, choice: &[ExpertId], worth: &[f32], horizon: usize) {
        for (decay, average) in DECAYS.iter().zip(&mut self.averages) {
            average.iter_mut().for_each(|average| *average *= decay);
            choice.iter().zip(worth).for_each(|(&id, worth)| average[id as usize] += (1.0 - decay) * worth);
        }
        // A sample may also lie within a batch as far from its begin.
        self.history.truncate(LAGS + horizon + BATCH - 1);
        self.history.push_front(choice[..choice.len().min(worth.len())].to_vec());
    }

    fn judge(&mut self, weights: &[f32; FEATURES], worth: &[f32]) {
        self.score.fill(0.0);
        for (weight, average) in weights[LAGS..].iter().zip(&self.averages) {
            self.score.iter_mut().zip(average).for_each(|(score, average)| *score += weight * average);
        }
        for (choice, weight) in self.history.iter().zip(&weights[..LAGS]) {
            choice.iter().zip(worth).for_each(|(&id, worth)| self.score[id as usize] += weight * worth);
        }
    }
}

impl Retention {
    /// `slots` spread over `layers` of `experts` each.
    pub fn new(slots: usize, layers: usize, experts: usize, per_token: usize) -> Self {
        let counting = per_token.saturating_mul(RANKS).min(experts / 2).max(per_token + 1).min(experts);
        let floor = upper_quantile(counting, experts);
        let horizon = (2 * slots / (layers * per_token).max(1)).clamp(*HORIZON.start(), *HORIZON.end());
        let layer = |slots| Layer {
            slots,
            residents: Vec::with_capacity(slots.min(experts)),
            resident: vec![false; experts],
            score: vec![0.0; experts],
            averages: DECAYS.map(|_| vec![0.0; experts]),
            history: VecDeque::with_capacity(LAGS + horizon + BATCH),
        };
        // What varied text gives.
        let mut prior = [0.0; FEATURES];
        (prior[0], prior[1], prior[LAGS]) = (0.12, 0.02, 0.18);
        let regression = Regression::new(prior);
        Self {
            slots,
            per_token,
            worth: (0..counting).map(|rank| upper_quantile(rank, experts) - floor).collect(),
            horizon,
            weights: regression.solve(),
            regression,
            passes: 0,
            samples: 0,
            layers: spread(slots, layers).map(layer).collect(),
            member: vec![false; experts],
            features: vec![[0.0; FEATURES]; experts],
        }
    }

    /// Takes notice of what the tokens of a visit chose.
    fn learn(&mut self, visit: &Visit<'_>) {
        if visit.layer == 0 {
            self.passes += 1;
            self.weights = self.regression.solve();
        }
        let tokens = visit.choices.len() / visit.ranks.max(1);
        let is_sampled =
            (visit.layer + self.passes).is_multiple_of(self.layers.len().div_ceil(SAMPLES).max(1));
        // Token and distance change independently.
        let sampled = (self.samples / (self.horizon + 1)) % tokens.max(1);
        for (token, choice) in visit.choices.chunks_exact(visit.ranks.max(1)).enumerate() {
            if is_sampled && token == sampled {
                // The tokens of a batch are all ahead when its experts are chosen; those of a prompt follow each other.
                let ahead = if tokens <= BATCH { token } else { 0 };
                self.sample(visit.layer, &choice[..visit.per_token.min(choice.len())], ahead);
            }
            self.layers[visit.layer].push(choice, &self.worth, self.horizon);
        }
        self.layers[visit.layer].judge(&self.weights, &self.worth);
    }

    /// What a token used, and what an expert could have been judged by `ahead` and some more tokens before it.
    fn sample(&mut self, layer: usize, used: &[ExpertId], ahead: usize) {
        let further = self.samples % (self.horizon + 1);
        let delay = ahead + further;
        self.samples += 1;
        let layer = &self.layers[layer];
        if layer.history.len() <= delay {
            return;
        }
        layer.features_before(delay, &self.worth, &mut self.features);
        self.regression.fade(FADE);
        used.iter().for_each(|&id| self.member[id as usize] = true);
        let weight = 1.0 - further as f64 / (self.horizon + 1) as f64;
        for (features, came) in self.features.iter().zip(&self.member) {
            self.regression.add(features, *came, weight);
        }
        used.iter().for_each(|&id| self.member[id as usize] = false);
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
                let score = layer.score[id as usize];
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

    /// The long average as it would be after many tokens that used experts as often.
    fn remember(&mut self, layer: usize, uses: &[f32], tokens: f64) {
        let per_token = self.per_token.min(self.worth.len());
        let worth = self.worth[..per_token].iter().sum::<f32>() / per_token.max(1) as f32;
        let scale = worth / tokens.max(1.0) as f32;
        let long = &mut self.layers[layer].averages[0];
        long.iter_mut().zip(uses).for_each(|(long, uses)| *long = scale * uses);
    }

    fn slots(&self) -> usize {
        self.slots
    }
}
