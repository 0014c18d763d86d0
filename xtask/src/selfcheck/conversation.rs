//! A tool round trip: question, call, result, answer, in the model's own words (`docs/vectors.md` 7).

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result, bail};
use k3_graph::Device;
use k3_runner::{Chatter, Conversation, Generate, Sampling};
use k3_xtml::json::Value;
use k3_xtml::{ChatRequest, FinishReason, Message, Reply};

use crate::expect::{Check, Found};

/// Name of the file in a checkpoint's folder.
pub(crate) const FILE: &str = "conversation.json";
/// Tokens of a reply at most.
const MAX_TOKENS: usize = 256;
/// Width of the words before each line of a printed conversation.
const LABEL: usize = 9;

/// A conversation that a checkpoint should be able to have.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// The question, and the tools it needs.
    pub request: ChatRequest,
    /// Name of the tool that has to be called.
    pub tool: String,
    /// What it has to be called with.
    pub arguments: serde_json::Value,
    /// What it returns.
    pub result: String,
    /// What the answer has to contain.
    pub answer: Vec<String>,
}

impl Scene {
    /// The scene in a checkpoint's folder, if there is one.
    ///
    /// # Errors
    /// A file that cannot be read, or is none.
    pub fn beside(dir: &Path) -> Result<Option<Self>> {
        let file = dir.join(FILE);
        if !file.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        Self::parse(&text).with_context(|| format!("reading {}", file.display())).map(Some)
    }

    /// A scene from the text of such a file.
    ///
    /// # Errors
    /// Something else.
    pub fn parse(text: &str) -> Result<Self> {
        let json = Value::parse(text)?;
        let field = |of: &Value, key: &str| match of.get(key) {
            Some(value) => Ok(value.clone()),
            None => bail!("expected the key `{key}`, found none"),
        };
        let text = |of: &Value, key: &str| match field(of, key)? {
            Value::String(text) => Ok(text),
            other => bail!("`{key}`: expected a string, found {}", other.to_spaced()),
        };
        let call = field(&json, "call")?;
        let answer = match field(&json, "answer")? {
            Value::Array(parts) if !parts.is_empty() => {
                let parts: Option<Vec<String>> =
                    parts.iter().map(|p| p.as_str().map(str::to_owned)).collect();
                parts.context("`answer`: expected a list of strings")?
            }
            other => bail!("`answer`: expected a list of strings, found {}", other.to_spaced()),
        };
        Ok(Self {
            request: ChatRequest::from_json(&field(&json, "request")?.to_spaced()).context("`request`")?,
            tool: text(&call, "name")?,
            arguments: serde_json::from_str(&field(&call, "arguments")?.to_spaced())
                .context("`arguments`")?,
            result: text(&json, "result")?,
            answer,
        })
    }

    /// Whether a reply calls the tool, and it alone, as it should.
    pub fn call(&self, reply: &Reply) -> Check {
        let calls: Vec<String> =
            reply.tool_calls.iter().map(|c| format!("{} {}", c.name, c.arguments)).collect();
        let good = match reply.tool_calls.as_slice() {
            [call] => {
                call.name == self.tool
                    && serde_json::from_str::<serde_json::Value>(&call.arguments)
                        .is_ok_and(|found| found == self.arguments)
            }
            _ => false,
        };
        let found = if calls.is_empty() { "no call".to_owned() } else { calls.join(", ") };
        let note = format!("expected {} {}, found {found}", self.tool, self.arguments);
        Check::of("tool call", good, Found::Nothing, note)
    }

    /// Whether a reply ends as it should and says what the tool returned.
    pub fn answered(&self, reply: &Reply) -> Check {
        let missing: Vec<&str> =
            self.answer.iter().map(String::as_str).filter(|part| !reply.content.contains(part)).collect();
        let ended = reply.finish_reason.map_or("cancelled", FinishReason::as_str);
        let good = missing.is_empty() && reply.finish_reason == Some(FinishReason::Stop);
        let note = format!("expected {:?}, missing {missing:?}, finish_reason {ended}", self.answer);
        Check::of("tool answer", good, Found::Nothing, note)
    }
}

/// Has the conversation, greedily, and writes it down as it goes.
///
/// # Errors
/// What kept the model from replying. A wrong reply is a failed check.
pub fn round_trip<D: Device>(
    chatter: &Chatter<'_, D>,
    scene: &Scene,
    out: &mut dyn Write,
) -> Result<Vec<Check>> {
    let generate = Generate { max_tokens: MAX_TOKENS, sampling: Sampling::greedy(), ..Generate::default() };
    let mut conversation = Conversation::new(chatter, scene.request.clone());
    writeln!(out, "  conversation:")?;
    for message in &scene.request.messages {
        match message {
            Message::System { content, .. } => line(out, "system", &content.parts().concat())?,
            Message::User { content, .. } => line(out, "user", &content.parts().concat())?,
            _ => {}
        }
    }
    let reply = |conversation: &mut Conversation<'_, D>, out: &mut dyn Write| -> Result<_> {
        let turn =
            conversation.reply(&generate, &mut |_| ControlFlow::Continue(())).map_err(
                |error| match error {
                    // Weights that give no numbers are a result, and known by this type.
                    k3_runner::ChatError::Run(error) => anyhow::Error::from(error),
                    other => other.into(),
                },
            )?;
        let said = &turn.reply.reply;
        line(out, "think", &said.reasoning_content)?;
        line(out, "response", &said.content)?;
        for call in &said.tool_calls {
            line(out, "call", &format!("{} {}", call.name, call.arguments))?;
        }
        Ok(turn)
    };
    let turn = reply(&mut conversation, out)?;
    let mut checks = vec![scene.call(&turn.reply.reply)];
    let [id, ..] = turn.call_ids.as_slice() else {
        checks.push(Check::skipped("tool answer", "no tool was called"));
        return Ok(checks);
    };
    line(out, "result", &scene.result)?;
    conversation.push(Message::tool_result(id.as_str(), scene.result.as_str()));
    let turn = reply(&mut conversation, out)?;
    let read = turn.reply.usage.prompt_tokens;
    writeln!(
        out,
        "    {:LABEL$} {} of {read} prompt tokens were read in the first turn",
        "", turn.kept_tokens
    )?;
    checks.push(scene.answered(&turn.reply.reply));
    Ok(checks)
}

/// What somebody says; nothing if it is nothing.
fn line(out: &mut dyn Write, who: &str, text: &str) -> Result<()> {
    if !text.is_empty() {
        // Text of a model may hold anything; a terminal shall not obey it.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        writeln!(out, "    {who:LABEL$} {text}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use k3_xtml::ReplyCall;

    use super::*;
    use crate::expect::Outcome;

    const SCENE: &str = r#"{
        "request": {"messages": [{"role": "user", "content": "Weather in Paris?"}],
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}], "reasoning_effort": "high"},
        "call": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
        "result": "rain, 17", "answer": ["rain", "17"]}"#;

    fn scene() -> Scene {
        Scene::parse(SCENE).unwrap()
    }

    #[track_caller]
    fn check_call(calls: &[(&str, &str)], good: bool) {
        let calls = calls.iter().enumerate().map(|(index, (name, arguments))| ReplyCall {
            index,
            name: (*name).to_owned(),
            arguments: (*arguments).to_owned(),
        });
        let check = scene().call(&Reply { tool_calls: calls.collect(), ..Reply::default() });
        assert_eq!(check.outcome == Outcome::Passed, good, "{check:?}");
        assert!(good || check.note.contains("expected get_weather"), "{check:?}");
    }

    #[test]
    fn calls() {
        check_call(&[("get_weather", r#"{"days": 2, "city":"Paris"}"#)], true);
        check_call(&[], false);
        check_call(&[("get_weather", r#"{"city":"Pairs","days":2}"#)], false);
        check_call(&[("get_weather", r#"{"city":"Paris"}"#)], false);
        check_call(&[("get_weather", "")], false);
        check_call(&[("get_time", r#"{"city":"Paris","days":2}"#)], false);
        let right = ("get_weather", r#"{"city":"Paris","days":2}"#);
        check_call(&[right, right], false);
    }

    #[track_caller]
    fn check_answer(content: &str, finish_reason: Option<FinishReason>, good: bool) {
        let reply = Reply { content: content.to_owned(), finish_reason, ..Reply::default() };
        let check = scene().answered(&reply);
        assert_eq!(check.outcome == Outcome::Passed, good, "{check:?}");
    }

    #[test]
    fn answers() {
        check_answer("It is rain in Paris, 17 degrees.", Some(FinishReason::Stop), true);
        check_answer("It is rain in Paris, 71 degrees.", Some(FinishReason::Stop), false);
        check_answer("It is rain in Paris, 17 degrees.", Some(FinishReason::Length), false);
        check_answer("It is rain in Paris, 17 degrees.", None, false);
        check_answer("", Some(FinishReason::Stop), false);
    }

    #[track_caller]
    fn refused(change: (&str, &str), why: &str) {
        assert!(SCENE.contains(change.0));
        let error = Scene::parse(&SCENE.replace(change.0, change.1)).unwrap_err();
        assert!(format!("{error:#}").contains(why), "{error:#}");
    }

    #[test]
    fn bad_files() {
        refused(("\"call\"", "\"calls\""), "key `call`");
        refused(("\"rain, 17\"", "17"), "`result`: expected a string");
        refused(("[\"rain\", \"17\"]", "[]"), "`answer`: expected a list");
        refused(("[\"rain\", \"17\"]", "[17]"), "`answer`: expected a list");
        refused(("\"messages\"", "\"massages\""), "messages");
    }
}
