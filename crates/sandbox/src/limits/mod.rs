//! Limits on a sandbox that the host kernel enforces, over all host processes of the
//! sandbox together.
//!
//! | limit | control groups | without them (*weak*) |
//! | --- | --- | --- |
//! | memory | `memory.max`: all that is used, shared memory and page cache included | `RLIMIT_DATA` (getrlimit(2)) of each process: what it *maps* privately, used or not |
//! | processors | `cpu.max`: so much CPU time in each [`CPU_PERIOD`] | none; only the guest's kernel keeps to it |
//! | processes | `pids.max` | `RLIMIT_NPROC`, where each sandbox has a user id of its own |
//! | CPU time | accounted by the group, looked at by the [`supervisor`] | what the supervisor sees in `/proc`, and `RLIMIT_CPU` of each process |
//!
//! The groups are made with the zygote and not on the boot path, which writes only
//! the values that are not there yet ([`Limits::expect`]). Where control groups have
//! version 1, sandboxes have most of them one after the other ([`stock`]).

mod change;
mod discover;
mod entrance;
mod group;
mod hierarchy;
mod host_memory;
mod memory;
mod meter;
mod oom;
mod processes;
mod raised;
mod rlimits;
mod stock;
mod supervisor;

pub use change::NotChanged;
pub use discover::discover;
pub use group::{CPU_PERIOD, Group};
pub use hierarchy::{Controller, Hierarchy, Missing, Place, Version};
pub use meter::Meter;
pub use raised::{Lowered, RaisedMemory};
pub(crate) use rlimits::forbid_growing_files;
pub use supervisor::finish_removal;

pub(crate) use entrance::Newcomers;
pub(crate) use group::GroupName;
pub(crate) use host_memory::host_memory;
pub(crate) use oom::{Guarded, Tell, guard};
pub(crate) use stock::InForceByGroup;

use group::FIRST_CPUS;
use memory::MemoryLimit;
use supervisor::watch;

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::zygote::{Process, UserIds};

/// Whether limits may be used that the host kernel does not enforce strictly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeakLimits {
    /// No: without the control groups there is no sandbox.
    #[default]
    Refuse,
    /// Yes: each limit as well as this host can keep it.
    Accept,
}

/// How much a sandbox may have at a time. Zero: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Bytes of memory.
    pub memory: u64,
    /// Processors' worth of CPU time.
    pub cpus: u32,
    /// Host processes, with each further virtual CPU of a process counted as one.
    pub processes: u32,
}

/// Most host processes that any sandbox can be allowed.
pub const PROCESSES_MAX: u32 = 4096;

/// The limits that missing controllers make weak, and why the first is missing, for people.
pub fn describe(missing: &[Missing]) -> (String, String) {
    let limits: Vec<&str> = missing.iter().map(|missing| missing.controller.limit()).collect();
    let limits = match limits.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    };
    let reason = missing.first().map_or("", |missing| missing.reason.as_str());
    (limits, reason.to_owned())
}

/// How this process gets control groups.
pub fn way_out() -> &'static str {
    // sd_booted(3)
    if std::path::Path::new("/run/systemd/system").is_dir() {
        "run thaw in a control group of its own: `systemd-run --scope -p Delegate=yes thaw …`, with \
         --user if you are not root"
    } else {
        "run thaw as root, or in a control group that belongs to you"
    }
}

/// The limit that ended a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitReached {
    /// It used more memory than it may.
    Memory,
    /// It has used all of its CPU time.
    CpuTime,
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "it reached its memory limit",
            Self::CpuTime => "it reached its limit of CPU time",
        })
    }
}

/// Where a sandbox's limits are set.
#[derive(Debug)]
pub struct Limits {
    /// Its control groups, as far as this host has them.
    group: Group,
    /// The memory limit in force.
    memory: Mutex<MemoryLimit>,
    /// Whether the supervisor has ended it because its CPU time is spent.
    cpu_time_spent: AtomicBool,
    /// Whether it is ended because it has more memory than its usual limit allows.
    memory_kept: AtomicBool,
    /// How often its kernel was asked to end a process, and has not answered.
    asked_to_end_one: AtomicU32,
    /// Its kernel has said that it can end no process but the first.
    nobody_can_end: AtomicBool,
}

impl Limits {
    /// Limits that are set through these groups, where they can be.
    pub fn new(group: Group) -> Self {
        Self {
            group,
            memory: Mutex::default(),
            cpu_time_spent: AtomicBool::new(false),
            memory_kept: AtomicBool::new(false),
            asked_to_end_one: AtomicU32::new(0),
            nobody_can_end: AtomicBool::new(false),
        }
    }

    /// The control groups.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Sets limits that a sandbox is likely to get, so that setting them takes no
    /// time later. A guess that can be corrected: only groups are changed.
    pub fn expect(&self, wanted: ResourceLimits) {
        // Set again, with its error, when it is known.
        let _ = self.set_in_groups(wanted);
    }

    /// Sets the limits that groups have when they are made: earlier sandboxes may have left
    /// others.
    ///
    /// # Errors
    /// The host kernel refuses.
    pub(crate) fn reset(&self) -> io::Result<()> {
        self.set_in_groups(ResourceLimits { memory: 0, cpus: FIRST_CPUS as u32, processes: 0 })
    }

    fn set_in_groups(&self, wanted: ResourceLimits) -> io::Result<()> {
        self.change_memory(|memory| memory.wanted = wanted.memory)?;
        self.group.set_others(wanted)
    }

    /// Changes the memory limit. One that cannot be put in force is as it was before.
    fn change_memory(&self, change: impl FnOnce(&mut MemoryLimit)) -> io::Result<()> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = *memory;
        change(&mut changed);
        changed.enforce(&self.group)?;
        *memory = changed;
        Ok(())
    }

    /// Has the host look again at processes that it holds up.
    fn have_host_look_again(&self) -> io::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.have_host_look_again(&self.group)
    }

    fn memory_limit(&self) -> MemoryLimit {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the limits of the sandbox with this process.
    pub(crate) fn set(&self, process: &Process, wanted: ResourceLimits) -> io::Result<()> {
        self.set_in_groups(wanted)?;
        if wanted.memory > 0 && !self.group.has(Controller::Memory) {
            rlimits::set_memory(process, wanted.memory)?;
        }
        let own_id = process.parent.user_ids() == UserIds::OnePerSandbox;
        if wanted.processes > 0 && own_id && !self.group.has(Controller::Pids) {
            rlimits::set_processes(process, wanted.processes)?;
        }
        Ok(())
    }

    /// Sets the CPU time after which the sandbox is ended.
    pub(crate) fn set_cpu_time(&self, process: &Process, limit: Duration) -> io::Result<()> {
        if !self.group.has(Controller::CpuAccounting) {
            rlimits::set_cpu_time(process, limit)?;
        }
        watch(process, limit)
    }

    /// The limit that has ended the sandbox, if one has. Takes a host call or two.
    pub fn reached(&self) -> Option<LimitReached> {
        if self.cpu_time_spent.load(Ordering::Acquire) {
            return Some(LimitReached::CpuTime);
        }
        let is_out = self.memory_kept.load(Ordering::Acquire)
            // Its kernel may have ended for want of memory before it could end a process.
            || self.is_asked()
            || self.group.has_run_out_of_memory();
        is_out.then_some(LimitReached::Memory)
    }

    /// Most bytes of memory that the sandbox has used, or another one before it that had the same
    /// group; `None` if the host does not say that.
    pub fn memory_peak(&self) -> Option<u64> {
        self.group.memory_peak()
    }

    /// Has `meter` count what the sandbox uses, from its beginning. The first meter
    /// stays. Takes no host call.
    pub(crate) fn count_by(self: &Arc<Self>, meter: &Arc<Meter>) {
        if self.group.count_by(meter) {
            meter.add(self);
        }
    }

    /// The same, from now on.
    ///
    /// # Errors
    /// What it has used so far cannot be read.
    pub(crate) fn count_from_now_by(self: &Arc<Self>, meter: &Arc<Meter>) -> io::Result<()> {
        meter.leave_out(self.group.cpu_time()?.unwrap_or_default());
        self.count_by(meter);
        Ok(())
    }

    /// Notes that the sandbox is ended since it has too much memory.
    pub(crate) fn note_memory_kept(&self) {
        self.memory_kept.store(true, Ordering::Release);
    }

    /// Whether its kernel was asked to end a process, and has not answered.
    fn is_asked(&self) -> bool {
        self.asked_to_end_one.load(Ordering::Acquire) > 0
    }

    /// Notes whether its kernel could end none of its processes when it was asked last.
    pub(crate) fn note_nobody_can_end(&self, nobody: bool) {
        self.nobody_can_end.store(nobody, Ordering::Release);
    }

    fn can_end_nobody(&self) -> bool {
        self.nobody_can_end.load(Ordering::Acquire)
    }

    fn note_asked_to_end_one(&self) {
        // What it answered before is of another moment.
        self.note_nobody_can_end(false);
        self.asked_to_end_one.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether the kernel of the sandbox was asked to end a process and has not answered yet; it has now.
    pub(crate) fn take_answer(&self) -> bool {
        let less = |asked: u32| asked.checked_sub(1);
        self.asked_to_end_one.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
    }

    /// Whether one of several processes of the sandbox can be ended when its memory is used up.
    pub(crate) fn can_end_one(&self, wanted: ResourceLimits) -> bool {
        wanted.memory > 0 && wanted.processes != 1 && self.group.has(Controller::Memory)
    }

    pub(crate) fn note_cpu_time_spent(&self) {
        self.cpu_time_spent.store(true, Ordering::Release);
    }
}
