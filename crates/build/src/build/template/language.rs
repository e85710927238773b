//! What differs between languages in how a runtime template is made of their interpreter, and
//! how a program is given to a copy of it.
//!
//! One language is one file of Rust, which says when a program fits and how the interpreter is
//! started, and one program in the language itself, the bootstrap. The interpreter loads the
//! bootstrap within its own start, before it looks at the program. The bootstrap
//!
//! 1. leaves nothing of itself that a program meets, and loads the modules that are behind the
//!    word [`TEMPLATE_WORD`] in its command line,
//! 2. writes to `/dev/thaw`, which freezes the template,
//! 3. reads `/proc/self/cmdline` in the copy. If that has the word, it goes on at 1 for the
//!    next template of the chain. If not, it takes over environment and directory, and has
//!    the interpreter run the program as if it had been started with it.
//!
//! Templates of Java load no modules, so they have neither the word nor a chain. PHP has no
//! bootstrap at all: see [`super::placeholders`].

use super::Files;
use super::fit::Unfit;
use super::placeholders::Replacement;
use super::{java, node, php, python, ruby};
use std::collections::BTreeMap;
use std::path::PathBuf;
use thaw_home::config::TemplateLanguage;
use thaw_store::{Session, StoreError};

/// Where everybody may make files, and remove his own.
pub(super) const EVERYBODYS_DIRECTORY: &str = "/tmp";

/// The directory of the bootstrap of an interpreter that this user runs, with a slash behind it: one
/// where the bootstrap can remove itself.
pub(super) fn directory_of_bootstrap(uid: u32) -> &'static str {
    match uid {
        0 => "/",
        _ => "/tmp/",
    }
}

/// What the name of each bootstrap begins with, of a file or a directory; those of no function do.
pub(in crate::build) const BOOTSTRAP_NAME: &str = ".thaw-template";

/// The argument of an interpreter that is to become a template; modules follow it.
pub(super) const TEMPLATE_WORD: &str = "thaw-template";

/// A file of a bootstrap: where the interpreter finds it, below [`directory_of_bootstrap`], which is a path
/// that no function uses, and its content.
pub(super) type BootstrapFile = (&'static str, &'static [u8]);

/// A language that has runtime templates.
pub(super) trait Language: Sync {
    /// How templates of it are named, for people.
    fn name(&self) -> &'static str;

    /// The files of the bootstrap, all in one directory; empty: there is none.
    fn bootstrap(&self) -> &'static [BootstrapFile];

    /// Modules that servers usually load.
    fn usual_modules(&self) -> &'static [&'static str];

    /// Whether a program of this file name may be the interpreter.
    fn is_interpreter(&self, file_name: &str) -> bool;

    /// Whether a program can be given to a running interpreter, by the arguments of the
    /// interpreter and the environment.
    ///
    /// # Errors
    /// Why not.
    fn check(
        &self,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<(), Unfit>;

    /// The same by the files. `workdir` is the function's.
    ///
    /// # Errors
    /// The store cannot be read. Within: why not.
    fn check_files(
        &self,
        _session: &Session,
        _workdir: &str,
        _files: &Files<'_>,
    ) -> Result<Result<(), Unfit>, StoreError> {
        Ok(Ok(()))
    }

    /// Bytes that are in the executable of each interpreter that templates are made of; `None`: they are
    /// made of all.
    fn mark(&self) -> Option<&'static [u8]> {
        None
    }

    /// Whether the interpreter looks at this variable when it starts, or, with `loads_packages`,
    /// when it loads the modules that a function names. What is common to all languages need
    /// not be repeated.
    fn reads_variable(&self, name: &str, loads_packages: bool) -> bool;

    /// The command of an interpreter that is to become a template. `function` is that of the
    /// function, `directory` that of the bootstrap, `modules` what is to be loaded.
    fn command(&self, function: &[String], directory: &str, modules: &[String]) -> Vec<String> {
        let mut command = vec![function[0].clone()];
        command.extend(self.options(directory));
        command.push(TEMPLATE_WORD.to_owned());
        command.extend_from_slice(modules);
        command
    }

    /// What [`Language::command`] has in front of [`TEMPLATE_WORD`].
    fn options(&self, _directory: &str) -> Vec<String> {
        Vec::new()
    }

    /// Changes the environment so that the interpreter loads the bootstrap from `directory`.
    fn load_bootstrap(&self, directory: &str, environment: &mut BTreeMap<String, String>);

    /// What a copy has in the place of placeholders among the arguments of [`Language::command`], where
    /// an interpreter is frozen that loads no bootstrap. `function` is the command of the function.
    fn replacements(&self, _function: &[String], _workdir: &str) -> Option<Vec<Replacement>> {
        None
    }

    /// The directories that hold the modules which functions name. `workdir` is that of the
    /// function.
    fn package_directories(
        &self,
        workdir: &str,
        environment: &BTreeMap<String, String>,
    ) -> Vec<PathBuf>;

    /// What a template must know to find these modules besides the environment, as further
    /// arguments in front of the modules.
    fn module_arguments(&self, _packages: &[PathBuf]) -> Vec<String> {
        Vec::new()
    }

    /// Whether the interpreter looks at the limits of its sandbox when it starts, so that a template
    /// is one for functions with the same.
    fn starts_by_limits(&self) -> bool {
        false
    }
}

/// How templates of a language are made; `None`: the command is of none that has some.
pub(super) fn of(language: TemplateLanguage, command: &[String]) -> Option<&'static dyn Language> {
    const ALL: [&dyn Language; 5] =
        [&python::Python, &node::Node, &ruby::Ruby, &java::Java, &php::Php];
    match language {
        TemplateLanguage::Python3 => Some(&python::Python),
        TemplateLanguage::Node => Some(&node::Node),
        TemplateLanguage::Ruby => Some(&ruby::Ruby),
        TemplateLanguage::Java => Some(&java::Java),
        TemplateLanguage::Php => Some(&php::Php),
        TemplateLanguage::Auto => {
            let name = file_name(command.first()?);
            ALL.into_iter().find(|language| language.is_interpreter(name))
        }
    }
}

/// The last part of a path.
pub(in crate::build) fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a file name is that of an interpreter, maybe with a version behind it.
pub(super) fn is_versioned(file_name: &str, interpreter: &str) -> bool {
    let version = file_name.strip_prefix(interpreter);
    version.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// The absolute directories of a list with colons between them, such as `PATH`.
pub(super) fn directories_of(list: Option<&String>) -> Vec<PathBuf> {
    let all = list.into_iter().flat_map(|list| list.split(':'));
    all.filter(|path| path.starts_with('/')).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_language_of_a_command_is_that_of_its_interpreter() {
        let of = |program: &str| {
            let found = of(TemplateLanguage::Auto, &[program.to_owned()]);
            found.map(|language| language.name())
        };
        let programs = [
            "python3",
            "/usr/local/bin/python3.12",
            "node",
            "/opt/jdk/bin/java",
            "ruby3.1",
            "php8.2",
        ];
        let found = programs.map(of);
        let expected = ["python3", "python3", "node", "java", "ruby", "php"].map(Some);
        assert_eq!(found, expected);
        assert_eq!([of("nginx"), of("pythonic"), of("javac"), of("php-fpm")], [None; 4]);
    }
}
