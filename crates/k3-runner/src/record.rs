//! Routing of a run, recorded as a trace that replacement policies can be judged on (`docs/expert-store.md` 1).

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use k3_experts::trace::{Format, Geometry, MAGIC};
use k3_format::{ModelConfig, NewFile, ShardError};
use k3_graph::{Observer, Point, Probe, Routing, Selection};

/// Why routing was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The file could not be written whole. What had its name is still there.
    #[error("recording routing in {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<ShardError>,
    },
    /// There is nothing to record, or no room for it in the format.
    #[error(
        "recording routing in {}: a trace has 1 to 65536 layers with routed experts, as many experts in each, and \
         at most 16777216 in all; \
         the {loaded} layers loaded have {layers} with {experts}",
        path.display()
    )]
    Geometry {
        /// The file.
        path: PathBuf,
        /// Layers of the model that runs.
        loaded: usize,
        /// Of those, with routed experts.
        layers: usize,
        /// Of such a layer.
        experts: usize,
    },
}

/// Writes what every token chose, pass by pass, in the format of [`k3_experts::trace::Trace`].
#[derive(Debug)]
pub(crate) struct Recorder {
    file: NewFile,
    geometry: Geometry,
    /// Layers without experts, which come first.
    dense: usize,
    /// Known from the first choice on.
    format: Option<Format>,
    /// Of the pass under way, by layer with experts: `[rows, ranks]`.
    pass: Vec<Vec<u32>>,
    /// Rows of that pass that chose nothing.
    lost: Vec<usize>,
    tokens: usize,
    /// The first failure; nothing is written after it.
    failed: Option<ShardError>,
}

impl Recorder {
    /// Starts the file. It has its name when [`Recorder::finish`] returns; an earlier trace is replaced then, and no other file.
    pub(crate) fn create(path: &Path, config: &ModelConfig, loaded: usize) -> Result<Self, RecordError> {
        let dense = config.first_k_dense_replace;
        let geometry = Geometry {
            layers: loaded.saturating_sub(dense),
            experts: config.moe.num_experts,
            per_token: config.moe.num_experts_per_token,
        };
        if !Format::has_room(geometry) {
            let Geometry { layers, experts, .. } = geometry;
            return Err(RecordError::Geometry { path: path.into(), loaded, layers, experts });
        }
        let file = NewFile::replacing(path, MAGIC)
            .map_err(|source| RecordError::Write { path: path.into(), source: Box::new(source) })?;
        let pass = vec![Vec::new(); geometry.layers];
        Ok(Self { file, geometry, dense, format: None, pass, lost: Vec::new(), tokens: 0, failed: None })
    }

    fn routing(&mut self, layer: usize, routing: &Routing) {
        let k = routing.experts_per_token;
        let rows = routing.ids.len() / k.max(1);
        let behind = routing.runner_ups.len() / rows.max(1);
        let choices = &mut self.pass[layer - self.dense];
        choices.clear();
        for row in 0..rows {
            choices.extend_from_slice(&routing.ids[row * k..(row + 1) * k]);
            choices.extend_from_slice(&routing.runner_ups[row * behind..(row + 1) * behind]);
        }
        self.lost.extend(&routing.non_finite);
        if self.format.is_none() {
            let format = Format::new(self.geometry, k + behind);
            self.write(format.header().as_bytes());
            self.format = Some(format);
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.failed = self.file.write(bytes).err();
        }
    }

    /// The pass is over: its tokens are written, or forgotten.
    pub(crate) fn end_pass(&mut self, is_good: bool) {
        if let Some(format) = self.format.filter(|_| is_good) {
            let ranks = format.ranks();
            let rows = self.pass.iter().map(|choices| choices.len() / ranks).min().unwrap_or(0);
            for row in (0..rows).filter(|row| !self.lost.contains(row)).collect::<Vec<_>>() {
                let choices = self.pass.iter().flat_map(|of| &of[row * ranks..(row + 1) * ranks]);
                let bytes = format.encode(choices.copied());
                self.write(&bytes);
                self.tokens += 1;
            }
        }
        self.pass.iter_mut().for_each(Vec::clear);
        self.lost.clear();
    }

    /// Gives the file its name. Returns the number of tokens in it.
    pub(crate) fn finish(mut self) -> Result<usize, RecordError> {
        if self.format.is_none() {
            let header = Format::new(self.geometry, self.geometry.per_token).header();
            self.write(header.as_bytes());
        }
        let path = self.file.path().to_owned();
        let done = match self.failed {
            Some(error) => Err(error),
            None => self.file.commit(),
        };
        done.map_err(|source| RecordError::Write { path, source: Box::new(source) })?;
        Ok(self.tokens)
    }
}

/// An observer that also records.
pub(crate) struct Recording<'a> {
    pub(crate) recorder: &'a mut Recorder,
    pub(crate) inner: &'a mut dyn Observer,
}

impl Observer for Recording<'_> {
    fn wants(&self, probe: Probe) -> bool {
        probe == Probe::Routing || self.inner.wants(probe)
    }
    fn activation(&mut self, point: Point, values: &[f32]) {
        self.inner.activation(point, values);
    }
    fn replace(&mut self, point: Point) -> Option<Vec<f32>> {
        self.inner.replace(point)
    }
    fn attn_res_weights(&mut self, point: Point, weights: &[f32]) {
        self.inner.attn_res_weights(point, weights);
    }
    fn routing(&mut self, layer: usize, routing: &Routing) {
        self.recorder.routing(layer, routing);
        if self.inner.wants(Probe::Routing) {
            self.inner.routing(layer, routing);
        }
    }
    fn selection(&mut self, layer: usize, selection: &Selection, scores: &[Vec<f32>]) {
        self.inner.selection(layer, selection, scores);
    }
    fn layer_done(&mut self, done: usize, layers: usize) -> ControlFlow<()> {
        self.inner.layer_done(done, layers)
    }
}
