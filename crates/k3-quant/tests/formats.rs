//! The scalar formats over all their codes, and MXFP4 against vectors from an independent writer.

use bytes::Bytes;
use k3_quant::{
    E2M1, E4M3, E8M0, GlobalScale, Matrix, MatrixError, ScaleDivisor, ScaleFactor, Scales, bf16, int4_value,
    reference,
};
use serde_json::Value;

fn vectors(name: &str) -> Value {
    let path = format!("{}/../../fixtures/ops/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Numbers in the vectors are shortest decimals of f32 values.
fn f32s(v: &Value) -> Vec<f32> {
    match v {
        Value::Array(items) => items.iter().flat_map(f32s).collect(),
        number => vec![number.to_string().parse().unwrap()],
    }
}

fn u8s(v: &Value) -> Vec<u8> {
    match v {
        Value::Array(items) => items.iter().flat_map(u8s).collect(),
        number => vec![u8::try_from(number.as_u64().unwrap()).unwrap()],
    }
}

fn decode(m: &Matrix) -> Vec<f32> {
    let mut out = vec![0.0; m.rows() * m.cols()];
    for (r, out) in out.chunks_exact_mut(m.cols()).enumerate() {
        m.row(r).decode_f32(out);
    }
    out
}

#[test]
fn e2m1_has_sixteen_values() {
    let expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for code in 0..16u8 {
        let magnitude: f32 = expected[usize::from(code & 7)];
        let expected = if code & 8 == 0 { magnitude } else { -magnitude };
        assert_eq!(E2M1(code).to_f32().to_bits(), expected.to_bits(), "code {code}");
        assert_eq!(
            k3_quant::cpu::kernel_code_value(E2M1(code)).to_bits(),
            expected.to_bits(),
            "kernel, code {code}"
        );
        assert_eq!(E2M1(code).is_zero(), magnitude == 0.0);
    }
}

#[test]
fn e8m0_is_a_power_of_two_for_every_byte_but_255() {
    for byte in 0..255u8 {
        let expected = 2f64.powi(i32::from(byte) - 127);
        assert_eq!(f64::from(E8M0(byte).to_f32()), expected, "byte {byte}");
        assert_eq!(E8M0(byte).exponent(), Some(i32::from(byte) - 127));
    }
    assert!(E8M0(255).to_f32().is_nan(), "not infinity, not zero");
    assert_eq!(E8M0::NAN.exponent(), None);
    assert_eq!(E8M0(0).to_f32().to_bits(), 0x0040_0000, "subnormal, not flushed");
    assert_eq!(E8M0(134).to_f32(), 128.0);
}

#[test]
#[cfg_attr(miri, ignore = "reads a file")]
fn e4m3_all_codes() {
    for code in 0..=255u8 {
        let (sign, e, m) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
        let value = E4M3(code).to_f32();
        if e == 15 && m == 7.0 {
            assert!(value.is_nan());
            continue;
        }
        let magnitude = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
        assert_eq!(f64::from(value.abs()), magnitude, "code {code:#04x}");
        assert_eq!(value.is_sign_negative(), sign == 1);
    }
    assert_eq!(E4M3(0x7e).to_f32(), 448.0);
    for (p, byte) in vectors("mxfp4_to_nvfp4")["e4m3_of_power_of_two"].as_object().unwrap() {
        let (p, byte): (i32, u8) = (p.parse().unwrap(), byte.as_u64().unwrap() as u8);
        assert_eq!(E4M3::from_power_of_two(p), Some(E4M3(byte)));
        assert_eq!(f64::from(E4M3(byte).to_f32()), 2f64.powi(p));
    }
    assert_eq!((E4M3::from_power_of_two(-10), E4M3::from_power_of_two(9)), (None, None));
}

/// 16 distinct codes in an order that is no palindrome: a swapped nibble or a reversed block shows.
#[test]
fn the_low_nibble_is_the_even_column() {
    let mut packed = vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe];
    packed.extend([0; 8]);
    let m = Matrix::mxfp4(1, 32, packed.into(), vec![127].into()).unwrap();
    let mut expected = E2M1::VALUES.to_vec();
    expected.extend([0.0; 16]);
    assert_eq!(bits(&decode(&m)), bits(&expected));
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
#[cfg_attr(miri, ignore = "reads a file")]
fn mxfp4_vectors() {
    let v = vectors("mxfp4_decode");
    let rows = &v["single_block_rows"];
    let n = rows["rows"].as_u64().unwrap() as usize;
    let m = Matrix::mxfp4(n, 32, u8s(&rows["packed"]).into(), u8s(&rows["scale"]).into()).unwrap();
    let expected: Vec<u32> = rows["expected_f32_bits"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u32))
        .collect();
    assert_eq!(bits(&decode(&m)), expected);

    let v = &v["matrix"];
    let m = Matrix::mxfp4(7, 160, u8s(&v["packed"]).into(), u8s(&v["scale"]).into()).unwrap();
    assert_eq!(bits(&decode(&m)), bits(&f32s(&v["expected"])));
    let x: Vec<f64> = f32s(&v["x"]).iter().map(|&x| f64::from(x)).collect();
    let mut y = vec![0.0; 7];
    reference::matmul_f64(&m, 1, &x, &mut y);
    for (y, expected) in y.iter().zip(f32s(&v["w_times_x"])) {
        assert_eq!(*y as f32, expected);
    }
}

/// One logical NVFP4 weight in both conventions of the global scale decodes to the same bits; the stored number of
/// one read as the other does not.
#[test]
fn nvfp4_global_scale_conventions_are_inverse() {
    let packed: Bytes = (0..8u8).map(|i| i | (15 - i) << 4).collect::<Vec<_>>().into();
    let scale: Bytes = vec![0x70].into();
    let with = |g| decode(&Matrix::nvfp4(1, 16, packed.clone(), scale.clone(), g).unwrap());
    let factor = with(GlobalScale::Factor(ScaleFactor(2f32.powi(-13))));
    let divisor = with(GlobalScale::Divisor(ScaleDivisor(8192.0)));
    assert_eq!(bits(&factor), bits(&divisor));
    assert_ne!(bits(&factor), bits(&with(GlobalScale::Factor(ScaleFactor(8192.0)))));
    // docs/nvfp4.md 5 A: code 7 under e = 121 is 0.09375.
    assert_eq!(with(GlobalScale::Factor(ScaleFactor(2f32.powi(-13))))[14], 0.09375);
}

/// Bytes as compressed-tensors packs and decodes them: 8 is added to an integer, element i of a word is bits 4i.., and
/// words are little-endian.
#[test]
fn int4_is_offset_binary_and_the_low_nibble_the_even_column() {
    for nibble in 0..16u8 {
        assert_eq!(int4_value(nibble | 0xa0), f32::from(nibble) - 8.0);
    }
    let words: Vec<u8> = (0..8).flat_map(|i| [0x7654_3210u32, 0xfedc_ba98][i % 2].to_le_bytes()).collect();
    let scale = |s: f32| Scales::Bf16(bf16::from_f32(s).to_le_bytes().to_vec().into());
    let expected: Vec<f32> = (0..64).map(|c| 0.5 * ((c % 16) as f32 - 8.0)).collect();
    assert_eq!(decode(&Matrix::int4(1, 64, words.into(), scale(0.5)).unwrap()), expected);
}

#[test]
fn int8_has_a_scale_a_row_in_either_type() {
    let codes: Bytes = vec![0, 1, 127, 128, 255, 2].into();
    let bytes = |s: [f32; 2]| s.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<_>>().into();
    let wide = Matrix::int8(2, 3, codes.clone(), Scales::F32(bytes([0.1, 2.0]))).unwrap();
    assert_eq!(decode(&wide), [0.0, 0.1, 127.0 * 0.1, -256.0, -2.0, 4.0]);
    let narrow = [0.5f32, 2.0].iter().flat_map(|&s| bf16::from_f32(s).to_le_bytes()).collect::<Vec<_>>();
    // At an odd address.
    let narrow = Bytes::from([&[0], &narrow[..]].concat()).slice(1..);
    let narrow = Matrix::int8(2, 3, codes, Scales::Bf16(narrow)).unwrap();
    assert_eq!(decode(&narrow), [0.0, 0.5, 63.5, -256.0, -2.0, 4.0]);
    let mut y = [0.0; 2];
    reference::matmul_f64(&narrow, 1, &[1.0, 10.0, 100.0], &mut y);
    assert_eq!(y, [6355.0, 124.0]);
}

#[test]
fn a_matrix_refuses_bytes_that_do_not_fit_its_shape() {
    let zeros = |n: usize| Bytes::from(vec![0u8; n]);
    let length = |r: Result<Matrix, MatrixError>| matches!(r, Err(MatrixError::Length { .. }));
    assert!(Matrix::mxfp4(2, 64, zeros(64), zeros(4)).is_ok());
    assert!(length(Matrix::mxfp4(2, 64, zeros(63), zeros(4))));
    assert!(length(Matrix::mxfp4(2, 64, zeros(64), zeros(8))), "a scale row of NVFP4's width");
    assert!(matches!(Matrix::mxfp4(2, 48, zeros(48), zeros(3)), Err(MatrixError::Columns { .. })));
    assert!(length(Matrix::bf16(3, 5, zeros(31))));
    assert!(length(Matrix::int8(3, 5, zeros(15), Scales::Bf16(zeros(12)))), "as wide as f32");
    assert!(length(Matrix::int8(3, 5, zeros(14), Scales::F32(zeros(12)))));
    assert!(length(Matrix::int4(3, 64, zeros(96), Scales::Bf16(zeros(4)))));
    assert!(matches!(
        Matrix::int4(3, 96, zeros(144), Scales::Bf16(zeros(9))),
        Err(MatrixError::Columns { .. })
    ));
    assert!(length(Matrix::int4(usize::MAX, 64, zeros(32), Scales::F32(zeros(4)))));
    assert!(length(Matrix::f32(usize::MAX, 5, zeros(32))), "an overflowing size is no panic");
}

#[test]
fn unaligned_bytes_are_read_right() {
    let values: Vec<u8> = [1.5f32, -2.0, 3.25].iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut shifted = vec![0u8; 1];
    shifted.extend(&values);
    for offset in 0..2 {
        let bytes =
            if offset == 0 { Bytes::from(values.clone()) } else { Bytes::from(shifted.clone()).slice(1..) };
        assert_eq!(decode(&Matrix::f32(1, 3, bytes).unwrap()), [1.5, -2.0, 3.25]);
    }
}
