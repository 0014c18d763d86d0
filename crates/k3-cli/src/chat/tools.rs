//! Declarations of tools: an OpenAI list, every entry with a name of its own.

use std::path::Path;

use anyhow::{Context, Result, bail};
use k3_xtml::json::Value;

use crate::text::all_of_file;

/// The tools that the demonstration model was trained on, exactly as declared there.
const DEMONSTRATION: &str = include_str!("demonstration.json");

/// The declarations in a file.
pub(super) fn declared(file: &Path) -> Result<Vec<Value>> {
    let text = all_of_file(file, "the tools")?;
    declarations(&text).with_context(|| format!("reading the tools {}", file.display()))
}

/// Those of the demonstration model.
pub(super) fn of_the_demonstration() -> Result<Vec<Value>> {
    declarations(DEMONSTRATION)
}

/// The declarations in a JSON text.
fn declarations(text: &str) -> Result<Vec<Value>> {
    let value = Value::parse(text)?;
    let tools = if let Value::Object(_) = value { value.get("tools") } else { Some(&value) };
    match tools {
        Some(Value::Array(tools)) if tools.iter().all(|t| matches!(t, Value::Object(_))) => {
            check_names(tools)?;
            Ok(tools.clone())
        }
        _ => bail!(
            "expected a list of objects, as `tools` of an OpenAI chat request, or an object with that list"
        ),
    }
}

/// A call names its tool, and so does the prompt before a result: names must be there, and differ.
fn check_names(tools: &[Value]) -> Result<()> {
    let mut names: Vec<&str> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let key = if tool.get("function").is_some() { "function.name" } else { "name" };
        let name = match named(tool) {
            Some(Value::String(name)) if name.trim().is_empty() => {
                bail!("tools[{index}].{key} is empty ({name:?}): give the tool a name")
            }
            Some(Value::String(name)) => name,
            Some(other) => bail!("tools[{index}].{key}: expected a string, found {}", other.to_spaced()),
            None => bail!(
                "tools[{index}] has no name: expected \
                 {{\"type\": \"function\", \"function\": {{\"name\": \"...\"}}}}, found no key `{key}`"
            ),
        };
        if let Some(first) = names.iter().position(|known| known == name) {
            bail!(
                "tools[{index}].{key} is `{name}`, as that of tools[{first}]: a call could mean either; rename or remove one"
            );
        }
        names.push(name);
    }
    Ok(())
}

fn named(tool: &Value) -> Option<&Value> {
    tool.get("function").unwrap_or(tool).get("name")
}

/// The name of a tool that was declared.
pub(super) fn name_of(tool: &Value) -> &str {
    named(tool).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_of_the_demonstration_model() {
        let tools = of_the_demonstration().unwrap();
        assert_eq!(tools.iter().map(name_of).collect::<Vec<_>>(), ["get_weather", "get_time"]);
    }

    #[track_caller]
    fn check(text: &str, names: &[&str]) {
        let tools = declarations(text).unwrap();
        assert_eq!(tools.iter().map(name_of).collect::<Vec<_>>(), names, "{text}");
    }

    #[track_caller]
    fn refused(text: &str, why: &str) {
        let error = declarations(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn every_tool_has_a_name_of_its_own() {
        check("[]", &[]);
        check(r#"[{"function": {"name": "a"}}, {"name": "b"}]"#, &["a", "b"]);
        check(r#"{"tools": [{"function": {"name": "a"}}]}"#, &["a"]);
        refused("[1]", "expected a list of objects");
        refused(r#"{"tools": 1}"#, "expected a list of objects");
        refused(r#"{"tool": []}"#, "expected a list of objects");
        refused(r#"[{"name": "a"}, {"type": "function"}]"#, "tools[1] has no name: expected");
        refused(r#"[{"function": {"description": "x"}}]"#, "tools[0] has no name");
        refused(r#"[{"function": 5, "name": "a"}]"#, "tools[0] has no name");
        refused(r#"[{"function": {"name": ""}}]"#, "tools[0].function.name is empty");
        refused(r#"[{"name": " \t"}]"#, "tools[0].name is empty");
        refused(r#"[{"name": ["a"]}]"#, "tools[0].name: expected a string, found [\"a\"]");
        let twice = r#"[{"name": "a"}, {"name": "b"}, {"function": {"name": "a"}}]"#;
        refused(twice, "tools[2].function.name is `a`, as that of tools[0]");
    }
}
