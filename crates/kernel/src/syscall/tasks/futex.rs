//! futex(2).

use crate::args::{Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::task::futex::{
    ANY, Scope, lock_pi, requeue, try_lock_pi, unlock_pi, wait, wake, wake_op,
};
use crate::time::{Instant, Timespec};

const WAIT: u32 = 0;
const WAKE: u32 = 1;
const REQUEUE: u32 = 3;
const CMP_REQUEUE: u32 = 4;
const WAKE_OP: u32 = 5;
const LOCK_PI: u32 = 6;
const UNLOCK_PI: u32 = 7;
const TRYLOCK_PI: u32 = 8;
const WAIT_BITSET: u32 = 9;
const WAKE_BITSET: u32 = 10;
const LOCK_PI2: u32 = 13;
const PRIVATE: u32 = 128;
const CLOCK_REALTIME: u32 = 256;

/// futex(2).
pub fn futex(
    address: UserAddress,
    Flags(operation): Flags,
    value: u32,
    timeout: UserPtr<Timespec>,
    address2: UserAddress,
    value3: u32,
) -> Result<u64> {
    let realtime = operation & CLOCK_REALTIME != 0;
    let scope = if operation & PRIVATE != 0 { Scope::Private } else { Scope::Shared };
    // Where nothing waits, a number stands in the time-out's place.
    let second = timeout.0.0 as u32;
    let operation = operation & !(PRIVATE | CLOCK_REALTIME);
    if realtime && !matches!(operation, WAIT_BITSET | LOCK_PI2) {
        return Err(Errno::ENOSYS);
    }
    match operation {
        WAIT => wait(address, scope, value, ANY, Timespec::deadline(timeout)?),
        WAIT_BITSET => wait(address, scope, value, value3, absolute(timeout, realtime)?),
        WAKE => wake(address, value, ANY, scope),
        WAKE_BITSET => wake(address, value, value3, scope),
        REQUEUE => requeue(address, value, second, address2, scope),
        CMP_REQUEUE if address.load_u32()? != value3 => Err(Errno::EAGAIN),
        CMP_REQUEUE => requeue(address, value, second, address2, scope),
        WAKE_OP => wake_op(address, value, second, address2, value3, scope),
        LOCK_PI => lock_pi(address, scope, absolute(timeout, true)?),
        LOCK_PI2 => lock_pi(address, scope, absolute(timeout, realtime)?),
        TRYLOCK_PI => try_lock_pi(address),
        UNLOCK_PI => unlock_pi(address, scope),
        // FUTEX_FD is gone from Linux; the C libraries do not requeue to PI
        // futexes any more.
        _ => Err(Errno::ENOSYS),
    }
}

fn absolute(at: UserPtr<Timespec>, realtime: bool) -> Result<Option<Instant>> {
    let Some(time) = at.read_if_some()? else { return Ok(None) };
    let ns = time.to_ns()?;
    Ok(Some(if realtime { Instant::from_realtime(ns) } else { Instant(ns) }))
}
