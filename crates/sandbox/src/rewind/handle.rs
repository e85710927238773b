//! The caller's side of a rewinder.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::held::Effort;
use super::protocol::{
    Answer, OUTCOME_DONE, PACKET_MAX, REQUEST_FORGET, REQUEST_REWIND, REQUEST_TAKE_DOWN, Reason,
    Request,
};
use crate::message;
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
    #[error("{1}")]
    Refused(Reason, String),
    /// It is out of reach.
    #[error("the sandbox is out of reach: {0}")]
    Lost(io::Error),
    /// The daemon still owes it an answer, or it has not read one.
    #[error("a request of the sandbox is still being served")]
    Busy,
}

impl RewindError {
    /// What it counts as.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Rewinder(_) => Reason::Rewinder,
            Self::Refused(reason, _) => *reason,
            Self::Lost(_) => Reason::Ended,
            Self::Busy => Reason::Busy,
        }
    }
}

/// Rewinders of one zygote parent, at most: each waits for the sandbox that it has stopped.
const REWINDERS: usize = 4;
/// Requests that wait for an answer of one rewinder, at most. Their packets fit into its socket.
const PENDING_MAX: usize = 128;

/// The rewinders of one zygote parent, each of which is started when it is first needed.
#[derive(Debug, Default)]
pub(crate) struct Rewinders {
    all: [Rewinder; REWINDERS],
    next: AtomicUsize,
}

impl Rewinders {
    /// The next in turn.
    pub fn next(&self) -> &Rewinder {
        &self.all[self.next.fetch_add(1, Ordering::Relaxed) % REWINDERS]
    }

    /// Ends them for good.
    pub fn stop(&self) {
        self.all.iter().for_each(Rewinder::stop);
    }
}

/// One rewinder.
#[derive(Debug, Default)]
pub(crate) struct Rewinder {
    slot: Mutex<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    session: Option<Arc<Session>>,
    /// All sandboxes have ended.
    stopped: bool,
    /// When it could last not be started.
    failed: Option<Instant>,
}

/// A rewinder that runs. Nobody who asks it waits: a thread listens to it, and passes the answers
/// on in the order of the requests.
struct Session {
    running: Running,
    conversation: Mutex<Conversation>,
}

#[derive(Default)]
struct Conversation {
    /// Who waits for an answer, the one who comes first at the front.
    pending: VecDeque<Reply>,
    /// Since when the rewinder owes the answer that comes next.
    owed_since: Option<Instant>,
    last_key: u64,
    /// There are no answers any more.
    is_over: bool,
}

/// Is told what became of a request, once, by the thread that listens.
type Reply = Box<dyn FnOnce(Result<Effort, RewindError>) + Send>;

/// A sandbox whose state the rewinder has taken down. Dropping it has the rewinder forget that.
#[derive(Debug)]
pub(crate) struct TakenDown {
    /// That rewinder, as long as it runs.
    session: Weak<Session>,
    key: u64,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("running", &self.running).finish_non_exhaustive()
    }
}

impl Rewinder {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) {
        let session = {
            let mut slot = self.slot();
            slot.stopped = true;
            slot.session.take()
        };
        if let Some(session) = session {
            session.running.end();
        }
    }

    /// Takes down the state of a sandbox that waits to be wanted. Waits for that.
    ///
    /// # Errors
    /// It cannot be put back later; it may have ended.
    pub fn take_down(&self, subject: &Subject) -> Result<TakenDown, RewindError> {
        let session = self.slot().session(subject)?;
        let key = session.next_key();
        // Forgotten in any case.
        let taken_down = TakenDown { session: Arc::downgrade(&session), key };
        let (answer_to, answer_from) = mpsc::sync_channel(1);
        let reply = move |answer| drop(answer_to.send(answer));
        session.ask(REQUEST_TAKE_DOWN, key, Some(subject.pidfd.as_fd()), Box::new(reply));
        answer_from.recv().map_err(|_| StateError::Ended)??;
        Ok(taken_down)
    }
}

impl Drop for Rewinder {
    fn drop(&mut self) {
        // The thread that listens would go on for ever.
        self.stop();
    }
}

impl TakenDown {
    /// Puts the sandbox back, and calls `reply` then, on another thread that must not be held
    /// up, or at once if there is no rewinder any more. After an error the sandbox has ended,
    /// or is to be ended.
    pub fn rewind(self, reply: impl FnOnce(Result<(Self, Effort), RewindError>) + Send + 'static) {
        let Some(session) = self.session.upgrade() else {
            return reply(Err(StateError::Ended.into()));
        };
        let key = self.key;
        let reply = move |answer: Result<_, _>| reply(answer.map(|effort| (self, effort)));
        session.ask(REQUEST_REWIND, key, None, Box::new(reply));
    }
}

impl Drop for TakenDown {
    fn drop(&mut self) {
        if let Some(session) = self.session.upgrade() {
            // A rewinder that has ended has nothing to forget.
            drop(session.send(REQUEST_FORGET, self.key, None));
        }
    }
}

impl Slot {
    /// The rewinder that runs, after it was started if need be.
    fn session(&mut self, subject: &Subject) -> Result<Arc<Session>, RewindError> {
        if let Some(session) = self.session.as_ref().filter(|session| session.goes_on()) {
            return Ok(session.clone());
        }
        self.session = None;
        if self.stopped {
            return Err(StateError::SandboxEnded.into());
        }
        if self.failed.is_some_and(|failed| failed.elapsed() < FAILED_FOR) {
            return Err(StateError::Ended.into());
        }
        subject.require_running()?;
        let started = subject.start(Task::Rewind).map_err(RewindError::from);
        match started.and_then(|running| Session::start(running).map_err(RewindError::Lost)) {
            Ok(session) => {
                self.session = Some(session.clone());
                Ok(session)
            }
            Err(error) => {
                self.failed = Some(Instant::now());
                Err(error)
            }
        }
    }
}

impl Session {
    fn start(running: Running) -> io::Result<Arc<Self>> {
        // The thread waits for each answer, and looks so often whether it is late.
        rustix::io::ioctl_fionbio(&running.socket, false)?;
        set_socket_timeout(&running.socket, Timeout::Recv, Some(REQUEST_TIME))?;
        let session = Arc::new(Self { running, conversation: Mutex::default() });
        let listening = session.clone();
        let thread = std::thread::Builder::new().name("thaw-rewinder".into());
        thread.spawn(move || listening.end(&listening.listen()))?;
        Ok(session)
    }

    fn conversation(&self) -> MutexGuard<'_, Conversation> {
        self.conversation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_on(&self) -> bool {
        !self.conversation().is_over && !self.running.has_ended()
    }

    fn next_key(&self) -> u64 {
        let mut conversation = self.conversation();
        conversation.last_key += 1;
        conversation.last_key
    }

    fn send(&self, kind: u32, key: u64, pidfd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let request = Request { kind, reserved: 0, key };
        let parts = [IoSlice::new(bytes_of(&request))];
        message::send_at_once(&self.running.socket, &parts, pidfd.as_slice())
    }

    /// Asks, and has `reply` called with the answer.
    fn ask(&self, kind: u32, key: u64, pidfd: Option<BorrowedFd<'_>>, reply: Reply) {
        let mut conversation = self.conversation();
        let refused = match conversation.admits_more() {
            Ok(()) => self.send(kind, key, pidfd).map_err(|_| StateError::Ended.into()).err(),
            Err(refused) => Some(refused),
        };
        let Some(refused) = refused else { return conversation.expect(reply) };
        drop(conversation);
        reply(Err(refused));
    }

    /// Passes answers on until there is a reason to have no more of them.
    fn listen(&self) -> StateError {
        let mut packet = [0; PACKET_MAX];
        loop {
            let len = match message::receive(&self.running.socket, &mut packet, None) {
                Ok(received) if received.len > 0 && !received.truncated => received.len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match self.conversation().is_late() {
                        true => return StateError::Late(REQUEST_TIME),
                        false => continue,
                    }
                }
                Ok(_) | Err(_) => return StateError::Ended,
            };
            let Some((answer, text)) = Answer::parse(&packet[..len]) else {
                return StateError::Nonsense("an answer has no sense");
            };
            let Some(reply) = self.conversation().next() else {
                return StateError::Nonsense("nobody has asked for an answer");
            };
            reply(match answer.outcome {
                OUTCOME_DONE => Ok(Effort {
                    pages: answer.pages,
                    calls: answer.calls,
                    processor_time: Duration::from_nanos(answer.nanoseconds),
                }),
                _ => Err(RewindError::Refused(Reason::from_number(answer.reason), text)),
            });
        }
    }

    /// Ends the rewinder, and tells those who wait for an answer.
    fn end(&self, why: &StateError) {
        self.running.end();
        let pending = self.conversation().close();
        for reply in pending {
            let why = match why {
                StateError::Late(time) => StateError::Late(*time),
                StateError::Nonsense(what) => StateError::Nonsense(what),
                _ => StateError::Ended,
            };
            reply(Err(why.into()));
        }
    }
}

impl Conversation {
    fn admits_more(&self) -> Result<(), RewindError> {
        if self.is_over {
            return Err(StateError::Ended.into());
        }
        match self.pending.len() < PENDING_MAX {
            true => Ok(()),
            false => Err(StateError::Busy.into()),
        }
    }

    fn expect(&mut self, reply: Reply) {
        self.owed_since = self.owed_since.or_else(|| Some(Instant::now()));
        self.pending.push_back(reply);
    }

    /// Who gets the answer that has come.
    fn next(&mut self) -> Option<Reply> {
        let reply = self.pending.pop_front();
        self.owed_since = (!self.pending.is_empty()).then(Instant::now);
        reply
    }

    fn is_late(&self) -> bool {
        self.owed_since.is_some_and(|since| since.elapsed() >= REQUEST_TIME)
    }

    /// Ends it; who waits still.
    fn close(&mut self) -> VecDeque<Reply> {
        self.is_over = true;
        std::mem::take(&mut self.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_owed_one_after_the_other_and_not_without_end() {
        let mut conversation = Conversation::default();
        assert!(!conversation.is_late());
        for _ in 0..PENDING_MAX {
            conversation.admits_more().unwrap();
            conversation.expect(Box::new(|_| {}));
        }
        assert!(matches!(conversation.admits_more(), Err(RewindError::Rewinder(StateError::Busy))));
        conversation.owed_since = Instant::now().checked_sub(REQUEST_TIME);
        assert!(conversation.is_late());
        // The next one has its own time.
        assert!(conversation.next().is_some() && !conversation.is_late());
        assert_eq!(conversation.close().len(), PENDING_MAX - 1);
        assert!(matches!(
            conversation.admits_more(),
            Err(RewindError::Rewinder(StateError::Ended))
        ));
        assert!(conversation.next().is_none() && conversation.owed_since.is_none());
    }
}
