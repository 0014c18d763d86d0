//! The state machine over typed pieces (`docs/xtml.md` 11.2).

use super::call::{Body, Call};
use super::header::{Header, Tag};
use super::{Event, FinishReason, ReplyCall, ReplyError, StopReason};
use crate::control::{Channel, Control, Piece};

/// Reads a reply piece by piece.
///
/// Structure comes from control tokens alone, and how text is cut into pieces does not matter. Reasoning and content
/// are passed on at once; what the parser keeps is the tag or the call being written, white space outside all
/// channels, and the reasoning of a think channel that only the prompt opened, since a later tag can turn that into
/// the answer (rule 6).
#[derive(Debug)]
pub struct ReplyParser {
    start: Channel,
    channel: Option<Channel>,
    in_tools: bool,
    call: Option<Call>,
    body: Option<Body>,
    header: Option<Header>,
    /// Nothing but `message` openers so far.
    at_start: bool,
    /// The think channel was opened by the prompt alone: its text so far.
    prompted_think: Option<String>,
    response_seen: bool,
    run: Run,
    calls: usize,
    phase: Phase,
}

/// Text out of place since the last tag. It is judged as a whole, so that its cuts do not matter.
#[derive(Debug, Default)]
struct Run {
    /// White space outside all channels: part of the content if other text follows.
    blank: String,
    /// The run has been reported.
    reported: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Reading,
    /// The turn is over.
    Ended,
    /// And its end has been told.
    Finished,
}

impl ReplyParser {
    /// A parser for a reply that continues in `start`: [`crate::Prompt::open_channel`].
    pub fn new(start: Channel) -> ReplyParser {
        ReplyParser {
            start,
            channel: Some(start),
            in_tools: false,
            call: None,
            body: None,
            header: None,
            at_start: true,
            prompted_think: (start == Channel::Think).then(String::new),
            response_seen: start == Channel::Response,
            run: Run::default(),
            calls: 0,
            phase: Phase::Reading,
        }
    }

    /// The channel that is open now, as far as tags have been read.
    pub fn current_channel(&self) -> Option<Channel> {
        self.channel
    }

    /// Takes the next piece and returns what it makes certain.
    pub fn push(&mut self, piece: Piece<'_>) -> Vec<Event> {
        let mut out = Vec::new();
        if !self.is_ended() {
            match piece {
                Piece::Text(text) => self.text(text, &mut out),
                Piece::Control(control) => self.control(control, &mut out),
            }
        }
        out
    }

    /// Whether the turn has ended; pieces are ignored from then on.
    pub fn is_ended(&self) -> bool {
        self.phase != Phase::Reading
    }

    /// Ends the reply. A second call does nothing.
    pub fn finish(&mut self, stop: StopReason) -> Vec<Event> {
        let mut out = Vec::new();
        if self.phase == Phase::Finished {
            return out;
        }
        let cut = stop == StopReason::Length && !self.is_ended();
        self.end(stop == StopReason::Eos, &mut out);
        self.phase = Phase::Finished;
        out.push(Event::Finish(match self.calls {
            _ if cut => FinishReason::Length,
            0 => FinishReason::Stop,
            _ => FinishReason::ToolCalls,
        }));
        out
    }

    fn text(&mut self, text: &str, out: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        if let Some(header) = &mut self.header {
            header.text.push_str(text);
        } else {
            self.at_start = false;
            self.body_text(text, out);
        }
    }

    /// Text to the innermost open thing (rule 3).
    fn body_text(&mut self, text: &str, out: &mut Vec<Event>) {
        if let Some(body) = &mut self.body {
            body.text.push_str(text);
            return;
        }
        if self.call.is_some() || self.in_tools {
            self.stray_text(text, out);
            return;
        }
        match self.channel {
            Some(Channel::Think) => {
                if let Some(kept) = &mut self.prompted_think {
                    kept.push_str(text);
                }
                out.push(Event::ReasoningDelta(text.to_owned()));
            }
            Some(Channel::Response) => out.push(Event::ContentDelta(text.to_owned())),
            None if self.response_seen => self.stray_text(text, out),
            None if self.run.reported => out.push(Event::ContentDelta(text.to_owned())),
            None => {
                self.run.blank.push_str(text);
                if !is_blank(text) {
                    self.run.reported = true;
                    out.push(Event::Error(ReplyError::TextOutsideChannel));
                    out.push(Event::ContentDelta(std::mem::take(&mut self.run.blank)));
                }
            }
        }
    }

    fn stray_text(&mut self, text: &str, out: &mut Vec<Event>) {
        if !self.run.reported && !is_blank(text) {
            self.run.reported = true;
            out.push(Event::Error(ReplyError::StrayText));
        }
    }

    fn control(&mut self, control: Control, out: &mut Vec<Event>) {
        match control {
            Control::Open | Control::Close => {
                self.cut_tag(out);
                self.end_run();
                self.header = Some(Header::new(control == Control::Close));
            }
            Control::Sep => match self.header.take() {
                Some(header) => {
                    self.end_run();
                    self.tag(&header, out);
                }
                None => out.push(Event::Error(ReplyError::StraySep)),
            },
            Control::EndOfMsg | Control::Eos => self.end(true, out),
            Control::Other => self.cut_tag(out),
        }
    }

    /// A stretch of text between tags is over.
    fn end_run(&mut self) {
        self.run = Run::default();
    }

    /// A tag that is followed by something else than its separator (rule 11). A closing tag of think closes all the
    /// same: models leave its separator out, and what comes next must not undo the end of the reasoning.
    fn cut_tag(&mut self, out: &mut Vec<Event>) {
        let Some(header) = self.header.take() else { return };
        out.push(Event::Error(ReplyError::TruncatedTag));
        self.at_start = false;
        let rest =
            header.after_think().filter(|_| self.channel == Some(Channel::Think) && self.call.is_none());
        if let Some(rest) = rest {
            self.end_channel(Some(ReplyError::ImplicitClose), out);
            self.end_run();
            self.body_text(rest, out);
        }
    }

    fn tag(&mut self, header: &Header, out: &mut Vec<Event>) {
        let tag = header.parse();
        if header.closing {
            self.at_start = false;
            self.closing_tag(&tag.name, out);
        } else if tag.name != "message" {
            let at_start = std::mem::replace(&mut self.at_start, false);
            self.opening_tag(tag, at_start, out);
        }
    }

    fn opening_tag(&mut self, tag: Tag, at_start: bool, out: &mut Vec<Event>) {
        let known = match tag.name.as_str() {
            name @ ("think" | "response") => {
                let channel = if name == "think" { Channel::Think } else { Channel::Response };
                self.open_channel(channel, at_start, out)
            }
            "tools" => {
                self.drop_call(out);
                self.end_channel(Some(ReplyError::ImplicitClose), out);
                self.in_tools = true;
                true
            }
            "call" => {
                self.drop_call(out);
                self.call = Some(Call::new(tag, !self.in_tools));
                true
            }
            "argument" if self.call.is_some() => {
                self.drop_body(out);
                self.body = Some(Body::argument(tag));
                true
            }
            "json" if self.call.is_some() => {
                self.drop_body(out);
                self.body = Some(Body::json());
                true
            }
            _ => false,
        };
        if !known {
            out.push(Event::Error(ReplyError::UnknownTag));
        }
    }

    /// Rules 4 and 5. False where the opener has no meaning.
    fn open_channel(&mut self, channel: Channel, at_start: bool, out: &mut Vec<Event>) -> bool {
        if at_start && channel == self.start {
            // The model wrote the opener itself, so this is no longer the prompt's think alone.
            self.prompted_think = None;
            return true;
        }
        if channel == Channel::Think && self.channel == Some(Channel::Think) && self.call.is_none() {
            return false;
        }
        self.drop_call(out);
        self.in_tools = false;
        self.end_channel(Some(ReplyError::ImplicitClose), out);
        self.channel = Some(channel);
        self.response_seen |= channel == Channel::Response;
        true
    }

    fn closing_tag(&mut self, name: &str, out: &mut Vec<Event>) {
        let skipped = self.channel == Some(Channel::Think) && self.prompted_think.is_some();
        match name {
            "think" if self.channel == Some(Channel::Think) => {
                self.drop_call(out);
                self.end_channel(None, out);
            }
            "response" if self.channel == Some(Channel::Response) => {
                self.drop_call(out);
                self.end_channel(None, out);
            }
            "response" if skipped => {
                self.drop_call(out);
                self.skip_think(out);
            }
            "message" => {
                self.drop_call(out);
                self.in_tools = false;
                if skipped {
                    self.skip_think(out);
                } else {
                    self.end_channel(Some(ReplyError::ImplicitClose), out);
                }
            }
            "tools" if self.in_tools => {
                self.drop_call(out);
                self.in_tools = false;
            }
            "call" if self.call.is_some() => self.finish_call(out),
            "argument" | "json" if self.body.as_ref().is_some_and(|body| body.name() == name) => {
                self.finish_body(out);
            }
            _ => out.push(Event::Error(ReplyError::StrayClose)),
        }
    }

    /// Rule 6: what was written as reasoning was the answer.
    fn skip_think(&mut self, out: &mut Vec<Event>) {
        let answer = self.prompted_think.take().unwrap_or_default();
        self.channel = None;
        self.response_seen = true;
        out.push(Event::Error(ReplyError::SkippedThink));
        if !answer.is_empty() {
            out.push(Event::ContentDelta(answer));
        }
    }

    fn end_channel(&mut self, error: Option<ReplyError>, out: &mut Vec<Event>) {
        if self.channel.take().is_some() {
            self.prompted_think = None;
            out.extend(error.map(Event::Error));
        }
    }

    fn finish_body(&mut self, out: &mut Vec<Event>) {
        if let (Some(body), Some(call)) = (self.body.take(), self.call.as_mut())
            && let Err(error) = call.take(body)
        {
            out.push(Event::Error(error));
        }
    }

    fn finish_call(&mut self, out: &mut Vec<Event>) {
        self.drop_body(out);
        let Some(call) = self.call.take() else { return };
        let (call, errors) = call.finish();
        out.extend(errors.into_iter().map(Event::Error));
        if let Some((name, arguments)) = call {
            out.push(Event::ToolCall(ReplyCall { index: self.calls, name, arguments }));
            self.calls += 1;
        }
    }

    fn drop_body(&mut self, out: &mut Vec<Event>) {
        if self.body.take().is_some() {
            out.push(Event::Error(ReplyError::UnclosedArgument));
        }
    }

    fn drop_call(&mut self, out: &mut Vec<Event>) {
        self.drop_body(out);
        if self.call.take().is_some() {
            out.push(Event::Error(ReplyError::UnclosedCall));
        }
    }

    /// The end of the turn, by an end token or because generation stopped.
    fn end(&mut self, by_token: bool, out: &mut Vec<Event>) {
        if self.is_ended() {
            return;
        }
        self.phase = Phase::Ended;
        if let Some(header) = self.header.take() {
            out.push(Event::Error(ReplyError::TruncatedTag));
            let rest = header.after_think().filter(|rest| !is_blank(rest));
            if let Some(rest) = rest.filter(|_| self.channel == Some(Channel::Think) && self.call.is_none()) {
                self.end_channel(Some(ReplyError::ImplicitClose), out);
                self.end_run();
                self.body_text(rest, out);
            }
        }
        self.drop_call(out);
        self.end_channel(by_token.then_some(ReplyError::UnclosedChannel), out);
    }
}

fn is_blank(text: &str) -> bool {
    text.chars().all(char::is_whitespace)
}
