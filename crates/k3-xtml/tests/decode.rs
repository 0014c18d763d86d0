//! Every case of `fixtures/xtml/decode.json`, at every cut, and the rules that have no case there.

mod support;

use k3_xtml::json::Value;
use k3_xtml::{Channel, Control, Event, FinishReason, Piece, Reply, ReplyParser, StopReason};
use support::{error_names, events, piece, pieces, read, read_text, single_chars, string, strings, vectors};

struct Case {
    name: String,
    start: Channel,
    stop: StopReason,
    mode: String,
    chunks: Vec<String>,
    expected: Value,
}

fn cases() -> Vec<Case> {
    let cases = vectors("decode.json");
    assert_eq!(cases.len(), 61);
    let case = |case: &Value| Case {
        name: string(case, "name"),
        start: match string(case, "start").as_str() {
            "think" => Channel::Think,
            "response" => Channel::Response,
            other => panic!("unknown start {other}"),
        },
        stop: match string(case, "stop").as_str() {
            "eos" => StopReason::Eos,
            "length" => StopReason::Length,
            "stop" => StopReason::Stop,
            other => panic!("unknown stop {other}"),
        },
        mode: string(case, "mode"),
        chunks: strings(case, "chunks"),
        expected: case.get("expected").expect("expected").clone(),
    };
    cases.iter().map(case).collect()
}

impl Case {
    fn check(&self, reply: &Reply, how: &str) {
        let expected = &self.expected;
        let name = format!("{}, {how}", self.name);
        assert_eq!(reply.reasoning_content, string(expected, "reasoning_content"), "{name}");
        assert_eq!(reply.content, string(expected, "content"), "{name}");
        assert_eq!(error_names(reply), strings(expected, "errors"), "{name}");
        let finish = reply.finish_reason.map(FinishReason::as_str);
        assert_eq!(finish, expected.get("finish_reason").and_then(Value::as_str), "{name}");
        let Some(Value::Array(calls)) = expected.get("tool_calls") else { panic!("no calls") };
        let found: Vec<(String, String)> =
            reply.tool_calls.iter().map(|c| (c.name.clone(), c.arguments.clone())).collect();
        let calls: Vec<(String, String)> =
            calls.iter().map(|c| (string(c, "name"), string(c, "arguments"))).collect();
        assert_eq!(found, calls, "{name}");
        assert!(reply.tool_calls.iter().enumerate().all(|(i, call)| call.index == i), "{name}");
    }

    fn read(&self, pieces: &[Piece<'_>]) -> Reply {
        read(self.start, self.stop, pieces.iter().copied())
    }
}

#[test]
fn token_mode() {
    let mut run = 0;
    for case in cases().iter().filter(|case| case.mode != "text") {
        run += 1;
        let whole: Vec<Piece<'_>> = case.chunks.iter().map(|chunk| piece(chunk)).collect();
        case.check(&case.read(&whole), "as it is");
        case.check(&case.read(&single_chars(&whole)), "single characters");
        for (at, piece) in whole.iter().enumerate() {
            let Piece::Text(text) = piece else { continue };
            for cut in (1..text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let (head, tail) = (Piece::Text(&text[..cut]), Piece::Text(&text[cut..]));
                let mut pieces = whole.clone();
                pieces.splice(at..=at, [head, Piece::Text(""), tail]);
                case.check(&case.read(&pieces), "one text cut");
            }
        }
        // Neighbouring texts joined.
        let mut joined: Vec<String> = Vec::new();
        for chunk in &case.chunks {
            match joined.last_mut() {
                Some(last) if matches!((piece(last), piece(chunk)), (Piece::Text(_), Piece::Text(_))) => {
                    // Joined text may spell a marker; then it could not be told apart in this notation.
                    let both = last.clone() + chunk;
                    if matches!(piece(&both), Piece::Text(_)) {
                        *last = both;
                    } else {
                        joined.push(chunk.clone());
                    }
                }
                _ => joined.push(chunk.clone()),
            }
        }
        let joined: Vec<Piece<'_>> = joined.iter().map(|chunk| piece(chunk)).collect();
        case.check(&case.read(&joined), "joined");
    }
    assert_eq!(run, 56);
}

#[test]
fn text_mode_at_every_cut() {
    let mut run = 0;
    for case in cases().iter().filter(|case| case.mode != "token") {
        run += 1;
        let check = |texts: &[&str], how: &str| {
            case.check(&read_text(case.start, case.stop, texts.iter().copied()), how);
        };
        let whole = case.chunks.concat();
        check(&case.chunks.iter().map(String::as_str).collect::<Vec<_>>(), "as it is");
        check(&[&whole], "joined");
        check(&whole.split("").collect::<Vec<_>>(), "single characters");
        let cuts: Vec<usize> = (0..=whole.len()).filter(|&cut| whole.is_char_boundary(cut)).collect();
        for &cut in &cuts {
            check(&[&whole[..cut], &whole[cut..]], "cut in two");
        }
        // All three-way cuts of the short ones, an even sample of the long ones.
        let step = (cuts.len() / 120).max(1);
        for (i, &first) in cuts.iter().enumerate().step_by(step) {
            for &second in cuts[i..].iter().step_by(step) {
                check(&[&whole[..first], &whole[first..second], &whole[second..]], "cut in three");
            }
        }
    }
    assert_eq!(run, 57);
}

/// Reads notation (see `support::pieces`) in every way that must not matter, and gives one line.
fn line(start: Channel, stop: StopReason, notation: &str) -> String {
    let whole = pieces(notation);
    let reply = read(start, stop, whole.iter().copied());
    assert_eq!(read(start, stop, single_chars(&whole)), reply, "{notation}, single characters");
    let text = notation
        .replace('⟨', "<|open|>")
        .replace('⟪', "<|close|>")
        .replace('⟩', "<|sep|>")
        .replace('■', "<|end_of_msg|>");
    if !notation.contains(['□', '▣']) {
        assert_eq!(read_text(start, stop, [text.as_str()]), reply, "{notation}, text mode");
        assert_eq!(read_text(start, stop, text.split("")), reply, "{notation}, text mode, single characters");
    }
    let calls: Vec<String> = reply.tool_calls.iter().map(|c| format!("{}{}", c.name, c.arguments)).collect();
    format!(
        "{} / {} / {} / {} / {}",
        reply.reasoning_content,
        reply.content,
        calls.join(" "),
        reply.finish_reason.map_or("", FinishReason::as_str),
        error_names(&reply).join(" "),
    )
}

fn check(notation: &str, expected: &str) {
    assert_eq!(line(Channel::Think, StopReason::Eos, notation), expected, "{notation}");
}

fn check_call(call: &str, expected: &str) {
    let notation = format!("⟪think⟩⟨tools⟩{call}⟪tools⟩⟪message⟩■");
    assert_eq!(line(Channel::Think, StopReason::Eos, &notation), expected, "{call}");
}

#[test]
fn think_ends_in_several_ways() {
    check("r⟪think⟩⟨response⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / ");
    check("r⟪think⟨response⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / truncated_tag implicit_close");
    check("r⟪think\n⟨response⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / truncated_tag implicit_close");
    check(
        "r⟪think⟨tools⟩⟨call tool=\"f\"⟩⟪call⟩⟪tools⟩⟪message⟩■",
        "r /  / f{} / tool_calls / truncated_tag implicit_close",
    );
    check("r⟪think⟪message⟩■", "r /  /  / stop / truncated_tag implicit_close");
    check("r⟪think⟪response⟩■", "r /  /  / stop / truncated_tag implicit_close stray_close");
    check("r⟪think■", "r /  /  / stop / truncated_tag unclosed_channel");
    check("r⟪think\n\na.■", "r / \n\na. /  / stop / truncated_tag implicit_close text_outside_channel");
    check(
        "r⟪think a⟪response⟩⟪message⟩■",
        "r /  a /  / stop / truncated_tag implicit_close text_outside_channel stray_close",
    );
    check("r⟨response⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / implicit_close");
    check("r⟨tools⟩⟨call tool=\"f\"⟩⟪call⟩⟪tools⟩⟪message⟩■", "r /  / f{} / tool_calls / implicit_close");
    check("r■", "r /  /  / stop / unclosed_channel");
    check("r□", "r /  /  / stop / unclosed_channel");
    check("r⟪thinking⟩s⟪think⟩⟪message⟩■", "rs /  /  / stop / stray_close");
}

#[test]
fn skipped_think() {
    check("a⟪response⟩⟪message⟩■", " / a /  / stop / skipped_think");
    check("a⟪message⟩■", " / a /  / stop / skipped_think");
    check("⟪response⟩⟪message⟩■", " /  /  / stop / skipped_think");
    check(
        "a⟪response⟩⟨tools⟩⟨call tool=\"f\"⟩⟪call⟩⟪tools⟩⟪message⟩■",
        " / a / f{} / tool_calls / skipped_think",
    );
    check("a⟪response⟩x⟪message⟩■", " / a /  / stop / skipped_think stray_text");
    // Not if the model opened think itself, nor in a later think channel.
    check("⟨think⟩r⟪message⟩■", "r /  /  / stop / implicit_close");
    check("⟨think⟩r⟪response⟩■", "r /  /  / stop / stray_close unclosed_channel");
    check("r⟪think⟩⟨think⟩s⟪message⟩■", "rs /  /  / stop / implicit_close");
}

#[test]
fn channels() {
    check("⟨message role=\"assistant\"⟩⟨think⟩r⟪think⟩⟨response⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / ");
    check("r⟨think⟩s⟪think⟩⟪message⟩■", "rs /  /  / stop / unknown_tag");
    check("r⟪think⟩⟨response⟩a⟨response⟩b⟪response⟩⟪message⟩■", "r / ab /  / stop / implicit_close");
    check(
        "r⟪think⟩⟨response⟩a⟨think⟩s⟪think⟩⟨response⟩b⟪response⟩⟪message⟩■",
        "rs / ab /  / stop / implicit_close",
    );
    check("⟨response⟩a⟪response⟩⟪message⟩■", " / a /  / stop / implicit_close");
    check(
        "r⟪think⟩ \n x ⟨foo⟩y⟨response⟩a⟪response⟩ z⟪message⟩ w■",
        "r /  \n x ya /  / stop / text_outside_channel unknown_tag text_outside_channel stray_text stray_text",
    );
    check("r⟪think⟩⟪think⟩⟪message⟩⟪message⟩■", "r /  /  / stop / stray_close");
    check("r⟩s⟪think⟩⟪message⟩■", "rs /  /  / stop / stray_sep");
    check("r⟨⟩s⟪⟩⟪think⟩⟪message⟩■", "rs /  /  / stop / unknown_tag stray_close");
    check("r⟪ think ⟩⟨\nresponse\n⟩a⟪response⟩⟪message⟩■", "r / a /  / stop / ");
    check(
        "r▣s⟪think▣⟩⟨response⟩a⟪response⟩⟪message⟩■",
        "rs / a /  / stop / truncated_tag implicit_close stray_sep",
    );
    assert_eq!(
        line(Channel::Response, StopReason::Eos, "⟨think⟩r⟪think⟩⟨response⟩a⟪response⟩⟪message⟩■"),
        "r / a /  / stop / implicit_close"
    );
    assert_eq!(
        line(Channel::Response, StopReason::Eos, "a⟪think⟩b⟪response⟩⟪message⟩■"),
        " / ab /  / stop / stray_close"
    );
}

/// A complete call with a name is always reported, with arguments that are JSON.
#[test]
fn bad_arguments_do_not_lose_the_call() {
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"number\"⟩abc⟪argument⟩⟪call⟩",
        " /  / f{\"n\": \"abc\"} / tool_calls / bad_argument_value",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"number\"⟩⟪argument⟩⟪call⟩",
        " /  / f{\"n\": \"\"} / tool_calls / bad_argument_value",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"number\"⟩NaN⟪argument⟩⟪call⟩",
        " /  / f{\"n\": \"NaN\"} / tool_calls / bad_argument_value",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"object\"⟩ {\"a\" :1e2}\n⟪argument⟩⟪call⟩",
        " /  / f{\"n\": {\"a\" :1e2}} / tool_calls / ",
    );
    check_call("⟨call tool=\"f\"⟩⟪call⟩", " /  / f{} / tool_calls / ");
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\"⟩5⟪argument⟩⟪call⟩",
        " /  / f{\"n\": \"5\"} / tool_calls / ",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"date\"⟩5⟪argument⟩⟪call⟩",
        " /  / f{\"n\": 5} / tool_calls / ",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"n\" type=\"date\"⟩5 May⟪argument⟩⟪call⟩",
        " /  / f{\"n\": \"5 May\"} / tool_calls / bad_argument_value",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"\"⟩5⟪argument⟩⟪call⟩",
        " /  / f{\"\": \"5\"} / tool_calls / ",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument type=\"number\"⟩5⟪argument⟩⟨argument key=\"k\"⟩v⟪argument⟩⟪call⟩",
        " /  / f{\"k\": \"v\"} / tool_calls / argument_without_key",
    );
    check_call("⟨call tool=\"f\"⟩⟨argument key=\"k\"⟩v⟪call⟩", " /  / f{} / tool_calls / unclosed_argument");
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"k\"⟩v⟨argument key=\"l\"⟩w⟪argument⟩⟪call⟩",
        " /  / f{\"l\": \"w\"} / tool_calls / unclosed_argument",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"a\"⟩1⟪argument⟩⟨argument key=\"b\"⟩2⟪argument⟩⟨argument key=\"a\"⟩3⟪argument⟩⟪call⟩",
        " /  / f{\"a\": \"3\", \"b\": \"2\"} / tool_calls / ",
    );
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"k\"⟩a⟨b⟩c⟪b⟩d⟪argument⟩⟪call⟩",
        " /  / f{\"k\": \"acd\"} / tool_calls / unknown_tag stray_close",
    );
    check_call(
        "⟨call tool=\"f\"⟩x⟨argument key=\"k\"⟩v⟪argument⟩y⟪call⟩z",
        " /  / f{\"k\": \"v\"} / tool_calls / stray_text stray_text stray_text",
    );
}

#[test]
fn json_elements() {
    let json = |body: &str| format!("⟨json type=\"object\"⟩{body}⟪json⟩");
    let argument = "⟨argument key=\"k\"⟩v⟪argument⟩";
    check_call(
        &format!("⟨call tool=\"f\"⟩{}⟪call⟩", json(" {\"a\":1} ")),
        " /  / f {\"a\":1}  / tool_calls / ",
    );
    check_call(
        &format!("⟨call tool=\"f\"⟩{}⟪call⟩", json("[1]")),
        " /  / f[1] / tool_calls / bad_json_block",
    );
    check_call(&format!("⟨call tool=\"f\"⟩{}⟪call⟩", json("")), " /  / f / tool_calls / bad_json_block");
    check_call(
        &format!("⟨call tool=\"f\"⟩{}{argument}⟪call⟩", json("{\"a\":1}")),
        " /  / f{\"k\": \"v\"} / tool_calls / json_block_ignored",
    );
    check_call(
        &format!("⟨call tool=\"f\"⟩{argument}{}⟪call⟩", json("{\"a\":1}")),
        " /  / f{\"k\": \"v\"} / tool_calls / json_block_ignored",
    );
    check_call(
        &format!("⟨call tool=\"f\"⟩{}{}⟪call⟩", json("{\"a\":1}"), json("{}")),
        " /  / f{\"a\":1} / tool_calls / json_block_ignored",
    );
    check_call("⟨call tool=\"f\"⟩⟨json⟩{⟪argument⟩}⟪json⟩⟪call⟩", " /  / f{} / tool_calls / stray_close");
}

#[test]
fn calls_that_do_not_count() {
    check_call("⟨call tool=\"\"⟩⟪call⟩", " /  /  / stop / call_without_name");
    check_call("⟨call⟩⟪call⟩", " /  /  / stop / call_without_name");
    check_call("⟨call tool=\"f\"⟩", " /  /  / stop / unclosed_call");
    check_call(
        "⟨call tool=\"f\"⟩⟨argument key=\"k\"⟩v⟨call tool=\"g\"⟩⟪call⟩",
        " /  / g{} / tool_calls / unclosed_argument unclosed_call",
    );
    check_call(
        "⟪call⟩⟨argument key=\"k\"⟩v⟪argument⟩",
        " /  /  / stop / stray_close unknown_tag stray_text stray_close",
    );
    check(
        "⟪think⟩⟨response⟩a⟨call tool=\"f\"⟩x⟨argument key=\"k\"⟩v⟪argument⟩⟪call⟩b⟪response⟩⟪message⟩■",
        " / ab /  / stop / stray_text call_outside_tools",
    );
    check("⟪think⟩⟨response⟩a⟨call tool=\"f\"⟩⟪response⟩⟪message⟩■", " / a /  / stop / unclosed_call");
    check("⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟪message⟩■", " /  /  / stop / unclosed_call");
    check("⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩■", " /  /  / stop / unclosed_call");
    check("⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟨response⟩a⟪response⟩⟪message⟩■", " / a /  / stop / unclosed_call");
    check(
        "⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟨tools⟩⟨call tool=\"g\"⟩⟪call⟩⟪tools⟩⟪message⟩■",
        " /  / g{} / tool_calls / unclosed_call",
    );
}

#[test]
fn attributes() {
    check_call("⟨call  index=\"1\"  tool=\"a b=\"\n⟩⟪call⟩", " /  / a b={} / tool_calls / ");
    check_call("⟨call tool=f⟩⟪call⟩", " /  /  / stop / call_without_name");
    check_call("⟨call tool=\"f⟩⟪call⟩", " /  /  / stop / call_without_name");
    check_call("⟨call x tool=\"f\"⟩⟪call⟩", " /  / f{} / tool_calls / ");
    check_call("⟨call tool=\"&amp;amp;&quot;&lt;\"⟩⟪call⟩", " /  / &amp;\"&lt;{} / tool_calls / ");
}

#[test]
fn finish_reasons() {
    let call = "⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟪call⟩";
    let finish = |stop, notation: &str| read(Channel::Think, stop, pieces(notation)).finish_reason;
    assert_eq!(finish(StopReason::Length, call), Some(FinishReason::Length));
    assert_eq!(finish(StopReason::Eos, call), Some(FinishReason::ToolCalls));
    assert_eq!(finish(StopReason::Stop, call), Some(FinishReason::ToolCalls));
    assert_eq!(finish(StopReason::Stop, "a"), Some(FinishReason::Stop));
    // The limit fell on the end token: nothing was cut.
    assert_eq!(finish(StopReason::Length, "a■"), Some(FinishReason::Stop));
    // Reasoning that used up the budget stays reasoning.
    for notation in ["", "a", "a b c d e"] {
        let reply = read(Channel::Think, StopReason::Length, pieces(notation));
        assert_eq!((reply.reasoning_content.as_str(), reply.content.as_str()), (notation, ""));
        assert_eq!(reply.finish_reason, Some(FinishReason::Length));
    }
}

#[test]
fn nothing_after_the_end() {
    let mut parser = ReplyParser::new(Channel::Response);
    assert!(!parser.is_ended());
    parser.push(Piece::Control(Control::Eos));
    assert!(parser.is_ended());
    assert_eq!(parser.push(Piece::Text("x")), []);
    assert_eq!(parser.finish(StopReason::Eos), [Event::Finish(FinishReason::Stop)]);
    assert_eq!(parser.finish(StopReason::Eos), []);
}

#[test]
fn deltas_come_at_once() {
    let mut parser = ReplyParser::new(Channel::Think);
    assert_eq!(parser.push(Piece::Text("a <|cl")), [Event::ReasoningDelta("a <|cl".into())]);
    for piece in pieces("⟪think⟩⟨response⟩") {
        assert_eq!(parser.push(piece), []);
    }
    assert_eq!(parser.push(Piece::Text(" ")), [Event::ContentDelta(" ".into())]);
}

/// What a stream has sent as reasoning it sends again as content.
#[test]
fn skipped_think_in_a_stream() {
    let found = events(Channel::Think, StopReason::Eos, pieces("a⟪response⟩⟪message⟩■"));
    let skipped = Event::Error(k3_xtml::ReplyError::SkippedThink);
    let content = Event::ContentDelta("a".into());
    assert_eq!(
        found,
        [Event::ReasoningDelta("a".into()), skipped, content, Event::Finish(FinishReason::Stop)]
    );
}

#[test]
fn long_values() {
    // 1 MiB in pieces of one byte, and a call of thousands of hostile pieces.
    for (unit, count) in [("x", 1 << 20), ("\"\\\n😀<|close|>", 5000)] {
        let mut notation = pieces("⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"k\" type=\"string\"⟩");
        notation.extend(std::iter::repeat_n(Piece::Text(unit), count));
        notation.extend(pieces("⟪argument⟩⟪call⟩⟪tools⟩⟪message⟩■"));
        let reply = read(Channel::Think, StopReason::Eos, notation);
        assert_eq!(reply.errors, []);
        let arguments: serde_json::Value = serde_json::from_str(&reply.tool_calls[0].arguments).unwrap();
        assert_eq!(arguments["k"], unit.repeat(count));
    }
    let nested = "[".repeat(1 << 20);
    let notation = format!(
        "⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"k\" type=\"array\"⟩{nested}⟪argument⟩⟪call⟩■"
    );
    let reply = read(Channel::Think, StopReason::Eos, pieces(&notation));
    assert_eq!(reply.tool_calls[0].arguments, format!("{{\"k\": \"{nested}\"}}"));
    // Thousands of keys, each twice.
    let argument = |i: usize| format!("⟨argument key=\"{}\"⟩{i}⟪argument⟩", i % 20_000);
    let many: String = (0..40_000).map(argument).collect();
    let notation = format!("⟪think⟩⟨tools⟩⟨call tool=\"f\"⟩{many}⟪call⟩■");
    let reply = read(Channel::Think, StopReason::Eos, pieces(&notation));
    assert!(reply.tool_calls[0].arguments.starts_with("{\"0\": \"20000\", \"1\": \"20001\", "));
    // A long tail of what could be markers, in text mode.
    let text = "<|".repeat(1 << 19);
    assert_eq!(read_text(Channel::Response, StopReason::Stop, [text.as_str(), "."]).content, text + ".");
}
