//! The pieces that were pulled and are kept for the next function, a directory for each sharing
//! domain: who shares no files shares no pieces, and learns by no pull what others have pulled.

use super::ArtifactError;
use crate::config::DomainName;
use crate::home::Home;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use thaw_store::StoreError;

/// Bytes that are kept for each domain when a pull has ended.
const KEPT_BYTES: u64 = 4 << 30;
/// How long a piece is kept that nothing uses.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// A directory of pieces that nobody else uses at this time.
#[derive(Debug)]
pub(super) struct Pieces {
    path: PathBuf,
    /// Two pulls must not write to the same files.
    _lock: File,
}

impl Pieces {
    /// That of a domain; waits until no other pull uses it.
    pub fn open(home: &Home, domain: Option<&DomainName>) -> Result<Self, ArtifactError> {
        let path = home.pieces(&name_of(domain))?;
        let _acting = home.act()?;
        let lock = path.join("lock");
        let opened = OpenOptions::new().create(true).append(true).open(&lock);
        let locked = opened.and_then(|file| file.lock().map(|()| file));
        let locked =
            locked.map_err(|source| StoreError::Io { action: "lock", path: lock, source })?;
        Ok(Self { path, _lock: locked })
    }

    /// Where that of a domain lies, whether it is there or not.
    pub fn path(home: &Home, domain: Option<&DomainName>) -> PathBuf {
        home.root().join("pieces").join(name_of(domain))
    }

    /// Removes those that have not been used for long, and the oldest ones of too many.
    pub fn prune(&self, home: &Home) {
        if let Ok(_acting) = home.act() {
            prune(&self.path, KEPT_BYTES);
        }
    }
}

/// No name of a domain is that of the shared one.
fn name_of(domain: Option<&DomainName>) -> String {
    domain.map_or_else(|| "shared".to_owned(), |domain| format!("domain.{}", domain.name()))
}

fn prune(path: &Path, most: u64) {
    let Ok(entries) = fs::read_dir(path) else { return };
    let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name() != "lock")
        .filter_map(|entry| {
            let found = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some((found.modified().ok()?, found.len(), entry.path()))
        })
        .collect();
    files.sort_by_key(|(modified, ..)| std::cmp::Reverse(*modified));
    let mut kept = 0_u64;
    for (modified, len, path) in files {
        kept = kept.saturating_add(len);
        let is_old = modified.elapsed().is_ok_and(|age| age > KEPT);
        if is_old || kept > most {
            // What cannot be removed now is tried again after the next pull.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_pieces_are_kept_up_to_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, age: Duration| {
            let path = directory.path().join(name);
            fs::write(&path, [0; 100]).unwrap();
            File::open(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
        };
        write("lock", KEPT * 2);
        write("ancient", KEPT * 2);
        for (number, name) in ["new", "older", "oldest"].into_iter().enumerate() {
            write(name, Duration::from_secs(1000 * number as u64));
        }
        prune(directory.path(), 200);
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["lock", "new", "older"]);
    }
}
