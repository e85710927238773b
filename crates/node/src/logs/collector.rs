//! The one thread that reads what all instances print.
//!
//! Pipes are watched once (`EPOLLONESHOT`): a guest that writes byte by byte into a
//! pipe that is not read yet wakes nobody.

use super::line::{LineSplitter, Stream};
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
/// Number of the bell among the numbers of pipes.
const BELL: u64 = 0;

/// Reads the output of all instances of a node.
#[derive(Debug)]
pub(super) struct Collector {
    epoll: OwnedFd,
    /// Wakes the thread to end.
    bell: OwnedFd,
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
    Later,
    /// Nobody can write to it any more.
    Ended,
}

impl Collector {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN)?;
        let collector = Self {
            epoll,
            bell,
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
        // The bell's counter is far from full.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
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
                // Whoever needs one will be told.
                Err(error) => return tracing::debug!("cannot make pipes ahead: {error}"),
            }
        }
    }

    fn make_pair(&self) -> io::Result<PipePair> {
        let binding = Arc::default();
        let stdout = self.make_pipe(Stream::Out, &binding)?;
        let stderr = self.make_pipe(Stream::Err, &binding)?;
        Ok(PipePair { writers: [stdout, stderr], binding })
    }

    /// Makes a pipe, watches its read end, and gives its write end.
    fn make_pipe(
        &self,
        stream: Stream,
        binding: &Arc<OnceLock<Arc<Binding>>>,
    ) -> io::Result<OwnedFd> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        // Only the read end: guests expect pipes that block.
        rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
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
        Ok(writer)
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
            ready.extend(numbers.filter(|number| *number != BELL));
            if events.len() < EVENTS || ready.len() >= self.sources().all.len() {
                return Ok(());
            }
        }
    }

    /// Visits each pipe that has something once.
    fn round(&self, reading: &mut Reading) {
        for _ in 0..reading.ready.len() {
            let Some(number) = reading.ready.pop_front() else { break };
            let Some(source) = self.sources().all.get(&number).cloned() else { continue };
            match reading.visit(number, &source) {
                Visit::Drained => self.watch_again(number, &source),
                Visit::Later => reading.ready.push_back(number),
                Visit::Ended => {
                    self.sources().all.remove(&number);
                    reading.splitters.remove(&number);
                }
            }
        }
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
            return Visit::Later;
        }
        // Nobody waits for room in the pipe of an instance that has ended, and it
        // holds no more than a chunk.
        if !binding.is_gone() && !binding.log.may_read(Instant::now()) {
            return Visit::Later;
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
            Err(Errno::INTR) => return Visit::Later,
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
        if count < self.buffer.len() { Visit::Drained } else { Visit::Later }
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
