use std::collections::BTreeMap;

use safetensors::SafeTensors;

use super::*;

/// One tensor of `[begin, end)` bytes.
fn u8s(name: &str, begin: u64, end: u64) -> String {
    format!(
        r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#,
        end.wrapping_sub(begin)
    )
}

fn header(tensors: &[String]) -> String {
    format!("{{{}}}", tensors.join(","))
}

fn one(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
}

type Table = BTreeMap<String, (Dtype, Vec<u64>, u64, u64)>;

fn table(header: &Header) -> Table {
    let row = |e: &Entry| (header.name(e).to_owned(), (e.dtype, header.shape(e).to_vec(), e.begin, e.end));
    header.entries.iter().map(row).collect()
}

/// What the safetensors crate reads from the same header, if it accepts it for a data section of `data_len` bytes.
fn oracle(json: &[u8], data_len: usize) -> Option<Table> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.resize(file.len() + data_len, 0);
    let (_, metadata) = SafeTensors::read_metadata(&file).ok()?;
    let row = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let shape = info.shape.iter().map(|&d| d as u64).collect();
        (name, (info.dtype, shape, info.data_offsets.0 as u64, info.data_offsets.1 as u64))
    };
    Some(metadata.tensors().into_iter().map(row).collect())
}

fn accept(json: &str, data_len: u64) {
    let header = Header::parse(json.as_bytes()).unwrap_or_else(|e| panic!("{json}: {e}"));
    assert_eq!(header.data_len, data_len, "{json}");
    assert_eq!(Some(table(&header)), oracle(json.as_bytes(), data_len as usize), "{json}");
}

#[test]
fn names_that_act_on_a_terminal() {
    for name in ["a\\nb", "\\u001b[2K", "\\u009b31m", "a\\u007f", "\\u0000", "a\\u202eb"] {
        let json = header(&[u8s(name, 0, 8)]);
        let error = Header::parse(json.as_bytes()).expect_err(&json);
        assert!(matches!(error, HeaderError::ControlInName { .. }), "{error}");
        assert!(crate::printable::is_printable(&error.to_string()), "{error:?}");
    }
    accept(&header(&[u8s("norm \u{e9}\u{6743}", 0, 8)]), 8);
}

#[test]
fn valid_headers() {
    accept("{}", 0);
    accept("{}   ", 0);
    accept(r#"{"__metadata__":{"format":"pt"}}"#, 0);
    accept(&header(&[u8s("a", 0, 8), u8s("b", 8, 9)]), 9);
    accept(&header(&[u8s("b", 8, 9), u8s("a", 0, 8)]), 9);
    accept(&header(&[u8s("empty", 8, 8), u8s("a", 0, 8), u8s("b", 8, 9), u8s("last", 9, 9)]), 9);
    accept(&one("BF16", "[2,3]", 0, 12), 12);
    accept(&one("F32", "[]", 0, 4), 4);
    accept(&one("F4", "[2,3]", 0, 3), 3);
    accept(&one("F6_E2M3", "[4]", 0, 3), 3);
    accept(&one("C64", "[1,1,1,1,1,1,1,2]", 0, 16), 16);
    accept(&one("F8_E8M0", "[0,7]", 0, 0), 0);
    // Keys in another order, an escape in a name, a key of a later version.
    accept(r#"{"t\u0041":{"data_offsets":[0,1],"extra":[{}],"shape":[1],"dtype":"I8"}}"#, 1);
}

#[test]
fn entries_are_in_disk_order() {
    let header = Header::parse(header(&[u8s("z", 3, 5), u8s("y", 0, 3), u8s("x", 5, 6)]).as_bytes()).unwrap();
    let names: Vec<_> = header.entries.iter().map(|e| header.name(e)).collect();
    assert_eq!(names, ["y", "z", "x"]);
}

fn refuse(json: &str, message: &str) {
    let error = Header::parse(json.as_bytes()).expect_err(json).to_string();
    assert!(error.contains(message), "{json}\n  gave: {error}\n  not:  {message}");
}

#[test]
fn invalid_headers() {
    refuse("", "must begin with `{`, it begins with nothing");
    refuse(" {}", "must begin with `{`, it begins with ' '");
    refuse("[]", "it begins with '['");
    refuse("{", "EOF while parsing");
    refuse("{}{", "trailing characters at line 1 column 3");
    refuse("{}\0", "trailing characters");
    refuse(
        r#"{"a":1}"#,
        "expected a tensor with dtype, shape and data_offsets at line 1 column 6 (at tensor `a`)",
    );
    refuse(r#"{"a":{"dtype":"U8","shape":[1]}}"#, "missing field `data_offsets`");
    refuse(r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#, "missing field `shape`");
    refuse(r#"{"a":{"shape":[1],"data_offsets":[0,1]}}"#, "missing field `dtype`");
    refuse(
        r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        "duplicate field `dtype`",
    );
    refuse(r#"{"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}}"#, "expected a dtype as a string");
    refuse(&one("U8", "[-1]", 0, 1), "invalid value: integer `-1`, expected u64");
    refuse(&one("U8", "[1.0]", 0, 1), "invalid type: floating point `1.0`, expected u64");
    refuse(&one("U8", "[18446744073709551616]", 0, 1), "expected u64");
    refuse(&one("U8", "{}", 0, 1), "expected a shape, a list of non-negative integers");
    refuse(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}"#, "invalid length 1");
    refuse(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, "at tensor `a`");
    refuse(r#"{"__metadata__":{"a":1}}"#, "expected a string");
    refuse(r#"{"__metadata__":null}"#, "expected `__metadata__` to map strings to strings");
    refuse(r#"{"__metadata__":{},"__metadata__":{}}"#, "the header has `__metadata__` twice");
    refuse(&one("MXFP4", "[1]", 0, 1), "tensor `t` has the unknown dtype \"MXFP4\"");
    refuse(&one("u8", "[1]", 0, 1), "tensor `t` has the unknown dtype \"u8\"");
    refuse(&one("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1), "tensor `t` has more than 8 dimensions");
    refuse(
        &one("U8", "[4294967296,4294967296]", 0, 1),
        "tensor `t`: the size of U8 [4294967296, 4294967296] overflows",
    );
    refuse(&one("F64", "[4611686018427387904]", 0, 1), "overflows");
    refuse(&one("F4", "[3]", 0, 1), "tensor `t`: F4 [3] is not a whole number of bytes");
    refuse(
        &one("BF16", "[2,3]", 0, 11),
        "tensor `t`: BF16 [2, 3] needs 12 bytes, but its data_offsets are [0, 11]",
    );
    refuse(&one("U8", "[1]", 1, 0), "needs 1 bytes, but its data_offsets are [1, 0]");
    refuse(&header(&[u8s("a", 1, 2)]), "no tensor covers bytes 0..1 of the data section, before tensor `a`");
    refuse(
        &header(&[u8s("a", 0, 2), u8s("b", 3, 4)]),
        "no tensor covers bytes 2..3 of the data section, before tensor `b`",
    );
    refuse(&header(&[u8s("b", 1, 4), u8s("a", 0, 2)]), "tensors `a` and `b` overlap at byte 1");
    refuse(&header(&[u8s("a", 0, 4), u8s("b", 0, 4)]), "tensors `a` and `b` overlap at byte 0");
    refuse(&header(&[u8s("a", 0, 4), u8s("b", 1, 1)]), "tensors `a` and `b` overlap at byte 1");
    refuse(&header(&[u8s("a", 0, 1), u8s("a", 1, 2)]), "the header has `a` twice");
    refuse(&header(&[u8s("a", 0, 1), u8s("\\u0061", 1, 2)]), "the header has `a` twice");
    refuse(&header(&[u8s(&"n".repeat(65_536), 0, 1)]), "a tensor name of 65536 bytes");
    refuse(&format!("{{\"a\":{}{}}}", "[".repeat(5000), "]".repeat(5000)), "at tensor `a`");
}

#[test]
fn the_longest_name_is_accepted() {
    accept(&header(&[u8s(&"n".repeat(MAX_NAME_BYTES), 0, 1)]), 1);
}

#[test]
fn invalid_utf8() {
    let error = Header::parse(b"{\"a\xff\":{}}").unwrap_err();
    assert_eq!(error, HeaderError::NotUtf8 { valid_up_to: 3 });
}

/// A small linear congruential generator: the same bytes are flipped in every run.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn damaged_headers_never_panic_and_are_never_read_differently() {
    const ALPHABET: &[u8] = b"{}[]\",:0123456789 \\tu-.eE\x00\xff";
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/dims-k31/model-00001-of-000002.safetensors");
    let file = std::fs::read(path).unwrap();
    let n = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let whole = std::str::from_utf8(&file[8..8 + n]).unwrap();
    // The first tensors of a real header, so that each place is hit many times.
    let cut = whole.match_indices('}').nth(5).unwrap().0;
    let base = format!("{}}}}}", &whole[..cut]);
    let mut random = Lcg(20_261_129);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..20_000 {
        let mut json = base.clone().into_bytes();
        for _ in 0..=random.below(3) {
            let at = random.below(json.len());
            json[at] = match random.below(3) {
                0 => json[at] ^ (1 << random.below(8)),
                1 => ALPHABET[random.below(ALPHABET.len())],
                _ => random.below(256) as u8,
            };
        }
        if random.below(8) == 0 {
            json.truncate(random.below(json.len()));
        }
        let Ok(header) = Header::parse(&json) else {
            refused += 1;
            continue;
        };
        accepted += 1;
        let shown = String::from_utf8_lossy(&json);
        assert!(header.data_len < 1 << 24, "round {round}: {shown}");
        assert_eq!(oracle(&json, header.data_len as usize), Some(table(&header)), "round {round}: {shown}");
    }
    assert!(accepted > 1000 && refused > 1000, "{accepted} accepted, {refused} refused");
}
