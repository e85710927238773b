//! State of the daemon that a file has, for the next daemon: it is written when it has changed, in a thread
//! for that, so that no request waits for the disk behind others.
//!
//! The first line of the file is the whole state, each further line a change ([`table`]). What a change
//! writes is in proportion to itself: the whole is written again only when the changes behind it have
//! become longer, and by whoever has just begun. A last line without its end was being written when the
//! daemon ended, and nobody was told that it is there.

pub mod table;

use crate::replace::replace;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::spawn_blocking;

/// What such a file has.
pub trait State: Clone + Send + 'static {
    /// What a file that cannot be written means, for the log.
    const LOST: &'static str;

    /// The whole, without a line break.
    fn to_bytes(&self) -> Vec<u8>;

    /// What has changed since the last call, a line each; `None`: that is not known, and the whole is
    /// written.
    fn take_changes(&mut self) -> Option<Vec<u8>> {
        None
    }
}

/// Changes are not too long as long as they have no more bytes than this, or than the whole.
const CHANGES_MAX: u64 = 64 << 10;

/// The lines of a state's file, without their ends.
pub struct Lines {
    /// The first one: the whole.
    pub whole: Vec<u8>,
    /// What has changed since, in order.
    pub changes: Vec<Vec<u8>>,
}

/// Reads a state's file; `None`: there is none.
///
/// # Errors
/// The host's.
pub fn lines(path: &Path) -> io::Result<Option<Lines>> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
    // An older Thaw wrote the whole without an end.
    let whole = lines.next().unwrap_or_default().trim_ascii_end().to_vec();
    let changes = lines.filter_map(|line| line.strip_suffix(b"\n")).map(<[u8]>::to_vec).collect();
    Ok(Some(Lines { whole, changes }))
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
    on_disk: Mutex<OnDisk>,
}

/// The file as this process has written it.
#[derive(Default)]
struct OnDisk {
    /// Where changes are added; none: the whole is to be written first.
    file: Option<File>,
    /// Bytes of the whole, and of the changes behind it.
    whole: u64,
    changes: u64,
}

impl OnDisk {
    /// Adds changes; `false`: the whole is to be written.
    fn add(&mut self, changes: &[u8]) -> bool {
        let len = self.changes + changes.len() as u64;
        let Some(file) = self.file.as_mut().filter(|_| len <= self.whole.max(CHANGES_MAX)) else {
            return false;
        };
        // Somebody may have removed it.
        if !file.metadata().is_ok_and(|about| about.nlink() > 0) {
            return false;
        }
        // A part of it may be there.
        let is_added = file.write_all(changes).is_ok();
        self.changes = len;
        is_added
    }

    fn replace(&mut self, path: &Path, mut whole: Vec<u8>) -> io::Result<()> {
        self.file = None;
        whole.push(b'\n');
        replace(path, &whole)?;
        // Without room for a descriptor the whole is written the next time, too.
        self.file = OpenOptions::new().append(true).open(path).ok();
        (self.whole, self.changes) = (whole.len() as u64, 0);
        Ok(())
    }
}

impl<T: State> StateFile<T> {
    /// A state that the file has, or is to have.
    pub fn new(path: PathBuf, state: T) -> Self {
        let (state, changes, written) = (Mutex::new(state), AtomicU64::new(0), Arc::default());
        let on_disk = Mutex::default();
        Self(Arc::new(Inner { path, state, changes, written, on_disk }))
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
        let mut on_disk = self.on_disk.lock().expect("no holder panics");
        let changes = self.state.lock().expect("no holder panics").take_changes();
        if changes.is_some_and(|changes| on_disk.add(&changes)) {
            return Ok(());
        }
        let state = self.state.lock().expect("no holder panics").clone();
        on_disk.replace(&self.path, state.to_bytes()).inspect_err(|error| {
            tracing::warn!("{}: {error}; {}", self.path.display(), T::LOST);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::table::Table;
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

    /// Records of which each change is written by itself.
    #[derive(Clone, Default)]
    struct Names(Table<String>);

    impl State for Names {
        const LOST: &'static str = "they are lost";

        fn to_bytes(&self) -> Vec<u8> {
            serde_json::to_vec(&self.0).unwrap()
        }

        fn take_changes(&mut self) -> Option<Vec<u8>> {
            Some(self.0.take_changes("names"))
        }
    }

    fn names_in(path: &Path) -> Table<String> {
        let Lines { whole, changes } = lines(path).unwrap().expect("a file");
        let mut names: Table<String> = serde_json::from_slice(&whole).unwrap();
        for change in changes {
            names.apply(serde_json::from_slice(&change).unwrap());
        }
        names
    }

    #[test]
    fn a_change_writes_as_much_as_it_is_and_the_file_has_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("names.json");
        let file = StateFile::new(path.clone(), Names::default());
        let many = (0..4000).map(|n| (format!("name{n:04}"), "x".repeat(32)));
        many.for_each(|(key, name)| file.lock().0.insert(key, name));
        file.write_soon();
        let whole = fs::metadata(&path).unwrap().len();
        assert_eq!(*names_in(&path), *file.lock().0);
        let mut longest = 0;
        for n in 0..6000 {
            let key = format!("name{:04}", n % 4000);
            match n % 3 {
                0 => drop(file.lock().0.remove(&key)),
                _ => file.lock().0.insert(key, n.to_string()),
            }
            let before = fs::metadata(&path).unwrap().len();
            file.write_soon();
            let after = fs::metadata(&path).unwrap().len();
            assert!(after <= before + 100, "{before} {after}");
            longest = longest.max(after);
        }
        assert!(longest <= 2 * whole.max(CHANGES_MAX) + 100, "{longest} of {whole}");
        assert_eq!(*names_in(&path), *file.lock().0);
    }

    #[test]
    fn a_last_line_without_an_end_counts_as_none_and_nothing_is_added_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("names.json");
        assert!(lines(&path).unwrap().is_none());
        // As an older Thaw wrote it.
        fs::write(&path, r#"{"a":"first"}"#).unwrap();
        assert_eq!(names_in(&path)["a"], "first");
        let change = "{\"table\":\"names\",\"key\":\"b\",\"value\":\"second\"}\n";
        fs::write(&path, format!("{{\"a\":\"first\"}}\n{change}{}", &change[..20])).unwrap();
        let known = names_in(&path);
        assert_eq!((known.len(), &*known["b"]), (2, "second"));
        // Who begins writes the whole.
        let file = StateFile::new(path.clone(), Names(known));
        file.lock().0.insert("c".to_owned(), "third".to_owned());
        file.write_soon();
        assert_eq!(*names_in(&path), *file.lock().0);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 1);
        file.lock().0.remove("a");
        file.write_soon();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        assert_eq!(*names_in(&path), *file.lock().0);
        fs::remove_file(&path).unwrap();
        file.lock().0.remove("b");
        file.write_soon();
        assert_eq!(*names_in(&path), *file.lock().0);
    }

    #[test]
    fn what_could_not_be_added_is_in_the_next_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("names.json");
        let file = StateFile::new(path.clone(), Names::default());
        file.lock().0.insert("a".to_owned(), "first".to_owned());
        file.write_soon();
        // A file that takes nothing, in the place of the one that changes are added to.
        let full = File::open(&path).unwrap();
        file.0.on_disk.lock().unwrap().file = Some(full);
        let in_the_way = path.with_extension("new");
        fs::create_dir(&in_the_way).unwrap();
        file.lock().0.insert("b".to_owned(), "second".to_owned());
        file.write_first().unwrap_err();
        fs::remove_dir(&in_the_way).unwrap();
        file.write_first().unwrap();
        assert_eq!(*names_in(&path), *file.lock().0);
        assert_eq!(names_in(&path).len(), 2);
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
