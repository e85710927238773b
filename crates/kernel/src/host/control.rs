//! The control socket, from the sandbox's side.
//!
//! While the kernel waits for the answer to a request, other messages may
//! arrive; they are kept and handled by the idle loop.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

use bytemuck::Pod;
use thaw_abi::control::{
    ConnectionClosed, FLAG_SAY_LACKS, LACK_NAME_MAX, Lack, MSG_CONNECTION_CLOSED, MSG_LACKS,
    MSG_RENEWED, MSG_REPLY, MessageHeader,
};
use thaw_abi::layout::CONTROL_FD;

use super::waiting::{WAITING_MAX, WAITING_MIN, Waiting};
use crate::errno::{Errno, Result};
use crate::platform::machine::{
    Clocks, HostFd, HostFiles, Machine, Memory, PollFd, Populate, Processes,
};
use crate::platform::memory::Window;
use crate::platform::message::{self, Received};
use crate::platform::panic;
use crate::sync::{KernelCell, Late};

/// The control socket.
pub const CONTROL: HostFd = HostFd::new(CONTROL_FD);

/// A message of the host.
pub struct Message {
    /// `MSG_*`.
    pub kind: u32,
    /// Number of the request that this answers.
    pub sequence: u64,
    content: Content,
}

/// Where the body of a message lies.
enum Content {
    /// Where it was received: bytes of it, which follow the header.
    Received(Received, usize),
    /// It had to wait.
    Kept { body: Vec<u8>, fds: Vec<i32> },
}

impl Message {
    /// One that had to wait.
    pub fn kept(kept: Kept) -> Self {
        let Kept { kind, sequence, body, fds } = kept;
        Self { kind, sequence, content: Content::Kept { body, fds } }
    }

    /// What follows the header, 8-byte aligned.
    pub fn body(&self) -> &[u8] {
        match &self.content {
            Content::Received(received, len) => {
                &received.bytes()[size_of::<MessageHeader>()..][..*len]
            }
            Content::Kept { body, .. } => body,
        }
    }

    /// Descriptors that came along.
    pub fn fds(&self) -> &[i32] {
        match &self.content {
            Content::Received(received, _) => received.fds(),
            Content::Kept { fds, .. } => fds,
        }
    }

    /// The fixed part of the body, and what follows it.
    pub fn split<T: Pod>(&self) -> Result<(&T, &[u8])> {
        split(self.body())
    }
}

/// Splits a plain value off the beginning of aligned bytes.
pub fn split<T: Pod>(bytes: &[u8]) -> Result<(&T, &[u8])> {
    if bytes.len() < size_of::<T>() {
        return Err(Errno::EIO);
    }
    let (head, tail) = bytes.split_at(size_of::<T>());
    Ok((bytemuck::try_from_bytes(head).map_err(|_| Errno::EIO)?, tail))
}

/// Splits plain values off the beginning of aligned bytes; `EINVAL` if there are not so many.
pub fn array<T: bytemuck::Pod>(bytes: &[u8], count: u32) -> Result<(&[T], &[u8])> {
    let len = (count as usize)
        .checked_mul(size_of::<T>())
        .filter(|&len| len <= bytes.len())
        .ok_or(Errno::EINVAL)?;
    let (head, tail) = bytes.split_at(len);
    Ok((bytemuck::try_cast_slice(head).map_err(|_| Errno::EINVAL)?, tail))
}

/// A message that arrived while another was expected.
pub struct Kept {
    /// `MSG_*`.
    pub kind: u32,
    /// Number of the request that this answers.
    pub sequence: u64,
    /// What follows the header.
    pub body: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<i32>,
}

/// How long a message that is about to come is looked for without sleep, in
/// nanoseconds: to be woken on an idle processor takes 40 µs on a virtual machine.
const EAGERNESS_NS: u64 = 100_000;
/// The same as long as there is something to do meanwhile.
const WORK_NS: u64 = 200_000;

/// Most bytes of a message to the host, its header included.
pub const REQUEST_MAX: usize = 8192;

/// Messages kept for the idle loop. Empty whenever the sandbox is frozen.
static KEPT: KernelCell<Option<VecDeque<Kept>>> = KernelCell::new(None);
/// Knows what they mean.
static HANDLER: Late<fn(&Kept)> = Late::empty();

/// Names whoever knows what the host's messages mean. To be called once, at start.
pub fn register_handler(handler: fn(&Kept)) {
    HANDLER.set(handler);
}

/// Receives one message. `None` if there is none and `nonblocking`.
fn receive(nonblocking: bool) -> Option<Message> {
    match receive_from(CONTROL, nonblocking) {
        Ok(message) => Some(message),
        Err(Errno::EAGAIN) if nonblocking => None,
        Err(_) => hung_up(),
    }
}

/// Receives one message of a socket on which they are as on the control socket.
///
/// # Errors
/// As [`Received::from`], and `EIO`: it is none.
pub fn receive_from(socket: HostFd, nonblocking: bool) -> Result<Message> {
    let received = Received::from(socket, nonblocking)?;
    let (&header, body) = split::<MessageHeader>(received.bytes())?;
    let len = (header.len as usize).min(body.len());
    let (kind, sequence) = (header.kind, header.sequence);
    Ok(Message { kind, sequence, content: Content::Received(received, len) })
}

/// The host is gone: nobody is left to run for.
fn hung_up() -> ! {
    Machine::exit(crate::platform::panic::PANIC_EXIT_CODE)
}

/// Waits for the boot command.
pub fn receive_command() -> Message {
    loop {
        if let Some(message) = receive(false) {
            return message;
        }
    }
}

/// Touches what the second command will be received into: whoever sends it is
/// in a hurry.
pub fn prepare_for_second_command() {
    for (start, _) in message::next_buffer() {
        let _ = Machine::populate(start, 4096, Populate::Write);
    }
}

/// Waits for what follows a boot command that is still in use.
pub fn receive_second_command() -> Message {
    loop {
        if let Some(message) = second_command(false) {
            return message;
        }
    }
}

/// Waits for it where it is about to come: sleeps only if it stays away for long, and
/// has `work` done meanwhile, a little at each call, as long as that says that there
/// is any; but not for ever, since who sends it may wait for this very processor.
pub fn expect_second_command(mut work: impl FnMut() -> bool) -> Message {
    let begun = Machine::monotonic_ns();
    loop {
        if let Some(message) = second_command(true) {
            return message;
        }
        let patience = if work() { WORK_NS } else { EAGERNESS_NS };
        if Machine::monotonic_ns() - begun > patience {
            return receive_second_command();
        }
    }
}

/// The second command; `None` if it is not there and `nonblocking`. It may have come
/// while an answer of the broker was waited for.
fn second_command(nonblocking: bool) -> Option<Message> {
    if let Some(kept) = KEPT.borrow_mut().as_mut().and_then(VecDeque::pop_front) {
        return Some(Message::kept(kept));
    }
    receive(nonblocking)
}

/// Has everything handled that the host has sent and nobody waits for in particular.
pub fn handle_messages() {
    while let Some(message) = next_message() {
        (*HANDLER)(&message);
    }
}

fn next_message() -> Option<Kept> {
    let kept = KEPT.borrow_mut().as_mut().and_then(VecDeque::pop_front);
    kept.or_else(|| receive(true).map(|message| keep(&message)))
}

/// Throws away a message that is there, in a sandbox that is about to end; what kind it was.
pub fn discard_message() -> Option<u32> {
    next_message().map(|message| message.kind)
}

/// A message that is there, to be looked at before anybody else sees it: without the heap.
pub fn look_for_message() -> Option<Message> {
    receive(true)
}

/// Leaves a message to be handled by the idle loop.
pub fn handle_later(message: &Message) {
    KEPT.borrow_mut().get_or_insert_default().push_back(keep(message));
}

/// Whether a message was kept that nobody has handled. The host's socket says
/// nothing about those, so look here before waiting on it.
pub fn has_kept() -> bool {
    KEPT.borrow_mut().as_ref().is_some_and(|kept| !kept.is_empty())
}

fn keep(message: &Message) -> Kept {
    let (body, fds) = (message.body().to_vec(), message.fds().to_vec());
    Kept { kind: message.kind, sequence: message.sequence, body, fds }
}

/// Waits for the answer to one of some requests. `None`: whoever was asked has ended, and
/// somebody else is to be asked.
pub fn receive_reply(sequences: Range<u64>) -> Option<Message> {
    loop {
        let Some(message) = receive(false) else { continue };
        if message.kind == MSG_REPLY && sequences.contains(&message.sequence) {
            return Some(message);
        }
        let kept = keep(&message);
        // Others may have asked, too, who do not wait here.
        KEPT.borrow_mut().get_or_insert_default().push_back(kept);
        if message.kind == MSG_RENEWED {
            return None;
        }
    }
}

/// Calls `told` and waits for a message of one kind, while the host reads the memory of the sandbox:
/// it is as `told` has found it until that message is there. Others that come meanwhile are kept
/// then.
pub fn wait_untouched(kind: u32, told: impl FnOnce()) {
    // A host that promises no more memory than it has may refuse so much.
    let room = Window::anonymous(WAITING_MAX).or_else(|_| Window::anonymous(WAITING_MIN));
    let Ok(mut room) = room else {
        panic::die_with("there is no memory for messages that come during a freeze")
    };
    let mut waiting = Waiting::new(room.bytes_mut());
    told();
    loop {
        let Some(message) = receive(false) else { continue };
        if message.kind == kind {
            break;
        }
        if !waiting.add(&message) {
            panic::die_with("more messages have come during a freeze than can wait")
        }
    }
    KEPT.borrow_mut().get_or_insert_default().extend(waiting.into_kept());
}

/// Sends a message, waiting while the host is slow.
pub fn send(kind: u32, sequence: u64, body: &[u8], tail: &[u8]) {
    if send_to(CONTROL, kind, sequence, [body, tail]).is_err() {
        hung_up();
    }
}

/// Tells the host, if `flags` say that it listens, what the program has asked for in vain: a `LACK_*`
/// with its bytes, or a program of that name.
pub fn say_lack(flags: u32, kind: u32, bytes: u64, name: &[u8]) {
    if flags & FLAG_SAY_LACKS != 0 {
        let lack = Lack { kind, reserved: 0, bytes };
        send(MSG_LACKS, 0, bytemuck::bytes_of(&lack), &name[..name.len().min(LACK_NAME_MAX)]);
    }
}

/// Sends a message over a socket on which they are as on the control socket, waiting while there is
/// no room.
///
/// # Errors
/// Nobody will read it.
#[inline(never)]
pub fn send_to(socket: HostFd, kind: u32, sequence: u64, parts: [&[u8]; 2]) -> Result<()> {
    /// Bytes of a short message.
    const SHORT: usize = 256;
    if size_of::<MessageHeader>() + parts[0].len() + parts[1].len() <= SHORT {
        send_through(&mut [0; SHORT], socket, kind, sequence, parts)
    } else {
        send_long(socket, kind, sequence, parts)
    }
}

/// Apart, since most messages are short, and the frame of this function would be
/// pages of stack that every copy writes.
#[inline(never)]
fn send_long(socket: HostFd, kind: u32, sequence: u64, parts: [&[u8]; 2]) -> Result<()> {
    send_through(&mut [0; REQUEST_MAX], socket, kind, sequence, parts)
}

fn send_through(
    packet: &mut [u8],
    socket: HostFd,
    kind: u32,
    sequence: u64,
    parts: [&[u8]; 2],
) -> Result<()> {
    let [body, tail] = parts;
    assert!(size_of::<MessageHeader>() + body.len() + tail.len() <= packet.len(), "too long");
    let header = MessageHeader { kind, len: (body.len() + tail.len()) as u32, sequence };
    let mut at = 0;
    for part in [bytemuck::bytes_of(&header), body, tail] {
        packet[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    loop {
        match Machine::send(socket, packet[..at].as_ref().into()) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN) => {
                const POLLOUT: i16 = 4;
                let _ = Machine::poll(
                    &mut [PollFd { fd: socket.0, events: POLLOUT, revents: 0 }],
                    None,
                );
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Tells the host that the guest has closed a connection.
pub fn connection_closed(id: u64) {
    send(MSG_CONNECTION_CLOSED, 0, bytemuck::bytes_of(&ConnectionClosed { id }), &[]);
}
