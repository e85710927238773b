//! System calls that make threads and processes: clone(2), fork(2), vfork(2).

use crate::args::{UserPtr, Word};
use crate::errno::{Errno, Result};
use crate::ipc::pidfd::NewPidFd;
use crate::platform::user::UserAddress;
use crate::task::clone::{CloneFlags, NewTask, Request};
use crate::task::current;
use crate::task::oom_killer;
use crate::task::signal::{SIGNAL_COUNT, Signal};

/// fork(2).
pub fn fork() -> Result<u32> {
    make(&Request::plain(CloneFlags::empty()), UserPtr::NULL)
}

/// vfork(2).
pub fn vfork() -> Result<u32> {
    make(&Request::plain(CloneFlags::VM | CloneFlags::VFORK), UserPtr::NULL)
}

/// clone(2).
pub fn clone(
    Word(flags_and_signal): Word,
    UserAddress(stack): UserAddress,
    parent_tid: UserPtr<u32>,
    child_tid: UserAddress,
    Word(tls): Word,
) -> Result<u32> {
    const SIGNAL_MASK: u64 = 0xff;
    let flags = CloneFlags::from_bits_truncate(flags_and_signal & !SIGNAL_MASK & 0xffff_ffff);
    // clone(2) takes any number; one that is no signal is not sent.
    let exit_signal = Signal::from_number((flags_and_signal & SIGNAL_MASK) as u32);
    let request = Request { flags, exit_signal, stack, parent_tid, child_tid, tls };
    // clone(2): the pidfd goes where the thread id would.
    make(&request, UserPtr::new(parent_tid.0))
}

/// `struct clone_args`, as far as all versions have it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct CloneArgs {
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
pub fn clone3(arguments: UserPtr<CloneArgs>, size: usize) -> Result<u32> {
    const OLDEST: usize = 64;
    if size < OLDEST {
        return Err(Errno::EINVAL);
    }
    let wanted = arguments.read_extensible(size)?;
    let flags = CloneFlags::from_bits(wanted.flags).ok_or(Errno::EINVAL)?;
    let stack = wanted.stack.checked_add(wanted.stack_size).ok_or(Errno::EINVAL)?;
    let stack_is_odd = (wanted.stack == 0) != (wanted.stack_size == 0);
    let has_no_signal = flags.intersects(CloneFlags::THREAD | CloneFlags::PARENT);
    if flags.intersects(CloneFlags::DETACHED | CloneFlags::INTO_CGROUP)
        || flags.contains(CloneFlags::SIGHAND | CloneFlags::CLEAR_SIGHAND)
        || stack_is_odd
        || wanted.exit_signal > SIGNAL_COUNT as u64
        || has_no_signal && wanted.exit_signal != 0
    {
        return Err(Errno::EINVAL);
    }
    if wanted.set_tid_size != 0 {
        return Err(Errno::EPERM);
    }
    let request = Request {
        flags,
        exit_signal: Signal::from_number(wanted.exit_signal as u32),
        stack,
        parent_tid: UserPtr::new(UserAddress(wanted.parent_tid)),
        child_tid: UserAddress(wanted.child_tid),
        tls: wanted.tls,
    };
    make(&request, UserPtr::new(UserAddress(wanted.pidfd)))
}

/// Makes the thread or process; its number. All that can fail comes before it is there.
fn make(request: &Request, pidfd_to: UserPtr<i32>) -> Result<u32> {
    let has = |flags| request.flags.contains(flags);
    if has(CloneFlags::PIDFD | CloneFlags::PARENT_SETTID) && pidfd_to.0 == request.parent_tid.0 {
        return Err(Errno::EINVAL);
    }
    let attempt = || {
        let task = NewTask::prepare(request)?;
        let new_pidfd = || NewPidFd::prepare(task.process().clone(), pidfd_to);
        let pidfd = has(CloneFlags::PIDFD).then(new_pidfd).transpose()?;
        Ok((task.publish()?, pidfd))
    };
    // A namespace whose first process could not be made takes no other one.
    let may_retry = current().process.pid_namespace_for_children.borrow_mut().init().is_some();
    let (child, pidfd) = if may_retry { oom_killer::retry(attempt) } else { attempt() }?;
    if has(CloneFlags::PARENT_SETTID) {
        // An address that cannot be written to does not fail the call.
        let _ = request.parent_tid.write(&child.number());
    }
    if let Some(pidfd) = pidfd {
        pidfd.install();
    }
    Ok(child.start())
}
