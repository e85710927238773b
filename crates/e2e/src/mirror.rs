//! Functions that say all that a program can see of how it was started, built from a runtime
//! template and without one.

use crate::{Daemon, DaemonOptions, Outcome, get, repository, run, thaw};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What such functions of one language have in common.
pub struct Mirror {
    /// The language: `from` of `[template]` and `kind` of `[runtime]`.
    pub language: &'static str,
    /// Its files in `tests/guest/functions/mirror`, which are in the working directory.
    pub files: &'static [&'static str],
    /// Directories there with packages, and where the function has them.
    pub packages: &'static [(&'static str, &'static str)],
    /// More lines of `thaw.toml`.
    pub lines: &'static str,
}

impl Mirror {
    /// Builds a function; `template` is what is said of `[template]`, and maybe `[env]`.
    pub fn build(&self, home: &Path, name: &str, command: &str, template: &str) -> Outcome {
        let (template, variables) = template.split_once("[env]\n").unwrap_or((template, ""));
        let directory = tempfile::tempdir().expect("a directory");
        let source = repository().join("tests/guest/functions/mirror");
        let mut files: Vec<_> = self.files.iter().map(|file| format!("{file:?}")).collect();
        for file in self.files {
            fs::copy(source.join(file), directory.path().join(file)).expect("a program");
        }
        for (from, to) in self.packages {
            copy_as_of_old(&source.join(from), &directory.path().join(from));
            files.push(format!("{{ from = {from:?}, to = {to:?} }}"));
        }
        let text = format!(
            "name = \"{name}\"\ncommand = {command}\nport = 8080\nfiles = [{}]\n{}\
             [runtime]\nkind = \"{}\"\n{template}[env]\nWHO = \"somebody\"\n{}",
            files.join(", "),
            self.lines,
            self.language,
            variables,
        );
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path()))
    }

    /// `[template]` of the language.
    pub fn template(&self) -> String {
        format!("[template]\nfrom = \"{}\"\n", self.language)
    }

    /// Builds a program both ways, and checks that both see the same; the daemon that serves
    /// both, and the name of the one that was built from a template.
    #[track_caller]
    pub fn check(&self, home: &Path, name: &str, command: &str, more: &str) -> (Daemon, String) {
        let (started, given) = (format!("{name}-a"), format!("{name}-b"));
        self.build(home, &started, command, "").success();
        let outcome = self.build(home, &given, command, &format!("{}{more}", self.template()));
        assert!(!outcome.stderr.contains("not built from"), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("cannot be built from"), "{}", outcome.stderr);
        outcome.success();
        let daemon = Daemon::start(home, &DaemonOptions::default());
        see_the_same(&daemon, &started, &given);
        (daemon, given)
    }

    /// Builds two functions from one template and one without: the template is there once, takes
    /// its part of their images, and they draw other numbers.
    #[track_caller]
    pub fn check_sharing(&self, home: &Path, command: &str) {
        for name in ["first", "second"] {
            self.build(home, name, command, &self.template()).success();
        }
        self.build(home, "whole", command, "").success();
        assert_eq!(templates(home).len(), 1);
        run(thaw().env("THAW_HOME", home).arg("pack")).success();
        let stored = |name| image_of(home, name)["allocated"].as_u64().expect("bytes");
        let (second, whole) = (stored("second"), stored("whole"));
        assert!(second < whole * 2 / 3, "{second} {whole}");
        let daemon = Daemon::start(home, &DaemonOptions::default());
        assert_ne!(ask(&daemon, "first", "/drawn"), ask(&daemon, "second", "/drawn"));
    }

    /// Builds functions whose programs would notice a template: each is built the ordinary way, and
    /// it is said why. Each has a command, what is said of `[template]`, and why.
    #[track_caller]
    pub fn check_refusals(&self, home: &Path, cases: &[(&str, &str, &str)]) {
        for (number, (command, template, why)) in cases.iter().enumerate() {
            let name = format!("case-{number}");
            let built = self.build(home, &name, command, template);
            assert!(built.stderr.contains(why), "{command}: {}", built.stderr);
            built.success();
            assert_eq!(image_of(home, &name)["ancestors"], serde_json::json!([]), "{command}");
        }
    }
}

/// Two functions, of which the second one was built from a template, see the same.
#[track_caller]
pub fn see_the_same(daemon: &Daemon, started: &str, given: &str) {
    // The name of the function is that of the host, and its revision is that of its thaw.toml.
    let [expected, seen] = [started, given].map(|name| {
        let text = without_revisions(&ask(daemon, name, "/").to_string(), name);
        serde_json::from_str::<Value>(&text.replace(started, given)).expect("JSON")
    });
    let expected = expected.as_object().expect("an object");
    for (what, expected) in expected {
        assert_eq!(&seen[what], expected, "{what}");
    }
    assert_eq!(seen.as_object().map(|seen| seen.len()), Some(expected.len()));
    assert_eq!(ask(daemon, given, "/import"), "neighbour");
    assert_eq!(ask(daemon, given, "/thaws")[0], "1\n");
}

/// Asks a function that answers in JSON.
#[track_caller]
pub fn ask(daemon: &Daemon, function: &str, path: &str) -> Value {
    let answer = get(daemon.gateway(), function, path);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// The images of a store, as `thaw images` shows them.
#[track_caller]
pub fn images(home: &Path) -> Value {
    let said = run(thaw().env("THAW_HOME", home).args(["images", "--json"])).success();
    serde_json::from_str(&said).expect("JSON")
}

/// The one image of a function.
#[track_caller]
pub fn image_of(home: &Path, function: &str) -> Value {
    let all = images(home);
    let is_of_it = |image: &&Value| image["functions"] == serde_json::json!([function]);
    all.as_array().expect("a list").iter().find(is_of_it).expect("an image").clone()
}

/// The templates of a store, by what its directory has.
pub fn templates(home: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(home.join("store/templates")).expect("a directory");
    all.map(|entry| entry.expect("an entry").path()).collect()
}

/// Takes the eight digits away that are behind a function's name in its revision.
fn without_revisions(text: &str, name: &str) -> String {
    let mark = format!("{name}-");
    let mut parts = text.split(&mark);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| {
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_revision = part.get(..8).is_some_and(is_hex);
        done + name + if is_revision { &part[8..] } else { part }
    })
}

/// Copies a directory; all in it is as old as in every other copy, since equal files are those
/// with equal times.
fn copy_as_of_old(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let (path, to) =
            entry.map(|entry| (entry.path(), to.join(entry.file_name()))).expect("one");
        match path.is_dir() {
            true => copy_as_of_old(&path, &to),
            false => {
                fs::copy(&path, &to).expect("a file");
                set_old(&to);
            }
        }
    }
    set_old(to);
}

fn set_old(path: &Path) {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30);
    let file = fs::File::open(path).expect("a file");
    file.set_modified(long_ago).expect("a time");
}
