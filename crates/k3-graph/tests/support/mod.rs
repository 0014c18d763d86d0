//! A random tiny model in memory, for tests that need a whole forward pass but no checkpoint.

#![allow(dead_code, unused_imports, reason = "every test binary takes its part")]

mod store;
mod weights;

pub(crate) use store::{Fault, MemoryStore, Order};
pub(crate) use weights::{TOPK, TinyWeights, VOCAB, tiny_config};

use k3_graph::device::StateValues;
use k3_graph::{
    Cpu, Device, ExportedState, ForwardError, Logits, LogitsWanted, Model, ModelOptions, Observer,
    SequenceState, Silent, Span, SpanResult,
};
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, Scales, WeightFormat, bf16};

/// A small fixed-seed generator; the quality of the numbers does not matter here.
pub(crate) struct Lcg(u64);

impl Lcg {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Self(seed ^ 0x9e37_79b9_7f4a_7c15);
        rng.bits();
        rng.bits();
        rng
    }

    /// 31 bits.
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In `[-1, 1)`.
    pub(crate) fn unit(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// In `[-scale, scale)`.
    pub(crate) fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

pub(crate) fn f32_matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Matrix::f32(rows, cols, bytes.into()).unwrap()
}

pub(crate) fn bf16_matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
    let bytes: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
    Matrix::bf16(rows, cols, bytes.into()).unwrap()
}

/// About unit gain: the values have a standard deviation near `cols^-1/2`.
pub(crate) fn random_matrix(format: WeightFormat, rows: usize, cols: usize, rng: &mut Lcg) -> Matrix {
    let mut codes = || (0..rows * cols / 2).map(|_| rng.bits() as u8).collect::<Vec<u8>>();
    // A uniform code has a root mean square of 2.9.
    let scale = (cols as f32).powf(-0.5) / 2.9;
    match format {
        WeightFormat::F32 => f32_matrix(rows, cols, &rng.values(rows * cols, (3.0 / cols as f32).sqrt())),
        WeightFormat::Bf16 => bf16_matrix(rows, cols, &rng.values(rows * cols, (3.0 / cols as f32).sqrt())),
        WeightFormat::Mxfp4 => {
            let packed = codes();
            let exponent = scale.log2().round() as i32 + 127;
            let scale: Vec<u8> =
                (0..rows * cols / 32).map(|_| (exponent - 1 + rng.below(3) as i32) as u8).collect();
            Matrix::mxfp4(rows, cols, packed.into(), scale.into()).unwrap()
        }
        WeightFormat::Nvfp4 => {
            let packed = codes();
            // E4M3 from 2^3 to below 2^5, and a global scale that is no power of two.
            let blocks: Vec<u8> = (0..rows * cols / 16).map(|_| 0x50 + rng.below(16) as u8).collect();
            let global = GlobalScale::Divisor(ScaleDivisor(16.0 / scale));
            Matrix::nvfp4(rows, cols, packed.into(), blocks.into(), global).unwrap()
        }
        WeightFormat::Int8 => {
            // A uniform code has a root mean square of 74.
            let row = |rng: &mut Lcg| scale * 2.9 / 74.0 * (0.5 + rng.below(100) as f32 / 100.0);
            let codes: Vec<u8> = (0..rows * cols).map(|_| rng.bits() as u8).collect();
            let scale: Vec<u8> = (0..rows).flat_map(|_| row(rng).to_le_bytes()).collect();
            Matrix::int8(rows, cols, codes.into(), Scales::F32(scale.into())).unwrap()
        }
        WeightFormat::Int4 => {
            let packed = codes();
            // A uniform code has a root mean square of 4.6.
            let group = |rng: &mut Lcg| scale * 2.9 / 4.6 * (0.5 + rng.below(100) as f32 / 100.0);
            let scale: Vec<u8> =
                (0..rows * cols / 64).flat_map(|_| bf16::from_f32(group(rng)).to_le_bytes()).collect();
            Matrix::int4(rows, cols, packed.into(), Scales::Bf16(scale.into())).unwrap()
        }
        _ => unreachable!("no other format"),
    }
}

/// `|got - want| / |want|`; not a number where either is not.
pub(crate) fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    let norm: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Asserts that `got` is within `bound` of `want` in relative L2.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f32], bound: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let error = relative_l2(got, want);
    assert!(error <= bound, "{what}: relative L2 {error:.2e} is over {bound:.0e}");
}

/// Bit patterns, by which equality is meant wherever these tests say "the same".
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Position, and name, shape and bit patterns of every part of every layer.
pub(crate) type StateBits = (usize, Vec<Vec<(&'static str, Vec<usize>, Vec<u64>)>>);

pub(crate) fn state_bits(state: &ExportedState) -> StateBits {
    let layers = state.layers.iter().map(|parts| {
        let part = |p: &k3_graph::device::StateTensor| {
            let values = match &p.values {
                StateValues::F32(v) => v.iter().map(|v| u64::from(v.to_bits())).collect(),
                StateValues::F64(v) => v.iter().map(|v| v.to_bits()).collect(),
            };
            (p.name, p.shape.clone(), values)
        };
        parts.iter().map(part).collect()
    });
    (state.position, layers.collect())
}

pub(crate) fn cpu() -> Cpu {
    Cpu::new(2).unwrap()
}

pub(crate) fn load<D: Device>(device: D, weights: &TinyWeights) -> Model<D> {
    load_with(device, weights, &ModelOptions::default())
}

pub(crate) fn load_with<D: Device>(device: D, weights: &TinyWeights, options: &ModelOptions) -> Model<D> {
    Model::load(device, weights.config.clone(), weights, options, &mut |_, _| {}).unwrap()
}

/// `n` ordinary ids. 90 and above are left to tests that need a token which no prompt holds.
pub(crate) fn prompt(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = Lcg::new(seed);
    (0..n).map(|_| rng.below(90) as u32).collect()
}

/// One span alone.
pub(crate) fn try_run<D: Device>(
    model: &Model<D>,
    store: &MemoryStore,
    state: &mut SequenceState<D>,
    tokens: &[u32],
    logits: LogitsWanted,
    observer: &mut dyn Observer,
) -> Result<SpanResult, ForwardError> {
    let mut results = model.forward(&mut [Span { state, tokens, logits }], store, observer)?;
    assert_eq!(results.len(), 1);
    Ok(results.remove(0))
}

/// One span alone, which must succeed.
pub(crate) fn run<D: Device>(
    model: &Model<D>,
    store: &MemoryStore,
    state: &mut SequenceState<D>,
    tokens: &[u32],
    logits: LogitsWanted,
) -> Logits {
    try_run(model, store, state, tokens, logits, &mut Silent).unwrap().unwrap()
}

/// What a sequence gave: logits of all its positions, and its state at the end.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) logits: Vec<u32>,
    pub(crate) state: StateBits,
}

/// A sequence alone from the start, in spans of at most `chunk` tokens.
pub(crate) fn alone<D: Device>(
    model: &Model<D>,
    store: &MemoryStore,
    tokens: &[u32],
    chunk: usize,
) -> Outcome {
    let mut state = model.new_state().unwrap();
    let logits = tokens
        .chunks(chunk)
        .flat_map(|span| bits(&run(model, store, &mut state, span, LogitsWanted::All).values))
        .collect();
    Outcome { logits, state: state_bits(&state.export(model.device()).unwrap()) }
}
