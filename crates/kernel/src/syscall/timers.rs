//! System calls on time.

use core::sync::atomic::Ordering::Relaxed;

use crate::args::Flags;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::task::timers::cpu_clock::CpuClock;
use crate::task::timers::itimer;
use crate::task::wait::wait_until;
use crate::task::{current, current_process};
use crate::time::clock::{boottime_ns, realtime_ns};
use crate::time::{Instant, Timespec, read_timespec};

const NS: u64 = 1_000_000_000;

/// Reads a guest clock, in nanoseconds; `EINVAL` if there is no such clock.
pub fn clock_ns(clock: i32) -> Result<u64> {
    match clock {
        // CLOCK_REALTIME, its coarse and alarm variants, CLOCK_TAI.
        0 | 5 | 8 | 11 => Ok(realtime_ns()),
        // CLOCK_MONOTONIC, raw, coarse.
        1 | 4 | 6 => Ok(Instant::now().0),
        // CLOCK_BOOTTIME and its alarm variant.
        7 | 9 => Ok(boottime_ns()),
        clock => CpuClock::from_number(clock).map(|clock| clock.now_ns()),
    }
}

/// clock_gettime(2).
pub fn clock_gettime(clock: i32, to: UserAddress) -> Result<u64> {
    let time = Timespec::from_ns(clock_ns(clock)?);
    to.write(&time)?;
    Ok(0)
}

/// clock_getres(2).
pub fn clock_getres(clock: i32, to: UserAddress) -> Result<u64> {
    clock_ns(clock)?;
    let coarse = matches!(clock, 5 | 6);
    to.write_if_some(&Timespec { seconds: 0, nanoseconds: if coarse { 4_000_000 } else { 1 } })?;
    Ok(0)
}

/// clock_settime(2), settimeofday(2): the clock is the host's.
pub fn clock_settime(_: u64, _: UserAddress) -> Result<u64> {
    Err(Errno::EPERM)
}

/// adjtimex(2): what can be asked of the clock; changing it is `EPERM`.
pub fn adjtimex(timex: UserAddress) -> Result<u64> {
    show_adjustment(timex)
}

/// clock_adjtime(2): the same of `CLOCK_REALTIME`; others cannot be adjusted.
pub fn clock_adjtime(clock: i32, timex: UserAddress) -> Result<u64> {
    const CLOCK_REALTIME: i32 = 0;
    const LAST_CLOCK: i32 = 11;
    match clock {
        CLOCK_REALTIME => show_adjustment(timex),
        1..=LAST_CLOCK => Err(Errno::EOPNOTSUPP),
        _ => Err(Errno::EINVAL),
    }
}

/// Fills in a `struct timex` of a clock that keeps time by itself.
fn show_adjustment(at: UserAddress) -> Result<u64> {
    /// `ADJ_OFFSET_SS_READ`: changes nothing.
    const READ_ONLY: u32 = 0xa001;
    const TICK_US: u64 = 10_000;
    /// Index of the time, in seconds and microseconds, among the words.
    const TIME_AT: usize = 9;
    const TICK_AT: usize = 11;
    let mut words: [u64; 26] = at.read()?;
    let modes = words[0] as u32;
    if modes != 0 && modes != READ_ONLY {
        return Err(Errno::EPERM);
    }
    let now = realtime_ns();
    words[1..].fill(0);
    words[TIME_AT] = now / NS;
    words[TIME_AT + 1] = now % NS / 1000;
    words[TICK_AT] = TICK_US;
    at.write(&words).map(|()| 0)
}

/// gettimeofday(2).
pub fn gettimeofday(to: UserAddress, zone: UserAddress) -> Result<u64> {
    let now = realtime_ns();
    to.write_if_some(&[(now / NS) as i64, (now % NS / 1000) as i64])?;
    zone.write_if_some(&[0i32; 2])?;
    Ok(0)
}

/// time(2).
pub fn time(to: UserAddress) -> Result<u64> {
    let seconds = realtime_ns() / NS;
    to.write_if_some(&seconds)?;
    Ok(seconds)
}

/// times(2): in ticks of 10 ms.
pub fn times(to: UserAddress) -> Result<u64> {
    let ticks = |ns: u64| (ns / 10_000_000) as i64;
    let own = current_process();
    let children = own.children_cpu_ns.load(Relaxed);
    to.write_if_some(&[ticks(own.cpu_ns()), 0, ticks(children), 0])?;
    Ok(ticks(Instant::now().0) as u64)
}

/// nanosleep(2).
pub fn nanosleep(duration: UserAddress, left: UserAddress) -> Result<u64> {
    let ns = read_timespec(duration)?;
    sleep_until(Instant::after_ns(ns), left)
}

/// clock_nanosleep(2).
pub fn clock_nanosleep(
    clock: i32,
    Flags(flags): Flags,
    duration: UserAddress,
    left: UserAddress,
) -> Result<u64> {
    const TIMER_ABSTIME: u32 = 1;
    if !matches!(clock, 0 | 1 | 7 | 11) {
        return Err(if clock == 3 {
            Errno::EINVAL
        } else {
            clock_ns(clock).map_or(Errno::EINVAL, |_| Errno::EOPNOTSUPP)
        });
    }
    let ns = read_timespec(duration)?;
    if flags & TIMER_ABSTIME == 0 {
        return sleep_until(Instant::after_ns(ns), left);
    }
    let ahead = ns.saturating_sub(clock_ns(clock)?);
    match sleep_until(Instant::after_ns(ahead), UserAddress::NULL) {
        // An absolute sleep restarts by itself.
        Err(Errno::ERESTART_RESTARTBLOCK) => Err(Errno::ERESTARTNOHAND),
        outcome => outcome,
    }
}

/// Sleeps; a signal leaves the rest of the time at `remaining` and the deadline
/// for restart_syscall(2).
pub fn sleep_until(deadline: Instant, remaining: UserAddress) -> Result<u64> {
    let outcome: Result<u64> = wait_until(&[], Some(deadline), || None);
    match outcome {
        Err(Errno::ETIMEDOUT) => Ok(0),
        Err(_) => {
            let left = deadline.0.saturating_sub(Instant::now().0);
            remaining.write_if_some(&Timespec::from_ns(left))?;
            current().signals.borrow_mut().restart_deadline = Some(deadline);
            Err(Errno::ERESTART_RESTARTBLOCK)
        }
        Ok(value) => Ok(value),
    }
}

/// `struct rusage` up to the fields that are kept.
pub fn getrusage(who: i32, to: UserAddress) -> Result<u64> {
    const RUSAGE_CHILDREN: i32 = -1;
    const RUSAGE_SELF: i32 = 0;
    const RUSAGE_THREAD: i32 = 1;
    let own = current_process();
    let cpu = match who {
        RUSAGE_CHILDREN => own.children_cpu_ns.load(Relaxed),
        RUSAGE_SELF => own.cpu_ns(),
        RUSAGE_THREAD => current().cpu_ns(),
        _ => return Err(Errno::EINVAL),
    };
    let mut usage = [0i64; 18];
    usage[0] = (cpu / NS) as i64;
    usage[1] = (cpu % NS / 1000) as i64;
    if who != RUSAGE_CHILDREN {
        // ru_maxrss, in KiB, by the same reckoning as /proc/self/status.
        let totals = crate::procfs::Totals::of(&current_process());
        usage[4] = (totals.resident / 1024) as i64;
    }
    to.write(&usage)?;
    Ok(0)
}

/// getitimer(2).
pub fn getitimer(which: u32, to: UserAddress) -> Result<u64> {
    let value = itimer::get(&current_process(), itimer::Which::from_number(which)?);
    to.write(&value)?;
    Ok(0)
}

/// setitimer(2).
pub fn setitimer(which: u32, new: UserAddress, old_to: UserAddress) -> Result<u64> {
    let which = itimer::Which::from_number(which)?;
    let value: itimer::TimerValue = match new {
        UserAddress::NULL => bytemuck::Zeroable::zeroed(),
        at => at.read()?,
    };
    let old = itimer::set(&current().process, which, value)?;
    old_to.write_if_some(&old)?;
    Ok(0)
}

/// alarm(2).
pub fn alarm(seconds: u32) -> Result<u64> {
    let value = itimer::TimerValue { interval: [0, 0], value: [seconds as i64, 0] };
    let old = itimer::set(&current().process, itimer::Which::Real, value)?;
    // Rounded up, so that a running alarm never reads as none.
    Ok((old.value[0] + (old.value[1] > 0) as i64) as u64)
}
