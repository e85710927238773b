//! What `make install` puts where, and `make uninstall` removes.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use thaw_e2e::{Outcome, repository, run, thaw_binary};

/// Installs below a prefix in a directory for packages, or removes it.
fn install(destination: &Path, prefix: &str, home: &str, more: &[&str]) -> Outcome {
    let mut command = Command::new(repository().join("scripts/install-thaw"));
    command.env("THAW", thaw_binary()).env("DESTDIR", destination).env("HOME", home);
    run(command.arg(prefix).args(more))
}

/// Paths of all files below a directory.
fn files(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(next).expect("a directory").flatten() {
            match entry.file_type().expect("a type").is_dir() {
                true => directories.push(entry.path()),
                false => {
                    let path = entry.path();
                    let below = path.strip_prefix(directory).expect("it lies below");
                    found.insert(below.to_str().expect("UTF-8").to_owned());
                }
            }
        }
    }
    found
}

#[test]
fn what_is_installed_is_removed_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let outcome = install(directory.path(), "/opt/thaw", "/root", &[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let root = directory.path().join("opt/thaw");
    let installed = files(&root);
    // Those that the documents name.
    for path in [
        "bin/thaw",
        "share/man/man1/thaw.1",
        "share/man/man1/thaw-run.1",
        "share/bash-completion/completions/thaw",
        "share/zsh/site-functions/_thaw",
        "share/fish/vendor_completions.d/thaw.fish",
        "share/systemd/user/thaw.service",
        "share/thaw/sdk/entrypoint/thaw.py",
        "share/thaw/sdk/entrypoint/Thaw.java",
        "share/thaw/examples/hello-python/thaw.toml",
        "lib/systemd/system/thaw.service",
        "lib/systemd/system/thaw-monitor.service",
        "lib/systemd/system/thaw.socket",
        "lib/systemd/system/user@.service.d/50-thaw-delegate.conf",
        "lib/sysusers.d/thaw.conf",
    ] {
        assert!(installed.contains(path), "{path} is missing: {installed:?}");
    }
    let version = run(Command::new(root.join("bin/thaw")).arg("--version"));
    assert!(version.stdout.starts_with("thaw "), "{}", version.stdout);
    for unit in installed.iter().filter(|path| path.ends_with(".service")) {
        let text = fs::read_to_string(root.join(unit)).expect("a unit");
        assert!(text.contains("ExecStart=/opt/thaw/bin/thaw "), "{unit}: {text}");
        assert!(!text.contains("/usr/local"), "{unit} names another binary: {text}");
        let mode = fs::metadata(root.join(unit)).expect("a unit").permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "{unit}");
    }
    fs::write(root.join("bin/another"), "not Thaw's").expect("room");
    let removed = install(directory.path(), "/opt/thaw", "/root", &["--remove"]);
    assert_eq!(removed.code, Some(0), "{}", removed.stderr);
    assert_eq!(files(&root), BTreeSet::from(["bin/another".to_owned()]));
}

#[test]
fn a_user_gets_no_units_of_the_system() {
    let directory = tempfile::tempdir().expect("a directory");
    let outcome = install(directory.path(), "/home/u/.local", "/home/u", &[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let installed = files(&directory.path().join("home/u/.local"));
    assert!(installed.contains("share/systemd/user/thaw.service"), "{installed:?}");
    assert!(!installed.iter().any(|path| path.starts_with("lib/")), "{installed:?}");
}

#[test]
fn a_prefix_that_is_not_absolute_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let outcome = install(directory.path(), "opt", "/root", &[]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("PREFIX must be an absolute path"), "{}", outcome.stderr);
}
