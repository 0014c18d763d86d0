//! Whole models whose dense matrices are quantized: both devices agree, the plain formula is what they compute, and
//! neither threads nor chunks change a bit.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use k3_experts::MappedStore;
use k3_format::{Checkpoint, OpenOptions, Role, SourceError, TensorId};
use k3_graph::{Cpu, Device, LogitsWanted, Mode, Model, ModelOptions, Reference, Silent, Span, WeightSource};
use k3_quant::encode::{Encoder, largest_magnitude};
use k3_quant::{GlobalScale, Matrix, MatrixData, ScaleDivisor, Scales, WeightFormat, bf16};

/// Agreement of the devices; that of plain checkpoints, which random weights amplify alike.
const BOUND: f64 = 5e-6;

/// A checkpoint whose matrices are quantized when they are loaded.
struct Quantized {
    checkpoint: Arc<Checkpoint>,
    /// `None`: as they are.
    format: Option<WeightFormat>,
    /// Hand out the values as f32 instead.
    decoded: bool,
    /// Quantize the head and `kv_b_proj`, too.
    all: bool,
}

impl Quantized {
    fn new(name: &str, format: WeightFormat) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let checkpoint = Arc::new(Checkpoint::open(&dir, &OpenOptions::default()).unwrap());
        Self { checkpoint, format: Some(format), decoded: false, all: false }
    }

    /// The format of a matrix, if it is not left as it is.
    fn format(&self, role: Role, cols: usize) -> Option<WeightFormat> {
        let asked = if self.all { role.may_be_quantized() } else { role.is_quantized_on_request() };
        self.format.filter(|format| asked && cols.is_multiple_of(format.column_block()))
    }
}

fn quantize(plain: &Matrix, format: WeightFormat) -> Matrix {
    let (rows, cols) = (plain.rows(), plain.cols());
    let MatrixData::Bf16(bytes) = plain.data() else { unreachable!("these fixtures are BF16") };
    let values: Vec<bf16> = bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
    let encoder = match format {
        WeightFormat::Nvfp4 => Encoder::nvfp4(largest_magnitude(0, cols, &values).unwrap()),
        WeightFormat::Int8 => Encoder::int8(),
        _ => Encoder::int4(),
    };
    let (mut codes, mut scales) =
        (vec![0; rows * encoder.code_bytes(cols)], vec![0; rows * encoder.scale_bytes(cols)]);
    encoder.encode(0, cols, &values, &mut codes, &mut scales).unwrap();
    match encoder.factor() {
        Some(factor) => {
            let divisor = GlobalScale::Divisor(ScaleDivisor(1.0 / factor.0));
            Matrix::nvfp4(rows, cols, codes.into(), scales.into(), divisor)
        }
        None if format == WeightFormat::Int8 => {
            Matrix::int8(rows, cols, codes.into(), Scales::Bf16(scales.into()))
        }
        None => Matrix::int4(rows, cols, codes.into(), Scales::Bf16(scales.into())),
    }
    .unwrap()
}

/// By the plain formula: code, scale, scale of the matrix.
fn decode(m: &Matrix) -> Matrix {
    let mut values = Vec::new();
    for r in 0..m.rows() {
        for c in 0..m.cols() {
            let at = r * m.cols() + c;
            let value = match m.data() {
                MatrixData::Nvfp4 { packed, scale, global } => {
                    let byte = packed[at / 2];
                    let code = if c % 2 == 0 { byte & 15 } else { byte >> 4 };
                    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
                    let s = scale[at / 16];
                    let s = if s < 8 {
                        f64::from(s) / 512.0
                    } else {
                        (1.0 + f64::from(s & 7) / 8.0) * 2f64.powi(i32::from(s >> 3) - 7)
                    };
                    let value = magnitude * s / f64::from(global.stored());
                    if code < 8 { value } else { -value }
                }
                MatrixData::Int8 { codes, scale } => f64::from(codes[at] as i8) * bf16_at(scale.bytes(), r),
                MatrixData::Int4 { packed, scale } => {
                    let byte = packed[at / 2];
                    let code = if c % 2 == 0 { byte & 15 } else { byte >> 4 };
                    (f64::from(code) - 8.0) * bf16_at(scale.bytes(), at / 64)
                }
                _ => unreachable!("quantized"),
            };
            assert_eq!(f64::from(value as f32), value, "every value is exact in f32");
            values.extend((value as f32).to_le_bytes());
        }
    }
    Matrix::f32(m.rows(), m.cols(), values.into()).unwrap()
}

fn bf16_at(bytes: &[u8], i: usize) -> f64 {
    bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64()
}

impl WeightSource for Quantized {
    fn matrix(&self, id: TensorId) -> Result<Matrix, SourceError> {
        let plain = self.checkpoint.matrix(id)?;
        let Some(format) = self.format(id.role, plain.cols()) else { return Ok(plain) };
        let quantized = quantize(&plain, format);
        Ok(if self.decoded { decode(&quantized) } else { quantized })
    }

    fn vector(&self, id: TensorId) -> Result<Vec<f32>, SourceError> {
        Ok(self.checkpoint.vector(id)?)
    }
}

fn logits<D: Device>(source: &Quantized, device: D, chunk: usize) -> Vec<f32> {
    let config = source.checkpoint.config();
    let model =
        Model::load(device, config.clone(), source, &ModelOptions::default(), &mut |_, _| {}).unwrap();
    let store = MappedStore::new(source.checkpoint.clone());
    let tokens: Vec<u32> = (0..40).map(|i| 3 + i * 37 % (config.vocab_size as u32 - 3)).collect();
    let mut state = model.new_state().unwrap();
    let mut logits = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let span = Span { state: &mut state, tokens, logits: LogitsWanted::All };
        let result = model.forward(&mut [span], &store, &mut Silent).unwrap().pop().unwrap();
        logits.extend(result.unwrap().values);
    }
    logits
}

fn relative_l2(found: &[f32], expected: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let error: f64 = found.iter().zip(expected).map(|(f, e)| square(f64::from(*f) - f64::from(*e))).sum();
    let norm: f64 = expected.iter().map(|e| square(f64::from(*e))).sum();
    (error / norm).sqrt()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn check(name: &str, format: WeightFormat, all: bool) -> f64 {
    let mut source = Quantized { all, ..Quantized::new(name, format) };
    let reference = logits(&source, Reference, 40);
    let host = logits(&source, Cpu::new(1).unwrap(), 40);
    let error = relative_l2(&host, &reference);
    assert!(error < BOUND, "{name}, {format}: the devices differ by {error:.1e}");
    for (threads, chunk) in [(3, 40), (1, 1), (2, 7)] {
        let other = logits(&source, Cpu::new(threads).unwrap(), chunk);
        assert_eq!(bits(&other), bits(&host), "{name}, {format}, {threads} threads, chunks of {chunk}");
    }
    source.decoded = true;
    assert_eq!(bits(&logits(&source, Reference, 40)), bits(&reference), "{name}, {format}");
    source.format = None;
    relative_l2(&host, &logits(&source, Cpu::new(1).unwrap(), 40))
}

/// A floor that says that something was quantized.
const SOME_DRIFT: f64 = 1e-4;

#[test]
fn devices_agree_and_nothing_depends_on_threads_or_chunks() {
    let mut drifts = BTreeMap::new();
    for name in ["tiny-k3", "tiny-k31", "dims-k31"] {
        for format in [WeightFormat::Nvfp4, WeightFormat::Int8, WeightFormat::Int4] {
            let drift = check(name, format, false);
            println!("{name} with {format} dense weights: logits move by {drift:.1e}");
            assert!(drift > SOME_DRIFT);
            drifts.insert((name, format.to_string()), drift);
        }
        let of = |format: WeightFormat| drifts[&(name, format.to_string())];
        assert!(of(WeightFormat::Int8) < of(WeightFormat::Nvfp4), "{name}: eight bits move more than four");
    }
}

/// Checkpoints of others may have the head and `kv_b_proj` quantized.
#[test]
fn the_head_and_the_absorbed_projection_may_be_quantized() {
    for format in [WeightFormat::Nvfp4, WeightFormat::Int8, WeightFormat::Int4] {
        check("dims-k31", format, true);
    }
}

/// Activations of 8 bits: other logits, which are named, and the same bits for any threads and chunks.
#[test]
fn int8_activations_move_logits_a_little_and_alike_everywhere() {
    let device = |threads| Cpu::new(threads).unwrap().with_mode(Mode::Int8);
    assert_eq!((device(1).kind(), device(1).deviation()), ("cpu-int8", Some("int8 activations")));
    assert_eq!(Cpu::new(1).unwrap().deviation(), None);
    for (name, format) in [("tiny-k3", None), ("tiny-k31", Some(WeightFormat::Int4)), ("dims-k31", None)] {
        let source = Quantized { format, ..Quantized::new(name, WeightFormat::Int8) };
        let exact = logits(&source, Cpu::new(1).unwrap(), 40);
        let rounded = logits(&source, device(1), 40);
        let drift = relative_l2(&rounded, &exact);
        println!("{name} with int8 activations: logits move by {drift:.1e}");
        assert!((SOME_DRIFT..0.2).contains(&drift), "{name}: {drift:.1e}");
        for (threads, chunk) in [(3, 40), (1, 1), (2, 7)] {
            let other = logits(&source, device(threads), chunk);
            assert_eq!(bits(&other), bits(&rounded), "{name}, {threads} threads, chunks of {chunk}");
        }
    }
}
