//! Which system calls a thread may make (seccomp(2), Linux' kernel/seccomp.c).
//!
//! A thread has filters, of which each knows the one before it; threads share what they have inherited.
//! All filters of a thread are asked at each of its calls, behind its tracer. All of it is saved state.

pub mod program;

use alloc::sync::Arc;

use self::program::{Data, Program};
use super::exit;
use super::ids::Tid;
use super::process::ExitStatus;
use super::ptrace::calls::Entered;
use super::ptrace::{Event, events};
use super::signal::{self, SIGKILL, SIGSYS, SignalInfo};
use super::thread::{Thread, current};
use super::watched::{self, Watchers};
use crate::errno::{Errno, Result};
use crate::platform::machine::SystemCallSites;
use crate::platform::registers::{AUDIT_ARCH, Frame};
use crate::state::kernel;
use crate::sync::KernelCell;

// `SECCOMP_RET_*` (linux/seccomp.h).
const KILL_PROCESS: u32 = 0x8000_0000;
const KILL_THREAD: u32 = 0;
const TRAP: u32 = 0x0003_0000;
const ERRNO: u32 = 0x0005_0000;
const NOTIFY: u32 = 0x7fc0_0000;
const TRACE: u32 = 0x7ff0_0000;
const LOG: u32 = 0x7ffc_0000;
const ALLOW: u32 = 0x7fff_0000;
/// The part of a verdict that says what to do, and the part that belongs to it.
const ACTION: u32 = 0xffff_0000;
const DATA: u32 = 0xffff;

/// Actions that there are. Nobody can listen to notifications.
pub const ACTIONS: [u32; 7] = [KILL_PROCESS, KILL_THREAD, TRAP, ERRNO, TRACE, LOG, ALLOW];
/// Their names, for `/proc/sys/kernel/seccomp`.
pub const ACTION_NAMES: &str = "kill_process kill_thread trap errno trace log allow\n";
/// Those that Linux logs unless told otherwise.
pub const LOGGED_NAMES: &str = "kill_process kill_thread trap errno trace log\n";

/// `MAX_INSNS_PER_PATH`: most instructions of all filters of a thread. Linux counts those of its own
/// code, which are some more.
const INSTRUCTIONS_MAX: usize = 32_768;
/// What each filter counts in addition.
const PENALTY: usize = 4;
/// `SYS_SECCOMP`: the code of a `SIGSYS` that a filter sends.
const SYS_SECCOMP: i32 = 1;
/// `MAX_ERRNO`.
const ERRNO_MAX: u32 = 4095;

/// A filter of a thread.
pub struct Filter {
    program: Program,
    /// The one that was there before it.
    previous: Option<Arc<Filter>>,
    /// How many these are, and their instructions with penalties.
    count: u32,
    instructions: usize,
    /// Whether one of these looks at where a call was made.
    loads_address: bool,
}

impl Filter {
    /// `ENOMEM` if these are too many.
    fn new(program: Program, previous: Option<Arc<Filter>>) -> Result<Self> {
        let before = previous.as_ref().map_or(0, |previous| previous.instructions);
        if before + program.instructions() > INSTRUCTIONS_MAX {
            return Err(Errno::ENOMEM);
        }
        let count = previous.as_ref().map_or(0, |previous| previous.count) + 1;
        let instructions = before + program.instructions() + PENALTY;
        let loads_address = program.loads_address()
            || previous.as_ref().is_some_and(|previous| previous.loads_address);
        Ok(Self { program, previous, count, instructions, loads_address })
    }

    /// This filter and those before it.
    fn chain(&self) -> impl Iterator<Item = &Filter> {
        core::iter::successors(Some(self), |filter| filter.previous.as_deref())
    }

    /// What the strictest filter says; of equal ones the newest (`seccomp_run_filters`).
    fn verdict(&self, data: &Data) -> u32 {
        let action = |verdict: u32| (verdict & ACTION) as i32;
        self.chain().fold(ALLOW, |strictest, filter| {
            let verdict = filter.program.run(data);
            if action(verdict) < action(strictest) { verdict } else { strictest }
        })
    }
}

impl Drop for Filter {
    /// One after the other: there may be more of them than a stack has room for.
    fn drop(&mut self) {
        let mut next = self.previous.take();
        while let Some(filter) = next {
            next = Arc::into_inner(filter).and_then(|mut filter| filter.previous.take());
        }
    }
}

/// What restricts the calls of a thread.
#[derive(Clone, Default)]
pub enum Seccomp {
    /// Nothing.
    #[default]
    Disabled,
    /// `SECCOMP_MODE_STRICT`.
    Strict,
    /// `SECCOMP_MODE_FILTER`: the newest filter.
    Filters(Arc<Filter>),
}

impl Seccomp {
    /// `SECCOMP_MODE_*`.
    pub fn mode(&self) -> u8 {
        match self {
            Seccomp::Disabled => 0,
            Seccomp::Strict => 1,
            Seccomp::Filters(_) => 2,
        }
    }

    /// The mode and the number of filters, for `/proc/PID/status`.
    pub fn shown(&self) -> (u8, u32) {
        (self.mode(), self.newest().map_or(0, |filter| filter.count))
    }

    fn newest(&self) -> Option<&Arc<Filter>> {
        match self {
            Seccomp::Filters(newest) => Some(newest),
            _ => None,
        }
    }

    /// Whether a thread that has `other` could have come from this state by filters alone (`is_ancestor`).
    fn leads_to(&self, other: &Seccomp) -> bool {
        match self {
            Seccomp::Disabled => true,
            Seccomp::Strict => false,
            Seccomp::Filters(own) => other
                .newest()
                .is_some_and(|newest| newest.chain().any(|one| core::ptr::eq(one, &**own))),
        }
    }
}

/// How many threads are restricted. While there is one, system calls are watched.
#[derive(Default)]
pub struct Restricted(KernelCell<usize>);

impl Restricted {
    fn add(&self) {
        *self.0.borrow_mut() += 1;
        self.watch_calls();
    }

    fn remove(&self) {
        let mut count = self.0.borrow_mut();
        *count -= 1;
        if *count == 0 {
            watched::remove(Watchers::RESTRICTED);
        }
    }

    /// After a thaw: calls are watched if somebody is restricted.
    pub fn watch_calls(&self) {
        if self.0.get() != 0 {
            watched::add(Watchers::RESTRICTED);
        }
    }
}

fn restrict(thread: &Thread, by: Seccomp) {
    let old = core::mem::replace(&mut *thread.seccomp.borrow_mut(), by);
    if let Seccomp::Disabled = old {
        kernel().tasks.restricted.add();
    }
}

/// A new thread, which nobody knows yet, is restricted as the running one is.
pub(super) fn inherit(child: &Thread) {
    let own = current().seccomp.borrow_mut().clone();
    if own.mode() != 0 {
        restrict(child, own);
    }
}

/// A thread ends, or is not made after all.
pub(super) fn release(thread: &Thread) {
    let old = core::mem::take(&mut *thread.seccomp.borrow_mut());
    if old.mode() != 0 {
        kernel().tasks.restricted.remove();
    }
}

/// `SECCOMP_SET_MODE_STRICT` for the running thread; `EINVAL` if it has filters.
pub fn set_strict() -> Result<()> {
    let thread = current();
    if thread.seccomp.borrow_mut().newest().is_some() {
        return Err(Errno::EINVAL);
    }
    restrict(&thread, Seccomp::Strict);
    Ok(())
}

/// Whether the other threads of a process get the filter, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// `SECCOMP_FILTER_FLAG_TSYNC`: they do, and all filters of the running thread.
    Follow,
    /// They do not.
    Stay,
}

/// Adds a filter to those of the running thread. If another one cannot follow, nothing happens, and
/// this tells which (`seccomp_attach_filter`).
pub fn add_filter(program: Program, others: Others) -> Result<Option<Tid>> {
    let thread = current();
    let own = thread.seccomp.borrow_mut().clone();
    if let Seccomp::Strict = own {
        return Err(Errno::EINVAL);
    }
    let filter = Filter::new(program, own.newest().cloned())?;
    let mut threads = thread.process.threads.borrow_mut().clone();
    threads.retain(|other| match core::ptr::eq(&**other, &*thread) {
        true => true,
        false => others == Others::Follow && !other.is_dying(),
    });
    if let Some(other) = threads.iter().find(|other| !other.seccomp.borrow_mut().leads_to(&own)) {
        return Ok(Some(other.tid()));
    }
    let filters = Seccomp::Filters(Arc::new(filter));
    threads.iter().for_each(|one| restrict(one, filters.clone()));
    Ok(None)
}

/// The running thread begins a system call: whether it may (`__secure_computing`).
pub fn enter(frame: &Frame) -> Entered {
    let Some(verdict) = verdict(frame) else { return Entered::Perform };
    if verdict & ACTION != TRACE {
        return enforce(frame, verdict);
    }
    if !events::report(Event::Seccomp, (verdict & DATA).into()) {
        return fail(frame, Errno::ENOSYS);
    }
    // A call number below 0 leaves the call out.
    if current().is_dying() || (frame.orig_rax() as i32) < 0 {
        return Entered::Skip;
    }
    // The tracer may have made another call of it, but is not asked again.
    match self::verdict(frame) {
        Some(verdict) if verdict & ACTION != TRACE => enforce(frame, verdict),
        _ => Entered::Perform,
    }
}

/// What the restrictions of the running thread say to the call of a frame, if it has some. Strict mode
/// ends the thread itself.
fn verdict(frame: &Frame) -> Option<u32> {
    let thread = current();
    match &*thread.seccomp.borrow_mut() {
        Seccomp::Disabled => return None,
        Seccomp::Filters(newest) => {
            // It takes a search, so it is looked for only where it matters.
            let address = if newest.loads_address { address_behind(frame) } else { 0 };
            return Some(newest.verdict(&data(frame, address)));
        }
        Seccomp::Strict => {}
    }
    /// read(2), write(2), exit(2) and rt_sigreturn(2) (`mode1_syscalls`).
    const ALLOWED: [i32; 4] = [0, 1, 60, 15];
    match ALLOWED.contains(&(frame.orig_rax() as i32)) {
        true => None,
        false => exit::exit_thread(ExitStatus::Killed(SIGKILL)),
    }
}

/// `struct seccomp_data` of the call of a frame.
fn data(frame: &Frame, address: u64) -> Data {
    let words = [frame.orig_rax() & 0xffff_ffff | u64::from(AUDIT_ARCH) << 32, address];
    let mut data = Data::default();
    for (halves, word) in data.chunks_exact_mut(2).zip(words.into_iter().chain(frame.arguments())) {
        halves.copy_from_slice(&[word as u32, (word >> 32) as u32]);
    }
    data
}

/// Where the guest's `syscall` instruction ends.
fn address_behind(frame: &Frame) -> u64 {
    super::host_process::own_space().gate.as_seen(frame.rip())
}

fn enforce(frame: &Frame, verdict: u32) -> Entered {
    let data = verdict & DATA;
    match verdict & ACTION {
        ALLOW | LOG => Entered::Perform,
        ERRNO => {
            frame.set_rax(u64::from(data.min(ERRNO_MAX)).wrapping_neg());
            Entered::Skip
        }
        NOTIFY => fail(frame, Errno::ENOSYS),
        TRAP => trap(frame, data),
        KILL_THREAD if current().process.threads.borrow_mut().len() > 1 => {
            exit::exit_thread(ExitStatus::Killed(SIGSYS))
        }
        _ => exit::killed_by(SIGSYS),
    }
}

fn fail(frame: &Frame, error: Errno) -> Entered {
    frame.set_rax(error.to_return());
    Entered::Skip
}

/// `SECCOMP_RET_TRAP`: a `SIGSYS` that sees the registers of the call (`force_sig_seccomp` in Linux'
/// kernel/signal.c).
fn trap(frame: &Frame, data: u32) -> Entered {
    let number = frame.orig_rax();
    frame.set_rax(number);
    let mut info = SignalInfo::fault(SIGSYS, SYS_SECCOMP, address_behind(frame));
    info.errno = data as i32;
    info.payload[1] = number & 0xffff_ffff | u64::from(AUDIT_ARCH) << 32;
    signal::force(&current(), info);
    Entered::Skip
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::program::Instruction;
    use super::*;
    use crate::testing::Sandbox;

    fn returns(verdict: u32) -> Program {
        let last = Instruction { code: 6, constant: verdict, ..Default::default() };
        Program::check(vec![last]).unwrap()
    }

    fn chain(verdicts: &[u32]) -> Filter {
        let mut newest = None;
        for &verdict in verdicts {
            newest = Some(Arc::new(Filter::new(returns(verdict), newest).unwrap()));
        }
        Arc::into_inner(newest.unwrap()).unwrap()
    }

    #[test]
    fn the_strictest_filter_decides_and_of_equal_ones_the_newest() {
        let order = [KILL_PROCESS, KILL_THREAD, TRAP, ERRNO, NOTIFY, TRACE, LOG, ALLOW];
        for (at, &strict) in order.iter().enumerate() {
            for &mild in &order[at + 1..] {
                assert_eq!(chain(&[strict, mild]).verdict(&Data::default()), strict);
                assert_eq!(chain(&[mild, strict]).verdict(&Data::default()), strict);
            }
        }
        assert_eq!(chain(&[ERRNO | 1, ERRNO | 2]).verdict(&Data::default()), ERRNO | 2);
        // The first filter that allows is no stricter than none.
        assert_eq!(chain(&[ALLOW | 7]).verdict(&Data::default()), ALLOW);
    }

    #[test]
    fn filters_have_a_bound_and_need_no_stack_to_go() {
        let mut newest = None;
        let mut count = 0;
        let error = loop {
            match Filter::new(returns(ALLOW), newest.clone()) {
                Ok(filter) => newest = Some(Arc::new(filter)),
                Err(error) => break error,
            }
            count += 1;
        };
        assert_eq!((count, error), (INSTRUCTIONS_MAX.div_ceil(PENALTY + 1), Errno::ENOMEM));
        let newest = Seccomp::Filters(newest.unwrap());
        assert_eq!(newest.shown(), (2, count as u32));
    }

    #[test]
    fn a_state_leads_to_those_that_came_from_it() {
        let one = Arc::new(Filter::new(returns(ALLOW), None).unwrap());
        let two = Arc::new(Filter::new(returns(ALLOW), Some(one.clone())).unwrap());
        let [one, two] = [one, two].map(Seccomp::Filters);
        for (from, to, leads) in [
            (&Seccomp::Disabled, &one, true),
            (&Seccomp::Disabled, &Seccomp::Disabled, true),
            (&one, &one, true),
            (&one, &two, true),
            (&two, &one, false),
            (&one, &Seccomp::Disabled, false),
            (&Seccomp::Strict, &two, false),
        ] {
            assert_eq!(from.leads_to(to), leads);
        }
    }

    #[test]
    fn calls_are_watched_while_a_thread_is_restricted() {
        let _sandbox = Sandbox::new();
        let is_watched = || watched::watchers().contains(Watchers::RESTRICTED);
        assert!(!is_watched());
        assert_eq!(add_filter(returns(ALLOW), Others::Follow), Ok(None));
        assert_eq!(add_filter(returns(ALLOW), Others::Stay), Ok(None));
        assert_eq!(current().seccomp.borrow_mut().shown(), (2, 2));
        assert_eq!(set_strict(), Err(Errno::EINVAL));
        assert!(is_watched());
        watched::remove(Watchers::RESTRICTED);
        kernel().tasks.restricted.watch_calls();
        assert!(is_watched());
        release(&current());
        release(&current());
        assert!(!is_watched());
        set_strict().unwrap();
        assert_eq!(add_filter(returns(ALLOW), Others::Stay), Err(Errno::EINVAL));
        release(&current());
    }
}
