//! The program as a user calls it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn small() -> String {
    fixtures().join("tokenizer/small").display().to_string()
}

/// Runs `k3 ARGS` with `input` on stdin.
fn k3(args: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_k3"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_ref()).unwrap();
    child.wait_with_output().unwrap()
}

/// Stdout of a run that must succeed.
#[track_caller]
fn ok(args: &[&str], input: &str) -> String {
    let output = k3(args, input);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Stderr of a run that must fail, and write nothing to stdout.
#[track_caller]
fn fails(args: &[&str], input: impl AsRef<[u8]>) -> String {
    let output = k3(args, input);
    assert!(!output.status.success(), "{args:?} succeeded");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn inspect_tells_the_variants_apart() {
    let of = |name: &str| ok(&["inspect", &fixtures().join(name).display().to_string()], "");
    let (k3, k31) = (of("tiny-k3"), of("tiny-k31"));
    assert!(k3.contains("Kimi K3 in") && k3.contains("no dsa_config"), "{k3}");
    assert!(k31.contains("Kimi K3.1 Pro in") && k31.contains("20 indexer tensors"), "{k31}");
    assert!(k31.contains("KDA 1-3 5-7 9-11; full attention 4 8 12-13; dense MLP 1; experts 2-13"), "{k31}");
}

#[test]
fn inspect_says_why_a_folder_is_refused() {
    assert!(fails(&["inspect", "/nonexistent"], "").contains("does not exist"));
    let dir = tempfile::tempdir().unwrap();
    assert!(fails(&["inspect", &dir.path().display().to_string()], "").contains("it is empty"));
}

#[test]
fn text_goes_to_ids_and_back() {
    let text = "Grüße, 世界! \t<|open|>message<|sep|>\r\n  it's 12345 👩‍🚀";
    let ids = ok(&["tokenize", &small()], text);
    assert!(
        ids.split_whitespace().all(|id| id.parse::<u32>().unwrap() < 768),
        "text gives no control id: {ids}"
    );
    assert_eq!(ok(&["detokenize", &small()], &ids), text);

    let lines = ["a\nb", "", "世"].map(|text| serde_json::to_string(text).unwrap()).join("\n");
    let arrays = ok(&["tokenize", &small(), "--json"], &lines);
    assert_eq!(arrays.lines().count(), 3);
    assert_eq!(ok(&["detokenize", &small(), "--json"], &arrays).trim_end(), lines);
}

#[test]
fn bad_ids_are_refused_by_name() {
    assert!(fails(&["detokenize", &small()], "1 x").contains("\"x\""));
    assert!(fails(&["detokenize", &small()], "1024").contains("1024"));
    // Lines before the bad one have been answered.
    let output = k3(&["tokenize", &small(), "--json"], "\"a\"\n[1]");
    assert!(!output.status.success() && output.stdout == b"[64]\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 2"));
}

fn weather() -> String {
    json!({
        "messages": [
            {"role": "user", "content": "Weather in Lisbon?"},
            {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\":\"Lisbon\"}"}}
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
        ],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
        "reasoning_effort": "low",
    })
    .to_string()
}

#[test]
fn a_prompt_in_all_three_forms() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("request.json");
    std::fs::write(&file, weather()).unwrap();
    let file = file.display().to_string();
    let segments: Vec<Value> = serde_json::from_str(&ok(&["prompt", &file], "")).unwrap();
    let joined: String = segments.iter().map(|s| s["text"].as_str().unwrap()).collect();
    assert_eq!(ok(&["prompt", &file, "--as", "text"], ""), joined.clone() + "\n");
    assert!(joined.contains("<|open|>call tool=\"get_weather\" index=\"1\"<|sep|>"), "{joined}");
    assert!(
        joined.contains("<|open|>message role=\"tool\" tool=\"get_weather\" index=\"1\"<|sep|>18 C"),
        "{joined}"
    );
    assert!(joined.contains("thinking_effort=low"), "{joined}");

    // The same from stdin; control segments are the only control ids, in their places.
    let ids = ok(&["prompt", "-", "--as", "ids", "--tokenizer", &small()], &weather());
    let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
    let controls = segments.iter().filter(|s| s["control"] == true).count();
    assert_eq!(ids.iter().filter(|id| **id >= 768).count(), controls);
}

#[test]
fn the_entry_points_of_the_vendor_differ() {
    let request = r#"{"messages":[{"role":"user","content":"Hello"}]}"#;
    let of = |entry| ok(&["prompt", "-", "--as", "text", "--entry", entry], request);
    assert!(of("served").contains("thinking_effort=max"));
    assert!(!of("bare").contains("thinking_effort"));
}

/// Every refusal begins with its name.
#[test]
fn refused_requests() {
    let check = |request: Value, name: &str| {
        let error = fails(&["prompt", "-"], request.to_string());
        assert!(error.starts_with(&format!("error: {name}: ")), "{error}");
    };
    let message = |message: Value| json!({ "messages": [message] });
    check(json!({"messages": 1}), "messages_not_list");
    check(message(json!("x")), "message_not_object");
    check(message(json!({"role": "alien", "content": "x"})), "unknown_role");
    check(
        message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
        "image_not_supported",
    );
    check(
        json!({"messages": [], "chat_template_kwargs": {"thinking_effort": "medium"}}),
        "unsupported_thinking_effort",
    );
}

#[test]
fn a_reply_is_parsed_whole_and_as_a_stream() {
    let chunks = json!([
        "Hm.",
        "<|close|>",
        "think",
        "<|sep|>",
        "<|open|>",
        "response",
        "<|sep|>",
        "4",
        "<|close|>",
        "response",
        "<|sep|>",
        "<|close|>",
        "message",
        "<|sep|>",
        "<|end_of_msg|>"
    ])
    .to_string();
    let whole: Value = serde_json::from_str(&ok(&["parse"], &chunks)).unwrap();
    assert_eq!(
        whole,
        json!({"reasoning_content": "Hm.", "content": "4", "tool_calls": [], "finish_reason": "stop", "errors": []})
    );
    let events: Vec<Value> =
        ok(&["parse", "--stream"], &chunks).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        events,
        [json!({"reasoning_content": "Hm."}), json!({"content": "4"}), json!({"finish_reason": "stop"})]
    );
    let cut: Value = serde_json::from_str(&ok(&["parse", "--stop", "length"], r#"["Hm"]"#)).unwrap();
    assert_eq!(cut["finish_reason"], "length");
    assert!(fails(&["parse"], "{}").contains("JSON array"));
}

/// tiny-k31 has 512 ids: the single bytes and the 256 control slots, the smallest vocabulary of the released layout.
fn tiny_with_bytes() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixtures().join("tiny-k31")).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let ranks = std::fs::read_to_string(fixtures().join("tokenizer/small/tiktoken.model")).unwrap();
    let bytes = ranks.lines().take(256).collect::<Vec<_>>().join("\n") + "\n";
    std::fs::write(dir.path().join("tiktoken.model"), bytes).unwrap();
    let names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"];
    let named: serde_json::Map<_, _> = names
        .iter()
        .enumerate()
        .map(|(i, n)| ((256 + i).to_string(), json!({"content": n, "special": true})))
        .collect();
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        json!({"added_tokens_decoder": named}).to_string(),
    )
    .unwrap();
    dir
}

#[test]
fn a_chat_request_runs_end_to_end() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let args = ["generate", &dir, "--chat", "-", "--max-tokens", "20", "--json", "--seed", "3"];
    let run = || ok(&args, &weather());
    let lines = run();
    let whole: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(whole["usage"]["completion_tokens"], 20, "{whole}");
    assert_eq!(whole["finish_reason"], "length");
    let joined: String = lines
        .lines()
        .filter_map(|l| {
            serde_json::from_str::<Value>(l).ok()?["reasoning_content"].as_str().map(str::to_owned)
        })
        .collect();
    assert!(joined.ends_with(whole["reasoning_content"].as_str().unwrap()), "deltas join to the whole");
    assert_eq!(run(), lines, "the same seed gives the same reply");

    let output = k3(&["generate", &dir, "--prompt", "hi", "--max-tokens", "3"], "");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("finish_reason length") && told.contains("completion 3"), "{told}");
}

#[test]
fn ids_need_no_tokenizer() {
    let dir = fixtures().join("tiny-k31").display().to_string();
    let args =
        ["generate", &dir, "--ids", "5,6,7", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"];
    let ids = ok(&args, "");
    assert_eq!(ids.split_whitespace().count(), 4, "{ids}");
    assert!(fails(&["generate", &dir, "--prompt", "hi"], "").contains("tiktoken.model"));
    assert!(fails(&["generate", &dir, "--ids", "512"], "").contains("512"));
    assert!(fails(&["generate", &dir, "--ids", "5", "--top-p", "0"], "").contains("top_p"));
}

/// Fields of a request are honoured, over the flags, or refused by name before anything is loaded.
#[test]
fn a_request_decides_about_its_generation() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let with = |field: &str, value: Value| {
        let mut request = json!({"messages": [{"role": "user", "content": "hi"}]});
        request[field] = value;
        request.to_string()
    };
    let args = ["generate", &dir, "--chat", "-", "--max-tokens", "9", "--json"];
    let lines = ok(&args, &with("max_tokens", json!(2)));
    let whole: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(whole["usage"]["completion_tokens"], 2);
    for (field, value) in [("n", json!(3)), ("stop", json!(["e"])), ("tool_choice", json!("banana"))] {
        assert!(fails(&args, with(field, value)).contains(field));
    }
    assert!(fails(&args, with("top_p", json!(2))).contains("top_p"));
    // The encoder's refusals keep their names, and none of this has printed the banner of a loaded model.
    let error = fails(&args, with("messages", json!([{"role": "alien", "content": ""}])));
    assert!(error.starts_with("error: unknown_role: "), "{error}");
    let no_reply = with("chat_template_kwargs", json!({"add_generation_prompt": false}));
    assert!(fails(&args, &no_reply).contains("add_generation_prompt"));
}

#[test]
fn arguments_of_generate() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    // Text may begin with a hyphen.
    ok(&["generate", &dir, "--prompt", "- buy milk", "--max-tokens", "1"], "");
    assert!(
        fails(&["generate", &dir, "--prompt", "hi", "--temperature", "-1"], "").contains("temperature is -1")
    );
    assert!(fails(&["generate", &dir, "--ids", "1", "--json"], "").contains("--json"));
    assert!(fails(&["generate", &dir, "--ids", "1", "--tokenizer", &dir], "").contains("--tokenizer"));
    let both = fails(&["generate", &dir, "--ids", "1", "--chunk", "9", "--activation-budget", "1GB"], "");
    assert!(both.contains("--activation-budget"), "{both}");
    assert!(fails(&["generate", &dir, "--raw", "hi", "--tokenizer", &small()], "").contains("1024"));
    assert!(fails(&["generate", &dir, "--raw", ""], "").contains("there are no tokens"));
    let long = "x".repeat(5000);
    let error = fails(&["generate", &dir, "--raw", &long], "");
    assert!(error.contains(": 5000 tokens do not fit the model's context of 4096"), "{error}");
}

/// The help of what a new user runs first fits a terminal of 80 columns, and no example breaks.
#[test]
fn help_fits_a_terminal() {
    for command in ["chat", "generate"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_k3")).args([command, "--help"]).env("COLUMNS", "80").output();
        let help = String::from_utf8(output.unwrap().stdout).unwrap();
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let (_, examples) = help.split_once("Examples:\n").unwrap();
        for line in examples.lines() {
            assert!(line.starts_with("  k3 ") || line.starts_with("  printf "), "{line:?}");
        }
    }
}

/// Bytes that are no text are refused where they stand, by every command that reads text.
#[test]
fn input_that_is_no_text() {
    let check = |args: &[&str], input: &[u8], place: &str| {
        let error = fails(args, input);
        assert!(error.contains(place) && error.contains("expected UTF-8 text"), "{args:?}: {error}");
    };
    let small = small();
    let second = "line 2, byte offset 1 (4 of the whole input)";
    check(&["tokenize", &small], b"ab\nc\xff", second);
    check(&["detokenize", &small], b"12\n3\xff", second);
    check(&["tokenize", &small, "--json"], b"  \n\"\xff\"", second);
    check(&["detokenize", &small, "--json"], b"  \n[\xff]\n", second);
    check(&["prompt", "-"], b"{}\n \xff", second);
    check(&["parse"], b"[]\n \xff", second);
    check(&["generate", "--chat", "-"], b"{}\n \xff", second);

    let model = tiny_with_bytes();
    let args = ["chat", &model.path().display().to_string(), "--max-tokens", "1"];
    check(&args, b"\xe9\n", "line 1, byte offset 0 (0 of the whole input)");
    let output = k3(&args, b"Hello\nbye \xff\nnever read\n");
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{told}");
    assert_eq!(told.lines().filter(|l| l.starts_with("[prompt ")).count(), 1, "{told}");
    assert!(
        told.contains("error: reading stdin: line 2, byte offset 4 (10 of the whole input): expected UTF-8"),
        "{told}"
    );
}

/// A reader that goes away ends the run early and quietly; a logger that goes away does not end it at all.
#[cfg(unix)]
#[test]
fn closed_pipes() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let shell = |redirect: &str| {
        let program = env!("CARGO_BIN_EXE_k3");
        let script =
            format!("'{program}' generate '{dir}' --ids 5,6 --max-tokens 40 --ignore-eos {redirect}");
        Command::new("bash").args(["-c", &format!("{script}; exit ${{PIPESTATUS[0]}}")]).output().unwrap()
    };
    assert!(shell("2>&1 >/dev/null | true").status.success());
    let out = shell("2> >(true)");
    assert!(out.status.success());
    assert_eq!(String::from_utf8_lossy(&out.stdout).split_whitespace().count(), 40);
    assert!(shell("| head -c 1").status.success());
}

/// The lines on stdout and the text on stderr of a conversation that must succeed.
#[track_caller]
fn talk(args: &[&str], input: &str) -> (String, String) {
    let output = k3(&[&["chat"], args].concat(), input);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {told}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), told)
}

#[test]
fn a_conversation_through_pipes() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let args = [&dir, "--max-tokens", "1", "--thinking", "off", "--system", "Be brief.", "--seed", "3"];
    let input = "Hello\n\n/thinkin off\n/reset all\n/empty\n/help\nAnd now?\\\nTwo lines\n/reset\nHello";
    let (out, told) = talk(&args, input);
    let turns: Vec<&str> = told.lines().filter(|l| l.starts_with("[prompt ")).collect();
    let [first, second, third] = turns.try_into().unwrap();
    assert!(
        first.contains("tokens, 0 of them read before") && first.contains("cut by --max-tokens"),
        "{told}"
    );
    // The second prompt begins with the first, which need not be read again; the third has forgotten both.
    let prompt = |line: &str| line.split_whitespace().nth(1).unwrap().to_owned();
    assert!(second.contains(&format!(", {} of them read before", prompt(first))), "{told}");
    assert_eq!(prompt(third), prompt(first));
    assert!(third.contains(", 0 of them read before"), "{told}");
    assert!(told.contains("/thinkin is no command") && told.contains("/effort low|high|max|unset"), "{told}");
    assert!(told.contains("/reset takes no argument") && told.contains("no tool was called"), "{told}");
    // One token has no pace.
    assert!(first.contains("; reply 1 tokens; cut"), "{told}");
    // The same seed gives the same conversation, and no prompt is written for a pipe.
    assert!(!out.is_empty());
    assert_eq!(talk(&args, input).0, out);
    assert!(!told.contains("> "), "{told}");
}

/// What cannot be run is told and taken back, and the conversation goes on.
#[test]
fn a_conversation_survives_errors() {
    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let input = format!("short\n{}\nshort\n/quit\nnever read\n", "x".repeat(5000));
    let (_, told) = talk(&[&dir, "--max-tokens", "1", "--thinking", "off"], &input);
    assert!(told.contains("error: the prompt cannot be run") && told.contains("4096"), "{told}");
    assert!(!told.contains("already consumed"), "{told}");
    let turns: Vec<&str> = told.lines().filter(|l| l.starts_with("[prompt ")).collect();
    assert_eq!(turns.len(), 2, "{told}");
    assert!(!turns[1].contains(", 0 of them read before"), "{told}");
}

#[test]
fn tools_are_checked_before_the_model() {
    let file = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    };
    let with = |text: &str| {
        let file = file(text);
        fails(&["chat", "/nonexistent", "--tools", &file.path().display().to_string()], "")
    };
    assert!(with("[1]").contains("expected a list of objects"));
    let twice = r#"[{"function": {"name": "a"}}, {"function": {"name": "a"}}]"#;
    assert!(with(twice).contains("tools[1].function.name is `a`, as that of tools[0]"));
    assert!(with("{").contains("reading the tools"));
    assert!(
        fails(&["chat", "/nonexistent", "--tools", "/nonexistent/tools.json"], "")
            .contains("reading the tools")
    );
    assert!(with("[]").contains("does not exist"), "good tools, no model");

    let model = tiny_with_bytes();
    let dir = model.path().display().to_string();
    let tools = file(r#"{"tools": [{"type": "function", "function": {"name": "get_weather"}}]}"#);
    let (_, told) = talk(&[&dir, "--tools", &tools.path().display().to_string()], "");
    assert!(told.contains("tools: get_weather;"), "{told}");
}

const WEATHER: &str = r#"{"city":"Paris","sky":"light rain","temp":17}"#;

/// A conversation with the demonstration model: what it says, whether that contains `answer`, how many replies there are,
/// and what else is told.
#[track_caller]
fn check_tools(input: &str, replies: usize, answer: &str, words: &[&str]) {
    let (out, told) = talk(&[], input);
    assert_eq!(told.lines().filter(|l| l.starts_with("[prompt ")).count(), replies, "{out}{told}");
    assert!(out.contains(answer), "{out}{told}");
    for word in words {
        assert!(told.contains(word), "`{word}` is not in: {told}");
    }
}

#[test]
fn results_of_tools() {
    let paris = "What is the weather in Paris?";
    // The last line needs no end, and a backslash there promises nothing.
    check_tools(&format!("{paris}\n{WEATHER}"), 2, "light rain", &[]);
    check_tools(&format!("{paris}\n{WEATHER}\\"), 2, "light rain", &[]);
    assert_eq!(talk(&[], "Who are you?\\").0, talk(&[], "Who are you?\n").0);
    // An empty line is no result, a command is none either, and an empty result is said.
    let asked = ["an empty line is no result", "/quit takes no argument"];
    check_tools(&format!("{paris}\n\n/quit now\n{WEATHER}\n"), 2, "light rain", &asked);
    check_tools(&format!("{paris}\n/empty\n"), 2, "-> get_weather", &[]);
    // What was given before the input ended is answered to; without a result there is nothing to answer.
    let ended = r#"the input ended before the result of get_weather {"city": "Paris"}, and the conversation"#;
    check_tools(&format!("{paris}\n"), 1, "-> get_weather", &[ended]);
    let both = "What is the weather in Paris and in Rome?";
    let ended = r#"the input ended before the result of get_weather {"city": "Rome"}, so the model answers"#;
    check_tools(&format!("{both}\n{WEATHER}"), 2, "light rain", &[ended]);
}

/// What goes through a pipe is the answer alone; reasoning ends before anything else is told.
#[test]
fn a_reply_and_its_reasoning_are_apart() {
    let events = ok(&["generate", "--prompt", "Who are you?", "--json"], "");
    let whole: Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    let output = k3(&["generate", "--prompt", "Who are you?"], "");
    let (out, told) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(out, format!("{}\n", whole["content"].as_str().unwrap()));
    let reasoning = whole["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty() && told.lines().any(|line| line == reasoning), "{told}");

    let tool = r#"{"type":"function","function":{"name":"get_weather","description":"The weather in a city","parameters":
        {"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}"#;
    let request = format!(
        r#"{{"messages":[{{"role":"user","content":"What is the weather in Paris?"}}],"tools":[{tool}],"reasoning_effort":"low"}}"#
    );
    let call: Value = serde_json::from_str(&ok(&["generate", "--chat", "-"], &request)).unwrap();
    assert_eq!(call["tool_call"]["name"], "get_weather", "{call}");
}

/// Without a folder the demonstration model runs, and says what it is. A person at the other end of the pipe plays its
/// tools.
#[test]
fn the_demonstration_model() {
    let (out, told) = talk(&[], &format!("Who are you?\nWhat is the weather in Paris?\n{WEATHER}\n"));
    assert!(told.starts_with("demonstration model (nano), not Kimi: "), "{told}");
    assert!(told.contains("temperature 0,") && told.contains("tools: get_weather, get_time;"), "{told}");
    let lines: Vec<&str> = out.lines().collect();
    let [who, call, answer] = lines.try_into().unwrap();
    assert!(who.contains("nano"), "{out}");
    assert_eq!(call, r#"-> get_weather {"city": "Paris"}"#);
    assert!(answer.contains("light rain") && answer.contains("Paris") && answer.contains("17"), "{out}");
    // All that was read or written before, but for the token that ended the message, is kept.
    let number = |line: &str, at: usize| line.split_whitespace().nth(at).unwrap().parse::<usize>().unwrap();
    let turns: Vec<&str> = told.lines().filter(|l| l.starts_with("[prompt ")).collect();
    for pair in turns.windows(2) {
        let written = pair[0].split("; reply ").nth(1).unwrap();
        assert_eq!(number(pair[1], 3), number(pair[0], 1) + number(written, 0) - 1, "{told}");
    }
    assert_eq!(turns.len(), 3);

    let output = k3(&["generate", "--prompt", "Who are you?"], "");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("nano"));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("demonstration model (nano), not Kimi: "));
}

/// What makes the result another one is said in the banner, in the statistics and beside the hash.
#[test]
fn routed_top_p_is_named_wherever_a_result_is() {
    let model = fixtures().join("tiny-k31").display().to_string();
    let run = |more: &[&str]| {
        let ids =
            ["generate", &model, "--ids", "5,6,7", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"];
        let output = k3(&[&ids[..], more].concat(), "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stderr).unwrap()
    };
    let (without, with) = (run(&[]), run(&["--routed-top-p", "0.5"]));
    assert!(!without.contains("routed top-p"), "{without}");
    assert!(with.contains("Kimi K3.1 Pro (routed top-p 0.5) on cpu-f32"), "{with}");
    assert!(with.contains("; experts (routed top-p 0.5): "), "{with}");
    let hash = with.lines().find(|line| line.starts_with("logits_hash ")).unwrap();
    assert!(hash.ends_with(" (routed top-p 0.5)"), "{hash}");
    for share in ["1.5", "0", "-1", "NaN", "half"] {
        let refused = fails(&["generate", &model, "--ids", "5", "--routed-top-p", share], "");
        assert!(refused.contains(share) && refused.contains("above 0 and at most 1"), "{refused}");
    }
}
