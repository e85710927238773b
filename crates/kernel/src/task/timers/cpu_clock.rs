//! Clocks of CPU time: of a process or of a thread.

use alloc::sync::{Arc, Weak};

use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::thread::current_arc;
use crate::task::{Process, Thread, current};

/// Timers on CPU time look at their clock no earlier than this after the last
/// look, in nanoseconds: as often as a kernel with 250 ticks a second.
pub const MIN_WAIT_NS: u64 = 4_000_000;

/// Whose CPU time.
pub enum CpuClock {
    /// Of all threads of a process.
    Process(Weak<Process>),
    /// Of one thread.
    Thread(Weak<Thread>),
}

impl CpuClock {
    /// `CLOCK_PROCESS_CPUTIME_ID`, `CLOCK_THREAD_CPUTIME_ID`, and the ids that
    /// clock_getcpuclockid(3) and pthread_getcpuclockid(3) make; `EINVAL`.
    pub fn from_number(number: i32) -> Result<Self> {
        const PROCESS: i32 = 2;
        const THREAD: i32 = 3;
        // Bits 0 and 1 say which time, 3 being a descriptor's clock; bit 2 says
        // that it is a thread's; the id stands above, inverted.
        const OF_DESCRIPTOR: i32 = 3;
        const OF_THREAD: i32 = 4;
        if number == PROCESS {
            return Ok(Self::Process(Arc::downgrade(&current().process)));
        }
        if number == THREAD {
            return Ok(Self::Thread(Arc::downgrade(&current_arc())));
        }
        if number >= 0 || number & 3 == OF_DESCRIPTOR {
            return Err(Errno::EINVAL);
        }
        let id = !(number >> 3) as u32;
        let own = &current().process;
        if number & OF_THREAD != 0 {
            let thread = if id == 0 { Some(current_arc()) } else { kernel().tasks.thread(id) };
            let thread = thread.filter(|thread| Arc::ptr_eq(&thread.process, own));
            return Ok(Self::Thread(Arc::downgrade(&thread.ok_or(Errno::EINVAL)?)));
        }
        let process = if id == 0 { Some(own.clone()) } else { kernel().tasks.process(id) };
        Ok(Self::Process(Arc::downgrade(&process.ok_or(Errno::EINVAL)?)))
    }

    /// What the clock reads, in nanoseconds; 0 once its owner is gone.
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::Process(process) => process.upgrade().map_or(0, |process| process.cpu_ns()),
            Self::Thread(thread) => thread.upgrade().map_or(0, |thread| thread.cpu_ns()),
        }
    }
}
