//! Tool results: their order, names and numbers (`docs/xtml.md` 8).

use std::collections::HashMap;

use crate::error::EncodeError;
use crate::request::{Content, Message, ToolCall, ToolResult};

/// What is known about the calls that results can answer.
#[derive(Default)]
pub(super) struct Results<'a> {
    /// Calls of the most recent assistant message.
    calls: &'a [ToolCall],
    /// By id: position and name; the first of equal ids.
    by_id: HashMap<&'a str, (usize, &'a str)>,
    /// Results rendered since that message.
    rendered: usize,
}

/// A result ready to be written.
pub(super) struct Rendered<'a> {
    pub(super) tool: &'a str,
    pub(super) index: usize,
    pub(super) content: &'a Content,
}

impl<'a> Results<'a> {
    /// An assistant message: its calls, if any, replace those before.
    pub(super) fn follow(&mut self, calls: &'a [ToolCall]) {
        *self = Results { calls, ..Results::default() };
        for (position, call) in calls.iter().enumerate() {
            if let Some(id) = &call.id {
                self.by_id.entry(id).or_insert((position, &call.name));
            }
        }
    }

    /// The maximal run of results that starts at `start`: in the order of the calls if every one of them is found by
    /// id, else as it is.
    pub(super) fn take_run(
        &mut self,
        messages: &'a [Message],
        start: usize,
    ) -> Result<Vec<Rendered<'a>>, EncodeError> {
        let run = messages[start..].iter().enumerate().map_while(|(offset, message)| match message {
            Message::Tool(result) => Some((start + offset, result)),
            _ => None,
        });
        let mut run: Vec<(usize, &ToolResult)> = run.collect();
        let find = |result: &ToolResult| self.by_id.get(result.call_id.as_deref()?).copied();
        let found: Option<Vec<(usize, &'a str)>> = run.iter().map(|(_, result)| find(result)).collect();
        let mut names: Vec<Option<&'a str>> = run.iter().map(|(_, result)| result.tool.as_deref()).collect();
        if let Some(found) = found {
            let mut order: Vec<usize> = (0..run.len()).collect();
            order.sort_by_key(|&i| found[i].0);
            run = order.iter().map(|&i| run[i]).collect();
            names = order.iter().map(|&i| Some(found[i].1)).collect();
        }
        let mut rendered = Vec::with_capacity(run.len());
        for ((message, result), name) in run.into_iter().zip(names) {
            let at_position = self.calls.get(self.rendered).map(|call| call.name.as_str());
            let Some(tool) = name.or(at_position) else {
                return Err(EncodeError::UnresolvableToolName { message });
            };
            self.rendered += 1;
            rendered.push(Rendered { tool, index: self.rendered, content: &result.content });
        }
        Ok(rendered)
    }
}
