//! The order of the modules, as the README states it: a module uses those below it only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest.
const ORDER: &[&str] = &[
    "socket",
    "reactor",
    "to_its_end",
    "packing",
    "allowance",
    "swap",
    "admission",
    "health",
    "body_room",
    "joined",
    "crashes",
    "logs",
    "edge",
    "boots",
    "inject",
    "far",
    "pulls",
    "tenants",
    "remote",
    "asleep",
    "instance",
    "upstream",
    "metrics",
    "traces",
    "node",
    "service",
    "triggers",
    "usage",
    "catalog",
    "sandboxes",
    "pressure",
    "history",
    "gateway",
    "legacy",
    "work",
];

type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_use_those_below_them() {
    let level = |module: &str| {
        let found = ORDER.iter().position(|known| *known == module);
        found.unwrap_or_else(|| panic!("`{module}` is not in the order"))
    };
    let mut upward = BTreeSet::new();
    for (module, used) in uses() {
        let higher = |used: &String| level(used) > level(&module);
        upward.extend(used.into_iter().filter(higher).map(|used| (module.clone(), used)));
    }
    assert!(upward.is_empty(), "uses of a higher module, as (user, used): {upward:#?}");
}

#[test]
fn the_order_has_each_module_once_and_is_the_readmes() {
    let mut listed = ORDER.to_vec();
    listed.sort_unstable();
    let lib = fs::read_to_string(source().join("lib.rs")).unwrap();
    let declared = |line: &str| {
        let name = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?;
        Some(name.strip_suffix(';')?.to_owned())
    };
    let modules: BTreeSet<String> = lib.lines().filter_map(declared).collect();
    assert_eq!(listed, modules.iter().map(String::as_str).collect::<Vec<_>>());

    let order = ORDER.join(" ");
    let readme = fs::read_to_string(source().join("../README.md")).unwrap();
    let readme = readme.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(readme.contains(&format!("```text {order} ```")), "README.md lacks: {order}");
}

#[test]
fn a_use_is_found_in_every_form() {
    let used = |text: &str| modules_used(text).into_iter().collect::<Vec<_>>();
    assert_eq!(used("use crate::gateway::Gateway;"), ["gateway"]);
    assert_eq!(used("let x = crate::boots::look();"), ["boots"]);
    assert_eq!(
        used("use crate::{edge::{A, B},\n    node, tenants::Room};"),
        ["edge", "node", "tenants"]
    );
    assert_eq!(used("// see crate::gateway::accept"), [""; 0]);
    assert_eq!(used("use other_crate::gateway;"), [""; 0]);
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The other modules that each module uses.
fn uses() -> Uses {
    let source = source();
    let mut uses = Uses::new();
    for file in source_files(&source) {
        let module = module_of(&source, &file);
        if module != "lib" {
            let mut used = modules_used(&product_code(&file));
            used.remove(&module);
            uses.entry(module).or_default().extend(used);
        }
    }
    uses
}

/// All source files but those of unit tests.
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
    let is_for_tests = |path: &PathBuf| {
        let stem = path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
        stem || path.components().any(|part| part.as_os_str() == "tests")
    };
    files.retain(|path| !is_for_tests(path));
    files
}

/// The top-level module to which a file belongs.
fn module_of(source: &Path, file: &Path) -> String {
    let first = file.strip_prefix(source).unwrap().components().next().unwrap();
    first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned()
}

/// A file without its unit tests.
fn product_code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].to_owned()
}

/// The modules of the crate that a text names; comments may.
fn modules_used(text: &str) -> BTreeSet<String> {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut found = BTreeSet::new();
    for (at, path) in code.match_indices("crate::") {
        let is_own =
            !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
        if is_own {
            found.extend(first_names(&code[at + path.len()..]));
        }
    }
    found
}

/// The first names of a path, or of all paths of a group in braces.
fn first_names(rest: &str) -> Vec<String> {
    let name = |text: &str| {
        let text = text.trim_start();
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        text[..end].to_owned()
    };
    let Some(group) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut names, mut depth, mut begin) = (Vec::new(), 0, 0);
    for (at, char) in group.char_indices() {
        match char {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                names.push(name(&group[begin..at]));
                begin = at + 1;
                if char == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}
