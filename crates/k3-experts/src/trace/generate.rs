//! Traces with the statistics of the released model.

use super::random::Normals;
use super::{Geometry, Trace};
use crate::ExpertId;

/// The released models: 92 layers of 896 experts, 16 a token.
pub const RELEASED: Geometry = Geometry { layers: 92, experts: 896, per_token: 16 };

/// Share of the variance of a router score that belongs to the topic, and stays.
const TOPIC: f32 = 0.33;
/// Share that fades from token to token.
const FADING: f32 = 0.60;
/// What of the fading part is still there one token later.
const RHO: f32 = 0.70;
/// Correlation of a new topic with the one before.
const TOPICS: f32 = 0.70;

/// Draws router scores `s = sqrt(.33) S + sqrt(.60) F + sqrt(.07) N` per layer and expert, all of unit variance:
/// S belongs to the topic, F is an AR(1) process in the tokens, N is new with each. A token uses the experts of the
/// highest scores (`docs/expert-store.md` 1).
#[derive(Clone, Debug)]
pub struct Generator {
    /// Layers, experts, experts a token.
    pub geometry: Geometry,
    /// What tells two traces of the same kind apart.
    pub seed: u64,
    /// Ranks to keep of each choice ([`Trace::new`]).
    pub ranks: usize,
    /// Early layers reuse less than late ones: the share used by the token before runs from .22 to .42 over the
    /// layers. Otherwise it is .35 in all.
    pub depth: bool,
    /// Tokens after which the topic changes.
    pub topic_tokens: Option<usize>,
    /// Text that repeats itself: half of the fading part is instead shared by positions that are equal modulo this.
    pub period: Option<usize>,
}

impl Generator {
    /// Varied text of one topic.
    pub fn new(geometry: Geometry, seed: u64) -> Self {
        Self { geometry, seed, ranks: geometry.per_token, depth: false, topic_tokens: None, period: None }
    }

    /// A trace of so many tokens.
    ///
    /// # Panics
    /// If [`Generator::ranks`] does not fit the geometry.
    pub fn generate(&self, tokens: usize) -> Trace {
        let Geometry { layers, experts, .. } = self.geometry;
        let mut trace = Trace::new(self.geometry, self.ranks);
        let mut normals = Normals::new(self.seed);
        let all = layers * experts;
        let mut topic = normals.take(all);
        let mut fading = normals.take(all);
        let classes: Vec<Vec<f32>> = (0..self.period.unwrap_or(0)).map(|_| normals.take(all)).collect();
        let fresh = (1.0 - RHO * RHO).sqrt();
        let mut scores: Vec<(f32, ExpertId)> = Vec::with_capacity(experts);
        let mut choices = Vec::with_capacity(layers * self.ranks);
        for token in 0..tokens {
            if self.topic_tokens.is_some_and(|every| token > 0 && token.is_multiple_of(every)) {
                let new = (1.0 - TOPICS * TOPICS).sqrt();
                topic.iter_mut().for_each(|s| *s = TOPICS * *s + new * normals.next());
            }
            choices.clear();
            for layer in 0..layers {
                let shares = Shares::of(self, layer);
                scores.clear();
                for expert in 0..experts {
                    let i = layer * experts + expert;
                    fading[i] = RHO * fading[i] + fresh * normals.next();
                    let mut s =
                        shares.topic * topic[i] + shares.fading * fading[i] + shares.white * normals.next();
                    if !classes.is_empty() {
                        s += shares.class * classes[token % classes.len()][i];
                    }
                    scores.push((s, expert as ExpertId));
                }
                let descending =
                    |a: &(f32, ExpertId), b: &(f32, ExpertId)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
                if self.ranks < experts {
                    scores.select_nth_unstable_by(self.ranks, descending);
                }
                scores[..self.ranks].sort_unstable_by(descending);
                choices.extend(scores[..self.ranks].iter().map(|&(_, id)| id));
            }
            trace.push(&choices);
        }
        trace
    }
}

/// Square roots of shares of the variance.
struct Shares {
    topic: f32,
    fading: f32,
    class: f32,
    white: f32,
}

impl Shares {
    fn of(generator: &Generator, layer: usize) -> Self {
        // A linear ramp of the correlation gives about a linear ramp of the reuse: .59 is reused by .21, .80 by .41.
        let scale = if generator.depth {
            0.79 + 0.285 * layer as f32 / (generator.geometry.layers.max(2) - 1) as f32
        } else {
            1.0
        };
        let class = if generator.period.is_some() { FADING / 2.0 } else { 0.0 };
        let (topic, fading, class) = (TOPIC * scale, (FADING - class) * scale, class * scale);
        let white = (1.0 - topic - fading - class).max(0.0);
        Self { topic: topic.sqrt(), fading: fading.sqrt(), class: class.sqrt(), white: white.sqrt() }
    }
}
