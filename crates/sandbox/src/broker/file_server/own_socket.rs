//! A socket of a sandbox' own for requests about files.
//!
//! Over the control socket a request wakes two threads of the host, one after the other, and on a
//! virtual machine to wake one takes longer than to serve the request. Here one thread reads,
//! serves and replies. Since programs ask several things in a row, it looks for the next request for a
//! moment before it sleeps (decisions/0068).

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use thaw_abi::control::MessageHeader;

use super::FileQuestion;
use crate::broker::Question;
use crate::{message, sys};

/// Most bytes of a request.
const REQUEST_MAX: usize = 8192;
/// How long the next request is looked for without sleep, if the last one came soon: as long as it
/// takes to be woken.
const EAGERNESS: Duration = Duration::from_micros(50);
/// How long the next request may stay away to have come soon, if this thread had to be woken for it.
const SOON: Duration = Duration::from_micros(100);

/// The host's end.
pub struct OwnSocket(OwnedFd);

/// Both ends.
pub struct OwnSocketPair {
    /// The host's.
    pub host: OwnSocket,
    /// The sandbox'.
    pub sandbox: OwnedFd,
}

impl OwnSocketPair {
    /// Makes them.
    pub fn new() -> io::Result<Self> {
        let (host, sandbox) = message::control_pair()?;
        Ok(Self { host: OwnSocket(host), sandbox })
    }
}

impl OwnSocket {
    /// Lets nothing pass any more, in neither direction. What was sent can still be read.
    pub fn end(&self) {
        // It fails if the sandbox has ended it.
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Ends it with a last reply. Nobody can send any more when that can be read, so that no request
    /// gets lost.
    pub fn end_with(&self, bytes: &[u8]) {
        // As above.
        let _ = shutdown(&self.0, Shutdown::Read);
        self.send(bytes, &[]);
        self.end();
    }

    /// Sends a reply. There is room for it, since nothing is unread; the socket of a sandbox that
    /// has lied about that ends.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        if message::send_at_once(&self.0, &[IoSlice::new(bytes)], descriptors).is_err() {
            self.end();
        }
    }

    /// The requests that come over it.
    pub fn requests(&self) -> Requests<'_> {
        Requests { socket: self.0.as_fd(), pace: Pace::default(), buffer: [0; REQUEST_MAX] }
    }
}

/// Requests as they come, with their numbers. The end: there are no more, or the sandbox has
/// broken a rule.
pub struct Requests<'a> {
    socket: BorrowedFd<'a>,
    pace: Pace,
    buffer: [u8; REQUEST_MAX],
}

impl Requests<'_> {
    /// The next one; waits for it.
    pub fn next(&mut self) -> Option<(u64, FileQuestion)> {
        let len = self.receive().ok()?;
        // Replies have descriptors: whoever does not read them keeps these for the host to count.
        if sys::unread_by_peer(self.socket).ok()? > 0 {
            return None;
        }
        let (head, body) = self.buffer[..len].split_at_checked(size_of::<MessageHeader>())?;
        let header: MessageHeader = bytemuck::pod_read_unaligned(head);
        let question = FileQuestion::of(&Question::parse(header.kind, body)?)?;
        Some((header.sequence, question))
    }

    fn receive(&mut self) -> io::Result<usize> {
        let waiting_since = Instant::now();
        let received = match self.look_for_request(waiting_since) {
            Some(received) => received,
            None => message::receive(self.socket, &mut self.buffer, None),
        };
        self.pace.note(waiting_since.elapsed());
        let packet = received?;
        match packet.truncated || packet.descriptors_dropped || packet.len == 0 {
            true => Err(ErrorKind::InvalidData.into()),
            false => Ok(packet.len),
        }
    }

    /// Looks without sleep; `None` if nothing has come.
    fn look_for_request(&mut self, since: Instant) -> Option<io::Result<message::Packet>> {
        while since.elapsed() < self.pace.eagerness() {
            match message::receive_at_once(self.socket, &mut self.buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                received => return Some(received),
            }
        }
        None
    }
}

/// How fast requests come.
#[derive(Default)]
struct Pace {
    is_fast: bool,
}

impl Pace {
    /// How long the next request is worth to be looked for without sleep.
    fn eagerness(&self) -> Duration {
        static HAS_PROCESSORS: LazyLock<bool> =
            LazyLock::new(|| thread::available_parallelism().is_ok_and(|count| count.get() > 1));
        if self.is_fast && *HAS_PROCESSORS { EAGERNESS } else { Duration::ZERO }
    }

    /// Notes how long the last one was waited for. To be woken takes a part of that.
    fn note(&mut self, waited: Duration) {
        self.is_fast = waited < SOON;
    }
}
