//! The CPU with its indexer's choice replaced by chance.

use k3_experts::Expert;
use k3_format::{IndexerConfig, KdaConfig, MlaConfig};
use k3_graph::device::{
    Conv, ExpertUse, IndexQuery, KdaStep, MlaAttend, RouterRule, SequenceRows, SituCaps, StateTensor,
};
use k3_graph::{Cpu, Device, DeviceError, Routing, Selected, Selection};
use k3_quant::Matrix;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// [`Cpu`], except that a token beyond the indexer's budget attends as many keys as the budget has, drawn at random from
/// all that it may see.
///
/// The draw of a row follows from the seed, its position and its query: other in every layer, and the same for any
/// chunks, batch and threads.
#[derive(Debug)]
pub struct RandomSelection {
    cpu: Cpu,
    seed: u64,
}

type Act = <Cpu as Device>::Act;
type Linear = <Cpu as Device>::Linear;
type Vector = <Cpu as Device>::Vector;
type KdaState = <Cpu as Device>::KdaState;
type MlaState = <Cpu as Device>::MlaState;
type Done<T> = Result<T, DeviceError>;

impl RandomSelection {
    /// A device that computes on `cpu`.
    pub fn new(cpu: Cpu, seed: u64) -> Self {
        Self { cpu, seed }
    }

    /// `k` of the positions `0..keys`, ascending.
    fn draw(&self, query: &[f32], k: usize, keys: usize) -> Vec<u32> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&(keys as u64).to_le_bytes());
        for q in query {
            hasher.update(&q.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
        let mut positions: Vec<u32> = (0..keys as u32).collect();
        for i in 0..k {
            let other = i + (rng.next_u64() % (keys - i) as u64) as usize;
            positions.swap(i, other);
        }
        positions.truncate(k);
        positions.sort_unstable();
        positions
    }
}

impl Device for RandomSelection {
    type Act = Act;
    type Linear = Linear;
    type Vector = Vector;
    type KdaState = KdaState;
    type MlaState = MlaState;
    type Selection = Selection;

    fn kind(&self) -> &'static str {
        "cpu-f32, random selection"
    }

    fn deviation(&self) -> Option<&'static str> {
        Some("random selection")
    }

    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Done<Selection> {
        let (k, width) = (query.config.topk, query.config.n_heads * query.config.head_dim);
        let q = self.cpu.download(query.q)?;
        let positions = states.iter().flat_map(|s| s.rows.clone().zip(s.position + 1..));
        let row = |(row, keys): (usize, usize)| {
            if keys <= k {
                return Selected::All;
            }
            Selected::Keys(self.draw(&q[row * width..(row + 1) * width], k, keys))
        };
        Ok(Selection { rows: positions.map(row).collect() })
    }

    // Everything else is the CPU's.

    fn load_linear(&self, weight: Matrix) -> Done<Linear> {
        self.cpu.load_linear(weight)
    }
    fn load_vector(&self, weight: &[f32]) -> Done<Vector> {
        self.cpu.load_vector(weight)
    }
    fn upload(&self, width: usize, values: &[f32]) -> Done<Act> {
        self.cpu.upload(width, values)
    }
    fn download(&self, x: &Act) -> Done<Vec<f32>> {
        self.cpu.download(x)
    }
    fn embed(&self, table: &Linear, ids: &[u32]) -> Done<Act> {
        self.cpu.embed(table, ids)
    }
    fn linear(&self, weight: &Linear, x: &Act) -> Done<Act> {
        self.cpu.linear(weight, x)
    }
    fn rms_norm(&self, x: &Act, gain: &Vector, eps: f64) -> Done<Act> {
        self.cpu.rms_norm(x, gain, eps)
    }
    fn add(&self, acc: &mut Act, y: &Act) -> Done<()> {
        self.cpu.add(acc, y)
    }
    fn select_rows(&self, x: &Act, rows: &[usize]) -> Done<Act> {
        self.cpu.select_rows(x, rows)
    }
    fn situ_glu(&self, gate: &Act, up: &Act, caps: SituCaps) -> Done<Act> {
        self.cpu.situ_glu(gate, up, caps)
    }
    fn sigmoid_gate(&self, x: &Act, gate: &Act) -> Done<Act> {
        self.cpu.sigmoid_gate(x, gate)
    }
    fn attn_res_weights(&self, sources: &[&Act], score: &Vector, eps: f64) -> Done<Vec<f32>> {
        self.cpu.attn_res_weights(sources, score, eps)
    }
    fn attn_res_mix(&self, sources: &[&Act], score: &Vector, eps: f64) -> Done<Act> {
        self.cpu.attn_res_mix(sources, score, eps)
    }
    fn new_kda_state(&self, config: &KdaConfig) -> Done<KdaState> {
        self.cpu.new_kda_state(config)
    }
    fn short_conv(
        &self,
        x: &Act,
        taps: &Vector,
        which: Conv,
        states: &mut [SequenceRows<'_, KdaState>],
    ) -> Done<Act> {
        self.cpu.short_conv(x, taps, which, states)
    }
    fn kda_step(&self, step: KdaStep<'_, Self>, states: &mut [SequenceRows<'_, KdaState>]) -> Done<Act> {
        let KdaStep { config, q, k, v, decay, beta, a_log, dt_bias } = step;
        self.cpu.kda_step(KdaStep { config, q, k, v, decay, beta, a_log, dt_bias }, states)
    }
    fn gated_head_norm(&self, x: &Act, gain: &Vector, gate: &Act, eps: f64) -> Done<Act> {
        self.cpu.gated_head_norm(x, gain, gate, eps)
    }
    fn new_mla_state(&self, config: &MlaConfig, indexer: Option<&IndexerConfig>) -> Done<MlaState> {
        self.cpu.new_mla_state(config, indexer)
    }
    fn mla_append(
        &self,
        kv: &Act,
        latent_gain: &Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Done<()> {
        self.cpu.mla_append(kv, latent_gain, eps, states)
    }
    fn index_append(
        &self,
        k: &Act,
        gain: &Vector,
        bias: &Vector,
        eps: f64,
        states: &mut [SequenceRows<'_, MlaState>],
    ) -> Done<()> {
        self.cpu.index_append(k, gain, bias, eps, states)
    }
    fn download_selection(&self, selection: &Selection) -> Done<Selection> {
        self.cpu.download_selection(selection)
    }
    fn lost_rows(&self, selection: &Selection) -> Done<Vec<usize>> {
        self.cpu.lost_rows(selection)
    }
    fn index_scores(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Done<Vec<Vec<f32>>> {
        let IndexQuery { config, q, weights } = query;
        self.cpu.index_scores(IndexQuery { config, q, weights }, states)
    }
    fn mla_attend(
        &self,
        attend: MlaAttend<'_, Self>,
        selection: Option<&Selection>,
        states: &[SequenceRows<'_, MlaState>],
    ) -> Done<Act> {
        let MlaAttend { config, q, kv_b } = attend;
        self.cpu.mla_attend(MlaAttend { config, q, kv_b }, selection, states)
    }
    fn route(&self, logits: &Act, bias: &Vector, rule: RouterRule) -> Done<Routing> {
        self.cpu.route(logits, bias, rule)
    }
    fn expert_outputs(&self, rows: usize, width: usize) -> Done<Act> {
        self.cpu.expert_outputs(rows, width)
    }
    fn expert_ffn(
        &self,
        expert: Expert,
        z: &Act,
        uses: &[ExpertUse],
        caps: SituCaps,
        out: &mut Act,
    ) -> Done<()> {
        self.cpu.expert_ffn(expert, z, uses, caps, out)
    }
    fn experts_ffn(
        &self,
        experts: Vec<(Expert, Vec<ExpertUse>)>,
        z: &Act,
        caps: SituCaps,
        out: &mut Act,
    ) -> Done<()> {
        self.cpu.experts_ffn(experts, z, caps, out)
    }
    fn expert_sum(&self, outputs: &Act, routing: &Routing) -> Done<Act> {
        self.cpu.expert_sum(outputs, routing)
    }
    fn export_kda(&self, state: &KdaState) -> Done<Vec<StateTensor>> {
        self.cpu.export_kda(state)
    }
    fn import_kda(&self, config: &KdaConfig, parts: &[StateTensor]) -> Done<KdaState> {
        self.cpu.import_kda(config, parts)
    }
    fn export_mla(&self, state: &MlaState) -> Done<Vec<StateTensor>> {
        self.cpu.export_mla(state)
    }
    fn import_mla(
        &self,
        config: &MlaConfig,
        indexer: Option<&IndexerConfig>,
        tokens: usize,
        parts: &[StateTensor],
    ) -> Done<MlaState> {
        self.cpu.import_mla(config, indexer, tokens, parts)
    }
}
