//! Routed experts in memory, handed over in any order, with the faults that a real store can have.

use std::sync::Mutex;

use k3_experts::{
    Arrivals, Completion, Counters, Expert, ExpertError, ExpertId, ExpertRequest, ExpertStore, Phase, Ready,
};
use k3_format::ModelConfig;
use k3_quant::{E8M0, Matrix, MatrixData, WeightFormat};

use super::{Lcg, random_matrix};

/// Order of arrival.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    AsAsked,
    Reversed,
    Shuffled(u64),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// An expert cannot be read.
    Unreadable { layer: usize, expert: ExpertId },
    /// The last expert of a layer does not come.
    TooFew { layer: usize },
    /// In place of the last expert of a layer, the first comes again.
    Twice { layer: usize },
    /// After the experts of a layer comes one that nobody asked for.
    Unasked { layer: usize, expert: ExpertId },
    /// The up projection of an expert has a row too many.
    Misshapen { layer: usize, expert: ExpertId },
}

/// A call of [`ExpertStore::fetch`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) layer: usize,
    pub(crate) experts: Vec<ExpertId>,
    pub(crate) phase: Phase,
}

/// MXFP4 experts of every layer.
pub(crate) struct MemoryStore {
    experts: Vec<Vec<Expert>>,
    order: Order,
    fault: Option<Fault>,
    calls: Mutex<Vec<Call>>,
    wants_guesses: bool,
    guesses: Mutex<Vec<(usize, Vec<ExpertId>)>>,
}

impl MemoryStore {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let moe = &config.moe;
        let (inner, latent) = (moe.moe_intermediate_size, moe.routed_expert_hidden_size);
        let expert = |layer: usize, id: ExpertId| {
            let mut rng = Lcg::new((layer * moe.num_experts) as u64 + u64::from(id));
            let mut matrix = |rows, cols| random_matrix(WeightFormat::Mxfp4, rows, cols, &mut rng);
            Expert { id, w1: matrix(inner, latent), w2: matrix(latent, inner), w3: matrix(inner, latent) }
        };
        let experts = (0..config.num_hidden_layers())
            .map(|l| (0..moe.num_experts as ExpertId).map(|id| expert(l, id)).collect())
            .collect();
        Self {
            experts,
            order: Order::AsAsked,
            fault: None,
            calls: Mutex::default(),
            wants_guesses: false,
            guesses: Mutex::default(),
        }
    }

    /// Asks for guesses, and notes them.
    #[must_use]
    pub(crate) fn with_guesses(mut self) -> Self {
        self.wants_guesses = true;
        self
    }

    /// The guesses since the last look.
    pub(crate) fn take_guesses(&self) -> Vec<(usize, Vec<ExpertId>)> {
        std::mem::take(&mut self.guesses.lock().unwrap())
    }

    #[must_use]
    pub(crate) fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    #[must_use]
    pub(crate) fn with_fault(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }

    /// Damages one block scale of the down projection of an expert.
    #[must_use]
    pub(crate) fn with_nan_scale(mut self, layer: usize, id: ExpertId) -> Self {
        let w2 = &mut self.experts[layer][id as usize].w2;
        let MatrixData::Mxfp4 { packed, scale } = w2.data() else { unreachable!("experts are MXFP4") };
        let mut scale = scale.to_vec();
        scale[3] = E8M0::NAN.0;
        *w2 = Matrix::mxfp4(w2.rows(), w2.cols(), packed.clone(), scale.into()).unwrap();
        self
    }

    /// The calls since the last look.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl ExpertStore for MemoryStore {
    fn fetch<'a>(&'a self, request: ExpertRequest<'_>) -> Arrivals<'a> {
        let layer = request.layer;
        let mut ids = request.experts.to_vec();
        self.calls.lock().unwrap().push(Call { layer, experts: ids.clone(), phase: request.phase });
        match self.order {
            Order::AsAsked => {}
            Order::Reversed => ids.reverse(),
            Order::Shuffled(seed) => Lcg::new(seed + layer as u64).shuffle(&mut ids),
        }
        match self.fault {
            Some(Fault::TooFew { layer: l }) if l == layer => {
                ids.pop();
            }
            Some(Fault::Twice { layer: l }) if l == layer => {
                ids.pop();
                ids.extend(ids.first().copied());
            }
            Some(Fault::Unasked { layer: l, expert }) if l == layer => ids.push(expert),
            _ => {}
        }
        Box::new(Ready(ids.into_iter().map(move |id| {
            if self.fault == Some(Fault::Unreadable { layer, expert: id }) {
                let source = "the disk said no".into();
                return Err(ExpertError::Read { layer, expert: id, source });
            }
            let known = self.experts[layer].get(id as usize);
            let mut expert =
                known.cloned().unwrap_or_else(|| Expert { id, ..self.experts[layer][0].clone() });
            if self.fault == Some(Fault::Misshapen { layer, expert: id }) {
                let (rows, cols) = (expert.w3.rows() + 1, expert.w3.cols());
                expert.w3 = random_matrix(WeightFormat::Mxfp4, rows, cols, &mut Lcg::new(0));
            }
            Ok(expert)
        })))
    }

    fn wants_guesses(&self) -> bool {
        self.wants_guesses
    }

    fn prefetch(&self, layer: usize, experts: &[ExpertId]) {
        let asked = self.calls.lock().unwrap().last().map(|call| (call.layer, call.phase));
        // Layer 0 has no experts to ask for.
        assert!(layer == 1 || asked == Some((layer - 1, Phase::Decode)), "{layer}: demand first, {asked:?}");
        self.guesses.lock().unwrap().push((layer, experts.to_vec()));
    }

    /// Everything stays in memory anyway.
    fn retire(&self, _: Expert, _: Box<dyn Completion>) {}

    fn counters(&self) -> Counters {
        Counters::default()
    }
}
