//! A checkpoint on a device, and sequences on it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use k3_experts::{ExpertStore, MappedStore};
use k3_format::{Checkpoint, OpenOptions};
use k3_graph::{
    Device, DeviceError, ForwardError, Logits, LogitsWanted, Model, ModelOptions, Observer, SequenceState,
    Silent, Span, SpanResult, StateError, check_tokens,
};

use crate::memory::chunk_tokens;
use crate::record::{Recorder, Recording};
use crate::{Error, RecordError, RunError};

/// How to open a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineOptions {
    /// How files are read, and names that are not the released ones.
    pub open: OpenOptions,
    /// Truncated stacks, and K3.1 without its indexer.
    pub model: ModelOptions,
    /// Bytes of activations that prefill may keep while it works. A prompt is cut into as few chunks of equal size as
    /// that allows ([`k3_graph::working_bytes_per_token`]), because every chunk reads the experts it needs again. The result
    /// does not depend on it.
    pub activation_bytes: u64,
    /// Tokens of a chunk at most, whatever they need.
    pub chunk_tokens: Option<usize>,
}

/// [`EngineOptions::activation_bytes`]: a prompt of up to 3,266 tokens is one chunk in the released models.
const ACTIVATION_BYTES: u64 = 2 << 30;

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            open: OpenOptions::default(),
            model: ModelOptions::default(),
            activation_bytes: ACTIVATION_BYTES,
            chunk_tokens: None,
        }
    }
}

/// What opening is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenProgress {
    /// Files are checked; weights follow.
    Checked,
    /// Pinned weights of `layers` of `of` layers are loaded.
    Loaded {
        /// Layers done.
        layers: usize,
        /// Layers to load.
        of: usize,
    },
}

/// A checkpoint that runs on a device.
pub struct Engine<D: Device> {
    model: Model<D>,
    store: Arc<dyn ExpertStore>,
    checkpoint: Arc<Checkpoint>,
    options: EngineOptions,
    recorder: Option<Mutex<Recorder>>,
}

/// One sequence: the state, and the ids that led to it.
pub struct Sequence<D: Device> {
    pub(crate) state: SequenceState<D>,
    pub(crate) tokens: Vec<u32>,
}

/// What one sequence does in [`Engine::step`].
#[derive(Debug)]
pub struct Step<'a, D: Device> {
    /// The sequence; advanced by the step.
    pub sequence: &'a mut Sequence<D>,
    /// What it consumes: a chunk of its prompt, or the token that was chosen last.
    pub tokens: &'a [u32],
    /// Of which positions logits are wanted.
    pub logits: LogitsWanted,
}

impl<D: Device> std::fmt::Debug for Sequence<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence").field("tokens", &self.tokens.len()).field("state", &self.state).finish()
    }
}

impl<D: Device> Sequence<D> {
    /// Ids consumed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of ids consumed.
    pub fn position(&self) -> usize {
        self.state.position()
    }

    /// The model's state.
    pub fn state(&self) -> &SequenceState<D> {
        &self.state
    }
}

impl<D: Device> Engine<D> {
    /// Checks the snapshot in `dir` and loads its pinned weights. No routed expert is touched.
    pub fn open(
        dir: impl AsRef<Path>,
        device: D,
        options: &EngineOptions,
        progress: &mut dyn FnMut(OpenProgress),
    ) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let checkpoint = Checkpoint::open(dir, &options.open)
            .map_err(|source| Error::Checkpoint { dir: dir.into(), source: Box::new(source) })?;
        progress(OpenProgress::Checked);
        let checkpoint = Arc::new(checkpoint);
        let store = Arc::new(MappedStore::new(checkpoint.clone()));
        Self::with_store(checkpoint, store, device, options, progress)
    }

    /// Loads the pinned weights of a checkpoint that is open already, after whatever could be refused without them; its
    /// experts come from a store of the caller's.
    pub fn with_store(
        checkpoint: Arc<Checkpoint>,
        store: Arc<dyn ExpertStore>,
        device: D,
        options: &EngineOptions,
        progress: &mut dyn FnMut(OpenProgress),
    ) -> Result<Self, Error> {
        tracing::info!(dir = %checkpoint.dir().display(), "{checkpoint}");
        for warning in checkpoint.warnings() {
            tracing::warn!(dir = %checkpoint.dir().display(), "{warning}");
        }
        let dir: PathBuf = checkpoint.dir().into();
        let model = Model::load(
            device,
            checkpoint.config().clone(),
            &*checkpoint,
            &options.model,
            &mut |layers, of| progress(OpenProgress::Loaded { layers, of }),
        )
        .map_err(|source| Error::Load { dir, source })?;
        Ok(Self { model, store, checkpoint, options: options.clone(), recorder: None })
    }

    /// The files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The weights.
    pub fn model(&self) -> &Model<D> {
        &self.model
    }

    /// The routed experts.
    pub fn store(&self) -> &dyn ExpertStore {
        &*self.store
    }

    /// Tokens that prefill hands to the model at once, at most.
    pub fn chunk_tokens(&self) -> usize {
        self.most_tokens(LogitsWanted::Last)
    }

    /// Changes [`EngineOptions::chunk_tokens`]. No result depends on it.
    pub fn set_chunk_tokens(&mut self, tokens: usize) {
        self.options.chunk_tokens = Some(tokens);
    }

    /// Tokens of a chunk at most, if these logits are wanted of it.
    fn most_tokens(&self, wanted: LogitsWanted) -> usize {
        chunk_tokens(self.model.config(), &self.options, D::VALUE_BYTES, wanted)
    }

    /// Passes that [`Engine::run`] makes for so many tokens.
    pub fn passes(&self, tokens: usize, wanted: LogitsWanted) -> usize {
        tokens.div_ceil(self.most_tokens(wanted))
    }

    /// What makes this another function than the model's own and is to be said beside every hash of its logits: nothing,
    /// or ` (routed top-p 0.9)`.
    pub fn deviation(&self) -> String {
        let top_p = self.model.routed_top_p().map(|p| format!("routed top-p {p:?}"));
        let all: Vec<String> =
            top_p.into_iter().chain(self.model.device().deviation().map(str::to_owned)).collect();
        if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
    }

    /// A sequence without tokens.
    pub fn new_sequence(&self) -> Result<Sequence<D>, DeviceError> {
        Ok(Sequence { state: self.model.new_state()?, tokens: Vec::new() })
    }

    /// A sequence of its own that has consumed the same ids: a snapshot to return to, or a second reply to one prompt.
    pub fn fork(&self, sequence: &Sequence<D>) -> Result<Sequence<D>, StateError> {
        let state = sequence.state.try_clone(self.model.device())?;
        Ok(Sequence { state, tokens: sequence.tokens.clone() })
    }

    /// Consumes `tokens` in chunks and returns the logits after the last of them.
    pub fn prefill(&self, sequence: &mut Sequence<D>, tokens: &[u32]) -> Result<Logits, RunError> {
        self.run(sequence, tokens, LogitsWanted::Last, &mut Silent)
    }

    /// Consumes one token and returns the logits after it.
    pub fn decode(&self, sequence: &mut Sequence<D>, token: u32) -> Result<Logits, RunError> {
        self.run(sequence, &[token], LogitsWanted::Last, &mut Silent)
    }

    /// Records from now on which experts every token chooses, those that nearly came behind them, as a trace in `path`
    /// ([`k3_experts::trace`]). It is written pass by pass under another name, and has its own when
    /// [`Engine::finish_recording`] returns. Passes of an engine that records take turns.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn record_routing(&mut self, path: impl AsRef<Path>) -> Result<(), RecordError> {
        let recorder = Recorder::create(path.as_ref(), self.model.config(), self.model.num_layers())?;
        self.recorder = Some(Mutex::new(recorder));
        Ok(())
    }

    /// Ends a recording, and returns the number of tokens in it; `None` if there is none.
    ///
    /// # Errors
    /// [`RecordError::Write`], also for what went wrong on the way: a run goes on without its recording.
    pub fn finish_recording(&mut self) -> Result<Option<usize>, RecordError> {
        let recorder = self.recorder.take().map(|r| r.into_inner().unwrap_or_else(PoisonError::into_inner));
        recorder.map(Recorder::finish).transpose()
    }

    /// One forward pass over several sequences: weights and experts are read once for all of them. Each gets, bit for
    /// bit, what it would get alone, and fails alone; working memory grows with the number of tokens.
    pub fn step(
        &self,
        batch: &mut [Step<'_, D>],
        observer: &mut dyn Observer,
    ) -> Result<Vec<SpanResult>, ForwardError> {
        let mut spans: Vec<Span<'_, D>> = batch
            .iter_mut()
            .map(|s| Span { state: &mut s.sequence.state, tokens: s.tokens, logits: s.logits })
            .collect();
        let results = match &self.recorder {
            None => self.model.forward(&mut spans, &*self.store, observer)?,
            Some(recorder) => {
                let recorder = &mut *recorder.lock().unwrap_or_else(PoisonError::into_inner);
                let observer = &mut Recording { recorder, inner: observer };
                let results = self.model.forward(&mut spans, &*self.store, observer);
                observer.recorder.end_pass(results.is_ok());
                results?
            }
        };
        for (step, result) in batch.iter_mut().zip(&results) {
            if result.is_ok() {
                step.sequence.tokens.extend_from_slice(step.tokens);
            }
        }
        Ok(results)
    }

    /// Consumes `tokens` in as few chunks as [`EngineOptions::activation_bytes`] allows, with an observer, and returns
    /// the logits wanted. Each chunk goes through all layers before the next, so of a prompt that is one chunk every
    /// expert is read at most once.
    ///
    /// A prompt that cannot be run as a whole is refused before any of it is consumed, and never cut.
    pub fn run(
        &self,
        sequence: &mut Sequence<D>,
        tokens: &[u32],
        wanted: LogitsWanted,
        observer: &mut dyn Observer,
    ) -> Result<Logits, RunError> {
        check_tokens(self.model.config(), tokens, sequence.position())?;
        let mut logits = Logits::default();
        let chunks = equal_chunks(tokens, self.passes(tokens.len(), wanted));
        let last = chunks.len() - 1;
        for (i, chunk) in chunks.into_iter().enumerate() {
            let want = match wanted {
                LogitsWanted::Last if i < last => LogitsWanted::None,
                other => other,
            };
            let step = Step { sequence, tokens: chunk, logits: want };
            let part = self.step(&mut [step], observer)?.pop().expect("one result for one step")?;
            logits.width = part.width;
            logits.values.extend(part.values);
        }
        Ok(logits)
    }
}

/// `tokens` in `n` pieces, the longest one token longer than the shortest.
fn equal_chunks(mut tokens: &[u32], n: usize) -> Vec<&[u32]> {
    (0..n)
        .map(|i| {
            let (chunk, rest) = tokens.split_at(tokens.len().div_ceil(n - i));
            tokens = rest;
            chunk
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::equal_chunks;

    #[track_caller]
    fn check(tokens: u32, n: usize, expected: &[usize]) {
        let tokens: Vec<u32> = (0..tokens).collect();
        let chunks = equal_chunks(&tokens, n);
        assert_eq!(chunks.iter().map(|c| c.len()).collect::<Vec<_>>(), expected);
        assert_eq!(chunks.concat(), tokens);
    }

    #[test]
    fn chunks_are_of_equal_size() {
        check(1, 1, &[1]);
        check(2048, 1, &[2048]);
        check(513, 2, &[257, 256]);
        check(7, 3, &[3, 2, 2]);
        check(4, 4, &[1, 1, 1, 1]);
    }
}
