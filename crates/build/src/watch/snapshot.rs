//! What the sources of a function are at a moment.

use ignore::WalkBuilder;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Most files that are looked at; those behind them in order of their names are not watched.
const FILES_MAX: usize = 20_000;
/// Most bytes of a file that are read to see whether its content is another one; of a larger
/// one the time says that.
const READ_MAX: u64 = 4 << 20;
/// Directories that hold what tools have made.
const MADE: [&str; 11] = [
    ".git",
    ".hg",
    "node_modules",
    "__pycache__",
    ".venv",
    "venv",
    "target",
    "build",
    "dist",
    "vendor",
    ".gradle",
];

/// A file as it was.
#[derive(Clone, Copy, Debug)]
struct Print {
    /// Device, inode, length and both times: a file for which they are the same was not touched.
    facts: (u64, u64, u64, i64, i64, i64, i64),
    permissions: u32,
    /// Of the content; `None`: it was not read.
    hash: Option<blake3::Hash>,
}

impl Print {
    fn is_like(&self, other: &Self) -> bool {
        let same_content = match (self.hash, other.hash) {
            (Some(one), Some(other)) => one == other,
            _ => self.facts == other.facts,
        };
        same_content && self.permissions == other.permissions
    }
}

/// What happened to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its path below the directory.
    pub path: PathBuf,
    /// Whether it was there before.
    pub was_there: bool,
}

/// The sources of a function at a moment, without what `.gitignore` and `.thawignore` name and
/// directories that tools make.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    files: BTreeMap<PathBuf, Print>,
    directories: BTreeSet<PathBuf>,
    is_cut: bool,
}

impl Snapshot {
    /// Looks at a directory. Files that are as they were in `before` are not read again.
    pub fn take(directory: &Path, before: Option<&Self>) -> Self {
        let mut builder = WalkBuilder::new(directory);
        builder.standard_filters(false).follow_links(false).parents(false);
        builder.git_ignore(true).require_git(false).add_custom_ignore_filename(".thawignore");
        builder.sort_by_file_name(Ord::cmp);
        builder.filter_entry(|entry| {
            entry.depth() == 0 || !MADE.iter().any(|name| entry.file_name() == *name)
        });
        let mut snapshot = Self::default();
        // What cannot be read is not there; the build says more about it.
        for entry in builder.build().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                snapshot.directories.insert(entry.into_path());
                continue;
            }
            if snapshot.files.len() == FILES_MAX {
                snapshot.is_cut = true;
                break;
            }
            let path = entry.path().strip_prefix(directory).unwrap_or(entry.path());
            let old = before.and_then(|before| before.files.get(path));
            let print = print(entry.path(), &metadata, old);
            snapshot.files.insert(path.to_owned(), print);
        }
        snapshot
    }

    /// The directories in it.
    pub fn directories(&self) -> &BTreeSet<PathBuf> {
        &self.directories
    }

    /// Whether there are more files than are looked at.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Files that are there now and were not, or no more, or otherwise; in order of their names.
    pub fn changes_since(&self, before: &Self) -> Vec<Change> {
        let new = self.files.iter().filter_map(|(path, print)| {
            let old = before.files.get(path);
            let is_same = old.is_some_and(|old| old.is_like(print));
            (!is_same).then(|| Change { path: path.clone(), was_there: old.is_some() })
        });
        let gone = before.files.keys().filter(|path| !self.files.contains_key(*path));
        let gone = gone.map(|path| Change { path: path.clone(), was_there: true });
        let mut all: Vec<Change> = new.chain(gone).collect();
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all
    }
}

fn print(path: &Path, metadata: &Metadata, old: Option<&Print>) -> Print {
    let facts = (
        metadata.dev(),
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    );
    let hash = match old {
        Some(old) if old.facts == facts => old.hash,
        _ if metadata.is_file() && metadata.len() <= READ_MAX => hash(path),
        _ => None,
    };
    Print { facts, permissions: metadata.mode(), hash }
}

fn hash(path: &Path) -> Option<blake3::Hash> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(READ_MAX).read_to_end(&mut text).ok()?;
    Some(blake3::hash(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn names(changes: &[Change]) -> Vec<&str> {
        changes.iter().map(|change| change.path.to_str().unwrap()).collect()
    }

    #[test]
    fn a_change_is_one_of_content() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
        write("a.py", "1");
        write("b.py", "1");
        write("thaw.toml", "");
        let first = Snapshot::take(place.path(), None);
        write("a.py", "1");
        let same = Snapshot::take(place.path(), Some(&first));
        assert_eq!(same.changes_since(&first), []);
        write("a.py", "2");
        write("c.py", "");
        fs::remove_file(place.path().join("b.py")).unwrap();
        let second = Snapshot::take(place.path(), Some(&first));
        let changes = second.changes_since(&first);
        assert_eq!(names(&changes), ["a.py", "b.py", "c.py"]);
        let was_there: Vec<bool> = changes.iter().map(|change| change.was_there).collect();
        assert_eq!(was_there, [true, true, false]);
    }

    #[test]
    fn what_is_ignored_is_no_source() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir_all(place.path().join("node_modules/x")).unwrap();
        fs::create_dir_all(place.path().join("src/logs")).unwrap();
        let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
        write(".gitignore", "*.log\n/made\n");
        write(".thawignore", "logs/\n!keep.log\n");
        for name in
            ["node_modules/x/a.js", "src/logs/a", "a.log", "made", "keep.log", "src/b.js", ".env"]
        {
            write(name, "");
        }
        let snapshot = Snapshot::take(place.path(), None);
        let changes = snapshot.changes_since(&Snapshot::default());
        let expected = [".env", ".gitignore", ".thawignore", "keep.log", "src/b.js"];
        assert_eq!(names(&changes), expected);
        assert_eq!(snapshot.directories().len(), 2);
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let place = tempfile::tempdir().unwrap();
        for number in 0..=FILES_MAX {
            File::create(place.path().join(number.to_string())).unwrap();
        }
        let snapshot = Snapshot::take(place.path(), None);
        assert!(snapshot.is_cut());
        assert_eq!(snapshot.changes_since(&Snapshot::default()).len(), FILES_MAX);
    }
}
