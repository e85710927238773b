//! State of the daemon that a file has as a whole, for the next daemon: it is written again when it has
//! changed, in a thread for that, so that no request waits for the disk behind others.

use crate::replace::replace;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::spawn_blocking;

/// What such a file has.
pub trait State: Clone + Send + 'static {
    /// What a file that cannot be written means, for the log.
    const LOST: &'static str;

    /// As the file has it.
    fn to_bytes(&self) -> Vec<u8>;
}

/// The state, and its file.
pub struct StateFile<T>(Arc<Inner<T>>);

struct Inner<T> {
    path: PathBuf,
    state: Mutex<T>,
    /// So many changes there were.
    changes: AtomicU64,
    /// The file has so many of them. Held while it is written.
    written: Arc<AsyncMutex<u64>>,
}

impl<T: State> StateFile<T> {
    /// A state that the file has, or is to have.
    pub fn new(path: PathBuf, state: T) -> Self {
        let (state, changes, written) = (Mutex::new(state), AtomicU64::new(0), Arc::default());
        Self(Arc::new(Inner { path, state, changes, written }))
    }

    /// The state. Whoever changes it has it written.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.state.lock().expect("no holder panics")
    }

    #[cfg(test)]
    pub(crate) fn path(&self) -> &std::path::Path {
        &self.0.path
    }

    /// Writes what has changed: then all that was changed before is in the file. Many who wait share a
    /// write.
    ///
    /// # Errors
    /// The host's, which the log has, too.
    pub async fn write(&self) -> io::Result<()> {
        let change = self.0.note_change();
        self.0.clone().write_up_to(change).await
    }

    /// The same for one who does not wait.
    pub fn write_soon(&self) {
        let change = self.0.note_change();
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(self.0.clone().write_up_to(change))),
            // The log says why it cannot be written.
            Err(_) => drop(self.0.write()),
        }
    }

    /// Waits until what has changed so far is in the file.
    ///
    /// # Errors
    /// The host's, which the log has, too.
    pub async fn written(&self) -> io::Result<()> {
        self.0.clone().write_up_to(self.0.changes.load(SeqCst)).await
    }

    /// Writes the state here and now, before anybody else may.
    ///
    /// # Errors
    /// The host's.
    pub fn write_first(&self) -> io::Result<()> {
        self.0.write()
    }
}

impl<T: State> Inner<T> {
    /// One more; its number.
    fn note_change(&self) -> u64 {
        self.changes.fetch_add(1, SeqCst) + 1
    }

    async fn write_up_to(self: Arc<Self>, change: u64) -> io::Result<()> {
        let mut written = self.written.clone().lock_owned().await;
        if *written >= change {
            return Ok(());
        }
        let write = move || {
            // It may have more of what changes from now on, which is written again.
            let changes = self.changes.load(SeqCst);
            self.write()?;
            *written = changes;
            Ok(())
        };
        spawn_blocking(write).await.map_err(io::Error::other)?
    }

    /// By one at a time: whoever writes last has read last.
    fn write(&self) -> io::Result<()> {
        let state = self.state.lock().expect("no holder panics").clone();
        replace(&self.path, &state.to_bytes()).inspect_err(|error| {
            tracing::warn!("{}: {error}; {}", self.path.display(), T::LOST);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    impl State for Vec<u64> {
        const LOST: &'static str = "they are lost";

        fn to_bytes(&self) -> Vec<u8> {
            serde_json::to_vec(self).unwrap()
        }
    }

    fn file_in(directory: &tempfile::TempDir) -> StateFile<Vec<u64>> {
        StateFile::new(directory.path().join("state.json"), Vec::new())
    }

    fn read(file: &StateFile<Vec<u64>>) -> Vec<u64> {
        serde_json::from_slice(&fs::read(file.path()).unwrap()).unwrap()
    }

    #[test]
    fn it_is_written_at_once_where_there_is_no_runtime() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(&directory);
        file.write_first().unwrap();
        assert!(read(&file).is_empty());
        file.lock().push(1);
        file.write_soon();
        assert_eq!(read(&file), [1]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn who_waits_finds_what_was_changed_before_and_nothing_older_comes_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = Arc::new(file_in(&directory));
        let changes = (0..200).map(|number| {
            let file = file.clone();
            tokio::spawn(async move {
                file.lock().push(number);
                match number % 3 {
                    0 => file.write_soon(),
                    1 => file.write().await.unwrap(),
                    _ => {
                        file.write_soon();
                        file.written().await.unwrap();
                        assert!(read(&file).contains(&number));
                    }
                }
                number
            })
        });
        for change in changes.collect::<Vec<_>>() {
            change.await.unwrap();
        }
        file.written().await.unwrap();
        let mut found = read(&file);
        found.sort_unstable();
        assert_eq!(found, (0..200).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn who_waits_hears_that_it_cannot_be_written_and_it_is_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(&directory);
        let in_the_way = file.path().with_extension("new");
        fs::create_dir(&in_the_way).unwrap();
        file.lock().push(1);
        file.write_soon();
        file.written().await.unwrap_err();
        assert!(!file.path().exists());
        fs::remove_dir(&in_the_way).unwrap();
        file.written().await.unwrap();
        assert_eq!(read(&file), [1]);
    }
}
