//! The worked examples of `docs/nvfp4.md` 5, the recorded cases, and the edges of the window.

use std::path::Path;

use k3_quant::{E4M3, E8M0};
use serde_json::Value;

use super::*;

/// A matrix of one row: a live block (one code, in the middle) or a block of zeros for each exponent. Both zeros occur.
struct Row {
    packed: Vec<u8>,
    scales: Vec<u8>,
    live: Vec<u8>,
    census: Census,
}

fn row(blocks: &[(u8, bool)]) -> Row {
    let mut packed = Vec::new();
    for (i, (_, live)) in blocks.iter().enumerate() {
        let mut block = [if i % 2 == 0 { 0x80 } else { 0x08 }; 16];
        if *live {
            block[i % 16] = if i % 2 == 0 { 0x10 } else { 0x0f };
        }
        packed.extend(block);
    }
    let scales: Vec<u8> = blocks.iter().map(|(e, _)| *e).collect();
    let mut live = vec![9; scales.len()];
    let census = Census::of(&packed, &scales, &mut live);
    let expected: Vec<u8> = blocks.iter().map(|(_, live)| u8::from(*live)).collect();
    assert_eq!(live, expected, "live blocks of {blocks:?}");
    Row { packed, scales, live, census }
}

/// The cast of rows that share a scale: `m`, and the bytes of each or its first misfit.
fn cast(rows: &[&Row]) -> (i32, Vec<Result<Vec<u8>, FirstMisfit>>) {
    let mut census = Census::default();
    rows.iter().for_each(|row| census.add(&row.census));
    let m = global_exponent(&census);
    let cast = Cast::new(m);
    let bytes = |row: &&Row| {
        if let Some(misfit) = cast.misfit(&row.census, &row.scales, &row.live) {
            return Err(misfit);
        }
        let mut out = vec![0; 2 * row.scales.len()];
        cast.write(&row.scales, &row.live, &mut out);
        Ok(out)
    };
    (m, rows.iter().map(bytes).collect())
}

#[track_caller]
fn check(blocks: &[(u8, bool)], m: i32, bytes: &[u8]) {
    let row = row(blocks);
    let doubled: Vec<u8> = bytes.iter().flat_map(|&b| [b, b]).collect();
    assert_eq!(cast(&[&row]), (m, vec![Ok(doubled)]), "{blocks:?}");
}

#[track_caller]
fn refused(blocks: &[(u8, bool)], why: Misfit, block: usize, count: u64, nan: u64) {
    let row = row(blocks);
    let (_, results) = cast(&[&row]);
    let misfit = FirstMisfit { why, block, e: blocks[block].0, count, nan };
    assert_eq!(results, [Err(misfit)], "{blocks:?}");
}

/// Example A.
#[test]
fn three_exponents() {
    check(&[(120, true), (121, true), (122, true)], -13, &[0x68, 0x70, 0x78]);
    let (factor, divisor) = Cast::new(-13).global();
    assert_eq!((factor, divisor), (1.0 / 8192.0, 8192.0));
    assert_eq!(6.0 * E8M0(121).to_f32(), 0.09375);
    assert_eq!(6.0 * E4M3(0x70).to_f32() * factor, 0.09375);
}

/// Example B.
#[test]
fn gate_and_up_share_a_scale() {
    let (w1, w3) = (row(&[(118, true), (122, true)]), row(&[(124, true)]));
    let expected = vec![Ok(vec![0x48, 0x48, 0x68, 0x68]), Ok(vec![0x78, 0x78])];
    assert_eq!(cast(&[&w1, &w3]), (-11, expected));
    assert_eq!(cast(&[&w1]).0, -13);
}

/// Example C, and every edge of the window.
#[test]
fn window() {
    check(&[(122, true), (105, true)], -13, &[0x78, 0x01]);
    refused(&[(122, true), (104, true)], Misfit::OutOfWindow, 1, 1, 0);
    refused(&[(104, true), (122, true), (103, true)], Misfit::OutOfWindow, 0, 2, 0);
    for zero in [100, 0, 104, 123, 254] {
        check(&[(122, true), (zero, false)], -13, &[0x78, 0x38]);
    }
    for (e, byte) in (105..).zip(POWERS_OF_TWO) {
        check(&[(122, true), (e, true)], -13, &[0x78, byte]);
        check(&[(122, true), (e, false)], -13, &[0x78, byte]);
    }
}

/// The codes of 2^-9 to 2^8 (`docs/nvfp4.md` 2).
const POWERS_OF_TWO: [u8; 18] = [
    0x01, 0x02, 0x04, 0x08, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38, 0x40, 0x48, 0x50, 0x58, 0x60, 0x68, 0x70,
    0x78,
];

#[test]
fn zero_blocks_with_every_exponent() {
    for e in 0..=254 {
        let row = row(&[(122, true), (e, false)]);
        let cast = Cast::new(global_exponent(&row.census));
        let mut out = [0; 4];
        assert_eq!(cast.misfit(&row.census, &row.scales, &row.live), None);
        cast.write(&row.scales, &row.live, &mut out);
        let code = E4M3::from_power_of_two(i32::from(e) - 127 + 13);
        assert_eq!(out[2..], [code.map_or(0x38, |code| code.0); 2], "{e}");
        assert_eq!(cast.replaced(&row.census), u64::from(code.is_none()), "{e}");
        // Nothing is live: m = 0, so 2^-9..2^8 fit.
        let fits = (118..=135).contains(&e);
        check(
            &[(e, false)],
            0,
            &[if fits { E4M3::from_power_of_two(i32::from(e) - 127).unwrap().0 } else { 0x38 }],
        );
    }
}

#[test]
fn nan_is_refused_wherever_it_is() {
    refused(&[(122, true), (255, true)], Misfit::Nan, 1, 0, 1);
    refused(&[(122, true), (255, false)], Misfit::Nan, 1, 0, 1);
    refused(&[(255, false)], Misfit::Nan, 0, 0, 1);
    // Each is counted for itself, whichever comes first.
    refused(&[(255, true), (122, true), (100, true), (255, false)], Misfit::Nan, 0, 1, 2);
    refused(&[(100, true), (122, true), (101, true), (255, false)], Misfit::OutOfWindow, 0, 2, 1);
}

/// An exponent is an exponent, 0 included, also where `2^(kmax - 8)` would not be a normal number.
#[test]
fn the_smallest_exponents() {
    check(&[(17, true), (0, true)], -118, &[0x78, 0x01]);
    refused(&[(18, true), (0, true)], Misfit::OutOfWindow, 1, 1, 0);
    check(&[(9, true)], -126, &[0x78]);
    check(&[(8, true), (0, true)], -126, &[0x70, 0x30]);
    check(&[(0, true)], -126, &[0x30]);
}

/// Readers take a factor above 64 for a divisor.
#[test]
fn the_largest_exponents() {
    let too_large = |blocks: &[(u8, bool)]| {
        let row = row(blocks);
        Cast::new(global_exponent(&row.census)).too_large(&row.census, &row.scales, &row.live)
    };
    check(&[(141, true), (140, true)], 6, &[0x78, 0x70]);
    check(&[(254, true), (237, true)], 119, &[0x78, 0x01]);
    assert_eq!(too_large(&[(141, true), (254, false)]), None);
    let why = Misfit::GlobalScale;
    let first = |block, e, count| Some(FirstMisfit { why, block, e, count, nan: 0 });
    assert_eq!(too_large(&[(140, true), (142, true), (142, true)]), first(1, 142, 2));
    assert_eq!(too_large(&[(254, true)]), first(0, 254, 1));
}

#[test]
fn all_values_are_kept() {
    for kmax in [10_u8, 100, 127, 141] {
        for below in 0..=17.min(kmax) {
            let e = kmax - below;
            let row = row(&[(kmax, true), (e, true)]);
            let (m, results) = cast(&[&row]);
            let (factor, divisor) = Cast::new(m).global();
            let scale = E4M3(results[0].as_ref().unwrap()[2]).to_f32();
            assert_eq!(scale * factor, E8M0(e).to_f32(), "{kmax} {e}");
            assert_eq!(scale / divisor, E8M0(e).to_f32(), "{kmax} {e}");
        }
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    let rows = value.as_array().unwrap().iter();
    rows.flat_map(|row| row.as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8)).collect()
}

/// Cases of an independent implementation. For blocks of zeros it has its own rule, ours is `docs/nvfp4.md` 4.
#[test]
fn recorded_cases() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/ops/mxfp4_to_nvfp4.json");
    let vectors: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() > 3);
    let mut refusals = 0;
    for case in cases {
        let name = &case["name"];
        let (packed, scales) = (bytes(&case["packed"]), bytes(&case["mx_scale"]));
        let mut live = vec![0; scales.len()];
        let census = Census::of(&packed, &scales, &mut live);
        let row = Row { packed, scales, live, census };
        assert_eq!(row.packed.len(), 16 * row.scales.len());
        let (m, results) = cast(&[&row]);
        if case.get("error").is_some_and(|e| !e.is_null()) {
            assert!(results[0].is_err(), "{name}");
            refusals += 1;
            continue;
        }
        let out = results[0].as_ref().unwrap_or_else(|e| panic!("{name}: {e:?}"));
        if row.census.live_blocks() > 0 {
            assert_eq!(Some(i64::from(m)), case["global_exponent"].as_i64(), "{name}");
        }
        let expected = bytes(&case["e4m3_bytes"]);
        assert_eq!(expected.len(), out.len(), "{name}");
        for (i, &live) in row.live.iter().enumerate() {
            if live == 1 {
                assert_eq!(out[2 * i..2 * i + 2], expected[2 * i..2 * i + 2], "{name}, block {i}");
            }
        }
    }
    assert!(refusals >= 2);
}
