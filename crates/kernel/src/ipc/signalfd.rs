//! signalfd(2): pending signals that are read.

use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::any::Any;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::anonymous_stat;
use crate::fs::fd_table;
use crate::fs::file::{Events, File, OpenFile, OpenFlags, Stat};
use crate::io::{Sink, Source};
use crate::platform::user::UserAddress;
use crate::sync::KernelCell;
use crate::task::current;
use crate::task::signal::{SignalInfo, SignalSet, pending_set, take_pending};
use crate::task::wait::WaitQueue;

/// `SIGKILL` and `SIGSTOP`, which cannot be read.
const NEVER: SignalSet = 1 << (9 - 1) | 1 << (19 - 1);

const SI_QUEUE: i32 = -1;
const SI_TIMER: i32 = -2;
const SIGCHLD: i32 = 17;

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
        record.signal = info.number();
        record.errno = info.errno;
        record.code = info.code;
        let [first, second, ..] = info.payload;
        match (info.signal, info.code) {
            // Faults: SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV.
            (4 | 5 | 7 | 8 | 11, 1..) => record.address = first,
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

impl File for SignalFd {
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

    fn write(&self, _source: &mut Source<'_>, _offset: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }

    fn poll(&self) -> Events {
        if pending_set(&current()) & self.mask.get() != 0 { Events::IN } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.arrived)
    }

    fn stat(&self) -> Result<Stat> {
        Ok(anonymous_stat())
    }

    fn description(&self) -> String {
        "anon_inode:[signalfd]".to_string()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// signalfd(2) without flags.
pub fn signalfd(fd: Fd, mask: UserAddress, size: usize) -> Result<u64> {
    open(fd, mask, size, OpenFlags::empty())
}

/// signalfd4: signalfd(2) with flags.
pub fn signalfd4(fd: Fd, mask: UserAddress, size: usize, Flags(flags): Flags) -> Result<u64> {
    open(fd, mask, size, OpenFlags::from_bits_retain(flags))
}

fn open(fd: Fd, mask: UserAddress, size: usize, flags: OpenFlags) -> Result<u64> {
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK).contains(flags) || size != size_of::<SignalSet>()
    {
        return Err(Errno::EINVAL);
    }
    let mask = mask.read::<SignalSet>()? & !NEVER;
    if fd.0 != -1 {
        let open = fd.file()?;
        let file = open.downcast::<SignalFd>().ok_or(Errno::EINVAL)?;
        file.mask.set(mask);
        file.arrived.wake_all(Events::IN);
        return Ok(fd.0 as u64);
    }
    let arrived = current().process.signals.borrow_mut().arrived.clone();
    let file = Arc::new(SignalFd { mask: KernelCell::new(mask), arrived });
    let status = OpenFlags::RDWR | (flags & OpenFlags::NONBLOCK);
    fd_table::install(OpenFile::new(file, status, None), flags).map(|fd| fd as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_layout_of_the_abi() {
        assert_eq!(size_of::<SignalRecord>(), 128);
        assert_eq!(core::mem::offset_of!(SignalRecord, pointer), 48);
        assert_eq!(core::mem::offset_of!(SignalRecord, address), 72);
        let sent = SignalRecord::new(&SignalInfo::from_process(10, 0, 7, 1000));
        assert_eq!((sent.signal, sent.pid, sent.uid), (10, 7, 1000));
        let fault = SignalRecord::new(&SignalInfo::fault(11, 1, 0xdead));
        assert_eq!((fault.address, fault.pid), (0xdead, 0));
    }
}
