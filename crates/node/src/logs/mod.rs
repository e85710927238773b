//! What functions print: kept in memory for the admin API and in a file for
//! afterwards, both bounded, for each function and for the node.
//!
//! ```text
//! instance ══ two pipes ══▶ collector ──▶ FunctionLog ──▶ followers (async tasks)
//!             of its own    (a thread)    ring, pending ─▶ file writer (a thread)
//! ```
//!
//! Guests write as much as they like, so:
//!
//! - Each instance has pipes of its own, made ahead: its lines carry its number, and
//!   it shares no pipe with another.
//! - The collector reads from the instances of a function at a limited rate, and works
//!   at most a quarter of the time. A guest that floods waits until its pipe has room
//!   again; it is slowed down and never stopped. To read and drop all that it writes
//!   would take a processor from the others instead.
//! - Of what is read, a function may log a mebibyte a second; further lines are
//!   dropped and counted.
//! - Files are written by a thread of their own. A slow or full disk costs lines, which
//!   are counted, and holds up nobody.

mod access;
mod collector;
mod file;
mod function;
mod line;
mod pipes;

pub use access::{AccessFile, access_log_path};
pub use function::{Follower, FunctionLog};
pub use line::{Line, Origin, Stream};
pub use pipes::{InstanceLog, InstancePipes};

use collector::Collector;
use file::WriteQueue;
use function::RING_BYTES;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

/// Bytes that the lines of all functions may take in memory.
const RING_NODE_BYTES: usize = 64 << 20;
/// Bytes of all functions that may wait for their files.
const PENDING_NODE_BYTES: usize = 16 << 20;
/// Other threads go first where processors are scarce (see nice(2)).
const NICENESS: i32 = 5;

/// Path of a function's log in the directory of logs.
pub fn log_path(directory: &Path, function: &str) -> PathBuf {
    directory.join(format!("{function}.log"))
}

/// Paths of the rotated logs beside the one at `path`, whether they are there or not; the
/// youngest is the first.
pub fn rotated_paths(path: &Path) -> impl DoubleEndedIterator<Item = PathBuf> {
    (1..=FILES_MAX).map(|number| path.with_extension(format!("log.{number}")))
}

/// How much is kept of what functions log. The same holds for the access log, but for `rate`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogLimits {
    /// Bytes of a log file before it is rotated.
    pub file_max: u64,
    /// Older files that are kept, [`FILES_MAX`] at most.
    pub files: u32,
    /// Bytes a second that a function may log for long, and four times as many at once. A line
    /// costs its JSON and 128 bytes.
    pub rate: u64,
}

/// Most older files of a log.
pub const FILES_MAX: u32 = 99;

impl Default for LogLimits {
    fn default() -> Self {
        Self { file_max: 8 << 20, files: 1, rate: 1 << 20 }
    }
}

/// What the logs of a node share.
#[derive(Debug, Default)]
struct NodeLogs {
    limits: LogLimits,
    /// Logs that exist.
    count: AtomicUsize,
    all: Mutex<Vec<Weak<FunctionLog>>>,
    /// Bytes that wait for files.
    pending: AtomicUsize,
    queue: WriteQueue,
}

impl NodeLogs {
    /// Bytes that the lines of one function may take in memory.
    fn share(&self) -> usize {
        RING_BYTES.min(RING_NODE_BYTES / self.count.load(Ordering::Relaxed).max(1))
    }

    /// Makes one more log known; the others' shares may shrink.
    fn add_log(&self, log: &Arc<FunctionLog>) {
        let mut all = self.all.lock().expect("no holder panics");
        all.retain(|log| log.strong_count() > 0);
        all.push(Arc::downgrade(log));
        let before = self.share();
        self.count.fetch_add(1, Ordering::Relaxed);
        let share = self.share();
        let others: Vec<_> = match share < before {
            true => all.iter().filter_map(Weak::upgrade).collect(),
            false => Vec::new(),
        };
        drop(all);
        others.iter().for_each(|log| log.trim(share));
    }

    fn forget_log(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts bytes that are to wait for a file, if there is room for them.
    fn reserve(&self, bytes: usize) -> bool {
        let room = |pending: usize| {
            pending.checked_add(bytes).filter(|pending| *pending <= PENDING_NODE_BYTES)
        };
        self.pending.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok()
    }

    fn release(&self, bytes: usize) {
        self.pending.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Has a log's file written.
    fn announce(&self, log: Arc<FunctionLog>) {
        self.queue.push(log);
    }
}

/// The logs of a node. Dropping it ends its threads at some time; see
/// [`Logs::finish`].
#[derive(Debug)]
pub struct Logs {
    directory: PathBuf,
    node: Arc<NodeLogs>,
    collector: Arc<Collector>,
    /// Says, by its end, that all is written.
    written: Mutex<Receiver<()>>,
}

impl Logs {
    /// Starts to collect logs into files in `directory`.
    ///
    /// # Errors
    /// The host is out of descriptors or threads.
    pub fn start(directory: &Path, limits: LogLimits) -> io::Result<Self> {
        let node = Arc::new(NodeLogs { limits, ..NodeLogs::default() });
        let collector = Arc::new(Collector::new()?);
        let (alive, written) = mpsc::channel();
        let logs = Self {
            directory: directory.to_owned(),
            node: node.clone(),
            collector: collector.clone(),
            written: Mutex::new(written),
        };
        let queue = node.clone();
        in_thread("thaw-log-files", move || {
            queue.queue.serve();
            drop(alive);
        })?;
        in_thread("thaw-logs", move || {
            collector.serve();
            node.queue.close();
        })?;
        Ok(logs)
    }

    /// A new log of a function, which appends to its file. Open it once: two logs of one
    /// file do not know of each other.
    pub fn open(&self, function: &str) -> Arc<FunctionLog> {
        let path = log_path(&self.directory, function);
        let log = Arc::new(FunctionLog::new(self.node.clone(), path));
        self.node.add_log(&log);
        // The file is there from the beginning.
        log.publish();
        log
    }

    /// The log's side of an instance of an earlier daemon, from the read ends of its pipes.
    ///
    /// # Errors
    /// The host is out of resources.
    pub fn adopt(&self, log: &Arc<FunctionLog>, readers: [OwnedFd; 2]) -> io::Result<InstanceLog> {
        InstanceLog::adopt(&self.collector, log, readers)
    }

    /// Pipes for one instance, whose lines end up in `log`. Takes no system call as
    /// long as some were made ahead.
    ///
    /// # Errors
    /// The host is out of descriptors.
    pub fn pipes(&self, log: &Arc<FunctionLog>) -> io::Result<InstancePipes> {
        InstancePipes::take(&self.collector, log)
    }

    /// Reads what instances have written, writes it to the files, and ends; for a
    /// thread that may wait so long. Whether all was written in this time.
    pub fn finish(&self, patience: Duration) -> bool {
        self.collector.stop();
        let written = self.written.lock().expect("no holder panics");
        written.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.collector.stop();
    }
}

/// Runs something in a thread that gives way to others.
fn in_thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let begin = move || {
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::debug!("a thread of the logs is as nice as others: {error}");
        }
        run();
    };
    thread::Builder::new().name(name.to_owned()).spawn(begin).map(drop)
}
