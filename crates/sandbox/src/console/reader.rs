//! The thread that reads consoles.
//!
//! Memory is bounded by [`LINE_MAX`] for each console and one page in its pipe.
//! The thread sleeps while no sandbox writes; registering a console does not
//! wake it.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::budget::{Budget, Rate};
use super::{ConsoleOutput, ConsoleRate};
use crate::message::time_until;
use crate::text::escape;

/// Longest line, in bytes; a longer one is passed on in pieces.
const LINE_MAX: usize = 1024;
/// Bytes read at once where nothing is limited: what a pipe holds.
const LOSSLESS_READ: usize = 64 * 1024;
/// What a line costs besides its text: whoever logs it adds time and process.
const LINE_OVERHEAD: usize = 64;
/// How often those that wait are looked at.
const TICK: Duration = Duration::from_millis(250);
/// What one sandbox may write.
const SANDBOX_RATE: Rate = Rate { bytes: 4 << 10, lines: 32, burst: 4 };
/// What all sandboxes of a reader may write.
const NODE_RATE: Rate = Rate { bytes: 256 << 10, lines: 2048, burst: 4 };
/// Most events that are taken at once.
const EVENTS: usize = 64;
/// Stands for the waker in the epoll descriptor; consoles count from 1.
const WAKER: u64 = 0;

type Sink = Box<dyn FnMut(&ConsoleOutput<'_>) + Send>;

/// Reads consoles on a thread of its own; see [`super::Console::lines`].
pub struct ConsoleReader {
    shared: Arc<Shared>,
    rate: ConsoleRate,
}

impl fmt::Debug for ConsoleReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleReader").field("rate", &self.rate).finish_non_exhaustive()
    }
}

struct Shared {
    epoll: OwnedFd,
    /// An eventfd that says that the reader is not wanted any more.
    waker: OwnedFd,
    registry: Mutex<Registry>,
    /// A console has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Registry {
    /// Number of the last console.
    last: u64,
    /// Consoles that the thread has not seen yet.
    arrived: Vec<(u64, Arc<OwnedFd>, Tag)>,
    /// Consoles whose sandbox may still write.
    open: usize,
    closing: bool,
}

/// Whose console it is.
#[derive(Clone, Debug, Default)]
pub struct Tag(Arc<TagFields>);

#[derive(Debug, Default)]
struct TagFields {
    pid: AtomicU32,
    label: OnceLock<Arc<str>>,
    /// As long as it is read.
    pipe: Weak<OwnedFd>,
}

impl Tag {
    pub(super) fn set_pid(&self, pid: u32) {
        self.0.pid.store(pid, Ordering::Relaxed);
    }

    /// The read end, if it is still read.
    pub(super) fn pipe(&self) -> Option<Arc<OwnedFd>> {
        self.0.pipe.upgrade()
    }

    pub(super) fn label(&self) -> Option<&Arc<str>> {
        self.0.label.get()
    }

    /// The first label stays.
    pub(super) fn set_label(&self, label: Arc<str>) {
        let _ = self.0.label.set(label);
    }
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConsoleReader {
    pub(super) fn start(rate: ConsoleRate, sink: Sink) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        let shared =
            Arc::new(Shared { epoll, waker, registry: Mutex::default(), ended: Condvar::new() });
        let thread = Thread::new(shared.clone(), rate, sink);
        std::thread::Builder::new().name("consoles".into()).spawn(move || thread.run())?;
        Ok(Self { shared, rate })
    }

    pub(super) fn rate(&self) -> ConsoleRate {
        self.rate
    }

    /// Gives the thread the read end of another console.
    pub(super) fn register(&self, pipe: OwnedFd) -> io::Result<Tag> {
        let mut registry = self.shared.registry();
        registry.last += 1;
        let number = registry.last;
        // The thread takes in what has arrived before it looks at an event.
        epoll::add(&self.shared.epoll, &pipe, EventData::new_u64(number), EventFlags::IN)?;
        let pipe = Arc::new(pipe);
        let tag = Tag(Arc::new(TagFields { pipe: Arc::downgrade(&pipe), ..TagFields::default() }));
        registry.arrived.push((number, pipe, tag.clone()));
        registry.open += 1;
        Ok(tag)
    }

    pub(super) fn wait_ended(&self, timeout: Duration) -> bool {
        let registry = self.shared.registry();
        let waited =
            self.shared.ended.wait_timeout_while(registry, timeout, |registry| registry.open > 0);
        let (registry, _) = waited.unwrap_or_else(PoisonError::into_inner);
        registry.open == 0
    }
}

impl Drop for ConsoleReader {
    fn drop(&mut self) {
        self.shared.registry().closing = true;
        // An eventfd that was never read takes this much.
        let _ = rustix::io::write(&self.shared.waker, &1_u64.to_ne_bytes());
    }
}

/// A console that the thread reads.
struct Open {
    pipe: Arc<OwnedFd>,
    tag: Tag,
    /// What was read and not passed on.
    buffer: Vec<u8>,
    budget: Budget,
    /// Nothing is read until the budget has grown.
    paused: bool,
}

/// What became of an attempt to pass on a console's lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    /// All of them.
    All,
    /// The budget is spent.
    Some,
}

struct Thread {
    shared: Arc<Shared>,
    outlet: Outlet,
    consoles: HashMap<u64, Open>,
    paused: Vec<u64>,
    /// Bytes that were dropped and have not been reported.
    dropped: u64,
    next_tick: Instant,
}

/// Where lines go.
struct Outlet {
    rate: ConsoleRate,
    node: Budget,
    sink: Sink,
}

impl Thread {
    fn new(shared: Arc<Shared>, rate: ConsoleRate, sink: Sink) -> Self {
        let now = Instant::now();
        Self {
            shared,
            outlet: Outlet { rate, node: Budget::full(NODE_RATE, now), sink },
            consoles: HashMap::new(),
            paused: Vec::new(),
            dropped: 0,
            next_tick: now,
        }
    }

    fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.shared.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // The descriptor is an epoll descriptor and the buffer is valid.
                Err(_) => return,
            }
            self.take_in();
            for event in &events {
                let flags = event.flags;
                match event.data.u64() {
                    // Its level stays up, which is wanted no more: it only ends the thread.
                    WAKER => drop(epoll::delete(&self.shared.epoll, &self.shared.waker)),
                    number => self.serve(number, flags.contains(EventFlags::HUP)),
                }
            }
            if Instant::now() >= self.next_tick {
                self.tick();
            }
            let registry = self.shared.registry();
            if registry.closing && registry.open == 0 {
                drop(registry);
                self.report_dropped();
                return;
            }
        }
    }

    /// How long to sleep if nothing happens.
    fn timeout(&self) -> Option<Timespec> {
        if self.paused.is_empty() && self.dropped == 0 {
            return None;
        }
        Some(time_until(self.next_tick))
    }

    fn take_in(&mut self) {
        let now = Instant::now();
        let arrived = std::mem::take(&mut self.shared.registry().arrived);
        for (number, pipe, tag) in arrived {
            let budget = Budget::full(SANDBOX_RATE, now);
            let open = Open { pipe, tag, buffer: Vec::new(), budget, paused: false };
            self.consoles.insert(number, open);
        }
    }

    /// Reads once and passes on what it may.
    fn serve(&mut self, number: u64, hung_up: bool) {
        let Some(console) = self.consoles.get_mut(&number) else { return };
        if hung_up {
            return self.finish(number);
        }
        if console.paused {
            return;
        }
        console.read_once(self.outlet.rate);
        if console.pass_on(&mut self.outlet) == Passed::Some {
            console.paused = true;
            self.paused.push(number);
            // The end of the sandbox is still reported, whatever is asked for.
            let data = EventData::new_u64(number);
            let _ = epoll::modify(&self.shared.epoll, &console.pipe, data, EventFlags::empty());
        }
    }

    /// Takes what a sandbox has left when all its processes have ended.
    fn finish(&mut self, number: u64) {
        let Some(mut console) = self.consoles.remove(&number) else { return };
        loop {
            let full = console.pass_on(&mut self.outlet) == Passed::Some;
            if full {
                self.dropped += console.buffer.len() as u64;
                console.buffer.clear();
            }
            if console.read_once(self.outlet.rate) == 0 {
                break;
            }
        }
        if !console.buffer.is_empty() {
            // A last line without an end.
            console.buffer.push(b'\n');
            if console.pass_on(&mut self.outlet) == Passed::Some {
                self.dropped += console.buffer.len() as u64;
            }
        }
        // Another process may have the description open for an instant, between
        // its fork and its exec.
        let _ = epoll::delete(&self.shared.epoll, &console.pipe);
        self.paused.retain(|&other| other != number);
        // Whoever waits for the last one to end wants to hear this, too.
        if self.shared.registry().open == 1 {
            self.report_dropped();
        }
        self.shared.registry().open -= 1;
        self.shared.ended.notify_all();
    }

    /// Goes on with those whose budget has grown.
    fn tick(&mut self) {
        self.next_tick = Instant::now() + TICK;
        self.report_dropped();
        let mut waiting = std::mem::take(&mut self.paused);
        // So that those at the end are not always the ones that find nothing left.
        let middle = waiting.len() / 2;
        waiting.rotate_left(middle);
        for number in waiting {
            let Some(console) = self.consoles.get_mut(&number) else { continue };
            if console.pass_on(&mut self.outlet) == Passed::Some {
                self.paused.push(number);
                continue;
            }
            console.paused = false;
            let data = EventData::new_u64(number);
            let _ = epoll::modify(&self.shared.epoll, &console.pipe, data, EventFlags::IN);
        }
    }

    fn report_dropped(&mut self) {
        let bytes = std::mem::take(&mut self.dropped);
        if bytes > 0 {
            (self.outlet.sink)(&ConsoleOutput::Dropped { bytes });
        }
    }
}

impl Open {
    /// Reads what there is room for; the number of bytes, 0 at the end or if there
    /// is nothing.
    fn read_once(&mut self, rate: ConsoleRate) -> usize {
        let room = match rate {
            ConsoleRate::Limited => LINE_MAX,
            ConsoleRate::Lossless => LOSSLESS_READ,
        };
        let before = self.buffer.len();
        self.buffer.resize(room.max(before), 0);
        let read = loop {
            match rustix::io::read(&self.pipe, &mut self.buffer[before..]) {
                Err(Errno::INTR) => {}
                result => break result.unwrap_or(0),
            }
        };
        self.buffer.truncate(before + read);
        read
    }

    /// Passes on the lines in the buffer, as far as the budgets last. Afterwards the
    /// buffer has room.
    fn pass_on(&mut self, outlet: &mut Outlet) -> Passed {
        let now = Instant::now();
        let mut begin = 0;
        let mut passed = Passed::All;
        while let Some((len, next)) = first_line(&self.buffer[begin..]) {
            if !outlet.lets_pass(&mut self.budget, now) {
                passed = Passed::Some;
                break;
            }
            let text = escape(&self.buffer[begin..begin + len]);
            outlet.pass(&mut self.budget, &self.tag, &text);
            begin += next;
        }
        self.buffer.drain(..begin);
        // Most consoles never say anything again.
        if self.buffer.is_empty() {
            self.buffer = Vec::new();
        }
        passed
    }
}

/// Length of the first line, and where the next one begins.
fn first_line(bytes: &[u8]) -> Option<(usize, usize)> {
    let head = &bytes[..bytes.len().min(LINE_MAX)];
    match head.iter().position(|&byte| byte == b'\n') {
        Some(end) => Some((end, end + 1)),
        None if head.len() == LINE_MAX => Some((LINE_MAX, LINE_MAX)),
        None => None,
    }
}

impl Outlet {
    fn lets_pass(&mut self, budget: &mut Budget, now: Instant) -> bool {
        self.rate == ConsoleRate::Lossless || budget.has_any(now) && self.node.has_any(now)
    }

    fn pass(&mut self, budget: &mut Budget, tag: &Tag, text: &str) {
        let cost = text.len() + LINE_OVERHEAD;
        budget.spend(cost);
        self.node.spend(cost);
        let pid = tag.0.pid.load(Ordering::Relaxed);
        let label = tag.0.label.get().map(|label| &**label);
        (self.sink)(&ConsoleOutput::Line { pid, label, text });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Console, HostEnd};
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::sync::mpsc;

    /// A console, and what comes out of it as text.
    fn console(rate: ConsoleRate) -> (Console, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel();
        let sink = move |output: &ConsoleOutput<'_>| {
            let text = match output {
                ConsoleOutput::Line { pid, label, text } => format!("{pid} {label:?} {text}"),
                ConsoleOutput::Dropped { bytes } => format!("dropped {bytes}"),
            };
            // The test may have seen enough.
            let _ = sender.send(text);
        };
        (Console::lines(rate, sink).unwrap(), receiver)
    }

    fn open(console: &Console) -> (HostEnd, File) {
        let (end, write) = console.open().unwrap();
        (end, File::from(write))
    }

    /// Everything that comes until the console is gone.
    fn all(console: Console, lines: &mpsc::Receiver<String>) -> Vec<String> {
        assert!(console.wait_ended(Duration::from_secs(20)));
        drop(console);
        let mut all = Vec::new();
        while let Ok(line) = lines.recv_timeout(Duration::from_secs(20)) {
            all.push(line);
        }
        all
    }

    #[test]
    fn lines_are_escaped_and_say_where_they_come_from() {
        let (console, lines) = console(ConsoleRate::Limited);
        let (end, mut pipe) = open(&console);
        pipe.write_all(b"early\n").unwrap();
        assert_eq!(lines.recv().unwrap(), "0 None early");
        end.set_pid(7);
        end.set_label(&Arc::from("hello"));
        pipe.write_all(b"\x1b[2Jforged\r\n\nwithout an end").unwrap();
        drop(pipe);
        let expected = [
            "7 Some(\"hello\") \\x1b[2Jforged\\x0d",
            "7 Some(\"hello\") ",
            "7 Some(\"hello\") without an end",
        ];
        assert_eq!(all(console, &lines), expected);
    }

    #[test]
    fn a_sandbox_that_writes_much_waits_and_others_are_heard() {
        let (console, lines) = console(ConsoleRate::Limited);
        let (_end, mut flood) = open(&console);
        let writer = std::thread::spawn(move || {
            let began = Instant::now();
            // Lines without text: 200 KiB of them would take hours at 32 in a second.
            let mut written = 0;
            rustix::io::ioctl_fionbio(&flood, true).unwrap();
            while began.elapsed() < Duration::from_secs(1) {
                match flood.write(&[b'\n'; 1024]) {
                    Ok(count) => written += count,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
            written
        });
        let (end, mut quiet) = open(&console);
        end.set_pid(9);
        quiet.write_all(b"I panic\n").unwrap();
        drop(quiet);
        let written = writer.join().unwrap();
        assert!(written < 16 * 1024, "{written} bytes were taken from it");
        let all = all(console, &lines);
        assert!(all.contains(&"9 None I panic".to_owned()));
        assert!(all.len() < 400, "{} lines", all.len());
        let dropped = all.iter().filter_map(|line| line.strip_prefix("dropped "));
        let dropped: usize = dropped.map(|count| count.parse::<usize>().unwrap()).sum();
        let passed = all.iter().filter(|line| line.starts_with("0 None")).count();
        assert_eq!(passed + dropped, written);
    }

    #[test]
    fn a_trace_is_passed_on_whole() {
        let (console, lines) = console(ConsoleRate::Lossless);
        let (_end, mut pipe) = open(&console);
        let writer = std::thread::spawn(move || {
            for number in 0..20_000 {
                writeln!(pipe, "call {number}").unwrap();
            }
        });
        writer.join().unwrap();
        let all = all(console, &lines);
        assert_eq!(all.len(), 20_000);
        assert_eq!(all[19_999], "0 None call 19999");
    }

    #[test]
    fn a_line_without_end_is_passed_on_in_pieces() {
        let (console, lines) = console(ConsoleRate::Limited);
        let (_end, mut pipe) = open(&console);
        pipe.write_all(&[b'x'; 2500]).unwrap();
        drop(pipe);
        let lengths: Vec<_> = all(console, &lines).iter().map(|line| line.len() - 7).collect();
        assert_eq!(lengths, [1024, 1024, 452]);
    }

    #[test]
    fn many_sandboxes_share_one_rate() {
        const SANDBOXES: usize = 150;
        const LINES: usize = 120;
        let began = Instant::now();
        let (console, lines) = console(ConsoleRate::Limited);
        for _ in 0..SANDBOXES {
            let (_end, mut pipe) = open(&console);
            pipe.write_all(&[b'\n'; LINES]).unwrap();
        }
        let all = all(console, &lines);
        let seconds = began.elapsed().as_secs() as usize + 1;
        let dropped = all.iter().filter_map(|line| line.strip_prefix("dropped "));
        let dropped: usize = dropped.map(|count| count.parse::<usize>().unwrap()).sum();
        let passed = all.iter().filter(|line| line.starts_with("0 None")).count();
        assert_eq!(passed + dropped, SANDBOXES * LINES);
        let most = NODE_RATE.lines * NODE_RATE.burst + NODE_RATE.lines * seconds as u32;
        assert!(passed <= most as usize, "{passed} lines in {seconds} s");
        // Where it took long, there was time for all of them.
        assert!(dropped > 0 || most as usize >= SANDBOXES * LINES);
    }

    #[test]
    fn the_thread_ends_with_the_last_console() {
        let (console, lines) = console(ConsoleRate::Limited);
        let (_end, mut pipe) = open(&console);
        drop(console);
        // The sandbox outlives its zygote parent's owner.
        pipe.write_all(b"still here\n").unwrap();
        assert_eq!(lines.recv().unwrap(), "0 None still here");
        drop(pipe);
        assert!(lines.recv().is_err());
    }
}
