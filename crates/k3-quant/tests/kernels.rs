//! The fast kernels against the plain reference, and their promise about bits.

use k3_quant::cpu::{Activations, InstructionSet, matmul_rows, matmul_rows_with};
use k3_quant::{GlobalScale, Matrix, ScaleDivisor, ScaleFactor, Scales, WeightFormat, bf16, reference};

/// A small fixed-seed generator; the quality of the numbers does not matter here.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

fn matrix(format: WeightFormat, rows: usize, cols: usize, rng: &mut Lcg) -> Matrix {
    match format {
        WeightFormat::F32 => {
            let data: Vec<u8> = (0..rows * cols).flat_map(|_| rng.unit().to_le_bytes()).collect();
            Matrix::f32(rows, cols, data.into())
        }
        WeightFormat::Bf16 => {
            let data: Vec<u8> =
                (0..rows * cols).flat_map(|_| bf16::from_f32(rng.unit()).to_le_bytes()).collect();
            Matrix::bf16(rows, cols, data.into())
        }
        WeightFormat::Mxfp4 => {
            let scale: Vec<u8> = (0..rows * cols / 32).map(|_| 118 + (rng.next() % 6) as u8).collect();
            Matrix::mxfp4(rows, cols, rng.bytes(rows * cols / 2).into(), scale.into())
        }
        WeightFormat::Nvfp4 => {
            // Any finite non-negative scale, subnormals included, and a global scale that is no power of two.
            let scale: Vec<u8> = (0..rows * cols / 16).map(|_| (rng.next() % 0x7f) as u8).collect();
            let global = GlobalScale::Divisor(ScaleDivisor(2688.0 / 0.37));
            Matrix::nvfp4(rows, cols, rng.bytes(rows * cols / 2).into(), scale.into(), global)
        }
        WeightFormat::Int8 => {
            let scale: Vec<u8> = (0..rows).flat_map(|_| (1e-3 * rng.unit()).to_le_bytes()).collect();
            Matrix::int8(rows, cols, rng.bytes(rows * cols).into(), Scales::F32(scale.into()))
        }
        WeightFormat::Int4 => {
            let scale: Vec<u8> =
                (0..rows * cols / 64).flat_map(|_| bf16::from_f32(rng.unit()).to_le_bytes()).collect();
            Matrix::int4(rows, cols, rng.bytes(rows * cols / 2).into(), Scales::Bf16(scale.into()))
        }
        _ => unreachable!("no other format"),
    }
    .unwrap()
}

/// `[n, rows]` by the kernel, split into ranges of weight rows as threads would.
fn product(w: &Matrix, n: usize, x: &[f32], split: usize, kernel: Kernel<'_>) -> Vec<f32> {
    let x = Activations::new(w.format(), n, w.cols(), x);
    let mut y = vec![f32::NAN; n * w.rows()];
    for start in (0..w.rows()).step_by(split) {
        let end = (start + split).min(w.rows());
        let mut out = vec![0.0; (end - start) * n];
        kernel(w, start..end, &x, &mut out);
        for r in start..end {
            for i in 0..n {
                y[i * w.rows() + r] = out[(r - start) * n + i];
            }
        }
    }
    y
}

type Kernel<'a> = &'a dyn Fn(&Matrix, std::ops::Range<usize>, &Activations, &mut [f32]);

fn check(format: WeightFormat, rows: usize, cols: usize) {
    let rng = &mut Lcg(rows as u64 * 1000 + cols as u64);
    let w = matrix(format, rows, cols, rng);
    let n = 9;
    let x: Vec<f32> = (0..n * cols).map(|_| rng.unit()).collect();
    let whole = product(&w, n, &x, rows, &matmul_rows);

    let x64: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let mut expected = vec![0.0; n * rows];
    reference::matmul_f64(&w, n, &x64, &mut expected);
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut whole.iter().zip(&expected).map(|(y, e)| f64::from(*y) - e));
    let scale = norm(&mut expected.iter().copied());
    assert!(error <= 3e-7 * scale, "{format} [{rows}, {cols}]: relative L2 {}", error / scale);

    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    for split in [1, 3, 8] {
        assert_eq!(bits(&product(&w, n, &x, split, &matmul_rows)), bits(&whole), "split by {split} rows");
    }
    for set in InstructionSet::available() {
        let kernel: Kernel = &|w, rows, x, out| matmul_rows_with(set, w, rows, x, out);
        assert_eq!(
            bits(&product(&w, n, &x, rows, kernel)),
            bits(&whole),
            "{set:?}, {format} [{rows}, {cols}]"
        );
        let one = product(&w, 1, &x[..cols], rows, kernel);
        assert_eq!(bits(&one), bits(&whole[..rows]), "{set:?}, one row, {format} [{rows}, {cols}]");
    }
    for i in 0..n {
        let one = product(&w, 1, &x[i * cols..(i + 1) * cols], rows, &matmul_rows);
        assert_eq!(
            bits(&one),
            bits(&whole[i * rows..(i + 1) * rows]),
            "row {i} alone, {format} [{rows}, {cols}]"
        );
    }
}

#[test]
fn every_format_and_awkward_sizes() {
    for rows in [1, 7, 8, 33] {
        for cols in [32, 64, 96, 160, 544] {
            for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Mxfp4, WeightFormat::Nvfp4] {
                check(format, rows, cols);
            }
        }
        for cols in [1, 15, 17, 31, 33, 100] {
            check(WeightFormat::F32, rows, cols);
            check(WeightFormat::Bf16, rows, cols);
            check(WeightFormat::Int8, rows, cols);
        }
        for cols in [16, 48, 80, 112, 176] {
            check(WeightFormat::Nvfp4, rows, cols);
        }
        for cols in [32, 96, 544] {
            check(WeightFormat::Int8, rows, cols);
        }
        for cols in [64, 128, 192, 576] {
            check(WeightFormat::Int4, rows, cols);
        }
    }
}

/// Scales at the ends of E8M0's range, where a subnormal or the largest power of two must survive.
#[test]
fn extreme_scales_survive_the_kernel() {
    for scale in [0u8, 1, 2, 120, 249] {
        let w = Matrix::mxfp4(1, 32, vec![0x22; 16].into(), vec![scale].into()).unwrap();
        let x = [1.0f32; 32];
        let y = product(&w, 1, &x, 1, &matmul_rows)[0];
        assert_eq!(f64::from(y), 32.0 * 2f64.powi(i32::from(scale) - 127), "scale byte {scale}");
    }
}

#[test]
fn a_nan_scale_is_seen() {
    let w = Matrix::mxfp4(1, 32, vec![0; 16].into(), vec![255].into()).unwrap();
    assert!(product(&w, 1, &[1.0; 32], 1, &matmul_rows)[0].is_nan());
    let g = GlobalScale::Factor(ScaleFactor(1.0));
    let w = Matrix::nvfp4(1, 16, vec![0; 8].into(), vec![0x7f].into(), g).unwrap();
    assert!(product(&w, 1, &[1.0; 16], 1, &matmul_rows)[0].is_nan());
    let nan = Scales::F32(f32::NAN.to_le_bytes().to_vec().into());
    let w = Matrix::int8(1, 3, vec![0; 3].into(), nan.clone()).unwrap();
    assert!(product(&w, 1, &[1.0; 3], 1, &matmul_rows)[0].is_nan());
    let w = Matrix::int4(1, 64, vec![0x88; 32].into(), nan).unwrap();
    assert!(product(&w, 1, &[1.0; 64], 1, &matmul_rows)[0].is_nan());
}
