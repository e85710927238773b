//! Node.js, 20 and later. `node.js` is the bootstrap.

use super::fit::Unfit;
use super::language::{BootstrapFile, Language, directories_of};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The bootstrap, and in copies a module that does nothing: `--require` names it to the threads
/// of `worker_threads`, too.
const BOOTSTRAP: &str = ".thaw-template.js";

pub(super) struct Node;

impl Language for Node {
    fn name(&self) -> &'static str {
        "node"
    }

    fn bootstrap(&self) -> &'static [BootstrapFile] {
        &[(BOOTSTRAP, include_bytes!("node.js"))]
    }

    fn usual_modules(&self) -> &'static [&'static str] {
        // Not `assert`, which opens standard error to learn whether it is a terminal.
        &[
            "async_hooks",
            "buffer",
            "child_process",
            "crypto",
            "dns",
            "events",
            "fs",
            "fs/promises",
            "http",
            "https",
            "module",
            "net",
            "os",
            "path",
            "perf_hooks",
            "querystring",
            "stream",
            "stream/promises",
            "string_decoder",
            "timers",
            "timers/promises",
            "tls",
            "url",
            "util",
            "worker_threads",
            "zlib",
        ]
    }

    fn is_interpreter(&self, file_name: &str) -> bool {
        matches!(file_name, "node" | "nodejs")
    }

    fn check(
        &self,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<(), Unfit> {
        if environment.contains_key("NODE_OPTIONS") {
            return Err(Unfit("its environment has NODE_OPTIONS".to_owned()));
        }
        match arguments.first().map(String::as_str) {
            Some(option) if option.starts_with('-') => Err(Unfit::option(option)),
            // node(1): the debugger.
            Some(word @ ("inspect" | "debug")) => {
                Err(Unfit(format!("`{word}` is a command of its interpreter")))
            }
            Some(_) => Ok(()),
            None => Err(Unfit::no_program()),
        }
    }

    fn reads_variable(&self, name: &str, loads_packages: bool) -> bool {
        match name {
            // These are looked at again in the copy; packages may look at them when they are
            // loaded.
            "NODE_PATH" | "NODE_ENV" => loads_packages,
            name => {
                let beginnings = ["NODE_", "UV_", "NO_COLOR", "FORCE_COLOR"];
                beginnings.iter().any(|beginning| name.starts_with(beginning))
            }
        }
    }

    fn load_bootstrap(&self, directory: &str, environment: &mut BTreeMap<String, String>) {
        let options = format!("--require={directory}{BOOTSTRAP}");
        environment.insert("NODE_OPTIONS".to_owned(), options);
    }

    /// Where `require` looks from a program in the working directory.
    fn package_directories(
        &self,
        workdir: &str,
        environment: &BTreeMap<String, String>,
    ) -> Vec<PathBuf> {
        let above = Path::new(workdir).ancestors();
        let own = above.map(|directory| directory.join("node_modules"));
        own.chain(directories_of(environment.get("NODE_PATH"))).collect()
    }

    /// The directories, since a template does not know the working directory.
    fn module_arguments(&self, packages: &[PathBuf]) -> Vec<String> {
        let list: Vec<_> = packages.iter().map(|path| path.to_string_lossy()).collect();
        vec![format!("--packages={}", list.join(":"))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(of: &[(&str, &str)]) -> BTreeMap<String, String> {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn commands_that_node_looks_at_first_do_not_fit() {
        let check = |words: &[&str], environment: &[(&str, &str)]| {
            let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
            Node.check(&words, &variables(environment)).map_err(|Unfit(why)| why)
        };
        check(&["app.js", "-e"], &[("NODE_ENV", "production")]).unwrap();
        for (words, word) in [
            (vec![], "no program"),
            (vec!["-e", "1"], "-e"),
            (vec!["inspect", "app.js"], "inspect"),
        ] {
            assert!(check(&words, &[]).unwrap_err().contains(word), "{words:?}");
        }
        let why = check(&["app.js"], &[("NODE_OPTIONS", "")]).unwrap_err();
        assert!(why.contains("NODE_OPTIONS"), "{why}");
    }

    #[test]
    fn packages_are_where_require_looks() {
        let found = Node.package_directories("/app/src", &variables(&[("NODE_PATH", "/a:b:/c")]));
        let expected = ["/app/src/node_modules", "/app/node_modules", "/node_modules", "/a", "/c"];
        assert_eq!(found, expected.map(PathBuf::from));
        let arguments = Node.module_arguments(&found[..2]);
        assert_eq!(arguments, ["--packages=/app/src/node_modules:/app/node_modules"]);
    }
}
