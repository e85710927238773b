//! Messages of a socket, with descriptors, in buffers of the per-boot area.
//!
//! A boot command may be long, and is read where it lies. Others arrive while it is in use,
//! so there are [`COUNT`] buffers, and each message has one for itself until it is dropped.
#![allow(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;

use thaw_abi::control::MESSAGE_MAX;
use thaw_abi::layout::BOOT_BASE;

use crate::boot_area::of_process;
use crate::errno::Result;
use crate::machine::{FdBuffer, HostFd, HostFiles, Machine, Memory};
use crate::memory::KernelRange;

/// Messages that can be in use at once: the boot command, the one that follows it, and an
/// answer of the broker.
pub const COUNT: usize = 3;

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
    control: FdBuffer,
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
        let Buffer { bytes, control, .. } = message.buffer_mut();
        let arrived = Machine::receive(socket, bytes, control, nonblocking)?;
        (message.len, message.fd_count) = (arrived.bytes, arrived.fds);
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
        let used = &of_process().messages_used;
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
        of_process().messages_used.fetch_and(!(1 << self.index), Relaxed);
    }
}

/// Gives back the memory of the buffers, if none is in use.
pub fn discard_buffers() {
    if of_process().messages_used.load(Relaxed) == 0 {
        // SAFETY: the area is that of the buffers, and nobody uses one.
        let buffers = unsafe { KernelRange::new(BUFFERS, END - BUFFERS) };
        // Memory that stays is used by the next message.
        let _ = Machine::discard(buffers);
    }
}

/// What receiving a message into the next free buffer touches first, as starts and bytes.
pub fn next_buffer() -> [(u64, u64); 2] {
    let index = u64::from(of_process().messages_used.load(Relaxed).trailing_ones());
    let start = BUFFERS + index * STRIDE;
    [(start, 32 << 10), (start + CONTROL, 4096)]
}
