//! A part of a directory of the host, which is all that a sandbox sees of it.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What of a directory a sandbox can see. Paths are relative to it, without `.` and `..`
/// ([`super::path::is_harmless`]).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) enum Part {
    /// Everything.
    #[default]
    All,
    /// What lies at or below these paths, and of that what every user of this host may
    /// read: the process that serves it may well be root.
    Below(Vec<Vec<u8>>),
}

/// How much of a path a sandbox can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// It belongs to the part.
    Shown,
    /// It is a directory on the way to something that does. Such a one is nobody's
    /// secret.
    Leads,
    /// It is not there.
    Hidden,
}

impl Part {
    /// What lies at or below `shown`, paths of which a leading slash does not count.
    pub fn below(shown: &[PathBuf]) -> Self {
        let plain = |path: &PathBuf| {
            let path = path.strip_prefix("/").unwrap_or(path);
            let names = path.components().map(|name| name.as_os_str().as_bytes());
            names.collect::<Vec<_>>().join(&b'/')
        };
        Self::Below(shown.iter().map(plain).collect())
    }

    /// How much of `path` can be seen.
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

    /// The directories above `path` that belong to the part, for a path of which only
    /// what everybody may read is read; `None` for others.
    pub fn parents_to_check<'p>(&self, path: &'p [u8]) -> Option<Vec<&'p [u8]>> {
        let Self::Below(shown) = self else { return None };
        let start = shown.iter().find(|start| is_at_or_below(path, start))?;
        let mut parents = Vec::new();
        let mut parent = path;
        while let Some(slash) = parent.iter().rposition(|&byte| byte == b'/') {
            parent = &parent[..slash];
            if !is_at_or_below(parent, start) {
                break;
            }
            parents.push(parent);
        }
        Some(parents)
    }
}

/// Whether a path is `start` or lies below it; everything lies below the empty path.
fn is_at_or_below(path: &[u8], start: &[u8]) -> bool {
    match path.strip_prefix(start) {
        Some(rest) => start.is_empty() || rest.is_empty() || rest[0] == b'/',
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::host_directory::{HostDirectory, HostPolicy};
    use super::*;
    use rustix::io::Errno;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_part_is_seen_and_of_it_what_everybody_may_read() {
        let all = tempfile::tempdir().unwrap();
        let put = |path: &str, mode: u32| {
            let path = all.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "content").unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        put("usr/bin/tool", 0o755);
        put("usr/private/key", 0o644);
        put("etc/secret", 0o640);
        put("etc/config", 0o644);
        put("home/me/work/file", 0o644);
        put("home/me/diary", 0o644);
        put("usrlocal/x", 0o644);
        let close = |path: &str| {
            let mode = fs::Permissions::from_mode(0o750);
            fs::set_permissions(all.path().join(path), mode).unwrap();
        };
        close("usr/private");
        close("home/me");
        let shown = ["usr", "/etc/", "home/me/work"].map(PathBuf::from);
        let part = HostDirectory::open_part(all.path(), &shown, &HostPolicy::default()).unwrap();
        for path in ["usr/bin/tool", "etc/config", "home/me/work/file"] {
            part.open_file(path.as_bytes()).unwrap();
        }
        for path in ["usr/private/key", "etc/secret"] {
            assert_eq!(part.open_file(path.as_bytes()).unwrap_err(), Errno::ACCESS, "{path}");
        }
        assert_eq!(part.list(b"usr/private").unwrap_err(), Errno::ACCESS);
        for path in ["home/me/diary", "usrlocal/x", "usrlocal", "home/you"] {
            assert_eq!(part.open_file(path.as_bytes()).unwrap_err(), Errno::NOENT, "{path}");
            assert_eq!(part.stat(path.as_bytes()).unwrap_err(), Errno::NOENT, "{path}");
            assert_eq!(part.list(path.as_bytes()).unwrap_err(), Errno::NOENT, "{path}");
        }
        let names =
            |path: &[u8]| String::from_utf8_lossy(&part.list(path).unwrap().page(0)).into_owned();
        let (root, me) = (names(b""), names(b"home/me"));
        assert!(root.contains("usr") && root.contains("home") && !root.contains("usrlocal"));
        assert!(me.contains("work") && !me.contains("diary"));
        assert!(names(b"etc").contains("secret"));
    }

    #[test]
    fn an_empty_path_shows_everything() {
        let part = Part::below(&[PathBuf::from("/")]);
        assert_eq!(part.sight(b""), Sight::Shown);
        assert_eq!(part.sight(b"any/thing"), Sight::Shown);
        assert_eq!(Part::below(&[]).sight(b"any"), Sight::Hidden);
        assert_eq!(part.parents_to_check(b"a/b/c").unwrap(), [&b"a/b"[..], b"a"]);
        assert_eq!(Part::All.parents_to_check(b"a/b"), None);
    }
}
