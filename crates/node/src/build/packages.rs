//! `requirements`: Python packages, installed by `pip`, which runs code of theirs.

use super::OnEvent;
use super::command::{Commands, Task};
use super::import::ImportFailure;
use super::poetry;
use crate::config::{EgressRule, RuntimeConfig};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thaw_sandbox::BoundAccess;
use thaw_store::collect::{Question, ask_on_host};

/// Destinations of `pip` unless `[build] egress` names others: Python's package index.
const INDEX: [&str; 2] = ["pypi.org:443", "files.pythonhosted.org:443"];

/// Most bytes of a pyproject.toml that are read.
const PYPROJECT_MAX: u64 = 1 << 20;

/// An interpreter that runs `pip`, and where its installation lies.
struct Interpreter {
    program: OsString,
    shown: Vec<PathBuf>,
}

/// Installs what `requirements` names; the directory that has it then, which is kept
/// from build to build.
pub(super) fn install(
    commands: &Commands<'_>,
    runtime: &RuntimeConfig,
    requirements: &Path,
    on_event: &mut OnEvent<'_>,
) -> Result<PathBuf, ImportFailure> {
    let failed = |failure| ImportFailure::Pip {
        requirements: requirements.to_owned(),
        failure,
        trust: commands.options.trust,
    };
    let target = commands.kept("packages").map_err(|error| failed(error.into()))?;
    let mut interpreter = interpreter(commands, runtime).map_err(|error| failed(error.into()))?;
    if !requirements.starts_with(commands.directory) {
        interpreter.shown.push(requirements.to_owned());
    }
    let wanted = wanted(requirements)?;
    if wanted.is_empty() {
        return Ok(target);
    }
    let settings = commands.settings();
    let index: Vec<EgressRule> =
        INDEX.iter().map(|rule| rule.parse().expect("it is a destination")).collect();
    let options =
        ["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--upgrade"];
    let paths: [OsString; 2] = ["--target".into(), target.clone().into()];
    let task = Task {
        from: "pip",
        arguments: [interpreter.program]
            .into_iter()
            .chain(options.map(OsString::from))
            .chain(paths)
            .chain(wanted)
            .collect(),
        cwd: commands.directory,
        egress: if settings.egress.is_empty() { &index } else { &settings.egress },
        shown: interpreter.shown,
        bound: vec![
            (commands.directory, BoundAccess::Read),
            (target.as_path(), BoundAccess::Write),
        ],
        timeout: settings.timeout.0,
    };
    commands.run(&task, on_event).map_err(failed)?;
    Ok(target)
}

/// Arguments of `pip` that say what to install: a requirements file, or the dependencies of the
/// project that a pyproject.toml describes, and not the project itself, whose files the function
/// has anyhow.
fn wanted(requirements: &Path) -> Result<Vec<OsString>, ImportFailure> {
    if requirements.file_name() != Some("pyproject.toml".as_ref()) {
        return Ok(vec!["--requirement".into(), requirements.into()]);
    }
    let unusable =
        |reason: String| ImportFailure::Pyproject { path: requirements.to_owned(), reason };
    let read = File::open(requirements).and_then(|file| {
        let mut text = String::new();
        file.take(PYPROJECT_MAX).read_to_string(&mut text).map(|_| text)
    });
    let text = read.map_err(|error| unusable(error.to_string()))?;
    let dependencies = dependencies(&text).map_err(unusable)?;
    // What follows is no option, whatever the file says.
    let all = dependencies.into_iter().map(OsString::from);
    Ok(match all.len() {
        0 => Vec::new(),
        _ => [OsString::from("--")].into_iter().chain(all).collect(),
    })
}

/// The dependencies of a project by the text of its pyproject.toml: those of `[project]` (PEP 621),
/// or of Poetry's own table.
///
/// # Errors
/// It is not TOML, or `pip` could not install one of them.
pub(crate) fn dependencies(text: &str) -> Result<Vec<String>, String> {
    let table: toml::Table = text.parse().map_err(|error| format!("{error}"))?;
    let list = table.get("project").and_then(|project| project.get("dependencies"));
    let poetry = table.get("tool").and_then(|tool| tool.get("poetry"));
    if let (None, Some(poetry)) = (list, poetry.and_then(toml::Value::as_table)) {
        return poetry::dependencies(poetry);
    }
    let list = list.and_then(toml::Value::as_array);
    Ok(list.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect())
}

/// The interpreter that the function's author has named, or the one in this process's
/// search path, with the directories that it was installed in.
fn interpreter(commands: &Commands<'_>, runtime: &RuntimeConfig) -> io::Result<Interpreter> {
    if let Some(named) = &runtime.interpreter {
        let program = commands.directory.join(named).into();
        return Ok(Interpreter { program, shown: Vec::new() });
    }
    let script = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')";
    let arguments = ["-I", "-c", script];
    let question =
        Question { interpreter: Path::new("python3"), arguments: &arguments, named: false };
    let answer = ask_on_host(&question)?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    let mut paths = text.lines().map(PathBuf::from).filter(|path| path.is_absolute());
    let Some(program) = paths.next().filter(|_| answer.status.success()) else {
        return Err(io::Error::other("python3 does not say where it lies"));
    };
    // The whole host is nobody's installation.
    let shown = paths.filter(|path| path.components().count() > 1).collect();
    Ok(Interpreter { program: program.into(), shown })
}
