//! clone(2), fork(2), vfork(2): new threads and processes.

use alloc::sync::Arc;
use core::sync::atomic::Ordering::Relaxed;

use bitflags::bitflags;

use super::hooks::above;
use super::process::{PID_MAX, Process, RLIMIT_NPROC, Resources, Shares, Sharing};
use super::signal::{AlternateStack, SIGCHLD, SIGNAL_COUNT, SS_DISABLE};
use super::thread::{Thread, current};
use super::wait::wait_uninterruptibly;
use super::{host_process, scheduler};
use crate::args::Word;
use crate::errno::{Errno, Result};
use crate::platform::machine::{Machine, Processes, ThreadState, Threads};
use crate::platform::registers::RETURN_FULL;
use crate::platform::user::UserAddress;
use crate::state::kernel;

bitflags! {
    /// `CLONE_*` (clone(2)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct CloneFlags: u64 {
        const VM = 0x100;
        const FS = 0x200;
        const FILES = 0x400;
        const SIGHAND = 0x800;
        const PIDFD = 0x1000;
        const PTRACE = 0x2000;
        const VFORK = 0x4000;
        const PARENT = 0x8000;
        const THREAD = 0x1_0000;
        const NEWNS = 0x2_0000;
        const SYSVSEM = 0x4_0000;
        const SETTLS = 0x8_0000;
        const PARENT_SETTID = 0x10_0000;
        const CHILD_CLEARTID = 0x20_0000;
        const DETACHED = 0x40_0000;
        const UNTRACED = 0x80_0000;
        const CHILD_SETTID = 0x100_0000;
        const NEWCGROUP = 0x200_0000;
        const NEWUTS = 0x400_0000;
        const NEWIPC = 0x800_0000;
        const NEWUSER = 0x1000_0000;
        const NEWPID = 0x2000_0000;
        const NEWNET = 0x4000_0000;
        const IO = 0x8000_0000;
        const CLEAR_SIGHAND = 0x1_0000_0000;
        const INTO_CGROUP = 0x2_0000_0000;
    }
}

/// New namespaces need privileges that no guest has.
const NAMESPACES: CloneFlags = CloneFlags::NEWNS
    .union(CloneFlags::NEWCGROUP)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUSER)
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWNET);

/// What clone(2) and clone3(2) ask for.
struct Request {
    flags: CloneFlags,
    exit_signal: u32,
    /// Stack pointer of the new thread; 0 for the caller's.
    stack: u64,
    parent_tid: UserAddress,
    child_tid: UserAddress,
    pidfd: UserAddress,
    tls: u64,
}

/// fork(2).
pub fn fork() -> Result<u64> {
    clone_task(&Request::plain(CloneFlags::empty()))
}

/// vfork(2).
pub fn vfork() -> Result<u64> {
    clone_task(&Request::plain(CloneFlags::VM | CloneFlags::VFORK))
}

/// clone(2): flags, stack, parent_tid, child_tid, tls.
pub fn clone(
    Word(flags_and_signal): Word,
    UserAddress(stack): UserAddress,
    parent_tid: UserAddress,
    child_tid: UserAddress,
    Word(tls): Word,
) -> Result<u64> {
    const SIGNAL_MASK: u64 = 0xff;
    let flags = CloneFlags::from_bits_truncate(flags_and_signal & !SIGNAL_MASK & 0xffff_ffff);
    clone_task(&Request {
        flags,
        exit_signal: (flags_and_signal & SIGNAL_MASK) as u32,
        stack,
        parent_tid,
        child_tid,
        // clone(2): the pidfd goes where the thread id would.
        pidfd: parent_tid,
        tls,
    })
}

/// `struct clone_args`, as far as all versions have it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// clone3(2).
pub fn clone3(arguments: UserAddress, size: usize) -> Result<u64> {
    const OLDEST: usize = 64;
    if size < OLDEST {
        return Err(Errno::EINVAL);
    }
    let mut bytes = [0u8; size_of::<CloneArgs>()];
    let known = size.min(bytes.len());
    arguments.read_bytes(&mut bytes[..known])?;
    for at in known..size.min(4096) {
        if arguments.offset(at as u64).read::<u8>()? != 0 {
            return Err(Errno::E2BIG);
        }
    }
    let wanted: CloneArgs = bytemuck::pod_read_unaligned(&bytes);
    let flags = CloneFlags::from_bits(wanted.flags).ok_or(Errno::EINVAL)?;
    let stack = wanted.stack.checked_add(wanted.stack_size).ok_or(Errno::EINVAL)?;
    let stack_is_odd = (wanted.stack == 0) != (wanted.stack_size == 0);
    if flags.contains(CloneFlags::DETACHED)
        || flags.contains(CloneFlags::INTO_CGROUP)
        || flags.contains(CloneFlags::SIGHAND | CloneFlags::CLEAR_SIGHAND)
        || stack_is_odd
        || wanted.exit_signal > SIGNAL_COUNT as u64
    {
        return Err(Errno::EINVAL);
    }
    if flags.intersects(CloneFlags::THREAD | CloneFlags::PARENT) && wanted.exit_signal != 0 {
        return Err(Errno::EINVAL);
    }
    if wanted.set_tid_size != 0 {
        return Err(Errno::EPERM);
    }
    clone_task(&Request {
        flags,
        exit_signal: wanted.exit_signal as u32,
        stack,
        parent_tid: UserAddress(wanted.parent_tid),
        child_tid: UserAddress(wanted.child_tid),
        pidfd: UserAddress(wanted.pidfd),
        tls: wanted.tls,
    })
}

impl Request {
    fn plain(flags: CloneFlags) -> Self {
        Self {
            flags,
            exit_signal: SIGCHLD,
            stack: 0,
            parent_tid: UserAddress::NULL,
            child_tid: UserAddress::NULL,
            pidfd: UserAddress::NULL,
            tls: 0,
        }
    }

    /// `CLONE_PARENT_SETTID`. An address that cannot be written to does not fail the call.
    fn tell_maker(&self, tid: u32) {
        if self.flags.contains(CloneFlags::PARENT_SETTID) {
            let _ = self.parent_tid.write(&tid);
        }
    }

    fn check(&self) -> Result<()> {
        let has = |flags| self.flags.contains(flags);
        if has(CloneFlags::NEWNS | CloneFlags::FS) || has(CloneFlags::NEWUSER | CloneFlags::FS) {
            return Err(Errno::EINVAL);
        }
        if self.flags.intersects(NAMESPACES) {
            return Err(Errno::EPERM);
        }
        let thread_without_signals = has(CloneFlags::THREAD) && !has(CloneFlags::SIGHAND);
        let signals_without_memory = has(CloneFlags::SIGHAND) && !has(CloneFlags::VM);
        // Signal actions are shared by the threads of a process only.
        let signals_between_processes = has(CloneFlags::SIGHAND) && !has(CloneFlags::THREAD);
        let pidfd_for_two = has(CloneFlags::PIDFD)
            && (has(CloneFlags::THREAD)
                || self.pidfd == self.parent_tid && has(CloneFlags::PARENT_SETTID));
        if thread_without_signals
            || signals_without_memory
            || signals_between_processes
            || pidfd_for_two
            || has(CloneFlags::SETTLS) && self.tls >= thaw_abi::layout::GUEST_MAX
            || has(CloneFlags::PARENT) && current().process.pid == super::process::FIRST_PID
        {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }
}

/// Makes the thread or process; its id.
fn clone_task(request: &Request) -> Result<u64> {
    request.check()?;
    let maker = current();
    let tasks = &kernel().tasks;
    let limit = maker.process.limits.borrow_mut()[RLIMIT_NPROC].current.min(PID_MAX as u64);
    if tasks.threads.borrow_mut().len() as u64 >= limit {
        return Err(Errno::EAGAIN);
    }
    let tid = tasks.new_id();
    if request.flags.contains(CloneFlags::THREAD) {
        let thread = new_thread(request, tid, maker.process.clone());
        publish(&thread);
        request.tell_maker(tid);
        scheduler::start(&thread);
        return Ok(tid as u64);
    }
    if !Machine::may_fork() {
        // As at the limit of processes: that is what it is.
        return Err(Errno::EAGAIN);
    }
    let child = UnpublishedProcess { process: new_process(request, tid)?, is_known: false };
    let thread = new_thread(request, tid, child.process.clone());
    let pidfd = request.flags.contains(CloneFlags::PIDFD);
    let pidfd =
        pidfd.then(|| above().new_pidfd(child.process.clone(), request.pidfd)).transpose()?;
    // From here on, the child is there.
    let shares_memory = request.flags.contains(CloneFlags::VM);
    if shares_memory {
        publish(&thread);
    } else {
        host_process::fork(child.process.mm(), &thread)?;
    }
    let child = child.published();
    request.tell_maker(tid);
    if let Some(open) = pidfd {
        open();
    }
    if shares_memory {
        scheduler::start(&thread);
    }
    if request.flags.contains(CloneFlags::VFORK) {
        let _: Result<()> = wait_uninterruptibly(&child.released, || {
            (!child.borrows_memory.get()).then_some(Ok(()))
        });
    }
    Ok(tid as u64)
}

/// A process that nobody knows yet. Dropped, it gives back what it shares with its
/// maker, and nobody will ever have known it.
struct UnpublishedProcess {
    process: Arc<Process>,
    is_known: bool,
}

impl UnpublishedProcess {
    /// The process, which others know now.
    fn published(mut self) -> Arc<Process> {
        self.is_known = true;
        self.process.clone()
    }
}

impl Drop for UnpublishedProcess {
    fn drop(&mut self) {
        if !self.is_known {
            self.process.mm().detach();
            self.process.release();
        }
    }
}

/// Lets everybody find a new thread, and its process if that is new, too. Nothing of
/// clone(2) may fail after this.
pub(super) fn publish(thread: &Arc<Thread>) {
    let (process, tasks) = (&thread.process, &kernel().tasks);
    process.threads.borrow_mut().push(thread.clone());
    tasks.threads.borrow_mut().insert(thread.tid(), thread.clone());
    tasks.processes.borrow_mut().entry(process.pid).or_insert_with(|| process.clone());
}

fn new_process(request: &Request, pid: u32) -> Result<Arc<Process>> {
    let maker = &current().process;
    let has = |flags| request.flags.contains(flags);
    let mm = if has(CloneFlags::VM) { maker.mm() } else { Arc::new(maker.mm().fork()?) };
    let sharing = Sharing { descriptors: has(CloneFlags::FILES), directories: has(CloneFlags::FS) };
    let resources = maker.for_child(sharing);
    let shares = Shares { mm, resources, borrows_memory: has(CloneFlags::VFORK) };
    let (parent, exit_signal) = if has(CloneFlags::PARENT) {
        (maker.parent_pid(), maker.family.get().exit_signal)
    } else {
        (maker.pid, request.exit_signal)
    };
    let child = maker.child(pid, parent, exit_signal, shares);
    if has(CloneFlags::CLEAR_SIGHAND) {
        child.signals.borrow_mut().reset_handlers();
    }
    Ok(Arc::new(child))
}

/// A thread that nobody knows yet.
fn new_thread(request: &Request, tid: u32, process: Arc<Process>) -> Arc<Thread> {
    let maker = current();
    let mut frame = maker.frame().get();
    frame.rax = 0;
    frame.orig_rax = u64::MAX;
    frame.how = RETURN_FULL;
    if request.stack != 0 {
        frame.rsp = request.stack;
    }
    let has = |flags| request.flags.contains(flags);
    let thread = Thread::new(tid, process, frame);
    thread.name.set(maker.name.get());
    thread.scheduling.set(maker.scheduling.get().inherited());
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
