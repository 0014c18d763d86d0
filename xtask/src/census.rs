//! How large the code base is, by lines that can be read off a checkout of any age.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Count code, tests, public items and unsafe blocks of each crate
///
/// Lines are those of Rust files that are neither blank nor comments. Tests are what is outside `src`, files named tests.rs
/// and what follows `#[cfg(test)] mod tests`. Public items are functions, types, traits, constants and modules declared `pub`
/// (a lint sees to it that all of them can be reached).
#[derive(clap::Args)]
pub struct Args {
    /// A checkout
    #[arg(default_value_os_t = Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))]
    dir: PathBuf,
    /// As JSON, on one line
    #[arg(long)]
    json: bool,
}

/// What there is of one crate.
#[derive(Debug, Default, Serialize)]
struct Count {
    name: String,
    code: usize,
    tests: usize,
    public: usize,
    unsafe_blocks: usize,
    /// Files of more than 500 lines, blank ones and comments included.
    long: Vec<String>,
}

/// Prints the table.
///
/// # Errors
/// If a file cannot be read.
pub fn run(args: &Args) -> Result<()> {
    let crates = args.dir.join("crates");
    let entries = fs::read_dir(&crates).with_context(|| format!("reading {}", crates.display()))?;
    let mut dirs: Vec<PathBuf> = entries.map(|e| Ok(e?.path())).collect::<io::Result<_>>()?;
    dirs.push(args.dir.join("xtask"));
    dirs.sort();
    let mut counts = Vec::new();
    let mut all = Count { name: "all".into(), ..Count::default() };
    for dir in &dirs {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut count = Count { name, ..Count::default() };
        visit(dir, dir, &mut count).with_context(|| format!("counting {}", dir.display()))?;
        count.long.sort();
        all.code += count.code;
        all.tests += count.tests;
        all.public += count.public;
        all.unsafe_blocks += count.unsafe_blocks;
        counts.push(count);
    }
    counts.push(all);
    let mut out = io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{}", serde_json::to_string(&counts)?)?);
    }
    let heading = ["crate", "code", "tests", "public items", "unsafe blocks", "files over 500 lines"];
    writeln!(out, "| {} |\n| --- | ---: | ---: | ---: | ---: | --- |", heading.join(" | "))?;
    for Count { name, code, tests, public, unsafe_blocks, long } in &counts {
        let long = long.join(", ");
        writeln!(out, "| {name} | {code} | {tests} | {public} | {unsafe_blocks} | {long} |")?;
    }
    Ok(())
}

fn visit(root: &Path, dir: &Path, count: &mut Count) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let local = path.strip_prefix(root)?;
        if path.is_dir() {
            visit(root, &path, count)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path)?;
            let is_test = !local.starts_with("src") || local.ends_with("tests.rs");
            add(count, &text, is_test);
            let lines = text.lines().count();
            if lines > 500 {
                count.long.push(format!("{} ({lines})", local.display()));
            }
        }
    }
    Ok(())
}

fn add(count: &mut Count, text: &str, is_test: bool) {
    let (code, tests) = match text.split_once("#[cfg(test)]\nmod tests {") {
        _ if is_test => ("", text),
        Some((code, tests)) => (code, tests),
        None => (text, ""),
    };
    count.tests += statements(tests).count();
    count.code += statements(code).count();
    count.public += statements(code).filter(|line| is_public(line)).count();
    // Not in one word: this is a file of the code base.
    let block = concat!("unsafe", " {");
    count.unsafe_blocks += statements(code).map(|line| line.matches(block).count()).sum::<usize>();
}

/// Lines that are neither blank nor comments.
fn statements(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"))
}

fn is_public(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("pub ") else { return false };
    let kinds = ["fn ", "const ", "unsafe ", "struct ", "enum ", "trait ", "type ", "mod ", "static "];
    kinds.iter().any(|kind| rest.starts_with(kind))
}
