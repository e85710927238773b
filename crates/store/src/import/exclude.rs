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
    fn paths_match_whole() {
        let rule = Exclude::Path(PathBuf::from("lib/test"));
        assert!(rule.matches(Path::new("lib/test")));
        assert!(!rule.matches(Path::new("x/lib/test")));
    }
}
