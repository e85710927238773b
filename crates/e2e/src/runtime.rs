//! Programs of language runtimes, and everyday tools: run on the host and in a
//! sandbox, compared.

use crate::binary::{build_directory, repository, thaw};
use crate::guest::{differences, host_command, python};
use crate::outcome::{Outcome, run_within};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long one run of a program may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long installing packages and compiling may take.
const BUILD_PATIENCE: Duration = Duration::from_secs(600);

/// Where tools are; `/usr/local/go/bin` is where Go's own installer puts it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/go/bin";

/// A program of `tests/guest/runtimes`.
#[derive(Clone, Copy, Debug)]
pub enum RuntimeProgram {
    /// A Python program that needs the standard library only.
    Python(&'static str),
    /// A Python program with the packages of `python/requirements.txt`.
    PythonWithPackages(&'static str),
    /// A Node.js program.
    Node(&'static str),
    /// A Java class, and options of the virtual machine.
    Java(&'static str, &'static [&'static str]),
    /// A Go program, linked statically unless it uses C.
    Go(&'static str),
    /// A Ruby program.
    Ruby(&'static str),
    /// A PHP program.
    Php(&'static str),
    /// A Perl program.
    Perl(&'static str),
    /// A Bash script.
    Shell(&'static str),
}

/// A command line and what its environment has in addition.
struct CommandLine {
    words: Vec<PathBuf>,
    environment: Vec<(&'static str, PathBuf)>,
}

fn sources() -> PathBuf {
    repository().join("tests/guest/runtimes")
}

/// A directory for what is built from the sources of a language.
fn built(language: &str) -> PathBuf {
    let directory = build_directory().join("runtimes").join(language);
    fs::create_dir_all(&directory).expect("a directory for guest programs");
    directory
}

/// Runs a compiler or an installer, each command once: they write into one directory
/// for all programs, and what was made may be running in another test already.
fn make(command: &mut Command) {
    static MADE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let text = format!("{command:?}");
    if !made.contains(&text) {
        let outcome = run_within(BUILD_PATIENCE, command, b"");
        assert_eq!(outcome.code, Some(0), "{text}:\n{}{}", outcome.stdout, outcome.stderr);
        made.insert(text);
    }
}

impl RuntimeProgram {
    /// Compiles the program or installs its packages, if it takes that.
    fn prepare(self) -> CommandLine {
        let script = |interpreter: &str, name: &str, extension: &str| {
            let language = interpreter.rsplit('/').next().unwrap_or(interpreter);
            let folder = match language {
                "python3" => "python",
                "bash" => "shell",
                language => language,
            };
            let file = sources().join(folder).join(name).with_extension(extension);
            assert!(file.is_file(), "there is no {}", file.display());
            vec![PathBuf::from(interpreter), file]
        };
        let python = python().to_string_lossy().into_owned();
        let mut environment = Vec::new();
        let words = match self {
            Self::Python(name) => script(&python, name, "py"),
            Self::PythonWithPackages(name) => {
                let directory = built("python");
                let requirements = sources().join("python/requirements.txt");
                make(Command::new("cp").arg(requirements).arg(&directory));
                let install = repository().join("scripts/install");
                make(Command::new(install).arg("python").current_dir(&directory));
                environment.push(("PYTHONPATH", directory.join("build/site")));
                script(&python, name, "py")
            }
            Self::Node(name) => script("node", name, "js"),
            Self::Ruby(name) => script("ruby", name, "rb"),
            Self::Php(name) => script("php", name, "php"),
            Self::Perl(name) => script("perl", name, "pl"),
            Self::Shell(name) => script("bash", name, "sh"),
            Self::Java(name, options) => {
                let classes = built("java");
                let source = sources().join("java").join(name).with_extension("java");
                make(
                    Command::new("javac").args(["--release", "17", "-d"]).arg(&classes).arg(source),
                );
                let mut words = vec![PathBuf::from("java")];
                words.extend(options.iter().map(PathBuf::from));
                words.extend(["-cp".into(), classes, name.into()]);
                words
            }
            Self::Go(name) => {
                let program = built("go").join(name);
                let mut go = Command::new("go");
                go.args(["build", "-o"]).arg(&program).arg(format!("./{name}"));
                let cgo = if name == "cgo" { "1" } else { "0" };
                make(
                    go.env("CGO_ENABLED", cgo).env("PATH", PATH).current_dir(sources().join("go")),
                );
                vec![program]
            }
        };
        CommandLine { words, environment }
    }
}

impl CommandLine {
    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let mut all: Vec<(&'static str, PathBuf)> = vec![
            ("PATH", PATH.into()),
            ("HOME", "/root".into()),
            ("LANG", "C.UTF-8".into()),
            ("TERM", "dumb".into()),
            ("PYTHONDONTWRITEBYTECODE", "1".into()),
        ];
        all.extend(self.environment.iter().cloned());
        all
    }

    fn on_host(&self) -> Outcome {
        run_within(PATIENCE, host_command(&self.words).envs(self.variables()), b"")
    }

    fn in_sandbox(&self, cpus: u32) -> Outcome {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let mut sandboxed = thaw();
        sandboxed.args(["run", "--as-root", "--rootfs", "/", "--memory=3GiB"]);
        sandboxed.args([format!("--cpus={cpus}"), format!("--user={uid}:{gid}")]);
        for (name, value) in self.variables() {
            sandboxed.arg(format!("--env={name}={}", value.display()));
        }
        sandboxed.arg("--").args(&self.words);
        run_within(PATIENCE, &mut sandboxed, b"")
    }
}

/// What a program has said, without what `thaw run` says at its end of connections that were denied.
fn without_denials(said: &str) -> String {
    said.split_inclusive('\n').filter(|line| !line.starts_with("thaw: denied ")).collect()
}

/// Runs a program on the host and in a sandbox with `cpus` virtual CPUs.
///
/// # Panics
/// Output or exit codes differ.
#[track_caller]
pub fn compare_runtime(program: RuntimeProgram, cpus: u32) {
    let command = program.prepare();
    let native = command.on_host();
    assert!(native.code.is_some(), "{program:?} does not even end on the host");
    let mut sandboxed = command.in_sandbox(cpus);
    sandboxed.stderr = without_denials(&sandboxed.stderr);
    assert!(
        native == sandboxed,
        "{program:?}: exit {:?} on the host, {:?} in the sandbox with {cpus} CPUs\n{}",
        native.code,
        sandboxed.code,
        differences(&native, &sandboxed)
    );
}
