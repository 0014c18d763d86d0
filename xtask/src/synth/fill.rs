//! Random values that keep a deep random model in its working range, fast enough to fill a disk.
//!
//! Every tensor draws from a ChaCha8 stream of its own, keyed by the seed and the tensor's name, in blocks of a fixed
//! size: its bytes depend on nothing else, whatever is written before it, and in whatever order.

use std::sync::OnceLock;

use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How the values of a tensor are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Normal with this mean and standard deviation.
    Normal { mean: f32, std: f32 },
    /// `A_log`: uniform in [-0.5, 1) for the heads, zero in the padding after them (`docs/checkpoint.md` 3.2).
    ALog { heads: usize },
    /// `dt_bias`: a standard normal less a uniform in [0, 6). With `A_log` as above the decay of a channel lies
    /// anywhere from e^-4 to 0.999 a token, so some channels forget at once and some remember thousands.
    DtBias,
    /// Two E2M1 codes a byte, all 16 codes equally likely.
    Nibbles,
    /// E8M0 scale bytes: 84 % `center`, 15 % one below, 1 % one above, which is the mix of the release
    /// (`docs/checkpoint.md` 6.1).
    Scales { center: u8 },
}

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// Two bytes a value.
    Bf16,
    /// Four bytes a value.
    F32,
    /// One byte a value: [`Fill::Nibbles`] and [`Fill::Scales`].
    U8,
}

/// The scale byte for an MXFP4 matrix of `cols` columns.
///
/// Uniform codes have a root mean square of 2.926, so a scale of `1 / (2.926 sqrt(cols))` maps unit input to unit
/// output; rounding upwards gives outputs of 1.4 to 2.8, where SiTU-GLU is well away from linear, and 121 at the released widths,
/// which is what the release has.
pub(super) fn scale_center(cols: usize) -> u8 {
    let unit = 127.0 - (2.926 * (cols as f64).sqrt()).log2();
    (unit + 1.0).round().clamp(1.0, 253.0) as u8
}

/// Values drawn at a time.
const BLOCK: usize = 1 << 16;

/// Draws the values of tensors, one block at a time.
pub(super) struct Filler {
    seed: u64,
    words: Vec<u8>,
    out: Vec<u8>,
    table: Vec<bf16>,
}

impl Filler {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, words: Vec::new(), out: Vec::new(), table: Vec::new() }
    }

    /// Passes the `count` values of tensor `name`, as stored, to `sink` block by block.
    pub(super) fn fill<E>(
        &mut self,
        name: &str,
        fill: Fill,
        store: Store,
        count: u64,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rng = stream(self.seed, name);
        let tabled = match (fill, store) {
            // Below this a table of all 65,536 results costs more than it saves.
            (Fill::Normal { mean, std }, Store::Bf16) if count >= BLOCK as u64 => {
                self.table.clear();
                self.table.extend(quantiles().iter().map(|&z| bf16::from_f32(mean + std * z)));
                true
            }
            _ => false,
        };
        let mut done = 0;
        while done < count {
            let n = (count - done).min(BLOCK as u64) as usize;
            self.out.clear();
            if store == Store::U8 {
                self.bytes(&mut rng, n, fill);
            } else if tabled {
                self.draw(&mut rng, n);
                let values = u16s(&self.words).map(|index| self.table[usize::from(index)].to_le_bytes());
                self.out.extend(values.flatten());
            } else {
                self.floats(&mut rng, n, fill, store, done);
            }
            sink(&self.out)?;
            done += n as u64;
        }
        Ok(())
    }

    /// `n` random 16-bit words. Whole 32-bit words are drawn, so that a block never shares one with the next.
    fn draw(&mut self, rng: &mut ChaCha8Rng, n: usize) {
        self.words.resize((2 * n).next_multiple_of(4), 0);
        rng.fill_bytes(&mut self.words);
        self.words.truncate(2 * n);
    }

    fn bytes(&mut self, rng: &mut ChaCha8Rng, n: usize, fill: Fill) {
        self.out.resize(n.next_multiple_of(4), 0);
        rng.fill_bytes(&mut self.out);
        self.out.truncate(n);
        if let Fill::Scales { center } = fill {
            for byte in &mut self.out {
                *byte = match *byte {
                    0..=37 => center - 1,
                    38..=252 => center,
                    253.. => center + 1,
                };
            }
        }
    }

    fn floats(&mut self, rng: &mut ChaCha8Rng, n: usize, fill: Fill, store: Store, start: u64) {
        self.draw(rng, 2 * n);
        let z = quantiles();
        let mut words = u16s(&self.words);
        let mut next = || words.next().unwrap_or(0);
        let uniform = |word: u16| f32::from(word) / 65_536.0;
        for i in 0..n {
            // Two words a value, used or not: the stream does not depend on the kind of the tensor.
            let (a, b) = (next(), next());
            let value = match fill {
                Fill::Normal { mean, std } => mean + std * z[usize::from(a)],
                Fill::ALog { heads } if start + i as u64 >= heads as u64 => 0.0,
                Fill::ALog { .. } => 1.5 * uniform(a) - 0.5,
                Fill::DtBias => z[usize::from(a)] - 6.0 * uniform(b),
                Fill::Nibbles | Fill::Scales { .. } => 0.0,
            };
            match store {
                Store::Bf16 => self.out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
                Store::F32 | Store::U8 => self.out.extend_from_slice(&value.to_le_bytes()),
            }
        }
    }
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.update(name.as_bytes());
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

fn u16s(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair))
}

/// The standard normal at 65,536 equally likely points: `quantile((i + 0.5) / 65536)`, up to 4.3 sigma.
fn quantiles() -> &'static [f32] {
    static TABLE: OnceLock<Vec<f32>> = OnceLock::new();
    TABLE.get_or_init(|| {
        (0..65_536).map(|i| normal_quantile((f64::from(i) + 0.5) / 65_536.0) as f32).collect()
    })
}

/// Inverse of the standard normal distribution function by Acklam's rational approximation, relative error 1.2e-9.
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
        1.0,
    ];
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let q = (-2.0 * p.ln()).sqrt();
        polynomial(&C, q) / polynomial(&D, q)
    };
    match p {
        p if p < 0.02425 => tail(p),
        p if p > 1.0 - 0.02425 => -tail(1.0 - p),
        p => {
            let q = p - 0.5;
            q * polynomial(&A, q * q) / polynomial(&B, q * q)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(fill: Fill, store: Store, count: u64) -> Vec<f64> {
        let mut bytes = Vec::new();
        let sink = |block: &[u8]| -> Result<(), ()> {
            bytes.extend_from_slice(block);
            Ok(())
        };
        Filler::new(3).fill("x", fill, store, count, sink).unwrap();
        match store {
            Store::Bf16 => {
                bytes.as_chunks().0.iter().map(|&b| f64::from(bf16::from_le_bytes(b).to_f32())).collect()
            }
            Store::F32 => bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect(),
            Store::U8 => bytes.iter().map(|&b| f64::from(b)).collect(),
        }
    }

    /// Mean and standard deviation are what was asked for.
    fn check(fill: Fill, store: Store, count: u64, mean: f64, std: f64) {
        let v = values(fill, store, count);
        assert_eq!(v.len() as u64, count, "{fill:?}");
        let m = v.iter().sum::<f64>() / v.len() as f64;
        let s = (v.iter().map(|x| (x - m).powi(2)).sum::<f64>() / v.len() as f64).sqrt();
        let near = 6.0 * std / (count as f64).sqrt();
        assert!((m - mean).abs() < near + 1e-3 * mean.abs(), "{fill:?}: mean {m}, expected {mean}");
        assert!((s - std).abs() < near + 1e-3 * std, "{fill:?}: std {s}, expected {std}");
    }

    #[test]
    fn moments() {
        check(Fill::Normal { mean: 0.0, std: 0.02 }, Store::Bf16, 300_001, 0.0, 0.02);
        check(Fill::Normal { mean: 1.0, std: 0.1 }, Store::Bf16, 5_001, 1.0, 0.1);
        check(Fill::Normal { mean: 0.0, std: 0.5 }, Store::F32, 100_003, 0.0, 0.5);
        check(Fill::ALog { heads: 70_000 }, Store::F32, 70_000, 0.25, 1.5 / 12f64.sqrt());
        check(Fill::DtBias, Store::F32, 100_000, -3.0, 2.0);
        check(Fill::Nibbles, Store::U8, 100_001, 127.5, 73.9);
        check(Fill::Scales { center: 121 }, Store::U8, 100_000, 120.863, 0.374);
    }

    #[test]
    fn quantiles_are_symmetric_and_known() {
        let z = quantiles();
        assert!((0..32_768).all(|i| z[i] == -z[65_535 - i]));
        assert!((normal_quantile(0.975) - 1.959_963_985).abs() < 1e-8);
        assert!((normal_quantile(0.01) + 2.326_347_874).abs() < 1e-8);
    }

    #[test]
    fn a_log_padding_is_zero() {
        let v = values(Fill::ALog { heads: 96 }, Store::F32, 128);
        assert!(v[..96].iter().all(|x| *x != 0.0) && v[96..].iter().all(|x| x.to_bits() == 0));
    }

    #[test]
    fn scales_of_the_released_widths() {
        assert_eq!((scale_center(3584), scale_center(3072)), (121, 121));
    }
}
