//! The caller's side of the state helper.
//!
//! A worker may have been taken over by the sandbox that it looks at. So it is given
//! nothing but what the request is about, its answers are bounded and checked, and it is
//! killed, with its helper, when it takes longer than its request may.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::launch::{Namespaces, spawn};
use super::protocol::{
    ANSWER_DONE, ANSWER_FAILED, ANSWER_IDLE, ANSWER_NOT_SERVING, ANSWER_SERVING, ANSWER_STARTED,
    Answer, ERROR_PANIC, PACKET_MAX, PIECE_MAX, REQUEST_CHECK, Task, errno_of,
};
use crate::message::{self, is_readable};

/// How long the helper may take to start.
const START_MAX: Duration = Duration::from_secs(10);
/// How long it may take to try to open the files of a process.
const CHECK_MAX: Duration = Duration::from_secs(10);
/// How long the host may take to end it.
const END_MAX: Duration = Duration::from_secs(5);
/// How long a failed start counts: where it cannot be started, each boot would try.
const FAILED_FOR: Duration = Duration::from_secs(1);
/// How often somebody who waits for another request looks whether it is done.
const TURN_INTERVAL: Duration = Duration::from_millis(2);
/// How often it is looked whether an answer is wanted still.
const WANTED_INTERVAL: Duration = Duration::from_millis(5);

/// Why the state helper is of no use.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It could not be started.
    #[error("cannot start the process that reads the memory of sandboxes ({step}): {source}")]
    Start {
        /// What failed.
        step: String,
        /// Why.
        source: io::Error,
    },
    /// It has ended while it worked.
    #[error(
        "the process that reads the memory of sandboxes was killed; try again, and `dmesg` says \
         if the host ran out of memory or the process made a forbidden host call"
    )]
    Ended,
    /// It has crashed.
    #[error("the process that reads the memory of sandboxes has crashed: {0}; report this bug")]
    Crashed(String),
    /// It took too long, and was killed.
    #[error(
        "reading the memory of the sandbox took longer than {} seconds, which is more than it may; \
         let the program hold less memory",
        .0.as_secs()
    )]
    Late(Duration),
    /// There is nothing to be read any more.
    #[error("the sandbox has ended")]
    SandboxEnded,
    /// Nobody wants the answer any more: it was killed.
    #[error("the memory of the sandbox is not wanted any more")]
    Unwanted,
    /// It was busy with other sandboxes for too long.
    #[error("other sandboxes are being read; try again")]
    Busy,
    /// It has said what it never says: it was killed.
    #[error("the process that reads the memory of sandboxes answered nonsense and was killed: {0}")]
    Nonsense(&'static str),
}

impl StateError {
    /// The error of a helper that could not even be asked for.
    pub(crate) fn from_start(source: io::Error) -> Self {
        Self::Start { step: "find the sandbox".to_owned(), source }
    }

    pub(crate) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Late(_) => io::ErrorKind::TimedOut,
            Self::Busy => io::ErrorKind::WouldBlock,
            Self::Unwanted => io::ErrorKind::Interrupted,
            Self::SandboxEnded => io::ErrorKind::NotFound,
            Self::Start { source, .. } => source.kind(),
            _ => io::ErrorKind::Other,
        }
    }
}

impl From<StateError> for io::Error {
    fn from(error: StateError) -> Self {
        Self::new(error.kind(), error)
    }
}

/// The state helper of one zygote parent: started when it is first needed, and again when
/// it has died. It serves one request after the other.
#[derive(Debug, Default)]
pub(crate) struct StateHelper {
    slot: Mutex<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    running: Option<Running>,
    /// The zygote parent has ended, and all sandboxes with it.
    stopped: bool,
    /// When it could not be started, and why.
    failed: Option<(Instant, Failed)>,
}

/// A [`StateError::Start`] that can be told again.
#[derive(Clone, Debug)]
struct Failed {
    step: String,
    errno: i32,
    text: String,
}

impl Failed {
    fn new(step: String, source: &io::Error) -> Self {
        Self { step, errno: errno_of(source), text: source.to_string() }
    }

    fn error(self) -> StateError {
        let source = match self.errno {
            0 => io::Error::other(self.text),
            errno => io::Error::from_raw_os_error(errno),
        };
        StateError::Start { step: self.step, source }
    }
}

/// A running helper.
#[derive(Debug)]
pub(crate) struct Running {
    pub socket: OwnedFd,
    child: Child,
}

impl Running {
    pub fn has_ended(&self) -> bool {
        self.child.has_ended()
    }

    /// Kills it, and waits for its end.
    pub fn end(&self) {
        self.child.end();
    }
}

/// Its process, by its pidfd. Dropping it kills it.
#[derive(Debug)]
struct Child(OwnedFd);

impl Child {
    fn has_ended(&self) -> bool {
        is_readable(&self.0, Instant::now())
    }

    fn end(&self) {
        // It may have ended; then there is nobody to be killed.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
        // The caller may rely on its end, if the host can bring that about.
        is_readable(&self.0, Instant::now() + END_MAX);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end();
    }
}

impl StateHelper {
    /// Ends the helper for good.
    pub fn stop(&self) {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.stopped = true;
        slot.running = None;
    }

    /// Waits until no other request is served, until `deadline`.
    fn turn(&self, deadline: Instant) -> Result<MutexGuard<'_, Slot>, StateError> {
        loop {
            match self.slot.try_lock() {
                Ok(slot) => return Ok(slot),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(StateError::Busy);
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(TURN_INTERVAL),
            }
        }
    }
}

/// A sandbox that the helper is asked about.
#[derive(Debug)]
pub(crate) struct Subject {
    pub helper: Arc<StateHelper>,
    /// User id that the helper takes in the sandboxes' namespace.
    pub helper_id: u32,
    /// Number of the sandbox' first process in the caller's `/proc`.
    pub pid: u32,
    /// Of that process.
    pub pidfd: OwnedFd,
    /// Whether the answer is wanted, if that may change.
    pub wanted: Option<Arc<AtomicBool>>,
}

impl Subject {
    fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.load(SeqCst))
    }

    /// Waits until nobody else asks, for as long as the answer is wanted.
    fn turn(&self, deadline: Instant) -> Result<MutexGuard<'_, Slot>, StateError> {
        loop {
            let look = Instant::now() + WANTED_INTERVAL;
            let turn = self.helper.turn(deadline.min(look));
            match turn {
                _ if !self.is_wanted() => return Err(StateError::Unwanted),
                Err(StateError::Busy) if look < deadline => {}
                turn => return turn,
            }
        }
    }

    /// Whether the sandbox ends within a time, or has ended.
    pub fn ends_within(&self, time: Duration) -> bool {
        let time = message::time_until(Instant::now() + time);
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&time))
            .is_ok_and(|ready| ready > 0)
    }

    /// Asks the helper something: `request` and `files` behind the pidfd of the sandbox. It
    /// may take `time` for all of it, and as long again may those that have asked before.
    pub fn ask<T>(
        &self,
        request: &[u8],
        files: &[BorrowedFd<'_>],
        time: Duration,
        converse: impl FnOnce(&mut Conversation<'_>) -> Result<T, StateError>,
    ) -> Result<T, StateError> {
        let mut slot = self.turn(Instant::now() + time)?;
        self.require_running()?;
        let running = match slot.running.take() {
            Some(running) if !running.has_ended() => running,
            // None, or it has died: that is nothing to be told of.
            _ if slot.stopped => return Err(StateError::SandboxEnded),
            _ => self.start_in(&mut slot)?,
        };
        let mut control = Conversation::new(&running.socket, time);
        let (socket, remote) = control_pair()?;
        let own = [remote.as_fd(), self.pidfd.as_fd()];
        control.send(request, &own.into_iter().chain(files.iter().copied()).collect::<Vec<_>>())?;
        // If the worker dies, this must be the end of its socket.
        drop(remote);
        let wanted = self.wanted.as_deref();
        let result = converse(&mut Conversation { wanted, ..Conversation::new(&socket, time) })?;
        // Only then has nobody the files any more. After any error the helper is killed, and
        // its worker with it, since nobody knows what they would do next.
        match control.next()? {
            (answer, _) if answer.kind == ANSWER_IDLE => slot.running = Some(running),
            _ => return Err(StateError::Nonsense("it does not say that it is idle")),
        }
        Ok(result)
    }

    /// Starts a helper, unless that has failed just now.
    fn start_in(&self, slot: &mut Slot) -> Result<Running, StateError> {
        if let Some((when, failed)) = &slot.failed
            && when.elapsed() < FAILED_FOR
        {
            return Err(failed.clone().error());
        }
        let result = self.start(Task::Read);
        slot.failed = None;
        match result {
            // One that ends meanwhile has no namespaces.
            Err(StateError::Start { step, source }) => {
                self.require_running()?;
                let failed = Failed::new(step, &source);
                slot.failed = Some((Instant::now(), failed.clone()));
                Err(failed.error())
            }
            result => result,
        }
    }

    /// Starts a helper for the sandboxes of the same zygote parent.
    pub fn start(&self, task: Task) -> Result<Running, StateError> {
        let namespaces =
            Namespaces::of_sandbox(self.pid).map_err(failed("find the sandboxes' namespaces"))?;
        // If it runs still, these were its own.
        self.require_running()?;
        let (socket, remote) = control_pair()?;
        spawn(remote, namespaces, self.helper_id, task).map_err(failed("execute it"))?;
        let mut conversation = Conversation::new(&socket, START_MAX);
        let mut child = None;
        loop {
            let (answer, text, descriptor) = conversation.receive().map_err(not_started)?;
            match answer.kind {
                ANSWER_STARTED => child = descriptor.map(Child),
                ANSWER_NOT_SERVING => {
                    return Err(failed(&text)(answer.host_error("no reason given")));
                }
                ANSWER_SERVING => {
                    let nonsense = StateError::Nonsense("it did not hand over its pidfd");
                    return Ok(Running { socket, child: child.ok_or(nonsense)? });
                }
                _ => return Err(StateError::Nonsense("it answered before it was asked")),
            }
        }
    }

    /// An error if the sandbox has ended.
    pub fn require_running(&self) -> Result<(), StateError> {
        match is_readable(&self.pidfd, Instant::now()) {
            true => Err(StateError::SandboxEnded),
            false => Ok(()),
        }
    }

    /// Whether what is written to images can be read of the sandbox.
    ///
    /// # Errors
    /// It cannot, or there is no helper.
    pub fn check(&self) -> io::Result<()> {
        let request = REQUEST_CHECK.to_le_bytes();
        let (answer, text) = self.ask(&request, &[], CHECK_MAX, |helper| helper.finish())?;
        match answer.kind {
            ANSWER_DONE => Ok(()),
            _ => Err(answer.host_error(&text)),
        }
    }
}

/// The error of a step that has failed.
fn failed(step: &str) -> impl FnOnce(io::Error) -> StateError {
    let step = step.to_owned();
    move |source| StateError::Start { step, source }
}

/// The error of a helper that says nothing while it starts.
fn not_started(error: StateError) -> StateError {
    let kind = match error {
        StateError::Late(_) => io::ErrorKind::TimedOut,
        StateError::Ended => io::ErrorKind::UnexpectedEof,
        error => return error,
    };
    failed("wait for it")(kind.into())
}

/// A pair of sockets: one to keep, which never blocks who sends, and one to give away.
fn control_pair() -> Result<(OwnedFd, OwnedFd), StateError> {
    let (own, remote) = message::control_pair().map_err(failed("make its socket"))?;
    // The other end may stop reading what it is sent.
    rustix::io::ioctl_fionbio(&own, true)
        .map_err(|errno| failed("make its socket non-blocking")(errno.into()))?;
    Ok((own, remote))
}

/// A request that is being served.
pub(crate) struct Conversation<'a> {
    socket: &'a OwnedFd,
    /// How long it may take.
    time: Duration,
    deadline: Instant,
    /// Whether the answer is wanted, if that may change.
    wanted: Option<&'a AtomicBool>,
}

impl<'a> Conversation<'a> {
    /// One that may take so long from now on.
    pub fn new(socket: &'a OwnedFd, time: Duration) -> Self {
        Self { socket, time, deadline: Instant::now() + time, wanted: None }
    }

    /// Waits for a packet, for as long as one is wanted.
    fn wait(&self) -> Result<(), StateError> {
        let Some(wanted) = self.wanted else {
            let is_there = is_readable(self.socket, self.deadline);
            return if is_there { Ok(()) } else { Err(StateError::Late(self.time)) };
        };
        while !is_readable(self.socket, self.deadline.min(Instant::now() + WANTED_INTERVAL)) {
            if !wanted.load(SeqCst) {
                return Err(StateError::Unwanted);
            }
            if Instant::now() >= self.deadline {
                return Err(StateError::Late(self.time));
            }
        }
        Ok(())
    }

    /// Sends a packet.
    pub fn send(
        &mut self,
        packet: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), StateError> {
        match message::send(self.socket, &[IoSlice::new(packet)], descriptors) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(StateError::Nonsense("it asks without reading the answers"))
            }
            Err(_) => Err(StateError::Ended),
        }
    }

    /// Receives a packet into `buffer`; returns its length.
    fn receive_packet(
        &mut self,
        buffer: &mut [u8],
        descriptors: Option<&mut Vec<OwnedFd>>,
    ) -> Result<usize, StateError> {
        self.wait()?;
        match message::receive(self.socket, buffer, descriptors) {
            Ok(packet) if packet.truncated => Err(StateError::Nonsense("a packet is too long")),
            Ok(packet) if packet.len > 0 => Ok(packet.len),
            Ok(_) | Err(_) => Err(StateError::Ended),
        }
    }

    fn receive(&mut self) -> Result<(Answer, String, Option<OwnedFd>), StateError> {
        let mut buffer = vec![0; PACKET_MAX];
        let mut descriptors = Vec::new();
        let len = self.receive_packet(&mut buffer, Some(&mut descriptors))?;
        let parsed = Answer::parse(&buffer[..len]);
        let (answer, text) = parsed.ok_or(StateError::Nonsense("an answer has no sense"))?;
        Ok((answer, text, descriptors.pop()))
    }

    /// Receives the next answer, and the text that goes with it.
    ///
    /// # Errors
    /// It has crashed, too: there is no answer then.
    pub fn next(&mut self) -> Result<(Answer, String), StateError> {
        match self.receive()? {
            (answer, text, _) if answer.kind == ANSWER_FAILED && answer.error == ERROR_PANIC => {
                Err(StateError::Crashed(text))
            }
            (answer, text, None) => Ok((answer, text)),
            (_, _, Some(_)) => Err(StateError::Nonsense("it sent a descriptor")),
        }
    }

    /// Receives the answer that ends the conversation.
    pub fn finish(&mut self) -> Result<(Answer, String), StateError> {
        match self.next()? {
            (answer, text) if matches!(answer.kind, ANSWER_DONE | ANSWER_FAILED) => {
                Ok((answer, text))
            }
            _ => Err(StateError::Nonsense("it asked something instead of answering")),
        }
    }

    /// Receives `len` bytes, which may be more than a packet holds, but not more than `max`.
    pub fn bytes(&mut self, len: u64, max: usize) -> Result<Vec<u8>, StateError> {
        let len = usize::try_from(len).ok().filter(|&len| len <= max);
        let len = len.ok_or(StateError::Nonsense("an answer is too long"))?;
        let mut bytes = Vec::with_capacity(len);
        let mut piece = vec![0; PIECE_MAX];
        while bytes.len() < len {
            let received = self.receive_packet(&mut piece, None)?;
            bytes.extend_from_slice(&piece[..received]);
        }
        match bytes.len() == len {
            true => Ok(bytes),
            false => Err(StateError::Nonsense("an answer is longer than it said")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::protocol::ANSWER_BLOB;

    /// The answer to a conversation with a helper that has sent these packets.
    fn after<T>(
        packets: &[&[u8]],
        converse: impl FnOnce(&mut Conversation<'_>) -> Result<T, StateError>,
    ) -> Result<T, StateError> {
        let (own, helper) = message::control_pair().unwrap();
        rustix::io::ioctl_fionbio(&own, true).unwrap();
        for packet in packets {
            message::send(&helper, &[IoSlice::new(packet)], &[]).unwrap();
        }
        drop(helper);
        converse(&mut Conversation::new(&own, Duration::from_secs(20)))
    }

    #[test]
    fn a_helper_that_lies_is_found_out() {
        let done = Answer::new(ANSWER_DONE).with_text("");
        let blob = Answer::new(ANSWER_BLOB).with_text("");
        let is_nonsense = |result: Result<(Answer, String), StateError>| {
            assert!(matches!(result, Err(StateError::Nonsense(_))), "{result:?}");
        };
        after(&[&done], |helper| helper.finish()).unwrap();
        is_nonsense(after(&[&blob], |helper| helper.finish()));
        is_nonsense(after(&[&[1, 2, 3]], |helper| helper.finish()));
        is_nonsense(after(&[&[0; PACKET_MAX + 1]], |helper| helper.finish()));
        let ended = after(&[], |helper| helper.finish());
        assert!(matches!(ended, Err(StateError::Ended)), "{ended:?}");
        let panic = Answer { error: ERROR_PANIC, ..Answer::new(ANSWER_FAILED) };
        let crashed = after(&[&panic.with_text("at\x07 line 7")], |helper| helper.finish());
        assert_eq!(
            crashed.unwrap_err().to_string(),
            "the process that reads the memory of sandboxes has crashed: at\\x07 line 7; report \
             this bug"
        );
    }

    #[test]
    fn a_descriptor_from_the_helper_is_refused() {
        let (own, helper) = message::control_pair().unwrap();
        let done = Answer::new(ANSWER_DONE).with_text("");
        message::send(&helper, &[IoSlice::new(&done)], &[helper.as_fd()]).unwrap();
        let result = Conversation::new(&own, Duration::from_secs(20)).finish();
        assert!(matches!(result, Err(StateError::Nonsense(_))), "{result:?}");
    }

    #[test]
    fn long_answers_are_bounded() {
        let piece = [7; PIECE_MAX];
        let pieces: [&[u8]; 2] = [&piece, &piece[..10]];
        let len = PIECE_MAX as u64 + 10;
        let bytes = after(&pieces, |helper| helper.bytes(len, 2 * PIECE_MAX)).unwrap();
        assert_eq!(bytes.len() as u64, len);
        for (len, max) in [(len, PIECE_MAX), (u64::MAX, PIECE_MAX), (PIECE_MAX as u64 + 9, 1 << 20)]
        {
            let result = after(&pieces, |helper| helper.bytes(len, max));
            assert!(matches!(result, Err(StateError::Nonsense(_))), "{result:?}");
        }
    }

    #[test]
    fn a_helper_that_does_not_answer_is_late() {
        let (own, _helper) = message::control_pair().unwrap();
        let time = Duration::from_millis(20);
        let result = Conversation::new(&own, time).finish();
        assert!(matches!(result, Err(StateError::Late(late)) if late == time), "{result:?}");
    }

    #[test]
    fn an_answer_that_nobody_wants_any_more_is_not_waited_for() {
        let (own, helper) = message::control_pair().unwrap();
        let wanted = AtomicBool::new(true);
        let conversation = || Conversation {
            wanted: Some(&wanted),
            ..Conversation::new(&own, Duration::from_secs(20))
        };
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| conversation().finish());
            std::thread::sleep(2 * WANTED_INTERVAL);
            assert!(!asker.is_finished());
            wanted.store(false, SeqCst);
            let result = asker.join().unwrap();
            assert!(matches!(result, Err(StateError::Unwanted)), "{result:?}");
        });
        wanted.store(true, SeqCst);
        message::send(&helper, &[IoSlice::new(&Answer::new(ANSWER_DONE).with_text(""))], &[])
            .unwrap();
        conversation().finish().unwrap();
    }

    #[test]
    fn a_helper_that_does_not_read_is_not_waited_for() {
        let (own, _helper) = message::control_pair().unwrap();
        rustix::io::ioctl_fionbio(&own, true).unwrap();
        let mut conversation = Conversation::new(&own, Duration::from_secs(20));
        let refused = (0..10_000).find_map(|_| conversation.send(&[0; 4096], &[]).err());
        assert!(matches!(refused, Some(StateError::Nonsense(_))), "{refused:?}");
    }

    #[test]
    fn a_failed_start_is_not_repeated_at_once() {
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty());
        let subject = Subject {
            helper: Arc::default(),
            helper_id: 0,
            // Not a sandbox: the pid namespace around its own is not to be had.
            pid: std::process::id(),
            pidfd: pidfd.unwrap(),
            wanted: None,
        };
        let first = subject.check().unwrap_err().to_string();
        let when = || subject.helper.slot.lock().unwrap().failed.as_ref().unwrap().0;
        let then = when();
        assert_eq!(subject.check().unwrap_err().to_string(), first);
        assert_eq!(when(), then);
        assert!(first.contains("find the sandboxes' namespaces"), "{first}");
    }

    #[test]
    fn whoever_waits_for_a_turn_does_so_for_a_time() {
        let helper = StateHelper::default();
        let turn = helper.turn(Instant::now()).unwrap();
        let refused = helper.turn(Instant::now()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop(turn);
        drop(helper.turn(Instant::now()).unwrap());
    }
}
