//! Where the dynamic loader looks for libraries (ld.so(8)), as far as it can be
//! known without running it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directories that glibc and musl search last.
const DEFAULT_DIRECTORIES: [&str; 7] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/local/lib",
];
/// Subdirectories with variants for newer processors, which glibc prefers.
pub(super) const HWCAPS: [&str; 3] =
    ["glibc-hwcaps/x86-64-v4", "glibc-hwcaps/x86-64-v3", "glibc-hwcaps/x86-64-v2"];
/// Nesting of `include` lines in ld.so.conf.
const MAX_INCLUDES: usize = 8;

/// The directories that every program's libraries are searched in: those of
/// `/etc/ld.so.conf` (which `ld.so.cache` is made from), then the default ones.
/// Paths are those seen below `root`.
pub(super) fn system_directories(root: &Path) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    read_conf(root, Path::new("/etc/ld.so.conf"), MAX_INCLUDES, &mut directories);
    directories.extend(DEFAULT_DIRECTORIES.map(PathBuf::from));
    let mut seen = BTreeSet::new();
    directories.retain(|directory| seen.insert(directory.clone()));
    directories
}

/// A file that is missing or unreadable adds nothing: ldconfig(8) treats it so.
fn read_conf(root: &Path, path: &Path, depth: usize, directories: &mut Vec<PathBuf>) {
    let Some(depth) = depth.checked_sub(1) else { return };
    let Ok(text) = std::fs::read(below(root, path)) else { return };
    for line in text.split(|&byte| byte == b'\n') {
        let line = line.split(|&byte| byte == b'#').next().unwrap_or(&[]).trim_ascii();
        if let Some(pattern) = line.strip_prefix(b"include") {
            if pattern.first().is_some_and(u8::is_ascii_whitespace) {
                let pattern = Path::new(OsStr::from_bytes(pattern.trim_ascii()));
                // Relative patterns are relative to the including file.
                let pattern = path.parent().unwrap_or(Path::new("/")).join(pattern);
                for included in expand(root, &pattern) {
                    read_conf(root, &included, depth, directories);
                }
            }
        } else if line.starts_with(b"/") {
            directories.push(PathBuf::from(OsStr::from_bytes(line)));
        }
    }
}

/// Expands a pattern whose last component may have one `*`, as in all
/// distributions' `include /etc/ld.so.conf.d/*.conf`; sorted.
fn expand(root: &Path, pattern: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (pattern.parent(), pattern.file_name()) else {
        return Vec::new();
    };
    let Some(star) = name.as_bytes().iter().position(|&byte| byte == b'*') else {
        return vec![pattern.to_owned()];
    };
    let (prefix, suffix) = (&name.as_bytes()[..star], &name.as_bytes()[star + 1..]);
    let Ok(entries) = std::fs::read_dir(below(root, directory)) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| {
            let name = name.as_bytes();
            name.len() >= prefix.len() + suffix.len()
                && name.starts_with(prefix)
                && name.ends_with(suffix)
        })
        .map(|name| directory.join(name))
        .collect();
    found.sort();
    found
}

/// Splits an rpath at colons and expands `$ORIGIN`, `$LIB` and `$PLATFORM`.
/// `$LIB` differs between distributions, so it gives several directories.
pub(super) fn expand_rpath(rpath: &[u8], origin: &Path) -> Vec<PathBuf> {
    const LIB: [&[u8]; 3] = [b"lib/x86_64-linux-gnu", b"lib64", b"lib"];
    let mut directories = Vec::new();
    for part in rpath.split(|&byte| byte == b':').filter(|part| !part.is_empty()) {
        let part = substitute(part, b"ORIGIN", origin.as_os_str().as_bytes());
        let part = substitute(&part, b"PLATFORM", b"x86_64");
        let variants: BTreeSet<(usize, Vec<u8>)> = LIB
            .iter()
            .enumerate()
            .map(|(order, lib)| (order, substitute(&part, b"LIB", lib)))
            .collect();
        for (_, directory) in variants {
            let directory = PathBuf::from(OsStr::from_bytes(&directory));
            // A relative one depends on the working directory of the program.
            if directory.is_absolute() && !directories.contains(&directory) {
                directories.push(directory);
            }
        }
    }
    directories
}

/// Replaces `$NAME` and `${NAME}`.
fn substitute(text: &[u8], name: &[u8], value: &[u8]) -> Vec<u8> {
    let braced = [b"${", name, b"}"].concat();
    let plain = [b"$", name].concat();
    let mut result = Vec::new();
    let mut rest = text;
    while let Some(&byte) = rest.first() {
        if let Some(after) = rest.strip_prefix(&braced[..]).or(rest.strip_prefix(&plain[..])) {
            result.extend_from_slice(value);
            rest = after;
        } else {
            result.push(byte);
            rest = &rest[1..];
        }
    }
    result
}

/// The host's name of a path that is absolute below `root`.
pub(super) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rpaths_are_expanded() {
        let origin = Path::new("/opt/x/bin");
        let expand = |text: &str| expand_rpath(text.as_bytes(), origin);
        assert_eq!(expand("$ORIGIN/../lib"), [PathBuf::from("/opt/x/bin/../lib")]);
        assert_eq!(expand("${ORIGIN}:/a::/b"), ["/opt/x/bin", "/a", "/b"].map(PathBuf::from));
        assert_eq!(
            expand("/usr/$LIB/$PLATFORM"),
            ["/usr/lib/x86_64-linux-gnu/x86_64", "/usr/lib64/x86_64", "/usr/lib/x86_64"]
                .map(PathBuf::from)
        );
        assert!(expand("lib").is_empty());
    }

    #[test]
    fn ld_so_conf_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let etc = root.path().join("etc");
        std::fs::create_dir_all(etc.join("ld.so.conf.d")).unwrap();
        std::fs::write(
            etc.join("ld.so.conf"),
            "# comment\n/first # more\ninclude ld.so.conf.d/*.conf\n/last\ninclude ld.so.conf\n",
        )
        .unwrap();
        std::fs::write(etc.join("ld.so.conf.d/b.conf"), "/b\n").unwrap();
        std::fs::write(etc.join("ld.so.conf.d/a.conf"), "  /a  \n").unwrap();
        std::fs::write(etc.join("ld.so.conf.d/no"), "/no\n").unwrap();
        let found = system_directories(root.path());
        let expected = ["/first", "/a", "/b", "/last", "/lib/x86_64-linux-gnu"];
        assert_eq!(found[..5], expected.map(PathBuf::from));
    }
}
