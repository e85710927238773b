//! poll(2) and ppoll(2), and what they share with select(2).

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::epoll::under_mask;
use crate::args::{Fd, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, OpenFile};
use crate::task::process::RLIMIT_NOFILE;
use crate::task::signal::{self, SignalSet};
use crate::task::thread::current;
use crate::task::wait::{WaitQueue, wait_until};
use crate::time::{Timeout, Timespec};

/// `struct pollfd` (poll(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PollRequest {
    /// Descriptor; a negative one is skipped.
    pub fd: i32,
    /// Events asked for.
    pub events: i16,
    /// Events found.
    pub revents: i16,
}

/// Requests that need no memory from the heap.
const INLINE: usize = 8;

/// Waits until `scan` counts something or time is up, and returns the count.
/// `scan` is called with a list to which it adds the files that it looked at
/// when that list is there; it may be called often.
///
/// `ERESTARTNOHAND` when a signal arrives (signal(7)).
pub fn wait_for_any(
    timeout: Timeout,
    mut scan: impl FnMut(Option<&mut Vec<Arc<OpenFile>>>) -> Result<usize>,
) -> Result<usize> {
    let first = scan(None)?;
    if first > 0 {
        crate::task::host_poll::note_busy();
        return Ok(first);
    }
    if timeout == Timeout::Zero {
        crate::task::host_poll::check();
        return match scan(None)? {
            // As on Linux, also for a caller that does not wait.
            0 if signal::is_pending(&current()) => Err(Errno::ERESTARTNOHAND),
            count => Ok(count),
        };
    }
    let mut files = Vec::new();
    let count = scan(Some(&mut files))?;
    if count > 0 {
        return Ok(count);
    }
    let queues: Vec<&WaitQueue> = files.iter().filter_map(|file| file.file.wait_queue()).collect();
    let outcome = wait_until(&queues, timeout.deadline(), || match scan(None) {
        Ok(0) => None,
        outcome => Some(outcome),
    });
    match outcome {
        Err(Errno::ETIMEDOUT) => Ok(0),
        Err(Errno::ERESTARTSYS) => Err(Errno::ERESTARTNOHAND),
        outcome => outcome,
    }
}

/// Looks at every request once; returns how many have something to report.
fn scan(requests: &mut [PollRequest], mut files: Option<&mut Vec<Arc<OpenFile>>>) -> usize {
    let mut count = 0;
    for request in requests {
        request.revents = 0;
        if request.fd < 0 {
            continue;
        }
        let found = match Fd(request.fd).file() {
            Ok(file) => {
                let asked = Events::from_bits_truncate(request.events as u16 as u32);
                let found = file.file.poll() & (asked | Events::ERR | Events::HUP);
                if let Some(files) = &mut files {
                    files.push(file);
                }
                found
            }
            Err(_) => Events::NVAL,
        };
        request.revents = found.bits() as i16;
        count += !found.is_empty() as usize;
    }
    count
}

/// poll(2).
pub fn poll(requests: UserPtr<PollRequest>, count: u32, timeout_ms: i32) -> Result<usize> {
    poll_all(requests, count as usize, Timeout::from_ms(timeout_ms))
}

/// ppoll(2); like the system call, and unlike the library function, it reports
/// the time left.
pub fn ppoll(
    requests: UserPtr<PollRequest>,
    count: u32,
    timeout_at: UserPtr<Timespec>,
    mask: UserPtr<SignalSet>,
    mask_size: usize,
) -> Result<usize> {
    let timeout = Timeout::from_timespec(timeout_at)?;
    let outcome = under_mask(mask, mask_size, || poll_all(requests, count as usize, timeout));
    if let Some(ns) = timeout.left_ns() {
        // The call has done its work: a read-only time-out is no error.
        let _ = timeout_at.write(&Timespec::from_ns(ns));
    }
    outcome
}

fn poll_all(at: UserPtr<PollRequest>, count: usize, timeout: Timeout) -> Result<usize> {
    if count as u64 > crate::task::current_process().limits.borrow_mut()[RLIMIT_NOFILE].current {
        return Err(Errno::EINVAL);
    }
    let mut inline = [PollRequest { fd: 0, events: 0, revents: 0 }; INLINE];
    let mut heap;
    let requests = match inline.get_mut(..count) {
        Some(requests) => requests,
        None => {
            heap = alloc::vec![PollRequest { fd: 0, events: 0, revents: 0 }; count];
            heap.as_mut_slice()
        }
    };
    at.read_slice(requests)?;
    let found = wait_for_any(timeout, |files| Ok(scan(requests, files)))?;
    at.write_slice(requests)?;
    Ok(found)
}
