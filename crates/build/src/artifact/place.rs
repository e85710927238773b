//! The directory of a partial function, as whoever fetches it has it.

use super::ArtifactError;
use rustix::net::{SocketAddrUnix, bind, listen};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::home::Home;
use thaw_home::partial::parts;
use thaw_store::StoreError;

/// How long a lock may be held by somebody who only looks whether it is
/// ([`is_being_fetched`](thaw_home::partial::is_being_fetched)), or by a fetcher that is just ending.
const LOOKED_AT: Duration = Duration::from_secs(2);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// The directory of a partial function, which nobody else uses.
pub(super) struct Place {
    pub path: PathBuf,
    _lock: File,
}

impl Place {
    /// Takes a function's directory. Nobody may be fetching it.
    pub fn take(home: &Home, name: &str) -> Result<Self, ArtifactError> {
        let path = home.partial_of(name)?;
        let _acting = home.act()?;
        let lock = path.join(parts::LOCK);
        let opened = File::options().create(true).append(true).open(&lock);
        let file = opened.map_err(failed("open", &lock))?;
        let until = Instant::now() + LOOKED_AT;
        while file.try_lock().is_err() {
            if Instant::now() > until {
                let reason = "it is being pulled already; wait for that".to_owned();
                return Err(ArtifactError::Unpulled { name: name.to_owned(), reason });
            }
            thread::sleep(LOOKED_AT / 100);
        }
        Ok(Self { path, _lock: file })
    }

    /// Removes it with all that is in it.
    pub fn remove(&self, home: &Home) {
        if let Ok(_acting) = home.act() {
            // What cannot be removed now is when the function is pulled the next time.
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    /// Removes what an earlier pull has left.
    pub fn empty(&self) -> Result<(), ArtifactError> {
        let path = |name: &str| self.path.join(name);
        // First: whoever reads the directory now sees by it that the rest is about to change.
        let record = path(parts::RECORD);
        match fs::remove_file(&record) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(failed("remove", &record))?,
        }
        let entries = fs::read_dir(&self.path).map_err(failed("read", &self.path))?;
        for entry in entries.flatten().filter(|entry| entry.file_name() != parts::LOCK) {
            let (path, is_directory) = (entry.path(), entry.path().is_dir());
            let removed =
                if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(failed("remove", &path))?;
        }
        let contents = path(parts::CONTENTS);
        fs::create_dir(&contents).map_err(failed("make", &contents))
    }

    /// Listens for a daemon's questions, on a socket that was made before if there is one.
    pub fn listen(&self, made: Option<OwnedFd>) -> Result<UnixListener, ArtifactError> {
        let socket = self.path.join(parts::SOCKET);
        match fs::remove_file(&socket) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(failed("remove", &socket))?,
        }
        let listener = match made {
            None => UnixListener::bind(&socket),
            Some(made) => listen_on(made, &socket),
        };
        let listener = listener.map_err(failed("listen at", &socket))?;
        listener.set_nonblocking(true).map_err(failed("listen at", &socket))?;
        Ok(listener)
    }
}

fn listen_on(made: OwnedFd, path: &Path) -> io::Result<UnixListener> {
    bind(&made, &SocketAddrUnix::new(path)?)?;
    listen(&made, BACKLOG)?;
    Ok(made.into())
}

/// What becomes of the host's error.
pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ArtifactError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull => StoreError::NoSpace { path }.into(),
        _ => StoreError::Io { action, path, source }.into(),
    }
}

pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
    fs::write(path, bytes).map_err(failed("write", path))
}
