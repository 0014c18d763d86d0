//! The internal notes: exact text (`docs/xtml.md` 7).

use crate::json::Value;
use crate::request::{Effort, ResponseFormat, ToolChoice};

fn list(tools: &[Value]) -> String {
    let items: Vec<String> = tools.iter().map(Value::to_sorted).collect();
    format!("[{}]", items.join(","))
}

pub(super) fn static_tools(tools: &[Value]) -> String {
    let j = list(tools);
    format!("# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{j}\n```")
}

pub(super) fn dynamic_tools(tools: &[Value]) -> String {
    let j = list(tools);
    format!(
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all \
         existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{j}\n```"
    )
}

/// `medium` is named here and refused as a value; the model was trained on this text.
pub(super) fn effort(effort: Effort) -> String {
    format!(
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
         supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with \
         `thinking_effort={}`.",
        effort.name()
    )
}

pub(super) fn tool_choice(choice: ToolChoice) -> Option<String> {
    let note = match choice {
        ToolChoice::Auto => return None,
        ToolChoice::Required => {
            "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
        }
        ToolChoice::None => {
            "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
        }
    };
    Some(note.to_owned())
}

const RAW_JSON: &str = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";

pub(super) fn response_format(format: &ResponseFormat) -> Option<String> {
    match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => {
            Some(format!("The system is invoked with `response_format=json_object`.\n{RAW_JSON}"))
        }
        ResponseFormat::JsonSchema(schema) => {
            let j = schema.to_sorted();
            Some(format!(
                "The system is invoked with `response_format=json_schema`.\n{RAW_JSON}\nThe JSON data must match the \
                 following schema:\n```json\n{j}\n```"
            ))
        }
    }
}
