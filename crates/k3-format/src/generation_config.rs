//! `generation_config.json`: where a message ends, and sampling defaults if there are any.

use std::path::Path;

use serde_json::Value;

use crate::config::{ConfigError, Fields, without_repeats};
use crate::error::Error;

/// What `generation_config.json` says. An absent file says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// `eos_token_id`, a number or a list; in order, without repeats. They add to those of `config.json`.
    pub eos: Vec<u32>,
    /// `temperature`, if given.
    pub temperature: Option<f64>,
    /// `top_p`, if given.
    pub top_p: Option<f64>,
    /// `top_k`, if given; 0 is no limit.
    pub top_k: Option<u32>,
}

impl GenerationConfig {
    /// Checks a parsed file. Absent and null fields are fine, other types are not; other keys are left alone.
    ///
    /// # Errors
    /// [`Error::Config`] with every bad field.
    pub fn check(json: &Value, vocab_size: usize, file: &Path) -> Result<Self, Error> {
        let refused = |problems| {
            let unknown_keys = Vec::new();
            Err(Error::Config(ConfigError { file: file.to_owned(), problems, unknown_keys }))
        };
        let empty = serde_json::Map::new();
        let mut fields = Fields::new("", json.as_object().unwrap_or(&empty));
        if !json.is_object() {
            fields.problem("(the file)", "an object", Some(json), "it names the tokens that end a message");
            return refused(fields.into_problems());
        }
        let eos = without_repeats(fields.token_ids("eos_token_id", Some(vocab_size)));
        let sampling = "a sampling default";
        let mut float = |key, expected: &str, accepts: fn(f64) -> bool| {
            fields.get_optional(key)?;
            fields.float(key, expected, accepts, sampling)
        };
        let temperature = float("temperature", "a number from 0", |x| x >= 0.0);
        let top_p = float("top_p", "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0);
        let top_k = fields
            .get_optional("top_k")
            .and_then(|value| fields.int_value("top_k", Some(value), 0..=u32::MAX as usize, sampling));
        let problems = fields.into_problems();
        if !problems.is_empty() {
            return refused(problems);
        }
        Ok(Self { eos, temperature, top_p, top_k: top_k.map(|k| k as u32) })
    }
}
