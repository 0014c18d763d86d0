//! Which tensors a checkpoint has, in which shard and order, and how each is filled (`docs/checkpoint.md` 3, 5).

use k3_format::names::{Extent, IndexerNames, LAYER_PREFIX, Names};
use k3_format::{ExpertFormat, ExpertLayout, ModelConfig, Role, TensorSpec};
use safetensors::Dtype;

use super::Geometry;
use super::fill::{Fill, Store, scale_center};

/// A tensor to write.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) fill: Fill,
}

impl Tensor {
    pub(super) fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bitsize() as u64 / 8
    }

    pub(super) fn spec(&self) -> TensorSpec {
        let shape = self.shape.iter().map(|&size| size as u64).collect();
        TensorSpec { name: self.name.clone(), dtype: self.dtype, shape }
    }

    pub(super) fn store(&self) -> Store {
        match self.dtype {
            Dtype::F32 => Store::F32,
            Dtype::U8 => Store::U8,
            _ => Store::Bf16,
        }
    }
}

/// How many shards a checkpoint has: one a layer, one for the model level, two for vision.
pub(super) fn shard_count(geometry: &Geometry) -> usize {
    geometry.model.layers.len() + 1 + if geometry.vision { 2 } else { 0 }
}

/// The file name of a shard, `index` 0-based. Five digits, then six, as in the release.
pub(super) fn shard_name(geometry: &Geometry, index: usize) -> String {
    format!("model-{:05}-of-{:06}.safetensors", index + 1, shard_count(geometry))
}

/// The tensors of a shard in file order: layer `l` in shard `l`, then embedding, norm, head and output AttnRes, then
/// the projector, then the vision tower.
///
/// Inside a shard they stand as the serializer of safetensors sorts them, by dtype (F32, BF16, U8), then by name. That is
/// the order of the release: it gives the published header lengths to the byte. So experts are
/// not in id order (0, 1, 10, 100, ...), and the six tensors of each are back to back.
pub(super) fn shard(geometry: &Geometry, index: usize) -> Vec<Tensor> {
    let m = &geometry.model;
    let mut tensors = match index.checked_sub(m.layers.len()) {
        None => layer(m, index),
        Some(0) => language_model(m, None),
        Some(1) => projector(m),
        Some(_) => vision_tower(),
    };
    tensors.sort_unstable_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    tensors
}

fn layer(m: &ModelConfig, layer: usize) -> Vec<Tensor> {
    let mut tensors = language_model(m, Some(layer));
    if m.is_moe(layer) {
        let prefix = format!("{LAYER_PREFIX}{layer}.block_sparse_moe.experts.");
        let format = ExpertFormat::Mxfp4;
        let shapes = ExpertLayout::new(m, format).shapes;
        tensors.reserve_exact(6 * m.moe.num_experts);
        for expert in 0..m.moe.num_experts {
            for (matrix, (rows, cols)) in ["w1", "w2", "w3"].into_iter().zip(shapes) {
                let name = |part: &str| format!("{prefix}{expert}.{matrix}.{part}");
                let tensor =
                    |name, cols, fill| Tensor { name, dtype: Dtype::U8, shape: vec![rows, cols], fill };
                tensors.push(tensor(name("weight_packed"), cols / 2, Fill::Nibbles));
                let center = scale_center(cols);
                tensors.push(tensor(
                    name("weight_scale"),
                    cols / format.group_size(),
                    Fill::Scales { center },
                ));
            }
        }
    }
    tensors
}

/// The tensors of a layer, or of the model level, that are not part of a routed expert.
fn language_model(m: &ModelConfig, layer: Option<usize>) -> Vec<Tensor> {
    let names = Names::new(IndexerNames::default());
    let here = Names::tensors(m).filter(|(id, _)| id.layer == layer);
    here.map(|(id, spec)| {
        let extent = spec.extent(m);
        let fill = fill(id.role, extent);
        Tensor { name: names.name(spec, layer), dtype: spec.release, shape: released_shape(m, extent), fill }
    })
    .collect()
}

/// Of the shapes a reader accepts, the one of the release.
fn released_shape(m: &ModelConfig, extent: Extent) -> Vec<usize> {
    match extent {
        Extent::Matrix(rows, cols) => vec![rows, cols],
        Extent::Vector(n) => vec![n],
        Extent::RowVector(n) => vec![1, n],
        Extent::Conv(channels, taps) => vec![channels, 1, taps],
        // 96 heads of width 128 are stored as 128 values.
        Extent::PerHead(heads) => vec![heads.max(m.kda.head_dim)],
        Extent::PerChannel(heads, width) => vec![heads * width],
    }
}

fn fill(role: Role, extent: Extent) -> Fill {
    let normal = |mean, std| Fill::Normal { mean, std };
    // A Linear that maps unit input to output of standard deviation `gain`.
    let linear = |gain: f32, inputs: usize| normal(0.0, gain / (inputs as f32).sqrt());
    match (role, extent) {
        (Role::ALog, Extent::PerHead(heads)) => Fill::ALog { heads },
        (Role::DtBias, _) => Fill::DtBias,
        (Role::RouterBias, _) => normal(0.0, 0.05),
        (Role::IndexerKNormBias, _) => normal(0.0, 0.2),
        (Role::EmbedTokens, _) => normal(0.0, 1.0),
        // Attention scores with a spread of 2 pick keys without settling on one; logits with a spread of 2 give a
        // sampler something to choose from and greedy decoding clear winners.
        (Role::QBProj | Role::LmHead, Extent::Matrix(_, cols)) => linear(2.0, cols),
        (_, Extent::Matrix(_, inputs) | Extent::Conv(_, inputs) | Extent::RowVector(inputs)) => {
            linear(1.0, inputs)
        }
        // The gain of a norm.
        (_, Extent::Vector(_) | Extent::PerHead(_) | Extent::PerChannel(..)) => normal(1.0, 0.1),
    }
}

/// Width of the released vision tower, which no language model size changes.
const VISION: usize = 1024;

fn projector(m: &ModelConfig) -> Vec<Tensor> {
    let merged = 4 * VISION;
    vec![
        vision("mm_projector.proj.0.weight", &[merged, merged]),
        vision("mm_projector.proj.2.weight", &[m.hidden_size, merged]),
        vision("mm_projector.post_norm.weight", &[m.hidden_size]),
    ]
}

fn vision_tower() -> Vec<Tensor> {
    let qkv = 1536;
    let mut tensors = Vec::with_capacity(165);
    for block in 0..27 {
        let mut push = |name: &str, shape: &[usize]| {
            tensors.push(vision(&format!("vision_tower.encoder.blocks.{block}.{name}.weight"), shape));
        };
        push("norm0", &[VISION]);
        push("norm1", &[VISION]);
        push("wqkv", &[3 * qkv, VISION]);
        push("wo", &[VISION, qkv]);
        push("mlp.fc0", &[4 * VISION, VISION]);
        push("mlp.fc1", &[VISION, 4 * VISION]);
    }
    tensors.push(vision("vision_tower.encoder.final_layernorm.weight", &[VISION]));
    tensors.push(vision("vision_tower.patch_embed.proj.weight", &[VISION, 3, 14, 14]));
    tensors.push(vision("vision_tower.patch_embed.pos_emb.weight", &[64, 64, VISION]));
    tensors
}

/// A tensor that the text engine never reads.
fn vision(name: &str, shape: &[usize]) -> Tensor {
    let fill = Fill::Normal { mean: 0.0, std: 0.02 };
    Tensor { name: name.to_owned(), dtype: Dtype::BF16, shape: shape.to_vec(), fill }
}

#[cfg(test)]
mod tests {
    use k3_format::Variant;

    use super::*;

    /// Names, bytes and dtypes of the release (`docs/checkpoint.md` 4), counted from the layout alone.
    fn check(variant: Variant, names: usize, bytes: u64, bf16: usize) {
        let geometry = Geometry::released(variant);
        let (mut count, mut total, mut census) = (0, 0, [0; 3]);
        for index in 0..shard_count(&geometry) {
            for tensor in shard(&geometry, index) {
                count += 1;
                total += tensor.bytes();
                census[tensor.store() as usize] += 1;
            }
        }
        assert_eq!((count, total, census), (names, bytes, [bf16, 506, 494_592]));
    }

    #[test]
    fn released_k3() {
        check(Variant::K3, 497_220, 1_560_860_324_864, 2_122);
    }

    #[test]
    fn released_k31() {
        check(Variant::K31, 497_340, 1_560_860_324_864 + 24 * 14_877_184, 2_122 + 120);
    }

    #[test]
    fn shards_of_the_release() {
        let geometry = Geometry::released(Variant::K3);
        let counts: Vec<usize> =
            [0, 1, 3, 93, 94, 95].iter().map(|&index| shard(&geometry, index).len()).collect();
        assert_eq!(counts, [23, 5_404, 5_398, 5, 3, 165]);
        let bytes = |index| shard(&geometry, index).iter().map(Tensor::bytes).sum::<u64>();
        assert_eq!((bytes(0), bytes(1), bytes(3)), (2_341_213_184, 16_990_092_800, 16_566_684_160));
        assert_eq!(shard_name(&geometry, 0), "model-00001-of-000096.safetensors");
    }
}
