//! The routed experts of a layer, one at a time: read, cast, counted.

use std::ops::Range;

use crate::Checkpoint;
use crate::experts::ExpertLayout;

use super::error::{Refusal, Refusals, RepackError};
use super::plan::Plan;
use super::read::Reader;
use super::recipe::{ExpertTarget, Naming};
use super::report::Exponents;
use super::scales::{Cast, Census, first_nan, global_exponent};

/// The matrices that share a scale: gate and up are one product in other engines; down has its own
/// (`docs/nvfp4.md` 3).
const SHARING: [&[usize]; 2] = [&[0, 2], &[1]];

/// Converts the experts of a layer, in any order of the source and in id order of the result.
pub(super) struct LayerExperts<'a> {
    source: &'a Checkpoint,
    layer: usize,
    from: &'a ExpertLayout,
    to: &'a ExpertLayout,
    target: ExpertTarget,
    /// Block scales of w1, w2, w3, and which blocks are live.
    scales: [Vec<u8>; 3],
    live: [Vec<u8>; 3],
    /// Scale of each matrix as (factor, divisor), in id order.
    globals: Vec<(f32, f32)>,
    pub(super) exponents: Exponents,
    pub(super) refusals: Refusals,
}

impl<'a> LayerExperts<'a> {
    pub(super) fn new(source: &'a Checkpoint, plan: &'a Plan, layer: usize) -> Self {
        let from = source.experts().layout();
        let scratch = |which: usize| vec![0; from.parts[2 * which + 1].len()];
        Self {
            source,
            layer,
            from,
            to: &plan.experts,
            target: plan.recipe.experts,
            scales: std::array::from_fn(scratch),
            live: std::array::from_fn(scratch),
            globals: Vec::with_capacity(3 * plan.experts_per_layer),
            exponents: Exponents::new(layer),
            refusals: Refusals::default(),
        }
    }

    /// Makes the run of an expert. If some of its matrices are refused, `out` is not the expert.
    pub(super) fn convert(
        &mut self,
        expert: usize,
        reader: &mut Reader<'_>,
        out: &mut [u8],
    ) -> Result<(), RepackError> {
        self.read(expert, reader, out)?;
        let mut censuses: [Census; 3] = Default::default();
        for which in 0..3 {
            let packed = &out[self.to.parts[2 * which].clone()];
            censuses[which] = Census::of(packed, &self.scales[which], &mut self.live[which]);
        }
        let mut globals = [(0.0, 0.0); 3];
        for sharing in SHARING {
            let mut census = Census::default();
            sharing.iter().for_each(|&which| census.add(&censuses[which]));
            let m = global_exponent(&census);
            let cast = Cast::new(m);
            for &which in sharing {
                globals[which] = cast.global();
                self.convert_matrix(expert, which, &censuses[which], &census, &cast, out);
            }
            let nvfp4 = self.target == ExpertTarget::Nvfp4;
            let replaced = if nvfp4 { cast.replaced(&census) } else { 0 };
            self.exponents.add(&census, replaced, nvfp4.then_some((m, sharing.len() as u64)));
        }
        self.globals.extend(globals);
        Ok(())
    }

    /// Puts codes in their place in `out`, and block scales into memory of their own.
    fn read(&mut self, expert: usize, reader: &mut Reader<'_>, out: &mut [u8]) -> Result<(), RepackError> {
        let location = self.source.experts().location(self.layer, expert as u32)?;
        for part in 0..6 {
            let (shard, begin) = location.part(self.from, part);
            let into: &mut [u8] = if part % 2 == 0 {
                &mut out[self.to.parts[part].clone()]
            } else {
                &mut self.scales[part / 2]
            };
            reader.read(shard, begin, into)?;
        }
        Ok(())
    }

    fn convert_matrix(
        &mut self,
        expert: usize,
        which: usize,
        own: &Census,
        shared: &Census,
        cast: &Cast,
        out: &mut [u8],
    ) {
        let (scales, live) = (&self.scales[which], &self.live[which]);
        let part: Range<usize> = self.to.parts[2 * which + 1].clone();
        let misfit = match self.target {
            ExpertTarget::Mxfp4 => first_nan(own, scales),
            ExpertTarget::Nvfp4 => {
                cast.misfit(own, scales, live).or_else(|| cast.too_large(own, scales, live))
            }
        };
        if let Some(misfit) = misfit {
            let per_row = self.from.shapes[which].1 / k3_quant::MX_BLOCK;
            let kmax = shared.range().map(|(_, kmax)| kmax);
            self.refusals.push(Refusal::new((self.layer, expert, which), misfit, per_row, kmax));
            return;
        }
        match self.target {
            ExpertTarget::Mxfp4 => out[part].copy_from_slice(scales),
            ExpertTarget::Nvfp4 => cast.write(scales, live, &mut out[part]),
        }
    }

    /// The scalars that stand behind everything else, in file order.
    pub(super) fn beside(&self, names: Naming) -> Vec<u8> {
        let bytes =
            |pick: fn(&(f32, f32)) -> f32| self.globals.iter().flat_map(move |g| pick(g).to_le_bytes());
        match (self.target, names) {
            (ExpertTarget::Mxfp4, _) => Vec::new(),
            (ExpertTarget::Nvfp4, Naming::CompressedTensors) => bytes(|g| g.1).collect(),
            // Activations are scaled by 1 where a loader insists on quantizing them, as in NVIDIA's own tree.
            (ExpertTarget::Nvfp4, Naming::ModelOpt) => bytes(|g| g.0).chain(bytes(|_| 1.0)).collect(),
        }
    }
}
