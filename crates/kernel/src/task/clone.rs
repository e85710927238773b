//! clone(2), fork(2), vfork(2): new threads and processes.

use alloc::sync::Arc;
use core::sync::atomic::Ordering::Relaxed;

use bitflags::bitflags;

use super::pid_namespace::{self, Admission, PidNamespace};
use super::process::{PID_MAX, Process, RLIMIT_NPROC, Resources, Shares, Sharing};
use super::ptrace::Event;
use super::signal::{AlternateStack, SIGCHLD, SS_DISABLE, Signal};
use super::thread::{Thread, current};
use super::timers::cpu_limit;
use super::user_namespace::UserNamespace;
use super::wait::wait_uninterruptibly;
use super::{Capabilities, Credentials, host_process, ptrace, scheduler, seccomp};
use crate::args::UserPtr;
use crate::errno::{Errno, Result};
use crate::platform::machine::{Machine, Processes, ThreadState, Threads};
use crate::platform::registers::{RETURN_FULL, TRAP_FLAG};
use crate::platform::user::UserAddress;
use crate::state::{ProcessFiles, kernel};
use crate::task::ids::{Pid, Tid};

bitflags! {
    /// `CLONE_*` (clone(2)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CloneFlags: u64 {
        /// Share memory.
        const VM = 0x100;
        /// Share root, working directory and umask.
        const FS = 0x200;
        /// Share descriptors.
        const FILES = 0x400;
        /// Share signal handlers.
        const SIGHAND = 0x800;
        /// Make a pidfd.
        const PIDFD = 0x1000;
        /// Trace the child, too.
        const PTRACE = 0x2000;
        /// Wait until the child gives the memory back.
        const VFORK = 0x4000;
        /// The caller's parent is the parent.
        const PARENT = 0x8000;
        /// In the same process.
        const THREAD = 0x1_0000;
        /// New mounts.
        const NEWNS = 0x2_0000;
        /// Share semaphore undos.
        const SYSVSEM = 0x4_0000;
        /// Set the segment base.
        const SETTLS = 0x8_0000;
        /// Tell the maker the id.
        const PARENT_SETTID = 0x10_0000;
        /// Clear the id at the end.
        const CHILD_CLEARTID = 0x20_0000;
        /// Ignored.
        const DETACHED = 0x40_0000;
        /// Do not trace the child.
        const UNTRACED = 0x80_0000;
        /// Tell the child its id.
        const CHILD_SETTID = 0x100_0000;
        /// New view of control groups.
        const NEWCGROUP = 0x200_0000;
        /// New host name.
        const NEWUTS = 0x400_0000;
        /// New System V objects.
        const NEWIPC = 0x800_0000;
        /// New users.
        const NEWUSER = 0x1000_0000;
        /// New process ids.
        const NEWPID = 0x2000_0000;
        /// New network.
        const NEWNET = 0x4000_0000;
        /// Share the I/O context.
        const IO = 0x8000_0000;
        /// Default signal handlers.
        const CLEAR_SIGHAND = 0x1_0000_0000;
        /// Into a control group.
        const INTO_CGROUP = 0x2_0000_0000;
    }
}

/// New namespaces of all kinds.
pub const NAMESPACES: CloneFlags = CloneFlags::NEWNS
    .union(CloneFlags::NEWCGROUP)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUSER)
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWNET);

/// What clone(2) and clone3(2) ask for.
pub struct Request {
    /// `CLONE_*`.
    pub flags: CloneFlags,
    /// Sent to the parent when the child ends.
    pub exit_signal: Option<Signal>,
    /// Stack pointer of the new thread; 0 for the caller's.
    pub stack: u64,
    /// Where `CLONE_PARENT_SETTID` wants the id.
    pub parent_tid: UserPtr<u32>,
    /// Where `CLONE_CHILD_SETTID` wants the id and `CLONE_CHILD_CLEARTID` a 0.
    pub child_tid: UserAddress,
    /// The segment base of `CLONE_SETTLS`.
    pub tls: u64,
}

impl Request {
    /// Of fork(2) or vfork(2).
    pub fn plain(flags: CloneFlags) -> Self {
        Self {
            flags,
            exit_signal: Some(SIGCHLD),
            stack: 0,
            parent_tid: UserPtr::NULL,
            child_tid: UserAddress::NULL,
            tls: 0,
        }
    }

    fn check(&self) -> Result<()> {
        let has = |flags| self.flags.contains(flags);
        if has(CloneFlags::NEWNS | CloneFlags::FS) || has(CloneFlags::NEWUSER | CloneFlags::FS) {
            return Err(Errno::EINVAL);
        }
        if self.flags.intersects(NAMESPACES) {
            check_may_make(self.flags)?;
        }
        let thread_without_signals = has(CloneFlags::THREAD) && !has(CloneFlags::SIGHAND);
        let signals_without_memory = has(CloneFlags::SIGHAND) && !has(CloneFlags::VM);
        let process = &current().process;
        let is_init = process.pid == super::process::FIRST_PID || process.leads_pid_namespace();
        let is_between_pid_namespaces =
            !process.pid_namespace_for_children.borrow_mut().is(&process.pid_namespace);
        // Signal actions are shared by the threads of a process only.
        let signals_between_processes = has(CloneFlags::SIGHAND) && !has(CloneFlags::THREAD);
        if thread_without_signals
            || signals_without_memory
            || signals_between_processes
            || has(CloneFlags::PIDFD | CloneFlags::THREAD)
            // All threads of a process have the same namespaces.
            || has(CloneFlags::THREAD) && self.flags.intersects(NAMESPACES)
            || has(CloneFlags::SETTLS) && self.tls >= thaw_abi::layout::GUEST_MAX
            || has(CloneFlags::PARENT) && is_init
            || has(CloneFlags::THREAD) && is_between_pid_namespaces
        {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }
}

/// A thread, and its process if that is new, too, of which nobody knows yet. Dropped, it
/// gives back what it shares with its maker, and nobody will ever have known it.
pub struct NewTask {
    thread: Arc<Thread>,
    flags: CloneFlags,
    /// What the maker's tracer hears of it.
    event: Option<Event>,
    /// Its number as the maker sees it. It may have ended, and have none any more, before the maker goes on.
    number: u32,
    /// The same as the maker's tracer sees it.
    number_for_tracer: u64,
    admission: Admission,
    is_known: bool,
}

impl NewTask {
    /// Makes what a call asks for; `EINVAL`, `EPERM`, `EAGAIN`.
    pub fn prepare(request: &Request) -> Result<Self> {
        request.check()?;
        if current().is_dying() {
            // Whoever ends this process, or executes another program in it, does not know of more
            // threads than there are. This one never gets back to the guest.
            return Err(Errno::ERESTARTNOINTR);
        }
        let maker = &current().process;
        let tasks = &kernel().tasks;
        if tasks.threads.borrow_mut().len() as u64 >= PID_MAX as u64 || has_too_many(maker) {
            return Err(Errno::EAGAIN);
        }
        let tid = tasks.new_id();
        let is_thread = request.flags.contains(CloneFlags::THREAD);
        let credentials =
            (!is_thread).then(|| credentials_for(maker, request.flags)).transpose()?;
        let pid_namespace = pid_namespace_of(request, credentials.as_ref())?;
        let admission = Admission::new(&pid_namespace, tid)?;
        let process = match credentials {
            None => maker.clone(),
            Some(credentials) if Machine::may_fork() => {
                new_process(request, tid.process(), pid_namespace, credentials)?
            }
            // As at the limit of processes: that is what it is.
            Some(_) => return Err(Errno::EAGAIN),
        };
        let thread = new_thread(request, tid, process);
        let event = ptrace::events::of_clone(request.flags, request.exit_signal);
        if event.is_some() || request.flags.contains(CloneFlags::PTRACE) {
            ptrace::events::inherit(&thread);
        }
        let (number, number_for_tracer) = (tid.for_caller(), ptrace::events::for_tracer(tid));
        Ok(Self {
            thread,
            flags: request.flags,
            event,
            number,
            number_for_tracer,
            admission,
            is_known: false,
        })
    }

    /// The thread's process.
    pub fn process(&self) -> &Arc<Process> {
        &self.thread.process
    }

    /// Whether only the scheduler is to be told: the thread runs in the maker's memory.
    fn shares_memory(&self) -> bool {
        self.flags.contains(CloneFlags::VM)
    }

    /// Lets everybody find it. From here on nothing can fail. With memory of its own it may
    /// run already.
    pub fn publish(mut self) -> Result<PublishedTask> {
        seccomp::inherit(&self.thread);
        if self.shares_memory() {
            publish(&self.thread);
        } else {
            host_process::fork(self.process().mm(), &self.thread)?;
        }
        self.is_known = true;
        self.admission.confirm();
        Ok(PublishedTask(self))
    }
}

impl Drop for NewTask {
    fn drop(&mut self) {
        if !self.is_known {
            ptrace::events::disinherit(&self.thread);
            seccomp::release(&self.thread);
        }
        if !self.is_known && !self.flags.contains(CloneFlags::THREAD) {
            self.process().mm().detach();
            self.process().release();
        }
    }
}

/// A thread that everybody can find.
pub struct PublishedTask(NewTask);

impl PublishedTask {
    /// Its number as the maker sees it.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Has the thread run, and waits until it gives borrowed memory back (vfork(2)); its number.
    pub fn start(self) -> u32 {
        if self.0.shares_memory() {
            scheduler::start(&self.0.thread);
        }
        if let Some(event) = self.0.event {
            ptrace::events::report(event, self.0.number_for_tracer);
        }
        // A thread has nothing of its own to give back.
        if self.0.flags.contains(CloneFlags::VFORK) && !self.0.flags.contains(CloneFlags::THREAD) {
            let child = self.0.process();
            let _: Result<()> = wait_uninterruptibly(&child.released, || {
                (!child.borrows_memory.get()).then_some(Ok(()))
            });
            ptrace::events::report(Event::VforkDone, self.0.number_for_tracer);
        }
        self.number()
    }
}

/// Lets everybody find a new thread, and its process if that is new, too. Nothing of
/// clone(2) may fail after this.
pub(super) fn publish(thread: &Arc<Thread>) {
    let (process, tasks) = (&thread.process, &kernel().tasks);
    process.threads.borrow_mut().push(thread.clone());
    tasks.threads.borrow_mut().insert(thread.tid(), thread.clone());
    tasks.processes.borrow_mut().entry(process.pid).or_insert_with(|| process.clone());
    tasks.usage.forked();
    pid_namespace::thread_is_known(thread);
}

/// Where a new thread has a number, or a new process with these credentials.
fn pid_namespace_of(request: &Request, new: Option<&Credentials>) -> Result<PidNamespace> {
    let maker = &current().process;
    if request.flags.contains(CloneFlags::NEWPID)
        && let Some(credentials) = new
    {
        return maker.new_pid_namespace(&credentials.user_namespace);
    }
    Ok(maker.pid_namespace_for_children.borrow_mut().clone())
}

/// A process that nobody knows yet, and without threads.
fn new_process(
    request: &Request,
    pid: Pid,
    pid_namespace: PidNamespace,
    credentials: Credentials,
) -> Result<Arc<Process>> {
    let maker = &current().process;
    let has = |flags| request.flags.contains(flags);
    let mm = if has(CloneFlags::VM) {
        maker.mm()
    } else {
        host_process::prepare_fork()?;
        Arc::new(maker.mm().fork()?)
    };
    let sharing = Sharing { descriptors: has(CloneFlags::FILES), directories: has(CloneFlags::FS) };
    let resources = maker.for_child(sharing);
    if let Err(error) = separate(&resources, &credentials, request.flags) {
        resources.release();
        return Err(error);
    }
    let borrows_memory = has(CloneFlags::VFORK);
    let shares = Shares { mm, resources, borrows_memory, pid_namespace };
    let (parent, exit_signal) = if has(CloneFlags::PARENT) {
        (maker.parent_pid(), maker.family.get().exit_signal)
    } else {
        (Some(maker.pid), request.exit_signal)
    };
    let child = maker.child(pid, parent, exit_signal, shares);
    *child.credentials.borrow_mut() = credentials;
    if has(CloneFlags::CLEAR_SIGHAND) {
        child.signals.borrow_mut().reset_handlers();
    }
    let child = Arc::new(child);
    cpu_limit::watch(&child);
    Ok(child)
}

/// Gives a new process, which has its maker's resources, the namespaces of its own that it is to have.
fn separate(resources: &ProcessFiles, credentials: &Credentials, flags: CloneFlags) -> Result<()> {
    if !flags.intersects(NAMESPACES) {
        return Ok(());
    }
    let owner = &credentials.user_namespace;
    let namespaces = resources.namespaces().unshared(flags, owner)?;
    if flags.contains(CloneFlags::NEWNS) {
        resources.set_fs(resources.copied_mounts(owner)?);
    }
    resources.set_namespaces(Arc::new(namespaces));
    Ok(())
}

/// The credentials of a process in a new user namespace, if `flags` ask for one; else those that it has.
/// `EPERM`: its root directory is not that of its tree of mounts, of which it would see more.
pub(super) fn credentials_for(process: &Process, flags: CloneFlags) -> Result<Credentials> {
    let own = process.credentials.borrow_mut().clone();
    if !flags.contains(CloneFlags::NEWUSER) {
        return Ok(own);
    }
    if !process.with_fs(|fs| fs.root.is(&fs.namespace.root())) {
        return Err(Errno::EPERM);
    }
    let users = UserNamespace::create(&own)?;
    Ok(own.in_namespace(users))
}

/// `EPERM` unless the caller may make namespaces of the kinds that `flags` name.
pub(super) fn check_may_make(flags: CloneFlags) -> Result<()> {
    // In new users, the caller has all capabilities.
    if flags.contains(CloneFlags::NEWUSER) {
        return Ok(());
    }
    current().process.credentials.borrow_mut().require_in_own(Capabilities::SYS_ADMIN)
}

/// Whether the user of a process has as many threads as `RLIMIT_NPROC` allows. Root and those who may
/// exceed limits are not looked at (`copy_process` in kernel/fork.c).
fn has_too_many(maker: &Process) -> bool {
    let limit = maker.limits.borrow_mut()[RLIMIT_NPROC].current;
    let (uid, may_exceed) = {
        let own = maker.credentials.borrow_mut();
        let may = own.can(Capabilities::SYS_RESOURCE) || own.can(Capabilities::SYS_ADMIN);
        (own.uid, own.uid == 0 || may)
    };
    if may_exceed || limit >= PID_MAX as u64 {
        return false;
    }
    let is_of_user = |process: &Process| process.credentials.borrow_mut().uid == uid;
    let tasks = &kernel().tasks;
    let threads = tasks.threads.borrow_mut();
    let threads = threads.values().filter(|thread| is_of_user(&thread.process)).count();
    // Those that nobody has waited for count.
    let processes = tasks.processes.borrow_mut();
    let ended = processes.values().filter(|it| it.is_zombie() && is_of_user(it)).count();
    (threads + ended) as u64 >= limit
}

/// A thread that nobody knows yet.
fn new_thread(request: &Request, tid: Tid, process: Arc<Process>) -> Arc<Thread> {
    let maker = current();
    let mut frame = maker.frame().get();
    frame.rax = 0;
    frame.orig_rax = u64::MAX;
    frame.how = RETURN_FULL;
    if maker.tracee.is_traced() {
        // A step is the maker's.
        frame.rflags &= !TRAP_FLAG;
    }
    if request.stack != 0 {
        frame.rsp = request.stack;
    }
    let has = |flags| request.flags.contains(flags);
    let thread = Thread::new(tid, process, frame);
    thread.name.set(maker.name.get());
    thread.scheduling.set(maker.scheduling.get().inherited());
    thread.timer_slack.set(maker.timer_slack.get().inherited());
    thread.memory_policy.set(maker.memory_policy.get());
    let fs_base = if has(CloneFlags::SETTLS) { request.tls } else { Machine::fs_base() };
    thread.context.set_fs_base(fs_base);
    thread.context.set_gs_base(maker.context.gs_base());
    thread.context.copy_fpu(&maker.context);
    let (mask, alternate_stack) = {
        let signals = maker.signals.borrow_mut();
        (signals.saved_mask.unwrap_or(signals.mask), signals.alternate_stack)
    };
    let shares_stack = has(CloneFlags::VM) && !has(CloneFlags::VFORK);
    let mut signals = thread.signals.borrow_mut();
    signals.mask = mask;
    signals.alternate_stack = if shares_stack {
        AlternateStack { flags: SS_DISABLE, ..Default::default() }
    } else {
        alternate_stack
    };
    drop(signals);
    if has(CloneFlags::CHILD_SETTID) {
        thread.set_child_tid.store(request.child_tid.0, Relaxed);
    }
    if has(CloneFlags::CHILD_CLEARTID) {
        thread.clear_child_tid.store(request.child_tid.0, Relaxed);
    }
    thread
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn a_thread_that_is_to_end_makes_no_other_one() {
        let _sandbox = Sandbox::new();
        let flags = CloneFlags::THREAD | CloneFlags::SIGHAND | CloneFlags::VM;
        let prepare = || NewTask::prepare(&Request::plain(flags)).map(drop);
        prepare().unwrap();
        current().dying.store(true, Relaxed);
        assert_eq!(prepare(), Err(Errno::ERESTARTNOINTR));
    }
}
