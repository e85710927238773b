//! System calls on time.

use core::sync::atomic::Ordering::Relaxed;

use crate::args::Args;
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
pub fn clock_gettime(args: &Args) -> Result<u64> {
    let time = Timespec::from_ns(clock_ns(args.i32(0))?);
    args.address(1).write(&time)?;
    Ok(0)
}

/// clock_getres(2).
pub fn clock_getres(args: &Args) -> Result<u64> {
    clock_ns(args.i32(0))?;
    let coarse = matches!(args.i32(0), 5 | 6);
    args.address(1)
        .write_if_some(&Timespec { seconds: 0, nanoseconds: if coarse { 4_000_000 } else { 1 } })?;
    Ok(0)
}

/// clock_settime(2), settimeofday(2): the clock is the host's.
pub fn clock_settime(_args: &Args) -> Result<u64> {
    Err(Errno::EPERM)
}

/// adjtimex(2): what can be asked of the clock; changing it is `EPERM`.
pub fn adjtimex(args: &Args) -> Result<u64> {
    show_adjustment(args.address(0))
}

/// clock_adjtime(2): the same of `CLOCK_REALTIME`; others cannot be adjusted.
pub fn clock_adjtime(args: &Args) -> Result<u64> {
    const CLOCK_REALTIME: i32 = 0;
    const LAST_CLOCK: i32 = 11;
    match args.i32(0) {
        CLOCK_REALTIME => show_adjustment(args.address(1)),
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
pub fn gettimeofday(args: &Args) -> Result<u64> {
    let now = realtime_ns();
    args.address(0).write_if_some(&[(now / NS) as i64, (now % NS / 1000) as i64])?;
    args.address(1).write_if_some(&[0i32; 2])?;
    Ok(0)
}

/// time(2).
pub fn time(args: &Args) -> Result<u64> {
    let seconds = realtime_ns() / NS;
    args.address(0).write_if_some(&seconds)?;
    Ok(seconds)
}

/// times(2): in ticks of 10 ms.
pub fn times(args: &Args) -> Result<u64> {
    let ticks = |ns: u64| (ns / 10_000_000) as i64;
    let own = current_process();
    let children = own.children_cpu_ns.load(Relaxed);
    args.address(0).write_if_some(&[ticks(own.cpu_ns()), 0, ticks(children), 0])?;
    Ok(ticks(Instant::now().0) as u64)
}

/// nanosleep(2).
pub fn nanosleep(args: &Args) -> Result<u64> {
    let ns = read_timespec(args.address(0))?;
    sleep_until(Instant::after_ns(ns), args.address(1))
}

/// clock_nanosleep(2).
pub fn clock_nanosleep(args: &Args) -> Result<u64> {
    const TIMER_ABSTIME: u32 = 1;
    let clock = args.i32(0);
    if !matches!(clock, 0 | 1 | 7 | 11) {
        return Err(if clock == 3 {
            Errno::EINVAL
        } else {
            clock_ns(clock).map_or(Errno::EINVAL, |_| Errno::EOPNOTSUPP)
        });
    }
    let ns = read_timespec(args.address(2))?;
    if args.u32(1) & TIMER_ABSTIME == 0 {
        return sleep_until(Instant::after_ns(ns), args.address(3));
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
            current().signals.lock().restart_deadline = Some(deadline);
            Err(Errno::ERESTART_RESTARTBLOCK)
        }
        Ok(value) => Ok(value),
    }
}

/// `struct rusage` up to the fields that are kept.
pub fn getrusage(args: &Args) -> Result<u64> {
    const RUSAGE_CHILDREN: i32 = -1;
    const RUSAGE_SELF: i32 = 0;
    const RUSAGE_THREAD: i32 = 1;
    let own = current_process();
    let cpu = match args.i32(0) {
        RUSAGE_CHILDREN => own.children_cpu_ns.load(Relaxed),
        RUSAGE_SELF => own.cpu_ns(),
        RUSAGE_THREAD => current().cpu_ns(),
        _ => return Err(Errno::EINVAL),
    };
    let mut usage = [0i64; 18];
    usage[0] = (cpu / NS) as i64;
    usage[1] = (cpu % NS / 1000) as i64;
    if args.i32(0) != RUSAGE_CHILDREN {
        // ru_maxrss, in KiB, by the same reckoning as /proc/self/status.
        let totals = crate::procfs::Totals::of(current_process());
        usage[4] = (totals.resident / 1024) as i64;
    }
    args.address(1).write(&usage)?;
    Ok(0)
}

/// getitimer(2).
pub fn getitimer(args: &Args) -> Result<u64> {
    let value = itimer::get(current_process(), itimer::Which::from_number(args.u32(0))?);
    args.address(1).write(&value)?;
    Ok(0)
}

/// setitimer(2).
pub fn setitimer(args: &Args) -> Result<u64> {
    let which = itimer::Which::from_number(args.u32(0))?;
    let value: itimer::TimerValue = match args.address(1) {
        UserAddress::NULL => bytemuck::Zeroable::zeroed(),
        at => at.read()?,
    };
    let old = itimer::set(&current().process, which, value)?;
    args.address(2).write_if_some(&old)?;
    Ok(0)
}

/// alarm(2).
pub fn alarm(args: &Args) -> Result<u64> {
    let value = itimer::TimerValue { interval: [0, 0], value: [args.u32(0) as i64, 0] };
    let old = itimer::set(&current().process, itimer::Which::Real, value)?;
    // Rounded up, so that a running alarm never reads as none.
    Ok((old.value[0] + (old.value[1] > 0) as i64) as u64)
}
