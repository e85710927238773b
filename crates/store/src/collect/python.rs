//! Python: asks the interpreter where its files are.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::collector::Collector;
use super::runtime::{Packages, RuntimeRequest};
use super::{CollectError, Question};
use crate::error::Result;
use crate::import::Exclude;

const NAME: &str = "python3";

/// Prints what [`Installation`] holds, each path with a zero byte behind it: the executable, the two
/// prefixes, three directories of the standard library, and the search path. `json` would take as long
/// to load as the interpreter itself. Runs in isolated mode: neither environment variables nor the
/// user's own packages change the answer.
const ASK: &str = "
import os, sys, sysconfig
base = {'base': sys.base_prefix, 'installed_base': sys.base_prefix}
paths = [sys.executable or '', sys.prefix, sys.base_prefix,
         sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'),
         sysconfig.get_path('stdlib', vars=base)]
for path in paths + sys.path:
    sys.stdout.buffer.write(os.fsencode(path) + b'\\0')
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
#[derive(Debug, PartialEq, Eq)]
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

impl Installation {
    /// What [`ASK`] prints. `None`: it is something else.
    fn parse(answer: &[u8]) -> Option<Self> {
        let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
        let paths = answer.strip_suffix(b"\0")?.split(|&byte| byte == 0).map(path);
        let paths: Vec<PathBuf> = paths.collect();
        let ([executable, prefix, base_prefix, library @ ..], search_path) =
            paths.split_at_checked(6)?
        else {
            return None;
        };
        Some(Self {
            executable: executable.clone(),
            prefix: prefix.clone(),
            base_prefix: base_prefix.clone(),
            standard_library: library.to_vec(),
            search_path: search_path.to_vec(),
        })
    }
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
    let python = Installation::parse(&output.stdout)
        .ok_or_else(|| bad("its answer is not understood".to_owned()))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_six_paths_and_the_search_path() {
        let answer = b"/usr/bin/python3\0/v\0/usr\0/l\0/l\0/usr/l\0/l\0/v/\xff\0";
        let python = Installation::parse(answer).unwrap();
        assert_eq!(python.executable, Path::new("/usr/bin/python3"));
        assert_eq!((python.prefix, python.base_prefix), ("/v".into(), "/usr".into()));
        assert_eq!(python.standard_library, ["/l", "/l", "/usr/l"].map(PathBuf::from));
        let last = Path::new(OsStr::from_bytes(b"/v/\xff"));
        assert_eq!(python.search_path, [Path::new("/l"), last]);
        for wrong in [&b""[..], b"/a\0/b\0", b"a\0b\0c\0d\0e\0f", b"a\0b\0c\0d\0e\0"] {
            assert_eq!(Installation::parse(wrong), None);
        }
    }
}
