//! What of a directory of the host a sandbox can see.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// What of a directory a sandbox can see.
#[derive(Debug)]
pub(super) enum Part {
    All,
    /// Paths, relative to the directory, and everything below them.
    Below(Vec<Vec<u8>>),
}

/// How much of a path a sandbox can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    Shown,
    /// A directory on the way to something that is shown.
    Leads,
    Hidden,
}

impl Part {
    /// What lies at or below the paths `shown`, with a slash in front or not.
    pub fn below(shown: &[PathBuf]) -> Self {
        let plain = |path: &PathBuf| {
            let path = path.strip_prefix("/").unwrap_or(path);
            let names = path.components().map(|name| name.as_os_str().as_bytes());
            names.collect::<Vec<_>>().join(&b'/')
        };
        Self::Below(shown.iter().map(plain).collect())
    }

    pub fn sight(&self, path: &[u8]) -> Sight {
        let Self::Below(shown) = self else { return Sight::Shown };
        if shown.iter().any(|start| is_at_or_below(path, start)) {
            Sight::Shown
        } else if shown.iter().any(|start| is_at_or_below(start, path)) {
            Sight::Leads
        } else {
            Sight::Hidden
        }
    }

    /// Whether the entry `name` of the directory at `path` can be seen.
    pub fn shows(&self, path: &[u8], name: &[u8]) -> bool {
        if self.sight(path) == Sight::Shown {
            return true;
        }
        let entry = if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() };
        self.sight(&entry) != Sight::Hidden
    }

    /// The path at or above `path` with which a part begins, if only a part is shown.
    pub fn start_of(&self, path: &[u8]) -> Option<&[u8]> {
        let Self::Below(shown) = self else { return None };
        shown.iter().map(Vec::as_slice).find(|start| is_at_or_below(path, start))
    }
}

/// Whether a path is `start` or lies below it; everything lies below the empty path.
pub(super) fn is_at_or_below(path: &[u8], start: &[u8]) -> bool {
    match path.strip_prefix(start) {
        Some(rest) => start.is_empty() || rest.is_empty() || rest[0] == b'/',
        None => false,
    }
}
