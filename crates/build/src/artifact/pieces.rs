//! The pieces that were pulled and are kept for the next function, a directory for each sharing
//! domain: who shares no files shares no pieces, and learns by no pull what others have pulled.

use super::ArtifactError;
use crate::container::lock;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use thaw_home::config::DomainName;
use thaw_home::home::Home;
use thaw_oci::{PieceName, check_piece, has_piece};
use thaw_store::StoreError;

/// Bytes that are kept for each domain when a pull has ended.
const KEPT_BYTES: u64 = 4 << 30;
/// How long a piece is kept that nothing uses.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often it is looked whether another pull uses them still.
const LOOK: Duration = Duration::from_millis(50);

/// A directory of pieces that nobody else uses at this time.
#[derive(Debug)]
pub(super) struct Pieces {
    path: PathBuf,
    /// Two pulls must not write to the same files.
    _lock: File,
}

impl Pieces {
    /// That of a domain; waits until no other pull uses it, of which `on_wait` hears.
    pub fn open(
        home: &Home,
        domain: Option<&DomainName>,
        on_wait: impl FnOnce(),
    ) -> Result<Self, ArtifactError> {
        let (path, file) = open_lock(home, domain)?;
        lock(&file, on_wait).map_err(|source| cannot_lock(&path, source))?;
        Ok(Self { path, _lock: file })
    }

    /// That of a domain; `None`: another pull uses it for longer than `patience`.
    pub fn open_within(
        home: &Home,
        domain: Option<&DomainName>,
        patience: Duration,
    ) -> Result<Option<Self>, ArtifactError> {
        let (path, file) = open_lock(home, domain)?;
        let until = Instant::now() + patience;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self { path, _lock: file })),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(source)) => return Err(cannot_lock(&path, source)),
            }
        }
    }

    /// Where that of a domain lies, made if it is missing.
    pub fn make(home: &Home, domain: Option<&DomainName>) -> Result<PathBuf, ArtifactError> {
        Ok(home.pieces(&name_of(domain))?)
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

/// Keeps a piece in a directory of pieces, whole or not at all: others may keep the same one at the same time.
///
/// # Errors
/// The host's.
pub(super) fn keep(directory: &Path, name: &PieceName, bytes: &[u8]) -> io::Result<()> {
    // It is removed if it does not get its name.
    let mut new = tempfile::Builder::new()
        .prefix(&name.hex)
        // A daemon that is another user reads what root has pulled.
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory)?;
    new.write_all(bytes)?;
    new.persist(directory.join(&name.hex)).map(drop).map_err(|error| error.error)
}

/// Whether a directory of pieces has a piece with all of its bytes as they were, which counts as used.
pub(super) fn is_intact(directory: &Path, name: &PieceName) -> bool {
    let read = || fs::read(directory.join(&name.hex));
    has_piece(directory, name) && read().is_ok_and(|bytes| check_piece(name, &bytes).is_ok())
}

/// The directory of a domain, and the file that is locked by whoever uses it.
fn open_lock(home: &Home, domain: Option<&DomainName>) -> Result<(PathBuf, File), ArtifactError> {
    let path = Pieces::make(home, domain)?;
    let _acting = home.act()?;
    let opened = OpenOptions::new().create(true).append(true).open(path.join("lock"));
    let file = opened.map_err(|source| cannot_lock(&path, source))?;
    Ok((path, file))
}

fn cannot_lock(path: &Path, source: io::Error) -> ArtifactError {
    StoreError::Io { action: "lock", path: path.join("lock"), source }.into()
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
    fn one_who_has_no_time_waits_for_no_other_pull() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().to_owned()).unwrap();
        let open = || Pieces::open_within(&home, None, 2 * LOOK).unwrap();
        let whole = Pieces::open(&home, None, || panic!("nobody has it")).unwrap();
        assert!(open().is_none());
        drop(whole);
        assert!(open().is_some());
    }

    #[test]
    fn one_who_waits_for_another_pull_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().to_owned()).unwrap();
        let mut whole = Some(Pieces::open(&home, None, || panic!("nobody has it")).unwrap());
        let mut has_waited = false;
        let on_wait = || {
            has_waited = true;
            whole = None;
        };
        Pieces::open(&home, None, on_wait).unwrap();
        assert!(has_waited);
    }

    fn named(bytes: &[u8]) -> PieceName {
        let hex = thaw_oci::digest(bytes).trim_start_matches("sha256:").to_owned();
        PieceName { hex, size: bytes.len() as u64 }
    }

    #[test]
    fn threads_that_keep_the_same_piece_do_not_get_in_each_others_way() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = vec![7; 100_000];
        let name = named(&bytes);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        keep(directory.path(), &name, &bytes).unwrap();
                        assert!(is_intact(directory.path(), &name));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_damaged_piece_of_the_right_length_is_not_taken_for_whole() {
        let directory = tempfile::tempdir().unwrap();
        let name = named(b"piece");
        assert!(!is_intact(directory.path(), &name));
        fs::write(directory.path().join(&name.hex), b"peace").unwrap();
        assert!(has_piece(directory.path(), &name) && !is_intact(directory.path(), &name));
        keep(directory.path(), &name, b"piece").unwrap();
        assert!(is_intact(directory.path(), &name));
        let mode = fs::metadata(directory.path().join(&name.hex)).unwrap().permissions().mode();
        assert_ne!(mode & 0o044, 0, "{mode:o}");
    }

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
