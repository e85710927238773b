//! Twins: forks of all host processes of a sandbox at rest, which only hold its memory as it was at
//! that moment, for the host to read (docs/decisions/0027). The sandbox goes on meanwhile.
//!
//! A fork copies what a host process has for itself, and not the arena that several share. So the
//! twin of the first address space makes a copy of the arena for itself before anybody goes on:
//!
//! ```text
//! a vCPU of each host process   forks a twin, and says its number
//! the vCPU that freezes         names the twins in the report, and waits
//! the first twin                copies the arena ──▶ the sandbox goes on
//! ```

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use thaw_abi::control::MSG_TWIN_READ;

use super::residence::{self, Asked};
use super::{HostProcess, own_host_process};
use crate::errno::{Errno, Result};
use crate::host::control;
use crate::mm::arena;
use crate::platform::machine::{
    Clocks, Forked, HostFiles, Kinship, Machine, PollFd, Processes, Vcpus,
};
use crate::platform::upcalls::Ended;

/// Bytes of the arena that are copied at most: some milliseconds.
const ARENA_MAX: u64 = 64 << 20;
/// Most host processes that have twins: the host opens two for each.
const FAMILY_MAX: usize = 256;
/// How long the copy may take.
const COPY_NS: u64 = 5_000_000_000;
/// How long a sandbox that is about to end waits for whoever reads its twins.
const READ_NS: u64 = 10_000_000_000;
/// Something can be read (poll(2)).
const POLLIN: i16 = 1;
/// How often a twin that waits looks whether it is to end.
const LOOKS_NS: u64 = 20_000_000;

/// In [`HostProcess::twin`]: one is being forked, whose number nobody knows yet.
const TO_BE: u32 = u32::MAX;

/// How far the copy of the arena is, and behind that how often there was one, so that a twin that
/// was given up does not take part in the next.
static COPY: AtomicU32 = AtomicU32::new(0);
/// The first twin waits for it to begin.
const AWAITED: u32 = 1;
const BEGUN: u32 = 2;
const DONE: u32 = 3;
/// Nobody makes one.
const IDLE: u32 = 0;
const ONE_MORE: u32 = 4;
/// The last ones that were wanted, by the same count. A signal alone would not do: one that comes
/// before a twin has begun is lost.
static OVER: AtomicU32 = AtomicU32::new(0);

fn round() -> u32 {
    COPY.load(Relaxed) / ONE_MORE
}

/// Sets how far the copy is.
fn set_copy(step: u32) {
    COPY.store(COPY.load(Relaxed) / ONE_MORE * ONE_MORE + step, Relaxed);
    Machine::wake(&COPY, i32::MAX as u32);
}

/// How far it is.
fn copy_step() -> u32 {
    COPY.load(Relaxed) % ONE_MORE
}

/// Forks twins of all host processes. `name` is told, for each address space in the report, the
/// number of the host process that has it: of a twin, or, if nothing came of them, of the process
/// itself. The number of the twin that has the report; `None`: the sandbox has to rest.
pub fn fork(mut name: impl FnMut(u32, u32)) -> Option<u32> {
    if !Machine::may_fork() {
        return None;
    }
    // The daemon that has read earlier ones may have ended without saying so.
    end();
    if !arena::is_shared() {
        return fork_only();
    }
    if named().count() > FAMILY_MAX || arena::bytes_in_use() > ARENA_MAX {
        return None;
    }
    COPY.fetch_add(ONE_MORE, Relaxed);
    set_copy(AWAITED);
    let first = fork_all().and_then(|()| copy_arena(&mut name));
    set_copy(IDLE);
    first.inspect_err(|_| end()).ok()
}

/// That of the only host process: a copy of all memory.
fn fork_only() -> Option<u32> {
    // Another host process, if there is one by then, may be the one that is told to end it.
    let twin = &own_host_process().twin;
    twin.store(TO_BE, Relaxed);
    match Machine::fork(Kinship::Twin) {
        Ok(Forked::Parent { pid }) => {
            twin.store(pid, Relaxed);
            Some(pid)
        }
        Ok(Forked::Child) => {
            begin();
            Machine::be_twin()
        }
        Err(_) => {
            twin.store(0, Relaxed);
            None
        }
    }
}

fn fork_all() -> Result<()> {
    let has_all = residence::others_do(Asked::Fork);
    fork_own();
    let are_there = named().all(|(_, host_process)| host_process.twin.load(Relaxed) != 0);
    if has_all && are_there { Ok(()) } else { Err(Errno::EAGAIN) }
}

/// Forks the twin of this host process.
pub(super) fn fork_own() {
    let own = own_host_process();
    let kinship = if own.is_first() { Kinship::Twin } else { Kinship::SiblingTwin };
    let awaited = COPY.load(Relaxed);
    // It can be killed before anybody knows its number.
    own.twin.store(TO_BE, Relaxed);
    match Machine::fork(kinship) {
        Ok(Forked::Parent { pid }) => own.twin.store(pid, Relaxed),
        Ok(Forked::Child) => match own.number_in_report() {
            Some(0) => be_first_twin(awaited),
            _ => {
                begin();
                be_twin(awaited / ONE_MORE)
            }
        },
        Err(_) => own.twin.store(0, Relaxed),
    }
}

fn begin() {
    Machine::begin_forked();
    // A signal finds no vCPU to wake: the words for that are shared.
    Machine::set_number(0);
}

/// Waits until those of a round are not wanted any more. The count is one for all host processes.
fn be_twin(round: u32) -> ! {
    while !Machine::has_signal() && OVER.load(Relaxed) < round {
        // Whatever ends the wait, it looks again.
        let _ = Machine::poll(&mut [], Some(LOOKS_NS));
    }
    Machine::exit(0)
}

/// The twin of the first address space, which has the arena, too.
fn be_first_twin(awaited: u32) -> ! {
    begin();
    while COPY.load(Relaxed) == awaited && !Machine::has_signal() {
        Machine::wait(&COPY, awaited, Some(LOOKS_NS));
    }
    let (begun, done) = (awaited - AWAITED + BEGUN, awaited - AWAITED + DONE);
    if COPY.load(Relaxed) == begun && arena::make_private().is_ok() {
        let _ = COPY.compare_exchange(begun, done, Relaxed, Relaxed);
        Machine::wake(&COPY, i32::MAX as u32);
    }
    be_twin(awaited / ONE_MORE)
}

/// Has the first twin copy the arena, in which the twins have been named; its number.
fn copy_arena(name: &mut impl FnMut(u32, u32)) -> Result<u32> {
    const FIRST_PROCESS: u32 = 1;
    for (number, host_process) in named() {
        // Whoever has the report is the first process to the host.
        let twin = if number == 0 { FIRST_PROCESS } else { host_process.twin.load(Relaxed) };
        name(number, twin);
    }
    let first = first_twin();
    set_copy(BEGUN);
    let deadline_ns = Machine::monotonic_ns() + COPY_NS;
    while copy_step() == BEGUN {
        let left = deadline_ns.saturating_sub(Machine::monotonic_ns());
        let is_there = first_twin() != 0;
        if left == 0 || !is_there {
            named().for_each(|(number, host_process)| name(number, host_process.host_pid()));
            return Err(Errno::EAGAIN);
        }
        Machine::wait(&COPY, COPY.load(Relaxed), Some(left.min(LOOKS_NS)));
    }
    Ok(first)
}

/// Number of the twin of the first address space; 0 if it has ended.
fn first_twin() -> u32 {
    let first = named().find(|&(number, _)| number == 0);
    first.map_or(0, |(_, host_process)| host_process.twin.load(Relaxed))
}

/// The host processes of the report that is being made, by the number of their address space.
fn named() -> impl Iterator<Item = (u32, &'static HostProcess)> {
    HostProcess::all()
        .filter_map(|host_process| Some((host_process.number_in_report()?, host_process)))
}

/// Ends all twins. They are forgotten when they have ended, of which the host tells the first
/// process.
pub fn end() {
    OVER.store(round(), Relaxed);
    Machine::end_twin();
    for host_process in HostProcess::all_that_were() {
        match host_process.twin.load(Relaxed) {
            0 | TO_BE => {}
            twin => Machine::interrupt(twin, twin),
        }
    }
}

/// To be called before the sandbox ends by itself, with the kernel lock, since its twins end with it:
/// waits until the host has read them, but not for ever.
pub fn await_reader() {
    let deadline_ns = Machine::monotonic_ns() + READ_NS;
    let are_there = || HostProcess::all_that_were().any(|all| all.twin.load(Relaxed) != 0);
    while are_there() {
        let left = deadline_ns.saturating_sub(Machine::monotonic_ns());
        let mut control = [PollFd { fd: control::CONTROL.0, events: POLLIN, revents: 0 }];
        if left == 0 || Machine::poll(&mut control, Some(left.min(LOOKS_NS))).is_err_and(is_final) {
            return;
        }
        while let Some(kind) = control::discard_message() {
            if kind == MSG_TWIN_READ {
                return;
            }
        }
    }
}

fn is_final(error: Errno) -> bool {
    error != Errno::EINTR
}

/// A process of the sandbox has ended, in the handler of that signal: what it was. A twin is
/// forgotten then. A host process is one also while it forks a twin, and if its number was once that
/// of a twin whose end nobody has heard of.
pub fn has_ended(pid: u32) -> Ended {
    let is_host_process = HostProcess::all().any(|host_process| host_process.host_pid() == pid);
    let is_it =
        |host_process: &&HostProcess| [pid, TO_BE].contains(&host_process.twin.load(Relaxed));
    let found = HostProcess::all_that_were().find(is_it);
    if let Some(host_process) = found {
        let _ = host_process.twin.compare_exchange(pid, 0, Relaxed, Relaxed);
    }
    match (is_host_process, found) {
        (true, _) => Ended::HostProcess,
        (false, Some(_)) => Ended::Twin,
        (false, None) => Ended::Unknown,
    }
}
