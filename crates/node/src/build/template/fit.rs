//! Whether a program runs in a copy of a runtime template as it would from its start.

use super::Files;
use super::language::Language;
use crate::function::StoredFunction;
use std::collections::BTreeMap;
use std::path::Path;
use thaw_store::Tree;

/// Why a function is built the ordinary way, for people.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

impl Unfit {
    /// The interpreter gets an option that it has looked at in the template already.
    pub fn option(option: &str) -> Self {
        Self(format!("its interpreter gets the option {option}"))
    }

    /// The interpreter gets nothing to run.
    pub fn no_program() -> Self {
        Self("its interpreter gets no program".to_owned())
    }
}

/// Checks that a program can be given to a running interpreter.
pub(super) fn check(
    language: &dyn Language,
    function: &StoredFunction,
    files: &Files<'_>,
) -> Result<(), Unfit> {
    let unfit = |why: String| Err(Unfit(why));
    let Some(runtime) = files.runtime else {
        return unfit("its files are not those of a language".to_owned());
    };
    if function.cpu_baseline.level().is_some() {
        return unfit("it is held to a level of the instruction set".to_owned());
    }
    if function.config.ids().0 != 0 {
        return unfit(
            "it runs as another user than root, who cannot remove the bootstrap".to_owned(),
        );
    }
    let Some((program, arguments)) = function.config.command.split_first() else {
        return unfit("it has no program".to_owned());
    };
    if !is_interpreter(language, program, function, runtime) {
        return unfit(format!("`{program}` is not the interpreter {}", language.name()));
    }
    language.check(arguments, &function.environment)
}

/// Whether a command is the interpreter among the files of the language.
fn is_interpreter(
    language: &dyn Language,
    command: &str,
    function: &StoredFunction,
    runtime: &Tree,
) -> bool {
    let name = command.rsplit('/').next().unwrap_or(command);
    if !language.is_interpreter(name) {
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
    language: &dyn Language,
    function: &StoredFunction,
    loads_packages: bool,
) -> BTreeMap<String, String> {
    /// Names, and beginnings of names, that the loader, the C library and OpenSSL know.
    const NAMES: [&str; 6] = ["PATH", "HOME", "LANG", "LANGUAGE", "TZ", "OPENSSL_CONF"];
    const BEGINNINGS: [&str; 5] = ["LD_", "LC_", "MALLOC_", "GLIBC_", "SSL_"];
    let matters = |name: &str| {
        NAMES.contains(&name)
            || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
            || language.reads_variable(name, loads_packages)
    };
    let all = function.environment.iter().filter(|(name, _)| matters(name));
    all.map(|(name, value)| (name.clone(), value.clone())).collect()
}
