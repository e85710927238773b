//! Packets on control sockets, with descriptors attached.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use bytemuck::{Pod, bytes_of};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use rustix::process::Pid;
use thaw_abi::control::{MESSAGE_MAX, MESSAGE_MAX_FDS, MSG_REPLY, MessageHeader, Reply};

/// Makes a pair of control sockets, both closed on exec and blocking. The first
/// is the host's: its send buffer holds the largest message.
pub(crate) fn control_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (host, sandbox) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let wanted = 2 * MESSAGE_MAX;
    // The kernel accounts for twice the value. Without the right to go beyond
    // `net.core.wmem_max`, the capped value must do; whether it does shows here
    // and not at the first large boot command.
    if rustix::net::sockopt::set_socket_send_buffer_size_force(&host, wanted).is_err() {
        rustix::net::sockopt::set_socket_send_buffer_size(&host, wanted)?;
    }
    if rustix::net::sockopt::socket_send_buffer_size(&host)? < MESSAGE_MAX + 4096 {
        return Err(io::Error::other(
            "net.core.wmem_max is below 128 KiB, raise it with `sysctl net.core.wmem_max=212992`",
        ));
    }
    Ok((host, sandbox))
}

/// The header of a message of `kind` with `len` bytes after the header.
pub(crate) fn header(kind: u32, len: usize, sequence: u64) -> MessageHeader {
    MessageHeader { kind, len: len as u32, sequence }
}

/// A message without a tail, as bytes.
pub(crate) fn message<T: Pod>(kind: u32, body: &T) -> Vec<u8> {
    with_body(kind, bytes_of(body))
}

/// A message with a body that is put together from parts.
pub(crate) fn with_body(kind: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = bytes_of(&header(kind, body.len(), 0)).to_vec();
    bytes.extend_from_slice(body);
    bytes
}

/// The reply to request `sequence`: `errno` is 0 or a positive error number.
pub(crate) fn reply(sequence: u64, errno: i32, tail: &[u8]) -> Vec<u8> {
    let body = Reply { errno, reserved: 0 };
    let len = size_of::<Reply>() + tail.len();
    let header = header(MSG_REPLY, len, sequence);
    let mut bytes = Vec::with_capacity(size_of_val(&header) + len);
    bytes.extend_from_slice(bytes_of(&header));
    bytes.extend_from_slice(bytes_of(&body));
    bytes.extend_from_slice(tail);
    bytes
}

/// Sends one packet made of `parts`, with `descriptors`.
pub(crate) fn send(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, parts, descriptors, SendFlags::NOSIGNAL)
}

/// The same on a socket that may block: it fails if there is no room.
pub(crate) fn send_at_once(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, parts, descriptors, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn send_with(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MESSAGE_MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::from(io::ErrorKind::ArgumentListTooLong));
    }
    loop {
        match sendmsg(&socket, parts, &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What [`receive`] found.
#[derive(Debug)]
pub(crate) struct Packet {
    /// Bytes of the packet; 0: the peer has closed the socket.
    pub len: usize,
    /// The packet was longer than the buffer.
    pub truncated: bool,
    /// The packet carried descriptors beyond those taken.
    pub descriptors_dropped: bool,
}

impl Packet {
    fn of(received: &RecvMsg) -> Self {
        Self {
            len: received.bytes,
            truncated: received.flags.contains(ReturnFlags::TRUNC),
            descriptors_dropped: received.flags.contains(ReturnFlags::CTRUNC),
        }
    }
}

/// recvmsg(2), again if a signal came in between, and if the peer has closed its end with something of
/// ours unread: Linux says that once, before what the peer has sent last, which nobody else would read.
fn receive_uninterrupted(
    socket: impl AsFd,
    buffer: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> io::Result<RecvMsg> {
    loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match recvmsg(&socket, &mut parts, control, RecvFlags::CMSG_CLOEXEC | flags) {
            Err(Errno::INTR | Errno::CONNRESET) => {}
            result => return Ok(result?),
        }
    }
}

/// Receives one packet and learns which process has sent it, on a socket with
/// `SO_PASSCRED` (unix(7)). Returns its length.
pub(crate) fn receive_with_sender(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> io::Result<(usize, Option<Pid>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = receive_uninterrupted(socket, buffer, &mut control, RecvFlags::empty())?;
    let sender = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(credentials) => Some(credentials.pid),
        _ => None,
    });
    Ok((received.bytes, sender))
}

/// Receives one packet into `buffer` and appends its descriptors (16 at most) to
/// `descriptors`; with `None`, any descriptor is dropped and reported.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    descriptors: Option<&mut Vec<OwnedFd>>,
) -> io::Result<Packet> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(16))];
    let mut control = match descriptors {
        Some(_) => RecvAncillaryBuffer::new(&mut space),
        None => RecvAncillaryBuffer::new(&mut []),
    };
    let received = receive_uninterrupted(socket, buffer, &mut control, RecvFlags::empty())?;
    if let Some(descriptors) = descriptors {
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
    }
    Ok(Packet::of(&received))
}

/// Receives one packet that is there, on a socket that may block, and drops descriptors.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: there is none.
pub(crate) fn receive_at_once(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Packet> {
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let received = receive_uninterrupted(socket, buffer, &mut none, RecvFlags::DONTWAIT)?;
    Ok(Packet::of(&received))
}

/// Sends a packet as [`send`], and waits until `deadline` for room in a socket that does not
/// block.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`]: the peer does not read; others: it has ended.
pub(crate) fn send_until(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    loop {
        match send(socket, &[IoSlice::new(bytes)], descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
        if !is_ready(socket, PollFlags::OUT, deadline) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Whether something is to be read before `deadline`.
pub(crate) fn is_readable(file: impl AsFd, deadline: Instant) -> bool {
    is_ready(file, PollFlags::IN, deadline)
}

/// Whether one of these things happens to a file before `deadline`.
fn is_ready(file: impl AsFd, events: PollFlags, deadline: Instant) -> bool {
    loop {
        match poll(&mut [PollFd::new(&file, events)], Some(&time_until(deadline))) {
            Err(Errno::INTR) => {}
            result => return result.is_ok_and(|ready| ready > 0),
        }
    }
}

/// How long it is until then; nothing if that is over.
pub(crate) fn time_until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

/// Messages that wait for room in the socket. Bounded: a sandbox that does not
/// read must not fill the daemon's memory.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    bytes: usize,
}

/// Most messages that wait for one sandbox.
const OUTBOX_MESSAGES: usize = 64;
/// Most bytes that wait for one sandbox.
const OUTBOX_BYTES: usize = 512 * 1024;

/// Whether a message is on its way.
enum Sent {
    Yes,
    No,
}

/// The outbox is full.
#[derive(Debug)]
pub(crate) struct OutboxFull;

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sends a message now if the (non-blocking) socket has room and nothing
    /// waits before it, otherwise queues it.
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        message: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<Result<(), OutboxFull>> {
        let lent: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        match self.send_now(socket, &message, &lent)? {
            Sent::Yes => Ok(Ok(())),
            Sent::No => Ok(self.keep(message, descriptors)),
        }
    }

    /// As [`Outbox::send`], with descriptors that are duplicated only if the message
    /// has to wait.
    pub(crate) fn send_lent(
        &mut self,
        socket: BorrowedFd<'_>,
        message: Vec<u8>,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Result<(), OutboxFull>> {
        match self.send_now(socket, &message, descriptors)? {
            Sent::Yes => Ok(Ok(())),
            Sent::No => {
                let own = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
                Ok(self.keep(message, own.collect::<io::Result<_>>()?))
            }
        }
    }

    fn send_now(
        &self,
        socket: BorrowedFd<'_>,
        message: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Sent> {
        if !self.waiting.is_empty() {
            return Ok(Sent::No);
        }
        match send(socket, &[IoSlice::new(message)], descriptors) {
            Ok(()) => Ok(Sent::Yes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Sent::No),
            Err(error) => Err(error),
        }
    }

    fn keep(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) -> Result<(), OutboxFull> {
        if self.waiting.len() == OUTBOX_MESSAGES || self.bytes + message.len() > OUTBOX_BYTES {
            return Err(OutboxFull);
        }
        self.bytes += message.len();
        self.waiting.push_back((message, descriptors));
        Ok(())
    }

    /// Sends what the socket has room for.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while let Some((message, descriptors)) = self.waiting.front() {
            match send_owned(socket, message, descriptors) {
                Ok(()) => {
                    self.bytes -= message.len();
                    self.waiting.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn send_owned(socket: BorrowedFd<'_>, message: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    send(socket, &[IoSlice::new(message)], &descriptors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_read_of_a_peer_that_has_not_read_everything() {
        let (host, sandbox) = control_pair().unwrap();
        for sent in [&b"unread"[..], b"unread, too"] {
            send(&host, &[IoSlice::new(sent)], &[]).unwrap();
        }
        for said in [&b"what it did"[..], b"why it ends"] {
            send(&sandbox, &[IoSlice::new(said)], &[]).unwrap();
        }
        drop(sandbox);
        let mut buffer = [0; 64];
        let mut next = || {
            let len = receive(&host, &mut buffer, None).unwrap().len;
            buffer[..len].to_vec()
        };
        assert_eq!([next(), next(), next()], [&b"what it did"[..], b"why it ends", b""]);
    }
}
