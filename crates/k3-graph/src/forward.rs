//! The control flow of the model, exactly once. Sections are those of `docs/arithmetic.md`.

mod error;
mod lookahead;
mod plan;
mod working;

use std::ops::Range;

use k3_experts::{Choices, ExpertRequest, ExpertStore, Phase};
use k3_format::ModelConfig;

use crate::device::{Conv, Device, IndexQuery, KdaStep, MlaAttend, SequenceRows};
use crate::model::{Attention, GatedMlp, Indexer, Kda, Layer, Mla, Mlp, Model, Moe};
use crate::observer::{Observer, Point, Probe};
use crate::scalar::{INDEX_NORM_EPS, LORA_NORM_EPS};
use crate::state::{LayerState, SequenceState};

pub use error::{ForwardError, Place, SpanError, TokenError};
pub use lookahead::Lookahead;
use lookahead::NextRouter;
use plan::ExpertPlan;
pub use working::working_bytes_per_token;

/// Some tokens of one sequence: a prefill chunk, or one token to decode.
pub struct Span<'a, D: Device> {
    /// Where the sequence stands; advanced by the pass.
    pub state: &'a mut SequenceState<D>,
    /// What follows.
    pub tokens: &'a [u32],
    /// Of which positions logits are wanted.
    pub logits: LogitsWanted,
}

/// Of which positions of a span logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last: what follows the span.
    Last,
    /// All of them.
    All,
}

/// Logits of one span.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits {
    /// `vocab_size`
    pub width: usize,
    /// `[positions, width]`
    pub values: Vec<f32>,
}

impl Logits {
    /// Logits after position `i` of those asked for.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.width..(i + 1) * self.width]
    }

    /// Logits after the last position, if any were asked for.
    pub fn last(&self) -> Option<&[f32]> {
        let start = self.values.len().checked_sub(self.width)?;
        (self.width > 0).then(|| &self.values[start..])
    }
}

/// What a span got out of a pass. One span's failure leaves the others as if it had not been there.
pub type SpanResult = Result<Logits, SpanError>;

/// One span's share of the batch.
struct Rows {
    rows: Range<usize>,
    position: usize,
}

/// What is common to all layers of one pass.
struct Pass<'a, 'o, D: Device> {
    model: &'a Model<D>,
    store: &'a dyn ExpertStore,
    observer: &'o mut dyn Observer,
    spans: Vec<Rows>,
    phase: Phase,
    /// First failure of each span.
    failed: Vec<Option<SpanError>>,
}

/// Whether a model of this config could run `tokens` after a sequence that stands at `position`. A prompt that goes
/// through in chunks is checked as a whole before the first; a program can check before it loads weights.
pub fn check_tokens(config: &ModelConfig, tokens: &[u32], position: usize) -> Result<(), TokenError> {
    let (vocab_size, context) = (config.vocab_size, config.max_position_embeddings);
    if tokens.is_empty() {
        return Err(TokenError::None);
    }
    for (index, &id) in tokens.iter().enumerate() {
        if id as usize >= vocab_size {
            return Err(TokenError::Unknown { index, id, vocab_size });
        }
        if Some(id) == config.tokens.media_placeholder {
            return Err(TokenError::Media { index, id });
        }
    }
    if position.saturating_add(tokens.len()) > context {
        return Err(TokenError::Context { tokens: tokens.len(), position, context });
    }
    Ok(())
}

impl<D: Device> Model<D> {
    /// Runs the model over a batch of spans of different sequences and advances their states.
    ///
    /// Each span's result is, bit for bit, what it would be alone and for any split of its tokens into spans.
    /// Weights are read once, and each routed expert that any row needs is fetched once. Working memory grows with
    /// the number of rows by [`working_bytes_per_token`] each; split a prompt that is too long for that.
    ///
    /// Malformed input is refused before any state is touched. If the pass itself fails, the states of all its
    /// spans are marked unusable.
    pub fn forward(
        &self,
        batch: &mut [Span<'_, D>],
        store: &dyn ExpertStore,
        observer: &mut dyn Observer,
    ) -> Result<Vec<SpanResult>, ForwardError> {
        self.check(batch)?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut start = 0;
        let spans: Vec<Rows> = batch
            .iter()
            .map(|span| {
                let rows = start..start + span.tokens.len();
                start = rows.end;
                Rows { rows, position: span.state.position }
            })
            .collect();
        let phase = if spans.len() == start { Phase::Decode } else { Phase::Prefill };
        for span in batch.iter_mut() {
            span.state.broken = true;
        }
        let failed = vec![None; batch.len()];
        let pass = Pass { model: self, store, observer, spans, phase, failed };
        let results = pass.run(batch)?;
        for (span, result) in batch.iter_mut().zip(&results) {
            // A lost state keeps the position at which the pass that lost it started.
            if result.is_ok() {
                span.state.broken = false;
                span.state.position += span.tokens.len();
            }
        }
        Ok(results)
    }

    fn check(&self, batch: &[Span<'_, D>]) -> Result<(), ForwardError> {
        for (span, s) in batch.iter().enumerate() {
            check_tokens(&self.config, s.tokens, s.state.position)
                .map_err(|source| ForwardError::Tokens { span, source })?;
            s.state.check(&self.state_shape).map_err(|source| ForwardError::State { span, source })?;
        }
        Ok(())
    }
}

impl<D: Device> Pass<'_, '_, D> {
    /// Section 2.
    fn run(mut self, batch: &mut [Span<'_, D>]) -> Result<Vec<SpanResult>, ForwardError> {
        let model = self.model;
        let device = &model.device;
        let ids: Vec<u32> = batch.iter().flat_map(|s| s.tokens).copied().collect();
        let mut stack: Vec<D::Act> = Vec::new();
        // [rows, E]
        let mut p = device.embed(&model.embed_tokens, &ids)?;
        for (l, layer) in model.layers.iter().enumerate() {
            p = self.layer(l, layer, p, &mut stack, batch)?;
            if self.failed.iter().all(Option::is_some) {
                return Ok(self.failed.into_iter().flatten().map(Err).collect());
            }
            if self.observer.layer_done(l + 1, model.layers.len()).is_break() {
                return Err(ForwardError::Cancelled { layers: l + 1 });
            }
        }
        self.logits(&stack, &p, batch)
    }

    /// Section 3.2. `p` is the running depth sum, `stack` the snapshots of it, oldest first; all `[rows, E]`.
    fn layer(
        &mut self,
        l: usize,
        layer: &Layer<D>,
        p: D::Act,
        stack: &mut Vec<D::Act>,
        batch: &mut [Span<'_, D>],
    ) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        let eps = self.model.config.rms_norm_eps;

        let h = match &layer.self_attention_res {
            Some(score) => Some(self.mix(Point::AttnIn(l), stack, &p, score)?),
            None => self.replacement(Point::AttnIn(l))?,
        };
        let x = {
            let h = h.as_ref().unwrap_or(&p);
            self.observe(Point::AttnIn(l), h)?;
            device.rms_norm(h, &layer.input_layernorm, eps)?
        };
        drop(h);
        let y = match &layer.attention {
            Attention::Kda(weights) => self.kda(l, weights, &x, batch)?,
            Attention::Mla(weights) => self.mla(l, weights, &x, batch)?,
        };
        drop(x);
        self.observe(Point::AttnOut(l), &y)?;
        let mut p = if l.is_multiple_of(self.model.config.attn_res_block_size) {
            stack.push(p);
            y
        } else {
            let mut p = p;
            device.add(&mut p, &y)?;
            p
        };

        let h = self.mix(Point::MlpIn(l), stack, &p, &layer.mlp_res)?;
        self.observe(Point::MlpIn(l), &h)?;
        let x = device.rms_norm(&h, &layer.post_attention_layernorm, eps)?;
        let y = match &layer.mlp {
            Mlp::Dense(weights) => {
                // Nothing is being read meanwhile: the best time for a guess.
                if let Some(router) = NextRouter::behind(l, self) {
                    router.guess(self, &h)?;
                }
                drop(h);
                self.gated_mlp(weights, &x)?
            }
            Mlp::Moe(weights) => {
                let next = NextRouter::behind(l, self).map(|router| (router, h));
                self.moe(l, weights, &x, next)?
            }
        };
        self.observe(Point::MlpOut(l), &y)?;
        device.add(&mut p, &y)?;
        self.observe(Point::Hidden(l), &p)?;
        Ok(p)
    }

    /// Section 3.1: attention over the snapshots and the running sum, `[rows, E]` each, for each row.
    fn mix(
        &mut self,
        point: Point,
        stack: &[D::Act],
        p: &D::Act,
        score: &D::Vector,
    ) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        let eps = self.model.config.rms_norm_eps;
        let sources: Vec<&D::Act> = stack.iter().chain([p]).collect();
        if self.observer.wants(Probe::AttnRes) {
            self.observer.attn_res_weights(point, &device.attn_res_weights(&sources, score, eps)?);
        }
        match self.replacement(point)? {
            Some(h) => Ok(h),
            None => Ok(device.attn_res_mix(&sources, score, eps)?),
        }
    }

    /// Section 5. Shapes with P = heads * head_dim, E = hidden; `x` and the result are `[rows, E]`.
    fn kda(
        &mut self,
        l: usize,
        w: &Kda<D>,
        x: &D::Act,
        batch: &mut [Span<'_, D>],
    ) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        let config = &self.model.config.kda;
        let states = &mut states(&self.spans, batch, l, |state| match state {
            LayerState::Kda(s) => s,
            LayerState::Mla(_) => unreachable!("layer {l} is KDA in the model's layer map"),
        });
        // [rows, P] each
        let [q, k, v] = [Conv::Q, Conv::K, Conv::V].map(|which| {
            let projected = device.linear(&w.qkv_proj[which as usize], x)?;
            device.short_conv(&projected, &w.qkv_conv1d[which as usize], which, states)
        });
        let (q, k, v) = (q?, k?, v?);
        // [rows, head_dim], then [rows, P]
        let decay = device.linear(&w.f_b_proj, &device.linear(&w.f_a_proj, x)?)?;
        // [rows, heads]
        let beta = device.linear(&w.b_proj, x)?;
        let step = KdaStep {
            config,
            q: &q,
            k: &k,
            v: &v,
            decay: &decay,
            beta: &beta,
            a_log: &w.a_log,
            dt_bias: &w.dt_bias,
        };
        // [rows, P]; so is its gate
        let mut o = device.kda_step(step, states)?;
        // What is not needed any more would be the peak of a long prompt.
        drop((q, k, v, decay, beta));
        let gate = device.linear(&w.g_proj, x)?;
        o = device.gated_head_norm(&o, &w.o_norm, &gate, self.model.config.rms_norm_eps)?;
        drop(gate);
        Ok(device.linear(&w.o_proj, &o)?)
    }

    /// Section 6, and 7 where the model has an indexer. `x` and the result are `[rows, E]`.
    fn mla(
        &mut self,
        l: usize,
        w: &Mla<D>,
        x: &D::Act,
        batch: &mut [Span<'_, D>],
    ) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        let states = &mut states(&self.spans, batch, l, |state| match state {
            LayerState::Mla(s) => s,
            LayerState::Kda(_) => unreachable!("layer {l} is full attention in the model's layer map"),
        });
        // [rows, q_lora]
        let cq = device.rms_norm(&device.linear(&w.q_a_proj, x)?, &w.q_a_layernorm, LORA_NORM_EPS)?;
        // [rows, heads * (nope + extra)]
        let q = device.linear(&w.q_b_proj, &cq)?;
        // [rows, kv_lora + extra]
        let kv = device.linear(&w.kv_a_proj_with_mqa, x)?;
        device.mla_append(&kv, &w.kv_a_layernorm, LORA_NORM_EPS, states)?;
        drop(kv);
        let selection = match &w.indexer {
            Some(indexer) => self.index(l, indexer, x, &cq, states)?,
            None => None,
        };
        let attend = MlaAttend { config: &self.model.config.mla, q: &q, kv_b: &w.kv_b_proj };
        // [rows, heads * v]; so is its gate
        let mut o = device.mla_attend(attend, selection.as_ref(), states)?;
        drop((cq, q, selection));
        let gate = device.linear(&w.g_proj, x)?;
        o = device.sigmoid_gate(&o, &gate)?;
        drop(gate);
        Ok(device.linear(&w.o_proj, &o)?)
    }

    /// Section 7. Every key is cached from the first token on; the scores are only computed where a row has more
    /// keys than the budget. `None`: all rows attend all keys.
    fn index(
        &mut self,
        l: usize,
        w: &Indexer<D>,
        x: &D::Act,
        cq: &D::Act,
        states: &mut [SequenceRows<'_, D::MlaState>],
    ) -> Result<Option<D::Selection>, ForwardError> {
        let device = &self.model.device;
        let Some(config) = self.model.indexer() else { return Ok(None) };
        // [rows, head_dim] of the indexer
        let k = device.linear(&w.wk, x)?;
        device.index_append(&k, &w.k_norm_weight, &w.k_norm_bias, INDEX_NORM_EPS, states)?;
        drop(k);

        let observed = self.observer.wants(Probe::Indexer);
        let keys = self.spans.iter().map(|s| s.position + s.rows.len()).max().unwrap_or(0);
        if keys <= config.topk && !observed {
            return Ok(None);
        }
        // [rows, n_heads * head_dim], [rows, n_heads]
        let q = device.linear(&w.wq_b, cq)?;
        let weights = device.linear(&w.weights_proj, x)?;
        let query = IndexQuery { config, q: &q, weights: &weights };
        let selection = device.index_select(query, states)?;
        if observed {
            let scores = device.index_scores(query, states)?;
            self.observer.selection(l, &device.download_selection(&selection)?, &scores);
        }
        for row in device.lost_rows(&selection)? {
            self.fail(row, Place::Indexer(l));
        }
        Ok(Some(selection))
    }

    /// Section 8.1: the dense MLP and the shared experts, `[rows, E]` to `[rows, inner]` and back.
    fn gated_mlp(&self, w: &GatedMlp<D>, x: &D::Act) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        let gate = device.linear(&w.gate_proj, x)?;
        let up = device.linear(&w.up_proj, x)?;
        let inner = device.situ_glu(&gate, &up, self.model.situ_caps())?;
        drop((gate, up));
        Ok(device.linear(&w.down_proj, &inner)?)
    }

    /// Sections 8.2 and 8.3, with k experts a row; `x` and the result are `[rows, E]`. `next` is a router to be asked early,
    /// and the mix that `x` is the norm of.
    fn moe(
        &mut self,
        l: usize,
        w: &Moe<D>,
        x: &D::Act,
        next: Option<(NextRouter<'_, D>, D::Act)>,
    ) -> Result<D::Act, ForwardError> {
        let device = &self.model.device;
        // [rows, experts]
        let logits = device.linear(&w.gate, x)?;
        let routing = device.route(&logits, &w.e_score_correction_bias, self.model.router_rule())?;
        drop(logits);
        if self.observer.wants(Probe::Routing) {
            self.observer.routing(l, &routing);
        }
        for &row in &routing.non_finite {
            self.fail(row, Place::Router(l));
        }

        // All reads are issued before anything else is computed; experts are used as they arrive.
        let mut plan = ExpertPlan::new(&routing, self.model.config.moe.num_experts, |row| self.is_lost(row));
        let store = self.store;
        let mut arrivals = store.fetch(ExpertRequest {
            layer: l,
            experts: &plan.wanted,
            choices: Choices { ids: &plan.choices, ranks: plan.ranks, used: routing.experts_per_token },
            phase: self.phase,
        });
        let ahead = self.model.lookahead;
        if let (Some((router, h)), Lookahead::Input) = (&next, ahead) {
            router.guess(self, h)?;
        }
        let shared = self.gated_mlp(&w.shared_experts, x)?;
        if let (Some((router, mut h)), Lookahead::Shared) = (next, ahead) {
            device.add(&mut h, &shared)?;
            router.guess(self, &h)?;
        }
        // [rows, latent], and [rows * k, latent]
        let z = device.linear(&w.routed_expert_down_proj, x)?;
        let latent = self.model.config.moe.routed_expert_hidden_size;
        let mut outputs = device.expert_outputs(routing.ids.len(), latent)?;
        let mut found = 0;
        // Working memory is that of half the rows, or of one expert that more of them use.
        let most = routing.experts_per_token;
        let enough = (routing.gaps.len() / 2).max(most);
        while let Some(first) = arrivals.next() {
            // What is here already is computed together, while the others are being read.
            let mut group = vec![plan.take(l, first?, &self.model.config.moe)?];
            let mut uses = group[0].1.len();
            while group.len() < most && uses < enough {
                let Some(more) = arrivals.next_ready() else { break };
                group.push(plan.take(l, more?, &self.model.config.moe)?);
                uses += group[group.len() - 1].1.len();
            }
            found += group.len();
            let in_flight = device.experts_ffn(&group, &z, self.model.situ_caps(), &mut outputs)?;
            if let Some(after) = in_flight {
                for (expert, _) in group {
                    let after = after.clone();
                    store.retire(expert, Box::new(move || after.is_complete()));
                }
            }
        }
        drop(arrivals);
        if found != plan.wanted.len() {
            return Err(ForwardError::MissingExperts { layer: l, expected: plan.wanted.len(), found });
        }
        // [rows, latent], then [rows, E]
        let mut r = device.expert_sum(&outputs, &routing)?;
        drop((outputs, z));
        r = device.rms_norm(&r, &w.routed_expert_norm, self.model.config.rms_norm_eps)?;
        let mut y = device.linear(&w.routed_expert_up_proj, &r)?;
        device.add(&mut y, &shared)?;
        Ok(y)
    }

    /// The last three lines of section 2, for the rows whose logits are wanted.
    fn logits(
        mut self,
        stack: &[D::Act],
        p: &D::Act,
        batch: &[Span<'_, D>],
    ) -> Result<Vec<SpanResult>, ForwardError> {
        let model = self.model;
        let device = &model.device;
        let width = model.config.vocab_size;
        let wanted: Vec<Range<usize>> = self
            .spans
            .iter()
            .zip(batch)
            .map(|(s, span)| match span.logits {
                LogitsWanted::None => s.rows.end..s.rows.end,
                LogitsWanted::Last => s.rows.end - 1..s.rows.end,
                LogitsWanted::All => s.rows.clone(),
            })
            .collect();
        let rows: Vec<usize> = wanted.iter().cloned().flatten().collect();
        let values = if rows.is_empty() {
            Vec::new()
        } else {
            let stack: Vec<D::Act> =
                stack.iter().map(|s| device.select_rows(s, &rows)).collect::<Result<_, _>>()?;
            let p = device.select_rows(p, &rows)?;
            let mut h = self.mix(Point::FinalMix, &stack, &p, &model.output_attn_res)?;
            self.observe(Point::FinalMix, &h)?;
            h = device.rms_norm(&h, &model.norm, model.config.rms_norm_eps)?;
            self.observe(Point::FinalNorm, &h)?;
            device.download(&device.linear(&model.lm_head, &h)?)?
        };
        let mut start = 0;
        for range in &wanted {
            for (i, row) in range.clone().enumerate() {
                let logits = &values[(start + i) * width..(start + i + 1) * width];
                if !logits.iter().all(|v| v.is_finite()) {
                    self.fail(row, Place::Logits);
                }
            }
            start += range.len();
        }
        let mut start = 0;
        let results = wanted.iter().zip(self.failed).map(|(range, failed)| {
            let values = &values[start * width..(start + range.len()) * width];
            start += range.len();
            match failed {
                Some(error) => Err(error),
                None => Ok(Logits { width, values: values.to_vec() }),
            }
        });
        Ok(results.collect())
    }

    /// Notes that row `row` met a non-finite value; the first one of a span counts.
    fn fail(&mut self, row: usize, place: Place) {
        if let Some(i) = self.spans.iter().position(|s| s.rows.contains(&row)) {
            let position = self.spans[i].position + row - self.spans[i].rows.start;
            self.failed[i].get_or_insert(SpanError::NonFinite { position, place });
        }
    }

    /// Whether row `row` belongs to a span that has failed.
    fn is_lost(&self, row: usize) -> bool {
        self.spans.iter().zip(&self.failed).any(|(s, failed)| failed.is_some() && s.rows.contains(&row))
    }

    fn observe(&mut self, point: Point, x: &D::Act) -> Result<(), ForwardError> {
        if self.observer.wants(Probe::Activations) {
            self.observer.activation(point, &self.model.device.download(x)?);
        }
        Ok(())
    }

    fn replacement(&mut self, point: Point) -> Result<Option<D::Act>, ForwardError> {
        if !matches!(point, Point::AttnIn(_) | Point::MlpIn(_)) {
            return Ok(None);
        }
        let Some(values) = self.observer.replace(point) else { return Ok(None) };
        let hidden = self.model.config.hidden_size;
        let expected = self.spans.last().map_or(0, |s| s.rows.end) * hidden;
        if values.len() != expected {
            return Err(ForwardError::Replacement { point, expected, found: values.len() });
        }
        Ok(Some(self.model.device.upload(hidden, &values)?))
    }
}

/// The states of one layer, each with its rows.
fn states<'b, D: Device, S>(
    spans: &[Rows],
    batch: &'b mut [Span<'_, D>],
    layer: usize,
    state: impl Fn(&'b mut LayerState<D>) -> &'b mut S,
) -> Vec<SequenceRows<'b, S>> {
    batch
        .iter_mut()
        .zip(spans)
        .map(|(span, s)| SequenceRows {
            state: state(&mut span.state.layers[layer]),
            rows: s.rows.clone(),
            position: s.position,
        })
        .collect()
}
