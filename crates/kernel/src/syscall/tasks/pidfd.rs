//! System calls on descriptors of processes (pidfd_open(2)).

use alloc::sync::Arc;

use crate::args::{Fd, Flags, PidNumber, SignalNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::OpenFlags;
use crate::ipc::pidfd::{PidFd, process_of};
use crate::state::kernel;
use crate::task::ids::{Pid, Tid};
use crate::task::ptrace::access;
use crate::task::signal::{self, SI_USER, SignalInfo, SignalRecord};
use crate::task::{Process, current_process};

/// The process that a pidfd or an open `/proc/PID` stands for (pidfd_send_signal(2)).
fn signalled(fd: Fd) -> Result<Arc<Process>> {
    let open = fd.file()?;
    match open.path.as_ref().and_then(|path| path.inode().process()) {
        Some(pid) => kernel().tasks.process(pid).ok_or(Errno::ESRCH),
        None => process_of(fd),
    }
}

/// pidfd_open(2).
pub fn pidfd_open(pid: PidNumber, Flags(flags): Flags) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if pid.0 <= 0 || !OpenFlags::NONBLOCK.contains(flags) {
        return Err(Errno::EINVAL);
    }
    let tasks = &kernel().tasks;
    let process = match tasks.process(Pid::from_caller(pid.0 as u32)) {
        Some(process) => process,
        // pidfd_open(2): of a thread that is not the main one.
        None if tasks.thread(Tid::from_caller(pid.0 as u32)).is_some() => {
            return Err(Errno::EINVAL);
        }
        None => return Err(Errno::ESRCH),
    };
    fd_table::install_new(Arc::new(PidFd { process }), flags | OpenFlags::CLOEXEC)
}

/// pidfd_send_signal(2).
pub fn pidfd_send_signal(
    fd: Fd,
    signal: SignalNumber,
    record: UserPtr<SignalRecord>,
    flags: u32,
) -> Result<()> {
    let signal = signal.or_probe()?;
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let process = signalled(fd)?;
    let own = current_process();
    // One that the caller has no number for (`access_pidfd_pidns` in kernel/signal.c).
    if !own.pid_namespace.includes(&process.pid_namespace) {
        return Err(Errno::EINVAL);
    }
    let info = match record.read_if_some()? {
        None => signal.map(|signal| SignalInfo::from_process(signal, SI_USER, &own)),
        Some(record) if record.number() != signal.map_or(0, |signal| signal.number()) => {
            return Err(Errno::EINVAL);
        }
        Some(record) if record.is_only_for_itself() && process.pid != own.pid => {
            return Err(Errno::EPERM);
        }
        Some(record) => signal.map(|signal| record.with_signal(signal).written_for(&process)),
    };
    if process.is_zombie() && kernel().tasks.process(process.pid).is_none() {
        return Err(Errno::ESRCH);
    }
    signal::check_permission(&process, signal)?;
    if let Some(info) = info {
        if info.code != SI_USER {
            signal::check_room(&process, None, info.signal)?;
        }
        signal::send_to_process(&process, info);
    }
    Ok(())
}

/// pidfd_getfd(2).
pub fn pidfd_getfd(pidfd: Fd, fd: Fd, Flags(flags): Flags) -> Result<i32> {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let process = process_of(pidfd)?;
    if process.is_zombie() {
        return Err(Errno::ESRCH);
    }
    access::check(&process)?;
    let file = process.files.borrow_mut().borrow_mut().get(fd.0)?;
    fd_table::install(file, OpenFlags::CLOEXEC)
}
