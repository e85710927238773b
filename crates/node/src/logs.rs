//! What functions print: kept in memory for the admin API and in a file for
//! afterwards, both bounded.

use crate::reactor::watch;
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast;

/// Bytes of lines kept in memory.
const RING_BYTES: usize = 256 * 1024;
/// Longest line; what is longer is broken.
const LINE_MAX: usize = 16 * 1024;
/// Bytes of a log file before it is rotated; one older file is kept.
const FILE_MAX: u64 = 8 << 20;
/// Bytes a second that a function may log for long.
const RATE: f64 = 1_048_576.0;
/// Bytes that it may log at once.
const BURST: f64 = 4.0 * 1_048_576.0;
/// Bytes that the host keeps between a function and the log.
const PIPE_BYTES: usize = 256 * 1024;

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// Thaw's own remarks.
    Thaw,
}

/// A line that a function printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// When it was read, milliseconds since the epoch.
    pub time_ms: u64,
    /// Where it came from.
    pub stream: Stream,
    /// The text, without its line end.
    pub text: String,
}

/// The log of one function.
#[derive(Debug)]
pub struct FunctionLog {
    path: PathBuf,
    state: Mutex<State>,
    followers: broadcast::Sender<Arc<Line>>,
}

#[derive(Debug)]
struct State {
    ring: VecDeque<Arc<Line>>,
    ring_bytes: usize,
    /// `None` after the file could not be written.
    file: Option<File>,
    file_len: u64,
    budget: f64,
    refilled: Instant,
    dropped: u64,
}

/// The write ends that a function's instances get.
#[derive(Debug)]
pub struct LogPipes {
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl LogPipes {
    /// Standard output of the function.
    pub fn stdout(&self) -> BorrowedFd<'_> {
        self.stdout.as_fd()
    }

    /// Standard error of the function.
    pub fn stderr(&self) -> BorrowedFd<'_> {
        self.stderr.as_fd()
    }
}

/// Path of a function's log in the directory of logs.
pub fn log_path(directory: &Path, function: &str) -> PathBuf {
    directory.join(format!("{function}.log"))
}

/// Path of the rotated log.
pub fn rotated_path(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

impl FunctionLog {
    /// Opens the log of a function, appending to its file.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(directory: &Path, function: &str) -> io::Result<Arc<Self>> {
        let path = log_path(directory, function);
        let file = open_file(&path)?;
        let state = State {
            ring: VecDeque::new(),
            ring_bytes: 0,
            file_len: file.metadata()?.len(),
            file: Some(file),
            budget: BURST,
            refilled: Instant::now(),
            dropped: 0,
        };
        let (followers, _) = broadcast::channel(1024);
        Ok(Arc::new(Self { path, state: Mutex::new(state), followers }))
    }

    /// Makes pipes whose lines end up in this log.
    ///
    /// # Errors
    /// The host is out of descriptors.
    pub fn pipes(self: &Arc<Self>) -> io::Result<LogPipes> {
        let make = |stream| -> io::Result<OwnedFd> {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            // Only the read end: guests expect pipes that block.
            rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
            // More room saves wake-ups, but unprivileged users have a quota.
            let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
            tokio::spawn(collect(self.clone(), reader, stream));
            Ok(writer)
        };
        Ok(LogPipes { stdout: make(Stream::Out)?, stderr: make(Stream::Err)? })
    }

    /// The lines that are still in memory, oldest first.
    pub fn recent(&self) -> Vec<Arc<Line>> {
        self.state.lock().expect("no holder panics").ring.iter().cloned().collect()
    }

    /// The lines in memory, and every further one as it comes.
    pub fn follow(&self) -> (Vec<Arc<Line>>, broadcast::Receiver<Arc<Line>>) {
        // Subscribed under the lock, so that no line is missed or comes twice.
        let state = self.state.lock().expect("no holder panics");
        (state.ring.iter().cloned().collect(), self.followers.subscribe())
    }

    /// Adds a line, unless the function logs too much.
    pub fn add(&self, stream: Stream, text: &[u8]) {
        let mut state = self.state.lock().expect("no holder panics");
        let now = Instant::now();
        let earned = now.duration_since(state.refilled).as_secs_f64() * RATE;
        state.budget = (state.budget + earned).min(BURST);
        state.refilled = now;
        let cost = (text.len() + 1) as f64;
        if state.budget < cost {
            state.dropped += 1;
            return;
        }
        state.budget -= cost;
        if state.dropped > 0 {
            let dropped = std::mem::take(&mut state.dropped);
            let notice = format!("{dropped} lines are missing here: the function logs too much");
            self.put(&mut state, Stream::Thaw, notice);
        }
        self.put(&mut state, stream, String::from_utf8_lossy(text).into_owned());
    }

    fn put(&self, state: &mut State, stream: Stream, text: String) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let line = Arc::new(Line { time_ms: time.as_millis() as u64, stream, text });
        state.ring_bytes += line.text.len();
        state.ring.push_back(line.clone());
        while state.ring_bytes > RING_BYTES {
            let Some(old) = state.ring.pop_front() else { break };
            state.ring_bytes -= old.text.len();
        }
        if let Err(error) = self.write(state, &line) {
            tracing::error!(
                "cannot write {} any more ({error}); free some space and restart",
                self.path.display()
            );
            state.file = None;
        }
        // Nobody may be following.
        let _ = self.followers.send(line);
    }

    fn write(&self, state: &mut State, line: &Line) -> io::Result<()> {
        let Some(file) = &mut state.file else { return Ok(()) };
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        if state.file_len > 0 && state.file_len + text.len() as u64 > FILE_MAX {
            std::fs::rename(&self.path, rotated_path(&self.path))?;
            *file = open_file(&self.path)?;
            state.file_len = 0;
        }
        file.write_all(&text)?;
        state.file_len += text.len() as u64;
        Ok(())
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Reads a pipe to its end, line by line.
async fn collect(log: Arc<FunctionLog>, reader: OwnedFd, stream: Stream) {
    let Ok(reader) = watch(reader) else { return };
    let mut lines = LineSplitter::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(mut ready) = reader.readable().await else { break };
        match rustix::io::read(reader.get_ref(), &mut buffer) {
            Ok(0) => break,
            Ok(count) => lines.push(&buffer[..count], |line| log.add(stream, line)),
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    lines.finish(|line| log.add(stream, line));
}

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    partial: Vec<u8>,
}

impl LineSplitter {
    /// Takes bytes and gives every line that they complete, without line ends.
    pub fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&[u8])) {
        let mut parts = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(part) = parts.next() {
            self.partial.extend_from_slice(part);
            let complete = parts.peek().is_some();
            while self.partial.len() > LINE_MAX {
                let rest = self.partial.split_off(LINE_MAX);
                line(&self.partial);
                self.partial = rest;
            }
            if complete {
                line(self.partial.strip_suffix(b"\r").unwrap_or(&self.partial));
                self.partial.clear();
            }
        }
    }

    /// Gives what is left when the stream has ended.
    pub fn finish(&mut self, mut line: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            line(&self.partial);
            self.partial.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_bytes_break() {
        let mut lines = Vec::new();
        let mut splitter = LineSplitter::default();
        let mut take = |line: &[u8]| lines.push(String::from_utf8(line.to_vec()).unwrap());
        for piece in ["a", "b\nc", "\n\nd\r\n", "e"] {
            splitter.push(piece.as_bytes(), &mut take);
        }
        splitter.finish(&mut take);
        assert_eq!(lines, ["ab", "c", "", "d", "e"]);
        let mut lengths = Vec::new();
        splitter.push(&vec![b'x'; 2 * LINE_MAX + 1], |line| lengths.push(line.len()));
        splitter.push(b"\n", |line| lengths.push(line.len()));
        assert_eq!(lengths, [LINE_MAX, LINE_MAX, 1]);
    }

    #[test]
    fn a_flood_is_cut_and_said_so() {
        let directory = tempfile::tempdir().unwrap();
        let log = FunctionLog::open(directory.path(), "f").unwrap();
        let line = vec![b'x'; LINE_MAX];
        for _ in 0..2 * BURST as usize / LINE_MAX {
            log.add(Stream::Out, &line);
        }
        let dropped = log.state.lock().unwrap().dropped;
        assert!(dropped > 0);
        log.state.lock().unwrap().budget = BURST;
        log.add(Stream::Out, b"after");
        let recent = log.recent();
        let [.., notice, last] = &recent[..] else { panic!("{}", recent.len()) };
        assert_eq!((notice.stream, last.text.as_str()), (Stream::Thaw, "after"));
        let bytes: usize = recent.iter().map(|line| line.text.len()).sum();
        assert!(bytes <= RING_BYTES, "{bytes}");
    }

    #[test]
    fn files_are_rotated() {
        let directory = tempfile::tempdir().unwrap();
        let log = FunctionLog::open(directory.path(), "f").unwrap();
        log.add(Stream::Out, b"first");
        log.state.lock().unwrap().file_len = FILE_MAX;
        log.add(Stream::Err, b"second");
        let path = log_path(directory.path(), "f");
        let read = |path: &Path| -> Line {
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
        };
        assert_eq!(read(&rotated_path(&path)).text, "first");
        assert_eq!(read(&path).text, "second");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn what_is_written_to_the_pipes_is_followed() {
        let directory = tempfile::tempdir().unwrap();
        let log = FunctionLog::open(directory.path(), "f").unwrap();
        let pipes = log.pipes().unwrap();
        let (before, mut lines) = log.follow();
        assert!(before.is_empty());
        rustix::io::write(pipes.stderr(), b"hello\n").unwrap();
        let line = lines.recv().await.unwrap();
        assert_eq!((line.stream, line.text.as_str()), (Stream::Err, "hello"));
    }
}
