//! The fast kernels against the plain reference, and their promise about bits.
//!
//! Under Miri (`docs/unsafe.md`) sizes are small, and the portable kernels are the only ones.

mod support;

use k3_quant::cpu::{ACTIVATION_GROUP, InstructionSet, Mode};
use k3_quant::{Matrix, WeightFormat, reference};
use support::{FORMATS, Lcg, MODES, bits, in_f64, matrix, product};

/// The distance of two vectors relative to the length of the second.
fn relative_l2(y: &[f32], expected: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut y.iter().zip(expected).map(|(y, e)| f64::from(*y) - e));
    error / norm(&mut expected.iter().copied())
}

/// What [`Mode::Int8`] is documented to make of activations: their values after rounding, and half a step of each.
fn rounded(cols: usize, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let (mut values, mut half_steps) = (Vec::new(), Vec::new());
    for group in x.chunks(cols).flat_map(|row| row.chunks(ACTIVATION_GROUP)) {
        let scale = group.iter().fold(0.0, |max: f32, x| max.max(x.abs())) / 127.0;
        for x in group {
            let code = if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even() };
            values.push(f64::from(code) * f64::from(scale));
            half_steps.push(f64::from(scale) / 2.0);
        }
    }
    (values, half_steps)
}

/// A format without an integer mode is exact in both.
fn is_exact(mode: Mode, format: WeightFormat) -> bool {
    mode == Mode::Exact || matches!(format, WeightFormat::F32 | WeightFormat::Bf16)
}

/// The portable kernels against f64.
fn check_values(format: WeightFormat, rows: usize, cols: usize, n: usize) {
    let rng = &mut Lcg(rows as u64 * 1000 + cols as u64);
    let w = matrix(format, rows, cols, rng);
    let x = rng.units(n * cols);
    let x64: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let mut expected = vec![0.0; n * rows];
    reference::matmul_f64(&w, n, &x64, &mut expected);
    for mode in MODES {
        let y = product(InstructionSet::Portable, mode, &w, 0..rows, n, &x);
        let case = format!("{mode}, {format} [{rows}, {cols}]");
        if is_exact(mode, format) {
            let error = relative_l2(&y, &expected);
            assert!(error <= 3e-7, "{case}: relative L2 {error}");
            continue;
        }
        // The sums are as exact as those of the other mode, only the activations are not.
        let (values, half_steps) = rounded(cols, &x);
        let error = relative_l2(&y, &in_f64(&w, n, &values).0);
        assert!(error <= 3e-7, "{case}: relative L2 {error} after rounding");
        let (_, bounds) = in_f64(&w, n, &half_steps);
        let (_, magnitudes) = in_f64(&w, n, &x64);
        for (i, y) in y.iter().enumerate() {
            let error = (f64::from(*y) - expected[i]).abs();
            // Quotients are rounded to f32 before they are rounded to integers, sums are as well.
            let bound = bounds[i] * (1.0 + 1e-4) + 1e-6 * magnitudes[i];
            assert!(error <= bound, "{case}: element {i} is off by {error}, more than {bound}");
        }
    }
}

/// All sets of kernels, batches of the given sizes, and splits of the weight rows: the same bits.
fn check_bits(format: WeightFormat, rows: usize, cols: usize, batches: &[usize]) {
    let rng = &mut Lcg(rows as u64 * 1000 + cols as u64);
    let w = matrix(format, rows, cols, rng);
    let most = batches.iter().copied().max().unwrap();
    let x = rng.units(most * cols);
    for mode in MODES {
        let alone: Vec<f32> = x
            .chunks_exact(cols)
            .flat_map(|x| product(InstructionSet::Portable, mode, &w, 0..rows, 1, x))
            .collect();
        for set in InstructionSet::available() {
            for &n in batches {
                let case = format!("{set:?}, {mode}, {n} rows, {format} [{rows}, {cols}]");
                let y = product(set, mode, &w, 0..rows, n, &x[..n * cols]);
                assert!(bits(&y) == bits(&alone[..n * rows]), "{case}");
                for split in [1, 3, 8] {
                    for start in (0..rows).step_by(split) {
                        let range = start..(start + split).min(rows);
                        let y = product(set, mode, &w, range.clone(), n, &x[..n * cols]);
                        let same = y
                            .chunks(range.len())
                            .zip(alone.chunks(rows))
                            .all(|(y, alone)| bits(y) == bits(&alone[range.clone()]));
                        assert!(same, "{case}: rows {range:?}");
                    }
                }
            }
        }
    }
}

/// Widths that have parts of steps and blocks, for formats that have such.
fn widths(format: WeightFormat) -> &'static [usize] {
    match format {
        WeightFormat::F32 | WeightFormat::Bf16 | WeightFormat::Int8 => {
            &[1, 15, 17, 31, 32, 33, 64, 96, 100, 160, 511, 544, 1043]
        }
        WeightFormat::Mxfp4 => &[32, 64, 96, 128, 160, 512, 544, 1120],
        WeightFormat::Nvfp4 => &[16, 32, 48, 64, 80, 112, 128, 176, 512, 528, 544, 1072],
        WeightFormat::Int4 => &[64, 128, 192, 512, 576, 1088],
        // A row that ends in the middle of a step is read by code of its own.
        _ => unreachable!("{format:?} has no widths"),
    }
}

#[test]
fn every_format_and_awkward_sizes() {
    let rows: &[usize] = if cfg!(miri) { &[7] } else { &[1, 7, 8, 33] };
    let widest = if cfg!(miri) { 100 } else { usize::MAX };
    for format in FORMATS {
        for &rows in rows {
            for &cols in widths(format).iter().filter(|cols| **cols <= widest) {
                // A few sums of many terms have a relative error that is up to chance.
                if rows > 1 || cols < 600 {
                    check_values(format, rows, cols, 9);
                }
                check_bits(format, rows, cols, &[0, 1, 4, 9]);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too large")]
fn every_number_of_rows() {
    let batches: Vec<usize> = (1..=40).collect();
    for format in FORMATS {
        let &cols = widths(format).last().unwrap();
        check_bits(format, 13, cols, &batches);
    }
}

/// More rows than one pass over decoded weights takes, and more weight rows than are decoded together.
#[test]
#[cfg_attr(miri, ignore = "too large")]
fn large_batches() {
    for format in FORMATS {
        check_bits(format, 70, 192, &[96, 97, 203]);
    }
}

/// More weight rows than meet few rows of activations at once, and some that are left over.
#[test]
#[cfg_attr(miri, ignore = "too large")]
fn few_rows_of_activations() {
    for format in FORMATS {
        check_bits(format, 141, 192, &[1, 2, 3, 4, 5]);
    }
}

/// The error does not grow with the width of the released model.
#[test]
#[cfg_attr(miri, ignore = "too large")]
fn wide_matrices() {
    for format in FORMATS {
        check_values(format, 16, 7168, 2);
    }
}

/// Activations of one 4-bit float format serve the other.
#[test]
fn mxfp4_and_nvfp4_share_activations() {
    use k3_quant::cpu::{Activations, matmul_rows};
    let rng = &mut Lcg(1);
    let (mx, nv) = (matrix(WeightFormat::Mxfp4, 4, 96, rng), matrix(WeightFormat::Nvfp4, 4, 96, rng));
    let x = rng.units(96);
    for mode in MODES {
        let by = |format: WeightFormat, w: &Matrix| {
            let mut y = [0.0; 4];
            matmul_rows(w, 0..4, &Activations::with_mode(mode, format, 1, 96, &x), &mut y);
            y
        };
        assert_eq!(by(WeightFormat::Mxfp4, &nv), by(WeightFormat::Nvfp4, &nv));
        assert_eq!(by(WeightFormat::Nvfp4, &mx), by(WeightFormat::Mxfp4, &mx));
    }
}

#[test]
#[should_panic(expected = "another matrix")]
fn integers_for_another_format_are_refused() {
    use k3_quant::cpu::{Activations, matmul_rows};
    let w = matrix(WeightFormat::Int4, 1, 64, &mut Lcg(1));
    let x = Activations::with_mode(Mode::Int8, WeightFormat::Mxfp4, 1, 64, &[1.0; 64]);
    matmul_rows(&w, 0..1, &x, &mut [0.0]);
}

#[test]
fn names_of_modes() {
    for mode in MODES {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert!("int4".parse::<Mode>().unwrap_err().to_string().contains("expected exact or int8"));
}
