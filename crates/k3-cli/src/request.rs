//! The fields of a chat request that are about generation: honoured, or refused by name.

use anyhow::{Context, Result, bail};
use k3_runner::{Generate, Sampling};
use serde_json::{Map, Value};

/// Fields that do not change what is generated here.
const NO_EFFECT: [&str; 12] = [
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
    "model",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
];

/// Options of `chat_template_kwargs` that the encoder reads.
const KWARGS: [&str; 5] =
    ["thinking", "enable_thinking", "thinking_effort", "add_generation_prompt", "response_schema"];

/// Lets the fields of an OpenAI request decide over what flags and checkpoint gave. A field that cannot be honoured is
/// an error that names it; the encoder's own fields were read by the encoder.
pub(crate) fn apply(body: &str, generate: &mut Generate) -> Result<()> {
    // The encoder has its own, lossless reader, and refused what is no object.
    let Ok(Value::Object(fields)) = serde_json::from_str(body) else { return Ok(()) };
    let Sampling { temperature, top_k, top_p, min_p, seed } = &mut generate.sampling;
    for (name, value) in &fields {
        if value.is_null() {
            continue;
        }
        let wanted = |what: &str| format!("`{name}` of the request must be {what}, found {value}");
        let number = || value.as_f64().map(|v| v as f32).with_context(|| wanted("a number"));
        let count = || value.as_u64().with_context(|| wanted("a whole number"));
        match name.as_str() {
            "max_tokens" | "max_completion_tokens" => generate.max_tokens = count()? as usize,
            "temperature" => *temperature = number()?,
            "top_p" => *top_p = number()?,
            "min_p" => *min_p = number()?,
            "top_k" => *top_k = count()? as usize,
            "seed" => *seed = count()?,
            "ignore_eos" => generate.ignore_eos = value.as_bool().with_context(|| wanted("true or false"))?,
            "tool_choice" => tool_choice(value)?,
            "chat_template_kwargs" => kwargs(value)?,
            "parallel_tool_calls" if *value == Value::Bool(true) => {}
            "n" if *value == 1 => {}
            "presence_penalty" | "frequency_penalty" if value.as_f64() == Some(0.0) => {}
            "repetition_penalty" if value.as_f64() == Some(1.0) => {}
            "logprobs" if *value == Value::Bool(false) => {}
            "stop" | "logit_bias" if is_empty(value) => {}
            known if NO_EFFECT.contains(&known) => {}
            _ => bail!(
                "`{name}` of the request is not supported; remove it, or its value {}",
                shortened(value)
            ),
        }
    }
    Ok(())
}

fn tool_choice(value: &Value) -> Result<()> {
    match value {
        Value::String(word) if ["auto", "none", "required"].contains(&word.as_str()) => Ok(()),
        Value::Object(_) => Ok(()),
        other => bail!(
            "`tool_choice` of the request must be auto, none, required or a function, found {}",
            shortened(other)
        ),
    }
}

fn kwargs(value: &Value) -> Result<()> {
    let empty = Map::new();
    let unknown = value.as_object().unwrap_or(&empty).keys().find(|key| !KWARGS.contains(&key.as_str()));
    match unknown {
        Some(key) => {
            bail!("`chat_template_kwargs.{key}` of the request is not known; known are {}", KWARGS.join(", "))
        }
        None => Ok(()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// A value for a message: requests can be megabytes.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_decides() {
        let mut generate = Generate::default();
        let body = r#"{"messages": [], "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125,
            "seed": 9, "n": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0, "model": "k3", "stream": true,
            "tool_choice": "auto", "top_logprobs": null, "chat_template_kwargs": {"thinking": true}}"#;
        apply(body, &mut generate).unwrap();
        let expected = Sampling { temperature: 0.5, top_k: 3, top_p: 0.25, min_p: 0.125, seed: 9 };
        assert_eq!((generate.max_tokens, generate.sampling), (7, expected));
    }

    #[test]
    fn what_cannot_be_honoured_is_named() {
        let refused = |field: &str, value: &str| {
            let error = apply(&format!("{{\"{field}\": {value}}}"), &mut Generate::default()).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        };
        refused("n", "3");
        refused("stop", "[\"e\"]");
        refused("presence_penalty", "0.5");
        refused("logit_bias", "{\"1\": 100}");
        refused("logprobs", "true");
        refused("tool_choice", "\"banana\"");
        refused("tool_choice", "5");
        refused("thinking", "false");
        refused("max_tokens", "-1");
        refused("temperature", "\"hot\"");
        refused("chat_template_kwargs", "{\"thinkin\": false}");
    }
}
