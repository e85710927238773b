//! The log of one function: its latest lines in memory, and those that are on the
//! way to its file.

use super::NodeLogs;
use super::file::LogFile;
use super::line::{LINE_COST, Line, Origin, Stream};
use crate::allowance::Allowance;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use tokio::sync::Notify;

/// Bytes that a function's lines may take in memory, [`Line::cost`] counted: at
/// most 2,048 lines.
pub(super) const RING_BYTES: usize = 256 * 1024;
/// Bytes that may wait for the file; more only if the disk is slower than a function may log.
pub(super) const PENDING_BYTES: usize = 512 * 1024;
/// How many seconds' worth a function may log at once.
const BURST: f64 = 4.0;
/// Bytes a second that are read from a function's instances, `LINE_COST` for each
/// line end included. More stays in their pipes, and the writers wait.
const READ_RATE: f64 = 8.0 * 1_048_576.0;
/// Most lines, and bytes of text, that a follower gets at once.
const BATCH_LINES: usize = 128;
const BATCH_BYTES: usize = 64 * 1024;

/// The log of one function.
///
/// Locks: `state` is held for a few instructions, never over disk access. `file` is
/// the file writer's, `reading` the collector's; no other thread waits for them. None
/// is taken while another is held.
#[derive(Debug)]
pub struct FunctionLog {
    node: Arc<NodeLogs>,
    state: Mutex<State>,
    /// There are further lines.
    changed: Notify,
    reading: Mutex<Allowance>,
    file: Mutex<LogFile>,
}

#[derive(Debug)]
struct State {
    ring: VecDeque<Arc<Line>>,
    /// [`Line::cost`] of all of them.
    ring_bytes: usize,
    /// Number of the line that comes next; those in the ring end before it.
    next: u64,
    allowance: Allowance,
    /// Lines dropped since the flood began; `None`: no flood.
    dropped: Option<u64>,
    pending: Pending,
}

/// JSON lines on the way to the file.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub json: Vec<u8>,
    /// How many they are.
    pub lines: u64,
    /// Lines for which there was no room.
    pub lost: u64,
    /// The writer has been told, and has not come yet.
    pub is_announced: bool,
}

/// What a function may log from `now` on.
fn allowance(node: &NodeLogs, now: Instant) -> Allowance {
    let rate = node.limits.rate as f64;
    Allowance::new(rate, BURST * rate, now)
}

impl FunctionLog {
    pub(super) fn new(node: Arc<NodeLogs>, path: PathBuf) -> Self {
        let (now, limits) = (Instant::now(), node.limits);
        let state = State {
            ring: VecDeque::new(),
            ring_bytes: 0,
            next: 0,
            allowance: allowance(&node, now),
            dropped: None,
            pending: Pending::default(),
        };
        Self {
            node,
            state: Mutex::new(state),
            changed: Notify::new(),
            reading: Mutex::new(Allowance::new(READ_RATE, READ_RATE, now)),
            file: Mutex::new(LogFile::new(path, limits)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// The lines that are still in memory, oldest first.
    pub fn recent(&self) -> Vec<Arc<Line>> {
        self.state().ring.iter().cloned().collect()
    }

    /// Every line in memory, and every further one as it comes.
    pub fn follow(self: &Arc<Self>) -> Follower {
        let state = self.state();
        let next = state.first();
        drop(state);
        Follower { log: self.clone(), next }
    }

    /// Adds a line, unless the function logs too much. Call [`Self::publish`] soon.
    pub fn add(&self, stream: Stream, origin: Option<Origin>, text: &[u8]) {
        let now = Instant::now();
        if !self.admit(now) {
            return;
        }
        let text = String::from_utf8_lossy(text).into_owned();
        self.put(Line::now(stream, origin, text));
    }

    /// Adds a remark of Thaw's on an instance, however much the function logs: each costs
    /// the function more time than it costs the log.
    pub fn remark(self: &Arc<Self>, origin: Option<Origin>, text: &str) {
        self.put(Line::now(Stream::Thaw, origin, text.to_owned()));
        self.publish();
    }

    /// Whether a line may be added now; one that may not is counted.
    fn admit(&self, now: Instant) -> bool {
        let mut state = self.state();
        let left = state.allowance.left(now);
        let remark = match &mut state.dropped {
            // So much is saved first, so that a flood is one gap a second and not one after
            // each line.
            Some(dropped) if left < self.node.limits.rate as f64 => {
                *dropped += 1;
                return false;
            }
            Some(dropped) => {
                let remark =
                    format!("{dropped} lines are missing here: the function logs too much");
                state.dropped = None;
                remark
            }
            None if left > 0.0 => return true,
            None => {
                state.dropped = Some(1);
                "from here on lines are missing: the function logs too much".to_owned()
            }
        };
        let admitted = state.dropped.is_none();
        drop(state);
        self.put(Line::now(Stream::Thaw, None, remark));
        admitted
    }

    fn put(&self, line: Line) {
        let json = line.to_json();
        let mut state = self.state();
        state.allowance.spend(LINE_COST + json.len());
        state.next += 1;
        state.ring_bytes += line.cost();
        state.ring.push_back(Arc::new(line));
        state.trim(self.node.share());
        let pending = &mut state.pending;
        if pending.json.len() + json.len() <= PENDING_BYTES && self.node.reserve(json.len()) {
            pending.json.extend_from_slice(&json);
            pending.lines += 1;
        } else {
            pending.lost += 1;
        }
    }

    /// Tells followers and the file's writer that lines were added.
    pub fn publish(self: &Arc<Self>) {
        self.changed.notify_waiters();
        let mut state = self.state();
        let is_wanted = !std::mem::replace(&mut state.pending.is_announced, true);
        drop(state);
        if is_wanted {
            self.node.announce(self.clone());
        }
    }

    /// Lets go of lines until no more than `share` bytes are in memory.
    pub(super) fn trim(&self, share: usize) {
        self.state().trim(share);
    }

    /// Whether the collector may read from the function's instances now.
    pub(super) fn may_read(&self, now: Instant) -> bool {
        self.reading.lock().expect("no holder panics").left(now) > 0.0
    }

    /// Charges the function for bytes that were read, with so many line ends.
    pub(super) fn charge_reading(&self, bytes: usize, lines: usize) {
        self.reading.lock().expect("no holder panics").spend(bytes + lines * LINE_COST);
    }

    /// Writes to the file all that waits for it. For the writer's thread.
    pub(super) fn write_pending(&self) {
        let pending = std::mem::take(&mut self.state().pending);
        let len = pending.json.len();
        self.file.lock().expect("no holder panics").append(&pending);
        drop(pending);
        self.node.release(len);
    }
}

impl Drop for FunctionLog {
    fn drop(&mut self) {
        self.node.release(self.state().pending.json.len());
        self.node.forget_log();
    }
}

impl State {
    /// Number of the oldest line in memory.
    fn first(&self) -> u64 {
        self.next - self.ring.len() as u64
    }

    fn trim(&mut self, share: usize) {
        while self.ring_bytes > share {
            let Some(old) = self.ring.pop_front() else { break };
            self.ring_bytes -= old.cost();
        }
    }
}

/// Reads a log as it grows. It keeps no lines of its own: one that is too slow finds
/// that the oldest are gone.
#[derive(Debug)]
pub struct Follower {
    log: Arc<FunctionLog>,
    next: u64,
}

impl Follower {
    /// The next lines, at least one; a remark stands for those that were missed.
    pub async fn next(&mut self) -> Vec<Arc<Line>> {
        let log = self.log.clone();
        loop {
            // Registered before the look, so that nothing is missed between them.
            let changed = log.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let lines = self.available();
            if !lines.is_empty() {
                return lines;
            }
            changed.await;
        }
    }

    fn available(&mut self) -> Vec<Arc<Line>> {
        let state = self.log.state();
        let first = state.first();
        let mut lines = Vec::new();
        if self.next < first {
            let missed = first - self.next;
            let remark = format!(
                "{missed} lines are missing here: they came faster than they were read; the log's file has more"
            );
            lines.push(Arc::new(Line::now(Stream::Thaw, None, remark)));
            self.next = first;
        }
        let mut bytes = 0;
        for line in state.ring.iter().skip((self.next - first) as usize) {
            if lines.len() >= BATCH_LINES || bytes >= BATCH_BYTES {
                break;
            }
            bytes += line.text.len();
            lines.push(line.clone());
            self.next += 1;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LogLimits, Logs};
    use super::*;
    use thaw_build::lines::LINE_MAX;

    /// [`LogLimits::rate`] by default.
    const RATE: usize = 1 << 20;

    impl FunctionLog {
        fn ring_bytes(&self) -> usize {
            self.state().ring_bytes
        }

        fn refill(&self) {
            let mut state = self.state();
            state.allowance = allowance(&self.node, Instant::now());
        }
    }

    fn logs() -> (tempfile::TempDir, Logs) {
        let directory = tempfile::tempdir().unwrap();
        let logs = Logs::start(directory.path(), LogLimits::default()).unwrap();
        (directory, logs)
    }

    #[test]
    fn a_flood_is_cut_and_said_so() {
        let (_directory, logs) = logs();
        let log = logs.open("f");
        let line = vec![b'x'; LINE_MAX];
        let is_cut = |log: &FunctionLog| log.state().dropped.is_some_and(|count| count > 100);
        // A slow machine is given more meanwhile.
        for _ in 0..100 * 4 * RATE / LINE_MAX {
            if is_cut(&log) {
                break;
            }
            log.add(Stream::Out, None, &line);
        }
        assert!(is_cut(&log));
        let dropped = log.state().dropped;
        let recent = log.recent();
        assert!(recent.iter().any(|line| line.text.contains("from here on")), "{recent:?}");
        log.refill();
        log.add(Stream::Out, None, b"after");
        let recent = log.recent();
        let [.., notice, last] = &recent[..] else { panic!("{}", recent.len()) };
        assert_eq!((notice.stream, last.text.as_str()), (Stream::Thaw, "after"));
        assert!(notice.text.starts_with(&format!("{} lines", dropped.unwrap())), "{notice:?}");
    }

    #[test]
    fn empty_lines_cost_what_they_take() {
        let (_directory, logs) = logs();
        let log = logs.open("f");
        let begin = Instant::now();
        for _ in 0..1_000_000 {
            log.add(Stream::Out, Some(Origin { instance: 1, pid: 2 }), b"");
        }
        assert!(log.ring_bytes() <= RING_BYTES);
        assert!(log.recent().len() <= RING_BYTES / LINE_COST);
        let state = log.state();
        assert!(state.pending.json.len() <= PENDING_BYTES);
        let most = (BURST + begin.elapsed().as_secs_f64()) * RATE as f64 / LINE_COST as f64;
        assert!((state.next as f64) < most, "{} lines were taken", state.next);
    }

    #[test]
    fn all_functions_together_keep_to_the_nodes_share() {
        let (_directory, logs) = logs();
        let count = 2 * super::super::RING_NODE_BYTES / RING_BYTES;
        let fill = |log: &Arc<FunctionLog>| {
            for _ in 0..RING_BYTES / 1024 {
                log.add(Stream::Out, None, &[b'x'; 1024]);
            }
        };
        let mut all = Vec::new();
        for number in 0..count {
            let log = logs.open(&format!("f{number}"));
            fill(&log);
            all.push(log);
        }
        let bytes: usize = all.iter().map(|log| log.ring_bytes()).sum();
        assert!(bytes <= super::super::RING_NODE_BYTES, "{bytes}");
        // A log that is dropped gives its share back.
        all.truncate(1);
        fill(&all[0]);
        assert!(all[0].ring_bytes() > RING_BYTES / 2);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_slow_follower_hears_what_it_missed() {
        let (_directory, logs) = logs();
        let log = logs.open("f");
        log.add(Stream::Out, None, b"0");
        let mut follower = log.follow();
        assert_eq!(follower.next().await[0].text, "0");
        let count = 3 * RING_BYTES / LINE_COST;
        for number in 1..=count {
            log.add(Stream::Out, None, number.to_string().as_bytes());
        }
        let lines = follower.next().await;
        assert!(lines.len() <= BATCH_LINES);
        assert_eq!(lines[0].stream, Stream::Thaw);
        let missed: u64 = lines[0].text.split(' ').next().unwrap().parse().unwrap();
        assert_eq!(lines[1].text.parse(), Ok(missed + 1));
        let mut last = lines.last().unwrap().text.clone();
        while last != count.to_string() {
            last = follower.next().await.last().unwrap().text.clone();
        }
    }
}
