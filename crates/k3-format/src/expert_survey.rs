//! Finding the tensors of routed experts, in one pass over all tensors and without building a name.
//!
//! How an expert is stored follows from the names, dtypes and shapes of its tensors. The config is compared with
//! that, and does not decide (`docs/nvfp4.md` 7).

use hashbrown::HashMap;
use safetensors::Dtype;

use crate::ModelConfig;
use crate::config::{ExpertFormat, QuantizationConfig};
use crate::error::{Error, TensorErrors, TensorProblem, describe};
use crate::experts::{ExpertLayout, Experts, MATRICES, PartLocation, matrix_name};
use crate::names::index;
use crate::shards::{Shards, TensorInfo};

/// What was seen of a matrix, as bits.
mod seen {
    pub(super) const WEIGHT_PACKED: u8 = 1;
    pub(super) const WEIGHT: u8 = 1 << 1;
    pub(super) const SCALE_E8M0: u8 = 1 << 2;
    pub(super) const SCALE_E4M3: u8 = 1 << 3;
    pub(super) const GLOBAL_DIVISOR: u8 = 1 << 4;
    pub(super) const GLOBAL_FACTOR: u8 = 1 << 5;
    /// A tensor of a shape or dtype that was already reported.
    pub(super) const BAD: u8 = 1 << 6;
}

/// All bits, with the name that each stands for.
const PARTS: [(u8, &str); 6] = [
    (seen::WEIGHT_PACKED, "weight_packed"),
    (seen::WEIGHT, "weight"),
    (seen::SCALE_E8M0, "weight_scale"),
    (seen::SCALE_E4M3, "weight_scale"),
    (seen::GLOBAL_DIVISOR, "weight_global_scale"),
    (seen::GLOBAL_FACTOR, "weight_scale_2"),
];

const FORMATS: [(ExpertFormat, u8); 3] = [
    (ExpertFormat::Mxfp4, seen::WEIGHT_PACKED | seen::SCALE_E8M0),
    (ExpertFormat::Nvfp4CompressedTensors, seen::WEIGHT_PACKED | seen::SCALE_E4M3 | seen::GLOBAL_DIVISOR),
    (ExpertFormat::Nvfp4ModelOpt, seen::WEIGHT | seen::SCALE_E4M3 | seen::GLOBAL_FACTOR),
];

const PACKED: usize = 0;
const SCALE: usize = 1;
const GLOBAL: usize = 2;

#[derive(Clone, Copy, Default)]
struct Found {
    seen: [u8; 3],
    /// Nibbles, block scales and global scale of w1, w2, w3.
    at: [[PartLocation; 3]; 3],
}

/// What a tensor under the experts prefix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// Part of an expert.
    Part,
    /// An activation scale, which this engine does not use.
    ActivationScale,
    /// Nothing known.
    Unknown,
}

/// The expert tensors seen so far. Grows with the tensors, not with what a config claims.
pub(crate) struct ExpertSurvey {
    shapes: [(usize, usize); 3],
    num_experts: usize,
    found: HashMap<(u32, u32), Found>,
}

impl ExpertSurvey {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let shapes = ExpertLayout::new(config, ExpertFormat::Mxfp4).shapes;
        Self { shapes, num_experts: config.moe.num_experts, found: HashMap::new() }
    }

    /// Takes a tensor of MoE layer `layer`; `rest` is its name after `experts.`.
    pub(crate) fn visit(
        &mut self,
        layer: usize,
        rest: &str,
        tensor: &TensorInfo<'_>,
        errors: &mut TensorErrors,
    ) -> Visit {
        let Some((expert, matrix, part)) = split(rest) else { return Visit::Unknown };
        if expert >= self.num_experts {
            return Visit::Unknown;
        }
        let (rows, cols) = self.shapes[matrix];
        let checked = match part {
            "weight_packed" => nibbles(tensor, rows, cols, seen::WEIGHT_PACKED),
            "weight" => nibbles(tensor, rows, cols, seen::WEIGHT),
            "weight_scale" => block_scale(tensor, rows, cols),
            "weight_global_scale" => global_scale(tensor, seen::GLOBAL_DIVISOR),
            "weight_scale_2" => global_scale(tensor, seen::GLOBAL_FACTOR),
            _ if is_activation_scale(part) => return Visit::ActivationScale,
            _ => return Visit::Unknown,
        };
        let found = self.found.entry((layer as u32, expert as u32)).or_default();
        match checked {
            Ok((bit, kind)) => {
                found.seen[matrix] |= bit;
                found.at[matrix][kind] = PartLocation { shard: tensor.shard as u32, begin: tensor.begin };
            }
            Err(expected) => {
                found.seen[matrix] |= seen::BAD;
                errors.push(|| TensorProblem::Dtype {
                    name: tensor.name.to_owned(),
                    expected,
                    found: describe(tensor),
                });
            }
        }
        Visit::Part
    }

    /// Checks that every expert is whole and stored as the config says, and reads the global scales. `None` if
    /// `errors` says why not.
    pub(crate) fn finish(
        self,
        config: &ModelConfig,
        quantization: &QuantizationConfig,
        shards: &Shards,
        errors: &mut TensorErrors,
    ) -> Result<Option<Experts>, Error> {
        let format = quantization.format;
        let before = errors.total;
        let layers = config.first_k_dense_replace..config.num_hidden_layers();
        let experts = || {
            layers.clone().flat_map(|layer| (0..config.moe.num_experts).map(move |expert| (layer, expert)))
        };
        let none = Found::default();
        let get =
            |(layer, expert): (usize, usize)| self.found.get(&(layer as u32, expert as u32)).unwrap_or(&none);
        for id in experts() {
            let found = get(id);
            for (matrix, &seen) in found.seen.iter().enumerate() {
                check_matrix(id, matrix, seen, quantization, self.shapes[matrix], errors);
            }
        }
        for layer in layers.clone() {
            let listed = quantization.expert_layers.as_ref().is_none_or(|l| l.binary_search(&layer).is_ok());
            if !listed {
                errors.push(|| TensorProblem::Disagrees {
                    name: format!("{}.weight", matrix_name(layer, 0, 0)),
                    found: format.to_string(),
                    entry: format!("{} does not list the experts of layer {layer}", quantization.entry),
                });
            }
        }
        if errors.total > before {
            return Ok(None);
        }
        let parts = experts().map(|id| {
            let at = &get(id).at;
            std::array::from_fn(|part| at[part / 2][part % 2])
        });
        let mut table = Experts::new(config, ExpertLayout::new(config, format), parts);
        if format != ExpertFormat::Mxfp4 {
            let places: Vec<PartLocation> =
                experts().flat_map(|id| get(id).at.map(|matrix| matrix[GLOBAL])).collect();
            let values = read_scalars(shards, &places)?;
            for (i, what) in values
                .iter()
                .enumerate()
                .filter_map(|(i, v)| Some((i, scale_fault(format == ExpertFormat::Nvfp4ModelOpt, *v)?)))
            {
                let (layer, expert) =
                    (layers.start + i / 3 / config.moe.num_experts, i / 3 % config.moe.num_experts);
                let part = if format == ExpertFormat::Nvfp4ModelOpt {
                    "weight_scale_2"
                } else {
                    "weight_global_scale"
                };
                errors.push(|| TensorProblem::Value {
                    name: format!("{}.{part}", matrix_name(layer, expert, i % 3)),
                    what,
                });
            }
            table.set_global_scales(values.as_chunks::<3>().0.to_vec());
        }
        Ok((errors.total == before).then_some(table))
    }
}

/// Scales for quantizing activations, which this engine does not do.
pub(crate) fn is_activation_scale(part: &str) -> bool {
    matches!(part, "input_scale" | "input_global_scale")
}

/// `{expert}.w1.{part}`
fn split(rest: &str) -> Option<(usize, usize, &str)> {
    let (expert, rest) = rest.split_once('.')?;
    let (matrix, part) = rest.split_once('.')?;
    Some((index(expert)?, MATRICES.iter().position(|m| *m == matrix)?, part))
}

type Checked = Result<(u8, usize), String>;

fn is(tensor: &TensorInfo<'_>, dtype: Dtype, rows: usize, cols: usize) -> bool {
    tensor.dtype == dtype && tensor.shape == [rows as u64, cols as u64]
}

fn nibbles(tensor: &TensorInfo<'_>, rows: usize, cols: usize, bit: u8) -> Checked {
    if is(tensor, Dtype::U8, rows, cols / 2) {
        return Ok((bit, PACKED));
    }
    Err(format!("U8 [{rows}, {}], two 4-bit codes a byte", cols / 2))
}

fn block_scale(tensor: &TensorInfo<'_>, rows: usize, cols: usize) -> Checked {
    let (mx, nv) = (cols / k3_quant::MX_BLOCK, cols / k3_quant::NV_BLOCK);
    if is(tensor, Dtype::U8, rows, mx) {
        return Ok((seen::SCALE_E8M0, SCALE));
    }
    if is(tensor, Dtype::F8_E4M3, rows, nv) {
        return Ok((seen::SCALE_E4M3, SCALE));
    }
    Err(format!("U8 [{rows}, {mx}] (MXFP4) or F8_E4M3 [{rows}, {nv}] (NVFP4)"))
}

fn global_scale(tensor: &TensorInfo<'_>, bit: u8) -> Checked {
    if tensor.dtype == Dtype::F32 && (tensor.shape.is_empty() || tensor.shape == [1]) {
        return Ok((bit, GLOBAL));
    }
    Err("F32 [] or [1]".to_owned())
}

fn check_matrix(
    (layer, expert): (usize, usize),
    matrix: usize,
    found: u8,
    quantization: &QuantizationConfig,
    (rows, cols): (usize, usize),
    errors: &mut TensorErrors,
) {
    let format = quantization.format;
    let wanted = FORMATS.iter().find(|(f, _)| *f == format).map_or(0, |(_, bits)| *bits);
    if found == wanted || found & seen::BAD != 0 {
        return;
    }
    let name = |part: &str| format!("{}.{part}", matrix_name(layer, expert, matrix));
    if let Some((other, _)) = FORMATS.iter().find(|(_, bits)| *bits == found) {
        errors.push(|| TensorProblem::Disagrees {
            name: name("weight_scale"),
            found: other.to_string(),
            entry: quantization.entry.clone(),
        });
        return;
    }
    for (bit, part) in PARTS {
        if wanted & bit != 0 && found & bit == 0 {
            errors.push(|| TensorProblem::Missing {
                name: name(part),
                expected: match bit {
                    seen::WEIGHT_PACKED | seen::WEIGHT => format!("U8 [{rows}, {}]", cols / 2),
                    seen::SCALE_E8M0 => format!("U8 [{rows}, {}]", cols / k3_quant::MX_BLOCK),
                    seen::SCALE_E4M3 => format!("F8_E4M3 [{rows}, {}]", cols / k3_quant::NV_BLOCK),
                    _ => "F32 [1] or []".to_owned(),
                },
            });
        }
        if wanted & bit == 0 && found & bit != 0 {
            errors.push(|| TensorProblem::Unexpected {
                name: name(part),
                format: format.to_string(),
                entry: quantization.entry.clone(),
            });
        }
    }
}

/// The largest factor of a matrix that is taken for one. The largest weight is 6 * 448 = 2,688 times the factor, so
/// published factors are far below 1, and 1 where nothing was measured; a factor from here on is a divisor that was
/// stored in its place, or the other way round.
pub(crate) const MAX_FACTOR: f32 = 64.0;

/// What is wrong with a global scale, if anything is (`docs/nvfp4.md` 7).
pub(crate) fn scale_fault(is_factor: bool, stored: f32) -> Option<String> {
    if !stored.is_normal() || stored < 0.0 {
        return Some(format!("the scale of a matrix must be a normal number above 0, found {stored}"));
    }
    let (factor, other) = if is_factor {
        (stored, "a divisor in the place of a factor")
    } else {
        (1.0 / stored, "a factor in the place of a divisor")
    };
    if factor > MAX_FACTOR {
        return Some(format!(
            "the value {stored} makes weights of up to {}, at most {} are accepted; it looks written in the inverse \
             sense, {other}: ModelOpt's weight_scale_2 is a factor, about amax / 2688, and compressed-tensors' \
             weight_global_scale is a divisor, about 2688 / amax",
            factor * 2688.0,
            MAX_FACTOR * 2688.0
        ));
    }
    // The reciprocal of the largest numbers.
    (!factor.is_normal()).then(|| format!("the divisor {stored} leaves no normal number as factor"))
}

/// Reads an f32 at each place, near ones together.
fn read_scalars(shards: &Shards, places: &[PartLocation]) -> Result<Vec<f32>, Error> {
    /// Bytes between two scales that are read rather than skipped.
    const GAP: u64 = 4096;
    /// Bytes of one read.
    const READ: u64 = 1 << 20;
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_unstable_by_key(|&i| (places[i].shard, places[i].begin));
    let mut values = vec![0.0; places.len()];
    let mut buffer = Vec::new();
    let near = |a: &PartLocation, b: &PartLocation, start: u64| {
        a.shard == b.shard && b.begin - a.begin <= GAP && b.begin - start < READ
    };
    let mut next = 0;
    while next < order.len() {
        let first = places[order[next]];
        let mut end = next + 1;
        while end < order.len() && near(&places[order[end - 1]], &places[order[end]], first.begin) {
            end += 1;
        }
        let last = places[order[end - 1]];
        buffer.resize((last.begin - first.begin) as usize + 4, 0);
        shards.read_range(first.shard as usize, first.begin, &mut buffer)?;
        for &i in &order[next..end] {
            let at = (places[i].begin - first.begin) as usize;
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&buffer[at..at + 4]);
            values[i] = f32::from_le_bytes(bytes);
        }
        next = end;
    }
    Ok(values)
}
