//! The rules of `docs/architecture.md`, as far as a program can see them: who depends on whom, what a crate does not
//! know, and where `unsafe` is. Beside it, what dependencies may be, and that documents tell the truth about files.

#[path = "architecture/dependencies.rs"]
mod dependencies;
#[path = "architecture/documents.rs"]
mod documents;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// A crate of the workspace, and what the architecture says of it.
struct Rule {
    name: &'static str,
    /// The crates of ours that it may depend on.
    below: &'static [&'static str],
    /// Other people's crates that it uses, beside those of its tests.
    outside: &'static [&'static str],
    /// Paths that its sources never name, tests of its own aside: what it does not know.
    unknown: &'static [&'static str],
}

/// Files that may name what the rest of their crate does not know: the number of cores is asked of the system.
const EXCEPTIONS: &[&str] = &["crates/k3-graph/src/cpu/topology.rs"];

/// From below. A crate may depend on rows above its own only.
const RULES: &[Rule] = &[
    Rule {
        name: "k3-quant",
        below: &[],
        outside: &["bytemuck", "bytes", "half", "thiserror"],
        unknown: &["std::fs", "std::io", "std::path", "std::net", "std::thread"],
    },
    Rule {
        name: "k3-xtml",
        below: &[],
        outside: &["thiserror"],
        unknown: &["std::fs", "std::io", "std::path", "std::net", "std::thread"],
    },
    Rule {
        name: "k3-tokenizer",
        below: &[],
        outside: &["base64", "hashbrown", "regex-automata", "serde", "serde_json", "thiserror", "tokenizers"],
        unknown: &["std::net", "std::thread"],
    },
    // Its repacker encodes; products are for those who compute.
    Rule {
        name: "k3-format",
        below: &["k3-quant"],
        outside: &[
            "blake3",
            "bytes",
            "half",
            "hashbrown",
            "memmap2",
            "regex-automata",
            "rustix",
            "safetensors",
            "serde",
            "serde_json",
            "thiserror",
        ],
        unknown: &["std::net", "k3_quant::cpu", "k3_quant::reference", "rayon"],
    },
    Rule {
        name: "k3-experts",
        below: &["k3-format", "k3-quant"],
        outside: &["blake3", "bytes", "thiserror", "tracing"],
        unknown: &["std::net", "k3_quant::cpu", "k3_quant::reference", "k3_quant::encode"],
    },
    Rule {
        name: "k3-graph",
        below: &["k3-experts", "k3-format", "k3-quant"],
        outside: &["rayon", "thiserror"],
        unknown: &["std::fs", "std::io", "std::path", "std::net", "k3_format::Checkpoint", "memmap2"],
    },
    Rule {
        name: "k3-runner",
        below: &["k3-experts", "k3-format", "k3-graph", "k3-tokenizer", "k3-xtml"],
        outside: &["blake3", "bytemuck", "rand_chacha", "safetensors", "thiserror", "tracing"],
        unknown: &["std::net", "axum", "hyper", "k3_graph::scalar"],
    },
    Rule {
        name: "k3-cli",
        below: &["k3-experts", "k3-format", "k3-graph", "k3-runner", "k3-tokenizer", "k3-xtml"],
        outside: &["anyhow", "clap", "serde_json", "tracing", "tracing-subscriber"],
        unknown: &["std::net"],
    },
    Rule {
        name: "xtask",
        below: &["k3-experts", "k3-format", "k3-graph", "k3-quant", "k3-runner", "k3-tokenizer", "k3-xtml"],
        outside: &[
            "anyhow",
            "blake3",
            "clap",
            "flate2",
            "half",
            "indicatif",
            "memmap2",
            "rand_chacha",
            "rayon",
            "rustix",
            "safetensors",
            "serde",
            "serde_json",
            "tempfile",
            "tracing-subscriber",
        ],
        unknown: &["std::net"],
    },
];

/// What libraries do not know besides: they hand out values and errors, and have no terminal to write to.
const TERMINAL: &[&str] = &[
    "print!",
    "println!",
    "eprint!",
    "eprintln!",
    "dbg!",
    "io::stdin",
    "io::stdout",
    "io::stderr",
    "IsTerminal",
];
/// Those that have.
const PROGRAMS: &[&str] = &["k3-cli", "xtask"];

/// Beginnings of the paths where `unsafe` may be: mapping of files, and instruction sets.
const UNSAFE: &[&str] =
    &["crates/k3-format/src/map.rs", "crates/k3-quant/src/cpu", "crates/k3-quant/src/encode"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

fn metadata(more: &[&str]) -> Value {
    let args = ["metadata", "--offline", "--format-version", "1"];
    let output = Command::new(env!("CARGO")).args(args).args(more).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Rust files under `dir`, the modules that are only compiled for tests left out.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            files.extend(sources(&entry));
        } else if entry.extension().is_some_and(|e| e == "rs")
            && entry.file_name().is_none_or(|n| n != "tests.rs")
        {
            files.push(entry);
        }
    }
    files
}

/// The code of a file: no comments, and nothing from its `mod tests` on.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    without_comments(text)
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Whether `code` names `path`, also as `use a::{b, c}` does on one line.
fn names(code: &str, path: &str) -> bool {
    let end = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    let begin = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let is_named = |word: &str, text: &str| {
        text.match_indices(word).any(|(at, _)| begin(&text[..at]) && end(&text[at + word.len()..]))
    };
    if is_named(path, code) {
        return true;
    }
    let Some((module, item)) = path.rsplit_once("::") else { return false };
    let list = format!("{module}::{{");
    code.match_indices(&list).any(|(at, _)| {
        let items = code[at + list.len()..].split(';').next().unwrap_or_default();
        is_named(item, items)
    })
}

#[test]
fn arrows_of_dependency_point_down() {
    let metadata = metadata(&["--no-deps"]);
    let packages = metadata["packages"].as_array().unwrap();
    let found: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    let ruled: BTreeSet<&str> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(found, ruled, "every crate has its rule here, and its paragraph in docs/architecture.md");
    for (at, rule) in RULES.iter().enumerate() {
        for below in rule.below {
            assert!(RULES[..at].iter().any(|r| r.name == *below), "{} is not below {}", below, rule.name);
        }
        let package = packages.iter().find(|p| p["name"] == rule.name).unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let name = dependency["name"].as_str().unwrap();
            // A crate may ask for a feature of its own in its tests.
            let is_itself = name == rule.name && dependency["kind"] == "dev";
            let allowed = !found.contains(name) || rule.below.contains(&name) || is_itself;
            assert!(allowed, "{} must not depend on {name} ({})", rule.name, dependency["kind"]);
        }
    }
}

#[test]
fn dependencies_from_outside_are_those_of_the_list() {
    let metadata = metadata(&["--no-deps"]);
    let packages = metadata["packages"].as_array().unwrap();
    let ours: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    for package in packages {
        let rule = RULES.iter().find(|rule| package["name"] == rule.name).unwrap();
        let dependencies = package["dependencies"].as_array().unwrap().iter().filter(|d| d["kind"] != "dev");
        let found: BTreeSet<&str> = dependencies.map(|d| d["name"].as_str().unwrap()).collect();
        let found: Vec<&str> = found.difference(&ours).copied().collect();
        assert_eq!(found, rule.outside, "{}: a new dependency needs a case", rule.name);
    }
}

#[test]
fn crates_do_not_know_what_they_need_not() {
    let metadata = metadata(&["--no-deps"]);
    for package in metadata["packages"].as_array().unwrap() {
        let rule = RULES.iter().find(|rule| package["name"] == rule.name).unwrap();
        let dir = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().join("src");
        let files = sources(&dir);
        assert!(!files.is_empty(), "{}", dir.display());
        for file in files.into_iter().filter(|file| !EXCEPTIONS.iter().any(|known| file.ends_with(known))) {
            let code = code(&file);
            let is_program = PROGRAMS.contains(&rule.name);
            for path in rule.unknown.iter().chain(TERMINAL.iter().filter(|_| !is_program)) {
                assert!(!names(&code, path), "{}: {} does not know {path}", file.display(), rule.name);
            }
        }
    }
}

/// How often `unsafe` stands in `code`, lints and strings aside.
fn count_unsafe(code: &str) -> usize {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '"';
    let is_whole =
        |at: usize| !code[..at].ends_with(is_part) && !code[at + "unsafe".len()..].starts_with(is_part);
    code.match_indices("unsafe").filter(|(at, _)| is_whole(*at)).count()
}

/// Files and numbers in the table of `docs/unsafe.md`.
fn documented_unsafe() -> BTreeMap<String, usize> {
    let text = fs::read_to_string(root().join("docs/unsafe.md")).unwrap();
    let row = |line: &str| {
        let (file, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
        Some((file.to_owned(), rest.split_once(' ')?.0.parse().ok()?))
    };
    text.lines().filter_map(row).collect()
}

#[test]
fn unsafe_is_where_it_may_be_and_documented() {
    let root = root();
    // All of them: tests, examples and benches have no need of it either. Only this one searches for the word.
    let mut files = documents::files(&["rs"]);
    files.retain(|file| file != Path::new("xtask/tests/architecture.rs"));
    let mut used: BTreeSet<&&str> = BTreeSet::new();
    let mut found = BTreeMap::new();
    for file in files {
        let count = count_unsafe(&without_comments(&fs::read_to_string(root.join(&file)).unwrap()));
        if count > 0 {
            let file = file.to_str().unwrap();
            let place = UNSAFE.iter().find(|place| file.starts_with(**place));
            assert!(place.is_some(), "{file} has unsafe code");
            used.extend(place);
            found.insert(file.to_owned(), count);
        }
    }
    assert_eq!(used.len(), UNSAFE.len(), "places that need no unsafe code any more: leave them out here");
    let documented = documented_unsafe();
    assert_eq!(documented, found, "docs/unsafe.md, and what the code has");
}

/// The search finds what it is for.
#[test]
fn names_are_found_in_lists_and_paths() {
    let check =
        |code: &str, path: &str, expected: bool| assert_eq!(names(code, path), expected, "{path} in {code}");
    check("use std::fs;", "std::fs", true);
    check("let f = std::fs::read(p);", "std::fs", true);
    check("use std::{fmt, fs};", "std::fs", true);
    check("use std::{\n    fmt,\n    fs::File,\n};", "std::fs", true);
    check("use std::fsx;", "std::fs", false);
    check("println!(\"{x}\")", "println!", true);
    check("eprintln!(\"{x}\")", "println!", false);
    check("use std::io::{self, IsTerminal};\nio::stdout().lock()", "io::stdout", true);
    check("use std::io::{IsTerminal, stdout};", "io::stdout", true);
    check("use std::{fmt, offset};\nlet fs = 1;", "std::fs", false);
    check("use k3_format::{Config, Checkpoint};", "k3_format::Checkpoint", true);
    assert_eq!(count_unsafe("unsafe fn f() { unsafe { g() } }"), 2);
    assert_eq!(count_unsafe("#![forbid(unsafe_code)] \"unsafe\" unsafely"), 0);
}
