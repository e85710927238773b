//! System calls on sockets that carry data (send(2), recv(2)).

use alloc::sync::Arc;

use crate::args::{Fd, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFlags;
use crate::io::{Sink, Source};
use crate::net::address::{AF_UNIX, SocketAddress};
use crate::net::message::{ControlWriter, MessageHeader, read_control};
use crate::net::options;
use crate::net::socket::{
    Blocking, MessageFlags, Outgoing, PeerCredentials, Protocol, Received, SocketType,
};
use crate::net::tcp::IPPROTO_TCP;
use crate::platform::user::UserAddress;
use crate::syscall::sockets::{SocketFd, connect_to};
use crate::task::signal;
use crate::time::{Timeout, Timespec};

/// Most messages in one call (sendmmsg(2)).
const MESSAGES_MAX: u32 = 1024;

/// `struct mmsghdr`.
#[repr(C)]
pub struct MultiMessage {
    header: MessageHeader,
    len: u32,
}

impl MultiMessage {
    /// Where the length of what was transferred goes.
    const LEN_AT: u64 = core::mem::offset_of!(Self, len) as u64;
}

/// Runs `attempt`, waiting in between unless the call or the descriptor forbids it.
fn maybe_wait<T>(
    socket: &SocketFd,
    flags: MessageFlags,
    timeout_ns: Option<u64>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    if flags.contains(MessageFlags::DONTWAIT) {
        attempt()
    } else {
        socket.open.blocking(timeout_ns, attempt)
    }
}

/// Sends one message. A blocking stream takes everything before this returns.
fn send(socket: &SocketFd, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
    let protocol: &Arc<dyn Protocol> = socket.protocol()?;
    let common = protocol.common();
    let timeout = common.options.borrow_mut().send_timeout_ns;
    let flags = message.flags;
    if flags.contains(MessageFlags::FASTOPEN) && common.protocol == IPPROTO_TCP {
        // tcp(7): the data do not go with the first packet, since there are no packets.
        let missing = if protocol.peer_address().is_ok() { Errno::EISCONN } else { Errno::EINVAL };
        let to = message.to.take().ok_or(missing)?;
        let may_block = !flags.contains(MessageFlags::DONTWAIT);
        connect_to(socket, &to, if may_block { socket.blocking() } else { Blocking::No })?;
    }
    message.sender = common.sender();
    let stream = common.kind == SocketType::Stream;
    let mut done = 0;
    loop {
        match maybe_wait(socket, flags, timeout, || protocol.send(source, message)) {
            Ok(count) => {
                done += count;
                let nonblocking = flags.contains(MessageFlags::DONTWAIT)
                    || socket.open.flags().contains(OpenFlags::NONBLOCK);
                if !stream || source.remaining() == 0 || nonblocking || count == 0 {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(Errno::EPIPE) if common.kind != SocketType::Datagram => {
                if !flags.contains(MessageFlags::NOSIGNAL) {
                    signal::send_sigpipe();
                }
                return Err(Errno::EPIPE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Receives one message, or for a stream with `MSG_WAITALL` a full buffer.
fn receive(socket: &SocketFd, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
    let protocol = socket.protocol()?;
    let common = protocol.common();
    if flags.contains(MessageFlags::ERRQUEUE) {
        return Err(Errno::EAGAIN);
    }
    let nonblocking = socket.open.flags().contains(OpenFlags::NONBLOCK);
    let flags = if nonblocking { flags | MessageFlags::DONTWAIT } else { flags };
    let timeout = common.options.borrow_mut().receive_timeout_ns;
    let stream = common.kind == SocketType::Stream;
    if stream && sink.remaining() == 0 {
        return Ok(Received::default());
    }
    let mut received = maybe_wait(socket, flags, timeout, || protocol.receive(sink, flags))?;
    let whole =
        stream && flags.contains(MessageFlags::WAITALL) && !flags.contains(MessageFlags::PEEK);
    while whole
        && received.bytes > 0
        && sink.remaining() > 0
        && received.ancillary.is_empty()
        && protocol.is_at_urgent() != Ok(true)
    {
        match maybe_wait(socket, flags, timeout, || protocol.receive(sink, flags)) {
            Ok(more) if more.bytes > 0 => {
                received.bytes += more.bytes;
                received.length += more.bytes;
                received.ancillary = more.ancillary;
            }
            _ => break,
        }
    }
    Ok(received)
}

/// What a receive returns: with `MSG_TRUNC`, the length that the datagram had.
fn count(received: &Received, flags: MessageFlags) -> usize {
    if flags.contains(MessageFlags::TRUNC) { received.length } else { received.bytes }
}

fn flags(raw: u32) -> MessageFlags {
    MessageFlags::from_bits_retain(raw)
}

/// sendto(2), and send(2) of the C library.
pub fn sendto(
    fd: Fd,
    buffer: UserAddress,
    len: usize,
    Flags(bits): Flags,
    address: UserPtr<u8>,
    address_len: u32,
) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    let mut source = Source::user(buffer, len)?;
    let mut message = Outgoing { flags: flags(bits), ..Outgoing::default() };
    if !address.is_null() {
        message.to = Some(SocketAddress::from_user(address, address_len as usize)?);
    }
    send(&socket, &mut source, &mut message)
}

/// recvfrom(2), and recv(2) of the C library.
pub fn recvfrom(
    fd: Fd,
    buffer: UserAddress,
    len: usize,
    Flags(bits): Flags,
    address: UserPtr<u8>,
    address_len: UserPtr<i32>,
) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    let mut sink = Sink::user(buffer, len)?;
    let flags = flags(bits);
    let received = receive(&socket, &mut sink, flags)?;
    match &received.from {
        Some(from) => from.to_user(address, address_len)?,
        None => SocketAddress::none_to_user(address, address_len)?,
    }
    Ok(count(&received, flags))
}

fn send_message(socket: &SocketFd, at: UserAddress, flags: MessageFlags) -> Result<usize> {
    let header: MessageHeader = at.read()?;
    let count = usize::try_from(header.vector_count).map_err(|_| Errno::EMSGSIZE)?;
    if count > crate::io::IOV_MAX {
        return Err(Errno::EMSGSIZE);
    }
    let mut source = Source::user_vectors(UserAddress(header.vectors), count)?;
    let mut message = Outgoing { flags, ..Outgoing::default() };
    if header.name != 0 && header.name_len > 0 {
        message.to = Some(SocketAddress::from_user(
            UserPtr::new(UserAddress(header.name)),
            header.name_len as usize,
        )?);
    }
    let family = socket.protocol()?.common().family;
    read_control(UserAddress(header.control), header.control_len, family, &mut message)?;
    send(socket, &mut source, &mut message)
}

/// sendmsg(2).
pub fn sendmsg(fd: Fd, message: UserAddress, Flags(bits): Flags) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    send_message(&socket, message, flags(bits))
}

fn receive_message(socket: &SocketFd, at: UserAddress, flags: MessageFlags) -> Result<usize> {
    let header: MessageHeader = at.read()?;
    let vector_count = usize::try_from(header.vector_count).map_err(|_| Errno::EMSGSIZE)?;
    if vector_count > crate::io::IOV_MAX {
        return Err(Errno::EMSGSIZE);
    }
    if header.name != 0 && (header.name_len as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let mut sink = Sink::user_vectors(UserAddress(header.vectors), vector_count)?;
    let mut received = receive(socket, &mut sink, flags)?;

    let mut control = ControlWriter::new(UserAddress(header.control), header.control_len);
    let common = socket.protocol()?.common();
    if common.family == AF_UNIX {
        if common.options.borrow_mut().flag(options::PASSCRED) {
            let credentials = received.ancillary.credentials.unwrap_or(PeerCredentials::UNKNOWN);
            control.put_credentials(credentials.shown())?;
        }
        let close = flags.contains(MessageFlags::CMSG_CLOEXEC);
        let file_flags = if close { OpenFlags::CLOEXEC } else { OpenFlags::empty() };
        control.put_files(received.ancillary.files.take(), file_flags);
    }
    if let Some(arrival) = received.arrival {
        arrival.put(common, &mut control)?;
    }
    if header.name != 0 {
        let len_at = UserPtr::new(at.offset(MessageHeader::NAME_LEN_AT));
        match &received.from {
            Some(from) => from.to_user(UserPtr::new(UserAddress(header.name)), len_at)?,
            None => len_at.write(&0)?,
        }
    }
    let mut out = received.flags;
    if control.cut {
        out |= MessageFlags::CTRUNC;
    }
    out |= flags & MessageFlags::CMSG_CLOEXEC;
    at.offset(MessageHeader::CONTROL_LEN_AT).write(&(control.written() as u64))?;
    at.offset(MessageHeader::FLAGS_AT).write(&out.bits())?;
    Ok(count(&received, flags))
}

/// recvmsg(2).
pub fn recvmsg(fd: Fd, message: UserAddress, Flags(bits): Flags) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    receive_message(&socket, message, flags(bits))
}

/// sendmmsg(2): stops at the first error, which is reported only if nothing
/// was sent.
pub fn sendmmsg(
    fd: Fd,
    messages: UserPtr<MultiMessage>,
    count: u32,
    Flags(bits): Flags,
) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    several(messages, count, |message| send_message(&socket, message, flags(bits)), || false)
}

/// recvmmsg(2). As on Linux, the time-out is looked at after each message only.
pub fn recvmmsg(
    fd: Fd,
    messages: UserPtr<MultiMessage>,
    count: u32,
    Flags(bits): Flags,
    timeout: UserPtr<Timespec>,
) -> Result<usize> {
    let socket = SocketFd::get(fd)?;
    let timeout = Timeout::from_timespec(timeout)?;
    let mut flags = flags(bits);
    let receive = |message| {
        let received = receive_message(&socket, message, flags - MessageFlags::WAITFORONE);
        if flags.contains(MessageFlags::WAITFORONE) {
            flags |= MessageFlags::DONTWAIT;
        }
        received
    };
    several(messages, count, receive, || timeout.left_ns() == Some(0))
}

/// Transfers messages one by one, and notes the length of each; how many that were. The error of
/// the first counts, also that of noting its length.
fn several(
    messages: UserPtr<MultiMessage>,
    count: u32,
    mut transfer: impl FnMut(UserAddress) -> Result<usize>,
    mut is_over: impl FnMut() -> bool,
) -> Result<usize> {
    let mut done = 0;
    for index in 0..count.min(MESSAGES_MAX) as usize {
        let at = messages.at(index).0;
        let outcome =
            transfer(at).and_then(|len| at.offset(MultiMessage::LEN_AT).write(&(len as u32)));
        match outcome {
            Ok(()) => done += 1,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
        if is_over() {
            break;
        }
    }
    Ok(done)
}
