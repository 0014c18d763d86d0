//! What holds for any message and any reply, well formed or not.

mod support;

use k3_xtml::json::Value;
use k3_xtml::{
    Arguments, AssistantMessage, Channel, ChatRequest, Content, Control, EncodeOptions, Entry, Event,
    Message, Piece, Reply, ReplyError, ReplyParser, Revision, Segment, StopReason, TextReplyParser, ToolCall,
    encode,
};
use proptest::prelude::*;
use support::{events, read, read_text, single_chars};

/// Text full of what the format is made of.
fn hostile_text() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        4 => prop::sample::select(vec![
            "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|", "|>", "think", "response", "message",
            "argument key=\"a\"", "\"", "&", "&quot;", "&amp;quot;", "\\", "\\u00e9", "\n", "\u{0}", " ", "\u{a0}", "{", "}",
            "[1,", "null", "é", "😀", "\u{2028}",
        ]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(fragment, 0..6).prop_map(|fragments| fragments.concat())
}

fn json_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        prop::sample::select(vec![
            "0",
            "-0",
            "1e2",
            "1.50",
            "-12.0e-7",
            "123456789012345678901234567890",
            "1e400"
        ])
        .prop_map(|text| Value::parse(text).unwrap()),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |f| f.is_finite()).prop_map(Value::from),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        number.prop_filter("finite", |n| !n.to_spaced().contains('I')),
        hostile_text().prop_map(Value::String),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
            prop::collection::vec((hostile_text(), inner), 0..3).prop_map(Value::Object),
        ]
    })
}

/// Arguments with different keys, and what the parser must make of them.
fn arguments() -> impl Strategy<Value = (Arguments, String)> {
    let pairs = prop::collection::vec((hostile_text(), json_value()), 0..4).prop_map(|mut pairs| {
        let mut seen = std::collections::HashSet::new();
        pairs.retain(|(key, _)| seen.insert(key.clone()));
        pairs
    });
    (pairs, any::<bool>()).prop_map(|(pairs, as_text)| {
        let join = |print: fn(&Value) -> String, colon: &str, comma: &str| {
            let pair = |(key, value): &(String, Value)| {
                format!("{}{colon}{}", Value::from(key.as_str()), print(value))
            };
            format!("{{{}}}", pairs.iter().map(pair).collect::<Vec<_>>().join(comma))
        };
        // As text with values in another spelling than ours, which has to survive.
        let print = if as_text { Value::to_sorted } else { Value::to_spaced };
        let expected = join(print, ": ", ", ");
        let arguments = if as_text {
            Arguments::Text(join(print, " :", ",\n"))
        } else {
            Arguments::Object(pairs.clone())
        };
        (arguments, expected)
    })
}

fn message() -> impl Strategy<Value = (AssistantMessage, Vec<String>)> {
    let name = hostile_text().prop_filter("a name", |name| !name.is_empty());
    let calls = prop::collection::vec((name, arguments()), 0..3);
    (hostile_text(), hostile_text(), calls).prop_map(|(reasoning, content, calls)| {
        let expected = calls.iter().map(|(_, (_, expected))| expected.clone()).collect();
        let call = |(name, (arguments, _))| ToolCall { id: None, name, arguments };
        let message = AssistantMessage {
            content: Content::from(content),
            name: None,
            reasoning: Some(reasoning).filter(|r| !r.is_empty()),
            tool_calls: calls.into_iter().map(call).collect(),
        };
        (message, expected)
    })
}

fn render(message: Message) -> Vec<Segment> {
    let mut request = ChatRequest::new(vec![message]);
    request.add_generation_prompt = false;
    encode(&request, &EncodeOptions { entry: Entry::Bare, revision: Revision::Current }).unwrap().segments
}

fn piece(segment: &Segment) -> Piece<'_> {
    if segment.control {
        Piece::Control(Control::from_spelling(&segment.text).expect("a marker"))
    } else {
        Piece::Text(&segment.text)
    }
}

/// The part of a rendered assistant message that the model would have written.
fn reply_of(segments: &[Segment]) -> Vec<Piece<'_>> {
    let think = segments.iter().position(|s| !s.control && s.text == "think").expect("a think element");
    segments[think + 2..].iter().map(piece).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rendered_messages_read_back(case in message()) {
        let (message, arguments) = case;
        let segments = render(Message::Assistant(message.clone()));
        let pieces = reply_of(&segments);
        let reply = read(Channel::Think, StopReason::Eos, pieces.iter().copied());
        prop_assert_eq!(&reply.errors, &[]);
        prop_assert_eq!(&reply.reasoning_content, message.reasoning.as_deref().unwrap_or(""));
        prop_assert_eq!(&reply.content, &message.content.parts().concat());
        let names: Vec<&str> = message.tool_calls.iter().map(|c| c.name.as_str()).collect();
        prop_assert_eq!(reply.tool_calls.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), names);
        let found: Vec<&str> = reply.tool_calls.iter().map(|c| c.arguments.as_str()).collect();
        prop_assert_eq!(found, arguments);
        prop_assert_eq!(&read(Channel::Think, StopReason::Eos, single_chars(&pieces)), &reply);
        // And as history it is what the model wrote, to the segment.
        prop_assert_eq!(render(reply.into_message(|i| i.to_string())), segments);
    }

    /// Whatever stands in a json element goes back unchanged.
    #[test]
    fn broken_arguments_read_back(text in hostile_text()) {
        let call = ToolCall { id: None, name: "f".into(), arguments: Arguments::Text(text) };
        let message = AssistantMessage { tool_calls: vec![call], ..AssistantMessage::default() };
        let segments = render(Message::Assistant(message));
        let reply = read(Channel::Think, StopReason::Eos, reply_of(&segments));
        prop_assert_eq!(render(reply.into_message(|i| i.to_string())), segments);
    }
}

/// A stretch of a reply: a control token or text.
#[derive(Clone, Debug, PartialEq)]
enum Bit {
    Control(Control),
    Text(String),
}

impl Bit {
    fn piece(&self) -> Piece<'_> {
        match self {
            Bit::Control(control) => Piece::Control(*control),
            Bit::Text(text) => Piece::Text(text),
        }
    }
}

fn tag(opening: bool, header: &str) -> Vec<Bit> {
    let marker = if opening { Control::Open } else { Control::Close };
    vec![Bit::Control(marker), Bit::Text(header.to_owned()), Bit::Control(Control::Sep)]
}

fn element(name: &str, attributes: &str, body: Vec<Bit>) -> Vec<Bit> {
    [tag(true, &format!("{name}{attributes}")), body, tag(false, name)].concat()
}

/// Replies by the grammar, then broken in up to four places.
fn reply() -> impl Strategy<Value = Vec<Bit>> {
    let text = || prop::sample::select(vec!["", "a", "b c", "\n", " ", "1", "{\"a\":1}", "x<y", "think"]);
    let bits = |text: &str| vec![Bit::Text(text.to_owned())];
    let kind = prop::sample::select(vec!["", " type=\"string\"", " type=\"number\"", " type=\"object\""]);
    let argument = (prop::sample::select(vec![" key=\"a\"", " key=\"b\"", ""]), kind, text())
        .prop_map(move |(key, kind, text)| element("argument", &format!("{key}{kind}"), bits(text)));
    let child = prop_oneof![4 => argument, 1 => text().prop_map(move |text| element("json", "", bits(text)))];
    let name = prop::sample::select(vec![" tool=\"f\" index=\"1\"", " tool=\"g\"", ""]);
    let call = (name, prop::collection::vec(child, 0..3))
        .prop_map(|(name, children)| element("call", name, children.concat()));
    let part = prop_oneof![
        text().prop_map(move |text| element("think", "", bits(text))),
        text().prop_map(move |text| element("response", "", bits(text))),
        prop::collection::vec(call, 0..3).prop_map(|calls| element("tools", "", calls.concat())),
        text().prop_map(bits),
    ];
    let whole = (text(), prop::collection::vec(part, 0..4)).prop_map(move |(reasoning, parts)| {
        let end = [tag(false, "message"), vec![Bit::Control(Control::EndOfMsg)]].concat();
        [bits(reasoning), tag(false, "think"), parts.concat(), end].concat()
    });
    let names =
        vec!["think", "response", "tools", "call tool=\"h\"", "argument key=\"c\"", "json", "message", "foo"];
    let insertion = prop_oneof![
        prop::sample::select(Control::MARKERS.to_vec()).prop_map(|c| vec![Bit::Control(c)]),
        (any::<bool>(), prop::sample::select(names)).prop_map(|(opening, name)| tag(opening, name)),
        text().prop_map(bits),
    ];
    let mutation = (any::<prop::sample::Index>(), any::<bool>(), insertion);
    (whole, prop::collection::vec(mutation, 0..4)).prop_map(|(mut bits, mutations)| {
        for (index, remove, insertion) in mutations {
            if bits.is_empty() {
                break;
            }
            let at = index.index(bits.len());
            if remove {
                bits.remove(at);
            } else {
                bits.splice(at..at, insertion);
            }
        }
        bits
    })
}

fn any_bits() -> impl Strategy<Value = Vec<Bit>> {
    let all = [Control::Eos, Control::Other].into_iter().chain(Control::MARKERS).collect::<Vec<_>>();
    let bit = prop_oneof![
        prop::sample::select(all).prop_map(Bit::Control),
        hostile_text().prop_map(Bit::Text),
        prop::sample::select(vec![
            "think",
            "response",
            "tools",
            "call tool=\"f\"",
            "argument key=\"a\"",
            "json",
            "message"
        ])
        .prop_map(|text| Bit::Text(text.to_owned())),
    ];
    prop::collection::vec(bit, 0..40)
}

fn stop() -> impl Strategy<Value = StopReason> {
    prop::sample::select(vec![StopReason::Eos, StopReason::Length, StopReason::Stop])
}

fn start() -> impl Strategy<Value = Channel> {
    prop::sample::select(vec![Channel::Think, Channel::Response])
}

/// What must hold of the events of any reply.
fn check_events(events: &[Event]) -> Result<(), TestCaseError> {
    let last = events.iter().position(|event| matches!(event, Event::Finish(_)));
    prop_assert_eq!(last, Some(events.len() - 1), "one end, and at the end");
    let skipped = events.iter().position(|event| *event == Event::Error(ReplyError::SkippedThink));
    // Reasoning before and after the point where it became void.
    let (mut before, mut after) = (String::new(), String::new());
    let (mut content, mut calls, mut broken) = (String::new(), 0, 0);
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::ReasoningDelta(text) => {
                prop_assert!(!text.is_empty());
                if skipped.is_none_or(|skipped| at < skipped) { &mut before } else { &mut after }
                    .push_str(text);
            }
            Event::ContentDelta(text) => {
                prop_assert!(!text.is_empty());
                content.push_str(text);
            }
            Event::Error(error) => broken += usize::from(*error == ReplyError::BadJsonBlock),
            Event::Finish(_) => {}
            Event::ToolCall(call) => {
                prop_assert_eq!(call.index, calls);
                prop_assert!(!call.name.is_empty());
                let parsed =
                    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&call.arguments);
                prop_assert!(parsed.is_ok() || broken > 0, "{} is not JSON", call.arguments);
                calls += 1;
            }
        }
    }
    // Joined deltas are the whole reply, but for reasoning that was sent again as content.
    let whole: Reply = events.iter().cloned().collect();
    prop_assert_eq!(&whole.content, &content);
    prop_assert_eq!(whole.tool_calls.len(), calls);
    match skipped {
        None => prop_assert_eq!(&whole.reasoning_content, &before),
        Some(at) => {
            prop_assert_eq!(&whole.reasoning_content, &after);
            prop_assert!(before.is_empty() || events[at + 1] == Event::ContentDelta(before));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same reply for every grouping, in both modes.
    #[test]
    fn grouping_does_not_matter(bits in reply(), start in start(), stop in stop(), size in 1..9_usize) {
        let pieces: Vec<Piece<'_>> = bits.iter().map(Bit::piece).collect();
        let found = events(start, stop, pieces.iter().copied());
        check_events(&found)?;
        let whole: Reply = found.into_iter().collect();
        prop_assert_eq!(&read(start, stop, single_chars(&pieces)), &whole);
        let text: String = bits.iter().map(|bit| match bit {
            Bit::Control(control) => control.spelling(),
            Bit::Text(text) => text,
        }).collect();
        prop_assert_eq!(&read_text(start, stop, [text.as_str()]), &whole);
        let chars: Vec<char> = text.chars().collect();
        let chunks: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
        prop_assert_eq!(&read_text(start, stop, chunks.iter().map(String::as_str)), &whole);
    }

    /// Any stream of pieces and any text: no panic, sound events, no dependence on grouping.
    #[test]
    fn any_stream_is_read(bits in any_bits(), start in start(), stop in stop(), cut in any::<prop::sample::Index>()) {
        let pieces: Vec<Piece<'_>> = bits.iter().map(Bit::piece).collect();
        let found = events(start, stop, pieces.iter().copied());
        check_events(&found)?;
        let whole: Reply = found.into_iter().collect();
        prop_assert_eq!(read(start, stop, single_chars(&pieces)), whole);

        let text: String = bits.iter().map(|bit| match bit {
            Bit::Control(control) => control.spelling(),
            Bit::Text(text) => text,
        }).collect();
        let whole = read_text(start, stop, [text.as_str()]);
        let mut at = cut.index(text.len() + 1);
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        prop_assert_eq!(read_text(start, stop, [&text[..at], &text[at..]]), whole);
    }

    /// Ordinary pieces are content whatever they spell.
    #[test]
    fn text_pieces_are_text(texts in prop::collection::vec(hostile_text(), 0..10)) {
        let reply = read(Channel::Response, StopReason::Length, texts.iter().map(|text| Piece::Text(text)));
        prop_assert_eq!(reply.content, texts.concat());
        prop_assert_eq!(reply.errors, []);
    }

    /// Reading JSON and printing it agrees with an independent reader.
    #[test]
    fn printed_json_is_the_same_value(value in json_value()) {
        let spaced: serde_json::Value = serde_json::from_str(&value.to_spaced()).unwrap();
        let sorted: serde_json::Value = serde_json::from_str(&value.to_sorted()).unwrap();
        prop_assert_eq!(spaced, sorted);
        let again = Value::parse(&value.to_spaced()).unwrap();
        prop_assert_eq!(again.to_spaced(), value.to_spaced());
        prop_assert_eq!(again.to_sorted(), value.to_sorted());
    }

    /// Any text is either refused or read, by both readers alike.
    #[test]
    fn json_syntax_agrees_with_an_independent_reader(
        fragments in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\\", "\\n", "\\u00e9", "\\x", "1", "-", "0", ".", "e", "E+5", "null",
            "true", "nul", " ", "\n", "\u{1}", "é", "NaN",
        ]), 0..8),
    ) {
        let text = fragments.concat();
        let other = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
        prop_assert_eq!(Value::parse(&text).is_ok(), other, "{}", text);
    }

    #[test]
    fn floats_read_back(value in any::<f64>().prop_filter("finite", |f| f.is_finite())) {
        let text = Value::from(value).to_spaced();
        prop_assert_eq!(text.parse::<f64>().unwrap().to_bits(), value.to_bits());
        prop_assert!(text.contains(['.', 'e']));
        prop_assert_eq!(Value::parse(&text).unwrap().to_spaced(), text);
    }

    #[test]
    fn no_request_panics(fragments in prop::collection::vec(prop::sample::select(vec![
        "null", "1", "\"x\"", "[]", "{}", "[1]", "{\"type\":\"text\",\"text\":\"x\"}", "[{\"type\":\"text\"}]",
        "[{\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]", "{\"type\":\"json_schema\"}", "\"required\"", "true",
    ]), 16), role in prop::sample::select(vec!["system", "user", "assistant", "tool", "developer", "other"])) {
        let f = &fragments;
        let body = format!(
            "{{\"messages\":[{{\"role\":\"{role}\",\"content\":{},\"name\":{},\"tools\":{},\"tool_calls\":{},\
             \"reasoning_content\":{},\"reasoning\":{},\"tool_call_id\":{},\"tool\":{}}},{}],\"tools\":{},\"tool_choice\":{},\
             \"response_format\":{},\"reasoning_effort\":{},\"chat_template_kwargs\":{{\"thinking\":{},\"thinking_effort\":{},\
             \"response_schema\":{}}}}}",
            f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15],
        );
        for revision in [Revision::Current, Revision::July] {
            match ChatRequest::from_json(&body).and_then(|r| encode(&r, &EncodeOptions { entry: Entry::Served, revision })) {
                Ok(prompt) => prop_assert!(prompt.segments.iter().all(|s| !s.text.is_empty())),
                Err(error) => prop_assert!(!error.name().is_empty() && !error.to_string().is_empty()),
            }
        }
    }
}

/// The parsers are plain data: they can be moved to another thread between pieces.
#[test]
fn parsers_are_send() {
    fn check<T: Send + 'static>() {}
    check::<ReplyParser>();
    check::<TextReplyParser>();
}
