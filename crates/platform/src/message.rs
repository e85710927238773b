//! Messages of a socket, with descriptors, in buffers of the per-boot area.
//!
//! A boot command may be long, and is read where it lies. Others arrive while it is in use,
//! so there are [`COUNT`] buffers, and each message has one for itself until it is dropped.
#![allow(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;

use thaw_abi::control::MESSAGE_MAX;
use thaw_abi::layout::BOOT_BASE;

use crate::errno::{Errno, Result};
use crate::host::{HostFd, hostcall, nr};
use crate::vcpu;

/// Messages that can be in use at once: the boot command, the one that follows it, and an
/// answer of the broker.
pub const COUNT: usize = 3;
/// Most descriptors that come with one message.
pub const MAX_FDS: usize = 253;
/// Bytes of the head of a control message (`struct cmsghdr`, cmsg(3)).
const CMSG_HEAD: usize = 16;

/// Where the buffers lie, one behind the other.
const BUFFERS: u64 = BOOT_BASE + 0x10_0000;
/// Bytes from one buffer to the next.
const STRIDE: u64 = 0x4_0000;
/// Where the descriptors lie in a buffer.
const CONTROL: u64 = (MESSAGE_MAX as u64).next_multiple_of(4096);
const _: () = assert!(CONTROL + 4096 <= STRIDE);
/// End of the buffers.
pub(crate) const END: u64 = BUFFERS + COUNT as u64 * STRIDE;

/// What recvmsg(2) fills.
#[repr(C)]
struct Buffer {
    bytes: [u64; MESSAGE_MAX / 8],
    padding: [u8; CONTROL as usize - MESSAGE_MAX],
    control: Control,
}

#[repr(C)]
struct Control {
    /// Bytes, with the head.
    len: u64,
    level: u32,
    kind: u32,
    fds: [i32; MAX_FDS],
}

/// A message that was received.
pub struct Received {
    index: usize,
    len: usize,
    fd_count: usize,
}

impl Received {
    /// Receives a message that is there, or waits for one.
    ///
    /// # Errors
    /// `EAGAIN` if there is none and `nonblocking`, `EPIPE` if there will be none, and
    /// those of recvmsg(2).
    pub fn from(socket: HostFd, nonblocking: bool) -> Result<Self> {
        let mut message = Self::with_free_buffer();
        let (bytes, fds) = receive(socket, message.buffer_mut(), nonblocking)?;
        (message.len, message.fd_count) = (bytes, fds);
        Ok(message)
    }

    /// The bytes, which begin at a multiple of 8.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.buffer().bytes)[..self.len]
    }

    /// The descriptors that came along.
    pub fn fds(&self) -> &[i32] {
        &self.buffer().control.fds[..self.fd_count]
    }

    /// A message without anything in it.
    fn with_free_buffer() -> Self {
        let used = vcpu::messages_used();
        let index = used.load(Relaxed).trailing_ones() as usize;
        assert!(index < COUNT, "all message buffers are in use");
        used.fetch_or(1 << index, Relaxed);
        Self { index, len: 0, fd_count: 0 }
    }

    fn address(&self) -> u64 {
        BUFFERS + self.index as u64 * STRIDE
    }

    fn buffer(&self) -> &Buffer {
        // SAFETY: mapped with the per-boot area; any bytes are a buffer; it is this
        // message's alone, and changed only by those who have borrowed that mutably.
        unsafe { &*(self.address() as *const Buffer) }
    }

    fn buffer_mut(&mut self) -> &mut Buffer {
        // SAFETY: as in `buffer`.
        unsafe { &mut *(self.address() as *mut Buffer) }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        vcpu::messages_used().fetch_and(!(1 << self.index), Relaxed);
    }
}

/// What receiving a message into the next free buffer touches first, as starts and bytes.
pub fn next_buffer() -> [(u64, u64); 2] {
    let index = u64::from(vcpu::messages_used().load(Relaxed).trailing_ones());
    let start = BUFFERS + index * STRIDE;
    [(start, 32 << 10), (start + CONTROL, 4096)]
}

/// recvmsg(2): how many bytes were received, and how many descriptors.
fn receive(socket: HostFd, buffer: &mut Buffer, nonblocking: bool) -> Result<(usize, usize)> {
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
    let vector = [(&raw mut buffer.bytes) as u64, MESSAGE_MAX as u64];
    let mut message = MessageVector {
        name: 0,
        name_len: 0,
        vectors: vector.as_ptr() as u64,
        vector_count: 1,
        control: (&raw mut buffer.control) as u64,
        control_len: size_of::<Control>() as u64,
        flags: 0,
    };
    let flags = MSG_CMSG_CLOEXEC | if nonblocking { MSG_DONTWAIT } else { 0 };
    let args = [socket.0 as u64, &raw mut message as u64, flags, 0, 0, 0];
    let len = loop {
        // SAFETY: the host fills the buffer, which is borrowed mutably, and `message`.
        match unsafe { hostcall(nr::RECVMSG, args) } {
            Ok(0) => return Err(Errno::EPIPE),
            Ok(len) => break len as usize,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    };
    let has_control = message.control_len as usize > CMSG_HEAD;
    let fd_bytes = (buffer.control.len as usize).saturating_sub(CMSG_HEAD);
    let fds = if has_control { (fd_bytes / size_of::<i32>()).min(MAX_FDS) } else { 0 };
    Ok((len.min(MESSAGE_MAX), fds))
}
