//! Unit tests run the code that runs in a sandbox: outside of test modules, no line of the
//! kernel or the platform asks whether it is compiled for a test.

use std::fs;
use std::path::{Path, PathBuf};

/// A crate for unit tests may link `std`: these lines are no logic.
const ALLOWED: &str = "#![cfg_attr(not(test), no_std)]";

#[test]
fn product_code_does_not_know_of_tests() {
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for folder in [kernel.join("src"), kernel.join("../platform/src")] {
        for file in source_files(&folder) {
            let text = fs::read_to_string(&file).unwrap();
            let lines = branches(&text).into_iter();
            found.extend(lines.map(|line| format!("{}:{line}", file.display())));
        }
    }
    assert!(found.is_empty(), "let a test install what it needs instead: {found:#?}");
}

#[test]
fn a_branch_is_found_and_a_test_module_is_none() {
    assert_eq!(branches("#[cfg(test)]\nmod tests {"), [0; 0]);
    assert_eq!(branches("#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod tests;"), [0; 0]);
    assert_eq!(branches("#[cfg(test)]\nmod testing;"), [0; 0]);
    assert_eq!(branches("#[cfg(test)]\npub(crate) mod tests;"), [0; 0]);
    assert_eq!(branches("#![cfg_attr(not(test), no_std)]"), [0; 0]);
    assert_eq!(branches("fn f() {\n    #[cfg(test)]\n    return;"), [2]);
    assert_eq!(branches("#[cfg(not(test))]\nmod imp {"), [1]);
    assert_eq!(branches("#[cfg(test)]\nmod imp {"), [1]);
    assert_eq!(branches("if cfg!(test) {"), [1]);
    assert_eq!(branches("#[cfg_attr(test, expect(dead_code))]"), [1]);
    assert_eq!(branches("#[cfg(any(test, unix))]"), [1]);
}

/// Numbers of the lines that make a test run other code.
fn branches(text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let asks = |line: &str| {
        let code = line.split("//").next().unwrap();
        let condition = code.split_once("cfg").map_or("", |(_, rest)| rest);
        let mut words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| word == "test") && line != ALLOWED
    };
    let is_test_module = |at: usize| {
        let item = lines[at + 1..].iter().find(|line| !line.starts_with("#[path"));
        // What one test module has made, others may use.
        let names = ["mod tests", "pub(crate) mod tests;", "mod testing;"];
        lines[at] == "#[cfg(test)]"
            && item.is_some_and(|item| names.iter().any(|name| item.starts_with(name)))
    };
    (0..lines.len()).filter(|&at| asks(lines[at]) && !is_test_module(at)).map(|at| at + 1).collect()
}

fn source_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(source_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}
