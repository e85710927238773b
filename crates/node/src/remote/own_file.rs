//! A file with what instances have of their own, by their numbers, which the next daemon reads.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use thaw_home::replace::{replace, settle};
use tokio::task::spawn_blocking;

/// What such a file is about.
pub(super) struct Subject {
    /// Its name.
    pub file: &'static str,
    /// What it says, for people: "what sandboxes may use".
    pub of_all: &'static str,
    /// The same of one sandbox: "what the sandbox may use".
    pub of_one: &'static str,
}

/// The file of one table. A table is written as a whole.
pub(super) struct OwnFile {
    about: &'static Subject,
    /// `None`: nothing is written.
    path: OnceLock<PathBuf>,
    /// Held while it is written, so that it gets what was changed last.
    writing: Mutex<()>,
}

impl OwnFile {
    /// One that is nowhere yet.
    pub fn about(about: &'static Subject) -> Self {
        Self { about, path: OnceLock::new(), writing: Mutex::new(()) }
    }

    /// Reads what an earlier daemon has written in a directory; it is written there from now on.
    ///
    /// # Errors
    /// The file is there and cannot be read: some sandboxes would be without what is theirs.
    pub fn read<T: DeserializeOwned>(&self, directory: &Path) -> io::Result<BTreeMap<u64, T>> {
        let path = directory.join(self.about.file);
        let known = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::other(format!(
                    "{}: {error}; it says {}: restore it, or end all instances and remove it",
                    path.display(),
                    self.about.of_all
                ))
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error),
        };
        // The first one stays.
        let _ = self.path.set(path);
        Ok(known)
    }

    /// Writes all that there is, which `all` gives when it is this one's turn.
    ///
    /// # Errors
    /// The host's; the file is as before.
    pub fn write<T: Serialize>(&self, all: impl FnOnce() -> BTreeMap<u64, T>) -> io::Result<()> {
        let Some(path) = self.path.get() else { return Ok(()) };
        // Whoever writes last has read last.
        let _writing = self.writing.lock().expect("no holder panics");
        replace(path, &serde_json::to_vec(&all())?)
    }

    /// Has it survive a loss of power. Waits for the disk.
    ///
    /// # Errors
    /// The host's.
    pub fn settle(&self) -> io::Result<()> {
        self.path.get().map_or(Ok(()), |path| settle(path))
    }

    /// Has a table write itself, in a thread that may wait.
    ///
    /// # Errors
    /// One sentence: the next daemon would not know.
    pub async fn written<T: Send + Sync + 'static>(
        &self,
        table: &Arc<T>,
        write: fn(&T) -> io::Result<()>,
    ) -> Result<(), String> {
        let table = table.clone();
        let written = spawn_blocking(move || write(&table)).await;
        written.map_err(io::Error::other).flatten().map_err(|error| {
            format!(
                "{} cannot be written down for the next daemon ({error}); make room in THAW_HOME",
                self.about.of_one
            )
        })
    }
}
