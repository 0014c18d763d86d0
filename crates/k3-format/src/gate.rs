//! Which variant a snapshot is, in both directions (`docs/checkpoint.md` 9.1).
//!
//! Three markers must agree: the wrapper's `model_type` (W), `text_config.dsa_config` (C) and the indexer tensors
//! (T). Running Kimi K3.1 Pro as Kimi K3 drops the indexer and still talks, so any disagreement is an error of its
//! own name.

#[cfg(test)]
mod tests;

use std::fmt::Write;

use serde_json::Value;

use crate::Variant;
use crate::config::show;

/// `model_type` of a Kimi K3 wrapper.
const WRAPPER_K3: &str = "kimi_k3";
/// `model_type` of a Kimi K3.1 Pro wrapper.
const WRAPPER_K31: &str = "kimi_k31";

/// What `config.json` says about the variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Markers {
    /// W: `model_type` of the root, as JSON if it is not a string; `None` if absent.
    pub(crate) model_type: Option<String>,
    /// Whether the root has a `text_config`.
    pub(crate) text_config: bool,
    /// C: whether `text_config.dsa_config` is there and not null.
    pub(crate) dsa_config: bool,
}

impl Markers {
    /// The markers of a parsed `config.json`.
    pub(crate) fn of(json: &Value) -> Self {
        let present = |value: Option<&Value>| value.is_some_and(|v| !v.is_null());
        let text = json.get("text_config");
        Self {
            model_type: json
                .get("model_type")
                .map(|v| v.as_str().map_or_else(|| show(Some(v)), str::to_owned)),
            text_config: present(text),
            dsa_config: present(text.and_then(|t| t.get("dsa_config"))),
        }
    }
}

/// T: what the index holds of the indexer, counted over the layers that should have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct IndexerTensors {
    /// Names that the five tensors of the first full-attention layer would have.
    pub(crate) expected: Vec<String>,
    /// Indexer tensors found on full-attention layers.
    pub(crate) found: usize,
    /// Names of those that full-attention layers lack.
    pub(crate) missing: Vec<String>,
    /// Names of indexer tensors on other layers.
    pub(crate) outside: Vec<String>,
    /// Why finding them by shape did not help either, if it was tried.
    pub(crate) by_shape: Option<String>,
}

/// How much of the indexer is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    None,
    All,
    Some,
}

impl IndexerTensors {
    fn presence(&self) -> Presence {
        match (self.found, self.missing.len(), self.outside.len()) {
            (0, _, 0) => Presence::None,
            (_, 0, 0) => Presence::All,
            _ => Presence::Some,
        }
    }
}

/// Why a snapshot is neither of the two variants.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages show")]
pub enum GateError {
    /// The root is not the wrapper.
    #[error(
        "config.json has no text_config{}: a bare language-model config has lost the marker that tells Kimi K3 \
         from Kimi K3.1 Pro; use the config.json of the release",
        .model_type.as_ref().map_or_else(String::new, |t| format!(" (model_type {t:?})"))
    )]
    NoTextConfig { model_type: Option<String> },
    /// The root is another model.
    #[error(
        "model_type of config.json is {}; supported are \"kimi_k3\" (Kimi K3) and \"kimi_k31\" (Kimi K3.1 Pro)",
        .model_type.as_ref().map_or_else(|| "absent".to_owned(), |t| format!("{t:?}"))
    )]
    UnsupportedModelType { model_type: Option<String> },
    /// W and C say K3.1, T says K3.
    #[error(
        "config.json declares an indexer (kimi_k31, dsa_config), but the index has no such tensor: they were \
         stripped, or have other names; expected on the first full-attention layer: {}{}",
        .expected.join(", "), by_shape_note(.by_shape.as_ref())
    )]
    IndexerTensorsMissing { expected: Vec<String>, by_shape: Option<String> },
    /// W and T say K3.1, C says K3.
    #[error(
        "config.json says kimi_k31 and the index has {found} indexer tensors, but text_config.dsa_config is \
         absent: was the config rewritten by a tool? Use the config.json of the release"
    )]
    DsaConfigMissing { found: usize },
    /// W alone says K3.1.
    #[error(
        "config.json says kimi_k31, but has no text_config.dsa_config, and the index has no indexer tensors: this \
         looks like Kimi K3 with an edited model_type"
    )]
    VariantMarkerOnly,
    /// C and T say K3.1, W says K3.
    #[error(
        "text_config.dsa_config and {found} indexer tensors are there, but model_type of config.json is kimi_k3: \
         running this as Kimi K3 would drop the indexer silently; use the config.json of the release"
    )]
    WrapperSaysK3 { found: usize },
    /// C alone says K3.1.
    #[error(
        "text_config.dsa_config is there, but model_type is kimi_k3 and the index has no indexer tensors: nothing \
         else says Kimi K3.1 Pro; use the config.json of the release"
    )]
    DsaConfigOnK3,
    /// T alone says K3.1.
    #[error(
        "the index has {found} indexer tensors, but config.json says Kimi K3 (model_type kimi_k3, no dsa_config): \
         use the config.json that belongs to these weights"
    )]
    IndexerTensorsOnK3 { found: usize },
    /// T is neither none nor all.
    #[error("the indexer is there in part: {}{}", partial(*.found, .missing, .outside), by_shape_note(.by_shape.as_ref()))]
    IndexerTensorsPartial {
        found: usize,
        missing: Vec<String>,
        outside: Vec<String>,
        by_shape: Option<String>,
    },
}

fn by_shape_note(note: Option<&String>) -> String {
    note.map_or_else(String::new, |note| format!("; looked for by shape as well: {note}"))
}

fn partial(found: usize, missing: &[String], outside: &[String]) -> String {
    let list = |names: &[String]| {
        let more = if names.len() > 10 { ", ..." } else { "" };
        format!("{}{more}", names[..names.len().min(10)].join(", "))
    };
    let mut text = format!("{found} tensors found");
    if !missing.is_empty() {
        _ = write!(text, ", {} missing ({})", missing.len(), list(missing));
    }
    if !outside.is_empty() {
        _ = write!(text, ", {} on layers without an indexer ({})", outside.len(), list(outside));
    }
    text
}

/// What the wrapper claims to be.
///
/// # Errors
/// [`GateError::NoTextConfig`], [`GateError::UnsupportedModelType`].
pub(crate) fn wrapper(markers: &Markers) -> Result<Variant, GateError> {
    if !markers.text_config {
        return Err(GateError::NoTextConfig { model_type: markers.model_type.clone() });
    }
    match markers.model_type.as_deref() {
        Some(WRAPPER_K3) => Ok(Variant::K3),
        Some(WRAPPER_K31) => Ok(Variant::K31),
        _ => Err(GateError::UnsupportedModelType { model_type: markers.model_type.clone() }),
    }
}

/// The variant that all three markers agree on.
///
/// # Errors
/// The error of the row of `docs/checkpoint.md` 9.1 otherwise.
pub(crate) fn decide(markers: &Markers, tensors: &IndexerTensors) -> Result<Variant, GateError> {
    let found = tensors.found;
    match (wrapper(markers)?, markers.dsa_config, tensors.presence()) {
        (_, _, Presence::Some) => Err(GateError::IndexerTensorsPartial {
            found,
            missing: tensors.missing.clone(),
            outside: tensors.outside.clone(),
            by_shape: tensors.by_shape.clone(),
        }),
        (Variant::K3, false, Presence::None) => Ok(Variant::K3),
        (Variant::K31, true, Presence::All) => Ok(Variant::K31),
        (Variant::K31, true, Presence::None) => Err(GateError::IndexerTensorsMissing {
            expected: tensors.expected.clone(),
            by_shape: tensors.by_shape.clone(),
        }),
        (Variant::K31, false, Presence::All) => Err(GateError::DsaConfigMissing { found }),
        (Variant::K31, false, Presence::None) => Err(GateError::VariantMarkerOnly),
        (Variant::K3, true, Presence::All) => Err(GateError::WrapperSaysK3 { found }),
        (Variant::K3, true, Presence::None) => Err(GateError::DsaConfigOnK3),
        (Variant::K3, false, Presence::All) => Err(GateError::IndexerTensorsOnK3 { found }),
    }
}
