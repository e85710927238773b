//! Rules for what an import leaves out.

use std::path::{Path, PathBuf};

use std::os::unix::ffi::OsStrExt;

/// A file or directory to be left out, with everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exclude {
    /// Everything whose own name matches this pattern, wherever it lies. `*`
    /// stands for any bytes.
    Name(String),
    /// This path, relative to the imported directory.
    Path(PathBuf),
}

impl Exclude {
    /// Whether the rule leaves out the file at `path`, relative to the imported
    /// directory.
    pub(crate) fn matches(&self, path: &Path) -> bool {
        match self {
            Exclude::Name(pattern) => path
                .file_name()
                .is_some_and(|name| matches_pattern(pattern.as_bytes(), name.as_bytes())),
            Exclude::Path(excluded) => path == excluded,
        }
    }
}

/// Names files of a directory by their paths: `secrets/**`, `*.key`, `conf/*.pem`.
/// `*` stands for any bytes of one name, `**` for any number of names. What names a
/// directory also names everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    names: Vec<Vec<u8>>,
}

impl PathPattern {
    /// The pattern that `text` writes; `None` if it is not a relative path without
    /// `..`, or has more than [`PathPattern::NAMES_MAX`] names.
    pub fn new(text: &str) -> Option<Self> {
        let names: Vec<&str> = text.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
        let good = !names.is_empty()
            && names.len() <= Self::NAMES_MAX
            && !text.starts_with('/')
            && !names.contains(&"..");
        good.then(|| Self { names: names.iter().map(|name| name.as_bytes().to_vec()).collect() })
    }

    /// Most names of a pattern.
    pub const NAMES_MAX: usize = 32;

    /// Whether the pattern names the file at `path`, or a directory above it.
    pub fn matches(&self, path: &Path) -> bool {
        let names: Vec<&[u8]> = path.components().map(|name| name.as_os_str().as_bytes()).collect();
        // Which beginnings of the pattern match what was looked at so far: bit `n`
        // stands for its first `n` names.
        let mut reached = self.skip_any(1);
        for name in names {
            let mut next = 0;
            for (place, pattern) in self.names.iter().enumerate() {
                if reached & (1 << place) == 0 {
                    continue;
                }
                if pattern == b"**" {
                    next |= 1 << place;
                }
                if pattern == b"**" || matches_pattern(pattern, name) {
                    next |= 1 << (place + 1);
                }
            }
            reached = self.skip_any(next);
            if reached & (1 << self.names.len()) != 0 {
                return true;
            }
        }
        false
    }

    /// `**` also stands for no name at all, but not at the end: `a/**` does not name
    /// `a`.
    fn skip_any(&self, mut reached: u64) -> u64 {
        for (place, pattern) in self.names.iter().enumerate() {
            let is_last = place + 1 == self.names.len();
            if pattern == b"**" && !is_last && reached & (1 << place) != 0 {
                reached |= 1 << (place + 1);
            }
        }
        reached
    }
}

/// Matches `*` against any bytes, everything else against itself.
fn matches_pattern(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to go on after the last `*` if what follows does not match here.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            p += 1;
            retry = Some((p, n));
        } else if p < pattern.len() && pattern[p] == name[n] {
            p += 1;
            n += 1;
        } else if let Some((after_star, from)) = retry {
            p = after_star;
            n = from + 1;
            retry = Some((after_star, n));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        let cases = [
            ("test", "test", true),
            ("test", "tests", false),
            ("*.pyc", "a.pyc", true),
            ("*.pyc", "a.py", false),
            ("config-*-linux", "config-3.11-x86-linux", true),
            ("a*b*c", "a__b__b_c", true),
            ("a*b*c", "a__b__b_", false),
            ("*", "", true),
            ("", "x", false),
        ];
        for (pattern, name, expected) in cases {
            let found = matches_pattern(pattern.as_bytes(), name.as_bytes());
            assert_eq!(found, expected, "{pattern} {name}");
        }
    }

    #[test]
    fn path_patterns_name_files_and_what_lies_below() {
        let cases = [
            ("secrets/**", "secrets/key", true),
            ("secrets/**", "secrets/a/b/key", true),
            ("secrets/**", "secrets", false),
            ("secrets/**", "other/secrets/key", false),
            ("secrets", "secrets/a/key", true),
            ("secrets", "secret", false),
            ("./secrets/", "secrets/key", true),
            ("*.pem", "a.pem", true),
            ("*.pem", "sub/a.pem", false),
            ("**/*.pem", "a.pem", true),
            ("**/*.pem", "sub/deep/a.pem", true),
            ("**/*.pem", "a.pem.txt", false),
            ("a/**/b", "a/b", true),
            ("a/**/b", "a/x/y/b/c", true),
            ("a/**/b", "a/x/y", false),
            ("**", "anything/at/all", true),
        ];
        for (pattern, path, expected) in cases {
            let found = PathPattern::new(pattern).unwrap().matches(Path::new(path));
            assert_eq!(found, expected, "{pattern} {path}");
        }
        let long = ["x"; PathPattern::NAMES_MAX + 1].join("/");
        for pattern in ["", ".", "/a", "a/../b", "..", &long] {
            assert_eq!(PathPattern::new(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn paths_match_whole() {
        let rule = Exclude::Path(PathBuf::from("lib/test"));
        assert!(rule.matches(Path::new("lib/test")));
        assert!(!rule.matches(Path::new("x/lib/test")));
    }
}
