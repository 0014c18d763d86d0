//! Numbers at the ends of their ranges in the fast kernels: what f64 says, as far as f32 can, and the same bits from all sets.

mod support;

use k3_quant::cpu::{InstructionSet, Mode};
use k3_quant::{GlobalScale, Matrix, ScaleFactor, Scales, WeightFormat, bf16};
use support::{FORMATS, Lcg, MODES, bits, in_f64, matrix, product};

/// The product by the portable kernels, after all others have been found to give the same bits: in batches of one and of
/// nine.
fn agreed(mode: Mode, w: &Matrix, x: &[f32]) -> Vec<f32> {
    let y = product(InstructionSet::Portable, mode, w, 0..w.rows(), 1, x);
    for set in InstructionSet::available() {
        for n in [1, 9] {
            let batch = product(set, mode, w, 0..w.rows(), n, &x.repeat(n));
            assert_eq!(bits(&batch), bits(&y.repeat(n)), "{set:?}, {mode}, {n} rows, {w:?}");
        }
    }
    y
}

fn mxfp4(rows: usize, cols: usize, code: u8, scale: Vec<u8>) -> Matrix {
    Matrix::mxfp4(rows, cols, vec![code * 0x11; rows * cols / 2].into(), scale.into()).unwrap()
}

/// Scales at the ends of E8M0's range, where a subnormal or the largest power of two must survive.
#[test]
fn ends_of_e8m0() {
    for scale in [0u8, 1, 2, 15, 16, 17, 120, 247] {
        for mode in MODES {
            for cols in [32, 96, 160] {
                let y = agreed(mode, &mxfp4(9, cols, 2, vec![scale; 9 * cols / 32]), &vec![1.0; cols]);
                let expected = cols as f64 * 2f64.powi(i32::from(scale) - 127);
                for y in y {
                    let error = (f64::from(y) - expected).abs();
                    // 1 is 127 times a scale that is rounded.
                    let bound = if mode == Mode::Exact { 0.0 } else { 1e-7 * expected };
                    assert!(
                        error <= bound,
                        "{mode}, scale byte {scale}, {cols} columns: {y}, not {expected}"
                    );
                }
            }
        }
    }
}

/// Weights beyond f32's range times activations that bring the results back into it.
#[test]
fn weights_that_f32_does_not_hold() {
    for (scale, x) in [(254u8, 1e-30f32), (253, -1e-20), (254, 1e-3)] {
        for mode in MODES {
            let w = mxfp4(9, 64, 7, vec![scale; 18]);
            for y in agreed(mode, &w, &[x; 64]) {
                let expected = 64.0 * 6.0 * 2f64.powi(i32::from(scale) - 127) * f64::from(x);
                let close = (f64::from(y) / expected - 1.0).abs() < 1e-6;
                let overflows = expected.abs() > f64::from(f32::MAX) && y.is_infinite();
                assert!(
                    close || overflows,
                    "{mode}, scale byte {scale}, activations {x}: {y}, not {expected}"
                );
            }
        }
    }
}

/// Blocks of zero codes stay zero under the largest scale and beside the largest activations.
#[test]
fn zero_blocks() {
    for code in [0u8, 8] {
        for scale in [0u8, 127, 254] {
            for x in [0.0f32, -0.0, 1.0, 1e30, f32::MAX] {
                for mode in MODES {
                    let y = agreed(mode, &mxfp4(9, 160, code, vec![scale; 45]), &[x; 160]);
                    assert!(y.iter().all(|y| *y == 0.0), "{mode}, {code}, scale byte {scale}, {x}: {y:?}");
                    let codes = vec![code * 0x11; 9 * 80];
                    let global = GlobalScale::Factor(ScaleFactor(1.0));
                    let w = Matrix::nvfp4(9, 160, codes.into(), vec![0x7e; 90].into(), global).unwrap();
                    assert!(agreed(mode, &w, &[x; 160]).iter().all(|y| *y == 0.0), "{mode}, NVFP4, {x}");
                }
            }
        }
    }
}

/// Every scale of E4M3 that is a number, negative and subnormal ones included.
#[test]
fn all_scales_of_nvfp4() {
    let scale: Vec<u8> = (0..=255).filter(|s| s & 0x7f != 0x7f).collect();
    let rng = &mut Lcg(4);
    let cols = 16 * scale.len();
    let global = GlobalScale::Factor(ScaleFactor(1.0));
    let w = Matrix::nvfp4(8, cols, rng.bytes(8 * cols / 2).into(), scale.repeat(8).into(), global).unwrap();
    for c in 0..cols / 32 {
        // One group of activations at a time, of integers that no mode rounds.
        let mut x = vec![0.0; cols];
        x[32 * c..32 * (c + 1)].iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 - 16.0);
        x[32 * c] = 127.0;
        let x64: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let expected = in_f64(&w, 1, &x64).0;
        for mode in MODES {
            let y: Vec<f64> = agreed(mode, &w, &x).into_iter().map(f64::from).collect();
            assert_eq!(y, expected, "{mode}, columns from {}", 32 * c);
        }
    }
}

/// Activations from subnormal to huge, in one row.
#[test]
fn activations_of_all_magnitudes() {
    for format in FORMATS {
        for cols in [64, 192, 576] {
            let rng = &mut Lcg(cols as u64);
            let w = matrix(format, 9, cols, rng);
            for exponent in [-149, -130, -120, -60, 0, 60, 100] {
                let x: Vec<f32> =
                    (0..cols).map(|_| (f64::from(rng.unit()) * 2f64.powi(exponent)) as f32).collect();
                let x64: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                let (expected, magnitudes) = in_f64(&w, 1, &x64);
                for mode in MODES {
                    for (r, y) in agreed(mode, &w, &x).iter().enumerate() {
                        let error = (f64::from(*y) - expected[r]).abs();
                        let relative = if mode == Mode::Exact { 1e-5 } else { 0.02 };
                        // What underflows: sums, and in the other mode groups that count as zeros.
                        let floor =
                            if mode == Mode::Exact { 1e-38 } else { 127.0 * 1.2e-38 * 1e4 * cols as f64 };
                        let bound = relative * magnitudes[r] + floor;
                        assert!(error <= bound, "{mode}, {w:?}, 2^{exponent}: {y}, not {}", expected[r]);
                    }
                }
            }
            // A mixture, for the bits.
            let x: Vec<f32> = (0..cols).map(|_| f32::from_bits(rng.next() & 0xbfff_ffff)).collect();
            for mode in MODES {
                agreed(mode, &w, &x);
            }
        }
    }
}

/// Any bytes as weights and scales: NaNs, infinities, overflows. All sets of kernels agree on what comes out.
#[test]
fn arbitrary_bytes() {
    let rng = &mut Lcg(9);
    for (rows, cols) in [(9, 64), (16, 192), (17, 576)] {
        for _ in 0..20 {
            let global = GlobalScale::Factor(ScaleFactor(0.3));
            let (packed, e8m0, e4m3) =
                (rng.bytes(rows * cols / 2), rng.bytes(rows * cols / 32), rng.bytes(rows * cols / 16));
            let matrices = [
                Matrix::f32(rows, cols, rng.bytes(rows * cols * 4).into()),
                Matrix::bf16(rows, cols, rng.bytes(rows * cols * 2).into()),
                Matrix::mxfp4(rows, cols, packed.clone().into(), e8m0.into()),
                Matrix::nvfp4(rows, cols, packed.clone().into(), e4m3.into(), global),
                Matrix::int8(
                    rows,
                    cols,
                    rng.bytes(rows * cols).into(),
                    Scales::F32(rng.bytes(rows * 4).into()),
                ),
                Matrix::int4(rows, cols, packed.into(), Scales::F32(rng.bytes(rows * cols / 16).into())),
            ];
            let x = rng.units(cols);
            for w in matrices.map(Result::unwrap) {
                for mode in MODES {
                    agreed(mode, &w, &x);
                }
            }
        }
    }
}

/// INT8 codes of -128, which have no positive counterpart, against activations of both signs.
#[test]
fn lowest_codes_of_int8() {
    let scale = Scales::F32(1.0f32.to_le_bytes().repeat(9).into());
    let w = Matrix::int8(9, 100, vec![0x80; 900].into(), scale).unwrap();
    for x in [127.0, -127.0] {
        for mode in MODES {
            for y in agreed(mode, &w, &[x; 100]) {
                assert_eq!(y, -128.0 * 100.0 * x, "{mode}");
            }
        }
    }
}

/// An activation that is no number makes all of its own row so, and no other.
#[test]
fn non_finite_activations() {
    for format in FORMATS {
        let rng = &mut Lcg(5);
        let w = matrix(format, 8, 192, rng);
        for (n, bad) in [(3, 1), (7, 6), (12, 0)] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for mode in MODES {
                    for set in InstructionSet::available() {
                        let good = rng.units(n * 192);
                        let mut x = good.clone();
                        x[bad * 192 + 77] = value;
                        let (y, good) =
                            (product(set, mode, &w, 0..8, n, &x), product(set, mode, &w, 0..8, n, &good));
                        for i in 0..n {
                            let (y, good) = (&y[i * 8..][..8], &good[i * 8..][..8]);
                            if i == bad {
                                assert!(y.iter().all(|y| !y.is_finite()), "{set:?}, {mode}, {format}: {y:?}");
                            } else {
                                assert_eq!(bits(y), bits(good), "{set:?}, {mode}, {format}, row {i}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_nan_scale_is_seen() {
    for mode in MODES {
        let seen = |w: &Matrix| {
            let y = agreed(mode, w, &vec![1.0; w.cols()]);
            let (last, others) = y.split_last().unwrap();
            assert!(last.is_nan() && others.iter().all(|y| y.is_finite()), "{mode}, {w:?}: {y:?}");
        };
        let mut scale = vec![127; 8];
        scale[7] = 255;
        seen(&mxfp4(8, 32, 0, scale));
        let mut scale = vec![0x38; 8];
        scale[7] = 0x7f;
        let g = GlobalScale::Factor(ScaleFactor(1.0));
        seen(&Matrix::nvfp4(8, 16, vec![0; 64].into(), scale.clone().into(), g).unwrap());
        scale[7] = 0xff;
        seen(&Matrix::nvfp4(8, 16, vec![0; 64].into(), scale.into(), g).unwrap());
        let mut scale = [1.0f32; 8];
        scale[7] = f32::NAN;
        let nan: Vec<u8> = scale.iter().flat_map(|s| s.to_le_bytes()).collect();
        seen(&Matrix::int8(8, 3, vec![0; 24].into(), Scales::F32(nan.clone().into())).unwrap());
        seen(&Matrix::int4(8, 64, vec![0x88; 256].into(), Scales::F32(nan.into())).unwrap());
        let mut scale = [bf16::ONE; 8];
        scale[7] = bf16::NAN;
        let nan: Vec<u8> = scale.iter().flat_map(|s| s.to_le_bytes()).collect();
        seen(&Matrix::int4(8, 64, vec![0x88; 256].into(), Scales::Bf16(nan.into())).unwrap());
    }
    // Formats without integers keep their weights' NaNs as well.
    let w = Matrix::bf16(1, 2, [bf16::NAN, bf16::ONE].map(bf16::to_le_bytes).concat().into()).unwrap();
    assert!(agreed(Mode::Int8, &w, &[1.0, 1.0])[0].is_nan());
    assert_eq!(w.format(), WeightFormat::Bf16);
}
