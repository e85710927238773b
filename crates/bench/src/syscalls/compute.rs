//! Work that only computes, in the languages that functions are written in:
//! small programs that time themselves.

use super::{Pair, SideError};
use serde::Serialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A language with a program.
struct Language {
    name: &'static str,
    file: &'static str,
    text: &'static str,
    /// What runs it: the names of an interpreter, before the file.
    runs: &'static [&'static str],
    /// What makes an executable `compute` of it first, before the file.
    builds: &'static [&'static str],
}

const LANGUAGES: &[Language] = &[
    Language {
        name: "Python",
        file: "compute.py",
        text: include_str!("programs/compute.py"),
        runs: &["/usr/bin/python3"],
        builds: &[],
    },
    Language {
        name: "Node.js",
        file: "compute.js",
        text: include_str!("programs/compute.js"),
        runs: &["/usr/bin/node"],
        builds: &[],
    },
    Language {
        name: "Java",
        file: "Compute.java",
        text: include_str!("programs/Compute.java"),
        runs: &["/usr/bin/java"],
        builds: &[],
    },
    Language {
        name: "Go",
        file: "compute.go",
        text: include_str!("programs/compute.go"),
        runs: &[],
        builds: &["go", "build", "-o", "compute"],
    },
];

/// How long a program computed on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct ComputeResult {
    /// The language.
    pub language: &'static str,
    /// Milliseconds, medians.
    pub ms: Pair,
    /// Speed in the sandbox by that on the host.
    pub speed: f64,
    /// The fastest turns: what else the machine does only makes the others slower.
    pub best_ms: Pair,
    /// The same of them.
    pub best_speed: f64,
}

/// Programs laid out in a directory of their own.
pub struct Programs {
    directory: PathBuf,
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Programs {
    pub fn prepare() -> io::Result<Self> {
        let name = format!("thaw-bench-compute-{}", std::process::id());
        let programs = Self { directory: std::env::temp_dir().join(name) };
        fs::create_dir_all(&programs.directory)?;
        for language in LANGUAGES {
            fs::write(programs.directory.join(language.file), language.text)?;
        }
        Ok(programs)
    }

    /// Measures every language that this host has; `sandbox` is the command that
    /// runs another one in a sandbox. Returns the names of those that are missing, too.
    ///
    /// # Errors
    /// A program does not run.
    pub fn measure(
        &self,
        sandbox: &[String],
        rounds: usize,
    ) -> Result<(Vec<ComputeResult>, Vec<&'static str>), SideError> {
        let (mut results, mut missing) = (Vec::new(), Vec::new());
        for language in LANGUAGES {
            let Some(command) = self.command(language) else {
                missing.push(language.name);
                continue;
            };
            let within: Vec<String> = sandbox.iter().chain(&command).cloned().collect();
            let (mut native, mut thaw) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                native.push(run(language.name, &command)?);
                thaw.push(run(language.name, &within)?);
            }
            let ms = Pair { native: super::median(&mut native), thaw: super::median(&mut thaw) };
            let best = |turns: &mut [f64]| super::percentile(turns, 0);
            let best_ms = Pair { native: best(&mut native), thaw: best(&mut thaw) };
            results.push(ComputeResult {
                language: language.name,
                ms,
                speed: super::ratio(ms.native, ms.thaw),
                best_ms,
                best_speed: super::ratio(best_ms.native, best_ms.thaw),
            });
        }
        Ok((results, missing))
    }

    /// The command that runs a program, if the host has what it takes.
    fn command(&self, language: &Language) -> Option<Vec<String>> {
        let file = self.directory.join(language.file).to_string_lossy().into_owned();
        if let [build, arguments @ ..] = language.builds {
            let outcome = Command::new(build)
                .args(arguments)
                .arg(&file)
                .current_dir(&self.directory)
                .env("GO111MODULE", "off")
                .stderr(Stdio::null())
                .status();
            let built = self.directory.join("compute").to_string_lossy().into_owned();
            return outcome.is_ok_and(|status| status.success()).then(|| vec![built]);
        }
        let interpreter = language.runs.first().filter(|path| Path::new(path).exists())?;
        Some(vec![(*interpreter).to_owned(), file])
    }
}

/// Runs a program; what it prints is how long it computed, in milliseconds.
fn run(name: &'static str, command: &[String]) -> Result<f64, SideError> {
    let output = Command::new(&command[0]).args(&command[1..]).stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().map_err(|_| SideError::Program {
        name,
        said: format!("{text}{}", String::from_utf8_lossy(&output.stderr)),
    })
}
