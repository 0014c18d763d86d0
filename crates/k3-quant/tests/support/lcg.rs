//! Random numbers for tests.

/// A small fixed-seed generator; the quality of the numbers does not matter here.
pub(crate) struct Lcg(pub(crate) u64);

impl Lcg {
    /// 31 bits.
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}
