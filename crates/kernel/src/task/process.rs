//! Processes: what the threads of one program share, and how processes are
//! related.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::ids::{Pgid, Pid, Sid, Tid};
use super::oom::OomAdjustment;
use super::pid_namespace::PidNamespace;
use super::sched_attributes::Scheduling;
use super::scheduler::RunState;
use super::signal::{ProcessSignals, Signal};
use super::user_namespace::UserNamespace;
use super::wait::WaitQueue;
use super::{Credentials, Space, Thread};
use crate::state::{ProcessFiles, kernel};
use crate::sync::KernelCell;

/// All processes and threads of the sandbox.
#[derive(Default)]
pub struct Tasks {
    /// Living threads by thread id.
    pub threads: KernelCell<BTreeMap<Tid, Arc<Thread>>>,
    /// Processes by process id, those included that have ended and that nobody
    /// has waited for.
    pub processes: KernelCell<BTreeMap<Pid, Arc<Process>>>,
    /// The last process or thread id that was given out.
    pub(super) last_id: AtomicU32,
    /// How many times ids have begun anew.
    pub(super) wraps: AtomicU32,
    /// The last number of an address space.
    last_space: AtomicU64,
    /// How many times the out-of-memory killer has ended a process ([`super::oom_killer`]).
    pub oom_kills: KernelCell<u64>,
    /// Who is traced (ptrace(2)).
    pub tracees: super::ptrace::Tracees,
    /// Who may not make all system calls (seccomp(2)).
    pub restricted: super::seccomp::Restricted,
    /// How busy the sandbox is.
    pub usage: super::usage::Usage,
    /// Those who wait for the memory of such a process.
    pub(super) memory_is_back: WaitQueue,
    /// The address space that each host process serves.
    pub(super) hosted: KernelCell<Vec<Option<Arc<Space>>>>,
}

/// `kernel.pid_max`: ids are below this.
pub const PID_MAX: u32 = 4_194_304;
/// After a wrap, ids begin here (RESERVED_PIDS in Linux' kernel/pid.c).
pub(super) const FIRST_REUSED_ID: u32 = 300;

/// Process id of the first guest process.
pub const FIRST_PID: Pid = Pid::new(1);

impl Tasks {
    /// An id for a thread that no process, thread, group or session uses.
    pub fn new_id(&self) -> Tid {
        loop {
            let mut id = self.last_id.load(Relaxed) + 1;
            if id >= PID_MAX {
                id = FIRST_REUSED_ID;
                self.wraps.fetch_add(1, Relaxed);
            }
            self.last_id.store(id, Relaxed);
            if !self.is_in_use(id) {
                return Tid::new(id);
            }
        }
    }

    /// Whether a process, thread, group or session has an id.
    pub fn is_in_use(&self, id: u32) -> bool {
        let (tid, pid) = (Tid::new(id), Pid::new(id));
        let processes = self.processes.borrow_mut();
        self.threads.borrow_mut().contains_key(&tid)
            || processes.contains_key(&pid)
            || processes.values().any(|process| {
                let family = process.family.get();
                family.group == pid.led_group() || family.session == pid.led_session()
            })
    }

    /// A number for a new address space.
    pub fn new_space_id(&self) -> u64 {
        self.last_space.fetch_add(1, Relaxed) + 1
    }

    /// The process with an id, unless it is gone.
    #[inline(never)]
    pub fn process(&self, pid: Pid) -> Option<Arc<Process>> {
        self.processes.borrow_mut().get(&pid).cloned()
    }

    /// The process with the lowest id that is not below `pid`.
    pub fn process_from(&self, pid: Pid) -> Option<Arc<Process>> {
        self.processes.borrow_mut().range(pid..).next().map(|(_, process)| process.clone())
    }

    /// The thread with an id.
    #[inline(never)]
    pub fn thread(&self, tid: Tid) -> Option<Arc<Thread>> {
        self.threads.borrow_mut().get(&tid).cloned()
    }

    /// The address space of the first host process, which is there as long as the sandbox.
    pub fn first_space(&self) -> Arc<Space> {
        match self.hosted.borrow_mut().first() {
            Some(Some(space)) => space.clone(),
            _ => panic!("there is no host process yet"),
        }
    }

    /// All processes, those included that have ended and that nobody has waited for.
    pub fn all_processes(&self) -> Vec<Arc<Process>> {
        self.processes_where(|_| true)
    }

    /// All processes that fulfil a condition.
    pub fn processes_where(&self, condition: impl Fn(&Process) -> bool) -> Vec<Arc<Process>> {
        self.processes.borrow_mut().values().filter(|process| condition(process)).cloned().collect()
    }

    /// All threads.
    pub fn all_threads(&self) -> Vec<Arc<Thread>> {
        self.threads.borrow_mut().values().cloned().collect()
    }

    /// Number of threads that run or could run.
    pub fn runnable(&self) -> usize {
        let threads = self.threads.borrow_mut();
        threads.values().filter(|thread| thread.sched.get().state == RunState::Runnable).count()
    }

    /// The address spaces of all living processes, each once, that of the first
    /// process first.
    pub fn spaces(&self) -> Vec<Arc<Space>> {
        let mut known = BTreeSet::new();
        let processes = self.processes.borrow_mut();
        let living = processes.values().filter(|process| !process.is_zombie());
        living
            .map(|process| process.mm())
            .filter(|space| known.insert(Arc::as_ptr(space)))
            .collect()
    }
}

/// A resource limit: `struct rlimit64` (getrlimit(2)).
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ResourceLimit {
    /// Soft limit.
    pub current: u64,
    /// Hard limit.
    pub maximum: u64,
}

/// Index of `RLIMIT_CPU` in [`Process::limits`], in seconds.
pub const RLIMIT_CPU: usize = 0;
/// Index of `RLIMIT_FSIZE` in [`Process::limits`].
pub const RLIMIT_FSIZE: usize = 1;
/// Index of `RLIMIT_DATA` in [`Process::limits`].
pub const RLIMIT_DATA: usize = 2;
/// Index of `RLIMIT_STACK` in [`Process::limits`].
pub const RLIMIT_STACK: usize = 3;
/// Index of `RLIMIT_NPROC` in [`Process::limits`].
pub const RLIMIT_NPROC: usize = 6;
/// Index of `RLIMIT_NOFILE` in [`Process::limits`].
pub const RLIMIT_NOFILE: usize = 7;

/// Index of `RLIMIT_MEMLOCK` in [`Process::limits`].
pub const RLIMIT_MEMLOCK: usize = 8;
/// Index of `RLIMIT_AS` in [`Process::limits`].
pub const RLIMIT_AS: usize = 9;
/// Index of `RLIMIT_SIGPENDING` in [`Process::limits`].
pub const RLIMIT_SIGPENDING: usize = 11;
/// Index of `RLIMIT_MSGQUEUE` in [`Process::limits`], in bytes.
pub const RLIMIT_MSGQUEUE: usize = 12;
/// Index of `RLIMIT_NICE` in [`Process::limits`].
pub const RLIMIT_NICE: usize = 13;
/// Index of `RLIMIT_RTPRIO` in [`Process::limits`].
pub const RLIMIT_RTPRIO: usize = 14;

/// How a process ended (wait(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// exit(2) with the low 8 bits of the code.
    Exited(u8),
    /// By a signal.
    Killed(Signal),
}

impl ExitStatus {
    /// As wait(2) stores it.
    pub fn to_wait_status(self) -> u32 {
        match self {
            ExitStatus::Exited(code) => (code as u32) << 8,
            ExitStatus::Killed(signal) => signal.number(),
        }
    }
}

/// Where a process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Its threads may run.
    Running,
    /// Stopped by a signal.
    Stopped(Signal),
    /// Ended; waits for its parent to ask.
    Zombie(ExitStatus),
}

/// What a parent has not been told yet (wait(2), `WUNTRACED` and `WCONTINUED`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreported {
    /// The signal that has stopped the process.
    pub stopped: Option<Signal>,
    /// It has been continued.
    pub continued: bool,
}

/// How a process is related to others.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The parent; the first process and those that nobody waits for have none.
    pub parent: Option<Pid>,
    /// Process group (setpgid(2)).
    pub group: Pgid,
    /// Session (setsid(2)).
    pub session: Sid,
    /// The signal that the parent gets at the end.
    pub exit_signal: Option<Signal>,
    /// The thread of the parent that has made it (ptrace(2), `PTRACE_TRACEME`).
    pub maker: Option<Tid>,
    /// Whether it has executed a program since it was made (setpgid(2), `EACCES`).
    pub has_executed: bool,
}

impl Family {
    /// That of a process without a parent which leads a session of its own.
    const fn of_leader(pid: Pid) -> Self {
        Self {
            parent: None,
            group: pid.led_group(),
            session: pid.led_session(),
            exit_signal: None,
            maker: None,
            has_executed: true,
        }
    }
}

/// What a process has of the layers above.
pub trait Resources {
    /// What a child has. It is counted as one more that has what is shared.
    fn for_child(&self, sharing: Sharing) -> Self;

    /// The process ends, or is not made after all: it has nothing any more.
    fn release(&self);
}

/// What a child shares with its maker instead of having a copy (clone(2)).
#[derive(Clone, Copy, Debug)]
pub struct Sharing {
    /// `CLONE_FILES`: descriptors.
    pub descriptors: bool,
    /// `CLONE_FS`: root directory, working directory and umask.
    pub directories: bool,
}

/// A guest process. The layers above find what they keep for it by dereferencing it.
pub struct Process {
    /// Process id.
    pub pid: Pid,
    /// Where it has a number that processes see.
    pub pid_namespace: PidNamespace,
    /// Where its children have one.
    pub pid_namespace_for_children: KernelCell<PidNamespace>,
    /// Memory; shared between processes only after vfork(2) and its like.
    mm: KernelCell<Arc<Space>>,
    /// Its living threads.
    pub threads: KernelCell<Vec<Arc<Thread>>>,
    /// Relations.
    pub family: KernelCell<Family>,
    /// Whether it runs, is stopped or has ended.
    pub life: KernelCell<Life>,
    /// What the parent has not been told.
    pub unreported: KernelCell<Unreported>,
    /// Set once all threads have to end.
    pub exiting: KernelCell<Option<ExitStatus>>,
    /// Woken when a child changes its state.
    pub children_changed: WaitQueue,
    /// Woken when a thread ends (execve(2) waits for the others).
    pub thread_ended: WaitQueue,
    /// Woken when the process continues or dies while it is stopped.
    pub resumed: WaitQueue,
    /// Woken when the process ends, or has its own memory after vfork(2).
    pub released: WaitQueue,
    /// Whether it still uses the memory that vfork(2) has lent.
    pub borrows_memory: KernelCell<bool>,
    /// What it has of the layers above.
    resources: ProcessFiles,
    /// User and group ids.
    pub credentials: KernelCell<Credentials>,
    /// Resource limits by `RLIMIT_*`.
    pub limits: KernelCell<[ResourceLimit; 16]>,
    /// Arguments, each NUL-terminated, for `/proc/self/cmdline`.
    pub command_line: KernelCell<Vec<u8>>,
    /// Environment at start, each NUL-terminated, for `/proc/self/environ`.
    pub environment: KernelCell<Vec<u8>>,
    /// Auxiliary vector at start, for `/proc/self/auxv`.
    pub auxiliary_vector: KernelCell<Vec<u64>>,
    /// Signal actions, and signals for any thread of the process.
    pub signals: KernelCell<ProcessSignals>,
    /// Interval timers (setitimer(2)).
    pub timers: crate::task::timers::itimer::IntervalTimers,
    /// What looks at `RLIMIT_CPU`.
    pub cpu_limit: crate::task::timers::cpu_limit::CpuLimit,
    /// POSIX timers (timer_create(2)).
    pub posix_timers: crate::task::timers::posix::PosixTimers,
    /// `PR_SET_DUMPABLE` (prctl(2)); nothing is ever dumped.
    pub dumpable: KernelCell<bool>,
    /// The user namespace that its program was executed in (`mm->user_ns`): who looks into it while it is
    /// not dumpable has capabilities there.
    pub program_users: KernelCell<UserNamespace>,
    /// `PR_SET_CHILD_SUBREAPER` (prctl(2)).
    pub is_subreaper: KernelCell<bool>,
    /// What personality(2) was told.
    pub personality: KernelCell<u32>,
    /// Whether it is the kernel's own first process, to which no signal gets.
    pub is_init: KernelCell<bool>,
    /// `PR_SET_PDEATHSIG` (prctl(2)); 0 for none.
    pub parent_death_signal: KernelCell<Option<Signal>>,
    /// How many programs it has executed.
    pub executions: KernelCell<u32>,
    /// The program that it has last tried to execute in vain, since there is none; empty: none. See
    /// `exec::missing`.
    pub missing_program: KernelCell<Vec<u8>>,
    /// `oom_score_adj`; see [`Process::oom_score_adj`].
    pub(super) oom_adjustment: KernelCell<OomAdjustment>,
    /// When it started, on the guest's `CLOCK_BOOTTIME`, in nanoseconds.
    pub start_ns: u64,
    /// CPU time of threads that have ended, in nanoseconds.
    pub ended_cpu_ns: AtomicU64,
    /// CPU time of children that have been waited for, in nanoseconds.
    pub children_cpu_ns: AtomicU64,
    /// Most memory that was resident when somebody looked, and when it ended, in bytes.
    max_resident: AtomicU64,
    /// The same of a child that has been waited for, or of a child of that: the largest.
    children_max_resident: AtomicU64,
    /// What its main thread has left.
    pub remains: KernelCell<Remains>,
    /// Who hears before the parent that it has ended: the tracer of its main thread (ptrace(2)).
    pub(super) awaits_tracer: KernelCell<Option<Pid>>,
}

/// What `/proc` shows of a main thread that has ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Remains {
    /// Who traced it.
    pub tracer: Option<Pid>,
    /// Its name, NUL-padded.
    pub name: [u8; 16],
    /// What it had asked of the scheduler.
    pub scheduling: Scheduling,
    /// The signals that it had blocked.
    pub blocked: u64,
    /// Mode and number of its filters (seccomp(2)).
    pub seccomp: (u8, u32),
}

impl Deref for Process {
    type Target = ProcessFiles;

    #[inline]
    fn deref(&self) -> &ProcessFiles {
        &self.resources
    }
}

/// `ADDR_NO_RANDOMIZE` (personality(2)).
pub const ADDR_NO_RANDOMIZE: u32 = 0x0004_0000;

impl Process {
    /// A random number with these bits, for an address of a new program (address space layout
    /// randomization); 0 if the process does without (personality(2)).
    pub fn random_bits(&self, bits: u64) -> u64 {
        match self.personality.get() & ADDR_NO_RANDOMIZE {
            0 => kernel().random.borrow_mut().next_u64() & bits,
            _ => 0,
        }
    }

    /// The first process of a sandbox, without threads.
    pub fn first(credentials: Credentials, resources: ProcessFiles) -> Self {
        let family = Family::of_leader(FIRST_PID);
        let shares = Shares::of_first(Arc::new(Space::new()), resources);
        Self { credentials: KernelCell::new(credentials), ..Self::new(FIRST_PID, family, shares) }
    }

    /// The process of a thread of the kernel's own ([`super::work`]). It has no memory: `mm` is
    /// only where its thread runs.
    pub fn of_kernel(
        pid: Pid,
        mm: Arc<Space>,
        credentials: Credentials,
        resources: ProcessFiles,
    ) -> Self {
        let family = Family::of_leader(pid);
        let shares = Shares::of_first(mm.clone(), resources);
        let process =
            Self { credentials: KernelCell::new(credentials), ..Self::new(pid, family, shares) };
        mm.detach();
        process
    }

    /// A process that the host has asked for: the leader of a session of its own, with empty
    /// memory and without threads. Nobody waits for it.
    pub fn from_outside(pid: Pid, credentials: Credentials, resources: ProcessFiles) -> Self {
        let family = Family::of_leader(pid);
        let shares = Shares::of_first(Arc::new(Space::new()), resources);
        Self { credentials: KernelCell::new(credentials), ..Self::new(pid, family, shares) }
    }

    /// A child of this process, without threads.
    pub fn child(
        &self,
        pid: Pid,
        parent: Option<Pid>,
        exit_signal: Option<Signal>,
        shares: Shares,
    ) -> Self {
        let maker = super::thread::running().map(|thread| thread.tid());
        let family =
            Family { parent, exit_signal, maker, has_executed: false, ..self.family.get() };
        Self {
            credentials: KernelCell::new(self.credentials.borrow_mut().clone()),
            limits: KernelCell::new(self.limits.get()),
            command_line: KernelCell::new(self.command_line.borrow_mut().clone()),
            environment: KernelCell::new(self.environment.borrow_mut().clone()),
            auxiliary_vector: KernelCell::new(self.auxiliary_vector.borrow_mut().clone()),
            signals: KernelCell::new(self.signals.borrow_mut().inherited()),
            dumpable: KernelCell::new(self.dumpable.get()),
            program_users: KernelCell::new(self.program_users.borrow_mut().clone()),
            personality: KernelCell::new(self.personality.get()),
            oom_adjustment: KernelCell::new(self.oom_adjustment.get()),
            ..Self::new(pid, family, shares)
        }
    }

    fn new(pid: Pid, family: Family, shares: Shares) -> Self {
        shares.mm.attach();
        Self {
            pid,
            pid_namespace: shares.pid_namespace.clone(),
            pid_namespace_for_children: KernelCell::new(shares.pid_namespace),
            mm: KernelCell::new(shares.mm),
            threads: KernelCell::default(),
            family: KernelCell::new(family),
            life: KernelCell::new(Life::Running),
            unreported: KernelCell::default(),
            exiting: KernelCell::new(None),
            children_changed: WaitQueue::new(),
            thread_ended: WaitQueue::new(),
            resumed: WaitQueue::new(),
            released: WaitQueue::new(),
            borrows_memory: KernelCell::new(shares.borrows_memory),
            resources: shares.resources,
            credentials: KernelCell::default(),
            limits: KernelCell::new(DEFAULT_LIMITS),
            command_line: KernelCell::default(),
            environment: KernelCell::default(),
            auxiliary_vector: KernelCell::default(),
            signals: KernelCell::default(),
            timers: Default::default(),
            cpu_limit: Default::default(),
            posix_timers: Default::default(),
            dumpable: KernelCell::new(true),
            program_users: KernelCell::default(),
            is_subreaper: KernelCell::new(false),
            personality: KernelCell::new(0),
            is_init: KernelCell::new(false),
            parent_death_signal: KernelCell::new(None),
            executions: KernelCell::default(),
            missing_program: KernelCell::default(),
            oom_adjustment: KernelCell::default(),
            start_ns: crate::time::clock::boottime_ns(),
            ended_cpu_ns: AtomicU64::new(0),
            children_cpu_ns: AtomicU64::new(0),
            max_resident: AtomicU64::new(0),
            children_max_resident: AtomicU64::new(0),
            remains: KernelCell::default(),
            awaits_tracer: KernelCell::new(None),
        }
    }

    /// Takes credentials in other namespaces. Nobody there looks into one that comes with more rights than
    /// theirs (`commit_creds`, kernel/cred.c), until it executes a program.
    pub fn take_user_namespace(&self, new: Credentials) {
        let mut own = self.credentials.borrow_mut();
        if !own.includes(&new) {
            self.dumpable.set(false);
        }
        let old = core::mem::replace(&mut *own, new);
        drop(own);
        drop(old);
    }

    /// The memory.
    pub fn mm(&self) -> Arc<Space> {
        self.mm.borrow_mut().clone()
    }

    /// Looks how much memory is resident, and returns the most that ever was when somebody looked, in
    /// bytes.
    pub fn look_at_resident(&self) -> u64 {
        let resident = self.mm().resident();
        self.max_resident.fetch_max(resident, Relaxed).max(resident)
    }

    /// Most memory that was resident when somebody looked, in bytes.
    pub fn max_resident(&self) -> u64 {
        self.max_resident.load(Relaxed)
    }

    /// The largest of its children that have been waited for, and of theirs, in bytes.
    pub fn children_max_resident(&self) -> u64 {
        self.children_max_resident.load(Relaxed)
    }

    /// A child has been waited for: what it has used, and its own children, counts for its parent.
    pub fn add_child(&self, child: &Process) {
        let cpu_ns = child.cpu_ns() + child.children_cpu_ns.load(Relaxed);
        self.children_cpu_ns.fetch_add(cpu_ns, Relaxed);
        let resident = child.max_resident().max(child.children_max_resident());
        self.children_max_resident.fetch_max(resident, Relaxed);
    }

    /// Gives the process other memory (execve(2) of one that shares it).
    pub fn set_mm(&self, mm: Arc<Space>) -> Arc<Space> {
        mm.attach();
        let old = core::mem::replace(&mut *self.mm.borrow_mut(), mm);
        old.detach();
        old
    }

    /// Process id of the parent, if it has one.
    pub fn parent_pid(&self) -> Option<Pid> {
        self.family.get().parent
    }

    /// Number of the parent in a PID namespace, 0 without a parent there.
    pub fn parent_number(&self, namespace: &PidNamespace) -> u32 {
        self.parent_pid().map_or(0, |parent| parent.number_in(namespace))
    }

    /// The parent.
    pub fn parent(&self) -> Option<Arc<Process>> {
        kernel().tasks.process(self.parent_pid()?)
    }

    /// Process group (setpgid(2)).
    pub fn process_group(&self) -> Pgid {
        self.family.get().group
    }

    /// Session (setsid(2)).
    pub fn session(&self) -> Sid {
        self.family.get().session
    }

    /// Whether it leads its session.
    pub fn leads_session(&self) -> bool {
        self.session() == self.pid.led_session()
    }

    /// Whether the process has ended.
    pub fn is_zombie(&self) -> bool {
        matches!(self.life.get(), Life::Zombie(_))
    }

    /// CPU time of all threads, in nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        let living: u64 = self.threads.borrow_mut().iter().map(|thread| thread.cpu_ns()).sum();
        living + self.ended_cpu_ns.load(Relaxed)
    }
}

/// What a new process shares with its maker, or has copies of.
pub struct Shares {
    /// Memory.
    pub mm: Arc<Space>,
    /// What it has of the layers above.
    pub resources: ProcessFiles,
    /// The maker sleeps until the memory is given back (vfork(2)).
    pub borrows_memory: bool,
    /// Where it has a number.
    pub pid_namespace: PidNamespace,
}

impl Shares {
    /// Of a process without a maker.
    fn of_first(mm: Arc<Space>, resources: ProcessFiles) -> Self {
        Self { mm, resources, borrows_memory: false, pid_namespace: PidNamespace::default() }
    }
}

/// No limit.
pub const RLIM_INFINITY: u64 = u64::MAX;

impl ResourceLimit {
    /// The same soft and hard limit.
    pub const fn both(limit: u64) -> Self {
        Self { current: limit, maximum: limit }
    }
}

/// The limits a program starts with, by `RLIMIT_*`: as a login session on an
/// ordinary machine.
pub const DEFAULT_LIMITS: [ResourceLimit; 16] = {
    let mut limits = [ResourceLimit::both(RLIM_INFINITY); 16];
    limits[RLIMIT_STACK] = ResourceLimit { current: 8 << 20, maximum: RLIM_INFINITY };
    // RLIMIT_CORE.
    limits[4] = ResourceLimit { current: 0, maximum: RLIM_INFINITY };
    limits[RLIMIT_NPROC] = ResourceLimit::both(32768);
    limits[RLIMIT_NOFILE] = ResourceLimit { current: 1024, maximum: 1 << 20 };
    limits[RLIMIT_MEMLOCK] = ResourceLimit::both(8 << 20);
    limits[RLIMIT_SIGPENDING] = ResourceLimit::both(32768);
    limits[RLIMIT_MSGQUEUE] = ResourceLimit::both(819200);
    limits[RLIMIT_NICE] = ResourceLimit::both(0);
    limits[RLIMIT_RTPRIO] = ResourceLimit::both(0);
    limits
};
