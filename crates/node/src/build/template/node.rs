//! Node.js, 20 and later. `node.js` is the bootstrap.

use super::fit::Unfit;
use super::language::{Language, directories_of};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The bootstrap, and in copies a module that does nothing: `--require` names it to the threads
/// of `worker_threads`, too.
const BOOTSTRAP: &str = "/.thaw-template.js";

pub(super) struct Node;

impl Language for Node {
    fn name(&self) -> &'static str {
        "node"
    }

    fn bootstrap(&self) -> &'static [u8] {
        include_bytes!("node.js")
    }

    fn bootstrap_path(&self) -> &'static str {
        BOOTSTRAP
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

    fn options(&self) -> Vec<String> {
        Vec::new()
    }

    fn load_bootstrap(&self, environment: &mut BTreeMap<String, String>) {
        environment.insert("NODE_OPTIONS".to_owned(), format!("--require={BOOTSTRAP}"));
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
