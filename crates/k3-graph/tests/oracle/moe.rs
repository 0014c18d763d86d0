//! SiTU-GLU, the router and the latent mixture of experts (`docs/arithmetic.md` 8).

use super::Trap;
use super::mxfp4::{Packed, through_mxfp8};
use super::num::{Matrix, Rows, add_scaled, add_to, rms, scaled, sigma, silu, softmax, to_bf16};

const NORM_EPS: f64 = 1e-5;
const GATE_CAP: f64 = 4.0;
const UP_CAP: f64 = 25.0;

pub(crate) fn situ(g: f64, u: f64, trap: Trap) -> f64 {
    let capped = GATE_CAP * (g / GATE_CAP).tanh();
    let up = UP_CAP * (u / UP_CAP).tanh();
    match trap {
        Trap::SigmaOfCappedGate => capped * sigma(capped) * up,
        Trap::UpNotCapped => capped * sigma(g) * u,
        Trap::GateNotCapped => silu(g) * up,
        Trap::SiluGlu => silu(g) * u,
        _ => capped * sigma(g) * up,
    }
}

/// `down(act(gate x, up x))`.
pub(crate) struct Glu {
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

impl Glu {
    pub(crate) fn apply_rows(&self, xs: &[Vec<f64>], trap: Trap) -> Rows {
        self.down.apply_rows(&self.inner_rows(xs, trap))
    }

    fn inner_rows(&self, xs: &[Vec<f64>], trap: Trap) -> Rows {
        let (g, u) = (self.gate.apply_rows(xs), self.up.apply_rows(xs));
        let act = |(g, u): (&Vec<f64>, &Vec<f64>)| g.iter().zip(u).map(|(g, u)| situ(*g, *u, trap)).collect();
        g.iter().zip(&u).map(act).collect()
    }

    fn apply_expert(&self, z: &[f64], trap: Trap) -> Vec<f64> {
        let through = |x: Vec<f64>| {
            if trap == Trap::ExpertActivationsInMxfp8 { through_mxfp8(&x) } else { x }
        };
        let inner = self.inner_rows(&[through(z.to_vec())], trap).swap_remove(0);
        self.down.apply(&through(inner))
    }

    /// Two half-width MLPs whose rows were dealt out in turn, while the columns of `down` were cut
    /// in the middle.
    fn apply_as_two_wrong_halves(&self, xs: &[Vec<f64>], trap: Trap) -> Rows {
        let deal = |inner: Vec<f64>| -> Vec<f64> {
            (0..2).flat_map(|half| inner.iter().skip(half).step_by(2).copied()).collect()
        };
        let dealt: Rows = self.inner_rows(xs, trap).into_iter().map(deal).collect();
        self.down.apply_rows(&dealt)
    }
}

/// The three packed matrices of one routed expert.
pub(crate) struct Expert {
    pub(crate) w1: Packed,
    pub(crate) w2: Packed,
    pub(crate) w3: Packed,
}

impl Expert {
    fn decode(&self, trap: Trap) -> Glu {
        let (gate, up) = (self.w1.decode(trap), self.w3.decode(trap));
        let (gate, up) = if trap == Trap::W1W3Swapped { (up, gate) } else { (gate, up) };
        Glu { gate, up, down: self.w2.decode(trap) }
    }
}

/// Sigmoid scores, a bias for the choice alone, the best `per_token`.
pub(crate) struct Router {
    pub(crate) per_token: usize,
    pub(crate) renormalize: bool,
    pub(crate) scaling_factor: f64,
    pub(crate) weight: Matrix,
    pub(crate) bias: Vec<f64>,
}

impl Router {
    /// Experts in rank order with their weights.
    pub(crate) fn route(&self, x: &[f64], trap: Trap) -> Vec<(usize, f64)> {
        let mut logits = self.weight.apply(x);
        if trap == Trap::RouterLogitsInBf16 {
            logits = logits.into_iter().map(to_bf16).collect();
        }
        let s = if trap == Trap::RouterSoftmax {
            softmax(&logits)
        } else {
            logits.into_iter().map(sigma).collect()
        };
        let biased: Vec<f64> = s
            .iter()
            .zip(&self.bias)
            .map(|(s, b)| match trap {
                Trap::RouterBiasIgnored => *s,
                Trap::RouterBiasInBf16 => s + to_bf16(*b),
                _ => s + b,
            })
            .collect();
        let mut ids: Vec<usize> = (0..s.len()).collect();
        let by_id =
            |a: usize, b: usize| if trap == Trap::RouterTiesToHighestId { b.cmp(&a) } else { a.cmp(&b) };
        ids.sort_by(|&a, &b| biased[b].partial_cmp(&biased[a]).expect("finite scores").then(by_id(a, b)));
        ids.truncate(self.per_token);
        let source = if trap == Trap::RouterWeightsFromBiasedScore { &biased } else { &s };
        let mut total: f64 = ids.iter().map(|&e| source[e]).sum::<f64>() + 1e-20;
        if trap == Trap::RouterRenormalisedOverAll {
            total = source.iter().sum();
        }
        if !self.renormalize || self.per_token == 1 || trap == Trap::RouterNotRenormalised {
            total = 1.0;
        }
        let factor = if trap == Trap::RoutedScalingIgnored { 1.0 } else { self.scaling_factor };
        ids.into_iter().map(|e| (e, source[e] / total * factor)).collect()
    }
}

/// The weights of one MoE layer.
pub(crate) struct Moe {
    pub(crate) router: Router,
    pub(crate) shared_count: usize,
    pub(crate) down_proj: Matrix,
    pub(crate) norm: Vec<f64>,
    pub(crate) up_proj: Matrix,
    pub(crate) shared: Glu,
    pub(crate) experts: Vec<Expert>,
}

/// What a layer gives back: outputs, and per token the experts in rank order with their weights.
pub(crate) struct MoeOutcome {
    pub(crate) y: Rows,
    pub(crate) routes: Vec<Vec<(usize, f64)>>,
}

impl Moe {
    pub(crate) fn run(&self, xs: &[Vec<f64>], trap: Trap) -> MoeOutcome {
        let experts: Vec<Glu> = self.experts.iter().map(|e| e.decode(trap)).collect();
        let routes: Vec<Vec<(usize, f64)>> = xs.iter().map(|x| self.router.route(x, trap)).collect();
        let zs = self.down_proj.apply_rows(xs);
        let routed: Rows =
            zs.iter().zip(&routes).map(|(z, route)| self.combine(z, route, &experts, trap)).collect();
        let mut y = self.up_proj.apply_rows(&routed);
        let shared = if trap == Trap::SharedSplitWrongly && self.shared_count == 2 {
            self.shared.apply_as_two_wrong_halves(xs, trap)
        } else {
            self.shared.apply_rows(xs, trap)
        };
        for (y, shared) in y.iter_mut().zip(&shared) {
            add_to(y, shared);
        }
        MoeOutcome { y, routes }
    }

    /// The weighted sum over a token's experts and its norm, in the latent.
    fn combine(&self, z: &[f64], route: &[(usize, f64)], experts: &[Glu], trap: Trap) -> Vec<f64> {
        let mut r = scaled(z, 0.0);
        let present = if trap == Trap::ExpertDropped { &route[..route.len() - 1] } else { route };
        for &(e, w) in present {
            let expert = &experts[e];
            match trap {
                Trap::NormPerExpert => {
                    add_scaled(&mut r, w, &rms(&expert.apply_expert(z, trap), &self.norm, NORM_EPS));
                }
                Trap::WeightsOnExpertInputs => {
                    add_to(&mut r, &expert.apply_expert(&scaled(z, w), trap));
                }
                _ => add_scaled(&mut r, w, &expert.apply_expert(z, trap)),
            }
        }
        if matches!(trap, Trap::NormPerExpert | Trap::RoutedNormLeftOut) {
            r
        } else {
            rms(&r, &self.norm, NORM_EPS)
        }
    }
}
