//! The caller's side of a rewinder.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;

use super::held::Effort;
use super::protocol::{
    Answer, OUTCOME_DONE, PACKET_MAX, REQUEST_FORGET, REQUEST_REWIND, REQUEST_TAKE_DOWN, Request,
};
use crate::message::{self, is_readable};
use crate::state::{Running, StateError, Subject, Task};

/// How long a request may take. A sandbox that cannot be stopped within this time waits for
/// the host's disk, and is not worth waiting for.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// After a failed start, nobody tries again for so long.
const FAILED_FOR: Duration = Duration::from_secs(30);

/// Why a sandbox was not put back. It is to be ended, if it has not ended.
#[derive(Debug, thiserror::Error)]
pub enum RewindError {
    /// The rewinder could not be started, has ended, or has said what it never says.
    #[error("cannot rewind sandboxes: {0}")]
    Rewinder(#[from] StateError),
    /// This sandbox cannot be put back.
    #[error("{0}")]
    Refused(String),
    /// It is out of reach.
    #[error("the sandbox is out of reach: {0}")]
    Lost(io::Error),
    /// The daemon still owes it an answer, or it has not read one.
    #[error("a request of the sandbox is still being served")]
    Busy,
}

/// Rewinders of one zygote parent, at most: each waits for the sandbox that it has stopped.
const REWINDERS: usize = 2;

/// The rewinders of one zygote parent, each of which is started when it is first needed.
#[derive(Debug, Default)]
pub(crate) struct Rewinders {
    all: [Arc<Rewinder>; REWINDERS],
    next: AtomicUsize,
}

impl Rewinders {
    /// The next in turn.
    pub fn next(&self) -> &Arc<Rewinder> {
        &self.all[self.next.fetch_add(1, Ordering::Relaxed) % REWINDERS]
    }

    /// Ends them for good.
    pub fn stop(&self) {
        self.all.iter().for_each(|rewinder| rewinder.stop());
    }
}

/// One rewinder.
#[derive(Debug, Default)]
pub(crate) struct Rewinder {
    slot: Mutex<Slot>,
    /// What it is to forget, from those that cannot wait for it.
    forgotten: Mutex<Vec<u64>>,
}

#[derive(Debug, Default)]
struct Slot {
    running: Option<Running>,
    /// All sandboxes have ended.
    stopped: bool,
    /// When it could last not be started.
    failed: Option<Instant>,
    last_key: u64,
}

/// A sandbox whose state the rewinder has taken down. Dropping it has the rewinder forget that.
#[derive(Debug)]
pub(crate) struct TakenDown {
    rewinder: Arc<Rewinder>,
    key: u64,
}

impl Rewinder {
    fn forgotten(&self) -> MutexGuard<'_, Vec<u64>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) {
        let mut slot = self.slot();
        slot.stopped = true;
        slot.running = None;
    }

    /// Takes down the state of a sandbox that waits to be wanted.
    ///
    /// # Errors
    /// It cannot be put back later; it may have ended.
    pub fn take_down(self: &Arc<Self>, subject: &Subject) -> Result<TakenDown, RewindError> {
        let mut slot = self.slot();
        slot.last_key += 1;
        let key = slot.last_key;
        slot.start_if_needed(subject)?;
        for key in std::mem::take(&mut *self.forgotten()) {
            slot.send(REQUEST_FORGET, key, None)?;
        }
        slot.ask(REQUEST_TAKE_DOWN, key, Some(subject.pidfd.as_fd()))?;
        Ok(TakenDown { rewinder: self.clone(), key })
    }
}

impl TakenDown {
    /// Puts the sandbox back.
    ///
    /// # Errors
    /// It has ended, or is to be ended.
    pub fn rewind(&self) -> Result<Effort, RewindError> {
        self.rewinder.slot().ask(REQUEST_REWIND, self.key, None)
    }
}

impl Drop for TakenDown {
    fn drop(&mut self) {
        match self.rewinder.slot.try_lock() {
            // A rewinder that has ended has nothing to forget.
            Ok(slot) => drop(slot.send(REQUEST_FORGET, self.key, None)),
            // It is at work, and who drops this may be a task that must not wait.
            Err(_) => self.rewinder.forgotten().push(self.key),
        }
    }
}

impl Slot {
    fn start_if_needed(&mut self, subject: &Subject) -> Result<(), RewindError> {
        if self.running.as_ref().is_some_and(|running| !running.has_ended()) {
            return Ok(());
        }
        self.running = None;
        if self.stopped {
            return Err(StateError::SandboxEnded.into());
        }
        if self.failed.is_some_and(|failed| failed.elapsed() < FAILED_FOR) {
            return Err(StateError::Ended.into());
        }
        subject.require_running()?;
        match subject.start(Task::Rewind) {
            Ok(running) => {
                self.running = Some(running);
                Ok(())
            }
            Err(error) => {
                self.failed = Some(Instant::now());
                Err(error.into())
            }
        }
    }

    fn send(&self, kind: u32, key: u64, pidfd: Option<BorrowedFd<'_>>) -> Result<(), StateError> {
        let running = self.running.as_ref().ok_or(StateError::Ended)?;
        let request = Request { kind, reserved: 0, key };
        message::send(&running.socket, &[IoSlice::new(bytes_of(&request))], pidfd.as_slice())
            .map_err(|_| StateError::Ended)
    }

    /// Asks, and waits for the answer. A rewinder that does not give one in time is killed.
    fn ask(
        &mut self,
        kind: u32,
        key: u64,
        pidfd: Option<BorrowedFd<'_>>,
    ) -> Result<Effort, RewindError> {
        let answer = self.send(kind, key, pidfd).and_then(|()| self.receive());
        let (answer, text) = answer.inspect_err(|_| self.running = None)?;
        match answer.outcome {
            OUTCOME_DONE => Ok(Effort { pages: answer.pages, calls: answer.calls }),
            _ => Err(RewindError::Refused(text)),
        }
    }

    fn receive(&self) -> Result<(Answer, String), StateError> {
        let running = self.running.as_ref().ok_or(StateError::Ended)?;
        if !is_readable(&running.socket, Instant::now() + REQUEST_TIME) {
            return Err(StateError::Late(REQUEST_TIME));
        }
        let mut packet = [0; PACKET_MAX];
        let received = message::receive(&running.socket, &mut packet, None);
        let len = match received {
            Ok(received) if received.len > 0 && !received.truncated => received.len,
            Ok(_) => return Err(StateError::Ended),
            Err(_) => return Err(StateError::Ended),
        };
        Answer::parse(&packet[..len]).ok_or(StateError::Nonsense("an answer has no sense"))
    }
}
