//! Log files, and the one thread that writes them. Whoever adds a line waits for no
//! disk.

use super::function::{FunctionLog, Pending};
use super::line::{Line, Stream};
use super::{LogLimits, rotated_paths};
use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::iter;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// After a file could not be written, so long nobody tries again.
const RETRY: Duration = Duration::from_secs(1);

/// The file of one log.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    limits: LogLimits,
    file: Option<File>,
    len: u64,
    /// When it could last not be written, if it still cannot be.
    failed: Option<Instant>,
    /// Lines that are not in it and should be.
    lost: u64,
}

impl LogFile {
    /// The file at `path`, which is opened when it is first written.
    pub fn new(path: PathBuf, limits: LogLimits) -> Self {
        Self { path, limits, file: None, len: 0, failed: None, lost: 0 }
    }

    /// Appends lines. If that fails they are counted, and the next lines are tried
    /// again a second later: somebody may have made room.
    pub fn append(&mut self, pending: &Pending) {
        self.lost += pending.lost;
        if self.failed.is_some_and(|failed| failed.elapsed() < RETRY) {
            self.lost += pending.lines;
            return;
        }
        match self.write(&pending.json) {
            Ok(()) => {
                self.lost = 0;
                if self.failed.take().is_some() {
                    tracing::info!("{} is written again", self.path.display());
                }
            }
            Err(error) => {
                self.lost += pending.lines;
                if self.failed.replace(Instant::now()).is_none() {
                    tracing::error!(
                        "cannot write {} ({error}); its lines are dropped until it can be written again: free some space",
                        self.path.display()
                    );
                }
            }
        }
    }

    fn write(&mut self, json: &[u8]) -> io::Result<()> {
        let remark = self.remark();
        let more = (remark.len() + json.len()) as u64;
        self.opened()?;
        if self.len > 0 && self.len + more > self.limits.file_max {
            self.file = None;
            self.rotate()?;
        }
        let file = self.opened()?;
        let written = file.write_all(&remark).and_then(|()| file.write_all(json));
        match written {
            Ok(()) => self.len += more,
            // No line is left half written.
            Err(_) => {
                let whole = self.len;
                let _ = self.opened()?.set_len(whole);
            }
        }
        written
    }

    fn opened(&mut self) -> io::Result<&mut File> {
        if self.file.is_none() {
            let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&self.path)?;
            self.len = file.metadata()?.len();
            self.file = Some(file);
        }
        Ok(self.file.as_mut().expect("just opened"))
    }

    /// Moves the file out of the way. Older ones than are to be kept are removed.
    fn rotate(&self) -> io::Result<()> {
        let kept = self.limits.files as usize;
        let mut paths: Vec<_> =
            iter::once(self.path.clone()).chain(rotated_paths(&self.path)).collect();
        for surplus in paths.drain(kept + 1..) {
            match fs::remove_file(surplus) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result?,
            }
        }
        for pair in paths.windows(2).rev() {
            match fs::rename(&pair[0], &pair[1]) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result?,
            }
        }
        match kept {
            0 => fs::remove_file(&self.path),
            _ => Ok(()),
        }
    }

    /// Says that lines are missing, if some are.
    fn remark(&self) -> Vec<u8> {
        if self.lost == 0 {
            return Vec::new();
        }
        let text =
            format!("{} lines are missing here: they could not be written in time", self.lost);
        Line::now(Stream::Thaw, None, text).to_json()
    }
}

/// The logs whose files want to be written, each at most once.
#[derive(Debug, Default)]
pub(super) struct WriteQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    logs: VecDeque<Arc<FunctionLog>>,
    is_closed: bool,
}

impl WriteQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("no holder panics")
    }

    /// Has the writer come to a log.
    pub fn push(&self, log: Arc<FunctionLog>) {
        let mut state = self.state();
        if !state.is_closed {
            state.logs.push_back(log);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Has the writer end when it has written what is there.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// Writes files until the queue is closed.
    pub fn serve(&self) {
        while let Some(log) = self.next() {
            log.write_pending();
        }
    }

    fn next(&self) -> Option<Arc<FunctionLog>> {
        let mut state = self.state();
        loop {
            match state.logs.pop_front() {
                Some(log) => return Some(log),
                None if state.is_closed => return None,
                None => state = self.changed.wait(state).expect("no holder panics"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::log_path;
    use super::*;
    use std::path::Path;

    fn pending(text: &str) -> Pending {
        let json = Line::now(Stream::Out, None, text.to_owned()).to_json();
        Pending { json, lines: 1, ..Pending::default() }
    }

    fn read(path: &Path) -> Vec<Line> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn files_are_rotated() {
        let directory = tempfile::tempdir().unwrap();
        let path = log_path(directory.path(), "f");
        let texts = || -> Vec<String> {
            let files = iter::once(path.clone()).chain(rotated_paths(&path));
            files.filter(|path| path.exists()).map(|path| read(&path)[0].text.clone()).collect()
        };
        for files in [1, 3, 2, 0] {
            let limits = LogLimits { file_max: 1, files, ..LogLimits::default() };
            let mut file = LogFile::new(path.clone(), limits);
            for number in 0..6 {
                file.append(&pending(&number.to_string()));
            }
            assert_eq!(texts(), ["5", "4", "3", "2"][..=files as usize]);
        }
    }

    #[test]
    fn what_cannot_be_written_is_counted_and_writing_goes_on_later() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("later");
        let path = log_path(&missing, "f");
        let mut file = LogFile::new(path.clone(), LogLimits::default());
        file.append(&pending("lost"));
        assert!(file.failed.is_some());
        std::fs::create_dir(&missing).unwrap();
        // Not tried again at once.
        file.append(&pending("lost, too"));
        assert!(!path.exists());
        file.failed = Instant::now().checked_sub(RETRY);
        file.append(&pending("there"));
        let lines = read(&path);
        assert!(lines[0].text.starts_with("2 lines are missing"), "{lines:?}");
        assert_eq!(lines[1].text, "there");
        assert_eq!((file.lost, file.failed), (0, None));
    }
}
