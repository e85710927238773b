//! The one thread that reads what all instances print.
//!
//! Pipes are watched once (`EPOLLONESHOT`): a guest that writes byte by byte into a
//! pipe that is not read yet wakes nobody.

use super::line::Stream;
use super::pipes::{Binding, PipePair};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use thaw_build::lines::LineSplitter;

/// Most bytes that are read from a pipe before it is the others' turn.
const CHUNK: usize = 64 * 1024;
/// Time between two rounds: what comes meanwhile is dealt with together.
const PAUSE: Duration = Duration::from_millis(4);
/// The collector rests this many times as long as it works.
const REST: u32 = 3;
/// Events taken at once.
const EVENTS: usize = 64;
/// Pairs of pipes that are kept ready for the next instances, at first and at most.
const STOCK_LEAST: usize = 2;
const STOCK_MOST: usize = 32;
/// Number of the waker among the numbers of pipes.
const WAKER: u64 = 0;

/// Reads the output of all instances of a node.
#[derive(Debug)]
pub(super) struct Collector {
    epoll: OwnedFd,
    /// Wakes the thread to end.
    waker: OwnedFd,
    is_stopped: AtomicBool,
    sources: Mutex<Sources>,
    stock: Mutex<Stock>,
}

#[derive(Debug, Default)]
struct Sources {
    all: HashMap<u64, Arc<Source>>,
    last: u64,
}

#[derive(Debug)]
struct Stock {
    pairs: Vec<PipePair>,
    /// How many there should be.
    wanted: usize,
}

/// The read end of a pipe.
#[derive(Debug)]
struct Source {
    reader: OwnedFd,
    stream: Stream,
    /// Set when an instance gets the pipe.
    binding: Arc<OnceLock<Arc<Binding>>>,
}

/// How a look at a pipe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visit {
    /// There is nothing in it now.
    Drained,
    /// There is, or may be, more.
    Unfinished,
    /// It is not to be read yet.
    NotYet,
    /// Nobody can write to it any more.
    Ended,
}

impl Collector {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        let collector = Self {
            epoll,
            waker,
            is_stopped: AtomicBool::new(false),
            sources: Mutex::default(),
            stock: Mutex::new(Stock { pairs: Vec::new(), wanted: STOCK_LEAST }),
        };
        collector.replenish();
        Ok(collector)
    }

    fn sources(&self) -> MutexGuard<'_, Sources> {
        self.sources.lock().expect("no holder panics")
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().expect("no holder panics")
    }

    /// Has the thread read what is there now, and end.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        // The waker's counter is far from full.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// A pair of pipes from the stock, or a new one.
    pub fn take_pair(&self) -> io::Result<PipePair> {
        let mut stock = self.stock();
        if let Some(pair) = stock.pairs.pop() {
            return Ok(pair);
        }
        stock.wanted = (stock.wanted * 2).min(STOCK_MOST);
        drop(stock);
        self.make_pair()
    }

    /// Fills the stock up.
    pub fn replenish(&self) {
        loop {
            let stock = self.stock();
            if stock.pairs.len() >= stock.wanted {
                return;
            }
            drop(stock);
            match self.make_pair() {
                Ok(pair) => self.stock().pairs.push(pair),
                // The boot that needs one gets the error.
                Err(error) => return tracing::debug!("cannot make pipes ahead: {error}"),
            }
        }
    }

    fn make_pair(&self) -> io::Result<PipePair> {
        let binding = Arc::default();
        let (stdout, first) = self.make_pipe(Stream::Out, &binding)?;
        let (stderr, second) = self.make_pipe(Stream::Err, &binding)?;
        Ok(PipePair { writers: [stdout, stderr], numbers: [first, second], binding })
    }

    /// Makes a pipe, watches its read end, and gives its write end and its number.
    fn make_pipe(
        &self,
        stream: Stream,
        binding: &Arc<OnceLock<Arc<Binding>>>,
    ) -> io::Result<(OwnedFd, u64)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        // Only the read end: guests expect pipes that block.
        rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
        let number = self.watch(reader, stream, binding)?;
        Ok((writer, number))
    }

    /// Watches the read end of a pipe; its number.
    pub fn watch(
        &self,
        reader: OwnedFd,
        stream: Stream,
        binding: &Arc<OnceLock<Arc<Binding>>>,
    ) -> io::Result<u64> {
        let source = Arc::new(Source { reader, stream, binding: binding.clone() });
        let mut sources = self.sources();
        sources.last += 1;
        let number = sources.last;
        sources.all.insert(number, source.clone());
        drop(sources);
        let flags = EventFlags::IN | EventFlags::ONESHOT;
        if let Err(errno) =
            epoll::add(&self.epoll, &source.reader, EventData::new_u64(number), flags)
        {
            self.sources().all.remove(&number);
            return Err(errno.into());
        }
        Ok(number)
    }

    /// The read ends of these pipes, for the daemon that comes after this one.
    pub fn readers(&self, numbers: [u64; 2]) -> io::Result<[OwnedFd; 2]> {
        let sources = self.sources();
        let reader = |number| {
            let source = sources.all.get(&number).ok_or(io::ErrorKind::BrokenPipe)?;
            source.reader.try_clone()
        };
        Ok([reader(numbers[0])?, reader(numbers[1])?])
    }

    /// Reads until [`Collector::stop`].
    pub fn serve(&self) {
        let mut reading = Reading::default();
        while !self.is_stopped.load(Ordering::Relaxed) {
            if let Err(error) = self.wait(&mut reading.ready) {
                return tracing::error!("functions' output is read no longer: {error}");
            }
            let began = Instant::now();
            self.round(&mut reading);
            thread::sleep(PAUSE.max(began.elapsed() * REST));
        }
        self.read_rest(&mut reading);
    }

    /// Waits for pipes with something in them, unless some are left from before.
    fn wait(&self, ready: &mut VecDeque<u64>) -> io::Result<()> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let timeout = if ready.is_empty() { None } else { Some(&at_once) };
            let mut buffer = [MaybeUninit::<Event>::uninit(); EVENTS];
            let events = match epoll::wait(&self.epoll, &mut buffer, timeout) {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let numbers = events.iter().map(|event| event.data.u64());
            ready.extend(numbers.filter(|number| *number != WAKER));
            if events.len() < EVENTS || ready.len() >= self.sources().all.len() {
                return Ok(());
            }
        }
    }

    /// Visits each pipe that has something once. A pipe that was not read keeps its turn.
    fn round(&self, reading: &mut Reading) {
        let mut first = VecDeque::new();
        for _ in 0..reading.ready.len() {
            let Some(number) = reading.ready.pop_front() else { break };
            let Some(source) = self.sources().all.get(&number).cloned() else { continue };
            match reading.visit(number, &source) {
                Visit::Drained => self.watch_again(number, &source),
                Visit::Unfinished => reading.ready.push_back(number),
                Visit::NotYet => first.push_back(number),
                Visit::Ended => {
                    self.sources().all.remove(&number);
                    reading.splitters.remove(&number);
                }
            }
        }
        first.append(&mut reading.ready);
        reading.ready = first;
    }

    fn watch_again(&self, number: u64, source: &Source) {
        let flags = EventFlags::IN | EventFlags::ONESHOT;
        let data = EventData::new_u64(number);
        if let Err(errno) = epoll::modify(&self.epoll, &source.reader, data, flags) {
            tracing::error!("a function's output is read no longer: {errno}");
            self.sources().all.remove(&number);
        }
    }

    /// Reads at most one chunk more from each pipe, for the end.
    fn read_rest(&self, reading: &mut Reading) {
        let all: Vec<_> = self.sources().all.drain().collect();
        for (number, source) in all {
            if let Some(binding) = source.binding.get() {
                reading.read(number, &source, binding);
                reading.end(number, &source);
            }
        }
    }
}

/// What the thread itself keeps.
struct Reading {
    /// Pipes that have, or may have, something in them, in the order of their turns.
    ready: VecDeque<u64>,
    /// Unfinished lines, each at most a line long.
    splitters: HashMap<u64, LineSplitter>,
    buffer: Vec<u8>,
}

impl Default for Reading {
    fn default() -> Self {
        Self { ready: VecDeque::new(), splitters: HashMap::new(), buffer: vec![0; CHUNK] }
    }
}

impl Reading {
    fn visit(&mut self, number: u64, source: &Source) -> Visit {
        // Nobody has got it: it was in the stock of a node that is gone.
        let Some(binding) = source.binding.get() else { return Visit::Ended };
        if binding.awaits_number() {
            return Visit::NotYet;
        }
        // Nobody waits for room in the pipe of an instance that has ended, and it
        // holds no more than a chunk.
        if !binding.is_gone() && !binding.log.may_read(Instant::now()) {
            return Visit::NotYet;
        }
        let visit = self.read(number, source, binding);
        if visit == Visit::Ended {
            self.end(number, source);
        }
        visit
    }

    /// Reads a chunk.
    fn read(&mut self, number: u64, source: &Source, binding: &Binding) -> Visit {
        let count = match rustix::io::read(&source.reader, &mut self.buffer) {
            Ok(0) => return Visit::Ended,
            Ok(count) => count,
            Err(Errno::AGAIN) => return Visit::Drained,
            Err(Errno::INTR) => return Visit::Unfinished,
            Err(_) => return Visit::Ended,
        };
        let (origin, mut lines) = (binding.origin(), 0);
        let splitter = self.splitters.entry(number).or_default();
        splitter.push(&self.buffer[..count], |line| {
            lines += 1;
            binding.log.add(source.stream, origin, line);
        });
        if splitter.is_empty() {
            self.splitters.remove(&number);
        }
        binding.log.charge_reading(count, lines);
        binding.log.publish();
        // A pipe that had less than was asked for is empty.
        if count < self.buffer.len() { Visit::Drained } else { Visit::Unfinished }
    }

    /// Takes the last line, which has no end.
    fn end(&mut self, number: u64, source: &Source) {
        let (Some(mut splitter), Some(binding)) =
            (self.splitters.remove(&number), source.binding.get())
        else {
            return;
        };
        let origin = binding.origin();
        splitter.finish(|line| binding.log.add(source.stream, origin, line));
        binding.log.publish();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FunctionLog, InstancePipes, LogLimits, Logs};
    use super::*;
    use std::sync::Arc;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(300);

    fn logs() -> (tempfile::TempDir, Logs, Arc<FunctionLog>) {
        let directory = tempfile::tempdir().unwrap();
        let logs = Logs::start(directory.path(), LogLimits::default()).unwrap();
        let log = logs.open("f");
        (directory, logs, log)
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn print(pipes: &InstancePipes, text: &[u8]) {
        rustix::io::write(pipes.stdout(), text).unwrap();
    }

    fn texts(log: &FunctionLog) -> Vec<String> {
        log.recent().iter().map(|line| line.text.clone()).collect()
    }

    #[test]
    fn lines_wait_for_the_number_of_their_instance() {
        let (_directory, logs, log) = logs();
        let (first, second) = (logs.pipes(&log).unwrap(), logs.pipes(&log).unwrap());
        let instances = [first.log(), second.log()];
        print(&first, b"one\n");
        print(&second, b"two\n");
        rustix::io::write(second.stderr(), b"error\n").unwrap();
        for (number, instance) in instances.iter().enumerate() {
            instance.identify(number as u64 + 1, 100);
        }
        wait_until(|| log.recent().len() == 3);
        for line in log.recent() {
            let number = if line.text == "one" { 1 } else { 2 };
            assert_eq!(line.origin.map(|origin| origin.instance), Some(number), "{line:?}");
            assert_eq!(line.stream == Stream::Err, line.text == "error");
        }
    }

    #[test]
    fn an_instance_that_ends_is_read_to_the_end_and_forgotten() {
        let (_directory, logs, log) = logs();
        let stocked = logs.collector.sources().all.len();
        for number in 1..=100 {
            let pipes = logs.pipes(&log).unwrap();
            let instance = pipes.log();
            instance.identify(number, 1);
            print(&pipes, format!("last words of {number}").as_bytes());
            pipes.handed_over();
        }
        wait_until(|| log.recent().len() == 100);
        wait_until(|| logs.collector.sources().all.len() <= stocked.max(2 * STOCK_MOST));
        assert!(texts(&log).contains(&"last words of 100".to_owned()));
    }

    #[test]
    fn a_flood_waits_in_its_pipe_and_others_are_read() {
        let (_directory, logs, log) = logs();
        let flood = logs.pipes(&log).unwrap();
        let flooding = flood.log();
        flooding.identify(1, 1);
        rustix::fs::fcntl_setfl(flood.stdout(), OFlags::NONBLOCK).unwrap();
        let (mut written, mut blocked) = (0, 0);
        let begin = Instant::now();
        let empty = vec![b'\n'; 64 << 10];
        while begin.elapsed() < Duration::from_secs(2) {
            match rustix::io::write(flood.stdout(), &empty) {
                Ok(count) => written += count,
                Err(_) => {
                    blocked += 1;
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // Eight mebibytes a second, at 129 bytes for each empty line, the first eight at
        // once, and what is in the pipe.
        let most = (3.0 + begin.elapsed().as_secs_f64()) * 65_536.0 + 2.0 * 65_536.0;
        assert!((written as f64) < most, "{written} bytes were read");
        assert!(blocked > 0);
        // It goes on, slowly.
        wait_until(|| rustix::io::write(flood.stdout(), b"\n").is_ok());
        // Other instances of the function get their turn, though all that it may be read
        // is used up by the first again and again.
        let siblings: Vec<_> = (0..4).map(|_| logs.pipes(&log).unwrap()).collect();
        let instances: Vec<_> = siblings.iter().map(InstancePipes::log).collect();
        for (number, (pipes, instance)) in siblings.iter().zip(&instances).enumerate() {
            instance.identify(number as u64 + 2, 1);
            rustix::fs::fcntl_setfl(pipes.stdout(), OFlags::NONBLOCK).unwrap();
        }
        let fill = |pipes: &InstancePipes| {
            let mut some = false;
            while rustix::io::write(pipes.stdout(), &empty).is_ok() {
                some = true;
            }
            some
        };
        siblings.iter().for_each(|pipes| {
            fill(pipes);
        });
        let mut unread: Vec<_> = siblings.iter().collect();
        let begin = Instant::now();
        while !unread.is_empty() {
            assert!(begin.elapsed() < PATIENCE);
            fill(&flood);
            let read: Vec<_> = siblings.iter().filter(|pipes| fill(pipes)).collect();
            unread.retain(|pipes| !read.iter().any(|read| std::ptr::eq(*read, *pipes)));
            thread::sleep(Duration::from_millis(1));
        }
        // Another function is read at once.
        let other = logs.open("other");
        let pipes = logs.pipes(&other).unwrap();
        pipes.log().identify(2, 2);
        print(&pipes, b"heard\n");
        wait_until(|| texts(&other) == ["heard"]);
    }

    #[test]
    fn what_was_printed_before_the_end_is_in_the_file() {
        let (directory, logs, log) = logs();
        let pipes = logs.pipes(&log).unwrap();
        let instance = pipes.log();
        instance.identify(1, 1);
        print(&pipes, b"begun\nunfinished");
        assert!(logs.finish(PATIENCE));
        let file = super::super::log_path(directory.path(), "f");
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.contains("begun") && text.contains("unfinished"), "{text}");
    }
}
