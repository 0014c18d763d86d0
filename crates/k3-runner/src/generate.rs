//! Prompt in, reply out.

use std::ops::ControlFlow;

use k3_graph::{Device, ForwardError, LogitsWanted, Observer};

use crate::{Engine, LogitsHash, RunError, Sampler, Sampling, Sequence};

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Generate {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How to choose them.
    pub sampling: Sampling,
    /// Ids that end the reply, beside those of the checkpoint.
    pub stop: Vec<u32>,
    /// Go on past the checkpoint's end ids, for benchmarks. [`Generate::stop`] still ends the reply.
    pub ignore_eos: bool,
}

impl Default for Generate {
    fn default() -> Self {
        Self { max_tokens: 256, sampling: Sampling::default(), stop: Vec::new(), ignore_eos: false }
    }
}

/// What happens on the way.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Layers of the prompt's forward passes that are done, of how many.
    Prefill {
        /// Done.
        layers: usize,
        /// Of.
        of: usize,
    },
    /// The next token of the reply.
    Token(u32),
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// This id came. It is the last of [`Generation::tokens`].
    Stop(u32),
    /// [`Generate::max_tokens`] are there.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller broke off.
    Cancelled,
}

/// A reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Generation {
    /// Its tokens, the one that ended it included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens that were prefilled.
    pub prompt_tokens: usize,
    /// Of the last logits: those that the last token was taken from or, without a token, those after the prompt.
    pub logits_hash: LogitsHash,
}

impl<D: Device> Engine<D> {
    /// Ids that end a reply: `eos_token_id` of both levels of `config.json` and of `generation_config.json`.
    pub fn stop_ids(&self) -> Vec<u32> {
        let mut ids = self.model().config().tokens.eos.clone();
        ids.extend(&self.checkpoint().generation_config().eos);
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Ids that are never output: padding, the beginning of a sequence, the placeholder of an image.
    pub fn suppressed_ids(&self) -> Vec<u32> {
        let t = &self.model().config().tokens;
        let stop = self.stop_ids();
        [t.pad, t.bos, t.media_placeholder].into_iter().flatten().filter(|id| !stop.contains(id)).collect()
    }

    /// Prefills `prompt` after what `sequence` has consumed, and generates a reply. Every token that was handed out,
    /// but the last, is consumed: the sequence can be continued.
    ///
    /// `events` hears of progress and tokens; when it breaks, generation stops. A cancelled prefill leaves the
    /// sequence unusable.
    pub fn generate(
        &self,
        sequence: &mut Sequence<D>,
        prompt: &[u32],
        request: &Generate,
        events: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Generation, RunError> {
        let mut sampler = Sampler::new(request.sampling.clone(), self.suppressed_ids())?;
        let mut stop = request.stop.clone();
        if !request.ignore_eos {
            stop.extend(self.stop_ids());
        }
        let context = self.model().config().max_position_embeddings;
        let passes = self.passes(prompt.len(), LogitsWanted::Last);
        let mut watch = Watch { events, done: 0, of: passes * self.model().num_layers() };
        let mut generation = Generation {
            tokens: Vec::new(),
            finish: Finish::Length,
            prompt_tokens: prompt.len(),
            logits_hash: LogitsHash::of(&[]),
        };
        let mut logits = match self.run(sequence, prompt, LogitsWanted::Last, &mut watch) {
            Err(RunError::Forward(ForwardError::Cancelled { .. })) => {
                generation.finish = Finish::Cancelled;
                return Ok(generation);
            }
            other => other?,
        };
        while generation.tokens.len() < request.max_tokens {
            let row = logits.last().expect("logits of the last position were asked for");
            let token = sampler.sample(row)?;
            generation.tokens.push(token);
            if events(Event::Token(token)).is_break() {
                generation.finish = Finish::Cancelled;
                break;
            }
            if stop.contains(&token) {
                generation.finish = Finish::Stop(token);
                break;
            }
            if sequence.position() == context {
                generation.finish = Finish::ContextFull;
                break;
            }
            if generation.tokens.len() < request.max_tokens {
                logits = self.decode(sequence, token)?;
            }
        }
        generation.logits_hash = LogitsHash::of(logits.last().unwrap_or_default());
        Ok(generation)
    }
}

/// Reports prefill layer by layer, and cancels between layers.
struct Watch<'a> {
    events: &'a mut dyn FnMut(Event) -> ControlFlow<()>,
    done: usize,
    of: usize,
}

impl Observer for Watch<'_> {
    fn layer_done(&mut self, _done: usize, _layers: usize) -> ControlFlow<()> {
        self.done += 1;
        (self.events)(Event::Prefill { layers: self.done, of: self.of })
    }
}
