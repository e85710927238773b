//! The pipes between instances and the collector.

use super::collector::Collector;
use super::function::FunctionLog;
use super::line::{Origin, Stream};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;

/// So long the lines of an instance wait for its number, which it gets as soon as it
/// is booted.
const NUMBER_PATIENCE: Duration = Duration::from_millis(200);

/// Whose output comes through a pair of pipes.
#[derive(Debug)]
pub(super) struct Binding {
    pub log: Arc<FunctionLog>,
    /// When the instance began to run, in nanoseconds of `CLOCK_MONOTONIC`.
    began_ns: AtomicU64,
    instance: AtomicU64,
    pid: AtomicU32,
    /// The instance has ended: there is nobody who would wait for room.
    gone: AtomicBool,
    /// How it has ended, which is logged behind all that it has printed.
    end: OnceLock<String>,
}

impl Drop for Binding {
    /// Its pipes have been read to their ends.
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            self.log.remark(self.origin(), &end);
        }
    }
}

impl Binding {
    fn new(log: Arc<FunctionLog>) -> Self {
        let (instance, pid) = (AtomicU64::new(0), AtomicU32::new(0));
        let began_ns = AtomicU64::new(monotonic_ns());
        let (gone, end) = (AtomicBool::new(false), OnceLock::new());
        Self { log, began_ns, instance, pid, gone, end }
    }

    /// The instance, as soon as its number is known.
    pub fn origin(&self) -> Option<Origin> {
        let instance = self.instance.load(Ordering::Acquire);
        (instance > 0).then(|| Origin { instance, pid: self.pid.load(Ordering::Relaxed) })
    }

    /// Whether lines have to wait for the number. Instances that are measured and not
    /// served have none.
    pub fn awaits_number(&self) -> bool {
        let age_ns = || monotonic_ns().saturating_sub(self.began_ns.load(Ordering::Acquire));
        self.instance.load(Ordering::Relaxed) == 0
            && !self.is_gone()
            && age_ns() < NUMBER_PATIENCE.as_nanos() as u64
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// Two pipes that nobody has used, with their read ends at the collector.
#[derive(Debug)]
pub(super) struct PipePair {
    pub writers: [OwnedFd; 2],
    /// What the collector knows them by.
    pub numbers: [u64; 2],
    pub binding: Arc<OnceLock<Arc<Binding>>>,
}

/// The write ends of a new instance's standard output and error. Drop them when the
/// instance has got them.
#[derive(Debug)]
pub struct InstancePipes {
    writers: [OwnedFd; 2],
    numbers: [u64; 2],
    binding: Arc<Binding>,
    collector: Arc<Collector>,
}

impl InstancePipes {
    pub(super) fn take(collector: &Arc<Collector>, log: &Arc<FunctionLog>) -> io::Result<Self> {
        let pair = collector.take_pair()?;
        let binding = pair.binding.get_or_init(|| Arc::new(Binding::new(log.clone()))).clone();
        let PipePair { writers, numbers, .. } = pair;
        Ok(Self { writers, numbers, binding, collector: collector.clone() })
    }

    /// Standard output.
    pub fn stdout(&self) -> BorrowedFd<'_> {
        self.writers[0].as_fd()
    }

    /// Standard error.
    pub fn stderr(&self) -> BorrowedFd<'_> {
        self.writers[1].as_fd()
    }

    /// The log's side of the instance that has these pipes; it lives as long as the
    /// instance does.
    pub fn log(&self) -> InstanceLog {
        let (binding, collector) = (self.binding.clone(), self.collector.clone());
        InstanceLog { binding, collector, numbers: self.numbers }
    }

    /// Closes this process's ends, which the instance has got, and makes others for the
    /// next instances. A few system calls: call it where nobody waits.
    pub fn handed_over(self) {
        let Self { writers, collector, .. } = self;
        drop(writers);
        collector.replenish();
    }
}

/// An instance, as its log knows it. Dropping it says that the instance is gone.
#[derive(Debug)]
pub struct InstanceLog {
    binding: Arc<Binding>,
    collector: Arc<Collector>,
    numbers: [u64; 2],
}

impl InstanceLog {
    /// The log's side of an instance of an earlier daemon, from the read ends of its pipes.
    pub(super) fn adopt(
        collector: &Arc<Collector>,
        log: &Arc<FunctionLog>,
        [stdout, stderr]: [OwnedFd; 2],
    ) -> io::Result<Self> {
        let binding = Arc::new(Binding::new(log.clone()));
        let known = Arc::new(OnceLock::from(binding.clone()));
        let first = collector.watch(stdout, Stream::Out, &known)?;
        let second = collector.watch(stderr, Stream::Err, &known)?;
        Ok(Self { binding, collector: collector.clone(), numbers: [first, second] })
    }

    /// The read ends of the instance's pipes, for the daemon that comes after this one.
    ///
    /// # Errors
    /// Nobody can write to one of them any more, or the host is out of descriptors.
    pub fn for_successor(&self) -> io::Result<[OwnedFd; 2]> {
        self.collector.readers(self.numbers)
    }

    /// Tells that the instance, which was booted ahead, is about to run.
    pub fn begins(&self) {
        self.binding.began_ns.store(monotonic_ns(), Ordering::Release);
    }

    /// Adds a remark of Thaw's on the instance.
    pub fn remark(&self, text: &str) {
        self.binding.log.remark(self.binding.origin(), text);
    }

    /// Tells how the instance has ended. The log says so when all that it had printed is there.
    pub fn ended(&self, how: String) {
        let _ = self.binding.end.set(how);
    }

    /// Tells who prints the lines.
    pub fn identify(&self, instance: u64, pid: u32) {
        self.binding.pid.store(pid, Ordering::Relaxed);
        self.binding.instance.store(instance, Ordering::Release);
    }
}

impl Drop for InstanceLog {
    fn drop(&mut self) {
        self.binding.gone.store(true, Ordering::Relaxed);
    }
}
