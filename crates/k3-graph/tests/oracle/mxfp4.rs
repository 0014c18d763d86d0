//! MXFP4 decoding (`docs/checkpoint.md` 6.1).

use super::Trap;
use super::num::Matrix;

const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// One packed matrix: `weight_packed` `[rows, cols / 2]`, `weight_scale` `[rows, cols / 32]`.
pub(crate) struct Packed {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
}

impl Packed {
    pub(crate) fn decode(&self, trap: Trap) -> Matrix {
        assert_eq!(self.codes.len(), self.rows * self.cols / 2);
        assert_eq!(self.scales.len(), self.rows * self.cols / 32);
        let mut data = Vec::with_capacity(self.rows * self.cols);
        for (block, byte) in self.codes.as_chunks::<16>().0.iter().zip(&self.scales) {
            let scale = scale(*byte, trap);
            let values: [f64; 16] = std::array::from_fn(|code| value(code as u8) * scale);
            data.extend(block.iter().flat_map(|pair| {
                let (low, high) = (values[usize::from(pair & 15)], values[usize::from(pair >> 4)]);
                if trap == Trap::NibblesSwapped { [high, low] } else { [low, high] }
            }));
        }
        Matrix { rows: self.rows, cols: self.cols, data }
    }
}

/// E2M1; bit 3 is the sign, so code 8 is -0.
fn value(code: u8) -> f64 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// E8M0: `2^(byte - 127)`; 255 is NaN.
pub(crate) fn scale(byte: u8, trap: Trap) -> f64 {
    match (byte, trap) {
        (0, Trap::ScaleZeroFlushed) | (255, Trap::Scale255IsZero) => 0.0,
        (255, Trap::Scale255IsInfinity) => f64::INFINITY,
        (255, _) => f64::NAN,
        _ => 2f64.powi(i32::from(byte) - 127),
    }
}

/// Rounds each group of 32 to MXFP8 (E4M3 elements, a power of two a group), which the published
/// config does not ask for.
pub(crate) fn through_mxfp8(x: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for group in x.chunks(32) {
        let largest = group.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        let scale = if largest == 0.0 { 1.0 } else { 2f64.powf(largest.log2().floor() - 8.0) };
        out.extend(group.iter().map(|v| to_e4m3(v / scale) * scale));
    }
    out
}

fn to_e4m3(x: f64) -> f64 {
    if x == 0.0 {
        return x;
    }
    let exponent = x.abs().log2().floor().max(-6.0);
    let step = 2f64.powf(exponent - 3.0);
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}
