//! What other people's crates may be: their licences (`deny.toml`), where they come from, which Rust they need, and that
//! each is used.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{code, metadata, names, root, sources};

/// The whole tree of dependencies for this machine, tests' own included.
fn tree() -> Value {
    let version = Command::new(env!("CARGO")).arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    metadata(&["--locked", "--filter-platform", host])
}

/// The strings of `allow` in `deny.toml`.
fn allowed_licences() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("deny.toml")).unwrap();
    let list = text.split("\nallow = [").nth(1).and_then(|rest| rest.split(']').next()).unwrap();
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether an SPDX expression can be met with `allowed` licences; `/` is how old manifests write OR.
fn is_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut tokens = tokens.as_slice();
    any_of(&mut tokens, allowed) && tokens.is_empty()
}

fn any_of(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut met = all_of(tokens, allowed);
    while let ["OR", rest @ ..] = *tokens {
        *tokens = rest;
        met |= all_of(tokens, allowed);
    }
    met
}

fn all_of(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut met = one(tokens, allowed);
    while let ["AND", rest @ ..] = *tokens {
        *tokens = rest;
        met &= one(tokens, allowed);
    }
    met
}

fn one(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    match *tokens {
        ["(", rest @ ..] => {
            *tokens = rest;
            let met = any_of(tokens, allowed);
            let [")", rest @ ..] = *tokens else { return false };
            *tokens = rest;
            met
        }
        [licence, "WITH", exception, rest @ ..] => {
            *tokens = rest;
            allowed.contains(&format!("{licence} WITH {exception}"))
        }
        [licence, rest @ ..] => {
            *tokens = rest;
            allowed.contains(*licence)
        }
        [] => false,
    }
}

#[test]
fn licences_are_those_of_the_list() {
    let allowed = allowed_licences();
    let tree = tree();
    for package in tree["packages"].as_array().unwrap() {
        let licence = package["license"].as_str().unwrap_or("(none given)");
        assert!(is_met(licence, &allowed), "{} {}: {licence}", package["name"], package["version"]);
    }
}

#[test]
fn dependencies_come_from_the_registry_or_the_workspace() {
    let crates = root().canonicalize().unwrap().join("crates");
    let tree = tree();
    for package in tree["packages"].as_array().unwrap() {
        let source = package["source"].as_str();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let is_ours =
            manifest.starts_with(&crates) || manifest.parent() == Some(&crates.with_file_name("xtask"));
        let is_known = source.map_or(is_ours, |source| source.starts_with("registry+"));
        assert!(is_known, "{} comes from {}", package["name"], source.unwrap_or("a folder of its own"));
    }
}

/// `rust-version` is what the toolchain file installs, so every run of the tests is one with the oldest Rust.
#[test]
fn the_oldest_rust_is_the_one_that_is_tested() {
    let toolchain = fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    let channel = toolchain.split("channel = \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let tree = tree();
    for package in tree["packages"].as_array().unwrap() {
        let (name, needed) = (&package["name"], package["rust_version"].as_str());
        if package["source"].is_null() {
            let minor = channel.rsplit_once('.').map(|(minor, _)| minor);
            assert_eq!(needed, minor, "{name}: rust-version is that of rust-toolchain.toml");
        }
        let version = |text: &str| text.split('.').map(|n| n.parse().unwrap()).collect::<Vec<u32>>();
        assert!(needed.is_none_or(|needed| version(needed) <= version(channel)), "{name} needs {needed:?}");
    }
}

#[test]
fn every_dependency_is_named_in_the_code() {
    let metadata = metadata(&["--no-deps"]);
    for package in metadata["packages"].as_array().unwrap() {
        let dir = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        let files = |folder: &&str| {
            let folder = dir.join(folder);
            if folder.exists() { sources(&folder) } else { Vec::new() }
        };
        let own: Vec<String> = ["src"].iter().flat_map(files).map(|file| code(&file)).collect();
        let all = ["src", "tests", "benches", "examples"].iter().flat_map(files);
        let all: Vec<String> = all.map(|file| fs::read_to_string(file).unwrap()).collect();
        for dependency in package["dependencies"].as_array().unwrap() {
            let name = dependency["name"].as_str().unwrap();
            let files = if dependency["kind"] == "dev" { &all } else { &own };
            let is_named = files.iter().any(|text| names(text, &name.replace('-', "_")));
            assert!(is_named || package["name"] == name, "{} does not use {name}", package["name"]);
        }
    }
}

#[test]
fn expressions_are_read_as_spdx_does() {
    let allowed: BTreeSet<String> = ["MIT", "Zlib", "A WITH E"].map(str::to_owned).into();
    let check = |expression, expected| assert_eq!(is_met(expression, &allowed), expected, "{expression}");
    check("MIT", true);
    check("GPL-3.0", false);
    check("GPL-3.0 OR MIT", true);
    check("GPL-3.0/MIT", true);
    check("GPL-3.0 AND MIT", false);
    check("GPL-3.0 AND MIT OR Zlib", true);
    check("(GPL-3.0 OR MIT) AND Zlib", true);
    check("(GPL-3.0 OR MIT) AND GPL-2.0", false);
    check("A", false);
    check("A WITH E AND MIT", true);
    check("MIT Zlib", false);
    check("(MIT", false);
    check("", false);
}
