//! System calls on time.

use core::sync::atomic::Ordering::Relaxed;

use bytemuck::Zeroable;

use crate::args::{ClockId, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::process::Process;
use crate::task::timers::clock::Clock;
use crate::task::timers::itimer;
use crate::task::wait::wait_until;
use crate::task::{current, current_process, freeze_request};
use crate::time::clock::realtime_ns;
use crate::time::{Instant, TimerValue, Timespec, Timeval};

const NS: u64 = 1_000_000_000;

/// clock_gettime(2).
pub fn clock_gettime(clock: ClockId, to: UserPtr<Timespec>) -> Result<()> {
    to.write(&Timespec::from_ns(Clock::of(clock)?.now_ns()))
}

/// clock_getres(2).
pub fn clock_getres(clock: ClockId, to: UserPtr<Timespec>) -> Result<()> {
    Clock::of(clock)?;
    let coarse = matches!(clock, ClockId::REALTIME_COARSE | ClockId::MONOTONIC_COARSE);
    to.write_if_some(&Timespec::from_ns(if coarse { 4_000_000 } else { 1 }))
}

/// clock_settime(2): the clock is the host's. Others than `CLOCK_REALTIME` cannot be set at all.
pub fn clock_settime(clock: ClockId, time: UserPtr<Timespec>) -> Result<()> {
    if clock != ClockId::REALTIME {
        return Err(Errno::EINVAL);
    }
    time.read()?.to_ns()?;
    Err(Errno::EPERM)
}

/// settimeofday(2): the clock is the host's.
pub fn settimeofday(time: UserPtr<Timeval>, zone: UserPtr<[i32; 2]>) -> Result<()> {
    if let Some(time) = time.read_if_some()? {
        time.to_ns()?;
    }
    zone.read_if_some()?;
    Err(Errno::EPERM)
}

/// adjtimex(2): what can be asked of the clock; changing it is `EPERM`.
pub fn adjtimex(timex: UserPtr<Timex>) -> Result<()> {
    show_adjustment(timex)
}

/// clock_adjtime(2): the same of `CLOCK_REALTIME`; others cannot be adjusted.
pub fn clock_adjtime(clock: ClockId, timex: UserPtr<Timex>) -> Result<()> {
    match clock {
        ClockId::REALTIME => show_adjustment(timex),
        ClockId(0..=11) => Err(Errno::EOPNOTSUPP),
        _ => Err(Errno::EINVAL),
    }
}

/// `struct timex` as words.
type Timex = [u64; 26];

/// Fills in a `struct timex` of a clock that keeps time by itself.
fn show_adjustment(at: UserPtr<Timex>) -> Result<()> {
    /// `ADJ_OFFSET_SS_READ`: changes nothing.
    const READ_ONLY: u32 = 0xa001;
    /// `ADJ_ADJTIME`, which `ADJ_OFFSET` goes with.
    const ADJTIME: u32 = 0x8000;
    const OFFSET: u32 = 1;
    const TICK_US: u64 = 10_000;
    /// Index of the time, in seconds and microseconds, among the words.
    const TIME_AT: usize = 9;
    const TICK_AT: usize = 11;
    let mut words = at.read()?;
    let modes = words[0] as u32;
    if modes & ADJTIME != 0 && modes & OFFSET == 0 {
        return Err(Errno::EINVAL);
    }
    if modes != 0 && modes != READ_ONLY {
        return Err(Errno::EPERM);
    }
    let now = realtime_ns();
    words[1..].fill(0);
    words[TIME_AT] = now / NS;
    words[TIME_AT + 1] = now % NS / 1000;
    words[TICK_AT] = TICK_US;
    at.write(&words)
}

/// gettimeofday(2).
pub fn gettimeofday(to: UserPtr<Timeval>, zone: UserPtr<[i32; 2]>) -> Result<()> {
    to.write_if_some(&Timeval::from_ns(realtime_ns()))?;
    zone.write_if_some(&[0; 2])
}

/// time(2).
pub fn time(to: UserPtr<u64>) -> Result<u64> {
    let seconds = realtime_ns() / NS;
    to.write_if_some(&seconds)?;
    Ok(seconds)
}

/// times(2): in ticks of 10 ms.
pub fn times(to: UserPtr<[i64; 4]>) -> Result<i64> {
    let ticks = |ns: u64| (ns / 10_000_000) as i64;
    let own = current_process();
    let children = own.children_cpu_ns.load(Relaxed);
    to.write_if_some(&[ticks(own.cpu_ns()), 0, ticks(children), 0])?;
    Ok(ticks(Instant::now().0))
}

/// nanosleep(2).
pub fn nanosleep(duration: UserPtr<Timespec>, left: UserPtr<Timespec>) -> Result<()> {
    sleep_until(Instant::after_ns(duration.read()?.to_ns()?), left)
}

/// clock_nanosleep(2).
pub fn clock_nanosleep(
    id: ClockId,
    Flags(flags): Flags,
    duration: UserPtr<Timespec>,
    left: UserPtr<Timespec>,
) -> Result<()> {
    const TIMER_ABSTIME: u32 = 1;
    let clock = Clock::of(id)?;
    let sleeps = [ClockId::REALTIME, ClockId::MONOTONIC, ClockId::BOOTTIME, ClockId::TAI];
    if !sleeps.contains(&id) {
        return Err(Errno::EOPNOTSUPP);
    }
    let ns = duration.read()?.to_ns()?;
    if flags & TIMER_ABSTIME == 0 {
        return sleep_until(Instant::after_ns(ns), left);
    }
    sleep_until_it_reads(&clock, ns)
}

/// Sleeps until `clock` reads `ns`; after a thaw, it may have gone on.
fn sleep_until_it_reads(clock: &Clock, ns: u64) -> Result<()> {
    loop {
        let offset = kernel().clocks.offset();
        let thawed = || (kernel().clocks.offset() != offset).then_some(Ok(()));
        match wait_until(&[freeze_request::happened()], Some(clock.look_at(ns)), thawed) {
            Ok(()) => {}
            Err(Errno::ETIMEDOUT) => return Ok(()),
            // An absolute sleep restarts by itself.
            Err(_) => return Err(Errno::ERESTARTNOHAND),
        }
    }
}

/// Sleeps; a signal leaves the rest of the time at `remaining` and the deadline
/// for restart_syscall(2).
pub fn sleep_until(deadline: Instant, remaining: UserPtr<Timespec>) -> Result<()> {
    let outcome = wait_until(&[], Some(deadline), || None);
    match outcome {
        Err(Errno::ETIMEDOUT) => Ok(()),
        Err(_) => {
            let left = deadline.0.saturating_sub(Instant::now().0);
            remaining.write_if_some(&Timespec::from_ns(left))?;
            current().signals.borrow_mut().restart_deadline = Some(deadline);
            Err(Errno::ERESTART_RESTARTBLOCK)
        }
        outcome => outcome,
    }
}

/// `struct rusage` (getrusage(2)), of which times and memory are kept.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ResourceUsage {
    user: Timeval,
    system: Timeval,
    max_resident_kib: u64,
    others: [i64; 13],
}

impl ResourceUsage {
    /// CPU time, all of it the program's own, and memory by the same reckoning as `/proc/PID/status`.
    fn new(cpu_ns: u64, max_resident: u64) -> Self {
        let user = Timeval::from_ns(cpu_ns);
        Self { user, max_resident_kib: max_resident / 1024, ..Zeroable::zeroed() }
    }

    /// Of a child that is waited for.
    pub fn of_child(child: &Process) -> Self {
        // One that has only stopped lives.
        let max_resident = match child.is_zombie() {
            true => child.max_resident(),
            false => child.look_at_resident(),
        };
        Self::new(child.cpu_ns(), max_resident)
    }
}

/// getrusage(2).
pub fn getrusage(who: i32, to: UserPtr<ResourceUsage>) -> Result<()> {
    const RUSAGE_CHILDREN: i32 = -1;
    const RUSAGE_SELF: i32 = 0;
    const RUSAGE_THREAD: i32 = 1;
    let own = current_process();
    let usage = match who {
        RUSAGE_CHILDREN => {
            ResourceUsage::new(own.children_cpu_ns.load(Relaxed), own.children_max_resident())
        }
        RUSAGE_SELF => ResourceUsage::new(own.cpu_ns(), own.look_at_resident()),
        RUSAGE_THREAD => ResourceUsage::new(current().cpu_ns(), own.look_at_resident()),
        _ => return Err(Errno::EINVAL),
    };
    to.write(&usage)
}

/// getitimer(2).
pub fn getitimer(which: u32, to: UserPtr<TimerValue>) -> Result<()> {
    to.write(&itimer::get(&current_process(), itimer::Which::from_number(which)?))
}

/// setitimer(2).
pub fn setitimer(which: u32, new: UserPtr<TimerValue>, old_to: UserPtr<TimerValue>) -> Result<()> {
    let which = itimer::Which::from_number(which)?;
    let value = new.read_if_some()?.unwrap_or(TimerValue::zeroed());
    old_to.write_if_some(&itimer::set(&current().process, which, value)?)
}

/// alarm(2).
pub fn alarm(seconds: u32) -> Result<u64> {
    let value = Timeval { seconds: seconds.into(), microseconds: 0 };
    let value = TimerValue { value, ..TimerValue::zeroed() };
    let old = itimer::set(&current().process, itimer::Which::Real, value)?.value;
    // Rounded up, so that a running alarm never reads as none.
    Ok((old.seconds + (old.microseconds > 0) as i64) as u64)
}
