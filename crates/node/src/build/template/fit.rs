//! Whether a program runs in a copy of a runtime template as it would from its start.

use super::Files;
use crate::function::StoredFunction;
use std::collections::BTreeMap;
use std::path::Path;
use thaw_store::Tree;

/// Why a function is built the ordinary way, for people.
pub(super) struct Unfit(pub String);

/// Checks that a program can be given to a running interpreter.
pub(super) fn check(function: &StoredFunction, files: &Files<'_>) -> Result<(), Unfit> {
    let unfit = |why: String| Err(Unfit(why));
    let Some(runtime) = files.runtime else {
        return unfit("its files are not those of a language".to_owned());
    };
    if function.cpu_baseline.level().is_some() {
        return unfit("it is held to a level of the instruction set".to_owned());
    }
    let command = &function.config.command;
    let Some(program) = command.first() else {
        return unfit("it has no program".to_owned());
    };
    if !is_interpreter(program, function, runtime) {
        return unfit(format!("`{program}` is not the interpreter python3"));
    }
    match command.get(1).map(String::as_str) {
        Some("-m" | "-c") if command.len() > 2 => Ok(()),
        Some(option) if option.starts_with('-') => {
            unfit(format!("its interpreter gets the option {option}"))
        }
        Some(_) => Ok(()),
        None => unfit("its interpreter gets no program".to_owned()),
    }
}

/// Whether a command is the interpreter among the files of the language.
fn is_interpreter(command: &str, function: &StoredFunction, runtime: &Tree) -> bool {
    let name = command.rsplit('/').next().unwrap_or(command);
    let version = name.strip_prefix("python");
    if !version.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.')) {
        return false;
    }
    let is_there = |path: &Path| runtime.find(path).is_some();
    if command.contains('/') {
        return command.starts_with('/') && is_there(Path::new(command));
    }
    let search = function.environment.get("PATH").map(String::as_str).unwrap_or_default();
    search.split(':').any(|directory| is_there(&Path::new(directory).join(command)))
}

/// The part of a function's environment that an interpreter looks at when it starts: a template
/// is one for functions that agree in that. Where packages lie is looked at again in the copy,
/// so only a template that loads some must know.
pub(super) fn interpreter_environment(
    function: &StoredFunction,
    loads_packages: bool,
) -> BTreeMap<String, String> {
    /// Names, and beginnings of names, that the loader, the C library, Python and OpenSSL know.
    const NAMES: [&str; 6] = ["PATH", "HOME", "LANG", "LANGUAGE", "TZ", "OPENSSL_CONF"];
    const BEGINNINGS: [&str; 6] = ["PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_", "SSL_"];
    let matters = |name: &str| match name {
        "PYTHONPATH" => loads_packages,
        name => {
            // Thread pools of numeric packages have their size when they are loaded.
            let of_packages = loads_packages && name.ends_with("_NUM_THREADS");
            NAMES.contains(&name)
                || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
                || of_packages
        }
    };
    let all = function.environment.iter().filter(|(name, _)| matters(name));
    all.map(|(name, value)| (name.clone(), value.clone())).collect()
}
