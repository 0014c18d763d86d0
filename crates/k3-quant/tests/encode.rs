//! The encoders against brute force, on every instruction set of the machine.

#[path = "support/lcg.rs"]
mod lcg;

use k3_quant::cpu::InstructionSet;
use k3_quant::encode::{Encoder, OutOfRange, RoundingError, largest_magnitude};
use k3_quant::{E2M1, E4M3, GlobalScale, Matrix, ScaleFactor, Scales, WeightFormat, bf16};
use lcg::Lcg;

/// Near enough to normal.
fn normal(rng: &mut Lcg) -> f32 {
    (0..6).map(|_| rng.unit()).sum::<f32>() * 0.7
}

/// Rows of all kinds: normal, with outliers, on a grid (exact ties), of wide range, sparse, constant, zero.
fn values(kind: usize, n: usize, rng: &mut Lcg) -> Vec<bf16> {
    let value = |i: usize, rng: &mut Lcg| match kind {
        0 => 0.02 * normal(rng),
        1 => 0.02 * normal(rng) * if rng.next().is_multiple_of(40) { 20.0 } else { 1.0 },
        2 => (rng.next() % 33) as f32 * 0.25 - 4.0,
        3 => rng.unit() * 2f32.powi((rng.next() % 60) as i32 - 40),
        4 if rng.next().is_multiple_of(12) => rng.unit(),
        5 => 0.375,
        6 => [1e-39, -3e-38, 2e-41, -0.0][i % 4],
        7 => rng.unit() * 1e36,
        _ => 0.0,
    };
    (0..n).map(|i| bf16::from_f32(value(i, rng))).collect()
}

const KINDS: usize = 9;

fn encode(encoder: Encoder, cols: usize, values: &[bf16]) -> (Vec<u8>, Vec<u8>, RoundingError) {
    let rows = values.len() / cols;
    let mut codes = vec![0xaa; rows * encoder.code_bytes(cols)];
    let mut scales = vec![0xaa; rows * encoder.scale_bytes(cols)];
    let error = encoder.encode(0, cols, values, &mut codes, &mut scales).unwrap();
    (codes, scales, error)
}

fn decode(encoder: Encoder, rows: usize, cols: usize, codes: Vec<u8>, scales: Vec<u8>) -> Vec<f64> {
    let matrix = match encoder.format() {
        WeightFormat::Nvfp4 => Matrix::nvfp4(
            rows,
            cols,
            codes.into(),
            scales.into(),
            GlobalScale::Factor(encoder.factor().unwrap()),
        ),
        WeightFormat::Int8 => Matrix::int8(rows, cols, codes.into(), Scales::Bf16(scales.into())),
        _ => Matrix::int4(rows, cols, codes.into(), Scales::Bf16(scales.into())),
    }
    .unwrap();
    let mut out = vec![0.0; rows * cols];
    for (r, out) in out.chunks_exact_mut(cols).enumerate() {
        matrix.row(r).decode_f64(out);
    }
    out
}

/// Squared error of the nearest of `grid`.
fn nearest(x: f64, s: f64, grid: &[f64]) -> f64 {
    grid.iter().map(|q| (x - q * s).powi(2)).fold(f64::INFINITY, f64::min)
}

/// The lowest of the scales with the least squared error.
fn best(x: &[bf16], grid: &[f64], scales: impl Iterator<Item = f64>) -> (f64, f64) {
    let error = |s: f64| x.iter().map(|x| nearest(x.to_f64(), s, grid)).sum::<f64>();
    scales.map(|s| (error(s), s)).reduce(|a, b| if b.0 < a.0 { b } else { a }).unwrap()
}

fn encoders(values: &[bf16]) -> [Encoder; 3] {
    [Encoder::nvfp4(largest_magnitude(0, 1, values).unwrap()), Encoder::int8(), Encoder::int4()]
}

/// The search leaves no better scale, and takes the lowest of equals.
#[test]
#[cfg_attr(miri, ignore = "too large")]
fn no_scale_is_better() {
    let e2m1: Vec<f64> = E2M1::VALUES.iter().map(|&v| f64::from(v)).collect();
    let ints: Vec<f64> = (-8..8).map(f64::from).collect();
    let rng = &mut Lcg(1);
    for round in 0..12 * KINDS {
        let x = values(round % KINDS, 64, rng);
        // Not always at the top of the scales' range.
        let largest = largest_magnitude(0, 64, &x).unwrap() * [1.0, 7.0, 3e3, 2e6][round / KINDS % 4];
        let encoder = Encoder::nvfp4(largest);
        let Some(ScaleFactor(factor)) = encoder.factor() else { unreachable!() };
        let (codes, scales, _) = encode(encoder, 64, &x);
        for (block, (x, byte)) in x.chunks(16).zip(&scales).enumerate() {
            let scale = |b: u8| f64::from(E4M3(b).to_f32()) * f64::from(factor);
            let (_, s) = best(x, &e2m1, (1..=0x7e).map(scale));
            let zero = codes[block * 8..block * 8 + 8].iter().all(|c| c & 0x77 == 0);
            let expected = if zero { f64::from(factor) } else { s };
            assert_eq!(scale(*byte), expected, "round {round}, block {block}");
        }

        let (codes, scales, _) = encode(Encoder::int4(), 64, &x);
        let found = bf16::from_le_bytes([scales[0], scales[1]]).to_f64();
        let largest = x.iter().map(|x| x.to_f64().abs()).fold(0.0, f64::max);
        if largest == 0.0 {
            assert_eq!((found, codes), (1.0, vec![0x88; 32]));
            continue;
        }
        let candidates = (bf16::MIN_POSITIVE.to_bits()..bf16::INFINITY.to_bits())
            .map(|b| bf16::from_bits(b).to_f64())
            .filter(|s| (largest / 40.0..largest * 2.1).contains(s));
        match best_or_none(&x, &ints, candidates) {
            Some(s) => assert_eq!(found, s, "round {round}"),
            None => assert_eq!(found, bf16::MIN_POSITIVE.to_f64(), "round {round}"),
        }
    }
}

fn best_or_none(x: &[bf16], grid: &[f64], scales: impl Iterator<Item = f64>) -> Option<f64> {
    let mut scales = scales.peekable();
    scales.peek()?;
    Some(best(x, grid, scales).1)
}

/// Every element has the nearest code under its scale, and the reported error is that of the decoded matrix.
#[test]
fn codes_are_nearest_and_the_error_is_right() {
    let rng = &mut Lcg(2);
    for kind in 0..KINDS {
        let (rows, cols) = if cfg!(miri) { (1, 64) } else { (3, 192) };
        let x = values(kind, rows * cols, rng);
        for encoder in encoders(&x) {
            let what = format!("{} of kind {kind}", encoder.format());
            let (codes, scales, error) = encode(encoder, cols, &x);
            let y = decode(encoder, rows, cols, codes, scales.clone());
            let grid: Vec<f64> = match encoder.format() {
                WeightFormat::Nvfp4 => E2M1::VALUES.iter().map(|&v| f64::from(v)).collect(),
                WeightFormat::Int8 => (-127..128).map(f64::from).collect(),
                _ => (-8..8).map(f64::from).collect(),
            };
            let scale = |i: usize| match encoder.format() {
                WeightFormat::Nvfp4 => {
                    f64::from(E4M3(scales[i / 16]).to_f32()) * f64::from(encoder.factor().unwrap().0)
                }
                WeightFormat::Int8 => {
                    bf16::from_le_bytes([scales[i / cols * 2], scales[i / cols * 2 + 1]]).to_f64()
                }
                _ => bf16::from_le_bytes([scales[i / 64 * 2], scales[i / 64 * 2 + 1]]).to_f64(),
            };
            let (mut squares, mut norm, mut largest) = (0.0, 0.0, 0.0_f64);
            for (i, (x, y)) in x.iter().zip(&y).enumerate() {
                let d = (x.to_f64() - y).abs();
                assert_eq!(
                    d * d,
                    nearest(x.to_f64(), scale(i), &grid),
                    "{what}, element {i}: {x} became {y}"
                );
                squares += d * d;
                norm += x.to_f64().powi(2);
                largest = largest.max(d);
            }
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b;
            assert!(close(error.squared_error, squares) && close(error.squared_norm, norm), "{what}");
            assert_eq!(error.largest, largest, "{what}");
        }
    }
}

/// Blocks of rows and instruction sets change no byte.
#[test]
fn bytes_depend_on_the_values_alone() {
    let rng = &mut Lcg(3);
    for kind in 0..KINDS {
        let (rows, cols) = if cfg!(miri) { (2, 64) } else { (7, 320) };
        let x = values(kind, rows * cols, rng);
        for encoder in encoders(&x) {
            let (codes, scales, error) = encode(encoder, cols, &x);
            for set in InstructionSet::available() {
                let other = encode(encoder.with_instruction_set(set), cols, &x);
                assert_eq!(other, (codes.clone(), scales.clone(), error), "{set:?}, {}", encoder.format());
            }
            let (mut by_row, mut row_scales) = (Vec::new(), Vec::new());
            for x in x.chunks(cols) {
                let (codes, scales, _) = encode(encoder, cols, x);
                by_row.extend(codes);
                row_scales.extend(scales);
            }
            assert_eq!((by_row, row_scales), (codes, scales));
        }
    }
}

/// Literal bytes, worked out by hand.
#[test]
fn hand_made_rows() {
    let row = |values: &[f32]| values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
    // All codes of E2M1 under the largest scale of the range: the factor is 2^-8, and 6 * 448 / 256 is 10.5.
    let grid: Vec<f32> = E2M1::VALUES.iter().map(|v| v * 1.75).collect();
    let (codes, scales, error) = encode(Encoder::nvfp4(10.5), 16, &row(&grid));
    assert_eq!(Encoder::nvfp4(10.5).factor(), Some(ScaleFactor(2f32.powi(-8))));
    assert_eq!((codes, scales), (vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe], vec![0x7e]));
    assert_eq!(error.squared_error, 0.0);
    // Ties go to even codes: under a scale of 1, 2.5 becomes 2 and 3.5 becomes 4.
    let mut x = [0.5; 16];
    x[..6].copy_from_slice(&[6.0, 6.0, 6.0, 2.5, 3.5, -0.0]);
    let (codes, scales, _) = encode(Encoder::nvfp4(2688.0), 16, &row(&x));
    assert_eq!((&codes[..4], scales), (&[0x77, 0x47, 0x86, 0x11][..], vec![0x38]));
    // Two's complement, nearest under 1 = 127 / 127; a row of zeros has the scale 1.
    let (codes, scales, _) =
        encode(Encoder::int8(), 4, &row(&[127.0, -127.0, 2.5, -3.5, 0.0, 0.0, -0.0, 0.0]));
    assert_eq!((codes, scales), (vec![127, 129, 2, 252, 0, 0, 0, 0], vec![0x80, 0x3f, 0x80, 0x3f]));
    // 8 is added; the low nibble is the even column; -8 is used.
    let x: Vec<f32> = (0..64).map(|c| (c % 16) as f32 - 8.0).collect();
    let (codes, scales, error) = encode(Encoder::int4(), 64, &row(&x));
    assert_eq!(
        (&codes[..8], scales),
        (&[0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe][..], vec![0x80, 0x3f])
    );
    assert_eq!(error.squared_error, 0.0);
}

#[test]
fn what_is_no_weight_is_refused_with_its_place() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.4e36] {
        let mut x = vec![bf16::ONE; 3 * 64];
        x[64 + 5] = bf16::from_f32(bad);
        let check = |found: OutOfRange| {
            assert_eq!((found.row, found.column), (11, 5));
            assert_eq!(found.value.to_bits(), x[64 + 5].to_f32().to_bits());
        };
        check(largest_magnitude(10, 64, &x).unwrap_err());
        for encoder in [Encoder::nvfp4(1.0), Encoder::int8(), Encoder::int4()] {
            let (mut codes, mut scales) =
                (vec![0; 3 * encoder.code_bytes(64)], vec![0; 3 * encoder.scale_bytes(64)]);
            check(encoder.encode(10, 64, &x, &mut codes, &mut scales).unwrap_err());
        }
    }
    assert_eq!(largest_magnitude(0, 2, &[bf16::from_f32(-1.25), bf16::from_f32(1.0)]), Ok(1.25));
}
