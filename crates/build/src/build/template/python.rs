//! CPython, 3.10 and later. `python.py` is the bootstrap.

use super::fit::Unfit;
use super::language::{BootstrapFile, Language, directories_of};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The directory of the bootstrap, which removes it with itself.
const DIRECTORY: &str = ".thaw-template";

pub(super) struct Python;

impl Language for Python {
    fn name(&self) -> &'static str {
        "python3"
    }

    fn bootstrap(&self) -> &'static [BootstrapFile] {
        &[(".thaw-template/sitecustomize.py", include_bytes!("python.py"))]
    }

    fn usual_modules(&self) -> &'static [&'static str] {
        &[
            "asyncio",
            "base64",
            "concurrent.futures.thread",
            "contextlib",
            "dataclasses",
            "datetime",
            "email.message",
            "functools",
            "hashlib",
            "http.client",
            "http.server",
            "inspect",
            "json",
            "logging",
            "pathlib",
            "random",
            "secrets",
            "shutil",
            "socketserver",
            "ssl",
            "subprocess",
            "tempfile",
            "threading",
            "typing",
            "urllib.request",
            "uuid",
        ]
    }

    fn is_interpreter(&self, file_name: &str) -> bool {
        let version = file_name.strip_prefix("python");
        version.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
    }

    fn check(&self, arguments: &[String], _: &BTreeMap<String, String>) -> Result<(), Unfit> {
        match arguments.first().map(String::as_str) {
            Some("-m" | "-c") if arguments.len() > 1 => Ok(()),
            Some(option) if option.starts_with('-') => Err(Unfit::option(option)),
            Some(_) => Ok(()),
            None => Err(Unfit::no_program()),
        }
    }

    fn reads_variable(&self, name: &str, loads_packages: bool) -> bool {
        match name {
            // Where packages lie is looked at again in the copy.
            "PYTHONPATH" => loads_packages,
            // Thread pools of numeric packages have their size when they are loaded.
            name if name.ends_with("_NUM_THREADS") => loads_packages,
            name => name.starts_with("PYTHON"),
        }
    }

    fn options(&self, _directory: &str) -> Vec<String> {
        vec!["-m".to_owned()]
    }

    fn load_bootstrap(&self, directory: &str, environment: &mut BTreeMap<String, String>) {
        environment.insert("PYTHONPATH".to_owned(), format!("{directory}{DIRECTORY}"));
    }

    fn package_directories(
        &self,
        _workdir: &str,
        environment: &BTreeMap<String, String>,
    ) -> Vec<PathBuf> {
        directories_of(environment.get("PYTHONPATH"))
    }
}
