//! CRuby, 3.1 and later. `ruby.rb` is the bootstrap.

use super::fit::Unfit;
use super::language::{BootstrapFile, Language, directories_of, is_versioned};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The bootstrap, which removes itself.
const BOOTSTRAP: &str = ".thaw-template.rb";
/// Bytes of a name that Ruby keeps apart from the string: the longest that it keeps within is
/// below 640 (gc.c, size pools of Ruby 3.2 and later).
const LONG_NAME: usize = 700;

pub(super) struct Ruby;

impl Language for Ruby {
    fn name(&self) -> &'static str {
        "ruby"
    }

    fn bootstrap(&self) -> &'static [BootstrapFile] {
        &[(BOOTSTRAP, include_bytes!("ruby.rb"))]
    }

    fn usual_modules(&self) -> &'static [&'static str] {
        &[
            "date",
            "delegate",
            "digest",
            "erb",
            "fileutils",
            "forwardable",
            "json",
            "logger",
            "monitor",
            "net/http",
            "openssl",
            "optparse",
            "securerandom",
            "set",
            "singleton",
            "socket",
            "stringio",
            "strscan",
            "tempfile",
            "time",
            "timeout",
            "uri",
            "yaml",
            "zlib",
        ]
    }

    fn is_interpreter(&self, file_name: &str) -> bool {
        is_versioned(file_name, "ruby")
    }

    fn check(
        &self,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<(), Unfit> {
        if environment.contains_key("RUBYOPT") {
            return Err(Unfit("its environment has RUBYOPT".to_owned()));
        }
        match arguments.first().map(String::as_str) {
            Some(option) if option.starts_with('-') => Err(Unfit::option(option)),
            Some(_) => Ok(()),
            None => Err(Unfit::no_program()),
        }
    }

    fn reads_variable(&self, name: &str, _loads_packages: bool) -> bool {
        ["RUBY", "GEM_", "BUNDLE"].iter().any(|beginning| name.starts_with(beginning))
    }

    /// The bootstrap under its long name: Ruby opens the program before it loads what `-r`
    /// names.
    fn options(&self, directory: &str) -> Vec<String> {
        let path = format!("{}{BOOTSTRAP}", directory.trim_start_matches('/'));
        vec![format!("{path:/>LONG_NAME$}")]
    }

    fn load_bootstrap(&self, directory: &str, environment: &mut BTreeMap<String, String>) {
        environment.insert("RUBYOPT".to_owned(), format!("-r{directory}{BOOTSTRAP}"));
    }

    fn package_directories(
        &self,
        _workdir: &str,
        environment: &BTreeMap<String, String>,
    ) -> Vec<PathBuf> {
        let lists = ["RUBYLIB", "GEM_HOME", "GEM_PATH"];
        lists.iter().flat_map(|&name| directories_of(environment.get(name))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_bootstrap_under_a_long_name() {
        for directory in ["/", "/tmp/"] {
            let [program] = &Ruby.options(directory)[..] else { panic!("one option") };
            assert_eq!(program.len(), LONG_NAME);
            let path = format!("/{}", program.trim_start_matches('/'));
            assert_eq!(path, format!("{directory}{BOOTSTRAP}"));
        }
    }
}
