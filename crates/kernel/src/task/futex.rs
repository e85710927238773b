//! Futexes (futex(2)): wait queues named by addresses in guest memory.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::wait::{WaitQueue, wait_until};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::Lock;
use crate::syscall::Args;
use crate::time::Instant;
use crate::time::syscalls::read_timespec;

/// Those who wait on futexes, by address, in order of arrival.
#[derive(Default)]
pub struct Futexes {
    waiters: Lock<BTreeMap<u64, alloc::collections::VecDeque<Arc<FutexWaiter>>>>,
}

struct FutexWaiter {
    bitset: u32,
    woken: AtomicBool,
    queue: WaitQueue,
}

const WAIT: u32 = 0;
const WAKE: u32 = 1;
const REQUEUE: u32 = 3;
const CMP_REQUEUE: u32 = 4;
const WAIT_BITSET: u32 = 9;
const WAKE_BITSET: u32 = 10;
const PRIVATE: u32 = 128;
const CLOCK_REALTIME: u32 = 256;
const ANY: u32 = u32::MAX;

/// futex(2).
pub fn futex(args: &Args) -> Result<u64> {
    let address = args.address(0);
    let operation = args.u32(1);
    let realtime = operation & CLOCK_REALTIME != 0;
    match operation & !(PRIVATE | CLOCK_REALTIME) {
        WAIT => {
            let deadline = match args.address(3) {
                UserAddress::NULL => None,
                at => Some(Instant::after_ns(read_timespec(at)?)),
            };
            wait(address, args.u32(2), ANY, deadline)
        }
        WAIT_BITSET => {
            let deadline = match args.address(3) {
                UserAddress::NULL => None,
                at if realtime => Some(Instant::from_realtime(read_timespec(at)?)),
                at => Some(Instant(read_timespec(at)?)),
            };
            wait(address, args.u32(2), args.u32(5), deadline)
        }
        WAKE => wake(address, args.u32(2), ANY),
        WAKE_BITSET => wake(address, args.u32(2), args.u32(5)),
        REQUEUE => requeue(address, args.u32(2), args.u32(3), args.address(4)),
        CMP_REQUEUE => {
            if address.load_u32()? != args.u32(5) {
                return Err(Errno::EAGAIN);
            }
            requeue(address, args.u32(2), args.u32(3), args.address(4))
        }
        // Wake-op and priority inheritance come with threads.
        _ => Err(Errno::ENOSYS),
    }
}

fn wait(
    address: UserAddress,
    expected: u32,
    bitset: u32,
    deadline: Option<Instant>,
) -> Result<u64> {
    if bitset == 0 {
        return Err(Errno::EINVAL);
    }
    if address.load_u32()? != expected {
        return Err(Errno::EAGAIN);
    }
    let waiter =
        Arc::new(FutexWaiter { bitset, woken: AtomicBool::new(false), queue: WaitQueue::new() });
    kernel().futexes.waiters.lock().entry(address.0).or_default().push_back(waiter.clone());
    let outcome =
        wait_until(&[&waiter.queue], deadline, || waiter.woken.load(Relaxed).then_some(Ok(0)));
    if outcome.is_err() {
        kernel().futexes.forget(&waiter);
    }
    outcome
}

impl Futexes {
    fn forget(&self, waiter: &Arc<FutexWaiter>) {
        self.waiters.lock().retain(|_, queue| {
            queue.retain(|other| !Arc::ptr_eq(other, waiter));
            !queue.is_empty()
        });
    }
}

/// Wakes up to `count` waiters whose bit set shares a bit with `bitset`.
pub fn wake(address: UserAddress, count: u32, bitset: u32) -> Result<u64> {
    if address.0 & 3 != 0 || bitset == 0 {
        return Err(Errno::EINVAL);
    }
    address.check(4)?;
    let mut woken = alloc::vec::Vec::new();
    let mut waiters = kernel().futexes.waiters.lock();
    if let Some(queue) = waiters.get_mut(&address.0) {
        queue.retain(|waiter| {
            let chosen = woken.len() < count as usize && waiter.bitset & bitset != 0;
            if chosen {
                woken.push(waiter.clone());
            }
            !chosen
        });
        if queue.is_empty() {
            waiters.remove(&address.0);
        }
    }
    drop(waiters);
    for waiter in &woken {
        waiter.woken.store(true, Relaxed);
        waiter.queue.wake_all(Events::IN);
    }
    Ok(woken.len() as u64)
}

fn requeue(from: UserAddress, wake_count: u32, move_count: u32, to: UserAddress) -> Result<u64> {
    let woken = wake(from, wake_count, ANY)?;
    to.check(4)?;
    let mut waiters = kernel().futexes.waiters.lock();
    let mut moved = alloc::collections::VecDeque::new();
    if let Some(queue) = waiters.get_mut(&from.0) {
        while moved.len() < move_count as usize
            && let Some(waiter) = queue.pop_front()
        {
            moved.push_back(waiter);
        }
        if queue.is_empty() {
            waiters.remove(&from.0);
        }
    }
    let count = moved.len() as u64;
    if count > 0 {
        waiters.entry(to.0).or_default().append(&mut moved);
    }
    Ok(woken + count)
}
