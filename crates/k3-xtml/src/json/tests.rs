use super::scan::{Scanner, whole_value};
use super::*;

fn check_sorted(source: &str, expected: &str) {
    assert_eq!(Value::parse(source).unwrap().to_sorted(), expected, "sorted form of {source}");
}

fn check_spaced(source: &str, expected: &str) {
    assert_eq!(Value::parse(source).unwrap().to_spaced(), expected, "spaced form of {source}");
}

fn check_refused(source: &str, at: usize) {
    match Value::parse(source) {
        Err(JsonError::Syntax { at: found, .. }) => assert_eq!(found, at, "where {source:?} fails"),
        other => panic!("{source:?} gave {other:?}"),
    }
}

#[test]
fn keys_sort_by_code_point() {
    // U+FF5E sorts after U+1F600 in UTF-16, before it by code point.
    check_sorted(
        "{\"b\":1,\"a\":{\"2\":0,\"10\":0},\"\u{1f600}\":0,\"\u{ff5e}\":0,\"B\":0}",
        "{\"B\":0,\"a\":{\"10\":0,\"2\":0},\"b\":1,\"\u{ff5e}\":0,\"\u{1f600}\":0}",
    );
    check_sorted("[ {\"b\" : [ ] , \"a\" : { } } , 1 ]", "[{\"a\":{},\"b\":[]},1]");
}

#[test]
fn equal_keys_print_as_a_python_dictionary() {
    check_sorted("{\"b\":1,\"a\":2,\"b\":3}", "{\"a\":2,\"b\":3}");
    check_spaced("{\"b\":1,\"a\":2,\"b\":3}", "{\"b\": 3, \"a\": 2}");
    let value = Value::parse("{\"b\":1,\"b\":3}").unwrap();
    assert!(matches!(&value, Value::Object(pairs) if pairs.len() == 2));
    assert_eq!(value.get("b"), Some(&Value::from(3)));
}

#[test]
fn escapes() {
    check_spaced(
        r#""\u0000\u001f\b\f\n\r\t\"\\\/\u007f\u2028é\ud83d\ude00""#,
        "\"\\u0000\\u001f\\b\\f\\n\\r\\t\\\"\\\\/\u{7f}\u{2028}é😀\"",
    );
    check_spaced(r#""\ud800""#, "\"\u{fffd}\"");
    check_spaced(r#""\ud800\u0041""#, "\"\u{fffd}A\"");
    check_spaced(r#""\udc00x""#, "\"\u{fffd}x\"");
}

#[test]
fn numbers() {
    check_spaced("-0", "0");
    check_spaced("-0.0", "-0.0");
    check_spaced("123456789012345678901234567890", "123456789012345678901234567890");
    check_spaced("1e2", "100.0");
    check_spaced("1E+2", "100.0");
    check_spaced("0.1", "0.1");
    check_spaced("1.50", "1.5");
    check_spaced("0.0001", "0.0001");
    check_spaced("0.00001", "1e-05");
    check_spaced("0.00012345", "0.00012345");
    check_spaced("-12345.678e-10", "-1.2345678e-06");
    check_spaced("1000000000000000.0", "1000000000000000.0");
    check_spaced("9007199254740993.0", "9007199254740992.0");
    check_spaced("1e16", "1e+16");
    check_spaced("123456789e10", "1.23456789e+18");
    check_spaced("1.5e300", "1.5e+300");
    check_spaced("5e-324", "5e-324");
    check_spaced("1.7976931348623157e308", "1.7976931348623157e+308");
    check_spaced("1e400", "Infinity");
    check_spaced("-1e400", "-Infinity");
    check_spaced("1e-400", "0.0");
    assert_eq!(python_float(f64::NAN), "NaN");
    assert_eq!(Value::from(0.1).to_spaced(), "0.1");
    assert_eq!(Value::from(-3).to_spaced(), "-3");
    let digits = "9".repeat(100_000);
    check_spaced(&digits, &digits);
}

#[test]
fn syntax_errors_say_where() {
    check_refused("", 0);
    check_refused("  ", 2);
    check_refused("[1,]", 3);
    check_refused("{\"a\":1,}", 7);
    check_refused("{1:2}", 1);
    check_refused("01", 1);
    check_refused("1.", 1);
    check_refused("-", 0);
    check_refused("NaN", 0);
    check_refused("-Infinity", 0);
    check_refused("nul", 0);
    check_refused("\"a\nb\"", 2);
    check_refused("\"\\x\"", 2);
    check_refused("\"\\u12g4\"", 5);
    check_refused("\"abc", 4);
    check_refused("[1}", 2);
    check_refused("{} {}", 3);
    check_refused("\u{a0}1", 0);
}

#[test]
fn nesting_is_limited_by_an_error() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let deepest = Value::parse(&nested(MAX_DEPTH)).unwrap();
    assert_eq!(deepest.to_sorted(), nested(MAX_DEPTH));
    assert_eq!(Value::parse(&nested(MAX_DEPTH + 1)), Err(JsonError::TooDeep { at: MAX_DEPTH }));
    assert_eq!(Value::parse(&"{\"a\":".repeat(1_000_000)), Err(JsonError::TooDeep { at: 5 * MAX_DEPTH }));
    // Skipping has no limit: an argument of any depth is still one value.
    let mut scanner = Scanner::new("", Syntax::LENIENT);
    assert!(scanner.skip_value().is_err());
    assert!(whole_value(&nested(1_000_000)).is_some());
    assert!(whole_value(&"[".repeat(1_000_000)).is_none());
}

#[test]
fn lenient_reading() {
    let lenient = |text: &str| Value::parse_with(text, Syntax::LENIENT).map(|v| v.to_spaced());
    assert_eq!(lenient("\"a\nb\"").unwrap(), "\"a\\nb\"");
    assert_eq!(lenient("[NaN,Infinity,-Infinity]").unwrap(), "[NaN, Infinity, -Infinity]");
    assert!(Value::parse_with("\"a\nb\"", Syntax::PYTHON).is_err());
    assert!(Value::parse_with("NaN", Syntax::PYTHON).is_ok());
}

#[test]
fn whole_values() {
    assert_eq!(whole_value(" \n{\"a\" : [1 ,2]}\t"), Some("{\"a\" : [1 ,2]}"));
    assert_eq!(whole_value("1.50 "), Some("1.50"));
    assert_eq!(whole_value("3 or 4"), None);
    assert_eq!(whole_value("NaN"), None);
    assert_eq!(whole_value(""), None);
    assert_eq!(whole_value("[1, [2, {\"a\": }]]"), None);
    assert_eq!(whole_value("{\"a\": 1, 2}"), None);
    assert_eq!(whole_value("[1}"), None);
}
