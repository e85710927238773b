//! signalfd(2): pending signals that are read.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File};
use crate::io::Sink;
use crate::sync::KernelCell;
use crate::task::current;
use crate::task::signal::{
    SI_TIMER, SIGBUS, SIGCHLD, SIGFPE, SIGILL, SIGSEGV, SIGTRAP, SignalInfo, SignalSet,
    UNBLOCKABLE, pending_set, take_pending,
};
use crate::task::wait::WaitQueue;

const SI_QUEUE: i32 = -1;

/// `struct signalfd_siginfo`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SignalRecord {
    signal: u32,
    errno: i32,
    code: i32,
    pid: u32,
    uid: u32,
    fd: i32,
    timer: u32,
    band: u32,
    overrun: u32,
    trap: u32,
    status: i32,
    int: i32,
    pointer: u64,
    user_time: u64,
    system_time: u64,
    address: u64,
    address_bits: u16,
    pad0: u16,
    syscall: i32,
    call_address: u64,
    arch: u32,
    pad1: [u8; 28],
}

impl SignalRecord {
    /// Picks the fields that a signal of this kind has (signalfd(2), sigaction(2)).
    fn new(info: &SignalInfo) -> Self {
        let mut record = <Self as bytemuck::Zeroable>::zeroed();
        record.signal = info.signal.number();
        record.errno = info.errno;
        record.code = info.code;
        let [first, second, ..] = info.payload;
        match (info.signal, info.code) {
            (SIGILL | SIGTRAP | SIGBUS | SIGFPE | SIGSEGV, 1..) => record.address = first,
            (_, SI_TIMER) => {
                (record.timer, record.overrun) = (first as u32, (first >> 32) as u32);
                (record.pointer, record.int) = (second, second as i32);
            }
            (signal, code) => {
                (record.pid, record.uid) = (first as u32, (first >> 32) as u32);
                if signal == SIGCHLD && code > 0 {
                    record.status = second as i32;
                } else if code == SI_QUEUE {
                    (record.pointer, record.int) = (second, second as i32);
                }
            }
        }
        record
    }
}

/// A signal set behind a descriptor. Like Linux, it looks at the signals of
/// whoever reads it.
pub struct SignalFd {
    mask: KernelCell<SignalSet>,
    /// Woken when a signal arrives at the process.
    arrived: Arc<WaitQueue>,
}

impl SignalFd {
    /// For the signals of `mask`, woken by those of the running process.
    pub fn new(mask: SignalSet) -> Self {
        let arrived = current().process.signals.borrow_mut().arrived.clone();
        Self { mask: KernelCell::new(mask & !UNBLOCKABLE), arrived }
    }

    /// Replaces the set.
    pub fn set_mask(&self, mask: SignalSet) {
        self.mask.set(mask & !UNBLOCKABLE);
        self.arrived.wake_all(Events::IN);
    }
}

impl File for SignalFd {
    fn tells_async(&self) -> bool {
        false
    }

    fn read(&self, sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        let size = size_of::<SignalRecord>();
        if sink.remaining() < size {
            return Err(Errno::EINVAL);
        }
        let wanted = self.mask.get();
        let mut done = 0;
        while sink.remaining() >= size {
            let Some(info) = take_pending(&current(), wanted) else { break };
            if sink.put(bytemuck::bytes_of(&SignalRecord::new(&info)))? < size {
                return Err(Errno::EFAULT);
            }
            done += size;
        }
        if done == 0 { Err(Errno::EAGAIN) } else { Ok(done) }
    }

    fn poll(&self) -> Events {
        if pending_set(&current()) & self.mask.get() != 0 { Events::IN } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.arrived)
    }

    fn details(&self) -> String {
        format!("sigmask:\t{:016x}\n", self.mask.get())
    }

    fn description(&self) -> String {
        "anon_inode:[signalfd]".to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_layout_of_the_abi() {
        assert_eq!(size_of::<SignalRecord>(), 128);
        assert_eq!(core::mem::offset_of!(SignalRecord, pointer), 48);
        assert_eq!(core::mem::offset_of!(SignalRecord, address), 72);
        let mut info = SignalInfo::new(SIGSEGV, 0);
        info.payload[0] = 1000 << 32 | 7;
        let sent = SignalRecord::new(&info);
        assert_eq!((sent.signal, sent.pid, sent.uid), (11, 7, 1000));
        let fault = SignalRecord::new(&SignalInfo::fault(SIGSEGV, 1, 0xdead));
        assert_eq!((fault.address, fault.pid), (0xdead, 0));
    }
}
