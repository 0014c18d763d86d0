//! The truth table of the variant gate (`docs/checkpoint.md` 9.1).

use serde_json::json;

use super::{GateError, IndexerTensors, Markers, Variant, decide, wrapper};

/// T.
#[derive(Clone, Copy, Debug, PartialEq)]
enum T {
    None,
    All,
    Lacking,
    Outside,
    OnlyOutside,
}
use T::{All, Lacking, None as Nothing, OnlyOutside, Outside};

fn tensors(t: T) -> IndexerTensors {
    let names = |n: &str| vec![n.to_owned()];
    let (found, missing, outside) = match t {
        Nothing => (0, names("a"), vec![]),
        All => (120, vec![], vec![]),
        Lacking => (119, names("layers.3.wk"), vec![]),
        Outside => (120, vec![], names("layers.0.wk")),
        OnlyOutside => (0, names("layers.3.wk"), names("layers.0.wk")),
    };
    IndexerTensors { expected: names("layers.3.wq_b"), found, missing, outside, by_shape: None }
}

fn result(model_type: &str, dsa_config: bool, t: T) -> Result<Variant, GateError> {
    let markers = Markers { model_type: Some(model_type.to_owned()), text_config: true, dsa_config };
    decide(&markers, &tensors(t))
}

/// The row gives the error of this name.
macro_rules! row {
    ($w:expr, $c:expr, $t:expr, $error:ident) => {
        let found = result($w, $c, $t);
        assert!(matches!(found, Err(GateError::$error { .. })), "{} {} {:?}: {found:?}", $w, $c, $t);
    };
}

#[test]
fn every_row_has_its_result() {
    assert_eq!(result("kimi_k3", false, Nothing), Ok(Variant::K3));
    assert_eq!(result("kimi_k31", true, All), Ok(Variant::K31));
    row!("kimi_k31", true, Nothing, IndexerTensorsMissing);
    row!("kimi_k31", false, All, DsaConfigMissing);
    row!("kimi_k31", false, Nothing, VariantMarkerOnly);
    row!("kimi_k3", true, All, WrapperSaysK3);
    row!("kimi_k3", true, Nothing, DsaConfigOnK3);
    row!("kimi_k3", false, All, IndexerTensorsOnK3);
    for w in ["kimi_k3", "kimi_k31"] {
        for c in [false, true] {
            for t in [Lacking, Outside, OnlyOutside] {
                row!(w, c, t, IndexerTensorsPartial);
            }
        }
    }
    for w in ["kimi_linear", "kimi_k2", "KIMI_K3", "kimi_k3 ", ""] {
        for c in [false, true] {
            for t in [Nothing, All, Lacking, Outside, OnlyOutside] {
                row!(w, c, t, UnsupportedModelType);
            }
        }
    }
}

/// What a config says: an object counts whatever is in it, also under a K3 wrapper.
#[test]
fn markers_of_configs() {
    let check = |config: &str, dsa_config: bool, expected: Variant| {
        let markers = Markers::of(&serde_json::from_str(config).expect("JSON"));
        assert_eq!((wrapper(&markers), markers.dsa_config), (Ok(expected), dsa_config), "{config}");
    };
    check(include_str!("../../../../fixtures/configs/kimi-k3.config.json"), false, Variant::K3);
    check(include_str!("../../../../fixtures/configs/kimi-k31.config.json"), true, Variant::K31);
    for (dsa_config, found) in [(json!({}), true), (json!("yes"), true), (json!(null), false)] {
        let text = json!({"dsa_config": dsa_config});
        check(&json!({"model_type": "kimi_k3", "text_config": text}).to_string(), found, Variant::K3);
    }
}

#[test]
fn without_text_config_nothing_else_counts() {
    for model_type in [None, Some("kimi_k3".to_owned()), Some("kimi_linear".to_owned())] {
        for t in [Nothing, All, Lacking] {
            let markers = Markers { model_type: model_type.clone(), text_config: false, dsa_config: false };
            let found = decide(&markers, &tensors(t));
            assert_eq!(found, Err(GateError::NoTextConfig { model_type: model_type.clone() }));
        }
    }
}

#[test]
fn messages_say_what_to_look_at() {
    let text = |w, c, t| result(w, c, t).expect_err("an error").to_string();
    assert!(text("kimi_k31", true, Nothing).contains("layers.3.wq_b"));
    assert!(text("kimi_k3", true, All).contains("120"));
    assert!(text("kimi_k2", true, All).contains("\"kimi_k31\""));
    let partial = text("kimi_k31", true, Lacking);
    assert!(partial.contains("layers.3.wk") && partial.contains("119"), "{partial}");
    assert!(text("kimi_k3", false, Outside).contains("layers.0.wk"));
}
