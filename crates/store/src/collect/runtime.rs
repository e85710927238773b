//! Language runtimes: interpreters that need more than their libraries.

use std::path::PathBuf;

use super::collector::Collector;
use super::{CollectError, language, python};
use crate::error::Result;

/// A language runtime that can be collected from the host.
pub struct Runtime {
    /// The name by which it is asked for.
    pub name: &'static str,
    /// What it brings along, in one line.
    pub summary: &'static str,
    collect: fn(&mut Collector<'_>, &RuntimeRequest) -> Result<()>,
}

/// All runtimes. Another language is one more line and what to ask its
/// interpreter.
pub const RUNTIMES: &[Runtime] = &[
    Runtime {
        name: "python3",
        summary: "the interpreter, its standard library and, for a virtual environment, its \
                  packages",
        collect: python::collect,
    },
    Runtime { name: "node", summary: "Node.js", collect: language::collect_node },
    Runtime {
        name: "java",
        summary: "the Java home that `java` belongs to",
        collect: language::collect_java,
    },
    Runtime {
        name: "ruby",
        summary: "the interpreter, its library and installed gems",
        collect: language::collect_ruby,
    },
    Runtime {
        name: "php",
        summary: "the command-line interpreter, its extensions and settings",
        collect: language::collect_php,
    },
    Runtime {
        name: "perl",
        summary: "the interpreter and its library",
        collect: language::collect_perl,
    },
];

/// A runtime that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeRequest {
    /// One of the names in [`RUNTIMES`].
    pub name: String,
    /// The interpreter, such as that of a virtual environment; `None` for the
    /// one in the search path.
    pub interpreter: Option<PathBuf>,
    /// Packages that were installed for the interpreter as a whole.
    pub packages: Packages,
}

/// Whether packages installed for the interpreter as a whole come along.
/// Those of a virtual environment always do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packages {
    /// Only the standard library.
    #[default]
    Standard,
    /// Everything that the interpreter would find on the host.
    Installed,
}

impl RuntimeRequest {
    /// The runtime of this name from the search path, standard library only.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), interpreter: None, packages: Packages::default() }
    }

    pub(super) fn collect(&self, collector: &mut Collector<'_>) -> Result<()> {
        let runtime = RUNTIMES
            .iter()
            .find(|runtime| runtime.name == self.name)
            .ok_or_else(|| CollectError::NoRuntime { name: self.name.clone() })?;
        (runtime.collect)(collector, self)
    }
}

/// The names of all runtimes, for error messages.
pub(super) fn names() -> String {
    RUNTIMES.iter().map(|runtime| runtime.name).collect::<Vec<_>>().join(", ")
}
