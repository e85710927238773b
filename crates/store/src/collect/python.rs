//! Python: asks the interpreter where its files are.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::collector::Collector;
use super::runtime::{Packages, RuntimeRequest};
use super::{CollectError, Question};
use crate::error::Result;
use crate::import::Exclude;

const NAME: &str = "python3";

/// Prints what [`Installation`] holds. Runs in isolated mode: neither
/// environment variables nor the user's own packages change the answer.
const ASK: &str = "
import json, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    'executable': sys.executable,
    'prefix': sys.prefix,
    'base_prefix': sys.base_prefix,
    'standard_library': [paths['stdlib'], paths['platstdlib'],
                         sysconfig.get_path('stdlib', vars={'base': sys.base_prefix,
                                                            'installed_base': sys.base_prefix})],
    'search_path': sys.path,
}))
";

/// Parts of the standard library that a server does not use: tests, the editor,
/// the graphical toolkit, the installer and what is needed to build extensions.
const UNUSED: [&str; 9] = [
    "test",
    "idlelib",
    "turtledemo",
    "tkinter",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "lib2to3/tests",
    "unittest/test",
];
/// The same, by pattern.
const UNUSED_PATTERNS: [&str; 4] = ["config-*-linux*", "*.a", "_tkinter.*", "_test*.so"];

/// Where an interpreter's files are.
#[derive(Debug, Deserialize)]
struct Installation {
    /// The interpreter itself, where a shim has led to it.
    executable: PathBuf,
    /// Root of the virtual environment, or the same as `base_prefix`.
    prefix: PathBuf,
    /// Root of the installation.
    base_prefix: PathBuf,
    /// Directories of the standard library, perhaps repeated or missing.
    standard_library: Vec<PathBuf>,
    /// Where modules are looked for.
    search_path: Vec<PathBuf>,
}

pub(super) fn collect(collector: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    let asked = match &request.interpreter {
        Some(path) => collector.find_program(path.as_os_str())?,
        None => collector.find_program(OsStr::new(NAME))?,
    };
    let named = collector.is_authors_choice(&asked, request, NAME);
    let python = ask(collector, &asked, named)?;
    collector.program(&python.executable)?;
    let commands = python.executable.parent().unwrap_or(Path::new("/")).to_owned();
    for name in ["python3", "python"] {
        let other = commands.join(name);
        if collector.exists(&other) {
            collector.place(&other)?;
        }
    }
    for directory in &python.standard_library {
        if collector.exists(directory) {
            collector.place_tree(directory, unused())?;
        }
    }
    let is_virtual = python.prefix != python.base_prefix;
    if is_virtual {
        collector.place_tree(&python.prefix, Vec::new())?;
    }
    // A virtual environment names those outside of it only if it was made so.
    if is_virtual || request.packages == Packages::Installed {
        for directory in &python.search_path {
            if directory.is_absolute() && collector.exists(directory) {
                collector.anything(directory)?;
            }
        }
    }
    if !collector.collected.search_path.contains(&commands) {
        collector.collected.search_path.push(commands);
    }
    Ok(())
}

/// Runs the interpreter once.
fn ask(collector: &mut Collector<'_>, interpreter: &Path, named: bool) -> Result<Installation> {
    let bad = |why: String| CollectError::BadInterpreter {
        runtime: NAME,
        interpreter: interpreter.to_owned(),
        why,
    };
    let question = Question { interpreter, arguments: &["-I", "-c", ASK], named };
    let output = collector.ask(&question).map_err(|error| bad(error.to_string()))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or("it prints no error").to_owned();
        return Err(bad(format!("{} ({last})", output.status)).into());
    }
    let python: Installation = serde_json::from_slice(&output.stdout)
        .map_err(|error| bad(format!("its answer is not understood: {error}")))?;
    if !python.executable.is_absolute() {
        return Err(bad("it does not know its own path".to_owned()).into());
    }
    if !named {
        let paths = [&python.executable, &python.prefix, &python.base_prefix];
        paths.into_iter().chain(&python.standard_library).chain(&python.search_path).for_each(
            |path| {
                if path.is_absolute() {
                    collector.grant(path);
                }
            },
        );
    }
    Ok(python)
}

fn unused() -> Vec<Exclude> {
    let paths = UNUSED.iter().map(|path| Exclude::Path(PathBuf::from(path)));
    let patterns = UNUSED_PATTERNS.iter().map(|&pattern| Exclude::Name(pattern.to_owned()));
    paths.chain(patterns).collect()
}
