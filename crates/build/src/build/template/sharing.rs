//! Runtime templates that nobody has named, for functions that share a runtime.

use super::language;
use crate::build::{BuildError, BuildEvent, OnEvent};
use thaw_home::config::{FunctionConfig, RuntimeKind, TemplateLanguage};
use thaw_home::function::BuiltFunction;
use thaw_store::Store;

/// Has a function built from the runtime template of its language, as if its thaw.toml had said
/// `from = "auto"`, if another function of the store shares its runtime.
///
/// # Errors
/// The functions of the store cannot be listed.
pub(in crate::build) fn share(
    store: &Store,
    config: &mut FunctionConfig,
    on_event: &mut OnEvent<'_>,
) -> Result<(), BuildError> {
    let wants_none = config.template.from.is_none() && language_of(config).is_some();
    if !wants_none {
        return Ok(());
    }
    let records = store.list_functions()?.records.into_iter();
    // What cannot be read shares nothing.
    let mut others = records.filter_map(|record| BuiltFunction::from_record(record).ok());
    if let Some(other) = others.find(|other| shares_runtime(config, &other.function.config)) {
        let name = &other.function.config.name;
        on_event(BuildEvent::Note(&format!(
            "it shares its runtime with {name}, so a runtime template is looked for"
        )));
        config.template.from = Some(TemplateLanguage::Auto);
    }
    Ok(())
}

/// Whether two different functions have the same interpreter, over the same files, which they may
/// share. What lies in a function's own directory is another one's never.
fn shares_runtime(one: &FunctionConfig, other: &FunctionConfig) -> bool {
    one.name != other.name
        && language_of(one) == language_of(other)
        && interpreter(one) == interpreter(other)
        && !interpreter(one).and_then(|(_, _, path)| path).is_some_and(is_own)
        && one.rootfs == other.rootfs
        && !one.rootfs.as_deref().is_some_and(is_own)
        && one.sharing.domain == other.sharing.domain
}

/// Whether a path is one from the function's own directory.
fn is_own(path: &str) -> bool {
    path.contains('/') && !path.starts_with('/')
}

/// The language of a function's command, if there are templates of it.
fn language_of(config: &FunctionConfig) -> Option<&'static str> {
    language::of(TemplateLanguage::Auto, &config.command).map(|language| language.name())
}

/// What is collected of the host, as far as the interpreter depends on it.
fn interpreter(config: &FunctionConfig) -> Option<(RuntimeKind, Option<&str>, Option<&str>)> {
    let runtime = config.runtime.as_ref()?;
    let path = runtime.interpreter.as_ref().and_then(|path| path.to_str());
    Some((runtime.kind, runtime.image.as_deref(), path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn function(name: &str, more: &str) -> FunctionConfig {
        let text = format!("name = \"{name}\"\nport = 80\n{more}");
        FunctionConfig::parse(Path::new("thaw.toml"), &text).unwrap()
    }

    #[test]
    fn functions_share_a_runtime_if_interpreter_files_and_domain_are_the_same() {
        const PYTHON: &str = "command = [\"python3\", \"a.py\"]\n[runtime]\nkind = \"python3\"\n";
        let one = function("one", PYTHON);
        let other = |name, from, to| function(name, &PYTHON.replace(from, to));
        assert!(shares_runtime(&one, &other("two", "a.py", "b.py")));
        assert!(!shares_runtime(&one, &one), "a function shares nothing with itself");
        let own = "kind = \"python3\"\ninterpreter = \"/opt/python3\"";
        assert!(!shares_runtime(&one, &other("two", "kind = \"python3\"", own)));
        assert!(!shares_runtime(&one, &other("two", "\"python3\", \"a.py\"", "\"gunicorn\"")));
        let relative =
            PYTHON.replace("kind = \"python3\"", "kind = \"python3\"\ninterpreter = \"./python3\"");
        let relative = |name| function(name, &relative);
        assert!(!shares_runtime(&relative("one"), &relative("two")));
        let domain = "kind = \"python3\"\n[sharing]\ndomain = \"customer\"";
        assert!(!shares_runtime(&one, &other("two", "kind = \"python3\"", domain)));
    }
}
