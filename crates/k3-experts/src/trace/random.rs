//! Reproducible normal numbers. A trace is named by its seed, so they may not change with a library's version.

use std::f32::consts::TAU;

/// `SplitMix64` (Steele, Lea, Flood 2014), and Box-Muller on top of it.
#[derive(Clone, Debug)]
pub(super) struct Normals {
    state: u64,
    spare: Option<f32>,
}

impl Normals {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed, spare: None }
    }

    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// N(0, 1).
    pub(super) fn next(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let bits = self.bits();
        // Both in (0, 1): the logarithm is finite.
        let unit = |bits: u32| (bits as f32 + 0.5) / 4_294_967_296.0;
        let (radius, angle) =
            ((-2.0 * unit((bits >> 32) as u32).min(0.999_999_9).ln()).sqrt(), TAU * unit(bits as u32));
        self.spare = Some(radius * angle.sin());
        radius * angle.cos()
    }

    /// `len` of them.
    pub(super) fn take(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}
