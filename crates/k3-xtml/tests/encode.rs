//! Every case of `fixtures/xtml/encode.json`, and the API layer above the vendor's encoder.

mod support;

use k3_xtml::json::Value;
use k3_xtml::{
    Arguments, AssistantMessage, Channel, ChatRequest, Content, Effort, EncodeError, EncodeOptions, Entry,
    Message, Prompt, ResponseFormat, Revision, ThinkingEffort, ToolCall, ToolChoice, encode,
};
use support::{request, string, strings, vectors};

fn options(case: &Value, revision: Revision) -> EncodeOptions {
    let entry = match string(case, "entry").as_str() {
        "bare" => Entry::Bare,
        "served" => Entry::Served,
        other => panic!("unknown entry {other}"),
    };
    EncodeOptions { entry, revision }
}

fn encoded(case: &Value, revision: Revision) -> Result<Prompt, EncodeError> {
    request(case).and_then(|request| encode(&request, &options(case, revision)))
}

fn expected_segments(case: &Value) -> Vec<(String, bool)> {
    let Some(Value::Array(segments)) = case.get("segments") else { panic!("no segments") };
    segments.iter().map(|s| (string(s, "text"), s.get("control") == Some(&Value::Bool(true)))).collect()
}

fn check_case(case: &Value, revision: Revision) {
    let name = string(case, "name");
    let found = encoded(case, revision);
    if let Some(error) = case.get("error").and_then(Value::as_str) {
        assert_eq!(found.map_err(|e| e.name()), Err(error), "{name}, {revision:?}");
        return;
    }
    let prompt = found.unwrap_or_else(|e| panic!("{name}, {revision:?}: {e}"));
    let segments: Vec<(String, bool)> =
        prompt.segments.iter().map(|s| (s.text.to_string(), s.control)).collect();
    assert_eq!(segments, expected_segments(case), "{name}, {revision:?}");
    assert_eq!(prompt.flat(), string(case, "flat"), "{name}, {revision:?}");
}

#[test]
fn current_revision() {
    let cases = vectors("encode.json");
    assert_eq!(cases.len(), 160);
    for case in &cases {
        assert!(strings(case, "revisions").contains(&"current".to_owned()));
        check_case(case, Revision::Current);
    }
}

#[test]
fn july_revision() {
    let (mut same, mut other, mut refused) = (0, 0, 0);
    for case in &vectors("encode.json") {
        let name = string(case, "name");
        if strings(case, "revisions").contains(&"july".to_owned()) {
            check_case(case, Revision::July);
            same += 1;
        } else if let Some(flat) = case.get("july_flat") {
            let prompt = encoded(case, Revision::July).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(Some(prompt.flat().as_str()), flat.as_str(), "{name}");
            other += 1;
        } else {
            let error = encoded(case, Revision::July).map_err(|e| e.name());
            assert_eq!(error, Err(string(case, "july_error").as_str()), "{name}");
            refused += 1;
        }
    }
    assert_eq!((same, other, refused), (150, 9, 1));
}

/// The open channel says what the end of the prompt says.
#[test]
fn open_channel_is_the_last_tag() {
    for case in &vectors("encode.json") {
        let Ok(prompt) = encoded(case, Revision::Current) else { continue };
        let last = prompt.segments.iter().rev().nth(1).map(|s| s.text.as_ref());
        let in_prompt = match last {
            Some("think") => Some(Channel::Think),
            Some("response") => Some(Channel::Response),
            _ => None,
        };
        assert_eq!(prompt.open_channel, in_prompt, "{}", string(case, "name"));
    }
}

fn call_with(arguments: Arguments, revision: Revision) -> Result<String, &'static str> {
    let mut request = ChatRequest::new(vec![Message::Assistant(AssistantMessage {
        tool_calls: vec![ToolCall { id: None, name: "f".into(), arguments }],
        ..AssistantMessage::default()
    })]);
    request.add_generation_prompt = false;
    let options = EncodeOptions { revision, ..EncodeOptions { entry: Entry::Bare, revision } };
    let flat = encode(&request, &options).map_err(|e| e.name())?.flat();
    let (_, rest) = flat.split_once("index=\"1\"<|sep|>").expect("a call");
    let (children, _) = rest.split_once("<|close|>call<|sep|>").expect("the end of the call");
    let short = children.replace("<|open|>", "⟨").replace("<|close|>", "⟪").replace("<|sep|>", "⟩");
    Ok(short.replace("⟪argument⟩", ""))
}

fn check_text(arguments: &str, current: &str, july: Result<&str, &'static str>) {
    let found = call_with(Arguments::Text(arguments.to_owned()), Revision::Current);
    assert_eq!(found.as_deref(), Ok(current), "current, {arguments:?}");
    let found = call_with(Arguments::Text(arguments.to_owned()), Revision::July);
    assert_eq!(found.as_deref(), july.as_deref(), "july, {arguments:?}");
}

/// `docs/xtml.md` 9 and 12.
#[test]
fn argument_strings() {
    let whole = |text: &str| format!("⟨json type=\"object\"⟩{text}⟪json⟩");
    let json = |text: &str| {
        check_text(text, &whole(text), Ok(&whole(text)));
    };
    check_text("", "", Ok(""));
    check_text("{}", "", Ok(""));
    check_text("\t{ }\r\n", "", Ok(""));
    check_text("{} trailing", "", Ok(&whole("{} trailing")));
    check_text(" \n\t", &whole(" \n\t"), Ok(""));
    check_text("\u{a0}{}", &whole("\u{a0}{}"), Ok(&whole("\u{a0}{}")));
    check_text("[1]", &whole("[1]"), Err("arguments_not_object"));
    check_text("null", &whole("null"), Err("arguments_not_object"));
    check_text("\"a\"", &whole("\"a\""), Err("arguments_not_object"));
    check_text(
        "{\"a\":1,\"a\":2}",
        "⟨argument key=\"a\" type=\"number\"⟩1⟨argument key=\"a\" type=\"number\"⟩2",
        Ok("⟨argument key=\"a\" type=\"number\"⟩2"),
    );
    check_text(
        "{\"a\":\"x\ny\"}",
        "⟨argument key=\"a\" type=\"string\"⟩x\ny",
        Ok(&whole("{\"a\":\"x\ny\"}")),
    );
    check_text(
        "{\"a\":NaN,\"b\":-Infinity}",
        "⟨argument key=\"a\" type=\"number\"⟩NaN⟨argument key=\"b\" type=\"number\"⟩-Infinity",
        Ok("⟨argument key=\"a\" type=\"number\"⟩NaN⟨argument key=\"b\" type=\"number\"⟩-Infinity"),
    );
    check_text(
        "{\"a\":-0,\"b\":[ 1 ,2]}",
        "⟨argument key=\"a\" type=\"number\"⟩-0⟨argument key=\"b\" type=\"array\"⟩[ 1 ,2]",
        Ok("⟨argument key=\"a\" type=\"number\"⟩0⟨argument key=\"b\" type=\"array\"⟩[1, 2]"),
    );
    check_text(
        "{\"a\":\"\\ud83d\\ude00\\u0041\\ud800\"}",
        "⟨argument key=\"a\" type=\"string\"⟩😀A\u{fffd}",
        Ok("⟨argument key=\"a\" type=\"string\"⟩😀A\u{fffd}"),
    );
    check_text(
        "{\"\":true}",
        "⟨argument key=\"\" type=\"boolean\"⟩true",
        Ok("⟨argument key=\"\" type=\"boolean\"⟩true"),
    );
    json("{");
    json("{\"a\"");
    json("{\"a\":1");
    json("{\"a\":1,}");
    json("{\"a\":01}");
    json("{\"a\":1.}");
    json("{\"a\":.5}");
    json("{\"a\":+1}");
    json("{a:1}");
    json("{1:1}");
    json("{\"a\":[1,]}");
    json("{\"a\":tru}");
    json("{\"a\":\"\\x\"}");
    json("{\"a\" 1}");
    json("{\"a\":1 \"b\":2}");
    json("{\"a\":1}}".strip_suffix("}}").unwrap());
}

/// Only the first level is taken apart; literals keep their spelling.
#[test]
fn literals_keep_their_spelling() {
    check_text(
        r#"{"a":1e2,"b":1.0,"c":{"d":[1,2 ,3]}}"#,
        "⟨argument key=\"a\" type=\"number\"⟩1e2⟨argument key=\"b\" type=\"number\"⟩1.0⟨argument key=\"c\" type=\"object\"⟩{\"d\":[1,2 ,3]}",
        Ok(
            "⟨argument key=\"a\" type=\"number\"⟩100.0⟨argument key=\"b\" type=\"number\"⟩1.0⟨argument key=\"c\" type=\"object\"⟩{\"d\": [1, 2, 3]}",
        ),
    );
}

#[test]
fn deep_and_long_arguments() {
    let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    let text = format!("{{\"a\":{deep}}}");
    let found = call_with(Arguments::Text(text.clone()), Revision::Current).unwrap();
    assert_eq!(found, format!("⟨argument key=\"a\" type=\"array\"⟩{deep}"));
    assert_eq!(call_with(Arguments::Text(text), Revision::July), Err("nesting_too_deep"));

    let long = "\\\"x\\n".repeat(1 << 18);
    let found = call_with(Arguments::Text(format!("{{\"a\":\"{long}\"}}")), Revision::Current).unwrap();
    assert_eq!(found, format!("⟨argument key=\"a\" type=\"string\"⟩{}", "\"x\n".repeat(1 << 18)));

    let many: Vec<String> = (0..100_000).map(|i| format!("\"k{i}\":{i}")).collect();
    let body = format!("{{{}}}", many.join(","));
    let Value::Object(pairs) = Value::parse(&body).unwrap() else { panic!() };
    let found = call_with(Arguments::Object(pairs), Revision::Current).unwrap();
    assert_eq!(Ok(found), call_with(Arguments::Text(body), Revision::Current));
}

#[test]
fn deep_request_is_refused() {
    let body = format!("{{\"messages\":[],\"tools\":{}", "[".repeat(1_000_000));
    assert_eq!(ChatRequest::from_json(&body).map_err(|e| e.name()), Err("nesting_too_deep"));
}

fn check_refused(body: &str, name: &str) {
    let found = ChatRequest::from_json(body).and_then(|r| encode(&r, &EncodeOptions::default()));
    match found {
        Err(error) => assert_eq!(error.name(), name, "{body}: {error}"),
        Ok(prompt) => panic!("{body} gave {}", prompt.flat()),
    }
}

#[test]
fn refusals() {
    let message = |message: &str| format!("{{\"messages\":[{message}]}}");
    check_refused("", "invalid_json");
    check_refused("{\"messages\":[}", "invalid_json");
    check_refused("[]", "request_not_object");
    check_refused("{}", "messages_not_list");
    check_refused("{\"messages\":\"hi\"}", "messages_not_list");
    check_refused("{\"messages\":[],\"tools\":{}}", "option_wrong_type");
    check_refused("{\"messages\":[],\"chat_template_kwargs\":1}", "option_wrong_type");
    check_refused("{\"messages\":[],\"chat_template_kwargs\":{\"thinking\":\"yes\"}}", "option_wrong_type");
    check_refused(&message("[]"), "message_not_object");
    check_refused(&message("{}"), "unknown_role");
    check_refused(&message("{\"role\":\"User\",\"content\":\"x\"}"), "unknown_role");
    check_refused(&message("{\"role\":1}"), "unknown_role");
    check_refused(
        &message("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":1}]}"),
        "content_wrong_type",
    );
    check_refused(&message("{\"role\":\"user\",\"name\":[1]}"), "field_wrong_type");
    check_refused(&message("{\"role\":\"assistant\",\"reasoning_content\":[1]}"), "field_wrong_type");
    check_refused(&message("{\"role\":\"assistant\",\"tool_calls\":{\"a\":1}}"), "field_wrong_type");
    check_refused(&message("{\"role\":\"assistant\",\"tool_calls\":[1]}"), "tool_call_without_name");
    check_refused(
        &message("{\"role\":\"assistant\",\"tool_calls\":[{\"name\":null}]}"),
        "tool_call_without_name",
    );
    check_refused(&message("{\"role\":\"tool\",\"tool\":null,\"name\":\"f\"}"), "unresolvable_tool_name");
    // Images in every role, also where content is not shown.
    for role in ["system", "user", "assistant", "tool", "developer", "critic"] {
        for kind in ["image", "image_url"] {
            let part = format!("{{\"type\":\"{kind}\",\"text\":\"x\"}}");
            check_refused(
                &message(&format!("{{\"role\":\"{role}\",\"tools\":[1],\"content\":[{part}]}}")),
                "image_not_supported",
            );
        }
    }
}

#[test]
fn errors_say_where() {
    let body = r#"{"messages":[{"role":"user"},{"role":"user","content":[{"type":"text","text":""},{"text":"x"}]}]}"#;
    let error = ChatRequest::from_json(body).unwrap_err();
    assert_eq!(error, EncodeError::PartMissingType { message: 1, part: 1 });
    assert_eq!(error.to_string(), "messages[1].content[1]: the part has no `type`");
}

fn options_of(fields: &str) -> ChatRequest {
    ChatRequest::from_json(&format!("{{\"messages\":[]{fields}}}")).unwrap()
}

fn check_thinking(fields: &str, thinking: bool, effort: impl Into<ThinkingEffort>) {
    let request = options_of(fields);
    assert_eq!((request.thinking, request.thinking_effort), (thinking, effort.into()), "{fields}");
}

/// `docs/xtml.md` 10, what servers add.
#[test]
fn effort_at_the_api() {
    use ThinkingEffort::{Default, Silent, Unsupported};
    let kwargs = |options: &str| format!(",\"chat_template_kwargs\":{{{options}}}");
    check_thinking("", true, Default);
    check_thinking(",\"chat_template_kwargs\":null", true, Default);
    check_thinking(",\"reasoning_effort\":null", true, Default);
    check_thinking(",\"reasoning_effort\":\"low\"", true, Effort::Low);
    check_thinking(",\"reasoning_effort\":\"high\"", true, Effort::High);
    check_thinking(",\"reasoning_effort\":\"max\"", true, Effort::Max);
    check_thinking(",\"reasoning_effort\":\"none\"", false, Default);
    check_thinking(",\"reasoning_effort\":\"medium\"", true, Unsupported("\"medium\"".into()));
    check_thinking(&kwargs("\"thinking_effort\":null"), true, Silent);
    check_thinking(&kwargs("\"thinking_effort\":\"low\""), true, Effort::Low);
    check_thinking(&kwargs("\"thinking_effort\":3"), true, Unsupported("3".into()));
    check_thinking(&kwargs("\"enable_thinking\":false"), false, Default);
    check_thinking(&kwargs("\"enable_thinking\":false,\"thinking\":true"), true, Default);
    check_thinking(&kwargs("\"thinking\":false"), false, Default);
    // The vendor's own options win.
    let both = format!("{},\"reasoning_effort\":\"low\"", kwargs("\"thinking_effort\":\"high\""));
    check_thinking(&both, true, Effort::High);
    let both = format!("{},\"reasoning_effort\":\"none\"", kwargs("\"thinking\":true"));
    check_thinking(&both, true, Default);
    check_refused("{\"messages\":[],\"reasoning_effort\":\"medium\"}", "unsupported_thinking_effort");
    check_refused("{\"messages\":[],\"reasoning_effort\":\"minimal\"}", "unsupported_thinking_effort");
    // A bad effort without thinking is ignored.
    let request = options_of(&format!("{},\"reasoning_effort\":\"medium\"", kwargs("\"thinking\":false")));
    assert_eq!(encode(&request, &EncodeOptions::default()).unwrap().open_channel, Some(Channel::Response));
}

#[test]
fn developer_is_system_at_the_api_only() {
    let body = r#"{"messages":[{"role":"developer","content":"x","name":"n"}]}"#;
    let request = ChatRequest::from_json(body).unwrap();
    assert_eq!(request.messages, [Message::System { content: Content::from("x"), name: Some("n".into()) }]);
    let request = ChatRequest::from_vendor_json(body).unwrap();
    assert_eq!(encode(&request, &EncodeOptions::default()).map_err(|e| e.name()), Err("unknown_role"));
}

#[test]
fn tool_choice_needs_tools_at_the_api() {
    assert_eq!(options_of(",\"tool_choice\":\"required\"").tool_choice, ToolChoice::Auto);
    assert_eq!(options_of(",\"tool_choice\":\"none\",\"tools\":[{}]").tool_choice, ToolChoice::None);
    let dynamic = r#"{"messages":[{"role":"system","tools":[{}]}],"tool_choice":"required"}"#;
    assert_eq!(ChatRequest::from_json(dynamic).unwrap().tool_choice, ToolChoice::Required);
    let vendor = ChatRequest::from_vendor_json("{\"messages\":[],\"tool_choice\":\"required\"}").unwrap();
    assert_eq!(vendor.tool_choice, ToolChoice::Required);
}

fn check_schema(fields: &str, expected: &str) {
    match options_of(fields).response_format {
        ResponseFormat::JsonSchema(schema) => assert_eq!(schema.to_sorted(), expected, "{fields}"),
        other => panic!("{fields} gave {other:?}"),
    }
}

#[test]
fn where_the_schema_comes_from() {
    let format = |inner: &str| format!(",\"response_format\":{{\"type\":\"json_schema\"{inner}}}");
    check_schema(&format(""), "null");
    check_schema(&format(",\"json_schema\":{\"json_schema\":{\"b\":1}}"), "{\"b\":1}");
    check_schema(&format(",\"json_schema\":{\"schema\":{\"a\":1},\"json_schema\":{\"b\":1}}"), "{\"a\":1}");
    check_schema(&format(",\"json_schema\":{\"c\":1}"), "{\"c\":1}");
    let option = ",\"chat_template_kwargs\":{\"response_schema\":{\"z\":1}}";
    check_schema(&format!("{}{option}", format(",\"json_schema\":{\"schema\":{\"a\":1}}")), "{\"z\":1}");
    check_schema(&format!(",\"response_format\":\"json_schema\"{option}"), "{\"z\":1}");
    check_schema(",\"response_format\":\"json_schema\"", "null");
    assert_eq!(
        options_of(",\"response_format\":{\"type\":\"grammar\"}").response_format,
        ResponseFormat::Text
    );
}

fn results(messages: &str) -> Vec<String> {
    let body = format!(
        "{{\"messages\":[{messages}],\"chat_template_kwargs\":{{\"add_generation_prompt\":false,\"thinking_effort\":null}}}}"
    );
    let flat = encode(&ChatRequest::from_json(&body).unwrap(), &EncodeOptions::default()).unwrap().flat();
    let shown = flat.split("<|open|>message role=\"tool\" ").skip(1);
    shown.map(|r| r.split("<|close|>").next().unwrap().replace("<|sep|>", " ").replace('"', "")).collect()
}

fn check_results(messages: &str, expected: &[&str]) {
    assert_eq!(results(messages), expected, "{messages}");
}

/// `docs/xtml.md` 8: order, names, counters, and ids of any origin.
#[test]
fn tool_results() {
    let calls = |ids: [&str; 3]| {
        let call = |(name, id): (&str, &str)| format!("{{\"id\":{id},\"function\":{{\"name\":\"{name}\"}}}}");
        let calls: Vec<String> = ["f", "g", "h"].into_iter().zip(ids).map(call).collect();
        format!("{{\"role\":\"assistant\",\"tool_calls\":[{}]}}", calls.join(","))
    };
    let result = |id: &str, content: &str| {
        format!("{{\"role\":\"tool\",\"tool_call_id\":{id},\"content\":\"{content}\"}}")
    };
    let user = "{\"role\":\"user\",\"content\":\"u\"}";
    let abc = calls(["\"a\"", "\"b\"", "\"c\""]);

    let (a, b, c) = (result("\"a\"", "A"), result("\"b\"", "B"), result("\"c\"", "C"));
    check_results(
        &format!("{abc},{c},{a},{b}"),
        &["tool=f index=1 A", "tool=g index=2 B", "tool=h index=3 C"],
    );
    // Only a whole run is looked up; the counter goes on over a user message.
    check_results(
        &format!("{abc},{c},{user},{b},{a}"),
        &["tool=h index=1 C", "tool=f index=2 A", "tool=g index=3 B"],
    );
    // One unknown id: nothing is sorted, names go by position.
    let x = result("\"x\"", "X");
    check_results(
        &format!("{abc},{b},{x},{a}"),
        &["tool=f index=1 B", "tool=g index=2 X", "tool=h index=3 A"],
    );
    // Two results of one call keep their order.
    let again = result("\"a\"", "A2");
    check_results(
        &format!("{abc},{b},{a},{again}"),
        &["tool=f index=1 A", "tool=f index=2 A2", "tool=g index=3 B"],
    );
    // The first of equal ids wins; ids compare in string form; null ids count a position.
    check_results(&format!("{},{a}", calls(["\"a\"", "\"a\"", "1"])), &["tool=f index=1 A"]);
    check_results(
        &format!("{},{}", calls(["null", "null", "7"]), result("\"7\"", "S")),
        &["tool=h index=1 S"],
    );
    // A new assistant message starts over, even without calls.
    let plain = "{\"role\":\"assistant\",\"content\":\"x\"}";
    let named = "{\"role\":\"tool\",\"name\":\"n\",\"tool_call_id\":\"a\",\"content\":\"N\"}";
    check_results(&format!("{abc},{a},{plain},{named}"), &["tool=f index=1 A", "tool=n index=1 N"]);
    // History cut after the call, results named by the client.
    check_results(&format!("{user},{named}"), &["tool=n index=1 N"]);
}

#[test]
fn typed_requests_encode_like_json() {
    let body = r#"{
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning": "r",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "18"}
        ],
        "tools": [{"b": 1, "a": 2}], "tool_choice": "required", "reasoning_effort": "low",
        "response_format": {"type": "json_object"}
    }"#;
    let mut request = ChatRequest::new(vec![
        Message::system("s"),
        Message::user(vec!["a".to_owned(), "b".to_owned()]),
        Message::Assistant(AssistantMessage {
            reasoning: Some("r".into()),
            tool_calls: vec![ToolCall {
                id: Some("1".into()),
                name: "f".into(),
                arguments: Arguments::Text("{\"x\":1}".into()),
            }],
            ..AssistantMessage::default()
        }),
        Message::tool_result("1", "18"),
    ]);
    request.tools = vec![Value::parse("{\"b\":1,\"a\":2}").unwrap()];
    request.tool_choice = ToolChoice::Required;
    request.thinking_effort = Effort::Low.into();
    request.response_format = ResponseFormat::JsonObject;
    assert_eq!(ChatRequest::from_json(body).unwrap(), request);
}
