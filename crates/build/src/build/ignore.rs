//! What of a function's directory is left out: by its `.thawignore`, and what looks like
//! secrets.

use ::ignore::Match;
use ::ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use thaw_home::beneath;
use thaw_store::import::LeaveOut;

/// Name of the file in a function's directory.
pub const IGNORE_FILE: &str = ".thawignore";
/// Most bytes of that file.
const IGNORE_MAX: u64 = 64 << 10;
/// Most names that a note lists.
const NAMED_MAX: usize = 8;

/// What is left out where nobody has said which files a function needs: version control, and
/// what is named as passwords and private keys are. Later rules count, and so do those of
/// `.thawignore`.
const USUAL: &[&str] = &[
    ".git",
    ".env",
    ".env.*",
    "!.env.example",
    "!.env.sample",
    "!.env.template",
    ".netrc",
    ".ssh/",
    ".aws/",
    ".gnupg/",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "*.key",
    "*-key.pem",
    "*_key.pem",
    "key.pem",
    "privkey.pem",
    "*.p12",
    "*.pfx",
];

/// Why the rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IgnoreError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A line is no rule.
    #[error("{}:{line}: {reason}; write it as in a .gitignore", path.display())]
    Rule {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// What of a function's directory is left out.
#[derive(Debug)]
pub(super) struct Ignored {
    /// The author's rules.
    own: Gitignore,
    /// Rules for what looks like secrets.
    usual: Gitignore,
    /// What was left out by the latter.
    found: Mutex<Vec<PathBuf>>,
}

impl Ignored {
    /// The rules for a function's directory. `takes_all`: nobody has said which files it needs.
    ///
    /// # Errors
    /// Its `.thawignore` cannot be read, or has a line that is no rule.
    pub fn of(directory: &Path, takes_all: bool) -> Result<Self, IgnoreError> {
        let usual = if takes_all { USUAL } else { &[] };
        let usual = rules(usual.iter().copied(), Path::new(""))?;
        let path = directory.join(IGNORE_FILE);
        let text = beneath::open_directory(directory)
            .and_then(|directory| beneath::read(directory, IGNORE_FILE.as_ref(), IGNORE_MAX));
        let text = match text {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(IgnoreError::Read { path, error }),
        };
        Ok(Self { own: rules(text.lines(), &path)?, usual, found: Mutex::default() })
    }

    /// A sentence about what was left out because it looks like secrets, if something was.
    pub fn note(&self) -> Option<String> {
        let found = self.found.lock().expect("no holder panics");
        if found.is_empty() {
            return None;
        }
        let names = found.iter().take(NAMED_MAX).map(|path| path.display().to_string());
        let names = names.collect::<Vec<_>>().join(", ");
        let more = found.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Some(format!(
            "left out {names}{more}, which may hold secrets; if the program needs one, name it in \
             `files`, or in .thawignore with a ! before it, or use [secrets]"
        ))
    }
}

fn rules<'a>(lines: impl Iterator<Item = &'a str>, path: &Path) -> Result<Gitignore, IgnoreError> {
    let wrong = |line, error: ::ignore::Error| {
        let reason = error.to_string();
        IgnoreError::Rule { path: path.to_owned(), line, reason }
    };
    let mut builder = GitignoreBuilder::new("");
    for (number, line) in lines.enumerate() {
        builder.add_line(None, line).map_err(|error| wrong(number + 1, error))?;
    }
    builder.build().map_err(|error| wrong(0, error))
}

impl LeaveOut for Ignored {
    fn leaves_out(&self, path: &Path, is_directory: bool) -> bool {
        match self.own.matched(path, is_directory) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => {}
        }
        let is_usual = self.usual.matched(path, is_directory).is_ignore();
        if is_usual {
            self.found.lock().expect("no holder panics").push(path.to_owned());
        }
        is_usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ignored(text: &str, takes_all: bool) -> Result<Ignored, IgnoreError> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(IGNORE_FILE), text).unwrap();
        Ignored::of(directory.path(), takes_all)
    }

    #[test]
    fn rules_are_those_of_git() {
        let text = "# logs\n*.log\n!keep.log\n/build/\ndoc/**/draft\n";
        let ignored = ignored(text, false).unwrap();
        let cases = [
            ("a.log", false, true),
            ("sub/a.log", false, true),
            ("keep.log", false, false),
            ("build", true, true),
            ("build", false, false),
            ("sub/build", true, false),
            ("doc/x/y/draft", false, true),
            (".env", false, false),
        ];
        for (path, is_directory, expected) in cases {
            assert_eq!(ignored.leaves_out(Path::new(path), is_directory), expected, "{path}");
        }
        assert_eq!(ignored.note(), None);
    }

    #[test]
    fn what_looks_like_secrets_is_left_out_with_a_word() {
        let ignored = ignored("!sub/test.key\n", true).unwrap();
        for path in [".env", ".env.local", "sub/tls.key", "id_ed25519", "tls-key.pem"] {
            assert!(ignored.leaves_out(Path::new(path), false), "{path}");
        }
        assert!(ignored.leaves_out(Path::new(".git"), true));
        for path in ["sub/test.key", ".env.example", "cacert.pem", "id_rsa.pub", "environment"] {
            assert!(!ignored.leaves_out(Path::new(path), false), "{path}");
        }
        let note = ignored.note().unwrap();
        assert!(note.starts_with("left out .env, .env.local, sub/tls.key"), "{note}");
        assert!((0..20).all(|_| ignored.leaves_out(Path::new("x.key"), false)));
        assert!(ignored.note().unwrap().contains("and 18 more"));
    }

    #[test]
    fn a_line_that_is_no_rule_is_named() {
        let error = ignored("ok\na[z-a]\n", true).unwrap_err().to_string();
        assert!(
            error.contains(".thawignore:2: ") && error.contains("as in a .gitignore"),
            "{error}"
        );
    }
}
