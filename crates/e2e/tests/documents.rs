//! Documents name what is there: every dependency and test program, and files and headings that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use thaw_e2e::repository;

/// All files below the repository that `wanted` chooses, without what builds make.
fn files(wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![repository()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("a directory").flatten() {
            let (path, kind) = (entry.path(), entry.file_type().expect("a type"));
            let name = entry.file_name();
            let is_made = ["target", "build", "node_modules"].iter().any(|made| name == *made)
                && !path.join("Cargo.toml").exists();
            let is_source = !is_made && !name.to_string_lossy().starts_with('.');
            match (kind.is_dir(), is_source) {
                (true, true) => directories.push(path),
                (false, _) if kind.is_file() && wanted(&path) => found.push(path),
                _ => {}
            }
        }
    }
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of the dependencies in a Cargo.toml, but those that are crates of the workspace.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut section = "";
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]")
            && let Some((name, _)) = line.split_once('=')
        {
            names.insert(name.trim().to_owned());
        }
    }
    names.retain(|name| !name.starts_with("thaw-"));
    names
}

#[test]
fn every_dependency_has_its_reason() {
    let crates = fs::read_dir(repository().join("crates")).expect("the crates");
    let manifests = crates.flatten().map(|entry| read(&entry.path().join("Cargo.toml")));
    let used: BTreeSet<String> = manifests.flat_map(|manifest| dependencies(&manifest)).collect();
    assert!(used.contains("rustix") && used.contains("tempfile"), "{used:?}");
    let document = read(&repository().join("docs/dependencies.md"));
    let (reasons, _) = document.split_once("## Written by hand").expect("the last section");
    let first_cells = reasons.lines().filter(|line| line.starts_with("| `"));
    let listed: BTreeSet<String> = first_cells
        .flat_map(|line| line.split('|').nth(1).expect("a cell").split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = used.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&used).collect();
    assert!(missing.is_empty(), "docs/dependencies.md does not say why there is {missing:?}");
    assert!(gone.is_empty(), "docs/dependencies.md lists {gone:?}, which no crate uses");
    // And the workspace fixes no version of a crate that none uses.
    let workspace = dependencies(&read(&repository().join("Cargo.toml")));
    let unused: Vec<_> = workspace.difference(&used).collect();
    assert!(unused.is_empty(), "Cargo.toml lists {unused:?}, which no crate uses");
}

/// The text without blocks of code.
fn prose(text: &str) -> String {
    let outside = text.split("\n```").step_by(2);
    outside.collect::<Vec<_>>().join("\n")
}

/// The fragment by which a heading can be reached.
fn fragment(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Where the links of a document lead.
fn links(text: &str) -> Vec<&str> {
    text.split("](").skip(1).filter_map(|rest| rest.split([')', '\n']).next()).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let documents: BTreeMap<PathBuf, String> =
        files(|path| path.extension() == Some("md".as_ref()))
            .into_iter()
            .map(|path| (path.canonicalize().expect("a file"), prose(&read(&path))))
            .collect();
    assert!(documents.len() > 30, "{} documents", documents.len());
    let mut broken = Vec::new();
    for (path, text) in &documents {
        // Not of the web, and no item of a crate (`mod@freeze`).
        let is_file = |link: &&str| !link.contains("://") && !link.contains('@');
        for link in links(text).into_iter().filter(is_file) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => Ok(path.clone()),
                file => path.parent().expect("a directory").join(file).canonicalize(),
            };
            let leads = target.is_ok_and(|target| {
                let headings = documents.get(&target).map(String::as_str).unwrap_or_default();
                let mut headings = headings.lines().filter(|line| line.starts_with('#'));
                heading.is_empty() || headings.any(|line| fragment(line) == heading)
            });
            if !leads {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn fragments_are_made_as_in_the_web_view() {
    assert_eq!(fragment("## How requests come: `kind`"), "how-requests-come-kind");
    assert_eq!(fragment("# An A--B_c"), "an-a--b_c");
}

/// The table of test programs has each of them, and no other.
#[test]
fn every_test_program_has_its_line() {
    let tests = repository().join("crates/e2e/tests");
    let is_program = |path: &Path| {
        path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").exists()
    };
    let entries = fs::read_dir(&tests).expect("a directory").flatten().map(|entry| entry.path());
    let names = entries
        .filter(|path| is_program(path))
        .filter_map(|path| Some(path.file_stem()?.to_str().expect("text").to_owned()));
    let table = read(&repository().join("crates/e2e/README.md"));
    let first_cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
    let named = first_cells.flat_map(|(cell, _)| cell.split(", "));
    let named: BTreeSet<String> = named.map(|name| name.trim_matches('`').to_owned()).collect();
    assert_eq!(named, names.collect());
}

/// Functions have files of their own directory only, so each workload has a copy of the server.
#[test]
fn workloads_of_functionbench_have_the_same_server() {
    let is_server = |path: &Path| {
        path.ends_with("serve.py") && path.to_string_lossy().contains("functionbench")
    };
    let servers: Vec<_> = files(is_server).iter().map(|path| read(path)).collect();
    assert_eq!(servers.len(), 9);
    assert!(servers.iter().all(|server| *server == servers[0]));
}

/// A build refuses links that lead out of the function's directory.
#[test]
fn no_example_has_links() {
    let examples = repository().join("examples");
    let mut directories = vec![examples];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("a directory").flatten() {
            let kind = entry.file_type().expect("a type");
            assert!(!kind.is_symlink(), "{} is a link", entry.path().display());
            if kind.is_dir() && entry.file_name() != "build" && entry.file_name() != "node_modules"
            {
                directories.push(entry.path());
            }
        }
    }
}
