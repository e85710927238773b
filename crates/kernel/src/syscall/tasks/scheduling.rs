//! System calls on scheduling. What a thread asks for is kept and given back;
//! its threads are scheduled without a look at it.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bytemuck::{Pod, Zeroable};

use crate::args::{Flags, PidNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::ids::Pgid;
use crate::task::process::{RLIMIT_NICE, RLIMIT_RTPRIO};
use crate::task::sched_attributes::{
    IoPriority, NICE_RANGE, PRIORITY_MAX, Policy, Scheduling, present_cpus,
};
use crate::task::thread::current_arc;
use crate::task::{Capabilities, Process, Thread, current_process, scheduler};
use crate::time::Timespec;

/// sched_yield(2).
pub fn sched_yield() -> Result<()> {
    scheduler::yield_now();
    Ok(())
}

/// What the thread with an id has asked of the scheduler, for calls that take a negative id for an
/// invalid argument: all but those on affinity.
fn scheduling_or_invalid(tid: PidNumber) -> Result<Scheduling> {
    if tid.0 < 0 { Err(Errno::EINVAL) } else { tid.scheduling() }
}

/// A privileged thread may ask for anything: `CAP_SYS_NICE`.
fn is_privileged() -> bool {
    current_process().credentials.borrow_mut().can(Capabilities::SYS_NICE)
}

/// Whether the running thread may change another's scheduling without privilege.
fn is_own(process: &Process) -> bool {
    let euid = current_process().credentials.borrow_mut().euid;
    let theirs = process.credentials.borrow_mut();
    euid == theirs.uid || euid == theirs.euid
}

/// sched_getaffinity(2).
pub fn sched_getaffinity(pid: PidNumber, size: usize, to: UserAddress) -> Result<i32> {
    if size < 8 || !size.is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    let scheduling = pid.scheduling()?;
    to.write(&scheduling.cpus(present_cpus()))?;
    Ok(8)
}

/// sched_setaffinity(2).
pub fn sched_setaffinity(pid: PidNumber, size: usize, from: UserAddress) -> Result<()> {
    let mut bytes = [0u8; 8];
    let len = size.min(8);
    from.read_bytes(&mut bytes[..len])?;
    let thread = pid.thread()?;
    if !is_own(&thread.process) && !is_privileged() {
        return Err(Errno::EPERM);
    }
    let wanted = u64::from_le_bytes(bytes);
    if wanted & present_cpus() == 0 {
        return Err(Errno::EINVAL);
    }
    thread.scheduling.borrow_mut().affinity = Some(wanted);
    Ok(())
}

/// `SCHED_RESET_ON_FORK`, part of the policy in the older calls.
const RESET_ON_FORK: i32 = 0x4000_0000;

/// sched_getscheduler(2).
pub fn sched_getscheduler(pid: PidNumber) -> Result<u64> {
    let scheduling = scheduling_or_invalid(pid)?;
    let flag = if scheduling.resets_on_fork { RESET_ON_FORK as u64 } else { 0 };
    Ok(scheduling.policy as u64 | flag)
}

/// sched_setscheduler(2).
pub fn sched_setscheduler(pid: PidNumber, policy: i32, parameters: UserAddress) -> Result<()> {
    if policy < 0 {
        return Err(Errno::EINVAL);
    }
    set_policy(pid, parameters, |old, priority| {
        Ok(Scheduling {
            policy: Policy::from_number(policy & !RESET_ON_FORK)?,
            priority,
            resets_on_fork: policy & RESET_ON_FORK != 0,
            ..old
        })
    })
}

/// sched_setparam(2): the policy stays.
pub fn sched_setparam(pid: PidNumber, parameters: UserAddress) -> Result<()> {
    set_policy(pid, parameters, |old, priority| Ok(Scheduling { priority, ..old }))
}

/// Reads a `struct sched_param` and changes a thread's scheduling.
fn set_policy(
    tid: PidNumber,
    parameter: UserAddress,
    change: impl FnOnce(Scheduling, i32) -> Result<Scheduling>,
) -> Result<()> {
    if tid.0 < 0 || parameter.is_null() {
        return Err(Errno::EINVAL);
    }
    let priority: i32 = parameter.read()?;
    let thread = tid.thread()?;
    let wanted = change(thread.scheduling.get(), priority)?;
    change_scheduling(&thread, wanted)
}

/// Makes a change if it is valid (`EINVAL`) and the caller may make it (`EPERM`).
fn change_scheduling(thread: &Thread, wanted: Scheduling) -> Result<()> {
    Scheduling::check(wanted.policy, wanted.priority)?;
    if !may_change(thread, wanted) && !is_privileged() {
        return Err(Errno::EPERM);
    }
    thread.scheduling.set(wanted);
    Ok(())
}

/// Whether a limit allows a nice value (getrlimit(2), `RLIMIT_NICE`).
fn nice_is_within_limit(process: &Process, nice: i32) -> bool {
    (20 - nice) as u64 <= process.limits.borrow_mut()[RLIMIT_NICE].current
}

/// What an unprivileged thread may change: the rules of
/// `user_check_sched_setscheduler` in Linux' kernel/sched/syscalls.c.
fn may_change(thread: &Thread, wanted: Scheduling) -> bool {
    let old = thread.scheduling.get();
    let process = &thread.process;
    let most = process.limits.borrow_mut()[RLIMIT_RTPRIO].current;
    let raises_nice = !wanted.policy.is_real_time()
        && wanted.nice < old.nice
        && !nice_is_within_limit(process, wanted.nice);
    let becomes_real_time =
        wanted.policy.is_real_time() && wanted.policy != old.policy && most == 0;
    let raises_priority = wanted.policy.is_real_time()
        && wanted.priority > old.priority
        && wanted.priority as u64 > most;
    let leaves_idle = old.policy == Policy::Idle
        && wanted.policy != Policy::Idle
        && !nice_is_within_limit(process, old.nice);
    let keeps_children = old.resets_on_fork && !wanted.resets_on_fork;
    !(raises_nice || becomes_real_time || raises_priority || leaves_idle || keeps_children)
        && is_own(process)
}

/// sched_getparam(2).
pub fn sched_getparam(pid: PidNumber, parameters: UserAddress) -> Result<()> {
    if parameters.is_null() {
        return Err(Errno::EINVAL);
    }
    let scheduling = scheduling_or_invalid(pid)?;
    parameters.write(&scheduling.priority)
}

/// `struct sched_attr` (sched_setattr(2)) as of `SCHED_ATTR_SIZE_VER1`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SchedAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
    util_min: u32,
    util_max: u32,
}

/// `SCHED_ATTR_SIZE_VER0`.
const ATTRIBUTES_OLDEST: usize = 48;

const FLAG_RESET_ON_FORK: u64 = 0x01;
const FLAG_KEEP_POLICY: u64 = 0x08;
const FLAG_KEEP_PARAMS: u64 = 0x10;
const FLAG_UTIL_CLAMP: u64 = 0x60;
const FLAGS_KNOWN: u64 = 0x7f;

/// Reads a `struct sched_attr` of any size that fits; `E2BIG` says the known size.
fn read_attributes(at: UserAddress) -> Result<SchedAttributes> {
    let known = size_of::<SchedAttributes>();
    let size = match at.read::<u32>()? as usize {
        0 => ATTRIBUTES_OLDEST,
        size => size,
    };
    let fits = (ATTRIBUTES_OLDEST..=4096).contains(&size);
    let rest = if fits {
        at.offset(known as u64).read_array::<u8>(size.saturating_sub(known))?
    } else {
        Vec::new()
    };
    if !fits || rest.iter().any(|&byte| byte != 0) {
        at.write(&(known as u32))?;
        return Err(Errno::E2BIG);
    }
    let mut bytes = [0u8; size_of::<SchedAttributes>()];
    at.read_bytes(&mut bytes[..size.min(known)])?;
    let attributes: SchedAttributes = bytemuck::pod_read_unaligned(&bytes);
    if attributes.flags & FLAG_UTIL_CLAMP != 0 && size < known {
        return Err(Errno::EINVAL);
    }
    Ok(attributes)
}

/// sched_setattr(2).
pub fn sched_setattr(pid: PidNumber, from: UserAddress, Flags(flags): Flags) -> Result<()> {
    if pid.0 < 0 || from.is_null() || flags != 0 {
        return Err(Errno::EINVAL);
    }
    let wanted = read_attributes(from)?;
    if (wanted.policy as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let thread = pid.thread()?;
    let old = thread.scheduling.get();
    let mut scheduling = old;
    let has = |flag| wanted.flags & flag != 0;
    if !has(FLAG_KEEP_POLICY) {
        const SCHED_DEADLINE: u32 = 6;
        if wanted.policy == SCHED_DEADLINE {
            return Err(Errno::EPERM);
        }
        scheduling.policy = Policy::from_number(wanted.policy as i32)?;
        scheduling.resets_on_fork = has(FLAG_RESET_ON_FORK);
    }
    if wanted.flags & !FLAGS_KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    if has(FLAG_UTIL_CLAMP) {
        // As a kernel without CONFIG_UCLAMP_TASK.
        return Err(Errno::EOPNOTSUPP);
    }
    if has(FLAG_KEEP_PARAMS) {
        // As Linux does: the policy counts as one of the parameters.
        scheduling.policy = old.policy;
    } else {
        scheduling.priority = i32::try_from(wanted.priority).map_err(|_| Errno::EINVAL)?;
        if !scheduling.policy.is_real_time() {
            scheduling.nice = wanted.nice.clamp(NICE_RANGE.0, NICE_RANGE.1);
        }
    }
    change_scheduling(&thread, scheduling)
}

/// sched_getattr(2).
pub fn sched_getattr(
    pid: PidNumber,
    to: UserAddress,
    size: u32,
    Flags(flags): Flags,
) -> Result<()> {
    let size = size as usize;
    let is_valid =
        pid.0 >= 0 && !to.is_null() && (ATTRIBUTES_OLDEST..=4096).contains(&size) && flags == 0;
    if !is_valid {
        return Err(Errno::EINVAL);
    }
    let scheduling = pid.scheduling()?;
    let is_real_time = scheduling.policy.is_real_time();
    let size = size.min(size_of::<SchedAttributes>());
    let attributes = SchedAttributes {
        size: size as u32,
        policy: scheduling.policy as u32,
        flags: if scheduling.resets_on_fork { FLAG_RESET_ON_FORK } else { 0 },
        nice: if is_real_time { 0 } else { scheduling.nice },
        priority: scheduling.priority as u32,
        ..Zeroable::zeroed()
    };
    to.write_bytes(&bytemuck::bytes_of(&attributes)[..size])
}

/// sched_rr_get_interval(2): time slices as Linux has them by default.
pub fn sched_rr_get_interval(pid: PidNumber, to: UserPtr<Timespec>) -> Result<()> {
    const SLICE_NS: u64 = 4_000_000;
    /// `RR_TIMESLICE`.
    const ROUND_ROBIN_NS: u64 = 100_000_000;
    let slice_ns = match scheduling_or_invalid(pid)?.policy {
        Policy::Fifo => 0,
        Policy::RoundRobin => ROUND_ROBIN_NS,
        _ => SLICE_NS,
    };
    to.write(&Timespec::from_ns(slice_ns))
}

/// The lowest and highest priority of a policy; `EINVAL`.
fn priorities(policy: i32) -> Result<(i32, i32)> {
    const SCHED_DEADLINE: i32 = 6;
    if policy == SCHED_DEADLINE {
        return Ok((0, 0));
    }
    let is_real_time = Policy::from_number(policy)?.is_real_time();
    Ok(if is_real_time { (1, PRIORITY_MAX) } else { (0, 0) })
}

/// sched_get_priority_max(2).
pub fn sched_get_priority_max(policy: i32) -> Result<i32> {
    Ok(priorities(policy)?.1)
}

/// sched_get_priority_min(2).
pub fn sched_get_priority_min(policy: i32) -> Result<i32> {
    Ok(priorities(policy)?.0)
}

/// getcpu(2): a CPU that the thread may run on.
pub fn getcpu(cpu: UserAddress, node: UserAddress, _: UserAddress) -> Result<()> {
    let cpus = current_arc().scheduling.get().cpus(present_cpus());
    cpu.write_if_some(&cpus.trailing_zeros())?;
    node.write_if_some(&0u32)
}

/// One thread is named (getpriority(2)).
const PRIO_PROCESS: u32 = 0;
/// The same for ioprio_get(2).
const IOPRIO_WHO_PROCESS: u32 = 1;

/// The threads that `which` and `who` name (getpriority(2)); `ESRCH` if none.
fn named(which: u32, who: u32) -> Result<Vec<Arc<Thread>>> {
    const PRIO_PGRP: u32 = 1;
    const PRIO_USER: u32 = 2;
    let own = current_process();
    let of_processes = |condition: &dyn Fn(&Process) -> bool| {
        let threads = kernel().tasks.all_threads();
        threads.into_iter().filter(|thread| condition(&thread.process)).collect()
    };
    let found: Vec<_> = match which {
        PRIO_PROCESS => PidNumber(who as i32).thread().into_iter().collect(),
        PRIO_PGRP => {
            let group = if who == 0 { own.process_group() } else { Pgid::from_caller(who) };
            of_processes(&|process| process.process_group() == group)
        }
        PRIO_USER => {
            let c = own.credentials.borrow_mut().clone();
            let uid = match who {
                0 => c.uid,
                who => c.user_namespace.user(who).ok_or(Errno::ESRCH)?,
            };
            of_processes(&|process| process.credentials.borrow_mut().uid == uid)
        }
        _ => return Err(Errno::EINVAL),
    };
    if found.is_empty() { Err(Errno::ESRCH) } else { Ok(found) }
}

/// The threads that `which` and `who` of ioprio_get(2) name: the same ones by numbers from 1 on.
fn named_of_io(which: u32, who: u32) -> Result<Vec<Arc<Thread>>> {
    named(which.checked_sub(1).ok_or(Errno::EINVAL)?, who)
}

/// ioprio_get(2): the best of those named.
pub fn ioprio_get(which: u32, who: u32) -> Result<u32> {
    if which == IOPRIO_WHO_PROCESS {
        return Ok(PidNumber(who as i32).scheduling()?.io_priority.value());
    }
    let named = named_of_io(which, who)?;
    let all = named.iter().map(|thread| thread.scheduling.get().io_priority);
    Ok(all.reduce(IoPriority::best).unwrap_or_default().value())
}

/// ioprio_set(2).
pub fn ioprio_set(which: u32, who: u32, priority: u32) -> Result<()> {
    let priority = IoPriority::new(priority)?;
    if priority.is_real_time() && !is_privileged() {
        return Err(Errno::EPERM);
    }
    let named = named_of_io(which, who)?;
    if !is_privileged() && named.iter().any(|thread| !is_own(&thread.process)) {
        return Err(Errno::EPERM);
    }
    for thread in named {
        thread.scheduling.borrow_mut().io_priority = priority;
    }
    Ok(())
}

/// getpriority(2): the highest priority of those named, as 20 minus nice.
pub fn getpriority(which: u32, who: u32) -> Result<i32> {
    if which == PRIO_PROCESS {
        return Ok(20 - PidNumber(who as i32).scheduling()?.nice);
    }
    let named = named(which, who)?;
    let highest = named.iter().map(|thread| 20 - thread.scheduling.get().nice).max();
    Ok(highest.unwrap_or(20))
}

/// setpriority(2).
pub fn setpriority(which: u32, who: u32, priority: i32) -> Result<()> {
    let named = named(which, who)?;
    let nice = priority.clamp(NICE_RANGE.0, NICE_RANGE.1);
    let mut outcome = Ok(());
    for thread in named {
        let process = &thread.process;
        let raises = nice < thread.scheduling.get().nice && !nice_is_within_limit(process, nice);
        if !is_own(process) && !is_privileged() {
            outcome = Err(Errno::EPERM);
        } else if raises && !is_privileged() {
            outcome = Err(Errno::EACCES);
        } else {
            thread.scheduling.borrow_mut().nice = nice;
        }
    }
    outcome
}
