//! The machine is reached through the traits of `machine` only: the implementation is private,
//! what it offers is in the traits, and instructions that are not Rust are in it.

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn nothing_but_the_alias_names_the_implementation() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let users = files_with(&source, |code| code.contains("crate::process"));
    assert_eq!(users, ["machine.rs"]);
    let lib = code_of(&source.join("lib.rs"));
    let is_private = "\n#[cfg(not(feature = \"another-platform\"))]\nmod process;";
    assert!(lib.contains(is_private), "the implementation is private, and left out for another");
}

#[test]
fn the_implementation_offers_nothing_beside_the_traits() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let inherent = files_with(&source, |code| code.contains("impl HostProcesses"));
    assert_eq!(inherent, [""; 0], "a method of the platform belongs to a trait");
}

#[test]
fn assembly_is_the_platforms() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_outside = |file: &String| !file.starts_with("process/");
    let has_assembly = |code: &str| code.contains("asm!(");
    let mut above = files_with(&manifest.join("src"), has_assembly);
    above.retain(is_outside);
    // The vector state of the processor, and the stack pointer for the report of a panic.
    assert_eq!(above, ["fpu.rs", "panic.rs"]);
    // The entry point of the program, and the memory routines that the compiler calls.
    assert_eq!(files_with(&manifest.join("../kernel/src"), has_assembly), ["main.rs"]);
}

fn code_of(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| format!("\n{}", line.split("//").next().unwrap())).collect()
}

/// The files below a folder whose code, without comments, is such, by name.
fn files_with(folder: &Path, is_such: impl Fn(&str) -> bool) -> Vec<String> {
    let mut left = vec![PathBuf::from(folder)];
    let mut found = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|it| it == "rs") && is_such(&code_of(&path)) {
            found.push(path.strip_prefix(folder).unwrap().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found
}
