//! The caller's side: starts the resolver process, and asks it.
//!
//! A worker may have been taken over by whoever answers for the name that it looks up. Its
//! answer is bounded and checked, and believed for that name only, as that of the name
//! server would be.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::launch::spawn;
use super::protocol::{
    Answer, Found, LOOK_UP_MAX, Question, REPORT_FAILED, REPORT_SERVING, REQUEST_WORKER, Received,
    Report, receive, send,
};
use crate::message::{control_pair, is_readable};

/// How long the process may take to start.
const START_MAX: Duration = Duration::from_secs(10);
/// How long a failed start counts.
const FAILED_FOR: Duration = Duration::from_secs(1);
/// After this time another process is started for the next question: it copies the host's
/// files anew. Sandboxes keep an answer for as long.
const FRESH: Duration = Duration::from_secs(30);

/// Why a name was not looked up.
#[derive(Debug, thiserror::Error)]
pub enum LookUpError {
    /// The process could not be started.
    #[error("cannot start the process that looks up names (cannot {step}: {source})")]
    Start {
        /// What failed.
        step: String,
        /// Why.
        source: io::Error,
    },
    /// It was killed twice.
    #[error("the process that looks up names was killed")]
    Ended,
    /// A worker was killed, or has crashed.
    #[error("looking up the name has crashed")]
    Crashed,
    /// It took too long.
    #[error("looking up the name took longer than {} seconds", LOOK_UP_MAX.as_secs())]
    Late,
    /// It has said what it never says.
    #[error("the process that looks up names answered nonsense")]
    Nonsense,
    /// No name is so long.
    #[error("the name is too long")]
    TooLong,
    /// This process has no sockets left.
    #[error("cannot ask the process that looks up names: {0}")]
    Host(#[from] io::Error),
}

/// A resolver process that is started when it is first needed.
#[derive(Debug)]
pub struct Resolver {
    slot: Mutex<Slot>,
    fresh: Duration,
    start: fn(OwnedFd) -> io::Result<Option<Child>>,
}

#[derive(Debug)]
struct Slot {
    running: Option<Arc<Running>>,
    /// When it could not be started, and why.
    failed: Option<(Instant, Failed)>,
}

/// A [`LookUpError::Start`] that can be told again.
#[derive(Clone, Debug)]
struct Failed {
    step: String,
    errno: i32,
}

impl Failed {
    fn new(step: &str, source: &io::Error) -> Self {
        Self { step: step.to_owned(), errno: source.raw_os_error().unwrap_or(libc::EIO) }
    }

    fn error(self) -> LookUpError {
        LookUpError::Start { step: self.step, source: io::Error::from_raw_os_error(self.errno) }
    }
}

/// A running process. It ends, and its workers with it, when this is dropped: after the last
/// question that it was asked.
#[derive(Debug)]
pub(super) struct Running {
    /// `None`: it is being dropped.
    control: Option<OwnedFd>,
    started: Instant,
    /// If it is a child of this process.
    child: Option<Child>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.control = None;
        if let Some(child) = &mut self.child {
            // It ends by itself, and need not be waited for longer than this.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The one of this process.
static RESOLVER: Resolver = Resolver::new(FRESH, spawn);

/// Asks the host's resolver for the addresses of a name. May block, for [`LOOK_UP_MAX`] at
/// most.
pub fn look_up(name: &str) -> Result<Found, LookUpError> {
    RESOLVER.look_up(name, LOOK_UP_MAX)
}

impl Resolver {
    pub(super) const fn new(
        fresh: Duration,
        start: fn(OwnedFd) -> io::Result<Option<Child>>,
    ) -> Self {
        Self { slot: Mutex::new(Slot { running: None, failed: None }), fresh, start }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`look_up`], for so long at most.
    pub(super) fn look_up(&self, name: &str, time: Duration) -> Result<Found, LookUpError> {
        let question = Question::new(name).ok_or(LookUpError::TooLong)?;
        let deadline = Instant::now() + time;
        let running = self.running()?;
        match running.ask(&question, deadline) {
            // Somebody has killed it, which says nothing about the name.
            Err(LookUpError::Ended) => self.running()?.ask(&question, deadline),
            result => result,
        }
    }

    /// The process, started if there is none, or none that is fresh.
    pub(super) fn running(&self) -> Result<Arc<Running>, LookUpError> {
        let mut slot = self.slot();
        if let Some(running) = &slot.running
            && running.started.elapsed() < self.fresh
            && !running.has_ended()
        {
            return Ok(running.clone());
        }
        if let Some((when, failed)) = &slot.failed
            && when.elapsed() < FAILED_FOR
        {
            return Err(failed.clone().error());
        }
        slot.failed = None;
        match start(self.start) {
            Ok(running) => {
                let running = Arc::new(running);
                // Those who ask the one before keep it until they have their answer.
                slot.running = Some(running.clone());
                Ok(running)
            }
            Err(failed) => {
                slot.running = None;
                slot.failed = Some((Instant::now(), failed.clone()));
                Err(failed.error())
            }
        }
    }
}

/// Starts a process and waits until it serves.
fn start(spawn: fn(OwnedFd) -> io::Result<Option<Child>>) -> Result<Running, Failed> {
    let failed = |step: &'static str| move |source: io::Error| Failed::new(step, &source);
    let (control, remote) = control_pair().map_err(failed("make its socket"))?;
    // It may stop reading what it is sent.
    rustix::io::ioctl_fionbio(&control, true)
        .map_err(|errno| Failed::new("make its socket non-blocking", &errno.into()))?;
    let child = spawn(remote).map_err(failed("execute it"))?;
    let running = Running { control: Some(control), started: Instant::now(), child };
    let control = running.control.as_ref().expect("it was just put there");
    if !is_readable(control, Instant::now() + START_MAX) {
        return Err(Failed { step: "wait for it".to_owned(), errno: libc::ETIMEDOUT });
    }
    match receive::<Report>(control) {
        Ok(Received::Packet(report)) if report.kind == REPORT_SERVING => Ok(running),
        Ok(Received::Packet(report)) if report.kind == REPORT_FAILED => {
            Err(Failed { step: report.step(), errno: report.errno })
        }
        Ok(_) => Err(Failed { step: "wait for it".to_owned(), errno: libc::EPIPE }),
        Err(error) => Err(Failed::new("wait for it", &error)),
    }
}

#[cfg(test)]
impl Resolver {
    /// When it could not be started last.
    pub(super) fn failed_since(&self) -> Option<Instant> {
        self.slot().failed.as_ref().map(|(when, _)| *when)
    }
}

impl Running {
    /// Number of the process, if it is a child of this one.
    #[cfg(test)]
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether it has closed its end. It never sends anything after its start.
    fn has_ended(&self) -> bool {
        self.control.as_ref().is_none_or(|control| is_readable(control, Instant::now()))
    }

    /// Asks a worker.
    ///
    /// # Errors
    /// [`LookUpError::Ended`] only if the process itself has ended.
    fn ask(&self, question: &Question, deadline: Instant) -> Result<Found, LookUpError> {
        let (own, remote) = control_pair()?;
        rustix::io::ioctl_fionbio(&own, true).map_err(io::Error::from)?;
        send(&own, question, &[])?;
        let control = self.control.as_ref().ok_or(LookUpError::Ended)?;
        match send(control, &REQUEST_WORKER, &[remote.as_fd()]) {
            // It does not read what it is sent.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(LookUpError::Late);
            }
            Err(_) => return Err(LookUpError::Ended),
            Ok(()) => {}
        }
        // If the worker dies, this must be the end of its socket.
        drop(remote);
        if !is_readable(&own, deadline) {
            return Err(LookUpError::Late);
        }
        match receive::<Answer>(&own)? {
            Received::Packet(answer) => answer.found().ok_or(LookUpError::Nonsense),
            Received::Nonsense => Err(LookUpError::Nonsense),
            Received::End if self.has_ended() => Err(LookUpError::Ended),
            Received::End => Err(LookUpError::Crashed),
        }
    }
}
