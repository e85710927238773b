//! The file of the access log. Whoever adds a line waits for no disk: lines wait in memory
//! for the thread that writes them, so many at most; others are lost and counted.

use super::file::LogFile;
use super::function::Pending;
use super::{LogLimits, in_thread};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of lines that may wait.
const PENDING_MAX: usize = 4 << 20;
/// Lines that come within this time are written at once.
const TOGETHER: Duration = Duration::from_millis(20);

/// The file of the access log.
#[derive(Debug)]
pub struct AccessFile {
    shared: Arc<Shared>,
    /// Says, by its end, that all is written.
    written: Mutex<Receiver<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    pending: Pending,
    is_closed: bool,
}

/// Where the access log is. No function can have a name with an underscore.
pub fn access_log_path(directory: &Path) -> PathBuf {
    directory.join("access_.log")
}

impl AccessFile {
    /// Starts a thread that appends to the log in `directory`; the file is made with its
    /// first line.
    ///
    /// # Errors
    /// The host is out of threads.
    pub fn start(directory: &Path, limits: LogLimits) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (alive, written) = mpsc::channel();
        let (writer, path) = (shared.clone(), access_log_path(directory));
        in_thread("thaw-access-log", move || {
            writer.serve(LogFile::new(path, limits));
            drop(alive);
        })?;
        Ok(Self { shared, written: Mutex::new(written) })
    }

    /// Adds a line, which ends with a line feed.
    pub fn add(&self, line: &[u8]) {
        let mut waiting = self.shared.waiting();
        if waiting.pending.json.len() + line.len() > PENDING_MAX {
            waiting.pending.lost += 1;
            return;
        }
        let was_empty = waiting.pending.json.is_empty();
        waiting.pending.json.extend_from_slice(line);
        waiting.pending.lines += 1;
        drop(waiting);
        if was_empty {
            self.shared.changed.notify_one();
        }
    }

    /// Writes what waits, and ends; whether all was written in this time.
    pub fn finish(&self, patience: Duration) -> bool {
        self.shared.close();
        let written = self.written.lock().expect("no holder panics");
        written.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for AccessFile {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no holder panics")
    }

    fn close(&self) {
        self.waiting().is_closed = true;
        self.changed.notify_one();
    }

    /// Writes until it is closed and all is written.
    fn serve(&self, mut file: LogFile) {
        while let Some(pending) = self.next() {
            file.append(&pending);
        }
    }

    fn next(&self) -> Option<Pending> {
        let mut waiting = self.waiting();
        while waiting.pending.json.is_empty() && !waiting.is_closed {
            waiting = self.changed.wait(waiting).expect("no holder panics");
        }
        if !waiting.is_closed {
            drop(waiting);
            std::thread::sleep(TOGETHER);
            waiting = self.waiting();
        }
        let pending = std::mem::take(&mut waiting.pending);
        (!pending.json.is_empty()).then_some(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_and_the_rest_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let file = AccessFile::start(directory.path(), LogLimits::default()).unwrap();
        for number in 0..1000 {
            file.add(format!("{number}\n").as_bytes());
        }
        assert!(file.finish(Duration::from_secs(60)));
        let text = std::fs::read_to_string(access_log_path(directory.path())).unwrap();
        let expected: String = (0..1000).map(|number| format!("{number}\n")).collect();
        assert_eq!(text, expected);
    }

    #[test]
    fn lines_beyond_the_bound_are_lost_and_counted() {
        let shared = Arc::new(Shared::default());
        let file = AccessFile { shared: shared.clone(), written: Mutex::new(mpsc::channel().1) };
        let line = vec![b'x'; 1 << 20];
        (0..10).for_each(|_| file.add(&line));
        let waiting = shared.waiting();
        assert_eq!(waiting.pending.json.len(), PENDING_MAX);
        assert_eq!((waiting.pending.lines, waiting.pending.lost), (4, 6));
    }
}
