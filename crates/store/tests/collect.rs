//! Programs collected from the host run in the collected root file system.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{empty_store, export, is_root};
use tempfile::TempDir;
use thaw_store::collect::{CollectRequest, Collected, RuntimeRequest};
use thaw_store::{Store, Tree};

/// Collects and exports to a directory.
fn collect(request: &CollectRequest) -> (TempDir, PathBuf, Collected) {
    let (directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    let collected = session.collect(&mut tree, request, &mut |_| {}).unwrap();
    let index = session.put_index(&tree).unwrap();
    let root = directory.path().join("root");
    let open = Store::open_index(&store, index).unwrap();
    thaw_store::index::check_structure(&open.index()).unwrap();
    export(&store, &open, &root);
    (directory, root, collected)
}

fn run_in(root: &Path, program: &Path, arguments: &[&str]) -> Output {
    Command::new("chroot")
        .arg(root)
        .arg(program)
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .expect("chroot(1) is part of every Linux")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_dynamic_program_runs() {
    if !is_root("running a collected program") {
        return;
    }
    let request = CollectRequest { programs: vec!["ls".into()], ..Default::default() };
    let (_directory, root, collected) = collect(&request);
    let output = run_in(&root, &collected.programs[0], &["/"]);
    let listed = stdout(&output);
    for name in ["tmp", "etc", "proc", "dev"] {
        assert!(listed.lines().any(|line| line == name), "{listed}");
    }
}

#[test]
fn python_runs_with_its_standard_library() {
    if !is_root("running a collected interpreter") {
        return;
    }
    let runtimes = vec![RuntimeRequest::new("python3")];
    let request = CollectRequest { runtimes, ..Default::default() };
    let (_directory, root, collected) = collect(&request);
    let python = collected.search_path[0].join("python3");
    let script = "import http.server, json, ssl, sqlite3, hashlib, ctypes, zlib, decimal, \
                  asyncio, socketserver, uuid; print(json.dumps([1, 2]))";
    assert_eq!(stdout(&run_in(&root, &python, &["-c", script])), "[1, 2]\n");
}
