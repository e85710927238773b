//! The sources of a function while somebody works on them: what they are just now
//! ([`Snapshot`]), and when to look again ([`Watcher`], inotify(7)).
//!
//! An event only says that it is worth looking; whether something has changed is judged by two
//! snapshots. So no event that is lost, doubled or misunderstood does harm.

mod snapshot;

pub use snapshot::{Change, Snapshot};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Most directories that are watched.
const DIRECTORIES_MAX: usize = 4096;
/// Times that directories are looked for again because new ones have come meanwhile.
const ATTEMPTS: usize = 8;
/// Bytes of events that are taken at once.
const EVENTS_LEN: usize = 64 << 10;

/// What may mean that a file has another content, or another name.
const INTEREST: WatchFlags = WatchFlags::CLOSE_WRITE
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DONT_FOLLOW)
    .union(WatchFlags::ONLYDIR);

/// Why sources cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The user's watches are used up.
    #[error(
        "this host lets a user watch no more directories; raise fs.inotify.max_user_watches and \
         fs.inotify.max_user_instances with sysctl(8), or name directories that are not sources in .thawignore"
    )]
    UsedUp,
    /// More directories than are watched.
    #[error(
        "the function has more than {DIRECTORIES_MAX} directories; name those that are not sources in \
         .thawignore"
    )]
    TooMany,
    /// The system refused something.
    #[error("cannot watch {} ({error})", path.display())]
    Refused {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Hears of events in the directories of a function's sources.
#[derive(Debug)]
pub struct Watcher {
    inotify: OwnedFd,
    directory: PathBuf,
}

impl Watcher {
    /// Of the sources in a directory.
    ///
    /// # Errors
    /// The user has too many of them.
    pub fn new(directory: &Path) -> Result<Self, WatchError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC).map_err(|error| match error {
            Errno::MFILE | Errno::NFILE => WatchError::UsedUp,
            error => WatchError::Refused { path: directory.to_owned(), error: error.into() },
        })?;
        Ok(Self { inotify, directory: directory.to_owned() })
    }

    /// What the sources are now; later changes are heard of. `before`: an older snapshot, whose
    /// unchanged files need not be read again.
    ///
    /// # Errors
    /// A directory cannot be watched.
    pub fn look(&self, before: Option<&Snapshot>) -> Result<Snapshot, WatchError> {
        let mut snapshot = Snapshot::take(&self.directory, before);
        for _ in 0..ATTEMPTS {
            self.watch(&snapshot)?;
            // What came before its directory was watched is seen by now.
            let next = Snapshot::take(&self.directory, Some(&snapshot));
            let is_complete = next.directories() == snapshot.directories();
            snapshot = next;
            if is_complete {
                break;
            }
        }
        Ok(snapshot)
    }

    fn watch(&self, snapshot: &Snapshot) -> Result<(), WatchError> {
        if snapshot.directories().len() > DIRECTORIES_MAX {
            return Err(WatchError::TooMany);
        }
        for path in snapshot.directories() {
            match inotify::add_watch(&self.inotify, path, INTEREST) {
                // It has gone, or was replaced by something else.
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => {}
                Err(Errno::NOSPC) => return Err(WatchError::UsedUp),
                Err(error) => {
                    return Err(WatchError::Refused { path: path.clone(), error: error.into() });
                }
            }
        }
        Ok(())
    }

    /// Waits for events and takes them.
    ///
    /// # Errors
    /// The system refused to wait.
    pub fn wait(&self) -> io::Result<()> {
        let mut events = [0; EVENTS_LEN];
        loop {
            match rustix::io::read(&self.inotify, &mut events) {
                Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn changes_in_new_directories_are_heard_of() {
        let place = tempfile::tempdir().unwrap();
        let watcher = std::sync::Arc::new(Watcher::new(place.path()).unwrap());
        let first = watcher.look(None).unwrap();
        let (sender, receiver) = mpsc::channel();
        let waiting = watcher.clone();
        std::thread::spawn(move || while waiting.wait().is_ok() && sender.send(()).is_ok() {});
        let hear = |path: &str, before: &Snapshot| {
            loop {
                receiver.recv_timeout(Duration::from_secs(60)).expect("an event");
                let now = watcher.look(Some(before)).unwrap();
                if now.changes_since(before).iter().any(|change| change.path == Path::new(path)) {
                    return now;
                }
            }
        };
        fs::create_dir_all(place.path().join("a/b")).unwrap();
        fs::write(place.path().join("a/b/c.py"), "1").unwrap();
        let second = hear("a/b/c.py", &first);
        fs::write(place.path().join("a/b/c.py"), "2").unwrap();
        let third = hear("a/b/c.py", &second);
        fs::remove_dir_all(place.path().join("a")).unwrap();
        hear("a/b/c.py", &third);
    }

    #[test]
    fn more_directories_than_are_watched_are_refused() {
        let place = tempfile::tempdir().unwrap();
        for number in 0..=DIRECTORIES_MAX {
            fs::create_dir(place.path().join(number.to_string())).unwrap();
        }
        let watcher = Watcher::new(place.path()).unwrap();
        assert!(matches!(watcher.look(None), Err(WatchError::TooMany)));
    }
}
