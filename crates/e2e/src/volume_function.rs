//! A function with volumes.

use crate::{Daemon, Outcome, post, repository, run, thaw};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A function that runs what it is sent, as tests/guest/functions/volumes.py says.
#[derive(Clone, Copy, Debug)]
pub struct VolumeFunction<'a> {
    /// Its name.
    pub name: &'a str,
    /// Top-level keys of thaw.toml.
    pub keys: &'a str,
    /// `[[volumes]]`.
    pub volumes: &'a str,
    /// Python code that it runs before it is frozen.
    pub at_start: &'a str,
}

impl VolumeFunction<'_> {
    /// Builds it.
    pub fn build(&self, home: &Path) -> Outcome {
        let directory = tempfile::tempdir().expect("a directory");
        let program = repository().join("tests/guest/functions/volumes.py");
        fs::copy(program, directory.path().join("app.py")).expect("a copy");
        let Self { name, keys, volumes, at_start } = self;
        // However slow the machine is, who was asked before is there.
        let stays = match keys.contains("isolation = \"instance\"") {
            true => "limits.keep_alive = \"10m\"",
            false => "",
        };
        let text = format!(
            "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
             files = [\"app.py\"]\n{keys}\n{stays}\nenv = {{ AT_START = '''{at_start}''' }}\n{volumes}\n\
             [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n"
        );
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        let mut build = thaw();
        build.env("THAW_HOME", home).args(["build", "--quiet", "--weak-limits"]);
        run(build.arg(directory.path()))
    }
}

/// Has a [`VolumeFunction`] run some code, which must not fail; what it has left in `result`.
#[track_caller]
pub fn ask_volume(daemon: &Daemon, function: &str, code: &str) -> Value {
    let response = post(daemon.gateway(), function, "/", code.as_bytes());
    assert_eq!(response.status, 200, "{code}: {}", response.text());
    let answer = response.json();
    assert_eq!(answer.get("error"), None, "{code}: {answer}");
    answer["result"].clone()
}
