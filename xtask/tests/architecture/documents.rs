//! Documents name what exists: files, sections, examples, and the commands that are run.

use std::fs;
use std::path::{Path, PathBuf};

use xtask::ci::STEPS;

use super::root;

/// Files of the repository with one of these endings, relative to its root.
pub(super) fn files(endings: &[&str]) -> Vec<PathBuf> {
    fn visit(root: &Path, dir: &Path, found: &mut Vec<PathBuf>) {
        for path in fs::read_dir(root.join(dir)).unwrap().map(|entry| entry.unwrap().path()) {
            let local = path.strip_prefix(root).unwrap();
            if !path.is_dir() {
                found.push(local.into());
            } else if local != "target" && local != ".git" {
                visit(root, local, found);
            }
        }
    }
    let mut found = Vec::new();
    visit(&root(), Path::new(""), &mut found);
    found.retain(|file| file.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending)));
    assert!(!found.is_empty());
    found
}

fn read(file: &Path) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

/// What looks like a path in `text`.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    text.split(move |c| !is_part(c)).map(|word| word.trim_end_matches(['.', '/', '-']))
}

/// Where `[text](target)` points.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|link| !link.contains("://"))
}

/// `text` of `file` with the lines that belong together joined: of Rust only what stands in comments. What wraps is found
/// as if it stood on one line.
fn prose(file: &Path, text: &str) -> String {
    let is_rust = file.extension().is_some_and(|e| e == "rs");
    let mut joined = String::new();
    for line in text.lines() {
        let line = line.trim();
        let comment = line.split_once("//").map(|(_, comment)| comment);
        let comment = comment.map(|comment| comment.trim_start_matches(['/', '!']).trim_start());
        let begins = line.starts_with("//") || !is_rust;
        match comment.filter(|_| is_rust).or((!is_rust).then_some(line)) {
            Some(more) if begins && !more.is_empty() => joined.extend([" ", more]),
            other => joined.extend(["\n", other.unwrap_or_default()]),
        }
    }
    joined
}

#[test]
fn files_in_documents_and_comments_exist() {
    let sources = files(&["rs"]);
    let own = Path::new("xtask/tests/architecture/documents.rs");
    for document in files(&["md", "rs"]).into_iter().filter(|file| file != own) {
        let text = read(&document);
        let is_rust = document.extension().is_some_and(|e| e == "rs");
        let text = if is_rust { prose(&document, &text) } else { text };
        let place = document.display();
        for path in paths(&text) {
            let begins =
                ["crates/", "xtask/", "docs/", "fixtures/", ".ci/"].iter().any(|dir| path.starts_with(dir));
            assert!(!begins || root().join(path).exists(), "{place} names {path}, which does not exist");
            let is_source = Path::new(path).extension().is_some_and(|e| e == "rs");
            let is_there = || sources.iter().any(|file| file.ends_with(path));
            assert!(
                !is_source || is_there(),
                "{place} names {path}; where it is, from the root on, is missing or wrong"
            );
        }
        for link in links(&text).filter(|link| !link.is_empty() && !is_rust) {
            let target = root().join(document.parent().unwrap()).join(link);
            assert!(target.exists(), "{place} links to {link}, which does not exist");
        }
    }
}

/// The sections of a document, as their headings are numbered.
fn sections(document: &str) -> Vec<&str> {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    let numbers = headings.filter_map(|line| line.trim_start_matches('#').split_whitespace().next());
    numbers
        .map(|number| number.trim_end_matches('.'))
        .filter(|n| n.starts_with(|c: char| c.is_ascii_digit()))
        .collect()
}

/// Numbers at the beginning of `text`, as in " 3.1, 4 and 9 to 11", and what follows them.
fn numbers(text: &str) -> (Vec<&str>, &str) {
    let joints = [" ", ", ", ", and ", " and ", " to "];
    let (mut found, mut rest) = (Vec::new(), text);
    while let Some((number, after)) = joints.iter().find_map(|joint| number(rest.strip_prefix(joint)?)) {
        found.push(number);
        rest = after;
    }
    (found, rest)
}

/// The sections of `name` that `text` cites: the numbers behind the file's name, as in "`docs/xtml.md` 3.1, 4 and 9 to 11".
fn cited<'t>(text: &'t str, name: &str) -> Vec<&'t str> {
    let full = format!("docs/{name}");
    let mut found = Vec::new();
    let mut done = 0;
    for (at, _) in text.match_indices(name) {
        // The target of a link whose text was seen.
        if at < done || text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '-' || c == '_') {
            continue;
        }
        let mut rest = &text[at + name.len()..];
        let closing = ["`", "]", "(", ")", full.as_str(), name];
        while let Some(after) = closing.iter().find_map(|part| rest.strip_prefix(part)) {
            rest = after;
        }
        let (more, rest) = numbers(rest);
        found.extend(more);
        done = text.len() - rest.len();
    }
    found
}

/// A number such as `3.1` that `text` begins with, and what follows it.
fn number(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].trim_end_matches('.');
    let after = &text[number.len()..];
    let is_word = after.starts_with(|c: char| c.is_alphanumeric() || c == '-');
    (number.starts_with(|c: char| c.is_ascii_digit()) && !is_word).then_some((number, after))
}

/// `text` with each line that goes on from the one before joined to it, and without what marks comments. A numbered item
/// of a list does not go on.
fn wrapped(text: &str) -> String {
    let mut joined = String::new();
    for line in text.lines() {
        let line = line.trim().trim_end_matches('\\').trim_end();
        let line =
            ["///", "//!", "//", "#"].iter().find_map(|mark| line.strip_prefix(mark)).unwrap_or(line).trim();
        let item = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let is_item = item.len() < line.len() && item.starts_with(". ");
        joined.extend([if line.is_empty() || is_item { "\n" } else { " " }, line]);
        if line.is_empty() {
            joined.push('\n');
        }
    }
    joined
}

/// The numbers in `[8.2, 8.3]` that are no links.
fn bracketed(text: &str) -> Vec<&str> {
    let lists = text.split('[').skip(1).filter_map(|rest| rest.split_once(']'));
    let lists = lists.filter(|(list, after)| {
        !after.starts_with('(')
            && list.split(", ").all(|n| number(n).is_some_and(|(_, rest)| rest.is_empty()))
    });
    lists.flat_map(|(list, _)| list.split(", ")).collect()
}

/// The numbers behind "section" and "sections".
fn unnamed(text: &str) -> Vec<&str> {
    let words = text.match_indices("ection").filter(|(at, _)| {
        let before = text[..*at].strip_suffix(['s', 'S']);
        before.is_some_and(|before| !before.ends_with(char::is_alphabetic))
    });
    words
        .flat_map(|(at, word)| {
            let rest = &text[at + word.len()..];
            numbers(rest.strip_prefix('s').unwrap_or(rest)).0
        })
        .collect()
}

#[test]
fn cited_sections_exist() {
    let documents: Vec<(String, String)> = files(&["md"])
        .iter()
        .filter(|file| file.starts_with("docs"))
        .map(|file| (file.file_name().unwrap().to_str().unwrap().to_owned(), read(file)))
        .filter(|(_, text)| !sections(text).is_empty())
        .collect();
    let mut count = 0;
    for file in files(&["rs", "md", "py", "sh", "toml"]) {
        if file.ends_with("architecture/documents.rs") {
            continue;
        }
        let text = read(&file);
        let wrapped = wrapped(&text);
        for (name, document) in &documents {
            let sections = sections(document);
            for number in cited(&wrapped, name) {
                assert!(sections.contains(&number), "{}: {name} has no section {number}", file.display());
                count += 1;
            }
        }
    }
    assert!(count > 100, "{count} citations found");
}

/// Citations that leave the document out: `[8.2, 8.3]` on the ways of a token and of an expert through the files, and
/// `Sections 8.2 and 8.3` in the forward pass.
#[test]
fn sections_of_the_arithmetic_exist() {
    let arithmetic = read("docs/arithmetic.md".as_ref());
    let sections = sections(&arithmetic);
    let check = |place: &str, found: &[&str]| {
        assert!(!found.is_empty(), "{place} cites nothing");
        for number in found {
            assert!(sections.contains(number), "{place}: docs/arithmetic.md has no section {number}");
        }
    };
    let architecture = read("docs/architecture.md".as_ref());
    for heading in ["The life of a token", "The life of an expert"] {
        let text = architecture.split(&format!("\n## {heading}\n")).nth(1).unwrap();
        check(heading, &bracketed(text.split("\n## ").next().unwrap()));
    }
    let forward = Path::new("crates/k3-graph/src/forward.rs");
    check("forward.rs", &unnamed(&prose(forward, &read(forward))));
}

#[test]
fn rust_files_stay_below_600_lines() {
    for file in files(&["rs"]) {
        let lines = read(&file).lines().count();
        assert!(lines < 600, "{} has {lines} lines", file.display());
    }
}

/// Lines that are neither blank nor comments.
fn lines_of_code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"))
}

#[test]
fn examples_are_short_and_the_readme_shows_them() {
    let readme = read("README.md".as_ref());
    let mut shown =
        readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap().lines();
    let examples: Vec<(PathBuf, String)> = files(&["rs"])
        .into_iter()
        .filter(|file| file.components().nth(2).is_some_and(|part| part.as_os_str() == "examples"))
        .map(|file| (file.clone(), read(&file)))
        .collect();
    for (file, text) in &examples {
        assert!(readme.contains(file.to_str().unwrap()), "README.md does not list {}", file.display());
        let lines = lines_of_code(text).filter(|line| !line.starts_with("use ")).count();
        assert!(lines <= 30, "{} has {lines} lines of code beside imports", file.display());
        let name = file.file_stem().unwrap().to_str().unwrap();
        let head = text.lines().next().unwrap_or_default();
        let is_told = head.contains("`cargo run ") && head.contains(&format!(" --example {name} "));
        assert!(is_told, "the first line of {} is not how to run it: {head}", file.display());
    }
    let is_example = |line: &str| examples.iter().any(|(_, text)| text.contains(line.trim()));
    assert_eq!(shown.find(|line| !is_example(line)), None, "a line of README.md is in no example");
}

/// What the README and CI tell to run is one list.
#[test]
fn the_commands_of_the_readme_are_what_ci_runs() {
    let script = read(".ci/run".as_ref());
    assert!(script.contains("--package xtask -- ci "), "{script}");
    let readme = read("README.md".as_ref());
    for command in ["cargo test --workspace", "cargo xtask selfcheck"] {
        assert!(readme.contains(&format!("\n    {command} ")), "README.md does not tell to run {command}");
        assert!(STEPS.iter().any(|step| step.to_string().starts_with(command)), "CI does not run {command}");
    }
}

#[test]
fn citations_without_a_name_are_found() {
    let check = |text: &str, expected: &[&str]| assert_eq!(bracketed(text), expected, "{text}");
    check("`Pass::moe` [8.2, 8.3]: and [5] (`kda.rs`)", &["8.2", "8.3", "5"]);
    check("[3](x.md) [x.md](x.md) [out, in]", &[]);
    let check = |text: &str, expected: &[&str]| assert_eq!(unnamed(text), expected, "{text}");
    check("Section 6, and 7 where there is one. The last lines of section 2, for", &["6", "7", "2"]);
    check("Sections 8.2 and 8.3. Intersection 4", &["8.2", "8.3"]);
}

#[test]
fn lines_that_belong_together_are_joined() {
    let check = |file: &str, text: &str, expected: &str| {
        assert_eq!(prose(file.as_ref(), text).split_whitespace().collect::<Vec<_>>().join(" "), expected);
    };
    check("a.rs", "//! `docs/x.md`\n//! 7\nlet docs = 1; // docs/y.md\n", "`docs/x.md` 7 docs/y.md");
    check("a.rs", "let a = b;", "");
    let check = |text: &str, expected: &[&str]| assert_eq!(cited(&wrapped(text), "x.md"), expected, "{text}");
    check("//! (`docs/x.md` 6.2, `docs/x.md`\n//! 7 and 8)", &["6.2", "7", "8"]);
    check("    /// docs/x.md\n    /// 7,\n    /// 8", &["7", "8"]);
    check("# docs/x.md\n# 7", &["7"]);
    check("as docs/x.md\n7 says", &["7"]);
    check("say(\"docs/x.md \\\n    7\")", &["7"]);
    check("see docs/x.md\n7. And then", &[]);
    check("see docs/x.md\n\n7 more", &[]);
}

#[test]
fn citations_are_found() {
    let check = |text: &str, expected: &[&str]| assert_eq!(cited(text, "xtml.md"), expected, "{text}");
    check("`docs/xtml.md` 9", &["9"]);
    check("docs/xtml.md 3.1.", &["3.1"]);
    check("`docs/xtml.md` 3, 4.2 and 9 to 11, on tools", &["3", "4.2", "9", "11"]);
    check("[docs/xtml.md](docs/xtml.md) 9 and more", &["9"]);
    check("[xtml.md](xtml.md) 14", &["14"]);
    check("xtml.md 4-bit, xtml.md 16th", &[]);
    check("docs/xtml.md, rule 3", &[]);
    check("other-xtml.md 3", &[]);
}
