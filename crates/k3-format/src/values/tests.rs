use super::*;

fn check(dtype: Dtype, bytes: &[u8], expected: Option<(usize, f32)>) {
    let found = first_not_finite(dtype, bytes);
    let bits = |found: Option<(usize, f32)>| found.map(|(at, value)| (at, value.to_bits()));
    assert_eq!(bits(found), bits(expected), "{dtype}: {found:?}");
}

#[test]
fn the_first_value_that_is_not_finite_is_found_wherever_it_is() {
    let finite = [0.0, -0.0, 1.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-40];
    for len in [0, 1, 7, 4095, 4096, 4097, 9000] {
        let values: Vec<f32> = finite.iter().copied().cycle().take(len).collect();
        let wide: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        // Cut, not rounded: f32::MAX would round to an infinity.
        let narrow: Vec<u8> = values.iter().flat_map(|v| [v.to_le_bytes()[2], v.to_le_bytes()[3]]).collect();
        check(Dtype::F32, &wide, None);
        check(Dtype::BF16, &narrow, None);
        for at in [0, 1, len / 2, 4095, 4096, len.saturating_sub(1)].into_iter().filter(|at| *at < len) {
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
                let mut bytes = wide.clone();
                bytes[at * 4..at * 4 + 4].copy_from_slice(&bad.to_le_bytes());
                check(Dtype::F32, &bytes, Some((at, bad)));
                let mut bytes = narrow.clone();
                bytes[at * 2..at * 2 + 2].copy_from_slice(&bad.to_le_bytes()[2..]);
                check(Dtype::BF16, &bytes, Some((at, bad)));
            }
        }
    }
}

#[test]
fn of_several_the_first_counts() {
    let mut values = vec![0.5f32; 10_000];
    (values[5000], values[5001], values[9999]) = (f32::NAN, f32::INFINITY, f32::INFINITY);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    check(Dtype::F32, &bytes, Some((5000, f32::NAN)));
}
