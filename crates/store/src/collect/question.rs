//! Asking interpreters where their files are.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A question to an interpreter, which prints the answer and ends.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The interpreter.
    pub interpreter: &'a Path,
    /// Its arguments.
    pub arguments: &'a [&'a str],
    /// Whether the request named the interpreter; otherwise it is the one in the
    /// search path.
    pub named: bool,
}

/// Runs an interpreter with a question.
pub type Ask<'a> = dyn FnMut(&Question<'_>) -> io::Result<Output> + 'a;

/// Variables that an interpreter, or a version manager that stands in for one,
/// needs. Others could make it load code.
const VARIABLES: [&str; 9] = [
    "HOME",
    "USER",
    "LOGNAME",
    "JAVA_HOME",
    "GEM_HOME",
    "GEM_PATH",
    "NVM_DIR",
    "SDKMAN_DIR",
    "XDG_DATA_HOME",
];
/// Version managers, by the beginning of their variables' names.
const MANAGERS: [&str; 5] = ["PYENV_", "RBENV_", "ASDF_", "MISE_", "XDG_CONFIG"];

/// Runs the interpreter on this host, in the root directory and with few variables:
/// nothing in a function's directory is looked at, such as a `.python-version` or
/// what a relative path in `PYTHONPATH` leads to.
///
/// # Errors
/// It cannot be started.
pub fn ask_on_host(question: &Question<'_>) -> io::Result<Output> {
    let is_kept = |name: &OsStr| {
        let name = name.to_string_lossy();
        VARIABLES.contains(&&*name) || MANAGERS.iter().any(|start| name.starts_with(start))
    };
    Command::new(question.interpreter)
        .args(question.arguments)
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_kept(name)))
        .env("PATH", absolute_search_path())
        .env("LANG", "C.UTF-8")
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
}

/// This process's search path without what depends on the working directory.
fn absolute_search_path() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let absolute = std::env::split_paths(&path).filter(|directory| directory.is_absolute());
    // Parts of a search path can be joined again.
    std::env::join_paths(absolute).unwrap_or_else(|_| "/usr/bin:/bin".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_asked_where_no_function_has_a_say() {
        let script = "pwd; env";
        let arguments = ["-c", script];
        let question =
            Question { interpreter: Path::new("/bin/sh"), arguments: &arguments, named: false };
        let answer = ask_on_host(&question).unwrap();
        let text = String::from_utf8(answer.stdout).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("/"));
        for variable in lines.filter_map(|line| line.split_once('=')).map(|(name, _)| name) {
            let known = ["PATH", "LANG", "PWD", "OLDPWD", "SHLVL", "_"];
            let kept = VARIABLES.contains(&variable)
                || MANAGERS.iter().any(|start| variable.starts_with(start));
            assert!(kept || known.contains(&variable), "{variable}");
        }
    }
}
