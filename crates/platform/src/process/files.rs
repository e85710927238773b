//! Descriptors of the host.
#![allow(unsafe_code)]

use super::calls::{hostcall, nr};
use super::{HostProcesses, shortage};
use crate::errno::{Errno, Result};
use crate::io::{IoSlice, IoSliceMut};
use crate::kernel_lock;
use crate::machine::{Arrived, FdBuffer, HostFd, HostFiles, MAX_FDS, Peek, PollFd};

/// `MSG_DONTWAIT | MSG_NOSIGNAL`, with which all sockets are used.
const SOCKET_FLAGS: u64 = 0x40 | 0x4000;
/// Attempts at sending a message: nobody else could say what it says.
const SEND_ATTEMPTS: u32 = 2000;
/// Bytes of the head of a control message (`struct cmsghdr`, cmsg(3)).
const CMSG_HEAD: usize = 16;

impl HostFiles for HostProcesses {
    fn read(fd: HostFd, to: IoSliceMut<'_>) -> Result<usize> {
        let (at, len) = (to.address(), to.len() as u64);
        // SAFETY: `to` may be written to, and the host checks guest memory.
        unsafe { hostcall(nr::READ, [fd.0 as u64, at, len, 0, 0, 0]) }.map(|n| n as usize)
    }

    fn write(fd: HostFd, from: IoSlice<'_>) -> Result<usize> {
        let (at, len) = (from.address(), from.len() as u64);
        // SAFETY: the host only reads, and checks guest memory.
        unsafe { hostcall(nr::WRITE, [fd.0 as u64, at, len, 0, 0, 0]) }.map(|n| n as usize)
    }

    fn pread(fd: HostFd, to: IoSliceMut<'_>, offset: u64) -> Result<usize> {
        let (at, len) = (to.address(), to.len() as u64);
        // SAFETY: as in `read`.
        unsafe { hostcall(nr::PREAD64, [fd.0 as u64, at, len, offset, 0, 0]) }.map(|n| n as usize)
    }

    fn recv(fd: HostFd, to: IoSliceMut<'_>, peek: Peek) -> Result<usize> {
        let flags = SOCKET_FLAGS | if peek == Peek::Yes { 2 } else { 0 };
        let (at, len) = (to.address(), to.len() as u64);
        // SAFETY: as in `read`.
        unsafe { hostcall(nr::RECVFROM, [fd.0 as u64, at, len, flags, 0, 0]) }.map(|n| n as usize)
    }

    fn recv_datagram(fd: HostFd, buffer: &mut [u8], peek: Peek) -> Result<usize> {
        const MSG_TRUNC: u64 = 0x20;
        let flags = SOCKET_FLAGS | MSG_TRUNC | if peek == Peek::Yes { 2 } else { 0 };
        let (at, len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
        // SAFETY: the host writes into `buffer` only.
        unsafe { hostcall(nr::RECVFROM, [fd.0 as u64, at, len, flags, 0, 0]) }.map(|n| n as usize)
    }

    fn receive(
        socket: HostFd,
        bytes: &mut [u64],
        fds: &mut FdBuffer,
        nonblocking: bool,
    ) -> Result<Arrived> {
        /// `struct msghdr`.
        #[repr(C)]
        struct MessageVector {
            name: u64,
            name_len: u64,
            vectors: u64,
            vector_count: u64,
            control: u64,
            control_len: u64,
            flags: u64,
        }
        const MSG_DONTWAIT: u64 = 0x40;
        const MSG_CMSG_CLOEXEC: u64 = 0x4000_0000;
        if kernel_lock::is_enabled() {
            touch_what_is_received(socket, bytes, fds, nonblocking)?;
        }
        let vector = [bytes.as_mut_ptr() as u64, size_of_val(bytes) as u64];
        let mut message = MessageVector {
            name: 0,
            name_len: 0,
            vectors: vector.as_ptr() as u64,
            vector_count: 1,
            control: core::ptr::from_mut(fds) as u64,
            control_len: size_of::<FdBuffer>() as u64,
            flags: 0,
        };
        let flags = MSG_CMSG_CLOEXEC | if nonblocking { MSG_DONTWAIT } else { 0 };
        let args = [socket.0 as u64, &raw mut message as u64, flags, 0, 0, 0];
        let len = loop {
            // SAFETY: the host fills what is borrowed mutably, and `message`.
            match unsafe { hostcall(nr::RECVMSG, args) } {
                Ok(0) => return Err(Errno::EPIPE),
                Ok(len) => break len as usize,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        };
        let has_control = message.control_len as usize > CMSG_HEAD;
        let fd_bytes = (fds.len as usize).saturating_sub(CMSG_HEAD);
        let fd_count = if has_control { (fd_bytes / size_of::<i32>()).min(MAX_FDS) } else { 0 };
        Ok(Arrived { bytes: len.min(size_of_val(bytes)), fds: fd_count })
    }

    fn send(fd: HostFd, from: IoSlice<'_>) -> Result<usize> {
        let (at, len) = (from.address(), from.len() as u64);
        let args = [fd.0 as u64, at, len, SOCKET_FLAGS, 0, 0];
        // SAFETY: as in `write`.
        shortage::retry(SEND_ATTEMPTS, || unsafe { hostcall(nr::SENDTO, args) }).map(|n| n as usize)
    }

    fn shutdown(fd: HostFd, how: u32) -> Result<()> {
        // SAFETY: touches no memory.
        unsafe { hostcall(nr::SHUTDOWN, [fd.0 as u64, how as u64, 0, 0, 0, 0]) }.map(drop)
    }

    fn poll(fds: &mut [PollFd], timeout_ns: Option<u64>) -> Result<usize> {
        let timespec = timeout_ns.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
        let at = timespec.as_ref().map_or(0, |t| t.as_ptr() as u64);
        // SAFETY: `fds` and `timespec` are valid for the call.
        unsafe { hostcall(nr::PPOLL, [fds.as_mut_ptr() as u64, fds.len() as u64, at, 0, 8, 0]) }
            .map(|n| n as usize)
    }

    fn duplicate_to(fd: HostFd, number: HostFd) -> Result<()> {
        // SAFETY: touches no memory; the caller owns both descriptors.
        unsafe { hostcall(nr::DUP2, [fd.0 as u64, number.0 as u64, 0, 0, 0, 0]) }.map(drop)
    }

    fn close(fd: HostFd) {
        // SAFETY: touches no memory. An error leaves nothing to do.
        let _ = unsafe { hostcall(nr::CLOSE, [fd.0 as u64, 0, 0, 0, 0, 0]) };
    }
}

/// Touches the memory that the next message will fill. Where the host has none left for a sandbox of
/// several processes, a page fault waits until one of them has been ended, but a host call fails, and the
/// message is lost.
fn touch_what_is_received(
    socket: HostFd,
    bytes: &mut [u64],
    fds: &mut FdBuffer,
    nonblocking: bool,
) -> Result<()> {
    const MSG_PEEK: u64 = 0x2;
    const MSG_TRUNC: u64 = 0x20;
    const MSG_NOSIGNAL: u64 = 0x4000;
    let flags = MSG_PEEK | MSG_TRUNC | if nonblocking { SOCKET_FLAGS } else { MSG_NOSIGNAL };
    let len = loop {
        // SAFETY: nothing is stored.
        match unsafe { hostcall(nr::RECVFROM, [socket.0 as u64, 0, 0, flags, 0, 0]) } {
            Ok(len) => break len as usize,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    };
    const WORDS_IN_PAGE: usize = 4096 / size_of::<u64>();
    let words = len.div_ceil(size_of::<u64>()).min(bytes.len());
    for word in bytes[..words].iter_mut().step_by(WORDS_IN_PAGE) {
        touch(word);
    }
    bytes[..words].last_mut().into_iter().for_each(touch);
    touch(&mut fds.len);
    Ok(())
}

/// Writes what is there already.
fn touch<T: Copy>(place: &mut T) {
    let place = core::ptr::from_mut(place);
    // SAFETY: a reference is valid for reads and writes.
    unsafe { place.write_volatile(place.read_volatile()) };
}
